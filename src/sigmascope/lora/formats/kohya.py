"""kohya's naming: the whole path flattened into one word, `lora_unet_down_blocks_1_resnets_0_conv1`.

As sd-scripts and its kin write it: SD 1 and SD 2 by diffusers' names, SDXL, SD 3, FLUX and WAN by the names of
their original files. ComfyUI reads both; diffusers reads it through a pipeline's `load_lora_weights`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.formats.keys import KeyGroups
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.layer_paths import UNET_FAMILIES, Naming

FLAT_PREFIXES: Final = ("lora_", "lycoris_")
_BY_DIFFUSERS: Final = frozenset({"lbm", "sd15", "sd2", "qwen_image"})
_ONE_TEXT_ENCODER: Final = frozenset({"sd15", "sd2"})
_PROJECTIONS: Final = ("_to_q", "_to_k", "_to_v", "_to_out_0", "_q_proj", "_k_proj", "_v_proj", "_out_proj")


def _is_kohya(found: KeyGroups) -> bool:
    return any(name.startswith(FLAT_PREFIXES) and "." not in name for name in found.groups)


def _kohya_naming(family: str) -> Naming | None:
    if family == "unknown":
        return None
    return "diffusers" if family in _BY_DIFFUSERS else "original"


def _kohya_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    flat = path.replace(".", "_")
    if part == "denoiser":
        return f"lora_unet_{flat}"
    if part == "text_encoder":
        return f"lora_te_{flat}" if layout.family in _ONE_TEXT_ENCODER else f"lora_te1_{flat}"
    if part == "text_encoder_2":
        return f"lora_te3_{flat}" if layout.family == "flux" else f"lora_te2_{flat}"
    if part == "text_encoder_3":
        return f"lora_te3_{flat}"
    raise LoraFormatError(
        f"kohya's format has no names for {path} of the part {part}.",
        hint="Leave that part out, or write the format native.",
    )


def _alphas_mislead(ranks: Mapping[str, int], layout: ModelLayout) -> bool:
    """Whether diffusers would scale a U-Net's attention by other modules' alphas.

    It files the alphas of attention projections under names that no layer has (as of 0.42), and so gives those
    the alpha that most modules have. Without alphas every reader takes the scale 1, which is the same where
    alpha = rank.
    """
    common = Counter(ranks.values()).most_common(1)
    attention = [rank for name, rank in ranks.items() if name.endswith(_PROJECTIONS)]
    return layout.family in UNET_FAMILIES and any(rank != common[0][0] for rank in attention)


KOHYA = LoraFormat(
    name="kohya",
    recognises=_is_kohya,
    naming=_kohya_naming,
    module_name=_kohya_module_name,
    alphas_mislead=_alphas_mislead,
)
