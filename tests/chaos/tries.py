"""Tries in forked children: each has a folder, a random state, and limits of time and memory of its own.

The process that forks has imported everything, so a try starts within milliseconds. Whatever a try does, to its
process, its memory or its folder, the next one starts afresh; and a try that dies is a failure like any other.
"""

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MB = 1 << 20
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Case:
    """One try, in its child.

    Attributes:
        number: Which of its kind, from 0; a kind that goes through a list takes this as its index.
        scale: The run's `N`, for a try that is itself long.
        folder: Its own and its working directory, empty; kept when the try fails.
        prepared: What the kind's `prepare` gave; the child's own copy.
    """

    number: int
    seed: int
    scale: float
    folder: Path
    random: random.Random
    prepared: Any


@dataclass(frozen=True)
class Kind:
    """One kind of chaos.

    Attributes:
        name: As the command line says it.
        promise: What a try shows when it survives, for the table.
        tries: How many at N=1.
        attempt: Runs a try and says in few words how it was survived. Whatever it raises is a failure.
        prepare: Makes once, before any fork, what all tries start from; it gets a folder that outlives them.
        seconds: How long one try may take.
        memory: Bytes that one try may take beyond what its parent has; None is no limit.
        scales: Whether `N` multiplies the tries. Where it does not, `attempt` makes of `Case.scale` what it can.
    """

    name: str
    promise: str
    tries: int
    attempt: Callable[[Case], str]
    prepare: Callable[[Path], Any] = lambda _folder: None
    seconds: float = 60.0
    memory: int | None = None
    scales: bool = True

    def tries_at(self, scale: float) -> int:
        return max(1, round(self.tries * scale)) if self.scales else self.tries


@dataclass
class Outcome:
    """How the tries of one kind ended."""

    kind: str
    tried: int = 0
    survived: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    kept: list[Path] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "tried": self.tried,
            "survived": sum(self.survived.values()),
            "how": dict(self.survived.most_common()),
            "failed": {str(number): why for number, why in sorted(self.failed.items())},
            "kept": [str(path) for path in self.kept],
            "seconds": round(self.seconds, 1),
        }


@dataclass
class _Running:
    case: Case
    pid: int
    deadline: float


