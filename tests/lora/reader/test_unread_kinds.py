from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.applied_verdict import judge_applied
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.inspect import inspect_lora
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.stages.lora_on_model import lora_file_facts

MODEL = {
    "diffusion_model.input_blocks.0.0.weight": (8, 4, 3, 3),
    "diffusion_model.time_embed.0.weight": (32, 8),
    "diffusion_model.out.2.weight": (4, 8, 3, 3),
}
NAME = "lora_unet_time_embed_0"
FILES: dict[str, dict[str, Tensor]] = {
    "oft": {f"{NAME}.oft_blocks": torch.randn(4, 8, 8), f"{NAME}.alpha": torch.tensor(1.0)},
    "boft": {f"{NAME}.oft_blocks": torch.randn(2, 4, 8, 8), f"{NAME}.rescale": torch.ones(32, 1)},
    "glora": {
        f"{NAME}.a1.weight": torch.randn(8, 2),
        f"{NAME}.a2.weight": torch.randn(2, 8),
        f"{NAME}.b1.weight": torch.randn(32, 2),
        f"{NAME}.b2.weight": torch.randn(2, 8),
    },
}


def saved(folder: Path, state: Mapping[str, Tensor]) -> Path:
    save_file(dict(state), folder / "lora.safetensors")
    return folder / "lora.safetensors"


@pytest.mark.parametrize("kind", FILES)
def test_modules_of_kinds_that_are_not_read_match_by_name(tmp_path: Path, kind: str) -> None:
    (module,) = judge_lora(saved(tmp_path, FILES[kind]), MODEL).modules
    assert (module.kind, module.matched, module.finite) == (kind, True, True)
    assert module.layers == ("diffusion_model.time_embed.0.weight",)


@pytest.mark.parametrize("kind", FILES)
def test_who_applies_them_is_told(tmp_path: Path, kind: str) -> None:
    verdict = judge_lora(saved(tmp_path, FILES[kind]), MODEL)
    assert "lora_comfyui_only" in {finding.id for finding in verdict.findings}


def test_their_nan_is_found_too(tmp_path: Path) -> None:
    state = {key: tensor * torch.nan for key, tensor in FILES["oft"].items()}
    assert judge_lora(saved(tmp_path, state), MODEL).not_finite == (NAME,)


def test_what_has_no_layer_has_a_reason(tmp_path: Path) -> None:
    state = {key.replace("time_embed_0", "time_embed_7"): tensor for key, tensor in FILES["oft"].items()}
    (module,) = judge_lora(saved(tmp_path, state), MODEL).unmatched
    assert module.reason == "unknown"  # no other block has it: `time_embed.0` is another layer


def test_beside_plain_factors_they_are_read(tmp_path: Path) -> None:
    plain = {"lora_unet_out_2.lora_up.weight": torch.randn(4, 2, 1, 1)}
    plain["lora_unet_out_2.lora_down.weight"] = torch.randn(2, 8, 3, 3)
    verdict = judge_lora(saved(tmp_path, FILES["oft"] | plain), MODEL)
    assert {module.kind for module in verdict.modules if module.matched} == {"lora", "oft"}


@pytest.mark.parametrize("kind", FILES)
def test_they_are_found_on_a_model(tmp_path: Path, kind: str) -> None:
    held = {
        key.split(".")[1].replace("oft_blocks", "blocks"): tensor
        for key, tensor in FILES[kind].items()
        if not key.endswith("alpha")
    }
    key = "diffusion_model.time_embed.0.weight"
    patches = [
        AppliedPatch(key, "unknown", "unknown", "", "merged", tensors=tensors, weight_shape=(32, 8))
        for tensors in (held, {name: torch.randn_like(tensor) for name, tensor in held.items()})
    ]
    verdict = judge_applied(saved(tmp_path, FILES[kind]), patches, MODEL)
    assert verdict.complete
    assert [module.times for module in verdict.modules] == [1]


@pytest.mark.parametrize("kind", FILES)
def test_inspection_shows_what_needs_no_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lora.safetensors"
    save_file(FILES[kind], path, {"ss_base_model_version": "sdxl_base_v1-0"})
    report = inspect_lora(path)
    (module,) = report.modules
    assert (module.kind, module.problem, module.norm) == (kind, "needs_base", None)
    assert (report.norm, report.blocks[0].norm, report.blocks[0].share) == (None, None, None)
    assert module.parameters == sum(t.numel() for key, t in FILES[kind].items() if not key.endswith("alpha"))
    assert report.metadata == {"ss_base_model_version": "sdxl_base_v1-0"}


def test_inspection_tells_their_nan(tmp_path: Path) -> None:
    state = {key: tensor * torch.nan for key, tensor in FILES["glora"].items()}
    assert inspect_lora(saved(tmp_path, state)).not_finite == (NAME,)


@pytest.mark.parametrize("kind", FILES)
def test_a_baseline_has_the_facts_of_their_file(tmp_path: Path, kind: str) -> None:
    facts = lora_file_facts(saved(tmp_path, FILES[kind]))
    assert (facts["format"], facts["modules"], facts["rank"]) == ("kohya", 1, 2 if kind == "glora" else None)


def test_an_empty_file_is_said_to_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(LoraFormatError, match="it holds no tensors") as raised:
        inspect_lora(saved(tmp_path, {}))
    assert raised.value.hint
