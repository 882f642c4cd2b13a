from collections.abc import Iterator

import pytest
from tests.analysis.diagnostics.simulated import SimulatedGpu, on_this_gpu
from tests.analysis.faulty_runs import GIB, component, device_memory, pipeline, stage, weights
from tests.families import FAMILIES, generate, make_pipeline
from torch import nn

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.generations import Case
from sigmascope.analysis.rules import RULES, Rule, Seen
from sigmascope.records.run import CallFacts, Run, Stage
from sigmascope.records.serialization import to_plain


def run_of(*stages: Stage, **facts: object) -> Run:
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=stages, facts=facts)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("sd15", "flux"))) for name in FAMILIES],
)
def test_a_healthy_generation_of_each_family_warns_of_nothing(family: str) -> None:
    pipe, gpu = make_pipeline(family), SimulatedGpu(scale=2**12)
    gpu.put(*(part for part in pipe.components.values() if isinstance(part, nn.Module)))
    with on_this_gpu(gpu), sigmascope.watch(pipe, sample_hz=None) as watch, gpu:
        generate(pipe, family)
        gpu.synchronize()
    found = {finding.id for finding in diagnose(watch.record()) if finding.severity != "info"}
    assert found == {"placement.cpu_while_accelerator_free"}  # where its tensors really are


def test_the_gravest_come_first() -> None:
    wasted = component("denoiser", module=weights(device="cpu"), offload="sequential")
    kept = stage("denoising", **device_memory(10 * GIB, 14 * GIB, 15 * GIB))
    facts = to_plain(pipeline(transformer=wasted, vae=component("vae", tiling=True)))
    severities = [
        finding.severity for finding in diagnose(run_of(kept, stage("latent_decoding"), pipeline=facts))
    ]
    assert severities == sorted(severities, key=["critical", "error", "warning", "info"].index)
    assert {"warning", "info"} <= set(severities)


def test_the_same_of_several_generations_is_said_once_with_their_number() -> None:
    plain = to_plain(pipeline(class_name="QwenImageEditPipeline"))
    call = to_plain(CallFacts(has_image=False))
    stages = [stage("generation", at=float(index), facts={"call": call}) for index in range(3)]
    (finding,) = diagnose(run_of(*stages, pipeline=plain))
    assert finding.evidence["generations"] == 3


def test_a_rule_that_fails_costs_no_other_its_finding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(case: Case) -> Iterator[Seen]:
        raise KeyError("odd record")

    monkeypatch.setitem(RULES, "broken", Rule("broken", ("info",), "faults", "generation", broken))
    kept = stage("denoising", **device_memory(10 * GIB, 14 * GIB, 15 * GIB))
    assert [finding.id for finding in diagnose(run_of(kept))] == ["memory.kept_after_stage"]
    assert "broken failed: KeyError" in caplog.text


def test_facts_that_are_no_pipeline_are_logged_and_hurt_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert diagnose(run_of(pipeline={"class_name": 3})) == ()
    assert "cannot be read" in caplog.text
