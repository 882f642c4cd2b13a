"""`with monitor.monitor_generation(...) as monitor:`, and the same as a decorator."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from sigmascope.monitor.decorated import decorated
from sigmascope.monitor.generation import Generation
from sigmascope.monitor.generations import Generations

Monitor = TypeVar("Monitor")


class GenerationBlock(Generic[Monitor]):
    """A context that watches one generation each time it is entered. Exceptions pass through it unchanged.

    Args:
        monitor: What `with` gives.
        begin: Begins a generation.
        generations: Those of the monitor, which end it.
    """

    def __init__(self, monitor: Monitor, begin: Callable[[], Generation], generations: Generations) -> None:
        self._monitor = monitor
        self._begin = begin
        self._generations = generations
        self._entered: list[Generation] = []

    def __enter__(self) -> Monitor:
        self._entered.append(self._begin())
        return self._monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        generation = self._entered_here()
        if generation is not None:
            self._entered.remove(generation)
            self._generations.end(generation, error)

    def _entered_here(self) -> Generation | None:
        """The generation that this thread or task entered; else, as where a task goes on elsewhere, the last."""
        running, entered = self._generations.running(), self._entered
        return running if running in entered else next(reversed(entered), None)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Watch each call of a function as a generation of its own; of a coroutine function or a generator, its course.

        What a generator's caller does between two of its values is part of it.
        """
        return decorated(function, self._anew)

    def _anew(self) -> "GenerationBlock[Monitor]":
        """A block of its own for each call: calls may overlap."""
        return GenerationBlock(self._monitor, self._begin, self._generations)
