"""`with monitor.monitor_generation(...) as monitor:`, and the same as a decorator."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Generic, TypeVar

from sigmascope.monitor.generation import Generation

Monitor = TypeVar("Monitor")


class GenerationBlock(Generic[Monitor]):
    """A context that watches one generation each time it is entered. Exceptions pass through it unchanged.

    Args:
        monitor: What `with` gives.
        begin: Begins a generation.
        end: Ends it, with what it raised.
    """

    def __init__(
        self,
        monitor: Monitor,
        begin: Callable[[], Generation],
        end: Callable[[Generation, BaseException | None], None],
    ) -> None:
        self._monitor = monitor
        self._begin = begin
        self._end = end
        self._entered: list[Generation] = []

    def __enter__(self) -> Monitor:
        self._entered.append(self._begin())
        return self._monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._end(self._entered.pop(), error)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Watch each call of a function, or of a coroutine function, as a generation of its own."""
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def watched_task(*args: object, **kwargs: object) -> object:
                with self._anew():
                    return await function(*args, **kwargs)

            return watched_task

        @wraps(function)
        def watched(*args: object, **kwargs: object) -> object:
            with self._anew():
                return function(*args, **kwargs)

        return watched

    def _anew(self) -> "GenerationBlock[Monitor]":
        """A block of its own for each call: calls may overlap."""
        return GenerationBlock(self._monitor, self._begin, self._end)
