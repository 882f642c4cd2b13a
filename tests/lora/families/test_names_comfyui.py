"""Original names against ComfyUI's own models, made on the meta device."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.checkout import Checkout

from sigmascope.lora.families import FAMILIES

pytestmark = pytest.mark.comfyui
# ComfyUI's module and class, and a small model's configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auraflow": ("aura.mmdit", "MMDiT", {"n_layers": 2, "n_double_layers": 1, "dim": 16, "n_heads": 2, "max_seq": 4}),
    "cogvideox": (
        "cogvideo.model",
        "CogVideoXTransformer3DModel",
        {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "ofs_embed_dim": 4, "use_rotary_positional_embeddings": True},
    ),
    "cosmos": (
        "cosmos.predict2",
        "MiniTrainDIT",
        {
            "max_img_h": 4, "max_img_w": 4, "max_frames": 2, "in_channels": 4, "out_channels": 4, "patch_spatial": 2,
            "patch_temporal": 1, "model_channels": 32, "num_blocks": 1, "num_heads": 2, "use_adaln_lora": True,
            "crossattn_emb_channels": 16, "adaln_lora_dim": 4, "pos_emb_cls": "rope3d",
        },
    ),
    "hunyuan_video15": (
        "hunyuan_video.model",
        "HunyuanVideo",
        {
            "in_channels": 4, "out_channels": 4, "vec_in_dim": None, "context_in_dim": 24, "hidden_size": 16,
            "mlp_ratio": 4.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 0, "axes_dim": [4, 2, 2],
            "theta": 256, "patch_size": [1, 1, 1], "qkv_bias": True, "guidance_embed": False, "byt5": True,
            "meanflow": True, "use_cond_type_embedding": True, "vision_in_dim": 12, "meanflow_sum": True,
        },
    ),
    "ideogram4": (
        "ideogram4.model",
        "Ideogram4Transformer2DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "intermediate_size": 40, "adaln_dim": 12, "in_channels": 4,
            "llm_features_dim": 24, "rope_theta": 5e6, "mrope_section": [2, 1, 1], "norm_eps": 1e-5,
        },
    ),
    "krea2": (
        "krea2.model",
        "SingleStreamDiT",
        {"features": 64, "tdim": 8, "txtdim": 24, "heads": 4, "kvheads": 2, "layers": 1, "txtlayers": 3, "txtheads": 3, "txtkvheads": 3},
    ),
    "kandinsky5": ("kandinsky5.model", "Kandinsky5", {"model_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 1}),
    "ltx2": (
        "lightricks.av_model",
        "LTXAVModel",
        {
            "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32, "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 32, "cross_attention_dim": 64, "audio_cross_attention_dim": 64,
            "caption_channels": 24, "apply_gated_attention": True, "cross_attention_adaln": True,
        },
    ),
    "mochi": (
        "genmo.joint_model.asymm_models_joint",
        "AsymmDiTJoint",
        {"depth": 2, "hidden_size_x": 3072, "hidden_size_y": 1536, "num_heads": 24, "mlp_ratio_x": 4.0, "t5_feat_dim": 24, "t5_token_length": 4,
         "patch_size": 2, "in_channels": 4, "attend_to_padding": False, "use_extended_posenc": False, "qk_norm": True, "use_t5": True},
    ),
    "pixart": (
        "pixart.pixartms",
        "PixArtMS",
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "caption_channels": 24, "micro_condition": True, "input_size": 8},
    ),
}  # fmt: skip
# Rows of another dialect, or of variants that the model here is not.
OF_OTHERS = {
    "cosmos": r"blocks\.block.*|final_layer\.adaLN.*|affline_norm|crossattn_proj.*|img_context_proj.*",
    "hunyuan_video15": r".*_attn_[qkv]",
    "mochi": r"blocks\.47\..*|.*\.mod_y",
    "ltx2": r"(?:audio_)?caption_projection.*",
}


def made(comfy: Checkout, family: str, device: str = "meta") -> Any:
    module, name, config = MODELS[family]
    since = FAMILIES[family].in_comfyui_since
    if since is not None and f'"{since}' not in (comfy.folder / "comfyui_version.py").read_text():
        pytest.skip(f"this ComfyUI has no {FAMILIES[family].title}")
    model: Callable[..., Any] = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    return model(**config, device=device, dtype=torch.float32, operations=comfy.ops.disable_weight_init)


@pytest.mark.parametrize("family", MODELS)
def test_every_original_name_is_a_layer_of_comfyui_s_model(comfy: Checkout, family: str) -> None:
    others = re.compile(OF_OTHERS.get(family, "$"))
    keys = {key.removesuffix(".weight") for key in made(comfy, family).state_dict()}
    names = {row.original.replace("#", "0") for row in FAMILIES[family].rows}
    assert sorted(name for name in names - keys if not others.fullmatch(name)) == []
