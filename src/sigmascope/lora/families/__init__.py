"""Families of models: a file for each, and how a checkpoint's family is recognised.

- `family`: the record. `known`: all of them, and lookups by name. `layouts`: how a checkpoint names its parts.
- `unet`, `text_encoders`: what several families share.
"""

from sigmascope.lora.families.family import Family, Lost, Naming, Part, Ratio, Row, Shapes, UnetBlocks
from sigmascope.lora.families.known import (
    CONTEXT_WIDTHS,
    FAMILIES,
    UNET_FAMILIES,
    UNKNOWN,
    families_with,
    family_named,
    family_of_header,
    is_layer_of,
    known_names,
    likeliest,
    row_of_diffusers,
    row_of_original,
    unflattened,
    without_twin,
)
from sigmascope.lora.families.layouts import (
    SINGLE_FILE,
    ModelLayout,
    attends_to_itself,
    family_misfit,
    layout_of,
    unet_family,
)

__all__ = [
    "CONTEXT_WIDTHS",
    "FAMILIES",
    "SINGLE_FILE",
    "UNET_FAMILIES",
    "UNKNOWN",
    "Family",
    "Lost",
    "ModelLayout",
    "Naming",
    "Part",
    "Ratio",
    "Row",
    "Shapes",
    "UnetBlocks",
    "attends_to_itself",
    "families_with",
    "family_misfit",
    "family_named",
    "family_of_header",
    "is_layer_of",
    "known_names",
    "layout_of",
    "likeliest",
    "row_of_diffusers",
    "row_of_original",
    "unet_family",
    "unflattened",
    "without_twin",
]
