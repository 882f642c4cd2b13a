"""A fact or the reason why it could not be read, and how to read objects that may raise.

`attempt` is the one barrier: whatever a read raises becomes a reason. The functions at the end read attributes and
mappings of the host, which may be missing, of another type, or raise.

Hosts quote prompts in what they raise, in spellings that nobody can search for. So where prompts are private, the words
of an exception are not kept at all (`keeping_words`): `describe`, `error_text` and `exception_details` then give its
type, its place, and what Sigmascope itself knows of such an exception (`known_cause`).
"""

import errno
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice, pairwise
from types import FrameType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.files import short_path, without_home
from sigmascope.records.failures import (
    CAUSED,
    MEANWHILE,
    NO_ROOM_TO_WORK,
    OUT_OF_MEMORY,
    Raised,
    cause_in_words,
    members_in_words,
    memory_in_words,
    quoted,
    trace_without_words,
)
from sigmascope.records.run import ExceptionDetails

T = TypeVar("T")
PROBE_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,  # torch built without CUDA answers so
    AttributeError,  # a function that this version or build lacks
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a read of the system, of torch or of somebody's object may raise; each becomes a reason."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value; where it is None, the reason may be known."""

    value: T | None
    reason: str | None = None


def attempt(read: Callable[[], T]) -> Reading[T]:
    """What `read` gives, or None and why it failed: drivers, libraries and the host's objects may raise anything."""
    try:
        return Reading(read())
    except Exception as error:  # noqa: BLE001 - see above; Ctrl-C and the wish to exit pass
        return Reading(None, describe(error))


_KEEPS_WORDS: ContextVar[bool] = ContextVar("sigmascope_keeps_words", default=True)


def keeping_words(kept: bool) -> AbstractContextManager[None]:
    """Keep the words of exceptions within the block, or drop them. A block around it that drops them wins."""
    return nullcontext() if kept else _dropping_words()


@contextmanager
def _dropping_words() -> Iterator[None]:
    token = _KEEPS_WORDS.set(False)
    try:
        yield
    finally:
        _KEEPS_WORDS.reset(token)


def keeps_words() -> bool:
    """Whether the words of exceptions are kept here."""
    return _KEEPS_WORDS.get()


def describe(error: BaseException) -> str:
    """One line for an error: its type, and its message's first line if there is one.

    Where words are not kept: its type, what is known of it, and its place.
    """
    message = message_of(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = None if keeps_words() else _place_of(error)
    return text if place is None else f"{text} ({place})"


def error_text(error: BaseException | str) -> str:
    """`Type: message` with the whole message, or the text as it is; where words are not kept, as `describe`."""
    if isinstance(error, str):
        return error
    try:
        if not keeps_words():
            return describe(error)
        message = message_of(error)
    except Exception:  # noqa: BLE001 - this is called where nothing may be raised
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def message_of(error: BaseException) -> str:
    """The message, even of an exception whose `__str__` fails; where words are not kept, what is known of it, or nothing."""
    if not keeps_words():
        return known_cause(error) or ""
    return without_home(_text_of(error, "(its message cannot be read)"))


def exception_details(error: BaseException) -> ExceptionDetails:
    """An exception as text, its causes included; nothing of it stays alive. Paths in it are short."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if keeps_words():
        report = traceback.TracebackException.from_exception(error)
        _set_in_quoted(report)
        report.stack[:0] = traceback.StackSummary.extract(iter(_callers(error)))
        trace = without_home(_FILE_LINE.sub(_with_short_path, "".join(report.format())))
    else:
        trace = trace_without_words(list(_raised(error)))
    return ExceptionDetails(name, message_of(error), trace)


_FILE_LINE: Final = re.compile(r'(?m)^([ |+]*File ")([^"\n]+)(?=", line )')


def _with_short_path(line: re.Match[str]) -> str:
    return line[1] + short_path(line[2])


_MOST_FRAMES: Final = 60
"""Of a longer stack as many are kept, half of them from each end."""


def _set_in_quoted(report: traceback.TracebackException) -> None:
    """Set in what messages and notes quote of other stack traces: it is not read as part of this one then."""
    waiting: list[traceback.TracebackException | None] = [report]
    while waiting:
        part = waiting.pop()
        if part is not None:
            part._str = quoted(str(part))  # type: ignore[attr-defined]
            notes = getattr(part, "__notes__", None)
            if isinstance(notes, list | tuple):
                part.__notes__ = [quoted(note) if isinstance(note, str) else note for note in notes]
            waiting += [part.__cause__, part.__context__, *(part.exceptions or ())]


def _raised(error: BaseException, depth: int = 0) -> Iterator[Raised]:
    """The exception with all that it was raised from and, of a group, its members: types and places, no words."""
    chain = list(_chain(error))
    links = [CAUSED if later.__cause__ is earlier else MEANWHILE for later, earlier in pairwise(chain)]
    for link, text in zip(reversed(chain), [*reversed(links), None], strict=True):
        members = _members(link) if depth < _DEEPEST_GROUP else ()
        cause = None if members else known_cause(link)
        yield Raised(type(link).__qualname__, cause, tuple(_frames(link)), None if members else text, depth)
        for member in members:
            yield from _raised(member, depth + 1)


_DEEPEST_GROUP: Final = 8
_MOST_MEMBERS: Final = 15


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions[:_MOST_MEMBERS] if isinstance(error, BaseExceptionGroup) else ()


def _chain(error: BaseException, *, explicit: bool = False) -> Iterator[BaseException]:
    """The error and what a stack trace shows before it, last raised first; or what it was raised from alone."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        is_cause = explicit or following.__cause__ is not None or following.__suppress_context__
        following = following.__cause__ if is_cause else following.__context__


def _frames(error: BaseException) -> list[str]:
    frames = [
        _named_place(frame, line)
        for frame, line in [*_callers(error), *traceback.walk_tb(error.__traceback__)]
    ]
    if len(frames) > _MOST_FRAMES:
        half = _MOST_FRAMES // 2
        frames[half:-half] = [f"[{len(frames) - _MOST_FRAMES} more]"]
    return frames


def _named_place(frame: FrameType, line: int) -> str:
    return f"{short_path(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"


_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
_RUNNERS: Final = ("<frozen ", "<string>")


def _callers(error: BaseException) -> list[tuple[FrameType, int]]:
    """Who called the function that an exception has come to by now, the outermost first, without this package.

    An exception that is heard of on its way has not passed them yet, so its stack trace lacks them: the user's script.
    """
    trace = error.__traceback__
    above = None if trace is None else trace.tb_frame.f_back
    if above is None:
        return []
    found = (place for place in traceback.walk_stack(above) if not _is_ours(place[0]))
    return list(islice(found, _MOST_FRAMES))[::-1]


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_OURS, *_RUNNERS))


