"""Where a watched program's own Python code is while no step runs: its stacks, looked at some twenty times a second.

`StackSampler` is a thread of ours that reads the stack of each watched thread and folds it at once into seconds by
place: the innermost function of the program's own code, with its line, or else the outermost of a library's. No frame
is kept from one look to the next, and the number of places is bounded.

A look is taken seldom enough to cost less than a hundredth of the time. Its cost is in the record.

It is our own since pyinstrument 5.1 works through `sys.setprofile`: it takes the place of the host's own profile function, drops it
at the end, and sees no other thread. At the same 20 samples a second it also costs a small pipeline 21 % of its processor
time, and code of many short calls four times its time (this sampler: 0 %).
"""

import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import FrameType
from typing import Final, NamedTuple, TypeAlias

from sigmascope.monitor.guard import Guard, as_json
from sigmascope.monitor.scope import Clock, Scope
from sigmascope.records.performance import (
    AFTER,
    BEFORE,
    BETWEEN,
    IMPORT,
    OUTSIDE_STAGES,
    HostPlace,
    HostStacks,
)
from sigmascope.threads import own_thread

STACKS: Final = "stacks"
"""The instrument's name, under which a failure is noted."""
_PERIOD_SECONDS: Final = 0.05
"""Each look takes the interpreter from the program, which costs a loop of Python more than the look itself: 0.3 % of its
time at 20 looks a second, over 1 % at 40 (`benchmarks/watch_overhead.py`)."""
_LONGEST_SECONDS: Final = 1.0
_COST_SHARE: Final = 0.005
"""Of the time, half of what a look may take: the other half is for threads that are woken for it."""
_JOIN_SECONDS: Final = 1.0
_STARVED_PERIODS: Final = 2
"""Periods: a look that came later waited for the interpreter, which something held."""
_MOST_PLACES: Final = 2000
_MOST_FUNCTIONS_RECORDED: Final = 20
"""Functions in the record for each part of the time."""
_MOST_FILES: Final = 4096
_PACKAGE: Final = PurePath(__file__).parents[1]
_WATCHING: Final = ("analysis", "integrations", "monitor", "probes", "records", "stages")
"""Rooms that work for the watch. The others are a library to the program."""
_DOORS: Final = (
    "integrations/asgi.py",
    "monitor/hooks.py",
    "monitor/performance.py",
)
"""What runs around the program's own calls."""
_IMPORTING: Final = "integrations/imports.py"
"""What hears of imports runs around them; they are the program's own."""
_WRAPPERS: Final = frozenset(
    {"_call_impl", "_wrapped_call_impl", "decorate_context", "inner", "wrapped", "wrapper"}
)
"""What libraries put around functions says nothing of them."""
_WAITING: Final = ("threading.py", "queue.py", "concurrent/futures/", "asyncio/", "selectors.py")
"""Of the standard library: where one thread waits for another."""


class Place(NamedTuple):
    """Where time went: a part of the run, and a line of code; no file where places are no longer told apart."""

    stage: str
    part: str
    function: str = ""
    file: str = ""
    line: int = 0
    in_thread: bool = False


Line: TypeAlias = tuple[str, str, int]
"""Function, file and line."""
Table: TypeAlias = defaultdict[Place, list[float]]
"""Seconds and samples of each place."""


