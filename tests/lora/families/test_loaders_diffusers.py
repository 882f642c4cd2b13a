"""What the records say that diffusers reads of families whose pipelines are in no other test, held to its loaders."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import lora_pipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from tests.lora.families.small_models import small
from torch import Tensor, nn

from sigmascope.lora.families import FAMILIES, row_of_diffusers
from sigmascope.lora.hosts import host_readings

LOADERS = {
    "auraflow": lora_pipeline.AuraFlowLoraLoaderMixin,
    "cogvideox": lora_pipeline.CogVideoXLoraLoaderMixin,
    "cogview4": lora_pipeline.CogView4LoraLoaderMixin,
    "cosmos": lora_pipeline.CosmosLoraLoaderMixin,
    "flux3": lora_pipeline.Flux3LoraLoaderMixin,
    "ideogram4": lora_pipeline.Ideogram4LoraLoaderMixin,
    "krea2": lora_pipeline.Krea2LoraLoaderMixin,
    "kandinsky5": lora_pipeline.KandinskyLoraLoaderMixin,
    "ltx2": lora_pipeline.LTX2LoraLoaderMixin,
    "mochi": lora_pipeline.Mochi1LoraLoaderMixin,
    "sana": lora_pipeline.SanaLoraLoaderMixin,
}


def lora_of(family: str, start: str, *, alpha: bool) -> dict[str, Tensor]:
    """A LoRA of the first blocks' layers that are not fused, in diffusers' names behind `transformer.`."""
    state: dict[str, Tensor] = {}
    for path, module in small(family).named_modules():
        row = row_of_diffusers(family, path)
        if not isinstance(module, nn.Linear) or ".0." not in path or row is None:
            continue
        if start == "diffusion_model." and len(row.parts) > 1:
            continue
        name = start + (path if start == "transformer." else row.original)
        state[f"{name}.lora_A.weight"] = torch.ones(2, module.in_features)
        state[f"{name}.lora_B.weight"] = torch.ones(module.out_features, 2)
        if alpha:
            state[f"{name}.alpha"] = torch.tensor(4.0)
    return state


def in_diffusers(family: str, state: dict[str, Tensor]) -> tuple[int, set[float]]:
    """How many modules a pipeline's `load_lora_weights` takes, and the factors on up·down; none if it refuses the file."""
    model = copy.deepcopy(small(family)).to_empty(device="cpu")
    parts: dict[str, Any] = {
        "transformer": model,
        "connectors": None,
        "components": {},
        "hf_device_map": None,
    }
    pipeline: Any = type("Pipeline", (LOADERS[family],), parts)()
    try:
        pipeline.load_lora_weights(dict(state))
    except ValueError:  # such as of names without "lora" in them, which alphas have
        return 0, set()
    tuned = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    taken = [module for module in tuned if module.lora_B["default_0"].weight.abs().sum() > 0]
    return len(taken), {_factor(module) for module in taken}


def _factor(module: Any) -> float:
    """On up·down of ones; some of it may be in the factors themselves."""
    up, down = (getattr(module, name)["default_0"].weight for name in ("lora_B", "lora_A"))
    return float(module.scaling["default_0"] * (up[:1] @ down[:, :1]).detach()) / len(down)


@pytest.mark.parametrize("alpha", [False, True], ids=["no alpha", "alpha"])
@pytest.mark.parametrize("start", ["transformer.", "diffusion_model."])
@pytest.mark.parametrize("family", LOADERS)
def test_diffusers_takes_what_the_record_says(family: str, start: str, alpha: bool, tmp_path: Path) -> None:
    state = lora_of(family, start, alpha=alpha)
    save_file(state, tmp_path / "lora.safetensors", {"modelspec.architecture": FAMILIES[family].architecture})
    reading = host_readings(tmp_path / "lora.safetensors")[0]
    assert reading.modules == sum(key.endswith("lora_A.weight") for key in state)
    if reading.taken is None:
        assert (family, start) == (
            "cosmos",
            "diffusion_model.",
        )  # Anima's loader reads them, Cosmos' does not
        return
    assert (reading.taken, set(reading.strengths or {})) == in_diffusers(family, state)
