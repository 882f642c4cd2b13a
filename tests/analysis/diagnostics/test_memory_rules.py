from collections.abc import Callable

import pytest

from sigmascope.records.facts import TensorFacts
from sigmascope.records.finding import Finding

from .conftest import GIB, device_memory, stage

Found = Callable[..., dict[str, Finding]]


def tensor(*, nans: int = 0, infinities: int = 0, dtype: str = "float16") -> TensorFacts:
    return TensorFacts((1, 4, 8, 8), dtype, "cuda:0", 512, 256, nan_count=nans, inf_count=infinities)


def test_memory_that_is_held_and_not_used_is_told(found: Found) -> None:
    memory = device_memory(8 * GIB, 8 * GIB, reserved=12 * GIB)
    finding = found(stage("latent_decoding", **memory))["memory.fragmented"]
    assert finding.evidence["idle_mb"] == 4096.0
    assert finding.evidence["fragmentation"] == pytest.approx(1 / 3)


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


def test_the_first_tensor_that_is_not_finite_is_named(found: Found) -> None:
    finding = found(
        stage("text_encoding", at=0.0, tensors={"embeds": tensor()}),
        stage("latent_decoding", at=2.0, tensors={"image": tensor(nans=256)}),
        stage("denoising", at=1.0, tensors={"latents": tensor(nans=3, infinities=1)}),
    )["values.not_finite"]
    assert finding.stage == "denoising"
    assert finding.message.startswith(
        "latents of denoising is the first tensor with 3 NaN and 1 infinite values"
    )
    assert "bfloat16" in (finding.advice or "")
