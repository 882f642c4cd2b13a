"""Functions of the host, wrapped so that they can be watched, and given back as they were.

`Wrap` hears of the calls of a module's function or a class's method. Those of one function share one wrapper in its place.
All arguments pass through as they are given, so that a version with more of them is called as before. What is raised
passes too. What our own part raises does not: it switches the instrument off, and the host's function goes on alone.
"""

import functools
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.imports import without_this_frame

_OURS: Final = "__sigmascope_wrap__"
"""The attribute of a wrapper of ours that holds its `_Wrapper`."""


@runtime_checkable
class Part(Protocol):
    """What an instrument gives a wrap: it counts our own time, and hears of our own failures."""

    works: bool

    def took(self, nanoseconds: int) -> None:
        """Know what a call of ours took."""

    def failed(self, failure: Exception) -> None:
        """Switch off."""


class Call(NamedTuple):
    """One call of a function of the host: what it was given, and the places of its parameters."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    places: Mapping[str, int]

    def get(self, name: str) -> Any:
        """An argument by its name; None: it was not given, or the function knows no such parameter."""
        if name in self.named:
            return self.named[name]
        at = self.places.get(name)
        return self.arguments[at] if at is not None and at < len(self.arguments) else None


Wants = Callable[[Call], bool]
"""Asked before anything else: a call that is not wanted is not heard, and costs next to nothing."""
Before = Callable[[Call], Any]
"""Called first. What it returns is handed to `After`."""
After = Callable[[Call, Any, Any, BaseException | None], None]
"""Called last, with the call, what `Before` gave, the result (None where there is none) and what was raised."""


class Wrap:
    """Hears of each call of an attribute of a module or a class, for as long as it is on.

    Args:
        need: The function, which is there.
        part: The instrument that wants it.
        wants: Which calls it hears; all by default.
        before: Called before each call, on the host's thread.
        after: Called after it.
    """

    def __init__(
        self,
        need: Need,
        part: Part,
        *,
        wants: Wants | None = None,
        before: Before | None = None,
        after: After | None = None,
    ) -> None:
        self.name, self.part, self._wants = need.own_name, part, wants
        self._before, self._after = before, after
        owner = need.owner()
        self._wrapper = _outermost(owner, self.name) or _Wrapper(owner, need)
        self._wrapper.wraps = (*self._wrapper.wraps, self)

    @property
    def is_on(self) -> bool:
        """Whether the host finds our wrapper, or one that was put around it later."""
        return self in self._wrapper.wraps and self._wrapper.is_found()

    def take_off(self) -> None:
        """Hear of no more calls, and give the function back if nobody else does."""
        self._wrapper.leave(self)


_Begun = tuple[Call, list[tuple[Wrap, Any]]]
"""A call that goes on: who is to hear of its end, with what their `Before` gave."""


class _Wrapper:
    """What stands in the place of one function for all that hear of its calls.

    Attributes:
        original: The function.
        wraps: Who hears, in the order in which they came: the last is told first of a beginning, and last of an end.
    """

    def __init__(self, owner: Any, need: Need) -> None:
        self.owner, self.name = owner, need.own_name
        self.wraps: tuple[Wrap, ...] = ()
        self.original = vars(owner)[self.name]
        signature = need.signature_of(self.original)
        self._places = {word: at for at, word in enumerate(signature.parameters)}
        self.function: Any = self._asynchronous() if signature.is_asynchronous else self._synchronous()
        setattr(self.function, _OURS, self)
        setattr(owner, self.name, self.function)

    def is_found(self) -> bool:
        """Whether the host finds it, or what was put around it later."""
        found = vars(self.owner).get(self.name)
        while found is not None and found is not self.function:
            found = getattr(found, "__wrapped__", None)
        return found is not None

    def leave(self, wrap: Wrap) -> None:
        """Tell one no more. Where another pack's wrapper lies around an idle one, ours only passes on until that is taken off."""
        self.wraps = tuple(other for other in self.wraps if other is not wrap)
        while (outermost := _outermost(self.owner, self.name)) is not None and not outermost.wraps:
            setattr(self.owner, self.name, outermost.original)

    def _begin(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Begun | None:
        wraps = self.wraps
        if not wraps:
            return None
        call = Call(arguments, named, self._places)
        begun: list[tuple[Wrap, Any]] = []
        for wrap in reversed(wraps):
            part, wants, before, known = wrap.part, wrap._wants, wrap._before, None
            if not part.works:
                continue
            if wants is not None:
                try:
                    if not wants(call):
                        continue
                except Exception as failure:  # noqa: BLE001 - whatever ours raises must not reach the host
                    part.failed(failure)
                    continue
            if before is not None:
                began = perf_counter_ns()
                try:
                    known = before(call)
                except Exception as failure:  # noqa: BLE001 - as above
                    part.failed(failure)
                    continue
                part.took(perf_counter_ns() - began)
            begun.append((wrap, known))
        return (call, begun) if begun else None

    def _end(self, begun: _Begun | None, result: Any, error: BaseException | None) -> None:
        if begun is None:
            return
        call, wraps = begun
        for wrap, known in reversed(wraps):
            part, after = wrap.part, wrap._after
            if after is None or not part.works:
                continue
            began = perf_counter_ns()
            try:
                after(call, known, result, error)
            except Exception as failure:  # noqa: BLE001 - as above
                part.failed(failure)
            part.took(perf_counter_ns() - began)

    def _synchronous(self) -> Callable[..., Any]:
        original = self.original

        @functools.wraps(original)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            begun = self._begin(arguments, named)
            try:
                result = original(*arguments, **named)
            except BaseException as error:
                without_this_frame(error)
                self._end(begun, None, error)
                raise
            self._end(begun, result, None)
            return result

        return wrapper

    def _asynchronous(self) -> Callable[..., Any]:
        original = self.original

        @functools.wraps(original)
        async def wrapper(*arguments: Any, **named: Any) -> Any:
            begun = self._begin(arguments, named)
            try:
                result = await original(*arguments, **named)
            except BaseException as error:
                without_this_frame(error)
                self._end(begun, None, error)
                raise
            self._end(begun, result, None)
            return result

        return wrapper


def _outermost(owner: Any, name: str) -> _Wrapper | None:
    """The wrapper that the host finds; None: what it finds is not ours."""
    found = vars(owner).get(name)
    ours = getattr(found, _OURS, None)
    return ours if isinstance(ours, _Wrapper) and ours.function is found else None
