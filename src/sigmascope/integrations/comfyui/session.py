"""The watch of one ComfyUI process: its instruments, the prompt that runs, and the records of the last ones.

`start` puts the instruments on, once ComfyUI's own modules are there; `stop` takes them off. A prompt's record is made on
the host's thread, which alone may ask a device, once ComfyUI has told of the prompt's end, so that nobody waits for it.
Finding out what is to be said of it, writing and the log line happen on a thread of our own.
"""

import atexit
import json
import logging
import os
import queue
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict

from sigmascope.__about__ import __version__
from sigmascope.errors import SigmascopeError, WriteError
from sigmascope.files import atomic_path
from sigmascope.history.keeper import finish, keep
from sigmascope.history.live import announce, withdraw
from sigmascope.integrations.comfyui.instruments import Instrument, InstrumentStatus, kinds
from sigmascope.integrations.comfyui.one_line import line_of
from sigmascope.integrations.comfyui.recording import COMFYUI, PromptRecording
from sigmascope.integrations.comfyui.what_changed import Earlier
from sigmascope.integrations.process_recording import prompts_of
from sigmascope.integrations.watch_settings import Settings
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.publishing import publish
from sigmascope.monitor.recorder import with_findings
from sigmascope.probes.reading import describe
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run
from sigmascope.threads import hands_off, own_thread
from sigmascope.units import counted

_log = logging.getLogger("sigmascope")
SWITCH: Final = "SIGMASCOPE"
"""The environment variable that is "0" where nothing is to be watched."""
FOLDER: Final = "SIGMASCOPE_COMFYUI_RECORDS"
"""The environment variable that names a folder for records; else they lie in ComfyUI's user folder."""
KEPT: Final = 50
"""So many records of prompts stay, the last ones."""
STATUS_FILE: Final = "status.json"
"""Beside the records: what the last start found."""
PATTERN: Final = "sigmascope-prompt-*.json"
"""Of the records' files: sorted by name, they are sorted by time."""
_COSTS: Final = "costs"
_SHORT: Final = 8
_NO_ID: Final = re.compile("[^A-Za-z0-9-]")
_LAST_IN_MEMORY: Final = 20
_LONGEST_WAIT_SECONDS: Final = 10.0


class Status(TypedDict):
    """What a session says of itself."""

    sigmascope: str
    comfyui: str | None
    records: str | None
    instruments: list[InstrumentStatus]


