"""Make a random SD 1.5 checkpoint, as small as ComfyUI still tells for one, and LoRAs for it. Run in ComfyUI's Python.

    python tiny_models.py CHECKOUT BASE

The U-Net has one block a level at its real width, because ComfyUI tells SD 1.5 by that. CLIP and VAE have real sizes.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

U_NET = {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 1],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
}
VAE = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}


def filled(module: Any, prefix: str, only: str = "") -> dict[str, torch.Tensor]:
    """A module's weights by name in the file: random matrices that keep a signal's size, norms of one."""
    weights = {}
    for name, tensor in module.state_dict().items():
        if not name.startswith(only):
            continue
        if not tensor.is_floating_point():
            weights[prefix + name] = tensor.clone()
        elif tensor.ndim == 1:
            weights[prefix + name] = torch.full_like(tensor, float(name.endswith("weight"))).half()
        else:
            weights[prefix + name] = (
                (torch.randn(tensor.shape) * tensor[0].numel() ** -0.5).half().contiguous()
            )
    return weights


def make(base: Path) -> None:
    """Write the files into ComfyUI's base folder."""
    ops = importlib.import_module("comfy.ops").disable_weight_init
    unet_module = importlib.import_module("comfy.ldm.modules.diffusionmodules.openaimodel").UNetModel
    vae_module = importlib.import_module("comfy.ldm.models.autoencoder").AutoencoderKL
    clip_module = importlib.import_module("comfy.sd1_clip").SDClipModel
    torch.manual_seed(0)
    unet = unet_module(
        image_size=32, in_channels=4, out_channels=4, model_channels=320, context_dim=768, num_heads=8,
        use_spatial_transformer=True, use_linear_in_transformer=False, legacy=False, dtype=torch.float32,
        device="cpu", operations=ops, **U_NET,
    )  # fmt: skip
    clip = clip_module(dtype=torch.float32, device="cpu")
    weights = {
        **filled(unet, "model.diffusion_model."),
        **filled(vae_module(ddconfig=VAE, embed_dim=4), "first_stage_model."),
        **filled(clip, "cond_stage_model.", "transformer.text_model."),
    }
    for folder in ("models/checkpoints", "models/loras", "input", "output", "custom_nodes"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    save_file(weights, base / "models" / "checkpoints" / "tiny.safetensors")
    names = importlib.import_module("comfy.utils").unet_to_diffusers(U_NET)
    layers = {
        f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}": weights[f"model.diffusion_model.{key}"]
        for name, key in names.items()
        if name.endswith("attn1.to_q.weight")
    }
    save_file(lora(layers), base / "models" / "loras" / "good.safetensors")
    missing = {"lora_unet_no_such_block": next(iter(layers.values()))}
    save_file(lora(missing), base / "models" / "loras" / "other.safetensors")
    good = lora(layers)
    half = dict.fromkeys(list(layers)[: len(layers) // 2])
    text = {
        f"lora_te_text_model_encoder_layers_{block}_self_attn_q_proj": torch.empty(768, 768)
        for block in range(12)
    }
    flux = {f"lora_unet_double_blocks_{block}_img_attn_proj": torch.empty(3072, 3072) for block in range(19)}
    kinds = {
        "zeros": {name: tensor * (not name.endswith("up.weight")) for name, tensor in good.items()},
        "half": {
            name if name.partition(".")[0] in half else name.replace("lora_unet_", "lora_unet_no_"): tensor
            for name, tensor in good.items()
        },
        "text": lora(text),
        "flux": lora(flux),
    }
    for kind, tensors in kinds.items():
        save_file(tensors, base / "models" / "loras" / f"{kind}.safetensors")
    print(len(layers))  # noqa: T201 - for the test that started this


def lora(layers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A LoRA of rank 4 in kohya's names for these layers."""
    tensors = {}
    for name, weight in layers.items():
        out, inner = weight.shape
        tensors[f"{name}.lora_up.weight"] = (torch.randn(out, 4) * 0.05).half()
        tensors[f"{name}.lora_down.weight"] = (torch.randn(4, inner) * 0.05).half()
        tensors[f"{name}.alpha"] = torch.tensor(2.0)
    return tensors


if __name__ == "__main__":
    checkout, target = sys.argv[1:]
    sys.path.insert(0, checkout)
    sys.argv = ["main.py", "--cpu"]
    importlib.import_module("comfy.options").enable_args_parsing()
    make(Path(target))
