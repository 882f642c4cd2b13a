"""Keeps the runs of this process in the store, on a thread of its own: what is watched never waits for a database.

A run that the store does not take is written as JSON beside it, and one line says so; `sigmascope runs import` takes it
in. At the end of the process its last runs are waited for, but not for long.
"""

import atexit
import os
import queue
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Final

from sigmascope.errors import SigmascopeError, StoreError
from sigmascope.files import without_home
from sigmascope.history.location import KEEP, is_kept, store_url, unkept_folder
from sigmascope.records.run import Run
from sigmascope.records.serialization import save_run
from sigmascope.threads import (
    ForkFirst,
    importing,
    is_fork_waiting,
    let_forks_pass,
    own_thread,
    unforked,
    was_forked_amid,
)

if TYPE_CHECKING:
    from sigmascope.history.store import Store

LONGEST_WAIT_SECONDS: Final = 15.0
"""At the end of the process."""
LONGEST_WAIT_OF_WORKERS_SECONDS: Final = 2.0
"""Of a process that may be ended once its work is done; once it took longer, it waits no more."""
_BESIDE_EARLIER: Final = ("watch", "process")
"""Whose runs are compared with earlier ones as they come. A prompt of ComfyUI runs what its cache lacks, and is compared there."""
_MODULES: Final = ("sqlalchemy", "sigmascope.history.store", "sigmascope.history.own_history")
"""What a store takes, one after another, so that a fork waits for one of them at most."""
_IMPORT: Final = "sigmascope runs import takes it in"
Say = Callable[[str], None]
_Waiting = tuple[Run, str, Say, str]
"""A run, what made it, who tells the user, and the store's URL."""


def keep(run: Run, source: str, say: Say) -> None:
    """Let a run be kept, unless the environment says that none is. Returns at once, and raises nothing.

    Args:
        run: One that is over.
        source: What made it, such as "watch".
        say: Tells the user a line: the first time where runs are kept, and what went wrong.
    """
    if not is_kept():
        return
    with suppress(Exception):  # a guest: the host goes on, whatever is the matter
        keeper = _keeper_of_process()
        keeper.take(run, source, say)
        if source == "watch" and _may_be_ended():
            keeper.wait_a_moment()


