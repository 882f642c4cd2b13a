"""The watch of a whole process, and what is left of it: a record, a summary, a trace.

What is known so far is written now and then, in case the program is killed before its end (`PeriodicSaver`). Of a process that
lives long the record holds the last generations. Those before them go to files of their own (`OlderGenerations`).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.files import SEPARATORS
from sigmascope.history.keeper import finish, keep
from sigmascope.history.live import announce, withdraw
from sigmascope.integrations.imports import ImportTimes
from sigmascope.integrations.watch_settings import Settings
from sigmascope.probes.host import place_in_group
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.records.run import KEEP_GENERATIONS, Run
from sigmascope.threads import own_thread, start_thread

SECONDS: Final = 10.0
"""Least time between two writes of the record."""
_LEAST_PERIODS_OF_A_WRITE: Final = 50
"""Writes are at least this many times as far apart as one takes."""
MOST_PARTS: Final = 10
"""How many files of earlier generations stay, the last ones."""
_SPARE: Final = 3
"""At most this many times the generations to keep wait for a file; of any more, only sums are kept."""


WHAT_TO_WRITE: Final = "If a loop of your own generates, name what denoises and decodes in it: with sigmascope.watch(unet, vae) as run: …"


class Recording:
    """An open watch of every pipeline in the process.

    Args:
        settings: How to watch, and where the result goes.
        folder: Where relative paths begin: that in which the program started.
        say: Tells the user a line.
        is_child: Whether this is a child that the program forked, or multiprocessing started for it; its files have
            the process in their names.
        times: What imports have taken since the process started, where the record begins; None: it begins now.
        about_children: What to say of child processes that did the work; empty where none did.
    """

    def __init__(
        self,
        settings: Settings,
        folder: str,
        say: Callable[[str], None],
        *,
        is_child: bool = False,
        times: ImportTimes | None = None,
        about_children: Callable[[], str] = str,
    ) -> None:
        from sigmascope import watch

        self._settings = settings
        self._say = say
        self._about_children = about_children
        self._record_path = _own_path(record_path(settings.output, folder), is_child)
        self._trace_path = (
            None if settings.trace is None else _own_path(Path(folder, settings.trace), is_child)
        )
        kept = kept_of(settings)
        self._watch: Any = watch(
            prompts=prompts_of(settings),
            name=settings.name or program(),
            sample_hz=sample_hz_of(settings),
            step_memory=settings.step_memory is None or settings.is_on("step_memory"),
            keep_generations=kept,
            thumbnails=settings.is_on("thumbnails"),
            stacks=settings.is_on("stacks"),
            keep_run=False,  # the record of the process is kept at its end
        )
        self._watch.__enter__()
        self._times = times
        try:
            if times is not None:
                self._watch.begin_at(times.began_ns)
                times.is_over = self._watch.has_stages
            self._watch.hold_back(_SPARE * kept)
            self._older = OlderGenerations(self._watch.take_older, self._record_path)
            self._saver = PeriodicSaver(
                self._record_so_far, self._record_path, before=lambda: self._older.write(kept)
            )
            self._saver.start()
            self._live = None if settings.keep == "0" else announce(self._watch.progress)
        except BaseException as failure:  # a watch whose record nobody writes would stay for good
            self._watch.__exit__(type(failure), failure, None)
            raise

    def _record_so_far(self) -> Run:
        self._note_imports()
        run: Run = self._watch.record()
        return run

    def _note_imports(self) -> None:
        if self._times is not None:
            with suppress(Exception):
                self._watch.note_imports(self._times.seconds_before)

    def end(self) -> None:
        """Close the watch, print the summary, write the record."""
        error = unhandled()
        try:
            try:
                withdraw(self._live)
                self._saver.stop()
                self._watch.hold_back(0)
                with suppress(Exception):  # the record comes first, and says why nothing can be written
                    self._older.write()
                self._note_imports()
            finally:  # after Ctrl-C too
                self._watch.__exit__(None if error is None else type(error), error, None)
            self._report(self._watch.record())
        finally:
            if type(error) is KeyboardInterrupt:
                _remember_interrupt()

    def _report(self, run: Run) -> None:
        if run.stages:
            self._show(run)
            self._write("record", self._record_path, run.save)
            if self._trace_path is not None:
                self._write("trace", self._trace_path, run.to_trace)
            if self._settings.keep != "0":
                keep(run, "process", self._say)
                finish()
        elif self._settings.launched:
            self._say(
                "there was nothing to watch: no pipeline was called and no stage was opened."
                + (self._about_children() or f" {WHAT_TO_WRITE}")
            )

    def _write(self, what: str, path: Path, write: Callable[[Path], object]) -> None:
        try:
            write(path)
        except SigmascopeError as error:
            self._say(f"the {what} was not written: {error}")
        else:
            self._say(f"the {what} is in {path}")
            if what == "record" and self._older.written:
                self._say(f"earlier generations are in {self._older.folder}")

    def _show(self, run: Run) -> None:
        with suppress(OSError, ValueError):  # what the program wrote comes before what we say of it
            sys.stdout.flush()
        if not self._settings.is_on("quiet") and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):
                run.print(Console(file=sys.__stderr__), full=self._settings.is_on("full"))


def _own_path(path: Path, is_child: bool) -> Path:
    """A name that the parent and its other children do not use, nor the other ranks of a launch."""
    process_id, place = str(os.getpid()), place_in_group()
    if place is not None and process_id not in path.stem:
        path = path.with_stem(f"{path.stem}-rank{place['rank']}")
    return path.with_stem(f"{path.stem}-{process_id}") if is_child and process_id not in path.stem else path


def record_path(output: str | None, folder: str) -> Path:
    """The file for the record: a name with program, time and process, unless one is given."""
    path = Path(folder, output or "")
    if path.is_dir() or (output or "").endswith(SEPARATORS):
        now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        return path / f"sigmascope-{program()}-{now}-{os.getpid()}.json"
    return path


def program() -> str:
    """What runs, in a word: the script's or the module's name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name.removesuffix(".__main__"))
    return Path(getattr(main, "__file__", None) or "python").stem


