"""Nineteen files that are not for the pipeline that loads them: diffusers mostly says nothing, the verdict does."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, make_pipeline
from tests.families.loras import State, as_kohya, lora_state, modules_of, write
from tests.families.mismatches import MISMATCHES, Edit, Mismatch, into_pipeline, wider

from sigmascope.lora.applied_verdict import AppliedModule, AppliedVerdict, applied_findings, judge_applied
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.file_verdict import LoraVerdict
from sigmascope.lora.verdict import verdict_finding
from sigmascope.probes.peft import read_adapters
from sigmascope.records.run import Finding
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline
from sigmascope.stages.lora_findings import file_findings

pytestmark = pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")


@dataclass(frozen=True)
class Outcome:
    """What became of a mismatch."""

    case: Mismatch
    error: Exception | None
    loaded: int
    verdict: LoraVerdict
    applied: AppliedVerdict


@cache
def lora_of(family: str, parts: tuple[str, ...]) -> State:
    """Factors for these parts of a family's pipeline; not to be changed."""
    return lora_state(make_pipeline(family), parts)


@pytest.fixture(scope="module", params=MISMATCHES)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    case = MISMATCHES[request.param]
    parts = case.parts or (FAMILIES[case.made_for].denoiser,)
    state = case.edit(lora_of(case.made_for, parts))
    path = write(state, tmp_path_factory.mktemp("mismatch") / "lora.safetensors")
    path.write_bytes(path.read_bytes()[: int(case.cut * path.stat().st_size)])
    pipeline = make_pipeline(case.into)
    verdict = judge_lora(path, pipeline)
    error = load_error(case, pipeline, path)
    patches = read_adapters(pipeline).value or ()
    return Outcome(case, error, len(patches), verdict, judge_applied(path, patches, pipeline))


def load_error(case: Mismatch, pipeline: Any, path: Path) -> Exception | None:
    try:
        case.load(pipeline, path)
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        return error
    return None


def test_nineteen_mismatches_are_tried() -> None:
    assert len(MISMATCHES) == 19


@pytest.mark.slow
def test_diffusers_loads_what_it_can_and_mostly_raises_nothing(outcome: Outcome) -> None:
    assert type(outcome.error) is (outcome.case.raises or type(None))
    assert outcome.loaded == outcome.case.loaded


def test_verdict_on_file_and_pipeline_names_it(outcome: Outcome) -> None:
    found = {finding.id: finding.message for finding in outcome.verdict.findings}
    assert outcome.case.says in found[outcome.case.finding]


def test_verdict_on_what_was_loaded_names_it(outcome: Outcome) -> None:
    found = [finding.id for finding in outcome.applied.findings]
    assert found == ([] if outcome.case.applied is None else [outcome.case.applied])


def test_that_nothing_was_loaded_is_told_with_the_reason(outcome: Outcome) -> None:
    found = [*file_findings(outcome.verdict, outcome.applied, "diffusers")]
    not_loaded = next((one for one in found if one.id == "lora_not_loaded"), None)
    if outcome.case.finding in ("lora_matches_nothing", "lora_unreadable") or not_loaded is None:
        return
    reason = next(one for one in outcome.verdict.findings if one.id == outcome.case.finding)
    in_a_sentence = f"t{reason.message[1:]}" if reason.message.startswith("The ") else reason.message
    assert not_loaded.message.endswith(f": {in_a_sentence}")
    assert not_loaded.advice == reason.advice


@pytest.mark.parametrize(("there", "kept"), [(True, False), (False, True)])
def test_a_remark_on_other_loaders_stands_only_where_nothing_was_loaded(there: bool, kept: bool) -> None:
    remark = Finding("lora_adapter_prefix", "info", "It needs a prefix.", {}, "Pass it.")
    module = AppliedModule("unet.conv_in", keys=("conv_in.weight",) if there else ())
    applied = AppliedVerdict("style.safetensors", (module, AppliedModule("unet.conv_out")))
    found = file_findings(LoraVerdict("style.safetensors", findings=(remark,)), applied, "diffusers")
    assert (remark in found) is kept


