"""How long runs take on machines that do other things as well."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.pipeline.measured import (
    Clock,
    measure,
    sliced_is_fast,
    timed,
)
from tests.pipeline.optimized import optimizer
from torch import nn

from sigmascope.pipeline.measure import Count, Trials


def test_slow_runs_of_a_busy_machine_do_not_make_a_choice_pay(clock: Clock, sd15: Any) -> None:
    costs = iter(
        [10, 90, 10, 100, 95, 12, 11, 10, 12, 11]
    )  # as found: warm-up, then 90, 10, 100; the choice: 12, 11, 10
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert not found.results[0].kept


def test_a_machine_that_became_faster_meanwhile_does_not_make_a_choice_pay(clock: Clock, sd15: Any) -> None:
    costs = iter([100] * 4 + [97] * 4 + [94] * 4 + [97] * 4)  # in turn: as found, with it, as found, with it
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert not found.results[0].kept
    assert len(found.results[0].before.seconds) == 6


def test_a_small_gain_that_comes_back_is_kept(clock: Clock, sd15: Any) -> None:
    costs = iter(([100] * 4 + [95] * 4) * 2)
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert found.results[0].saved_percent == pytest.approx(5.0)
    assert found.results[0].kept


def test_the_first_warm_up_tells_what_compiling_took(clock: Clock, sd15: Any) -> None:
    costs = iter([500, 10, 10, 10, 900, 5, 5, 5])
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert (found.first.warmup_seconds, found.last.warmup_seconds) == (0.5, 0.9)


def test_each_run_is_told_of_as_it_ends(clock: Clock, sd15: Any) -> None:
    told: list[tuple[int, int, str]] = []
    tool = optimizer(vae_slicing=True)
    tool.measure(sd15, timed(clock, sliced_is_fast), repeats=2, progress=lambda *one: told.append(one))
    assert told == [
        (1, 6, "as found"), (2, 6, "as found"), (3, 6, "as found"),
        (4, 6, "vae_slicing of vae"), (5, 6, "vae_slicing of vae"), (6, 6, "vae_slicing of vae"),
    ]  # fmt: skip


def test_runs_that_are_measured_again_are_counted_too(clock: Clock, sd15: Any) -> None:
    told: list[tuple[int, int]] = []
    costs = iter(([100] * 4 + [95] * 4) * 2)
    optimizer(vae_slicing=True).measure(
        sd15, timed(clock, lambda _: next(costs)), progress=lambda done, total, _: told.append((done, total))
    )
    assert told[-1] == (16, 16)
    assert all(done <= total for done, total in told)


def test_the_device_that_the_pipeline_runs_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited_for.append)
    device = torch.device("cuda:1")  # while cuda:0 may be the current one, and the weights are in RAM
    pipeline = SimpleNamespace(_execution_device=device, components={})
    count = Count(lambda *_: None, 1)
    Trials(pipeline, lambda _: waited_for.clear(), nn.Linear(1, 1), repeats=1, warmup=0, count=count).run("")
    assert waited_for == [device]
