"""Real models of a ComfyUI checkout: a small SD1.5 U-Net of its own code, and a `CLIP` that its loader knows."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout
from torch import Tensor, nn

CPU = torch.device("cpu")
_UNET: dict[str, Any] = {
    "image_size": 32,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": (1, 2),
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 32,
    "num_heads": 4,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "num_classes": None,
    "dtype": torch.float32,
}


def unet_patcher(comfy: Checkout) -> Any:
    """A patcher of a U-Net with a million parameters. Its attention needs einops."""
    if importlib.util.find_spec("einops") is None or _is_faked("einops"):
        pytest.skip("einops, which ComfyUI's U-Net needs, is not installed")
    config = comfy.module("comfy.supported_models").SD15(dict(_UNET))
    config.set_inference_dtype(torch.float32, None)
    return comfy.model_patcher.ModelPatcher(_with_weights(config.get_model({}, "")), CPU, CPU)


def real_clip(comfy: Checkout) -> Any:
    """A real `CLIP` around one attention layer."""
    clip = comfy.module("comfy.sd").CLIP(no_init=True)
    clip.patcher = comfy.model_patcher.ModelPatcher(_with_weights(_Encoder(comfy.ops.manual_cast)), CPU, CPU)
    clip.cond_stage_model, clip.tokenizer, clip.layer_idx = clip.patcher.model, None, None
    clip.tokenizer_options, clip.use_clip_schedule, clip.apply_hooks_to_conds = {}, False, None
    return clip


def kohya_file(comfy: Checkout, unet: Any, clip: Any) -> dict[str, Tensor]:
    """A LoRA of rank 2 in kohya's names for all that ComfyUI's own tables name so, one for each weight."""
    keys = comfy.lora.model_lora_keys_unet(unet.model, {})
    keys = {name: key for name, key in keys.items() if name.startswith("lora_unet_")}
    if clip is not None:
        of_clip = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {})
        keys |= {name: key for name, key in of_clip.items() if name.startswith("lora_te_")}
    weights = dict(_weights(unet, clip))
    once = {key: name for name, key in keys.items() if key in weights and weights[key].ndim > 1}
    state: dict[str, Tensor] = {}
    for number, (key, name) in enumerate(sorted(once.items())):
        out, width, *kernel = weights[key].shape
        state[f"{name}.lora_up.weight"] = random(out, 2, *[1] * len(kernel), seed=number) * 0.02
        state[f"{name}.lora_down.weight"] = random(2, width, *kernel, seed=number + 1)
        state[f"{name}.alpha"] = torch.tensor(1.0)
    return state


def _weights(unet: Any, clip: Any) -> Iterator[tuple[str, Tensor]]:
    yield from unet.model.named_parameters()
    if clip is not None:
        yield from clip.cond_stage_model.named_parameters()


def _with_weights(model: nn.Module) -> nn.Module:
    for number, parameter in enumerate(model.parameters()):
        parameter.data = random(*parameter.shape, seed=number) * 0.05
        parameter.requires_grad_(False)
    return model


def _is_faked(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is None or spec.origin is None


class _Encoder(nn.Module):
    """What the loader maps a text encoder's keys onto."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        attention = nn.ModuleDict({"q_proj": layers.Linear(8, 8), "out_proj": layers.Linear(8, 8)})
        encoder = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": attention})])})
        text_model = nn.ModuleDict({"text_model": nn.ModuleDict({"encoder": encoder})})
        self.clip_l = nn.ModuleDict({"transformer": text_model})
