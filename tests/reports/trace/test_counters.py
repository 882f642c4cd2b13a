from tests.reports.tracing_runs import MIB, events_of, run_of

from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.merge import merge_runs
from sigmascope.records.run import HostFacts, Run, Stage, Steps
from sigmascope.reports.trace import PROCESS_COUNTER, SYSTEM_COUNTER


def points(run: Run, counter: str) -> list[tuple[float, float]]:
    """Microseconds and MiB of a counter."""
    return [(event["ts"], event["args"]["MiB"]) for event in events_of(run, phase="C", name=counter)]


def between(before: MemorySnapshot, after: MemorySnapshot, **kwargs: object) -> Stage:
    return Stage("denoising", 1.0, 2.0, memory=MemoryImpact(before, after), **kwargs)  # type: ignore[arg-type]


def test_memory_is_read_at_both_edges_of_a_stage() -> None:
    stage = between(
        MemorySnapshot(process_rss_bytes=3 * MIB, ram_used_bytes=8 * MIB),
        MemorySnapshot(process_rss_bytes=5 * MIB, ram_used_bytes=9 * MIB),
    )
    assert points(run_of(stage), PROCESS_COUNTER) == [(1e6, 3.0), (3e6, 5.0)]
    assert points(run_of(stage), SYSTEM_COUNTER) == [(1e6, 8.0), (3e6, 9.0)]


def test_memory_is_read_at_the_end_of_a_step() -> None:
    steps = Steps((0.0, 0.5), (0.5, 0.5), rss_bytes=(2 * MIB, 4 * MIB))
    assert points(run_of(Stage("denoising", 1.0, 1.0, steps=steps)), PROCESS_COUNTER) == [
        (1.5e6, 2.0),
        (2e6, 4.0),
    ]


def test_a_peak_is_at_its_own_time() -> None:
    stage = Stage("denoising", 1.0, 1.0, peak=PeakMemory(rss_bytes=7 * MIB, rss_at_seconds=0.25))
    assert points(run_of(stage), PROCESS_COUNTER) == [(1.25e6, 7.0)]


def test_a_peak_without_a_time_is_no_point() -> None:
    stage = Stage("denoising", 1.0, 1.0, peak=PeakMemory(rss_bytes=7 * MIB))
    assert points(run_of(stage), PROCESS_COUNTER) == []


def test_what_was_not_read_is_no_point_and_not_a_zero() -> None:
    steps = Steps((0.0, 0.5), (0.5, 0.5), rss_bytes=(None, 4 * MIB))
    assert points(run_of(Stage("denoising", 0.0, 1.0, steps=steps)), PROCESS_COUNTER) == [(1e6, 4.0)]


def test_a_device_has_a_counter_of_what_is_allocated_and_one_of_what_is_reserved() -> None:
    stage = Stage(
        "denoising",
        0.0,
        1.0,
        peak=PeakMemory(accelerators=(AcceleratorPeak("cuda:1", 3 * MIB, 0.5, 4 * MIB, 0.75),)),
    )
    assert points(run_of(stage), "cuda:1 allocated (MiB)") == [(5e5, 3.0)]
    assert points(run_of(stage), "cuda:1 reserved (MiB)") == [(7.5e5, 4.0)]


def test_what_a_step_had_allocated_was_on_the_device_in_use() -> None:
    used = MemorySnapshot(accelerators=(AcceleratorMemory("cuda:0", 0), AcceleratorMemory("cuda:1", 2 * MIB)))
    steps = Steps((0.0,), (0.5,), allocated_bytes=(6 * MIB,))
    stage = between(MemorySnapshot(), used, steps=steps)
    assert (1.5e6, 6.0) in points(run_of(stage), "cuda:1 allocated (MiB)")


def test_of_two_readings_at_one_moment_the_higher_counts() -> None:
    inner = Stage("inner", 1.0, 1.0, peak=PeakMemory(rss_bytes=7 * MIB, rss_at_seconds=0.0))
    outer = Stage(
        "outer", 0.0, 2.0, peak=PeakMemory(rss_bytes=5 * MIB, rss_at_seconds=1.0), children=(inner,)
    )
    assert points(run_of(outer), PROCESS_COUNTER) == [(1e6, 7.0)]


BUSY = {"device": "cuda:0", "at_seconds": [0.0, 0.5], "busy_series": [10.0, 90.0]}


