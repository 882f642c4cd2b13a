import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.errors import ConfigError
from sigmascope.records import (
    AcceleratorFacts,
    AcceleratorMemory,
    AcceleratorPeak,
    Finding,
    HostFacts,
    MemoryImpact,
    MemorySnapshot,
    ModuleFacts,
    PeakMemory,
    Run,
    Stage,
    Steps,
    load_run,
    run_from_json,
    run_to_json,
)
from sigmascope.records.merge import DIFFERENT_MACHINES, machines_of, merge_runs, ranks_of
from sigmascope.records.performance import DeviceUtilization, Gauge, utilization_of
from sigmascope.records.run import Folded, FoldedStages
from sigmascope.records.serialization import to_plain


def snapshot(allocated: dict[str, int]) -> MemorySnapshot:
    devices = tuple(AcceleratorMemory(device, size, size, 100) for device, size in allocated.items())
    return MemorySnapshot(1000, 500, 500, 50, devices, {}, next(iter(allocated), None))


def run_of(number: int, allocated: dict[str, int], *, step: float = 0.5, **rest: Any) -> Run:
    """A rank that began `number` seconds after the first, with a stage in a stage."""
    peaks = tuple(AcceleratorPeak(device, size, 1.0, size, 1.0) for device, size in allocated.items())
    busy = {device: to_plain(DeviceUtilization(device, 9, Gauge(90.0, 99.0, 1.0))) for device in allocated}
    denoising = Stage(
        "denoising", 1.0, 4.0,
        memory=MemoryImpact(snapshot(dict.fromkeys(allocated, 0)), snapshot(allocated)),
        peak=PeakMemory(50 + number, 2.0, peaks),
        steps=Steps((0.0, step, 2 * step, 3 * step), (step,) * 4),
        modules={"transformer": ModuleFacts("Flux", devices={"cuda:0": 7})},
        facts={"utilization": busy},
        children=(Stage("tile", 2.0, 1.0),),
    )  # fmt: skip
    host = HostFacts("CPU", 8, accelerators=tuple(AcceleratorFacts(device, "GPU") for device in allocated))
    values: dict[str, Any] = {
        "host": host, "stages": (denoising,), "facts": {"world_size": 2, "seed": number}, **rest,
    }  # fmt: skip
    return Run(f"id{number}", "FLUX", f"2026-11-21T10:00:0{number}+00:00", 6.0, **values)


def in_group(rank: int, size: int = 3, machine: str = "a") -> dict[str, Any]:
    return {"group": {"rank": rank, "world_size": size, "machine": machine}}


def test_every_rank_is_a_stage_on_one_clock() -> None:
    merged = merge_runs([run_of(2, {}), run_of(0, {})], ["second", "first"])
    assert [(stage.name, stage.started_seconds) for stage in merged.stages] == [
        ("first", 0.0),
        ("second", 2.0),
    ]
    assert (merged.started_at, merged.seconds) == ("2026-11-21T10:00:00+00:00", 8.0)
    inner = merged.stages[1].children[0]
    assert (inner.started_seconds, inner.children[0].started_seconds) == (3.0, 4.0)
    assert inner.steps.started[1] == 0.5


def test_devices_that_belong_to_one_rank_keep_their_names_and_unused_ones_go() -> None:
    merged = merge_runs([run_of(0, {"cuda:0": 10, "cuda:1": 0}), run_of(1, {"cuda:0": 0, "cuda:1": 20})])
    assert [peak.device for peak in merged.peak().accelerators] == ["cuda:0", "cuda:1"]
    second = merged.stages[1].children[0]
    assert second.memory is not None
    assert [one.device for one in second.memory.current.accelerators] == ["cuda:1"]
    assert second.memory.current.device_in_use() == "cuda:1"
    assert list(utilization_of(second)) == ["cuda:1"]
    assert merged.host is not None
    assert [facts.device for facts in merged.host.accelerators] == ["cuda:0", "cuda:1"]


def test_devices_of_the_same_name_are_told_apart_everywhere() -> None:
    merged = merge_runs([run_of(0, {"cuda:0": 10}), run_of(1, {"cuda:0": 20})])
    first, second = (stage.children[0] for stage in merged.stages)
    assert {peak.device: peak.allocated_bytes for peak in merged.peak().accelerators} == {
        "cuda:0 (rank 0)": 10,
        "cuda:0 (rank 1)": 20,
    }
    assert first.modules["transformer"].devices == {"cuda:0 (rank 0)": 7}
    assert utilization_of(second)["cuda:0 (rank 1)"].device == "cuda:0 (rank 1)"
    assert merged.host is not None
    assert len(merged.host.accelerators) == 2


