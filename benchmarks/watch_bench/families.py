"""One step of each small real pipeline, made again and again with nothing left in it but the calls."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tests.families import FAMILIES, generate, make_pipeline
from torch import nn

_TIMESTEP = "timestep"


class Call(NamedTuple):
    """What something was called with."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def at(self, number: float) -> "Call":
        """The same for another timestep."""
        if _TIMESTEP in self.keywords:
            moved = torch.full_like(self.keywords[_TIMESTEP], number)
            return Call(self.arguments, {**self.keywords, _TIMESTEP: moved})
        latents, timestep, *others = self.arguments
        return Call((latents, torch.full_like(timestep, number), *others), self.keywords)


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
        denoiser, scheduler = type(self.denoiser), type(self.pipeline.scheduler)
        with (
            patch.object(denoiser, "forward", _doing_nothing(denoiser.forward)),
            patch.object(scheduler, "step", _doing_nothing(scheduler.step)),
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

    def looped(self, steps: int, *, has_scheduler: bool = True) -> float:
        """CPU microseconds of a step as a loop of one's own makes it: each for another timestep.

        Args:
            steps: How many. The first, in which a watch opens the generation, is left out of the time.
            has_scheduler: Whether the scheduler's step ends each of them.
        """
        denoiser, scheduler, (arguments, keywords) = self.denoiser, self.pipeline.scheduler, self._step
        timesteps = [[call.at(number) for call in self._calls] for number in range(steps, 0, -1)]
        for of_step in (timesteps[:1], timesteps[1:]):
            started = time.thread_time_ns()
            for calls in of_step:
                for args, kwargs in calls:
                    denoiser(*args, **kwargs)
                if has_scheduler:
                    scheduler.step(*arguments, **keywords)
        return (time.thread_time_ns() - started) / max(steps - 1, 1) / 1e3


def _doing_nothing(method: Callable[..., Any]) -> Callable[..., None]:
    """A function with the signature of that one."""

    @wraps(method)
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing
