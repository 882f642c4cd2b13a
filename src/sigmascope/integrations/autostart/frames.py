"""Tracebacks as they are without a watch: what listens in between is not part of them."""

import sys
import threading
from pathlib import Path
from types import TracebackType

_WATCHING = Path(__file__).parents[1] / "watching"
_OURS = (str(_WATCHING), str(Path(__file__).parent))


def hide_own() -> None:
    """Leave our frames out of the traceback that Python prints, unless the program prints its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_of_thread


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    forget_own(error)
    sys.__excepthook__(kind, error, error.__traceback__)


def _print_of_thread(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value
    if error is not None:
        forget_own(error)
        args = threading.ExceptHookArgs((args.exc_type, error, error.__traceback__, args.thread))
    threading.__excepthook__(args)


def forget_own(error: BaseException) -> None:
    """Take our frames out of an exception's traceback and out of those of its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = without_own(one.__traceback__)
        waiting += [one.__cause__, one.__context__]


def without_own(trace: TracebackType | None) -> TracebackType | None:
    """The same traceback without our frames."""
    entries = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