def prompts_of(settings: Settings) -> PromptPrivacy:
    """What is kept of prompts.

    Raises:
        ConfigError: The environment names a privacy that does not exist.
    """
    value = settings.prompts or "full"
    return privacy_of(value, f"SIGMASCOPE_PROMPTS={value}").name


def sample_hz_of(settings: Settings) -> float:
    """How often memory is looked at.

    Raises:
        ConfigError: The environment's value is not a number above 0.
    """
    with suppress(ValueError):
        if 0 < (value := float(settings.sample_hz or "10")) < float("inf"):
            return value
    text = f"SIGMASCOPE_SAMPLE_HZ={settings.sample_hz} is not a number above 0."
    raise ConfigError(text, hint="Choose one from 0.1 to 10.")


def kept_of(settings: Settings) -> int:
    """How many generations the record holds in full.

    Raises:
        ConfigError: The environment's value is not a whole number above 0.
    """
    with suppress(ValueError):
        if (value := int(settings.keep_generations or KEEP_GENERATIONS)) > 0:
            return value
    text = f"SIGMASCOPE_KEEP_GENERATIONS={settings.keep_generations} is not a whole number above 0."
    raise ConfigError(text, hint=f"Choose one such as {KEEP_GENERATIONS}.")


class OlderGenerations:
    """Files of generations that are no longer in the record, each written once: `run.parts/0001.json` and so on."""

    def __init__(self, take_older: Callable[[int], Run | None], record_path: Path) -> None:
        self._take_older = take_older
        self.folder = record_path.with_suffix(".parts")
        self.written = 0

    def write(self, least: int = 1) -> None:
        """Write the generations that the record keeps no longer, if they are at least this many.

        Raises:
            WriteError: It cannot be written. Only the sums of these generations stay then.
        """
        part = self._take_older(least)
        if part is None:
            return
        part.save(self._file(self.written + 1))
        self.written += 1
        with suppress(OSError):
            for path in self._not_wanted():
                path.unlink()

    def _not_wanted(self) -> list[Path]:
        """All but the last files; with the first file all others, which are of an earlier run whose record is replaced."""
        wanted = range(max(1, self.written - MOST_PARTS + 1), self.written + 1)
        return [path for path in self.folder.glob("*.json") if path not in {*map(self._file, wanted)}]

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:04}.json"


class PeriodicSaver:
    """Writes the record now and then on a thread of its own, which ends with the process."""

    def __init__(
        self,
        record: Callable[[], Run],
        path: Path,
        seconds: float = SECONDS,
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._record = record
        self._path = path
        self._seconds = seconds
        self._before = before
        self._stop = threading.Event()
        self._thread = own_thread("keeper", self._work)

    def start(self) -> None:
        """Start the thread. If the system gives none, nothing is saved before the end."""
        with suppress(RuntimeError):
            start_thread(self._thread, self._stop)

    def stop(self) -> None:
        """Stop writing; on return no write is in progress."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def keep(self) -> None:
        """Write what is known now, if there is anything. A failure is reported at the end."""
        with suppress(Exception):
            self._before()
        with suppress(Exception):
            run = self._record()
            if run.stages:
                run.save(self._path)

    def _work(self) -> None:
        pause = self._seconds
        while not self._stop.wait(pause):
            began = time.perf_counter()
            self.keep()
            pause = max(self._seconds, _LEAST_PERIODS_OF_A_WRITE * (time.perf_counter() - began))


def unhandled() -> BaseException | None:
    """The exception that ended the program, which Python leaves in `sys`; None if none did.

    Consoles leave there the errors that they showed, which did not end the program: their tracebacks do not begin at
    the outermost call.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return None
    trace = error.__traceback__
    return error if trace is None or trace.tb_frame.f_back is None else None


def _remember_interrupt() -> None:
    """Let Python die of SIGINT, as it does after Ctrl-C that nobody caught.

    It remembers such a Ctrl-C until text is executed, and many modules do that while they are imported.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
