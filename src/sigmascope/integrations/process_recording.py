"""The watch of a whole process, and what is left of it: a record, a summary, a trace.

What is known so far is written now and then, in case the program is killed before its end (`Keeper`).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from rich.console import Console

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Run

if TYPE_CHECKING:
    from sigmascope.integrations.autostart import Settings

SEPARATORS: Final = tuple(filter(None, (os.sep, os.altsep)))
"""What the name of a folder may end with: on Windows there are two."""
SECONDS: Final = 10.0
"""Between two times that the record is written, at least."""
_SHARE: Final = 50
"""A record that takes long to write is written seldom: this many times as long apart."""


class Recording:
    """An open watch of every pipeline in the process.

    Args:
        settings: How to watch, and where the result goes.
        folder: Where relative paths begin: that in which the program started.
        say: Tells the user a line.
        is_child: Whether this is a child that the program forked, or multiprocessing started for it; its files have
            the process in their names.
    """

    def __init__(
        self, settings: "Settings", folder: str, say: Callable[[str], None], *, is_child: bool = False
    ) -> None:
        from sigmascope import watch

        self._settings = settings
        self._say = say
        self._record_path = _own_path(record_path(settings.output, folder), is_child)
        self._trace_path = (
            None if settings.trace is None else _own_path(Path(folder, settings.trace), is_child)
        )
        self._watch: Any = watch(
            prompts=privacy_of(settings),
            name=settings.name or program(),
            sample_hz=sample_hz_of(settings),
            step_memory=settings.says("step_memory"),
        )
        self._watch.__enter__()
        self._keeper = Keeper(self._watch.record, self._record_path)
        self._keeper.start()

    def end(self) -> None:
        """Close the watch, print the summary, write the record."""
        error = unhandled()
        try:
            self._keeper.stop()
            self._watch.__exit__(None if error is None else type(error), error, None)
            self._tell(self._watch.record())
        finally:
            if type(error) is KeyboardInterrupt:
                _remember_interrupt()

    def _tell(self, run: Run) -> None:
        if run.stages:
            self._show(run)
            self._write("record", self._record_path, run.save)
            if self._trace_path is not None:
                self._write("trace", self._trace_path, run.to_trace)
        elif self._settings.launched:
            self._say("nothing was there to watch: no pipeline was called and no stage was opened.")

    def _write(self, what: str, path: Path, write: Callable[[Path], object]) -> None:
        try:
            write(path)
        except SigmascopeError as error:
            self._say(f"the {what} is not written: {error}")
        else:
            self._say(f"the {what} is in {path}")

    def _show(self, run: Run) -> None:
        with suppress(OSError, ValueError):  # what the program wrote comes before what we say of it
            sys.stdout.flush()
        if not self._settings.says("quiet") and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):
                run.print(Console(file=sys.__stderr__))


def _own_path(path: Path, is_child: bool) -> Path:
    """A name that the parent and its other children do not use."""
    own = str(os.getpid())
    return path.with_stem(f"{path.stem}-{own}") if is_child and own not in path.stem else path


def record_path(output: str | None, folder: str) -> Path:
    """The file for the record: a name with program, time and process, unless one is given.

    Args:
        output: A file, or a folder to put such a name in.
        folder: Where relative paths begin.
    """
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


def privacy_of(settings: "Settings") -> PromptPrivacy:
    """What is kept of prompts.

    Raises:
        ConfigError: The environment says something else than the three.
    """
    told = settings.prompts or "full"
    if told not in get_args(PromptPrivacy):
        raise ConfigError(f"SIGMASCOPE_PROMPTS={told} does not exist.", hint="Choose full, hash or none.")
    return cast(PromptPrivacy, told)


def sample_hz_of(settings: "Settings") -> float:
    """How often memory is looked at.

    Raises:
        ConfigError: The environment gives no number above 0.
    """
    told = settings.sample_hz or "10"
    with suppress(ValueError):
        if 0 < float(told) < float("inf"):
            return float(told)
    raise ConfigError(f"SIGMASCOPE_SAMPLE_HZ={told} is no number above 0.", hint="Choose one from 0.1 to 10.")


class Keeper:
    """Writes the record now and then on a thread of its own, which ends with the process.

    Args:
        record: Gives the run as it is now.
        path: Where it goes.
        seconds: How long to wait between two times, at least.
    """

    def __init__(self, record: Callable[[], Run], path: Path, seconds: float = SECONDS) -> None:
        self._record = record
        self._path = path
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sigmascope-keeper", daemon=True)

    def start(self) -> None:
        """Begin. Without a thread to be had, nothing is kept before the end."""
        with suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        """Write no more; at return nothing is being written."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def keep(self) -> None:
        """Write what is known now, if there is anything. A failure is for the end to tell."""
        with suppress(Exception):
            run = self._record()
            if run.stages:
                run.save(self._path)

    def _work(self) -> None:
        pause = self._seconds
        while not self._stop.wait(pause):
            began = time.perf_counter()
            self.keep()
            pause = max(self._seconds, _SHARE * (time.perf_counter() - began))


def unhandled() -> BaseException | None:
    """The exception that ended the program, which Python leaves in `sys`; None if none did.

    Consoles leave there what they showed. That went no further than to them, so that its traceback does not begin with
    the first of all calls.
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
