"""Which family a U-Net is of, told by the widths of its cross attention."""

from collections.abc import Mapping
from typing import Final

_CONTEXT: Final = "attn2.to_k.weight"
_CONTEXT_WIDTHS: Final = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_ADDED: Final = ("add_embedding.linear_1.weight", "label_emb.0.0.weight")
_VIDEO: Final = ("temporal_transformer_blocks", "time_stack")


def unet_family(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> str:
    """Tell SD1.5, SD2, SDXL and LBM apart, in diffusers' or sgm's keys; small models of the same make too.

    Args:
        shapes: Shapes by key.
        prefix: What stands before the U-Net's keys.

    Returns:
        `sd15`, `sd2`, `sdxl`, `lbm` (a denoiser that was taken out of its checkpoint) or `unknown`.
    """
    context = {
        key: shape
        for key, shape in shapes.items()
        if key.startswith(prefix) and key.endswith(_CONTEXT) and len(shape) == 2
    }
    if not context or any(mark in key for key in context for mark in _VIDEO):
        return "unknown"
    width = next(iter(context.values()))[1]
    has_added = any(prefix + key in shapes for key in _ADDED)
    first_level = any(
        key.startswith((f"{prefix}down_blocks.0.", f"{prefix}input_blocks.1.")) for key in context
    )
    if width in _CONTEXT_WIDTHS and not (has_added and width == 768):
        return _CONTEXT_WIDTHS[width]
    if has_added:
        return "sdxl"
    if not first_level and all(keys == queries for queries, keys in context.values()):
        return "lbm"  # its cross attention attends to the hidden states themselves (SPEC section 7)
    return _by_projection(shapes, prefix)


def _by_projection(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> str:
    """SD1.5 projects into its transformers by 1×1 convolutions, SD2 by matrices."""
    for key, shape in shapes.items():
        if key.startswith(prefix) and key.endswith(".proj_in.weight"):
            return "sd15" if len(shape) == 4 else "sd2"
    return "unknown"
