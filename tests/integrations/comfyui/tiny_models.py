"""Make random models, as small as ComfyUI still tells them by their files, and LoRAs for them. Run in ComfyUI's Python.

    python tiny_models.py CHECKOUT BASE

SD 1.5 is a checkpoint: its U-Net has one block a level at its real width, because ComfyUI tells SD 1.5 by that; CLIP and VAE
have real sizes. SDXL (as Segmind Vega), SD 3, FLUX and WAN are files of the denoiser alone. ComfyUI 0.3.64 takes a FLUX of
3,072 channels alone, so that one is large there: it is stored as float8. CLIP-G, T5-XXL and UMT5-XXL cannot be made
small, since ComfyUI builds them at one size: the tests plant the conditioning of SDXL, FLUX and WAN.
"""

import importlib
import inspect
import sys
from collections.abc import Iterable
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
        elif tensor.ndim <= 1 or name.endswith("gamma"):
            is_one = name.endswith(("weight", "scale", "gamma"))
            weights[prefix + name] = torch.full(tensor.shape, float(is_one)).half()
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
        "text": (on_text := lora(text)),
        "last": {name: tensor for name, tensor in on_text.items() if "layers_11" in name},
        "flux": lora(flux),
        "reshaped": {**good, f"{next(iter(layers))}.reshape_weight": torch.tensor([320, 320])},
    }
    for kind, tensors in kinds.items():
        save_file(tensors, base / "models" / "loras" / f"{kind}.safetensors")
    clip_l = {
        name.removeprefix("cond_stage_model.transformer."): tensor
        for name, tensor in weights.items()
        if name.startswith("cond_stage_model.")
    }
    save(base, "text_encoders/clip_l", clip_l)
    make_families(base, ops)
    picture = torch.rand(64, 64, 3).mul(255).byte().numpy()
    importlib.import_module("PIL.Image").fromarray(picture).save(base / "input" / "in.png")
    print(len(layers))  # noqa: T201 - for the test that started this


def save(base: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file into a folder of models."""
    path = base / "models" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def make_families(base: Path, ops: Any) -> None:
    """Denoisers of other families, VAEs for them, and for each a LoRA of which one module matches nothing."""
    named = {"dtype": torch.float32, "device": "meta", "operations": ops}
    unet = importlib.import_module("comfy.ldm.modules.diffusionmodules.openaimodel").UNetModel(
        image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[2, 2, 2],
        channel_mult=[1, 1, 1], transformer_depth=[0, 0, 1, 1, 2, 2], transformer_depth_middle=-1,
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 2, 2, 2], context_dim=2048, num_head_channels=64,
        use_spatial_transformer=True, use_linear_in_transformer=True, num_classes="sequential",
        adm_in_channels=2816, legacy=False, **named,
    )  # fmt: skip
    sdxl = filled(unet, "model.diffusion_model.")
    save(base, "diffusion_models/sdxl", sdxl)
    save_lora(base, "sdxl", sdxl, "attn2.to_k.weight")

    mmdit = importlib.import_module("comfy.ldm.modules.diffusionmodules.mmdit").MMDiT(
        input_size=None, patch_size=2, in_channels=16, out_channels=16, depth=2, adm_in_channels=2048,
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128},
        },
        num_patches=32 * 32, pos_embed_max_size=32, **named,
    )  # fmt: skip
    sd3 = filled(mmdit, "")
    save(base, "diffusion_models/sd3", sd3)
    save_lora(base, "sd3", sd3, "x_block.attn.qkv.weight")

    source = inspect.getsource(importlib.import_module("comfy.model_detection").detect_unet_config)
    channels = 256 if 'dit_config["hidden_size"] = w.shape[0]' in source else 3072
    flux_module = importlib.import_module("comfy.ldm.flux.model").Flux(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096,
        hidden_size=channels, mlp_ratio=4.0, num_heads=channels // 128, depth=1, depth_single_blocks=1,
        axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True,
        **({"txt_ids_dims": []} if channels == 256 else {}), **named,
    )  # fmt: skip
    flux = {
        name.replace("key_norm.weight", "key_norm.scale").replace("query_norm.weight", "query_norm.scale"): (
            tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 else tensor
        )
        for name, tensor in filled(flux_module, "").items()
    }
    save(base, "diffusion_models/flux", flux)
    save_lora(base, "flux_tiny", flux, ("img_attn.qkv.weight", "linear1.weight"))

    wan_module = importlib.import_module("comfy.ldm.wan.model").WanModel(
        model_type="t2v", dim=256, ffn_dim=512, num_heads=2, num_layers=2, **named
    )
    wan = filled(wan_module, "")
    save(base, "diffusion_models/wan", wan)
    make_gguf(base / "models" / "diffusion_models" / "wan.gguf", wan)
    attention = [name for name in wan if name.endswith("self_attn.q.weight")]
    parts = {"lora_A": (4, 256), "lora_B": (256, 4)}
    save(
        base,
        "loras/wan",
        {
            f"diffusion_model.{name.removesuffix('.weight')}.{part}.weight": torch.randn(shape) * 0.1
            for name in [*attention, "blocks.77.self_attn.q.weight"]
            for part, shape in parts.items()
        },
    )

    taesd = importlib.import_module("comfy.taesd.taesd").TAESD
    for latent_channels in (4, 16):
        save(base, f"vae/tiny{latent_channels}", filled(taesd(latent_channels=latent_channels), ""))
    source = inspect.getsource(importlib.import_module("comfy.sd").VAE.__init__)
    width = 32 if 'dim = sd["decoder.head.0.gamma"]' in source else 96
    video_vae = importlib.import_module("comfy.ldm.wan.vae").WanVAE(
        dim=width, z_dim=16, temperal_downsample=[False, True, True]
    )
    save(base, "vae/wan", filled(video_vae, ""))


def make_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """The same model as GGUF: matrices as Q8_0, the rest as it is. Without the package gguf there is none."""
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        return
    writer = gguf.GGUFWriter(path, "wan")
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        if tensor.ndim == 2 and values.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            if tensor.ndim > 4:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
                values = values.reshape(-1, *values.shape[2:])
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_lora(base: Path, name: str, weights: dict[str, torch.Tensor], ends: str | tuple[str, ...]) -> None:
    """A LoRA for the layers whose names end so, and for one that is not there."""
    layers: Iterable[tuple[str, torch.Tensor]] = (
        (key.removeprefix("model.diffusion_model.").removesuffix(".weight"), weight)
        for key, weight in weights.items()
        if key.endswith(ends)
    )
    known = {f"lora_unet_{key.replace('.', '_')}": weight for key, weight in layers}
    save(base, f"loras/{name}", lora({**known, "lora_unet_no_such_block": next(iter(known.values()))}))


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
