"""One step of each small real pipeline, made again and again with nothing left in it but the calls."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.families import FAMILIES, generate, make_pipeline
from torch import nn


class Call(NamedTuple):
    """What something was called with."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class FamilyStep:
    """A step of a family's pipeline: its denoiser's calls and its scheduler's step, as the pipeline makes them.

    Args:
        family: One of `FAMILIES`.
    """

    def __init__(self, family: str) -> None:
        self.pipeline = make_pipeline(family)
        self.denoiser: nn.Module = getattr(self.pipeline, FAMILIES[family].denoiser)
        self._calls, self._step = self._as_made_by(family)

    @property
    def calls(self) -> int:
        """How often a step calls the denoiser."""
        return len(self._calls)

    def _as_made_by(self, family: str) -> tuple[list[Call], Call]:
        """The calls of the first step of a generation."""
        calls: list[Call] = []
        steps: list[tuple[int, Call]] = []
        kind = type(self.pipeline.scheduler)
        step = kind.step

        def heard(scheduler: object, *args: Any, **kwargs: Any) -> Any:
            steps.append((len(calls), Call(args, kwargs)))
            return step(scheduler, *args, **kwargs)

        handle = self.denoiser.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(Call(args, kwargs)), with_kwargs=True
        )
        with patch.object(kind, "step", heard):
            generate(self.pipeline, family)
        handle.remove()
        count, first = steps[0]
        return calls[:count], first

    @contextmanager
    def without_work(self) -> Iterator[None]:
        """Let denoiser and scheduler do nothing when they are called."""
        with (
            patch.object(type(self.denoiser), "forward", _nothing),
            patch.object(type(self.pipeline.scheduler), "step", _nothing),
        ):
            yield

    def made(self, steps: int) -> float:
        """CPU microseconds of a step, over so many."""
        denoiser, scheduler, calls, (arguments, keywords) = (
            self.denoiser, self.pipeline.scheduler, self._calls, self._step,
        )  # fmt: skip
        started = time.thread_time_ns()
        for _ in range(steps):
            for args, kwargs in calls:
                denoiser(*args, **kwargs)
            scheduler.step(*arguments, **keywords)
        return (time.thread_time_ns() - started) / steps / 1e3


def _nothing(*_: Any, **__: Any) -> None:
    pass
