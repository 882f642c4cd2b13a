"""Which tries there are, one at a time: each is made up when the one before it has failed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from sigmascope.pipeline.attempt import Try
from sigmascope.pipeline.choices import Choices
from sigmascope.pipeline.forecast import Expected, Forecast, why_not_fitting
from sigmascope.pipeline.ram import free_ram, why_not_enough
from sigmascope.pipeline.strategies import Outcome, Tiles, direct, on_cpu, tiled
from sigmascope.pipeline.weights_in_ram import nbytes_to_copy, why_not_in_ram
from sigmascope.pipeline.work import Work
from sigmascope.records.latents import StrategyAttempt, TileFacts
from sigmascope.records.strategies import Strategy

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Passed:
    """A strategy that is not even tried, and why."""

    attempt: StrategyAttempt

    @classmethod
    def over(cls, one: Try, reason: str) -> "Passed":
        """Pass over a try."""
        return cls(replace(one.record(), outcome="skipped", reason=reason))


@dataclass(frozen=True, slots=True)
class Tries:
    """All that may be tried, in the order asked for.

    Args:
        work: What there is to do.
        choices: Which strategies and tiles.
        forecast: What each is expected to take.
        dummy: Makes the stand-in, where one was asked for.
    """

    work: Work
    choices: Choices
    forecast: Forecast
    dummy: Callable[[], Outcome] | None = None

    def __iter__(self) -> Iterator[Try | Passed]:
        kinds = {"direct": self._direct, "tiled": self._tiled, "cpu": self._cpu, "dummy": self._dummy}
        for strategy in self.choices.strategies:
            yield from kinds[strategy]()

    def _direct(self) -> Iterator[Try | Passed]:
        work = self.work
        yield self._unless_too_large(self._try("direct", lambda: direct(work), work.vae.device))

    def _tiled(self) -> Iterator[Try | Passed]:
        """The largest tiles that fit, or from the largest on where nothing is foretold."""
        ladder = self.choices.ladder(self.work)
        for index, tiles in enumerate(ladder):
            one = self._unless_too_large(self._in_tiles(tiles))
            if isinstance(one, Try) or index == len(ladder) - 1:
                yield one

    def _in_tiles(self, tiles: Tiles) -> Try:
        work = self.work
        return self._try("tiled", lambda: tiled(work, tiles), work.vae.device, tiles)

    def _cpu(self) -> Iterator[Try | Passed]:
        """At once if RAM can hold that, else in the largest tiles that fit."""
        work = self.work
        one = self._try("cpu", lambda: on_cpu(work), _CPU)
        reason = why_not_in_ram(work.vae.modules) or self._why_not_enough_ram(one)
        if reason is not None and not why_not_in_ram(work.vae.modules):
            cut = (self._cpu_in_tiles(tiles) for tiles in self.choices.ladder(work))
            fitting = next((smaller for smaller in cut if self._why_not_enough_ram(smaller) is None), None)
            one, reason = (one, reason) if fitting is None else (fitting, None)
        yield one if reason is None else Passed.over(one, reason)

    def _cpu_in_tiles(self, tiles: Tiles) -> Try:
        work = self.work
        return self._try("cpu", lambda: on_cpu(work, tiles), _CPU, tiles)

    def _dummy(self) -> Iterator[Try | Passed]:
        place = self.work.output_device or self.work.vae.home
        if self.dummy is not None:
            yield Try("dummy", self.dummy, place, expected=Expected())

    def _why_not_enough_ram(self, one: Try) -> str | None:
        if one.expected.nbytes is None:
            return why_not_enough(nbytes_to_copy(self.work.vae.modules), free_ram())
        return why_not_fitting(one.expected, _CPU)

    def _unless_too_large(self, one: Try) -> Try | Passed:
        reason = why_not_fitting(one.expected, one.device) if self.choices.only_what_fits else None
        return one if reason is None else Passed.over(one, reason)

    def _try(
        self,
        name: Strategy,
        run: Callable[[], Outcome],
        device: torch.device,
        tiles: Tiles | None = None,
    ) -> Try:
        facts = None
        if tiles is not None:
            shared = tiles.side // 4 if tiles.overlap is None else tiles.overlap
            facts = TileFacts(tiles.side, tiles.side, shared, shared)
        return Try(name, run, device, facts, self.forecast.of(self.work, name, tiles, device))