def test_a_rank_that_used_no_device_keeps_the_current_one() -> None:
    merged = merge_runs([run_of(0, {"cuda:0": 0, "cuda:1": 0})])
    assert [peak.device for peak in merged.peak().accelerators] == ["cuda:0"]


def test_the_peak_is_the_highest_of_all_ranks_at_its_time_on_the_common_clock() -> None:
    peak = merge_runs([run_of(0, {}), run_of(2, {})]).peak()
    assert (peak.rss_bytes, peak.rss_at_seconds) == (52, 2.0 + 1.0 + 2.0)


@pytest.mark.parametrize("allocated", [{}, {"cuda:0": 10}])
def test_merged_runs_come_apart_as_they_were(allocated: dict[str, int]) -> None:
    finding = Finding("memory.leak", "warning", "grows")
    parts = [
        run_of(0, allocated, findings=(finding,), complete=False, unavailable={"steps": "why"}),
        run_of(1, allocated),
    ]
    merged = run_from_json(run_to_json(merge_runs(parts)))
    assert ranks_of(merged) == {"rank 0": parts[0], "rank 1": parts[1]}
    assert ranks_of(parts[0]) == {}


def test_facts_that_all_share_are_the_runs() -> None:
    merged = merge_runs([run_of(0, {}), run_of(1, {})])
    assert merged.facts == {"world_size": 2, "ranks": ["rank 0", "rank 1"]}


def test_it_is_complete_if_all_are_and_an_error_shows() -> None:
    failed = run_of(1, {}, complete=False, stages=(Stage("denoising", 0.0, 1.0, False, "OOM"),))
    merged = merge_runs([run_of(0, {}), failed])
    assert not merged.complete
    assert [(stage.success, stage.error) for stage in merged.stages] == [
        (True, None),
        (False, "denoising: OOM"),
    ]


def test_machines_that_differ_are_told_of_by_rank() -> None:
    merged = merge_runs([run_of(0, {}), run_of(1, {}, host=HostFacts("another CPU", 64))])
    assert (merged.host, merged.unavailable) == (None, {"host": DIFFERENT_MACHINES})
    assert merged.stages[1].facts["rank"]["host"]["cpu_model"] == "another CPU"


def test_the_same_runs_give_the_same_id() -> None:
    parts = [run_of(0, {}), run_of(1, {})]
    assert merge_runs(parts).id == merge_runs(parts).id != merge_runs(parts[:1]).id