class StackSampler:
    """Looks at the threads that have stages open; where none is, at the one that began the watch.

    Args:
        guard: Of the recorder.
        clock: Monotonic nanoseconds.
    """

    def __init__(self, guard: Guard, clock: Clock) -> None:
        self._guard = guard
        self._clock = clock
        self._process_id = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._home = 0
        self._open: list[Scope] = []
        self._outermost = 0
        self._idle_since_ns = 0
        self._last_ns = 0
        self._began_ns = 0
        self._ended_ns: int | None = None
        self._samples = 0
        self._cost_ns = 0
        self.period_seconds = _PERIOD_SECONDS
        self._seconds: Table = defaultdict(_nothing_yet)
        # Time outside all stages since the last one: whether another follows is not known yet.
        self._later: Table = defaultdict(_nothing_yet)
        self._later_of = 0

    def start(self) -> None:
        """Look at the calling thread, and at all that open stages, from now on."""
        if self._thread is not None or not self._guard.works(STACKS):
            return
        self._home = threading.get_ident()
        self._began_ns = self._last_ns = self._idle_since_ns = self._clock()
        self._ended_ns = None
        self._stop = threading.Event()
        thread = self._thread = own_thread("stacks", _work, weakref.ref(self), self._stop)
        self._guard.call(STACKS, thread.start)

    def stop(self) -> None:
        """Stop looking; on return the thread has ended. A forked child never had it."""
        thread = self._thread
        if thread is not None and os.getpid() == self._process_id:
            self._stop.set()
            self._ended_ns = self._clock()
            if thread.is_alive():
                thread.join(_JOIN_SECONDS)
        self._thread = None  # last: Ctrl-C may break off what is above

    def opened(self, scope: Scope) -> None:
        """Note a stage that the calling thread has just opened."""
        self._open.append(scope)
        self._outermost += scope.is_outermost

    def closed(self, scope: Scope) -> None:
        """Note that the stage is over."""
        if scope in self._open:
            self._open.remove(scope)
            if not self._open:
                self._idle_since_ns = self._clock()

    def freeze(self) -> Mapping[str, object] | None:
        """What was seen so far, as JSON values; None: nothing."""
        if not self._samples:
            return None
        after = AFTER if self._outermost == self._later_of else BETWEEN
        later = {place._replace(stage=after): sums for place, sums in dict(self._later).items()}
        whole = (self._clock() if self._ended_ns is None else self._ended_ns) - self._began_ns
        stacks = HostStacks(
            samples=self._samples,
            cost_seconds=self._cost_ns / 1e9,
            cost_share=self._cost_ns / max(whole, 1),
            places=tuple(_by_function(_sum_of(dict(self._seconds), later))),
        )
        plain: Mapping[str, object] = as_json(stacks)
        return plain

    def look(self) -> None:
        """Fold where the threads are now."""
        now_ns = self._clock()
        elapsed_ns, self._last_ns = now_ns - self._last_ns, now_ns
        self._look(now_ns, elapsed_ns)
        self._samples += 1

    def pay(self, nanoseconds: int) -> None:
        """Note what all looks have cost so far, and space the next ones accordingly."""
        self._cost_ns = nanoseconds
        wanted = nanoseconds / max(self._samples, 1) / 1e9 / _COST_SHARE
        self.period_seconds = min(max(_PERIOD_SECONDS, wanted), _LONGEST_SECONDS)

    def failed(self, failure: Exception) -> None:
        """Stop looking, for this reason."""
        self._guard.switch_off(STACKS, failure)

    def _look(self, now_ns: int, elapsed_ns: int) -> None:
        innermost: dict[int, Scope] = {}
        for scope in tuple(self._open):
            innermost[scope.thread_id] = scope
        if not innermost:
            self._look_outside(now_ns, elapsed_ns)
            return
        for thread, scope in innermost.items():
            if scope.in_step:
                continue
            last_step_ns = scope.columns.last_ended_ns()
            part = "stage" if last_step_ns is None else "between steps"
            seconds = self._weight(elapsed_ns, now_ns - (last_step_ns or scope.started_ns))
            self._add(self._seconds, thread, frozenset(innermost), scope.path, part, seconds)

    def _look_outside(self, now_ns: int, elapsed_ns: int) -> None:
        if self._later_of != self._outermost:
            for place, (seconds, samples) in self._later.items():
                _count(self._seconds, place._replace(stage=BETWEEN), seconds, samples)
            self._later = defaultdict(_nothing_yet)
            self._later_of = self._outermost
        table = self._later if self._outermost else self._seconds
        seconds = self._weight(elapsed_ns, now_ns - self._idle_since_ns)
        self._add(
            table,
            self._home,
            frozenset({self._home}),
            AFTER if self._outermost else BEFORE,
            OUTSIDE_STAGES,
            seconds,
        )

    def _weight(self, elapsed_ns: int, since_ns: int) -> float:
        """Seconds that a sample stands for: since the last one; where the interpreter was held, of this part at most."""
        period = self.period_seconds
        elapsed = elapsed_ns / 1e9
        return elapsed if elapsed <= _STARVED_PERIODS * period else min(elapsed, max(since_ns / 1e9, period))

    def _add(
        self,
        table: Table,
        thread: int,
        watched: frozenset[int],
        stage: str,
        part: str,
        seconds: float,
    ) -> None:
        lines, in_thread = _lines_of(thread, watched)
        for line in lines:
            _count(table, Place(stage, part, *line, in_thread), seconds / len(lines))


def _work(reference: "weakref.ref[StackSampler]", stop: threading.Event) -> None:
    """The thread. Between two looks it keeps nothing, so that a sampler that nobody has any more ends it."""
    period, looked_ns = _PERIOD_SECONDS, 0
    while not stop.wait(period):
        sampler = reference()
        if sampler is None:
            return
        try:
            began_ns = time.perf_counter_ns()
            sampler.look()
            looked_ns += time.perf_counter_ns() - began_ns
            sampler.pay(max(looked_ns, time.thread_time_ns()))
        except Exception as failure:  # noqa: BLE001 - the program goes on, unseen
            sampler.failed(failure)
            return
        period = sampler.period_seconds
        del sampler


def _nothing_yet() -> list[float]:
    return [0.0, 0.0]


def _count(table: Table, place: Place, seconds: float, samples: float = 1.0) -> None:
    if place not in table and len(table) >= _MOST_PLACES:
        place = Place(place.stage if place.part == OUTSIDE_STAGES else "", place.part)
    sums = table[place]
    sums[0] += seconds
    sums[1] += samples


def _lines_of(thread: int, watched: frozenset[int]) -> tuple[list[Line], bool]:
    """The line that a thread is at; where it waits for other threads, those of them that work, and True.

    Args:
        thread: Which.
        watched: Those that are looked at themselves.
    """
    frames = sys._current_frames()
    try:
        return _working_lines(frames, thread, watched)
    finally:
        frames.clear()  # this frame is among them: a circle, in which all of them would stay alive


