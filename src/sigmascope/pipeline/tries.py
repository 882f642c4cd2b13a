"""Which tries there are, one at a time: each is made up when the one before it has failed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from sigmascope.pipeline.attempt import Try
from sigmascope.pipeline.choices import Choices
from sigmascope.pipeline.forecast import Expected, expected, why_not_fitting
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


def tries(work: Work, choices: Choices, dummy: Callable[[], Outcome] | None = None) -> Iterator[Try | Passed]:
    """All that may be tried, in the order asked for.

    Args:
        work: What there is to do.
        choices: Which strategies and tiles.
        dummy: Makes the stand-in, where one was asked for.
    """
    for strategy in choices.strategies:
        if strategy == "dummy" and dummy is not None:
            yield Try("dummy", dummy, work.output_device or work.vae.home)
        else:
            yield from _OF[strategy](work, choices)


def _direct(work: Work, choices: Choices) -> Iterator[Try | Passed]:
    one = _try(work, "direct", lambda: direct(work), work.vae.device)
    yield _unless_too_large(one, choices)


def _tiled(work: Work, choices: Choices) -> Iterator[Try | Passed]:
    ladder = choices.ladder(work)
    made = [_tiled_try(work, tiles) for tiles in ladder]
    if choices.only_what_fits:
        fitting = [one for one in made if why_not_fitting(one.expected, one.device) is None]
        made = fitting or made[-1:]
        yield from (_unless_too_large(one, choices) for one in made)
        return
    yield from made


def _tiled_try(work: Work, tiles: Tiles) -> Try:
    return _try(work, "tiled", lambda: tiled(work, tiles), work.vae.device, tiles)


def _cpu(work: Work, choices: Choices) -> Iterator[Try | Passed]:
    """At once if RAM can hold that, else in the largest tiles that fit."""
    whole = _try(work, "cpu", lambda: on_cpu(work), _CPU)
    reason = why_not_in_ram(work.vae.modules)
    if reason is None:
        cut = (_cpu_in_tiles(work, tiles) for tiles in choices.ladder(work))
        for one in (whole, *cut):
            refusal = _why_not_in_ram(work, one.expected)
            if refusal is None:
                yield one
                return
            reason = refusal
    yield Passed.over(whole, reason or "")


def _cpu_in_tiles(work: Work, tiles: Tiles) -> Try:
    return _try(work, "cpu", lambda: on_cpu(work, tiles), _CPU, tiles)


def _why_not_in_ram(work: Work, expectation: Expected) -> str | None:
    needed = nbytes_to_copy(work.vae.modules) + (expectation.nbytes or 0)
    return why_not_enough(needed, free_ram())


def _try(
    work: Work,
    name: Strategy,
    run: Callable[[], Outcome],
    device: torch.device,
    tiles: Tiles | None = None,
) -> Try:
    facts = None
    if tiles is not None:
        shared = tiles.side // 4 if tiles.overlap is None else tiles.overlap
        facts = TileFacts(tiles.side, tiles.side, shared, shared)
    return Try(name, run, device, facts, expected(work, name, tiles))


def _unless_too_large(one: Try, choices: Choices) -> Try | Passed:
    reason = why_not_fitting(one.expected, one.device) if choices.only_what_fits else None
    return one if reason is None else Passed.over(one, reason)


_OF: dict[Strategy, Callable[[Work, Choices], Iterator[Try | Passed]]] = {
    "direct": _direct,
    "tiled": _tiled,
    "cpu": _cpu,
}
