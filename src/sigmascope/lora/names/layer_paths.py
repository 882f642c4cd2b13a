"""Carry a layer's path from one naming of its architecture to the other."""

from typing import Final, Literal

from sigmascope.errors import LoraFormatError
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.transformer_names import Row, row_of_diffusers, row_of_original
from sigmascope.lora.names.unet_names import SD_BLOCKS, SDXL_BLOCKS, UnetBlocks, to_diffusers, to_sgm

Naming = Literal["diffusers", "original"]

UNET_FAMILIES: Final = frozenset({"lbm", "sd15", "sd2", "sdxl"})
_CLIP_STARTS: Final = ("encoder.layers.", "embeddings.", "final_layer_norm")
_DIFFUSERS: Final = frozenset({"diffusers", "lbm"})
_UNET_STARTS: Final = (
    *("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_norm_out", "conv_out"),
    *("time_embedding.", "add_embedding.", "input_blocks.", "middle_block.", "output_blocks."),
    *("time_embed.", "label_emb.", "out.0", "out.2"),
)


def renamed(
    path: str, part: Part, layout: ModelLayout, wanted: Naming, blocks: UnetBlocks | None = None
) -> str | Row:
    """A layer's path in the naming that a format wants.

    Args:
        path: Inside its part of the model, in the layout's naming.
        part: That part.
        layout: Of the checkpoint that the path is of.
        wanted: `original` is the naming of the family's single files, sgm's for U-Nets.
        blocks: The U-Net's; the family's own when left out.

    Returns:
        The path, or the line of the table where the layer is a part of another one or its rows lie otherwise.

    Raises:
        LoraFormatError: The layer has no name there that is known.
    """
    if part not in {"denoiser", "denoiser_2"}:
        return _in_other_part(path, part)
    if layout.naming == "unknown" or wanted == ("diffusers" if layout.naming in _DIFFUSERS else "original"):
        return path
    if is_unet_layer(path, layout):
        found = (to_diffusers if wanted == "diffusers" else to_sgm)(
            path, blocks or usual_blocks(layout.family)
        )
    else:
        look_up = row_of_original if wanted == "diffusers" else row_of_diffusers
        row = look_up(layout.family, path)
        if row is not None and not row.is_rename:
            return row
        found = None if row is None else row.parts[0] if wanted == "diffusers" else row.original
    if found is None:
        raise LoraFormatError(
            f"{path} of a model of family {layout.family} has no {wanted} name that is known.",
            hint="Write the format that keeps the model's own names: native.",
        )
    return found


def is_unet_layer(path: str, layout: ModelLayout) -> bool:
    """Whether a denoiser's layer is one of a Stable Diffusion U-Net, in either naming."""
    unknown = layout.family == "unknown"
    return layout.family in UNET_FAMILIES or (unknown and path.startswith(_UNET_STARTS))


def usual_blocks(family: str) -> UnetBlocks:
    """The blocks of a family's published U-Net."""
    return SD_BLOCKS if family in {"sd15", "sd2"} else SDXL_BLOCKS


def _in_other_part(path: str, part: Part) -> str | Row:
    """Text encoders are named as in transformers in every LoRA format; other parts keep their paths."""
    if not part.startswith("text_encoder"):
        return path
    if path.startswith(_CLIP_STARTS):  # as of version 5, CLIPTextModel's own keys begin here
        return f"text_model.{path}"
    row = row_of_original("open_clip", path)
    if row is None:
        return path
    parts = tuple(f"text_model.{part}" for part in row.parts)
    return parts[0] if row.is_rename else Row(row.original, parts, row.swapped)
