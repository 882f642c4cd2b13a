"""Whose calls a step's are, for denoisers that are called in any order."""

import random
from collections import Counter
from itertools import groupby
from typing import Any

import diffusers
import pytest
import torch
from tests.integrations.diffusers.watch.test_set_ups import TinyDenoiser

import sigmascope
from sigmascope.records.run import Run

Plan = list[list[str]]
"""For each step, the components that it calls, one after the other."""


class Planned:
    """A pipeline whose steps call what the plan says."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {
            "transformer": TinyDenoiser(),
            "transformer_2": TinyDenoiser(),
            "controlnet": TinyDenoiser(),
            "scheduler": diffusers.DDIMScheduler(),
        }

    def __call__(self, plan: Plan) -> None:
        scheduler, sample = self.components["scheduler"], torch.ones(1, 4)
        scheduler.set_timesteps(len(plan))
        for timestep, names in zip(scheduler.timesteps, plan, strict=True):
            outputs = [self.components[name](sample, timestep).detach() for name in names]
            sample = scheduler.step(outputs[-1], timestep, sample).prev_sample


def random_plan(seed: int) -> Plan:
    """Alike steps, turns, helpers and second denoisers inside a step, in any mixture."""
    rng = random.Random(seed)
    plan: Plan = []
    while len(plan) < 12:
        calls = ["controlnet"] * rng.choice((0, 0, 1))
        calls += [rng.choice(("transformer", "transformer_2"))] * rng.choice((1, 1, 2, 3))
        calls += ["transformer_2", "transformer"][: rng.choice((0, 0, 0, 2))]
        plan += [calls] * rng.choice((1, 1, 2, 5))
    return plan


@pytest.mark.parametrize("seed", range(12))
def test_each_denoiser_has_its_calls_and_its_turns_whatever_the_order(seed: int) -> None:
    pipeline, plan = Planned(), random_plan(seed)
    with sigmascope.watch(pipeline) as run:
        pipeline(plan)
    denoising = run.stage("denoising")
    of_denoisers = [[name for name in names if name != "controlnet"] for names in plan]
    assert len(denoising.steps) == denoising.facts["scheduler_steps"] == len(plan)
    assert denoising.facts["denoiser_calls"] == Counter(name for names in of_denoisers for name in names)
    firsts = [(names[0], step) for step, names in enumerate(of_denoisers)]
    turns = [list(next(group)) for _, group in groupby(firsts, key=lambda first: first[0])]
    assert denoising.facts.get("component_turns", turns) == turns
    assert ("component_turns" in denoising.facts) == (len(turns) > 1)
    assert run.stage("generation").facts["call"]["guidance_batches"] == max(
        names.count(names[0]) for names in of_denoisers
    )


def test_a_step_that_is_broken_off_has_the_calls_that_were_made() -> None:
    pipeline = Planned()
    with sigmascope.watch(pipeline) as run, pytest.raises(KeyError):
        pipeline([["transformer"] * 2, ["transformer"] * 2, ["transformer", "none of these"]])
    denoising = run.stage("denoising")
    assert (len(denoising.steps), denoising.facts["scheduler_steps"]) == (3, 2)
    assert denoising.facts["denoiser_calls"] == {"transformer": 5}


def test_a_step_s_calls_are_not_counted_twice_when_the_run_is_read_inside_it() -> None:
    pipeline, runs = Planned(), list[Run]()
    with sigmascope.watch(pipeline) as run:
        read = pipeline.components["transformer_2"].register_forward_pre_hook(
            lambda *_: runs.append(run.record())
        )
        pipeline([["transformer"] * 2, ["transformer", "transformer_2", "transformer"], ["transformer"]])
        read.remove()
    assert run.stage("denoising").facts["denoiser_calls"] == {"transformer": 5, "transformer_2": 1}
    assert [len(one.stage("denoising").steps) for one in runs] == [1]
