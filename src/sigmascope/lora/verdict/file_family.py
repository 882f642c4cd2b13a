"""Which family of models a LoRA file is for, and what tells so."""

from dataclasses import dataclass, replace
from typing import Final

from sigmascope.errors import SigmascopeError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.header import family_in
from sigmascope.lora.names.flat_names import flat, unflattened_denoiser
from sigmascope.lora.names.layer_paths import UNET_FAMILIES
from sigmascope.lora.names.module_names import parse_name
from sigmascope.lora.names.own_names import understand_names
from sigmascope.lora.names.transformer_names import row_of_diffusers, row_of_original

FAMILY_TITLES: Final = {
    "lbm": "LBM",
    "sd15": "Stable Diffusion 1.5",
    "sd2": "Stable Diffusion 2",
    "sdxl": "SDXL",
    "sd3": "Stable Diffusion 3",
    "flux": "FLUX",
    "wan": "WAN",
    "qwen_image": "Qwen-Image",
}
"""Families by what their users call them."""

_CONTEXT_WIDTHS: Final = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_OF_SDXL: Final = {
    "transformer_blocks_9_": "ten transformer blocks in a row",
    "add_embedding_linear": "its embedding of image sizes",
    "label_emb_0": "its embedding of image sizes",
}
_TRANSFORMERS: Final = ("flux", "sd3", "wan", "qwen_image")
_VACE: Final = "vace_"  # WAN's variant that also reads a video has its blocks twice
_CONTEXT_LAYERS: Final = ("attn2.to_k", "attn2.to_v", "attn2_to_k", "attn2_to_v")


@dataclass(frozen=True, slots=True)
class FileFamily:
    """What a file is for.

    Attributes:
        family: As in `ModelLayout.family`; None where nothing tells.
        is_unet: Whether its names are those of a U-Net, of whatever family.
        evidence: What it was told from.
    """

    family: str | None
    is_unet: bool
    evidence: str


def title_of(family: str | None) -> str:
    """The family as its users call it."""
    return FAMILY_TITLES.get(family or "", "an unknown family")


def file_family(lora: LoraFile) -> FileFamily:
    """Tell by names and shapes; by the header where these leave it open.

    Args:
        lora: In any format; its tensors are not read.
    """
    by_names = _by_names(lora)
    stated = family_in(lora.metadata)
    if by_names in UNET_FAMILIES:
        return _of_unet(lora, by_names, stated)
    if by_names is not None:
        return FileFamily(by_names, False, "its names")
    return FileFamily(stated, False, "its header" if stated else "neither names nor header tell")


def _by_names(lora: LoraFile) -> str | None:
    try:
        family = understand_names(replace(lora, metadata={})).layout.family
    except SigmascopeError:
        family = "unknown"
    return _by_most_names(lora) if family == "unknown" else family


def _by_most_names(lora: LoraFile) -> str | None:
    """The family whose tables have most of the denoiser's names: some may be renamed, or of a variant."""
    paths = [path for name in lora.names if (path := _denoiser_path(name)) is not None]
    counts = {family: sum(_is_in_table(family, path) for path in paths) for family in _TRANSFORMERS}
    first, second = sorted(counts, key=lambda family: -counts[family])[:2]
    return first if counts[first] > counts[second] and 2 * counts[first] >= len(paths) else None


def _denoiser_path(name: str) -> str | None:
    parsed = parse_name(name)
    if parsed.parts and not parsed.parts[0].startswith("denoiser"):
        return None
    path = unflattened_denoiser(parsed.path) if parsed.is_flat else parsed.path
    return (path or parsed.path).removeprefix(_VACE)


def _is_in_table(family: str, path: str) -> bool:
    return row_of_original(family, path) is not None or row_of_diffusers(family, path) is not None


def _of_unet(lora: LoraFile, by_names: str, stated: str | None) -> FileFamily:
    """The names of all U-Nets are alike: the width of what cross attention reads tells them apart."""
    if by_names == "lbm":
        return FileFamily("lbm", True, "its names")
    width = _context_width(lora)
    if width in _CONTEXT_WIDTHS:
        return FileFamily(_CONTEXT_WIDTHS[width], True, f"cross attention that reads {width} features")
    if stated in UNET_FAMILIES:
        return FileFamily(stated, True, "its header")
    for mark, words in _OF_SDXL.items():
        if any(mark in flat(name) for name in lora.names):
            return FileFamily("sdxl", True, words)
    return FileFamily(None, True, "the names of a U-Net, of no known width")


def _context_width(lora: LoraFile) -> int | None:
    for name in lora.names:
        shape = lora.shape_of(name)
        if name.endswith(_CONTEXT_LAYERS) and len(shape) == 2:
            return shape[1]
    return None
