"""Layouts of LoRA files from public reports and of common trainers, at the widths of the published models.

Models are on the meta device: only names and shapes are real, and the LoRAs that a host loads into them.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from safetensors.torch import save_file
from tests.families.weights import copied
from torch import Tensor, nn

from sigmascope.lora.families.known import FAMILIES
from sigmascope.lora.layer_names import blocks_of, to_sgm

RANK, ALPHA = 4, 2.0
MAKE: dict[str, Callable[[], nn.Module]] = {
    "flux": lambda: diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, guidance_embeds=True
    ),
    "flux2": lambda: diffusers.Flux2Transformer2DModel(num_layers=1, num_single_layers=1),
    "chroma": lambda: diffusers.ChromaTransformer2DModel(num_layers=1, num_single_layers=1),
    "z_image": lambda: diffusers.ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1),
    "lumina2": lambda: diffusers.Lumina2Transformer2DModel(num_layers=1, num_refiner_layers=1),
    "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(num_layers=1),
    "wan": lambda: diffusers.WanTransformer3DModel(num_layers=2),
    "wan i2v": lambda: diffusers.WanTransformer3DModel(
        num_layers=2, in_channels=36, image_dim=1280, added_kv_proj_dim=5120
    ),
    "hunyuan_video": lambda: diffusers.HunyuanVideoTransformer3DModel(
        num_layers=1, num_single_layers=1, num_refiner_layers=1
    ),
    "ltx_video": lambda: diffusers.LTXVideoTransformer3DModel(num_layers=1),
    "hidream": lambda: diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=128,
        num_attention_heads=20, caption_channels=[4096, 4096], num_routed_experts=4, num_activated_experts=2, llama_layers=(0, 1),
    ),
    "sd3": lambda: diffusers.SD3Transformer2DModel(
        num_layers=3, num_attention_heads=24, caption_projection_dim=1536, joint_attention_dim=4096,
        pooled_projection_dim=2048, dual_attention_layers=(0,), qk_norm="rms_norm",
    ),
    "sdxl": lambda: diffusers.UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(320, 640, 1280),
        cross_attention_dim=2048, transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ),
    "sd15": lambda: diffusers.UNet2DConditionModel(cross_attention_dim=768),
}  # fmt: skip


@cache
def denoiser(name: str) -> nn.Module:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of diffusers' own use of `FluxPosEmbed`
        return MAKE[name]()


def widths(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        path: tuple(layer.weight.shape)
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d)
    }


@dataclass(frozen=True)
class Target:
    """What a module of a file changes: diffusers' layers, one below the other, and the layer's original name."""

    parts: tuple[str, ...]
    original: str
    swapped: bool
    shape: tuple[int, ...]


def targets(family: str, naming: Literal["diffusers", "original", "also"]) -> dict[str, Target]:
    """All layers that a LoRA can be for, by their names in a naming."""
    shapes = widths(denoiser(family))
    record = FAMILIES[family.partition(" ")[0]]
    if record.is_unet:
        blocks = blocks_of(shapes)
        pairs = [(path, to_sgm(path, blocks)) for path in shapes]
        return {
            (path if naming == "diffusers" else original): Target((path,), original, False, shapes[path])
            for path, original in pairs
            if original is not None
        }
    found: dict[str, Target] = {}
    for row in record.rows:
        for one in [row.numbered(number) for number in "012"] if "#" in row.original else [row]:
            if not all(part in shapes for part in one.parts):
                continue
            first = shapes[one.parts[0]]
            whole = (sum(shapes[part][0] for part in one.parts), *first[1:])
            own = one.also or one.original if naming == "also" else one.original
            found |= (
                {part: Target((part,), one.original, False, shapes[part]) for part in one.parts}
                if naming == "diffusers"
                else {own: Target(one.parts, one.original, one.swapped, whole)}
            )
    return found


@dataclass(frozen=True)
class Layout:
    """How a kind of file names its tensors.

    Attributes:
        family: A key of `MAKE`.
        start: What modules' names begin with; with an underscore at its end, dots become underscores.
        naming: Whose names follow.
        ending: `A`, `A.default`, `down`, `lora.down`, `lokr` or `diff`.
        alpha: None without `.alpha` tensors.
        only: A regular expression that the layers' own names have.
    """

    family: str
    start: str
    naming: Literal["diffusers", "original", "also"]
    ending: str
    alpha: float | None = ALPHA
    only: str = ""

    def names(self) -> dict[str, Target]:
        """The target of each module of such a file."""
        return {
            self.start + (path.replace(".", "_") if self.start.endswith("_") else path): target
            for path, target in targets(self.family, self.naming).items()
            if re.search(self.only, path)
        }

    def build(self) -> tuple[dict[str, Tensor], dict[str, Target]]:
        """The tensors of such a file, and the target of each of its modules."""
        state: dict[str, Tensor] = {}
        named = self.names()
        for name, target in named.items():
            state |= tensors_of(name, self.ending, target.shape, self.alpha)
        return state, named

    def save(self, path: Path) -> dict[str, Target]:
        """Write such a file, whose header names its family."""
        state, named = self.build()
        family = FAMILIES[self.family.partition(" ")[0]]
        save_file(state, path, metadata={"modelspec.architecture": family.architecture})
        return named


_ENDS = {
    "A": ("lora_A.weight", "lora_B.weight"),
    "A.default": ("lora_A.default.weight", "lora_B.default.weight"),
    "down": ("lora_down.weight", "lora_up.weight"),
    "lora.down": ("lora.down.weight", "lora.up.weight"),
}


def tensors_of(name: str, ending: str, shape: tuple[int, ...], alpha: float | None) -> dict[str, Tensor]:
    """A module's tensors; see `Layout`."""
    own = _factors(name, ending, shape, torch.Generator().manual_seed(len(name)))
    return own if alpha is None else own | {f"{name}.alpha": torch.tensor(alpha)}


