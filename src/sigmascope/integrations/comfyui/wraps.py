"""Functions of the host, wrapped so that they can be watched, and given back as they were.

`Wrap` puts a wrapper in the place of a module's function or a class's method. All arguments pass through as they are
given, so that a version with more of them is called as before. What is raised passes too. What our own part raises does
not: it switches the instrument off, and the host's function goes on alone.
"""

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.imports import without_this_frame

_OURS: Final = "__sigmascope_wrap__"
"""The attribute of a wrapper of ours that holds its `Wrap`."""


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


Before = Callable[[Call], Any]
"""Called first. What it returns is handed to `After`."""
After = Callable[[Call, Any, Any, BaseException | None], None]
"""Called last, with the call, what `Before` gave, the result (None where there is none) and what was raised."""


class Wrap:
    """A wrapper around an attribute of a module or a class, for as long as it is on.

    Args:
        need: The function, which is there.
        part: The instrument that wants it.
        before: Called before each call, on the host's thread.
        after: Called after it.
    """

    def __init__(
        self, need: Need, part: Part, *, before: Before | None = None, after: After | None = None
    ) -> None:
        self.owner, self.name, self.part = need.owner(), need.own_name, part
        self._before, self._after = before, after
        self.original = vars(self.owner)[self.name]
        self._places = {name: at for at, name in enumerate(inspect.signature(self.original).parameters)}
        wrapper = self._asynchronous() if inspect.iscoroutinefunction(self.original) else self._synchronous()
        setattr(wrapper, _OURS, self)
        self._wrapper: Any = wrapper
        setattr(self.owner, self.name, wrapper)

    @property
    def is_on(self) -> bool:
        """Whether the host finds our wrapper, or one that was put around it later."""
        found = vars(self.owner).get(self.name)
        while found is not None and found is not self._wrapper:
            found = getattr(found, "__wrapped__", None)
        return found is not None

    def take_off(self) -> None:
        """Give the function back. Where a wrapper that is on lies around ours, ours only passes on until that is taken off."""
        self._before = self._after = None
        while (outermost := self._outermost()) is not None and outermost._is_idle:
            setattr(self.owner, self.name, outermost.original)

    def _outermost(self) -> "Wrap | None":
        """The wrap whose wrapper the host finds; None: what it finds is not ours."""
        found = vars(self.owner).get(self.name)
        ours = getattr(found, _OURS, None)
        return ours if isinstance(ours, Wrap) and ours._wrapper is found else None

    @property
    def _is_idle(self) -> bool:
        return self._before is None and self._after is None

    def _begin(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Call | None, Any]:
        if not self.part.works or self._is_idle:
            return None, None
        call = Call(arguments, named, self._places)
        if self._before is None:
            return call, None
        began = time.perf_counter_ns()
        try:
            known = self._before(call)
        except Exception as failure:  # noqa: BLE001 - whatever ours raises must not reach the host
            self.part.failed(failure)
            return None, None
        self.part.took(time.perf_counter_ns() - began)
        return call, known

    def _end(self, call: Call | None, known: Any, result: Any, error: BaseException | None) -> None:
        after = self._after
        if call is None or after is None or not self.part.works:
            return
        began = time.perf_counter_ns()
        try:
            after(call, known, result, error)
        except Exception as failure:  # noqa: BLE001 - as above
            self.part.failed(failure)
        self.part.took(time.perf_counter_ns() - began)

    def _synchronous(self) -> Callable[..., Any]:
        original = self.original

        @functools.wraps(original)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            call, known = self._begin(arguments, named)
            try:
                result = original(*arguments, **named)
            except BaseException as error:
                without_this_frame(error)
                self._end(call, known, None, error)
                raise
            self._end(call, known, result, None)
            return result

        return wrapper

    def _asynchronous(self) -> Callable[..., Any]:
        original = self.original

        @functools.wraps(original)
        async def wrapper(*arguments: Any, **named: Any) -> Any:
            call, known = self._begin(arguments, named)
            try:
                result = await original(*arguments, **named)
            except BaseException as error:
                without_this_frame(error)
                self._end(call, known, None, error)
                raise
            self._end(call, known, result, None)
            return result

        return wrapper
