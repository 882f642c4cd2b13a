"""The denoisers of a real ComfyUI, small and without weights."""

from typing import Any

import pytest
import torch
from tests.comfy_shapes.checkout import Checkout

from sigmascope.probes.models import detect_architecture

_FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 32, "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 2.0,
    "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 10_000, "qkv_bias": True,
    "guidance_embed": True, "patch_size": 2, "txt_ids_dims": [],
}  # fmt: skip
_CONTEXT = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 128}}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "FLUX": ("comfy.ldm.flux.model", "Flux", _FLUX),
    "SD3": (
        "comfy.ldm.modules.diffusionmodules.mmdit", "MMDiT",
        {"depth": 2, "adm_in_channels": 32, "context_embedder_config": _CONTEXT, "num_patches": 64,
         "input_size": None, "pos_embed_max_size": 16, "pos_embed_scaling_factor": None},
    ),
    "SD1.5": (
        "comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel",
        {"image_size": 32, "in_channels": 4, "model_channels": 32, "out_channels": 4, "num_res_blocks": [1, 1],
         "channel_mult": [1, 2], "num_head_channels": 16, "use_spatial_transformer": True, "num_heads": -1,
         "transformer_depth": [1, 1], "transformer_depth_middle": 1, "transformer_depth_output": [1, 1, 1, 1],
         "context_dim": 32},
    ),
    "WAN": (
        "comfy.ldm.wan.model", "WanModel",
        {"dim": 64, "ffn_dim": 64, "freq_dim": 32, "text_dim": 32, "num_heads": 2, "num_layers": 2},
    ),
    "Qwen-Image": (
        "comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel",
        {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
         "axes_dims_rope": (4, 6, 6)},
    ),
}  # fmt: skip


@pytest.mark.comfyui
@pytest.mark.parametrize(
    ("model", "kind"),
    [("FLUX", "MMDiT"), ("SD3", "MMDiT"), ("Qwen-Image", "MMDiT"), ("WAN", "DiT"), ("SD1.5", "UNet")],
)
def test_comfyui_s_own_denoisers_are_known(comfy: Checkout, model: str, kind: str) -> None:
    module, name, arguments = _MODELS[model]
    try:
        made = getattr(comfy.module(module), name)
        with torch.device("meta"):
            denoiser = made(**arguments, device="meta", operations=comfy.ops.disable_weight_init)
    except (ImportError, TypeError) as error:
        pytest.skip(f"this version has no {model} of these arguments: {error}")
    found = detect_architecture(denoiser).value
    assert found is not None
    assert found.kind == kind
