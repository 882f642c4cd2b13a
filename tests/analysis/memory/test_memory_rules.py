from collections.abc import Callable

import pytest
from tests.analysis.faulty_runs import GIB, device_memory, stage

from sigmascope.records.run import Finding, TensorFacts

Found = Callable[..., dict[str, Finding]]


def tensor(*, nans: int = 0, infinities: int = 0, dtype: str = "float16") -> TensorFacts:
    return TensorFacts((1, 4, 8, 8), dtype, "cuda:0", 512, 256, nan_count=nans, inf_count=infinities)


def test_memory_that_is_held_and_never_was_in_tensors_is_told(found: Found) -> None:
    memory = device_memory(8 * GIB, 8 * GIB, reserved=12 * GIB)
    finding = found(stage("latent_decoding", **memory))["memory.fragmented"]
    assert finding.evidence["idle_mb"] == 4096.0
    assert finding.evidence["fragmentation"] == pytest.approx(1 / 3)
    assert finding.severity == "info"  # most of the device is free


def test_gaps_are_a_warning_where_memory_is_short(found: Found) -> None:
    memory = device_memory(8 * GIB, 20 * GIB, reserved=36 * GIB)
    assert found(stage("latent_decoding", **memory))["memory.fragmented"].severity == "warning"


def test_what_the_allocator_kept_of_a_peak_is_no_gap(found: Found) -> None:
    assert not found(stage("denoising", **device_memory(8 * GIB, 8 * GIB, 20 * GIB, reserved=20 * GIB)))


def test_what_it_held_before_the_run_is_not_laid_to_it(found: Found) -> None:
    memory = device_memory(20 * GIB, 8 * GIB, 8 * GIB, reserved=20 * GIB)
    assert "memory.fragmented" not in found(stage("denoising", **memory))


def test_a_small_gap_is_no_fragmentation(found: Found) -> None:
    assert not found(stage("denoising", **device_memory(GIB, GIB, reserved=GIB + GIB // 2)))
    assert not found(stage("denoising", **device_memory(20 * GIB, 20 * GIB, reserved=24 * GIB)))


def test_a_peak_at_the_edge_of_the_device_is_told_with_its_stage(found: Found) -> None:
    near = stage("latent_decoding", **device_memory(10 * GIB, 10 * GIB, 39 * GIB))
    finding = found(stage("denoising", **device_memory(10 * GIB, 10 * GIB, 20 * GIB)), near)[
        "memory.near_the_limit"
    ]
    assert finding.stage == "latent_decoding"
    assert "memory.near_the_limit" not in found(stage("x", **device_memory(10 * GIB, 10 * GIB, 30 * GIB)))


def test_what_a_stage_keeps_is_told_unless_it_loads(found: Found) -> None:
    memory = device_memory(10 * GIB, 14 * GIB, 15 * GIB)
    finding = found(stage("denoising", **memory))["memory.kept_after_stage"]
    assert finding.evidence == {"device": "cuda:0", "kept_mb": 4096.0, "peak_growth_mb": 5120.0}
    assert not found(stage("model_loading", **memory))
    assert not found(stage("denoising", **device_memory(10 * GIB, 10 * GIB + 2**20, 15 * GIB)))


def test_what_an_inner_stage_keeps_is_said_of_it_alone(found: Found) -> None:
    memory = device_memory(10 * GIB, 14 * GIB, 15 * GIB)
    findings = found(stage("generation", **memory, children=(stage("denoising", **memory),)))
    assert findings["memory.kept_after_stage"].stage == "denoising"


def test_what_is_gone_when_the_generation_is_over_was_not_kept(found: Found) -> None:
    offloaded_later = stage("denoising", **device_memory(1 * GIB, 9 * GIB, 10 * GIB))
    around = stage("generation", **device_memory(1 * GIB, 1 * GIB, 10 * GIB), children=(offloaded_later,))
    assert not found(around)


def test_the_first_tensor_that_is_not_finite_is_named(found: Found) -> None:
    finding = found(
        stage("text_encoding", at=0.0, tensors={"embeds": tensor()}),
        stage("latent_decoding", at=2.0, tensors={"image": tensor(nans=256)}),
        stage("denoising", at=1.0, tensors={"latents": tensor(nans=3, infinities=1)}),
    )["values.not_finite"]
    assert finding.stage == "denoising"
    assert finding.message.startswith(
        "latents of denoising is the first tensor with NaN or infinity: 3 NaN and 1 infinite value among 256 elements."
    )
    assert "bfloat16" in (finding.advice or "")
