"""What the LoRA's file says, and whether it is for the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.modules import Q
from tests.comfy_shapes.patchers import ModelPatcher

from sigmascope.lora.applied_verdict import AppliedModule, AppliedVerdict
from sigmascope.lora.file_verdict import LoraVerdict, ModuleVerdict
from sigmascope.lora.verdict import verdict_finding
from sigmascope.records.run import Finding
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline
from sigmascope.stages.lora_findings import file_findings


@pytest.fixture
def lora_path(tmp_path: Path) -> Path:
    up, down, *_ = lora_parts()
    prefix = Q.removesuffix(".weight")
    path = tmp_path / "style.safetensors"
    tensors = {f"{prefix}.lora_up.weight": up.contiguous(), f"{prefix}.lora_down.weight": down.contiguous()}
    save_file({**tensors, f"{prefix}.alpha": torch.tensor(1.0)}, path, {"ss_base_model_version": "sd_v1"})
    return path


def test_the_files_facts_are_in_the_baseline(unet: ModelPatcher, lora_path: Path) -> None:
    facts = capture_lora_baseline(unet, None, lora_path)["lora_file"]
    assert (facts["filename"], facts["file_exists"]) == ("style.safetensors", True)
    assert facts["file_size"] == lora_path.stat().st_size / 2**20
    assert (facts["rank"], facts["alpha"], facts["modules"]) == (2, 1.0, 1)
    assert facts["base_hint"] == "sd15"


def test_a_file_that_is_not_there_is_told(unet: ModelPatcher, tmp_path: Path) -> None:
    facts = capture_lora_baseline(unet, None, tmp_path / "gone.safetensors")["lora_file"]
    assert (facts["filename"], facts["file_exists"], facts["file_size"]) == ("gone.safetensors", False, None)
    assert "does not exist" in facts["unavailable"]["file_size"]


def test_a_damaged_file_has_its_reason(unet: ModelPatcher, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    facts = capture_lora_baseline(unet, None, path)["lora_file"]
    assert facts["file_size"] == 10 / 2**20
    assert facts["rank"] is None
    assert "cut.safetensors" in facts["unavailable"]["rank"]


def test_the_files_modules_are_matched_with_the_model(unet: ModelPatcher, lora_path: Path) -> None:
    baseline = capture_lora_baseline(unet, None, lora_path, keys="lora")
    assert baseline["unet"]["fingerprinted_keys"] == 1
    found = analyze_lora_application_results(baseline, unet, None, (unet, None))
    assert found["verdict"] is not None
    assert (found["verdict"]["matched_modules"], found["verdict"]["total_modules"]) == (1, 1)
    assert found["lora_file"]["filename"] == "style.safetensors"


def test_modules_that_are_on_the_model_are_found_by_their_numbers(
    unet: ModelPatcher, lora_path: Path
) -> None:
    baseline = capture_lora_baseline(unet, None, lora_path)
    unet.add_patches({Q: lora_adapter()}, 0.5)
    found = analyze_lora_application_results(baseline, unet, None, (unet, None))
    assert found["applied_verdict"] is not None
    assert found["applied_verdict"]["complete"] is True
    assert found["applied_verdict"]["strengths"] == {0.5: 1}


def test_a_file_of_which_nothing_is_on_the_model_is_critical(unet: ModelPatcher, lora_path: Path) -> None:
    baseline = capture_lora_baseline(unet, None, lora_path)
    clone = unet.clone()
    found = analyze_lora_application_results(baseline, clone, None, (clone, None))
    assert (found["findings"][0]["id"], found["findings"][0]["severity"]) == ("lora_not_loaded", "critical")
    assert found["success"] is False


@pytest.mark.parametrize("id", ["lora_kohya_names", "lora_comfyui_only"])
@pytest.mark.parametrize(("host", "named"), [("comfyui", False), ("diffusers", True)])
def test_what_only_another_host_does_with_the_file_is_left_out(host: str, named: bool, id: str) -> None:
    finding = Finding(id, "warning", "diffusers reads …")
    verdict = LoraVerdict("x.safetensors", findings=(finding,))
    found = file_findings(verdict, None, host)
    assert (id in {one.id for one in found}) is named


@pytest.mark.parametrize("host", ["comfyui", "diffusers"])
def test_modules_whose_names_have_another_beginning_are_told_for_every_host(host: str) -> None:
    finding = Finding("lora_prefix", "error", "2 of 3 modules have an unknown prefix.")
    assert finding in file_findings(LoraVerdict("x.safetensors", findings=(finding,)), None, host)


@pytest.mark.parametrize(
    ("id", "is_why"), [("lora_comfyui_loses_magnitudes", False), ("lora_comfyui_loses_attention", True)]
)
def test_what_a_loader_leaves_out_of_a_file_is_why_nothing_is_there_if_it_may_be_all(
    id: str, is_why: bool
) -> None:
    """ComfyUI applies a DoRA without its magnitudes."""
    form = Finding(id, "warning", "ComfyUI leaves out some.")
    applied = AppliedVerdict(
        "x.safetensors",
        (AppliedModule("a"),),
        findings=(
            verdict_finding("lora_not_loaded", modules="1 module", why="the model has no weight for it"),
        ),
    )
    found = file_findings(LoraVerdict("x.safetensors", findings=(form,)), applied, "comfyui")
    (not_loaded,) = (one.message for one in found if one.id == "lora_not_loaded")
    assert not_loaded.endswith("ComfyUI leaves out some.") is is_why


@pytest.mark.parametrize(
    ("missing", "is_said"), [(("norm",), True), (("norm", "q"), False), (("q",), False), (("q.bias",), False)]
)
def test_whole_differences_are_why_they_alone_are_not_there(missing: tuple[str, ...], is_said: bool) -> None:
    """To convert the file does not help then: PEFT's format holds none of a norm."""
    kinds = {"norm": "diff", "q": "lora", "q.bias": "lora", "k": "lora"}
    modules = [ModuleVerdict(name, kind, (4,), "denoiser") for name, kind in kinds.items()]
    form = verdict_finding(
        "lora_whole_differences", keys="1 whole difference", first="norm.diff", takes="drops it silently"
    )
    partly = verdict_finding(
        "lora_partly_loaded", missing=len(missing), modules="4 modules", are="are", why="why", first="a"
    )
    on_model = tuple(AppliedModule(name) for name in missing)
    applied = AppliedVerdict("x.safetensors", on_model, findings=(partly,))
    verdict = LoraVerdict("x.safetensors", modules=tuple(modules), findings=(form,))
    found = {one.id: one for one in file_findings(verdict, applied, "diffusers")}
    told = found["lora_partly_loaded"]
    assert told.message.endswith("diffusers drops it silently.") is is_said
    assert (told.advice == form.advice) is is_said
    assert told.severity == "error"