def _working_lines(
    frames: Mapping[int, FrameType], thread: int, watched: frozenset[int]
) -> tuple[list[Line], bool]:
    frame = frames.get(thread)
    if frame is None:
        return [], False
    if _is_waiting(frame):
        others = [
            _line_of(other)
            for ident, other in frames.items()
            if ident not in watched and not _is_waiting(other) and not _is_ours(ident)
        ]
        lines = [line for line in others if line is not None]
        if lines:
            return lines, True
    line = _line_of(frame)
    return ([] if line is None else [line]), False


def _is_ours(ident: int) -> bool:
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    return thread is None or thread.name.startswith("sigmascope-")


def _is_waiting(frame: FrameType) -> bool:
    return KINDS.of(frame.f_code.co_filename) == "waiting"


def _line_of(leaf: FrameType) -> Line | None:
    """The innermost line of the program's own code, within the innermost watched call; else the outermost library's.

    None where the watch itself is at work, or only the standard library is.
    """
    frame: FrameType | None = leaf
    outermost: FrameType | None = None
    is_importing = False
    while frame is not None:
        kind = KINDS.of(frame.f_code.co_filename)
        is_importing = is_importing or frame.f_code.co_name == "_find_and_load"
        if kind == "own":
            function, file, line = _place_in(frame)
            return IMPORT if is_importing else function, file, line
        if kind == "watch":
            return None
        if kind == "door":
            break
        if kind == "library" and frame.f_code.co_name not in _WRAPPERS:
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else _place_in(outermost)


def _place_in(frame: FrameType) -> Line:
    code = frame.f_code
    return code.co_qualname, code.co_filename, frame.f_lineno


class FileKinds:
    """Whose code a file is: the program's "own", a "library", "standard", "waiting", the "watch" or a "door" of it."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._standard = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib"))
        self._libraries = tuple(f"{paths[name]}{os.sep}" for name in ("purelib", "platlib", "scripts"))
        self._known: dict[str, str] = {}

    def of(self, path: str) -> str:
        """The kind of a file."""
        kind = self._known.get(path)
        if kind is None:
            if len(self._known) >= _MOST_FILES:
                self._known.clear()
            kind = self._known[path] = self._found(path)
        return kind

    def _found(self, path: str) -> str:
        if path.startswith("<"):
            is_code = path == "<string>" and sys.argv[:1] == ["-c"]  # else it is made, as of dataclasses
            return "own" if is_code or path.startswith(("<stdin>", "<ipython")) else "standard"
        parts = PurePath(path).parts
        if PurePath(path).is_relative_to(_PACKAGE):
            inside = PurePath(path).relative_to(_PACKAGE).as_posix()
            if inside in _DOORS or inside == _IMPORTING:
                return "door" if inside in _DOORS else "standard"
            return "watch" if inside.split("/")[0] in _WATCHING else "library"
        if not {"site-packages", "dist-packages"}.isdisjoint(parts) or path.startswith(self._libraries):
            return "library"
        standard = next((folder for folder in self._standard if path.startswith(folder)), None)
        if standard is None:
            return "own"
        inside = path[len(standard) :].replace(os.sep, "/")
        return "waiting" if inside.startswith(_WAITING) else "standard"


KINDS: Final = FileKinds()


def _sum_of(*tables: Mapping[Place, list[float]]) -> dict[Place, list[float]]:
    together: Table = defaultdict(_nothing_yet)
    for table in tables:
        for place, (seconds, samples) in table.items():
            together[place][0] += seconds
            together[place][1] += samples
    return together


def _by_function(places: Mapping[Place, list[float]]) -> Iterator[HostPlace]:
    """Each function once in each part, at the line that took most of it; the longest come first."""
    functions: defaultdict[Place, dict[int, list[float]]] = defaultdict(dict)
    for place, sums in places.items():
        if place.file:
            functions[place._replace(line=0)][place.line] = sums
    kept: Counter[tuple[str, str]] = Counter()
    for place, lines in sorted(functions.items(), key=lambda item: -_total(item[1])):
        kept[place.stage, place.part] += 1
        if kept[place.stage, place.part] <= _MOST_FUNCTIONS_RECORDED:
            yield HostPlace(
                stage=place.stage,
                part=place.part,
                function=_short_name(place.function),
                file=_short_path(place.file),
                line=max(lines, key=lambda line: lines[line][0]),
                seconds=_total(lines),
                samples=int(sum(samples for _, samples in lines.values())),
                in_thread=place.in_thread,
            )


def _total(lines: Mapping[int, list[float]]) -> float:
    return sum(seconds for seconds, _ in lines.values())


def _short_name(function: str) -> str:
    name = function.rsplit("<locals>.", 1)[-1]
    return "" if name == "<module>" else name


def _short_path(path: str) -> str:
    file = PurePath(path)
    return "/".join(file.parts[-2:]) if file.name.startswith("__") else file.name
