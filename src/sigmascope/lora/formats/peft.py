"""PEFT's naming as diffusers reads it: `unet.down_blocks.1.resnets.0.conv1.lora_A.weight`.

There is no alpha: diffusers ignores one beside `lora_A` and `lora_B`, so the scale is always in the up factor.
The prefix must be that of the pipeline's component, or be given to `load_lora_adapter`. DoRA's magnitudes per
output can be written, which PEFT takes for all modules of a LoRA or for none.
"""

from typing import Final

from sigmascope.lora.formats.base import FactorKeys, LoraFormat
from sigmascope.lora.formats.keys import KeyGroups
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.layer_paths import UNET_FAMILIES, Naming

_KEYS: Final = FactorKeys(
    up="lora_B.weight",
    down="lora_A.weight",
    alpha=None,
    holds_changes=False,
    magnitude="lora_magnitude_vector",
)
_UNET_STARTS: Final = ("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_out")


def _is_peft(found: KeyGroups) -> bool:
    return found.by_peft


def _peft_naming(family: str) -> Naming | None:
    return None if family == "unknown" else "diffusers"


def _peft_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    if part == "denoiser":
        if prefix is None:
            is_unet = layout.family in UNET_FAMILIES or path.startswith(_UNET_STARTS)
            prefix = "unet" if is_unet else "transformer"
        return f"{prefix}.{path}" if prefix else path
    if part == "denoiser_2":
        return f"transformer_2.{path}"
    return path if part == "other" else f"{part}.{path}"


PEFT = LoraFormat(
    name="peft", recognises=_is_peft, naming=_peft_naming, module_name=_peft_module_name, keys=_KEYS
)