def _factors(name: str, ending: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    rows, columns, *kernel = shape

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.1

    if ending == "lokr":
        factor = next(factor for factor in (64, 16, 8, 4, 2, 1) if rows % factor == columns % factor == 0)
        return {
            f"{name}.lokr_w1": randn(factor, factor),
            f"{name}.lokr_w2": randn(rows // factor, columns // factor, *kernel),
        }
    if ending == "diff":
        return {f"{name}.diff": randn(*shape)}
    down, up = _ENDS[ending]
    return {
        f"{name}.{down}": randn(RANK, columns, *kernel),
        f"{name}.{up}": randn(rows, RANK, *(1 for _ in kernel)),
    }


FULL = 9999999999.0  # LyCORIS' alpha of whole matrices
IN_BLOCKS = r"blocks|layers|refiner"
REPORTED: dict[str, Layout] = {
    # of issues and of the trainers' own sources
    "musubi-tuner 770": Layout("z_image", "lora_unet_", "diffusers", "down", only=r"^layers"),
    "ai-toolkit 538": Layout("z_image", "diffusion_model.", "diffusers", "A", None, r"^layers"),
    "ComfyUI 11158": Layout("z_image", "diffusion_model.", "original", "A", None, IN_BLOCKS),
    "musubi-tuner's conversion": Layout("z_image", "lora_unet_", "original", "down", only=IN_BLOCKS),
    "ComfyUI 10973": Layout("z_image", "diffusion_model.", "diffusers", "lokr", FULL, r"^layers"),
    "OneTrainer 1563": Layout("z_image", "transformer.", "diffusers", "down", only=r"^layers"),
    "diffusers 13249": Layout("z_image", "diffusion_model.", "diffusers", "A", only=r"^layers"),
    "diffusers 13484": Layout("flux2", "diffusion_model.", "original", "A", None),
    "diffusers 13484 by fal": Layout("flux2", "base_model.model.", "original", "A", None),
    "OneTrainer 1563, kohya": Layout("flux2", "lora_unet_", "original", "down"),
    "SimpleTuner 2439": Layout("flux2", "lycoris_", "diffusers", "lokr", FULL, IN_BLOCKS),
    "diffusers' FLUX.2 trainer": Layout("flux2", "transformer.", "diffusers", "A", None, IN_BLOCKS),
    "DiffSynth 886": Layout("qwen_image", "", "diffusers", "A.default", None, IN_BLOCKS),
    "Qwen-Image-Lightning 52": Layout("qwen_image", "", "diffusers", "down", only=IN_BLOCKS),
    "musubi-tuner's Qwen-Image": Layout("qwen_image", "lora_unet_", "diffusers", "down", only=IN_BLOCKS),
    "ChronoEdit 22": Layout("wan", "", "original", "A.default", None, IN_BLOCKS),
    "musubi-tuner's WAN": Layout("wan", "lora_unet_", "original", "down", only=r"blocks.*(attn\.[qkvo]|ffn\.)"),
    "ComfyUI 8285": Layout("wan", "lycoris_", "diffusers", "lokr", FULL, IN_BLOCKS),
    "musubi-tuner 26": Layout("hunyuan_video", "lora_unet_", "also", "down", only=r"^(double|single)"),
    "HunyuanVideoWrapper 468": Layout("hunyuan_video", "diffusion_model.", "original", "down", only=r"^(double|single)"),
    "ai-toolkit's Chroma": Layout("chroma", "diffusion_model.", "original", "A", None),
    "sd-scripts' Chroma": Layout("chroma", "lora_unet_", "original", "down"),
    "sd-scripts' Lumina 2": Layout("lumina2", "lora_unet_", "original", "down", only=IN_BLOCKS),
    "OneTrainer 842": Layout("hidream", "transformer.", "diffusers", "down", only="stream"),
    "sd-scripts' SD 3": Layout("sd3", "lora_unet_", "original", "down", only=IN_BLOCKS),
    "ComfyUI 3701": Layout("sd3", "lora_transformer_", "diffusers", "down", only=IN_BLOCKS),
    "sd-scripts' FLUX": Layout("flux", "lora_unet_", "original", "down", only=IN_BLOCKS),
    "ComfyUI 4476": Layout("flux", "lycoris_", "diffusers", "lokr", FULL, IN_BLOCKS),
    "ai-toolkit's LoKr": Layout("flux", "lora_transformer_", "diffusers", "lokr", FULL, IN_BLOCKS),
    "ComfyUI 4476, fused": Layout("flux", "diffusion_model.", "original", "lokr", FULL),
}  # fmt: skip

WHOLE: dict[str, Layout] = {
    # of all layers, and of some, where a loader minds
    "FLUX, kohya": Layout("flux", "lora_unet_", "original", "down"),
    "FLUX, original": Layout("flux", "diffusion_model.", "original", "down", None),
    "FLUX, diffusers' older": Layout("flux", "transformer.", "diffusers", "lora.down"),
    "FLUX, alphas unread": Layout("flux", "transformer.", "diffusers", "down"),
    "Chroma, kohya, blocks": Layout("chroma", "lora_unet_", "original", "down", only="^(double|single)_"),
    "Chroma, PEFT": Layout("chroma", "transformer.", "diffusers", "A", None),
    "WAN, kohya": Layout("wan", "lora_unet_", "original", "down"),
    "WAN, kohya, attention": Layout("wan", "lora_unet_", "original", "down", only=r"blocks.*attn\.[qkvo]$"),
    "WAN, kohya, second block": Layout("wan", "lora_unet_", "original", "down", only=r"blocks\.1\..*(attn\.[qkvo]$|ffn)"),
    "WAN I2V, kohya": Layout("wan i2v", "lora_unet_", "original", "down", only=r"^blocks.*(attn\.[qkvo]$|ffn|_img$)"),
    "WAN I2V, kohya, attention": Layout("wan i2v", "lora_unet_", "original", "down", only=r"^blocks.*(attn\.[qkvo]$|[kv]_img$)"),
    "WAN, original, alphas": Layout("wan", "diffusion_model.", "original", "A"),
    "WAN, original": Layout("wan", "diffusion_model.", "original", "A", None, r"^(blocks|text|time|head)"),
    "WAN, original, outside of blocks": Layout("wan", "diffusion_model.", "original", "A", None, r"^(text_embedding|head)"),
    "WAN I2V, original, keys of the picture": Layout("wan i2v", "diffusion_model.", "original", "A", None, "k_img"),
    "WAN I2V, original, keys and values of the picture": Layout("wan i2v", "diffusion_model.", "original", "A", None, r"[kv]_img$"),
    "FLUX.2, PEFT": Layout("flux2", "transformer.", "diffusers", "A", None),
    "FLUX.2, diffusers' names, Comfy's start": Layout("flux2", "diffusion_model.", "diffusers", "A", None),
    "FLUX.2, all that PEFT saves": Layout("flux2", "base_model.model.", "diffusers", "A", None),
    "FLUX.2, blocks that PEFT saves": Layout("flux2", "base_model.model.", "diffusers", "A", None, "blocks"),
    "FLUX.2, LoKr": Layout("flux2", "diffusion_model.", "original", "lokr", FULL, IN_BLOCKS),
    "Qwen-Image, lora_unet_ of PEFT": Layout("qwen_image", "lora_unet_", "diffusers", "A"),
    "LTX, original": Layout("ltx_video", "diffusion_model.", "original", "A", None),
    "Z-Image, original LoKr": Layout("z_image", "diffusion_model.", "original", "lokr", FULL),
    "Z-Image, original PEFT": Layout("z_image", "transformer.", "original", "A", None),
    "HiDream, PEFT": Layout("hidream", "diffusion_model.", "diffusers", "A", None),
    "HunyuanVideo, its own names": Layout("hunyuan_video", "transformer.", "also", "A", None),
    "HunyuanVideo, Comfy's start": Layout("hunyuan_video", "diffusion_model.", "also", "A", None, r"^(double|single|txt_in.(?!indiv)|vector)"),
    "HunyuanVideo, MLP": Layout("hunyuan_video", "diffusion_model.", "also", "A", None, "(img|txt)_mlp"),
    "FLUX.2, LyCORIS, outside of blocks": Layout("flux2", "lycoris_", "diffusers", "lokr", FULL, "^context_embedder"),
    "Z-Image, PEFT's name of the adapter": Layout("z_image", "", "diffusers", "A.default", only=r"^layers"),
    "Z-Image, bare LoKr": Layout("z_image", "", "diffusers", "lokr", None, r"^layers"),
    "Z-Image, older endings": Layout("z_image", "diffusion_model.", "original", "lora.down", None, r"^layers.*w1"),
    "SDXL, kohya by diffusers' names": Layout("sdxl", "lora_unet_", "diffusers", "down", only="embedding|mid.*attn1.to_q"),
    "SD 1.5, kohya": Layout("sd15", "lora_unet_", "diffusers", "down", only="attentions"),
}  # fmt: skip


def model_with_lora(family: str) -> Any:
    """A denoiser of its own, to load a LoRA into. Its weights take no memory until somebody writes them."""
    return _of_its_own(family).to_empty(device="cpu")


@copied
def _of_its_own(family: str) -> Any:
    return denoiser(family)
