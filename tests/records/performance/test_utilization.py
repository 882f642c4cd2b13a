import pytest

from sigmascope.records.merge import merge_runs
from sigmascope.records.performance import MemoryCurve, memory_over_time, readable_curves
from sigmascope.records.run import Run, Stage
from sigmascope.records.serialization import run_from_plain, run_to_plain

PROCESS, DEVICE = MemoryCurve((0.1, 0.2), (300, 500)), MemoryCurve((0.2,), (7,))


def plain(curve: MemoryCurve) -> dict[str, list[float] | list[int]]:
    return {"at_seconds": list(curve.at_seconds), "nbytes": list(curve.nbytes)}


def run_with(number: int, **curves: MemoryCurve) -> Run:
    facts = {"memory_over_time": {name.replace("_", ":"): plain(curve) for name, curve in curves.items()}}
    stages = (Stage("generation", 0.0, 1.0, facts=facts),)
    return Run(f"id{number}", "test", f"2026-11-21T10:00:0{number}+00:00", 1.0, stages=stages)


def test_the_curves_of_a_stage_are_those_that_were_written() -> None:
    run = run_from_plain(run_to_plain(run_with(0, process=PROCESS, cuda_0=DEVICE)))
    assert memory_over_time(run.stages[0]) == {"process": PROCESS, "cuda:0": DEVICE}


def test_a_stage_without_curves_has_none() -> None:
    assert memory_over_time(Stage("denoising", 0.0, 1.0)) == {}


@pytest.mark.parametrize(
    "curve",
    [
        {"at_seconds": [0.1], "nbytes": []},
        {"at_seconds": [0.1]},
        {"at_seconds": "x", "nbytes": [1]},
        {"at_seconds": [0.1], "nbytes": [0.5]},
        7,
    ],
)
def test_a_damaged_curve_says_where_and_what_shows_it_leaves_it_out(curve: object) -> None:
    stage = Stage("denoising", 0.0, 1.0, facts={"memory_over_time": {"process": curve}})
    with pytest.raises(ValueError, match="memory_over_time"):
        memory_over_time(stage)
    assert readable_curves(stage) == {}


def test_of_ranks_each_keeps_its_process_and_its_devices() -> None:
    ranks = [run_with(number, process=PROCESS, system=PROCESS, cuda_0=DEVICE) for number in (0, 1)]
    for rank, stage in enumerate(merge_runs(ranks).stages):
        assert "process" in memory_over_time(stage.children[0])
        assert set(memory_over_time(stage.children[0])) <= {
            "process",
            "system",
            f"cuda:0 (rank {rank})",
            "cuda:0",
        }


@pytest.mark.parametrize("name", ["memory_over_time", "utilization"])
def test_a_fact_of_the_caller_s_own_is_merged_as_it_is(name: str) -> None:
    runs = [
        Run(f"id{number}", "test", f"2026-11-21T10:00:0{number}+00:00", 1.0, stages=(stage,))
        for number, stage in enumerate([Stage("generation", 0.0, 1.0, facts={name: {"mine": 1}})] * 2)
    ]
    assert [stage.children[0].facts for stage in merge_runs(runs).stages] == [{name: {"mine": 1}}] * 2