def test_how_busy_a_device_was_is_a_counter_in_per_cent() -> None:
    run = run_of(Stage("denoising", 1.0, 1.0, facts={"utilization": {"cuda:0": BUSY}}))
    events = events_of(run, phase="C", name="cuda:0 busy (%)")
    assert [(event["ts"], event["args"]) for event in events] == [(1e6, {"%": 10.0}), (1.5e6, {"%": 90.0})]


def test_how_busy_a_device_was_is_told_once_by_the_outermost_stage() -> None:
    inner = Stage("inner", 1.25, 0.5, facts={"utilization": {"cuda:0": {**BUSY, "busy_series": [1.0, 2.0]}}})
    outer = Stage("outer", 1.0, 1.0, facts={"utilization": {"cuda:0": BUSY}}, children=(inner,))
    assert len(events_of(run_of(outer), phase="C", name="cuda:0 busy (%)")) == 2


CURVES = {
    "process": {"at_seconds": [0.1, 0.2], "nbytes": [3 * MIB, 5 * MIB]},
    "system": {"at_seconds": [0.1], "nbytes": [9 * MIB]},
    "cuda:0": {"at_seconds": [0.2], "nbytes": [2 * MIB]},
}


def test_what_the_sampler_saw_is_in_the_counters() -> None:
    run = run_of(Stage("generation", 1.0, 1.0, facts={"memory_over_time": CURVES}))
    assert points(run, PROCESS_COUNTER) == [(1.1e6, 3.0), (1.2e6, 5.0)]
    assert points(run, SYSTEM_COUNTER) == [(1.1e6, 9.0)]
    assert points(run, "cuda:0 allocated (MiB)") == [(1.2e6, 2.0)]


def ranks(*hosts: HostFacts | None) -> Run:
    """Two processes that each used 3 and 5 MiB, and their own device "cuda:0" to 10 and 90 per cent."""
    peak = PeakMemory(3 * MIB, 0.5, (AcceleratorPeak("cuda:0", 2 * MIB, 0.5, 2 * MIB, 0.5),))
    facts = {"memory_over_time": CURVES, "utilization": {"cuda:0": BUSY}}
    stage = Stage("generation", 1.0, 1.0, peak=peak, facts=facts)
    return merge_runs(
        [
            Run(f"id{rank}", "FLUX", "2026-11-21T10:00:00+00:00", 2.0, stages=(stage,), host=host)
            for rank, host in enumerate(hosts)
        ]
    )


def test_ranks_have_a_counter_each_for_their_processes_and_their_devices() -> None:
    run = ranks(HostFacts("CPU", 8), HostFacts("CPU", 8))
    assert points(run, PROCESS_COUNTER) == []
    assert points(run, SYSTEM_COUNTER) == [(1.1e6, 9.0)]
    for rank in ("rank 0", "rank 1"):
        assert points(run, f"{rank}: {PROCESS_COUNTER}") == [(1.1e6, 3.0), (1.2e6, 5.0), (1.5e6, 3.0)]
        assert (1.2e6, 2.0) in points(run, f"cuda:0 ({rank}) allocated (MiB)")
        busy = events_of(run, phase="C", name=f"cuda:0 ({rank}) busy (%)")
        assert [(event["ts"], event["args"]) for event in busy] == [(1e6, {"%": 10.0}), (1.5e6, {"%": 90.0})]


def test_ranks_on_several_machines_have_a_counter_each_of_their_machine_s_memory() -> None:
    run = ranks(HostFacts("CPU", 8), HostFacts("another CPU", 8))
    assert points(run, SYSTEM_COUNTER) == []
    assert points(run, f"rank 1: {SYSTEM_COUNTER}") == [(1.1e6, 9.0)]


def test_a_curve_that_is_damaged_is_not_drawn() -> None:
    curves = {"process": {"at_seconds": [0.1], "nbytes": []}}
    assert (
        points(run_of(Stage("generation", 1.0, 1.0, facts={"memory_over_time": curves})), PROCESS_COUNTER)
        == []
    )


def test_the_rank_of_a_lora_makes_no_process_of_a_stage() -> None:
    stage = Stage("lora_application", 1.0, 1.0, peak=PeakMemory(3 * MIB, 0.5), facts={"rank": 16})
    assert points(run_of(stage), PROCESS_COUNTER) == [(1.5e6, 3.0)]
