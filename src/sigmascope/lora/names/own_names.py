"""Understand a LoRA's names without its model: the layers' paths, the family and the naming they are of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.header import FAMILIES, family_in
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.flat_names import unflattened_denoiser, unflattened_text_encoder
from sigmascope.lora.names.layer_paths import UNET_FAMILIES, usual_blocks
from sigmascope.lora.names.module_names import parse_name
from sigmascope.lora.names.transformer_names import families_with, row_of_diffusers, row_of_original
from sigmascope.lora.names.unet_names import UnetBlocks, likely_blocks, to_diffusers, to_sgm

_BIAS: Final = ".bias"
_PREFIXES: Final[dict[Part, str]] = {
    "denoiser": "denoiser.",
    "denoiser_2": "transformer_2.",
    "text_encoder": "text_encoder.",
    "text_encoder_2": "text_encoder_2.",
    "text_encoder_3": "text_encoder_3.",
    "vae": "vae.",
}
_BY_CONTEXT_WIDTH: Final = {768: "sd15", 1024: "sd2", 2048: "sdxl", 1280: "sdxl"}


@dataclass(frozen=True, slots=True)
class OwnNames:
    """A LoRA's names, understood.

    Attributes:
        layout: Of a checkpoint that would have the layers under these paths.
        layers: Path by name in the LoRA; for a change of a bias, `<layer>.bias`.
        unknown: Flat names whose dots cannot be told.
        blocks: Of the U-Net, as far as the names tell.
    """

    layout: ModelLayout
    layers: Mapping[str, str]
    unknown: tuple[str, ...]
    blocks: UnetBlocks


def understand_names(lora: LoraFile, family: str | None = None) -> OwnNames:
    """Understand a LoRA's names by themselves.

    Args:
        lora: In any format; its tensors are not read.
        family: Of the model that it is for; from its header, names and shapes when left out.

    Returns:
        The layers' paths, all of one naming.

    Raises:
        LoraFormatError: The names are of two namings that do not go together.
        ConfigError: There is no such family.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"--family {family} is not known.", hint=f"Use one of: {', '.join(FAMILIES)}.")
    placed: dict[str, tuple[Part, str]] = {}
    unknown = []
    for name in lora.names:
        found = _placed(name)
        if found is None:
            unknown.append(name)
        else:
            placed[name] = found
    paths = [path for part, path in placed.values() if part == "denoiser"]
    family = family or _family(lora, placed, paths)
    naming, blocks = _naming(lora, family, paths), likely_blocks(paths, usual_blocks(family))
    layers = {
        name: _PREFIXES.get(part, "")
        + (_in(naming, family, path, lora, blocks) if part == "denoiser" else path)
        for name, (part, path) in placed.items()
    }
    own = {name: layer + _BIAS if name.endswith(_BIAS) else layer for name, layer in layers.items()}
    return OwnNames(ModelLayout(family, naming, _PREFIXES), own, tuple(unknown), blocks)


def _placed(name: str) -> tuple[Part, str] | None:
    """The part and dotted path of a module; None for a flat name of no known architecture."""
    parsed = parse_name(name.removesuffix(_BIAS))
    part: Part = parsed.parts[0] if parsed.parts else "denoiser"
    if not parsed.is_flat:
        return part, parsed.path
    undo = unflattened_text_encoder if part.startswith("text_encoder") else unflattened_denoiser
    path = undo(parsed.path)
    return None if path is None else (part, path)


def _family(lora: LoraFile, placed: Mapping[str, tuple[Part, str]], paths: list[str]) -> str:
    named = family_in(lora.metadata)
    if named is not None:
        return named
    if any(name.startswith("denoiser.") for name in placed):
        return "lbm"
    if any(_is_unet(path) for path in paths):
        return _unet_family(lora, placed)
    candidates = [family for family in families_with(paths) if family not in {"open_clip", "t5"}]
    return candidates[0] if len(candidates) == 1 else "unknown"


def _unet_family(lora: LoraFile, placed: Mapping[str, tuple[Part, str]]) -> str:
    """By the width of what cross attention attends to; else by the number of blocks."""
    for name, (part, path) in placed.items():
        shape = lora.shape_of(name)
        if part == "denoiser" and path.endswith(("attn2.to_k", "attn2.to_v")) and len(shape) == 2:
            return "lbm" if shape[0] == shape[1] else _BY_CONTEXT_WIDTH.get(shape[1], "sdxl")
    numbered = ("down_blocks.3.", "up_blocks.3.", *(f"input_blocks.{number}." for number in (9, 10, 11)))
    deep = any(part == "denoiser" and path.startswith(numbered) for part, path in placed.values())
    return "sd15" if deep else "sdxl"


def _naming(lora: LoraFile, family: str, paths: Iterable[str]) -> str:
    """`diffusers` where any path is of diffusers alone; else the other one."""
    if family == "unknown":
        return {"peft": "diffusers", "comfyui": "original"}.get(lora.format, "unknown")
    if family in UNET_FAMILIES:
        return "diffusers" if any(to_sgm(path) is not None for path in paths) else "sgm"
    own = [row_of_diffusers(family, path) for path in paths]
    is_diffusers = (
        any(row is not None and row.original not in row.parts for row in own) or family == "qwen_image"
    )
    return "diffusers" if is_diffusers else "original"


def _in(naming: str, family: str, path: str, lora: LoraFile, blocks: UnetBlocks) -> str:
    """A path in the naming that the others are of, where it is of the other."""
    if family in UNET_FAMILIES:
        found = to_diffusers(path, blocks) if naming == "diffusers" else None
        return found or path
    row = row_of_original(family, path) if naming == "diffusers" else None
    if row is None or path in row.parts:
        return path
    if not row.is_rename:
        raise LoraFormatError(
            f"{lora}: {path} is a name of the original model, and other names are diffusers'.",
            hint="Make the file again in one naming.",
        )
    return row.parts[0]


def _is_unet(path: str) -> bool:
    return to_sgm(path) is not None or to_diffusers(path) is not None
