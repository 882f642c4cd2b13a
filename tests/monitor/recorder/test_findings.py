"""Which of the analyses' findings become the run's."""

import sys
from typing import Any

import pytest

from sigmascope.monitor.guard import Guard
from sigmascope.monitor.recorder import with_findings
from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import AcceleratorFacts, HostFacts, Run, Stage
from sigmascope.records.serialization import to_plain
from sigmascope.stages.latent_validation import memory_findings

GIB = 2**30
DEVICE = "cuda:0"


def decoding_that_ends_with(allocated_gib: int, reserved_gib: int, *, peak_gib: int) -> Run:
    """Of a run on a device of 80 GiB that decodes latents, its analysis included."""

    def memory(allocated: int, reserved: int) -> MemorySnapshot:
        return MemorySnapshot(
            accelerators=(AcceleratorMemory(DEVICE, allocated * GIB, reserved * GIB, 80 * GIB),),
            current_device=DEVICE,
        )

    before, after = memory(2, 2), memory(allocated_gib, reserved_gib)
    share = after.accelerator(DEVICE).fragmentation()
    efficiency: Any = {"fragmentation": share, "cleanup_effectiveness": None}
    found = list(memory_findings(efficiency, reserved_gib * 1024.0, None))
    assert [one.id for one in found] == ["memory_fragmented"]
    stage = Stage(
        "latent_decoding",
        0.0,
        1.0,
        memory=MemoryImpact(before, after),
        peak=PeakMemory(
            accelerators=(AcceleratorPeak(DEVICE, peak_gib * GIB, 0.5, reserved_gib * GIB, 0.5),)
        ),
        facts={
            "latent_decoding": {"findings": [{**to_plain(one), "stage": "latent_decoding"} for one in found]}
        },
    )
    host = HostFacts(accelerators=(AcceleratorFacts(DEVICE, "NVIDIA A100", 80 * GIB),))
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, host=host, stages=(stage,))


def ids(run: Run) -> list[str]:
    return [one.id for one in with_findings(run, Guard()).findings]


def test_a_cache_that_the_stage_itself_needed_is_no_finding_of_the_run() -> None:
    assert ids(decoding_that_ends_with(2, 12, peak_gib=11)) == []


def test_memory_that_was_never_of_use_is_told_by_the_rule_alone() -> None:
    assert ids(decoding_that_ends_with(2, 12, peak_gib=5)) == ["memory.fragmented"]


def test_an_import_that_fails_at_the_interpreters_end_does_not_reach_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sigmascope.analysis.diagnostics", None)
    run = decoding_that_ends_with(2, 12, peak_gib=3)
    found = with_findings(run, Guard())
    assert "sigmascope.analysis.diagnostics" in found.unavailable["findings"]
    assert (found.stages, found.findings) == (run.stages, run.findings)