@pytest.mark.parametrize(
    ("runs", "names", "said"),
    [
        ([], None, "no runs"),
        ([run_of(0, {})], ["a", "b"], "1 runs, but 2 names"),
        ([run_of(0, {}), run_of(1, {})], ["a", "a"], "name 'a' is given twice"),
        ([run_of(0, {}), run_of(0, {})], None, "run 'id0' is given twice"),
        (
            [run_of(0, {}, facts=in_group(1)), run_of(1, {}, facts=in_group(1))],
            None,
            "'rank 1' is given twice",
        ),
        ([run_of(0, {}, facts=in_group(0)), run_of(1, {}, facts=in_group(1, 2))], None, "groups of 2 and 3"),
        ([Run("x", "", "yesterday", 1.0)], None, "'yesterday', which is not a valid time"),
    ],
)
def test_what_cannot_be_merged_is_refused(runs: list[Run], names: list[str] | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        merge_runs(runs, names)


def test_a_slow_rank_is_found_with_its_factor() -> None:
    merged = merge_runs([run_of(0, {}), run_of(1, {}, step=0.75), run_of(2, {})])
    finding = next(one for one in diagnose(merged) if one.id == "ranks.slow_rank")
    assert finding.evidence == {"rank": "rank 1", "step_seconds": 0.75, "others_seconds": 0.5}
    assert "1.50 times" in finding.message


def test_even_ranks_are_no_finding() -> None:
    assert not diagnose(merge_runs([run_of(0, {}), run_of(1, {}, step=0.52)]))


def test_what_is_wrong_with_one_rank_names_it() -> None:
    hot = to_plain(DeviceUtilization("cuda:0", 20, heat_percent=50.0))
    stage = Stage("denoising", 0.0, 5.0, steps=Steps((0.0,), (5.0,)), facts={"utilization": {"cuda:0": hot}})
    merged = merge_runs([run_of(0, {}), run_of(1, {}, stages=(stage,))])
    (finding,) = diagnose(merged)
    assert (finding.id, finding.evidence["rank"]) == ("utilization.slowed_by_heat", "rank 1")


def test_ranks_have_the_numbers_that_they_say_in_whatever_order_they_come() -> None:
    runs = {rank: run_of(number, {}, facts=in_group(rank, 12)) for number, rank in enumerate((10, 2, 11))}
    assert {name: run.id for name, run in ranks_of(merge_runs(runs.values())).items()} == {
        "rank 10": "id0",
        "rank 2": "id1",
        "rank 11": "id2",
    }
    unsaid = run_of(3, {}, facts={"group": {"rank": "0", "world_size": 2}})
    assert set(ranks_of(merge_runs([runs[10], unsaid]))) == {"rank 0", "rank 1"}


def test_ranks_that_are_missing_are_named() -> None:
    def told(*ranks: int, size: int = 3) -> list[str]:
        runs = [run_of(number, {}, facts=in_group(rank, size)) for number, rank in enumerate(ranks)]
        return [one.message for one in diagnose(merge_runs(runs)) if one.id == "ranks.missing"]

    assert told(0, 1, 2) == []
    assert told(2, 0) == ["1 rank of 3 missing: 1."]
    (message,) = told(0, size=2**60)
    assert message.startswith(f"{2**60 - 1:,} ranks of {2**60} missing: 1, 2, 3,")
    assert message.endswith(f"8 and {2**60 - 9} more.")
    assert not [
        one for one in diagnose(merge_runs([run_of(0, {}), run_of(1, {})])) if one.id == "ranks.missing"
    ]


def test_machines_of_the_same_make_are_told_apart_by_their_names() -> None:
    one = merge_runs([run_of(0, {}, facts=in_group(0)), run_of(1, {}, facts=in_group(1))])
    assert one.host is not None
    assert machines_of(ranks_of(one)) == {}
    two = merge_runs([run_of(0, {}, facts=in_group(0)), run_of(1, {}, facts=in_group(1, machine="b"))])
    assert two.unavailable["host"] == DIFFERENT_MACHINES
    assert machines_of(ranks_of(two)) == {"rank 0": "a", "rank 1": "b"}


RANK_SCRIPT = """
import torch.distributed as dist
from sigmascope.monitor.performance import PerformanceMonitor
dist.init_process_group("gloo")
monitor = PerformanceMonitor(sample_hz=None)
with monitor.monitor_generation("pocket", num_steps=3) as watching:
    for _ in range(3):
        watching.start_step_timing()
        dist.barrier()
        watching.end_step_timing()
monitor.runs[0].save(f"{'ba'[dist.get_rank()]}.json")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_torchrun_starts_becomes_one_run(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    (tmp_path / "ranks.py").write_text(RANK_SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "ranks.py",
    ]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    merged = merge_runs([load_run(path) for path in sorted(tmp_path.glob("*.json"))])
    assert ranks_of(merged)["rank 0"].id == load_run(tmp_path / "b.json").id
    assert ranks_of(merged)["rank 1"].facts["group"] == {
        "rank": 1, "world_size": 2, "machine": socket.gethostname(),
    }  # fmt: skip
    assert merged.host is not None
    assert not [finding for finding in diagnose(merged) if finding.id == "ranks.missing"]
    generations = [stage.children[0] for stage in merged.stages]
    assert [len(stage.steps) for stage in generations] == [3, 3]
    # Both wait for each other in every step, so on one clock their last steps overlap.
    ends = [stage.started_seconds + stage.steps.started[2] + stage.steps.seconds[2] for stage in generations]
    starts = [stage.started_seconds + stage.steps.started[2] for stage in generations]
    assert max(starts) < min(ends)


def test_the_rank_of_a_lora_makes_no_process_of_a_stage() -> None:
    run = Run(
        "1", "FLUX", "2026-11-21T10:00:00+00:00", 1.0, stages=(Stage("lora", 0.0, 1.0, facts={"rank": 16}),)
    )
    assert ranks_of(run) == {}


def test_what_is_folded_of_a_rank_is_the_rank_s_again() -> None:
    folded = Folded(
        100,
        7,
        0.5,
        3.0,
        {"generation": FoldedStages(7, 2.5, 0.75)},
        PeakMemory(90, 1.0, (AcceleratorPeak("cuda:0", 80, 1.0, 80, 1.0),)),
    )
    runs = [run_of(0, {"cuda:0": 10}, folded=folded), run_of(1, {"cuda:0": 20})]
    merged = run_from_json(run_to_json(merge_runs(runs)))
    assert [one.folded for one in ranks_of(merged).values()] == [folded, None]
    peaks = [stage.peak for stage in merged.stages]
    assert [peak and peak.accelerators[0].allocated_bytes for peak in peaks] == [80, 20]
    assert len({peak.accelerators[0].device for peak in peaks if peak}) == 2


def test_ids_with_lone_surrogates_which_json_may_hold_can_be_merged() -> None:
    runs = [replace(run_of(0, {}), id="\udcff"), run_of(1, {})]
    assert merge_runs(runs).id != merge_runs([replace(runs[0], id="a"), runs[1]]).id
