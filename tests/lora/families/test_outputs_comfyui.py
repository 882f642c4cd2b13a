"""ComfyUI's own models of newer families get the weights that they should from our file, loaded by its own loader, and give that output."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from tests.comfy_shapes.checkout import Checkout
from tests.lora.families.test_names_comfyui import made
from torch import Tensor, nn

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import FAMILIES, ModelLayout
from sigmascope.lora.file import LoraFile
from sigmascope.lora.writer import save_lora

pytestmark = pytest.mark.comfyui
BASES: Final = {"kandinsky5": "Kandinsky5", "krea2": "Krea2", "ideogram4": "Ideogram4", "ltx2": "LTXAV"}
"""ComfyUI's class of each model, which tells the names that its loader knows."""


def randn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def kandinsky5(model: Any) -> Tensor:
    context = randn(1, 3, model.text_embeddings.in_layer.in_features)
    pooled = randn(1, model.pooled_text_embeddings.in_layer.in_features)
    out: Tensor = model(
        randn(1, model.visual_embeddings.in_layer.in_features // 4, 1, 4, 4),
        torch.tensor([5.0]),
        context,
        pooled,
    )
    return out


def krea2(model: Any) -> Tensor:
    out: Tensor = model(
        randn(1, model.channels, 4, 4), torch.tensor([0.5]), randn(1, 5, model.txtlayers * model.txtdim)
    )
    return out


def ideogram4(model: Any) -> Tensor:
    context = randn(1, 5, model.llm_cond_proj.in_features)
    out: Tensor = model(randn(1, model.in_channels, 4, 4), torch.tensor([0.5]), context)
    return out


def ltx2(model: Any) -> Tensor:
    """Pictures and sound, in one row."""
    video = randn(1, model.in_channels, 2, 2, 2)
    sound = randn(1, model.num_audio_channels, 3, model.audio_frequency_bins)
    out = model([video, sound], torch.tensor([0.5]), randn(1, 5, 2 * model.caption_channels))
    return torch.cat([part.flatten() for part in out])


OUTPUTS: Final[dict[str, Callable[[Any], Tensor]]] = {
    "kandinsky5": kandinsky5,
    "krea2": krea2,
    "ideogram4": ideogram4,
    "ltx2": ltx2,
}


def tiny(comfy: Checkout, family: str) -> Any:
    model = made(comfy, family, "cpu").eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model


def planted(model: nn.Module) -> tuple[LoraFile, dict[str, Tensor]]:
    """A LoRA of every matrix in a block, and its changes."""
    generator, modules = torch.Generator().manual_seed(1), dict[str, LoraFactors]()
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and ".0." in path:
            out, inner = layer.weight.shape
            up, down = (torch.randn(size, generator=generator) * 0.2 for size in ((out, 2), (2, inner)))
            modules[f"diffusion_model.{path}"] = LoraFactors(up, down, 1.0, (out, inner))
    return LoraFile(modules), {name: factors.delta() for name, factors in modules.items()}


def loaded_by_comfyui(comfy: Checkout, family: str, model: nn.Module, file: Path) -> dict[str, Tensor]:
    """The weights that its loader changes, as its patcher computes them."""
    base = getattr(comfy.module("comfy.model_base"), BASES[family])
    host = base.__new__(base)
    nn.Module.__init__(host)
    host.diffusion_model = model
    blocks = sum(1 for _ in getattr(model, "blocks", ()))
    host.model_config = type("Config", (), {"unet_config": {"layers": blocks}})()
    known = comfy.lora.model_lora_keys_unet(host, {})
    patches = comfy.lora.load_lora(load_file(file), known, log_missing=False)
    weights = host.state_dict()
    return {
        key: comfy.lora.calculate_weight([(1.0, patch, 1.0, None, None)], weights[key].clone(), key)
        for key, patch in patches.items()
    }


@pytest.mark.parametrize("format", ["comfyui", "kohya"])
@pytest.mark.parametrize("family", BASES)
def test_our_file_changes_comfyui_s_model_as_it_should(
    comfy: Checkout, family: str, format: str, tmp_path: Path
) -> None:
    model = tiny(comfy, family)
    changes, got = loaded(comfy, family, model, format, tmp_path)
    assert got.keys() == changes.keys()
    assert len(changes) > 5
    own = model.state_dict()
    for name, change in changes.items():
        torch.testing.assert_close(got[name], own[name] + change)


@pytest.mark.parametrize("family", OUTPUTS)
def test_its_output_is_that_of_the_factors_put_into_the_weights_by_hand(
    comfy: Checkout, family: str, tmp_path: Path
) -> None:
    model, run = tiny(comfy, family), OUTPUTS[family]
    kernels = comfy.folder / "comfy" / "quant_ops.py"
    if kernels.is_file() and not comfy.has_kernels:
        pytest.skip("the models of this ComfyUI need comfy_kitchen, which is not installed")
    changes, got = loaded(comfy, family, model, "comfyui", tmp_path)
    by_hand, own = copy.deepcopy(model), model.state_dict()
    by_hand.load_state_dict({name: own[name] + change for name, change in changes.items()}, strict=False)
    bare, wanted = run(model), run(by_hand)
    model.load_state_dict(got, strict=False)
    torch.testing.assert_close(run(model), wanted, rtol=1e-4, atol=1e-5)
    assert bare.isfinite().all()
    assert not torch.allclose(wanted, bare, rtol=1e-2)


def loaded(
    comfy: Checkout, family: str, model: nn.Module, format: str, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Changes that are planted in a file, and the weights that ComfyUI's loader makes of it, by the model's names."""
    lora, changes = planted(model)
    naming = "diffusers" if FAMILIES[family].has_one_naming else "original"
    layout = ModelLayout(family, naming, {"denoiser": "diffusion_model."})
    save_lora(folder / "lora.safetensors", lora, format=format, layout=layout)
    got = loaded_by_comfyui(comfy, family, model, folder / "lora.safetensors")
    return (
        {f"{name.removeprefix('diffusion_model.')}.weight": change for name, change in changes.items()},
        {name.removeprefix("diffusion_model."): weight for name, weight in got.items()},
    )