def _may_be_ended() -> bool:
    """Whether this process may be ended by a signal as soon as it has given its result, as `with Pool()` ends its workers."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.current_process().daemon


def finish() -> None:
    """Wait until all runs of this process are kept, at most `LONGEST_WAIT_SECONDS`."""
    keeper = _keeper
    if keeper is not None:
        keeper.finish()


def keep_all(runs: Sequence[Run], source: str, say: Say) -> None:
    """Keep runs here and now, if runs are kept. What the store does not take is told as in `keep`."""
    if is_kept():
        with Keeper() as keeper:
            for run in runs:
                keeper.write(run, source, say, store_url())


class Keeper:
    """Keeps runs of one process, one after another. Where none waits there is no thread, and no file is open."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._under_way: _Waiting | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting = 0
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_slow = False
        self._told: set[str] = set()
        self._told_where: set[str] = set()
        self._opened: tuple[str, ExitStack, "Store"] | None = None

    @property
    def has_open(self) -> bool:
        """Whether a store is open."""
        return self._opened is not None

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self, run: Run, source: str, say: Say) -> None:
        """Keep a run soon; now, where the system gives no thread any more."""
        with self._lock:
            self._waiting += 1
            self._is_idle.clear()
            self._work.put((run, source, say, store_url()))
            if self._thread is not None:
                return
            self._thread = own_thread("history", self._write_all)
            try:
                self._thread.start()
                return
            except RuntimeError:  # Python is ending
                self._thread = None
        self._write_all()

    def wait_a_moment(self) -> None:
        """Wait until all is kept, unless that took too long before."""
        if not self._is_slow:
            self._is_slow = not self._is_idle.wait(LONGEST_WAIT_OF_WORKERS_SECONDS)

    def finish(self) -> None:
        """Wait until all is kept. What is not by then is written as JSON by whom waited, also the run that is being kept."""
        if self._is_idle.wait(LONGEST_WAIT_SECONDS):
            return
        under_way = self._under_way
        if under_way is not None:
            run, _, say, url = under_way
            self._write_beside(run, say, url)
        with suppress(queue.Empty):
            while True:
                run, _, say, url = self._work.get_nowait()
                self._write_beside(run, say, url)
                self._one_less()

    def _write_all(self) -> None:
        """Keep all that waits; the thread ends with the last of it."""
        is_last = False
        with unforked():
            while not is_last:
                self._under_way = self._work.get()
                self.write(*self._under_way)
                self._under_way = None
                is_last = self._one_less()
                self._let_forks_pass()

    def _one_less(self) -> bool:
        """Whether nothing waits any more."""
        with self._lock:
            self._waiting -= 1
            if self._waiting > 0:
                return False
            self._close()
            self._thread = None
            self._is_idle.set()
            return True

    def _let_forks_pass(self) -> None:
        """Close the store for who wants to fork; a child that had it open could never use it."""
        if is_fork_waiting():
            self._close()
            let_forks_pass()

    def write(self, run: Run, source: str, say: Say, url: str) -> None:
        """Keep a run, or write it beside the store. Raises nothing."""
        try:
            is_new = self._add(run, source, say, url)
            if is_new and source in _BESIDE_EARLIER:
                self._let_forks_pass()
                self._compare(self._open(url), run, say)
        except Exception as failure:  # noqa: BLE001 - whatever is wrong with the store costs no run
            self._close()
            told = failure.message if isinstance(failure, SigmascopeError) else None
            reason = told or f"{type(failure).__name__}: {failure}"
            self._write_beside(run, say, url, reason)

    def _add(self, run: Run, source: str, say: Say, url: str) -> bool:
        """Whether the run was not there. Who wants to fork need not wait until the store's lock is free."""
        until = time.monotonic() + LONGEST_WAIT_SECONDS
        while True:
            try:
                store = self._open(url)
                if store.is_new:
                    self._tell(say, f"runs are kept in {without_home(store.name)}; {KEEP}=0 keeps none")
                return store.add(run, source, prune=True)
            except ForkFirst:
                self._let_forks_pass()
                if time.monotonic() > until:
                    raise StoreError(
                        "The store of runs is locked by another process.", hint="Try again once that is done."
                    ) from None

    def _compare(self, store: "Store", run: Run, say: Say) -> None:
        """Say what is odd about a run that is kept, beside those like it before."""
        with suppress(Exception):  # the run is kept
            from sigmascope.history.own_history import beside_earlier

            line = beside_earlier(store, store.kept(run), run)
            if line is not None:
                self._tell(say, line)

    def _open(self, url: str) -> "Store":
        if self._opened is not None and self._opened[0] == url:
            return self._opened[2]
        self._close()
        if was_forked_amid():
            raise StoreError(
                "The store of runs was open when this process was forked.", hint="Start it anew."
            )
        for module in _MODULES:
            with importing():
                import_module(module)
            self._let_forks_pass()
        from sigmascope.history.store import open_store

        stack = ExitStack()
        self._opened = (url, stack, stack.enter_context(open_store(url)))
        return self._opened[2]

    def _close(self) -> None:
        if self._opened is not None:
            stack, self._opened = self._opened[1], None
            with suppress(Exception):
                stack.close()

    def _write_beside(self, run: Run, say: Say, url: str, reason: str | None = None) -> None:
        """Write a run as JSON, and say why; no reason: the time was up, which is news only where nothing was said yet."""
        is_late = reason is None
        reason = " ".join((reason or "keeping the last runs took too long").split()).rstrip(".")
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}.json"
        refused = ""
        for folder in _unkept_folders(url):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _require_own(folder)
                save_run(run, folder / name)
            except (OSError, SigmascopeError, TypeError) as failure:
                refused = str(failure)
            else:
                line = f"{reason}; the run is in {without_home(str(folder))}, and {_IMPORT}"
                break
        else:
            line = f"{reason}; the run was not kept ({refused})"
        is_known = is_late and url in self._told_where  # by now
        self._told_where.add(url)
        if not is_known:
            self._tell(say, line)

    def _tell(self, say: Say, line: str) -> None:
        """Say a line once."""
        if line not in self._told:
            self._told.add(line)
            with suppress(Exception):
                say(line)


def unkept_files() -> list[Path]:
    """Records that the store did not take, the oldest first."""
    found: list[Path] = []
    for folder in _unkept_folders(store_url()):
        with suppress(OSError):  # it is not there, or another user's
            _require_own(folder)
            found += sorted(folder.glob("*.json"))
    return found


def _require_own(folder: Path) -> None:
    """Refuse a folder that another user made where everybody may: they would be given the run, or plant one.

    Raises:
        OSError: It is not there, or not this user's.
    """
    facts = folder.lstat()
    is_shared = folder.parent == Path(gettempdir())
    if (
        is_shared
        and hasattr(os, "getuid")
        and (facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode))
    ):
        raise PermissionError(f"{folder} belongs to another user")


def _unkept_folders(url: str) -> tuple[Path, Path]:
    """Beside the store, and where that cannot be written."""
    user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return unkept_folder(url), Path(gettempdir(), f"sigmascope-{user}.unkept")


_of_parents: Final[list[Keeper]] = []
"""Keepers whose stores this process must neither use nor close: its parent had them open for longer than a fork waits."""
_keeper: Keeper | None = None
_making = threading.Lock()


def _keeper_of_process() -> Keeper:
    global _keeper
    with _making:
        if _keeper is None:
            _keeper = Keeper()
            atexit.register(finish)
            util = sys.modules.get("multiprocessing.util")
            if util is not None:  # its children leave without `atexit`
                util.Finalize(None, finish, exitpriority=0)
        return _keeper


def _begin_anew() -> None:
    """A child that was forked has none of its parent's threads, and perhaps a lock that nobody will open."""
    global _keeper, _making
    if _keeper is not None and _keeper.has_open:
        _of_parents.append(_keeper)
    _keeper, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