def _place_of(error: BaseException) -> str | None:
    """Where it was raised, or the last of a group's members was: file, line and function."""
    for member in reversed(_members(error)):
        place = _place_of(member)
        if place is not None:
            return place
    places: list[tuple[FrameType, int]] = list(traceback.walk_tb(error.__traceback__))
    if not places:
        return None
    frame, line = places[-1]
    return _named_place(frame, line)


_WINDOWS_COMMIT_LIMIT: Final = 1455  # "the paging file is too small"


def known_cause(error: BaseException) -> str | None:
    """What is known of an exception, or of what it was raised from, in words of our own; None: nothing.

    Its message is read to recognise it, and for numbers. No word of it is in the answer.
    """
    for link in _chain(error, explicit=True):
        if _says_so(link):
            return memory_in_words(_text_of(link))
        if isinstance(link, OSError) and isinstance(link.errno, int) and link.errno in errno.errorcode:
            return os.strerror(link.errno)
        if isinstance(link, NonFiniteError):
            return "NaN or Inf"
        cause = cause_in_words(_text_of(link)) or members_in_words(_raised(link) if _members(link) else ())
        if cause is not None:
            return cause
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device or in RAM.

    True for `MemoryError`, `torch.OutOfMemoryError` (CUDA, HIP, XPU), a `RuntimeError` whose words say so
    (MPS, the CPU's allocator, drivers and libraries), an `OSError` of that number, and whatever was raised
    from one of these. So are a library's other errors that come of too little memory (`NO_ROOM_TO_WORK`), whatever
    else may bring them about: what takes less memory helps then, too. NaN, wrong shapes and interruptions do not
    count.
    """
    return isinstance(error, Exception) and any(
        _says_so(link) or _has_no_room(link) for link in _chain(error, explicit=True)
    )


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM or getattr(error, "winerror", None) == _WINDOWS_COMMIT_LIMIT
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(_text_of(error)) is not None


def _has_no_room(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and NO_ROOM_TO_WORK.search(_text_of(error)) is not None


def _text_of(error: BaseException, otherwise: str = "") -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - any class may have written that __str__
        return otherwise


def reasons(readings: Mapping[str, Reading[Any]]) -> dict[str, str]:
    """The reason for each of the readings that has no value, as the records' `unavailable` wants them."""
    return {
        name: reading.reason
        for name, reading in readings.items()
        if reading.value is None and reading.reason is not None
    }


def attribute(thing: object, name: str) -> Any:
    """The attribute, or None if there is none, or reading it or its class raises anything."""
    try:
        held = getattr(thing, name, None)
        _ = held.__class__  # what asks for its type later must not be the first to
    except Exception:  # noqa: BLE001 - a property of the host's
        return None
    return held


def has(thing: object, name: str) -> bool:
    """Whether there is such an attribute, even if it is None."""
    try:
        return hasattr(thing, name)
    except Exception:  # noqa: BLE001 - a property of the host's
        return False


def lookup(held: object, key: object) -> Any:
    """The value under a key; None if there is none, if `held` is not a mapping, or if it raises."""
    try:
        return held.get(key) if isinstance(held, Mapping) else None
    except Exception:  # noqa: BLE001 - a mapping of the host's
        return None


def mapping(thing: object, name: str) -> dict[Any, Any]:
    """A copy of the mapping that an attribute holds; empty if it holds none."""
    held = attribute(thing, name)
    try:
        return dict(held) if isinstance(held, Mapping) else {}
    except Exception:  # noqa: BLE001 - a mapping of the host's
        return {}


def node_outputs(thing: object) -> Any:
    """What a node of ComfyUI gave, out of its `io.NodeOutput` or its dict of "ui" and "result"; else the thing itself.

    Never raises. None where the node gave nothing.
    """
    if any(base.__name__ == "NodeOutput" for base in type(thing).__mro__):
        return attribute(thing, "result")
    if type(thing) is dict and "result" in thing and thing.keys() <= {"ui", "result", "expand"}:
        return thing["result"]
    return thing


def sequence(thing: object) -> tuple[Any, ...]:
    """The items of a list or tuple; empty for anything else."""
    return tuple(thing) if isinstance(thing, Sequence) and not isinstance(thing, str) else ()


def number(value: object) -> float | None:
    """A number, or a tensor with one element, as float; None for anything else."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except PROBE_ERRORS:
        return None