class Session:
    """Watches every prompt of this process.

    Args:
        folder: For the records; None: they are not written.
        privacy: What is kept of prompts.
        keep_runs: Whether records go to the store of runs too.

    Attributes:
        instruments: All of them, on or off.
        last: The last records, the newest at the end.
        prompts: How many were recorded.
        listeners: Told of each record once it is kept, on a thread of ours, with its file if it has one.
    """

    def __init__(
        self, folder: Path | None, privacy: PromptPrivacy = "full", *, keep_runs: bool = True
    ) -> None:
        self.folder = folder
        self._keeps = keep_runs
        self.privacy: PromptPrivacy = privacy_of(privacy).name
        self.last: deque[Run] = deque(maxlen=_LAST_IN_MEMORY)
        self._guard = Guard(keeps_words=privacy_of(privacy).keeps_words)
        self._running: dict[str, PromptRecording] = {}
        self._live: dict[str, int | None] = {}
        self._over: deque[tuple[PromptRecording, int]] = deque()
        self._earlier = Earlier()
        self._remembers = False
        self._work: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.prompts = 0
        self.listeners: list[Callable[[Run, Path | None], None]] = []
        self.instruments: list[Instrument] = [kind(self) for kind in kinds()]

    def start(self) -> None:
        """Put on all instruments that fit. Raises nothing."""
        for instrument in self.instruments:
            instrument.start()
        on = sum(instrument.works for instrument in self.instruments)
        _log.info(
            "sigmascope %s: watching prompts (%d of %d instruments)", __version__, on, len(self.instruments)
        )
        if self.folder is not None:
            with suppress(OSError, WriteError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with atomic_path(self.folder / STATUS_FILE) as temporary:
                    temporary.write_text(json.dumps(self.status(), indent=1), encoding="utf-8")
            self._begin_thread()

    def stop(self) -> None:
        """Take all of them off, and finish what is to be written. Raises nothing."""
        self.finish()
        for instrument in reversed(self.instruments):
            instrument.stop()
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._work.put(None)
            thread.join(_LONGEST_WAIT_SECONDS)
        self._thread = None
        finish()

    def prompt_of(self, prompt_id: object) -> PromptRecording | None:
        """The prompt of this id, if it runs."""
        return self._running.get(str(prompt_id))

    @property
    def prompt(self) -> PromptRecording | None:
        """The prompt that runs; of several, as where a node runs another one, the one that began last."""
        return next(reversed(self._running.values()), None)

    def begin(self, prompt_id: str, graph: Any) -> None:
        """A prompt begins."""
        self.finish()
        prompt = PromptRecording(prompt_id, graph if isinstance(graph, Mapping) else {}, self.privacy)
        self._running[prompt_id] = prompt
        if self._keeps:
            self._live[prompt_id] = announce(prompt.recorder.progress)
        prompt.until_the_end(_COSTS, self._costs)
        for instrument in self.instruments:
            instrument.attempt(instrument.at_the_beginning)

    def abandon(self) -> None:
        """The prompts that run are not recorded to their ends, and what watches them ends: it may be on any thread."""
        while self._running:
            _, prompt = self._running.popitem()
            with suppress(Exception), hands_off():
                prompt.end()
        for prompt_id in tuple(self._live):
            withdraw(self._live.pop(prompt_id))

    def end(self, prompt_id: str, messages: Iterable[Any], error: BaseException | None) -> None:
        """A prompt is over. Its record is made by `finish`: now, if it ran within another, or if an error left ComfyUI.

        Args:
            prompt_id: ComfyUI's.
            messages: ComfyUI's status messages of it, each a name and a dict.
            error: What came out of ComfyUI itself, if anything did.
        """
        prompt = self._running.pop(prompt_id, None)
        if prompt is None:
            return
        withdraw(self._live.pop(prompt_id, None))
        for name, values in messages:
            if name == "execution_cached":
                prompt.cached |= frozenset(map(str, values.get("nodes", ())))
            elif name in ("execution_error", "execution_interrupted"):
                prompt.facts["stopped_by"] = {"node": values.get("node_id"), "how": name}
                prompt.failure = prompt.failure or _told_of(name, values)
        prompt.end(error)
        self._over.append((prompt, threading.get_ident()))
        if error is not None or self._running:
            self.finish()

    def finish(self) -> None:
        """Make the records of the prompts that are over. On another thread than the host's no device is asked."""
        while True:
            try:
                prompt, thread = self._over.popleft()
            except IndexError:
                return
            try:
                self._finish(prompt, asks_devices=threading.get_ident() == thread)
            except Exception as failure:  # noqa: BLE001 - the next prompts are recorded all the same
                _log.warning("sigmascope: a record was lost (%s)", describe(failure))

    def _finish(self, prompt: PromptRecording, *, asks_devices: bool) -> None:
        if asks_devices:
            for instrument in self.instruments:
                instrument.attempt(partial(instrument.at_the_end, prompt))
        prompt.facts["version"] = version()
        self._earlier.compare(prompt, version())
        before = prompt.until_the_end(_COSTS, self._costs)
        prompt.facts["watch"] = {
            name: {"calls": calls - before[name][0], "seconds": (nanoseconds - before[name][1]) / 1e9}
            for name, (calls, nanoseconds) in self._costs().items()
        }
        prompt.facts["instruments_off"] = {
            one.name: one.reason for one in self.instruments if not one.works and one.reason is not None
        }
        self.prompts += 1
        self._hand_over(prompt.run())

    def _costs(self) -> dict[str, tuple[int, int]]:
        """By instrument, how often code of ours ran for it so far, and what that took in nanoseconds."""
        return {one.name: (one.calls, one.nanoseconds) for one in self.instruments}

    def _hand_over(self, run: Run) -> None:
        self._begin_thread()
        self._work.put(run)

    def _begin_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = own_thread("prompts", self._keep_all)
            self._thread.start()

    def _keep_all(self) -> None:
        try:
            self._remember()
        except Exception as failure:  # noqa: BLE001 - records are to be kept all the same
            _log.warning("sigmascope: earlier records were not read (%s)", describe(failure))
        while (run := self._work.get()) is not None:
            try:
                self._keep(run)
            except Exception as failure:  # noqa: BLE001 - the next record is to be written all the same
                _log.warning("sigmascope: a record was lost (%s)", describe(failure))

    def _remember(self) -> None:
        """Know of the prompts whose records are there from an earlier process, the newest of each graph."""
        if self.folder is None or self._remembers:
            return
        self._remembers = True
        for path in sorted(self.folder.glob(PATTERN), reverse=True):
            with suppress(Exception):  # an older version's record, or one that is damaged, tells nothing
                self._earlier.remember(load_run(path))

    def _keep(self, run: Run) -> None:
        run = with_findings(run, self._guard)
        self.last.append(run)
        _log.info("sigmascope: %s", line_of(run))
        publish(run)
        if self._keeps:
            keep(run, "comfyui", lambda line: _log.warning("sigmascope: %s", line))
        path = None
        if self.folder is not None:
            try:
                path = _write(run, self.folder)
            except (
                OSError,
                SigmascopeError,
            ) as failure:  # reports are written elsewhere, and wait for no disk
                _log.warning("sigmascope: a record was not written (%s)", describe(failure))
        for listener in self.listeners:
            try:
                listener(run, path)
            except Exception as failure:  # noqa: BLE001 - the others are to hear of it all the same
                _log.warning("sigmascope: %s was not shown (%s)", run.name, describe(failure))

    def status(self) -> Status:
        """What is on, what is off and why."""
        return {
            "sigmascope": __version__,
            "comfyui": version(),
            "records": None if self.folder is None else str(self.folder),
            "instruments": [instrument.status() for instrument in self.instruments],
        }


def _told_of(how: str, values: Mapping[str, Any]) -> Exception:
    """An error as ComfyUI tells of it, where the one that was raised was not seen."""
    kind = values.get("exception_type") or (
        "InterruptProcessingException" if how == "execution_interrupted" else "Exception"
    )
    name = str(kind).rpartition(".")[2]
    made: Exception = type(name, (Exception,), {"__module__": "builtins"})(
        str(values.get("exception_message") or "")
    )
    return made


def _write(run: Run, folder: Path) -> Path:
    """Write a record into a folder, of which the last ones stay."""
    folder.mkdir(parents=True, exist_ok=True)
    started = datetime.fromisoformat(run.started_at).strftime("%Y%m%d-%H%M%S-%f")
    path = folder / f"sigmascope-prompt-{started}-{_short_id(run)}.json"
    run.save(path)
    with suppress(OSError):
        for old in sorted(folder.glob(PATTERN))[:-KEPT]:
            if old != path:  # which is the oldest by its name, where the clock was put back
                old.unlink()
    return path


def _short_id(run: Run) -> str:
    """The beginning of ComfyUI's id, for a file's name: whoever posts a prompt may choose it."""
    return _NO_ID.sub("_", run.facts[COMFYUI]["prompt_id"][:_SHORT])


def version() -> str | None:
    """ComfyUI's own, where it is running."""
    found = getattr(sys.modules.get("comfyui_version"), "__version__", None)
    return found if isinstance(found, str) else None


_session: Session | None = None


def start(
    folder: Path | None = None, privacy: str | None = None, *, keep_runs: bool = True
) -> Session | None:
    """Watch this process's prompts; a second time nothing. Raises nothing.

    Args:
        folder: For the records; None: as `SIGMASCOPE_COMFYUI_RECORDS` says, else in ComfyUI's user folder.
        privacy: What is kept of prompts; None: as `SIGMASCOPE_PROMPTS` says, else their text.
        keep_runs: Whether records go to the store of runs too; `SIGMASCOPE_KEEP=0` keeps none.

    Returns:
        The session; None: `SIGMASCOPE=0` switches it off, or it could not begin.
    """
    global _session
    if os.environ.get(SWITCH) == "0":
        return None
    if _session is None:
        try:
            kept = privacy_of(privacy or os.environ.get("SIGMASCOPE_PROMPTS") or "full").name
            session = Session(folder or records_folder(), kept, keep_runs=keep_runs)
            session.start()
        except Exception as failure:  # noqa: BLE001 - ComfyUI goes on unwatched
            _log.warning("sigmascope: prompts are not watched (%s)", describe(failure))
            return None
        _session = session
        atexit.register(stop)
    return _session


def current() -> Session | None:
    """The session that `start` began, while it lasts."""
    return _session


def stop() -> None:
    """End the watch that `start` began."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.stop()
        atexit.unregister(stop)


def begin_in_process(
    settings: Settings, folder: str, say: Callable[[str], None]
) -> Callable[[], None] | None:
    """Watch the prompts of the process that `sigmascope watch main.py` launched.

    Args:
        settings: `output` names a folder for the records, `prompts` what is kept of prompts.
        folder: Where relative paths begin.
        say: Tells the user a line.

    Returns:
        What ends it and says where the records are; None: prompts are not watched.
    """
    records = None if settings.output is None else Path(folder, settings.output)
    session = start(records, prompts_of(settings), keep_runs=settings.keep != "0")
    if session is None:
        return None

    def end() -> None:
        stop()
        say(f"{counted(session.prompts, 'prompt was', 'prompts were')} recorded in {session.folder}")

    return end


def records_folder() -> Path | None:
    """Where records of prompts go; None: ComfyUI does not say where its user's files lie."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    folders = sys.modules.get("folder_paths")
    return None if folders is None else Path(folders.get_user_directory()) / "sigmascope"
