"""Owners of peaks in runs that were made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from sigmascope.analysis.memory import owners_of, peak_owners, with_owners
from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import Run, Stage, Steps


def stage(name: str, start: float, seconds: float, peak: tuple[int, float], **more: Any) -> Stage:
    """A stage whose peak, in bytes on cuda:0, was `peak[1]` seconds after the run began."""
    seen = AcceleratorPeak("cuda:0", peak[0], peak[1] - start, peak[0], peak[1] - start)
    before = MemorySnapshot(accelerators=(AcceleratorMemory("cuda:0", allocated_bytes=100),))
    return Stage(
        name,
        start,
        seconds,
        peak=PeakMemory(accelerators=(seen,)),
        memory=MemoryImpact(before, before),
        **more,
    )


PIPELINE = {"pipeline": {"components": {"vae": {"module": {"nbytes": 40}}}}}


def run_of(*children: Stage, peak: tuple[int, float] = (900, 5.0)) -> Run:
    return Run(
        "1",
        "r",
        "2026-01-01",
        10.0,
        stages=(stage("generation", 0.0, 10.0, peak, children=children, facts=PIPELINE),),
    )


def test_the_owner_is_the_innermost_stage_that_saw_as_much_at_that_moment() -> None:
    decoding = stage("latent_decoding", 4.0, 2.0, (900, 5.0), facts={"component": "vae"})
    denoising = stage("denoising", 1.0, 2.0, (500, 2.0), facts={"component": "unet"})
    (owner,) = peak_owners(run_of(denoising, decoding))
    assert (owner.where, owner.bytes, owner.at_seconds) == ("cuda:0", 900, 5.0)
    assert (owner.stage, owner.component) == ("generation/latent_decoding", "vae")
    assert (owner.component_bytes, owner.grown_bytes) == (40, 800)


def test_a_peak_between_the_inner_stages_belongs_to_the_outer_one_and_to_no_component() -> None:
    (owner,) = peak_owners(run_of(stage("denoising", 1.0, 2.0, (500, 2.0), facts={"component": "unet"})))
    assert (owner.stage, owner.component) == ("generation", None)


def test_a_stage_in_another_thread_that_saw_less_does_not_own_it() -> None:
    other = stage("text_encoding", 4.0, 2.0, (300, 5.0), facts={"component": "text_encoder"})
    (owner,) = peak_owners(run_of(other))
    assert owner.stage == "generation"


@pytest.mark.parametrize(
    ("at_seconds", "name"), [(1.5, "transformer"), (2.0, "transformer"), (3.5, "transformer_2")]
)
def test_of_two_denoisers_it_is_the_one_of_that_step(at_seconds: float, name: str) -> None:
    denoising = stage(
        "denoising",
        1.0,
        4.0,
        (900, at_seconds),
        facts={"component": "transformer", "component_turns": [["transformer", 0], ["transformer_2", 2]]},
        steps=Steps(started=(0.0, 1.0, 2.0, 3.0), seconds=(1.0,) * 4),
    )
    (owner,) = owners_of(denoising)
    assert owner.component == name


def test_the_owner_is_written_on_the_run_and_on_every_stage() -> None:
    run = with_owners(run_of(stage("latent_decoding", 4.0, 2.0, (900, 5.0), facts={"component": "vae"})))
    assert run.facts["peak_owner"]["cuda:0"]["component"] == "vae"
    assert [one.facts["peak_owner"]["cuda:0"]["component"] for one in run.walk()] == ["vae", "vae"]


def test_without_readings_there_is_no_owner() -> None:
    bare = replace(run_of(), stages=(Stage("denoising", 0.0, 1.0),))
    assert peak_owners(bare) == ()
    assert with_owners(bare) == bare


def taking_turns(peak: PeakMemory, rss_bytes: tuple[int, ...] = (), **facts: Any) -> Stage:
    """A denoising from 1.0 to 5.0 s of four steps, of which the last two are another component's."""
    turns = {"component": "transformer", "component_turns": [["transformer", 0], ["transformer_2", 2]]}
    steps = Steps((0.0, 1.0, 2.0, 3.0), (0.75,) * 4, rss_bytes=rss_bytes)
    return Stage("denoising", 1.0, 4.0, peak=peak, steps=steps, facts={**turns, **facts})


def samples(*readings: tuple[float, int]) -> dict[str, Any]:
    at_seconds, nbytes = zip(*readings, strict=True)
    return {"memory_over_time": {"process": {"at_seconds": list(at_seconds), "nbytes": list(nbytes)}}}


@pytest.mark.parametrize(
    ("at_seconds", "sampled", "name"),
    [
        (4.0, (), None),  # at the stage's end the system told of all of it
        (0.0, (), "transformer"),
        (1.5, ((0.5, 600),), "transformer"),
        (2.5, ((1.5, 600), (2.5, 700)), None),
        (2.5, ((1.5, 600), (2.5, 900)), "transformer_2"),  # the sampler read as much itself
        (2.5, ((2.125, 600), (2.5, 700)), "transformer_2"),
        (4.0, ((1.5, 600), (3.5, 600)), "transformer_2"),
    ],
)
def test_a_peak_of_the_process_that_was_seen_later_belongs_to_one_of_two_only_if_it_alone_ran_since_the_look_before(
    at_seconds: float, sampled: tuple[tuple[float, int], ...], name: str | None
) -> None:
    curve = samples(*sampled) if sampled else {}
    (owner,) = owners_of(taking_turns(PeakMemory(900, at_seconds), **curve))
    assert (owner.where, owner.component) == ("process", name)


def test_the_samples_of_the_stage_around_it_count_from_its_own_beginning() -> None:
    outer = Stage("generation", 0.5, 5.0, facts=samples((2.875, 600), (3.0, 700)))
    (owner,) = owners_of(taking_turns(PeakMemory(900, 2.5)), (outer,))
    assert owner.component == "transformer_2"


@pytest.mark.parametrize(("at_seconds", "name"), [(1.75, "transformer"), (2.75, "transformer_2")])
def test_a_peak_that_was_read_at_the_end_of_a_step_belongs_to_that_step(at_seconds: float, name: str) -> None:
    (owner,) = owners_of(taking_turns(PeakMemory(900, at_seconds), rss_bytes=(500, 900, 900, 600)))
    assert owner.component == name