def try_all(
    kind: Kind,
    *,
    seed: int,
    scale: float,
    work: Path,
    keep: Path,
    jobs: int = 2,
    only: int | None = None,
    progress: Callable[[Outcome, int], None] = lambda _outcome, _total: None,
) -> Outcome:
    """Run the tries of one kind, `jobs` at a time.

    Args:
        kind: What is tried.
        seed: With a try's number it decides all that is random in that try.
        scale: `N`.
        work: An empty folder for the tries; it is empty again afterwards.
        keep: Where the folders of failed tries go, with the reason and the command that repeats it.
        jobs: How many run at once.
        only: Run the one try of this number.
        progress: Called after each try.

    Returns:
        The counts, and for each failure its number and reason.
    """
    outcome = Outcome(kind.name)
    started = time.monotonic()
    common = work / "prepared"
    common.mkdir(parents=True)
    prepared = kind.prepare(common)
    numbers = iter(range(kind.tries_at(scale)) if only is None else [only])
    total = kind.tries_at(scale) if only is None else 1
    running: list[_Running] = []
    try:
        while True:
            while len(running) < jobs and (number := next(numbers, None)) is not None:
                folder = work / f"{kind.name}-{number}"
                folder.mkdir()
                state = random.Random(f"{seed}/{kind.name}/{number}")
                case = Case(number, seed, scale, folder, state, prepared)
                running.append(_Running(case, _fork(kind, case), time.monotonic() + kind.seconds))
            if not running:
                break
            for each in list(running):
                reason = _ended(each, kind)
                if reason is not None:
                    running.remove(each)
                    _take(outcome, each.case, reason, keep)
                    progress(outcome, total)
            time.sleep(_POLL_SECONDS)
    finally:
        for each in running:
            _kill(each.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, 0)
        shutil.rmtree(work, ignore_errors=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def _fork(kind: Kind, case: Case) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _be_a_child(kind, case)
            status = 0
        finally:
            os._exit(status)
    return pid


def _be_a_child(kind: Kind, case: Case) -> None:
    gc.freeze()  # as in the parent, with what `prepare` made
    os.setsid()  # one signal ends it with all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(case.folder)
    output = os.open(_beside(case, "output"), os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1, errors="replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    random.seed(case.number)
    if kind.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + kind.memory
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        answer = {"survived": kind.attempt(case)}
    except BaseException as error:  # noqa: BLE001  # all that a try lets out is a failure, SystemExit too
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        answer = {"failed": text, "traceback": traceback.format_exc()}
    if kind.memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # the answer needs a little too
    _beside(case, "answer").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()


def _ended(running: _Running, kind: Kind) -> dict[str, Any] | None:
    """The answer of a try that has ended, or that is ended because its time is over."""
    pid, status = os.waitpid(running.pid, os.WNOHANG)
    if pid == 0:
        if time.monotonic() < running.deadline:
            return None
        _kill(running.pid)
        os.kill(running.pid, signal.SIGKILL)  # on a busy machine it may not lead its group yet
        os.waitpid(running.pid, 0)
        return {"failed": f"took more than {kind.seconds:g} s"}
    _kill(running.pid)  # what it left running
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"failed": f"died of {signal.Signals(-code).name}"}
    try:
        answer: dict[str, Any] = json.loads(_beside(running.case, "answer").read_text())
    except (OSError, ValueError):
        return {"failed": f"ended with status {code} and without an answer"}
    return answer


def _kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _take(outcome: Outcome, case: Case, answer: dict[str, Any], keep: Path) -> None:
    outcome.tried += 1
    output = _beside(case, "output")
    if "survived" in answer:
        outcome.survived[answer["survived"]] += 1
    else:
        outcome.failed[case.number] = answer["failed"]
        kept = keep / case.folder.name
        shutil.rmtree(kept, ignore_errors=True)
        keep.mkdir(parents=True, exist_ok=True)
        shutil.copytree(case.folder, kept, symlinks=True, ignore_dangling_symlinks=True, ignore=_no_files)
        again = f"python -m tests.chaos {outcome.kind} --seed {case.seed} --case {case.number}"
        parts = [answer["failed"], f"Run it again: {again}", answer.get("traceback", "")]
        if output.exists():
            parts.append(output.read_text(errors="replace"))
        (kept / "failure.txt").write_text("\n\n".join(parts))
        outcome.kept.append(kept)
    shutil.rmtree(case.folder, onerror=_make_removable)
    for name in ("output", "answer"):
        _beside(case, name).unlink(missing_ok=True)


def _beside(case: Case, name: str) -> Path:
    """A file of ours outside the folder that the try may make full, read-only or gone."""
    return case.folder.with_name(f"{case.folder.name}.{name}")


def _no_files(folder: str, names: list[str]) -> list[str]:
    """Sockets, pipes and devices are not kept."""
    return [
        name
        for name in names
        if not (p := Path(folder, name)).is_symlink() and not (p.is_dir() or p.is_file())
    ]


def _make_removable(_remove: Any, path: str, _error: Any) -> None:
    with contextlib.suppress(OSError):
        Path(path).parent.chmod(0o700)
        Path(path).chmod(0o700)
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def kill_after(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a process of its own and kill it, with all that it started, after `seconds`.

    Returns:
        Whether it was killed; False where it had ended before.

    Raises:
        AssertionError: `work` raised; its traceback is in the output of the try.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            work()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0, "the work failed before it was killed"
            return False
        if time.monotonic() >= end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _kill(pid)
            os.waitpid(pid, 0)
            return True
        time.sleep(0.0005)