def test_unmatched_modules_have_a_reason(outcome: Outcome) -> None:
    assert all(module.reason and module.detail for module in outcome.verdict.unmatched)


def test_findings_say_what_to_do(outcome: Outcome) -> None:
    serious = [finding for finding in outcome.verdict.findings if finding.severity in ("critical", "error")]
    assert all(finding.advice for finding in serious)


def analysed(made_for: str, into: str, edit: Edit, folder: Path) -> dict[str, Any]:
    """The stage's analysis of a LoRA for one family's denoiser in a pipeline of another."""
    state = edit(lora_of(made_for, (FAMILIES[made_for].denoiser,)))
    path = write(state, folder / "lora.safetensors")
    pipeline = make_pipeline(into)
    denoiser = getattr(pipeline, FAMILIES[into].denoiser)
    baseline = capture_lora_baseline(denoiser, pipeline.text_encoder, path)
    into_pipeline(pipeline, path)
    return dict(analyze_lora_application_results(baseline, denoiser, pipeline.text_encoder, pipeline))


def test_analysis_calls_nothing_loaded_no_success(tmp_path: Path) -> None:
    analysis = analysed("flux", "sd15", dict, tmp_path)
    told = (analysis["lora_application_success"], analysis["effective"], analysis["success"])
    assert told == (True, False, False)
    assert analysis["verdict"]["matched_modules"] == 0
    assert analysis["unet_lora_patches"]["total_patched_keys"] == 0
    assert "lora_not_loaded" in {finding["id"] for finding in analysis["findings"]}


def test_analysis_sees_that_diffusers_widened_the_model(tmp_path: Path) -> None:
    analysis = analysed("flux", "flux", wider, tmp_path)
    found = {finding["id"]: finding["message"] for finding in analysis["findings"]}
    assert "50 weights have another shape now" in found["weights_reshaped"]
    assert "weights_changed_unexplained" not in found
    changes = analysis["unet_weight_changes"]["weight_changes"]
    assert sum(change["shape_changed"] for change in changes.values()) == 50
    change = changes["context_embedder.weight"]
    assert change["original_shape"] == "torch.Size([16, 24])"
    assert change["modified_shape"] == "torch.Size([16, 48])"


def with_control(state: State) -> State:
    """A control LoRA's: the layer that takes the latent takes a second one."""
    down = "transformer.x_embedder.lora_A.weight"
    return state | {down: torch.cat([state[down], state[down]], 1)}


def test_a_control_lora_is_told_by_its_factors_and_fits_the_layer_that_is_widened_for_it(
    tmp_path: Path,
) -> None:
    state = with_control(lora_of("flux", ("transformer",)))
    pipeline, path = make_pipeline("flux"), write(state, tmp_path / "control.safetensors")
    norm = sqrt(
        sum(
            float(
                (state[f"{m}.lora_B.weight"].double() @ state[f"{m}.lora_A.weight"].double()).square().sum()
            )
            for m in modules_of(state)
        )
    )
    told = []
    for loads in (True, False):
        baseline = capture_lora_baseline(pipeline.transformer, None, path)
        if loads:
            pipeline.load_lora_weights(str(path))
        else:
            pipeline.unload_lora_weights(reset_to_overwritten_params=True)
        analysis = analyze_lora_application_results(baseline, pipeline.transformer, None, pipeline)
        assert analysis["effective"] is True
        assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(norm, rel=1e-3)
        told.append({finding["id"]: finding["severity"] for finding in analysis["findings"]})
    assert told[0] == {"weights_reshaped": "warning"}
    assert told[1]["weights_reshaped"] == "info"


