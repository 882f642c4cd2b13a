"""ComfyUI's generic naming: the original model's own paths, `diffusion_model.input_blocks.4.0.in_layers.2`.

ComfyUI finds every weight of every model by it, whatever the family.
"""

from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.formats.keys import KeyGroups
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.layer_paths import Naming

_STARTS: Final = ("diffusion_model.", "text_encoders.")
_T5: Final = "t5xxl"
_ENCODERS: Final[dict[tuple[str, Part], str]] = {
    ("sd2", "text_encoder"): "clip_h",
    ("wan", "text_encoder"): "umt5xxl",
    ("qwen_image", "text_encoder"): "qwen25_7b",
    ("flux", "text_encoder_2"): _T5,
    ("sd3", "text_encoder_3"): _T5,
}
_USUAL: Final[dict[Part, str]] = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": _T5}


def _is_comfyui(found: KeyGroups) -> bool:
    return any(name.startswith(_STARTS) for name in found.groups)


def _comfyui_naming(family: str) -> Naming | None:
    return None if family == "unknown" else "original"


def _comfyui_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    if part == "denoiser":
        return f"diffusion_model.{path}"
    encoder = _ENCODERS.get((layout.family, part)) or _USUAL.get(part)
    if encoder is None:
        raise LoraFormatError(
            f"ComfyUI's format has no names for {path} of the part {part}.",
            hint="Leave that part out, or write the format native.",
        )
    return f"text_encoders.{encoder}.transformer.{path}"


COMFYUI = LoraFormat(
    name="comfyui", recognises=_is_comfyui, naming=_comfyui_naming, module_name=_comfyui_module_name
)