def test_mixed_ranks_are_no_mismatch_and_each_is_read(tmp_path: Path) -> None:
    pipeline = make_pipeline("flux")
    larger = lora_state(pipeline, ("transformer",), only="single_transformer_blocks.0", rank=5)
    state = lora_state(pipeline, ("transformer",), only="single_transformer_blocks") | larger
    path = write(state, tmp_path / "lora.safetensors")
    assert judge_lora(path, pipeline).ranks == {2: 6, 5: 6}
    into_pipeline(pipeline, path)
    patches = read_adapters(pipeline).value or ()
    assert sorted(Counter(patch.rank for patch in patches).items()) == [(2, 6), (5, 6)]
    assert {(patch.scale, patch.strength) for patch in patches} == {(1.0, 1.0)}


def test_layer_that_an_adapter_excludes_is_missing_by_name(tmp_path: Path) -> None:
    import peft

    pipeline = make_pipeline("wan")
    state = lora_state(pipeline, ("transformer",), only="attn1.to_")
    state = {key: value for key, value in state.items() if "to_out" not in key}
    path = write(state, tmp_path / "lora.safetensors")
    config = peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=r".*attn1\.to_[qkv]", exclude_modules=r".*1\.to_k"
    )
    pipeline.transformer.add_adapter(config, "style")
    inner = {key.removeprefix("transformer."): value for key, value in state.items()}
    kept = {key: value for key, value in inner.items() if not key.split(".lora")[0].endswith("1.to_k")}
    peft.set_peft_model_state_dict(pipeline.transformer, kept, "style")
    verdict = judge_applied(path, read_adapters(pipeline).value or (), pipeline)
    assert [module.name for module in verdict.missing] == [
        "transformer.blocks.0.attn1.to_k",
        "transformer.blocks.1.attn1.to_k",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
def test_of_an_alpha_that_is_nan_the_lora_is_on_the_model_and_spoils_it(tmp_path: Path) -> None:
    def with_nan_for_alpha(state: State) -> State:
        kohya = as_kohya(state)
        names = {key.partition(".")[0] for key in kohya}
        return kohya | {f"{name}.alpha": torch.tensor(torch.nan) for name in names}

    found = analysed("sd15", "sd15", with_nan_for_alpha, tmp_path)
    (finding,) = (one for one in found["findings"] if one["severity"] != "info")
    assert finding["id"] == "lora_not_finite"
    spoilt = found["unet_lora_patches"]["not_finite"]
    assert finding["message"].endswith(f"hold NaN or Inf: {spoilt[0]} and {len(spoilt) - 1} more.")


def test_what_only_a_models_own_loader_does_is_no_reason_where_a_pipeline_loaded_it() -> None:
    remark = verdict_finding("lora_kohya_names")
    missing = AppliedVerdict("style.safetensors", (AppliedModule("lora_unet_conv_in"),))
    missing = replace(missing, findings=applied_findings(missing.modules))
    verdict = LoraVerdict("style.safetensors", findings=(remark,))
    by_model, by_pipeline = (
        {one.id: one.message for one in file_findings(verdict, missing, "diffusers", by_pipeline=known)}
        for known in (False, True)
    )
    assert "load_lora_adapter" in by_model["lora_not_loaded"]
    assert by_pipeline.keys() == {"lora_not_loaded"}
    assert "load_lora_adapter" not in by_pipeline["lora_not_loaded"]


def test_what_a_pipelines_loader_does_is_no_reason_where_a_models_own_raised() -> None:
    """As where a folder is given to `load_lora_adapter` without the name of its file."""
    remark = verdict_finding("lora_part_unnamed", part="unet", argument="prefix=None")
    missing = AppliedVerdict("style.safetensors", (AppliedModule("mid_block.to_q"),))
    missing = replace(missing, findings=applied_findings(missing.modules))
    verdict = LoraVerdict("style.safetensors", findings=(remark,))
    raised = "OSError: no file named pytorch_lora_weights.bin"
    by_model, by_pipeline = (
        {
            one.id: one.message
            for one in file_findings(verdict, missing, "diffusers", by_pipeline=known, raised=raised)
        }
        for known in (False, True)
    )
    assert by_model.keys() == {"lora_not_loaded", "lora_part_unnamed"}
    assert by_model["lora_not_loaded"].endswith(f"the loader failed with {raised}.")
    assert "load_lora_weights" in by_pipeline["lora_not_loaded"]
