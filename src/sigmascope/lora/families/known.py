"""The families that are known, and what follows from all of them together.

To add a family, write a file with its `Family` and add it to `_ALL`. The order counts where two fit equally well.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import TopologicalSorter
from typing import Final

from sigmascope.lora.families.chroma import CHROMA
from sigmascope.lora.families.family import Family, Part, Row, Shapes
from sigmascope.lora.families.flux import FLUX
from sigmascope.lora.families.flux2 import FLUX2
from sigmascope.lora.families.hidream import HIDREAM
from sigmascope.lora.families.hunyuan_video import HUNYUAN_VIDEO
from sigmascope.lora.families.lbm import LBM
from sigmascope.lora.families.ltx_video import LTX_VIDEO
from sigmascope.lora.families.lumina2 import LUMINA2
from sigmascope.lora.families.qwen_image import QWEN_IMAGE
from sigmascope.lora.families.sd2 import SD2
from sigmascope.lora.families.sd3 import SD3
from sigmascope.lora.families.sd15 import SD15
from sigmascope.lora.families.sdxl import SDXL
from sigmascope.lora.families.text_encoders import ENCODERS
from sigmascope.lora.families.wan import WAN
from sigmascope.lora.families.z_image import Z_IMAGE

_ALL: Final = (
    LBM,
    SD15,
    SD2,
    SDXL,
    FLUX,
    FLUX2,
    SD3,
    WAN,
    QWEN_IMAGE,
    Z_IMAGE,
    LUMINA2,
    CHROMA,
    HUNYUAN_VIDEO,
    LTX_VIDEO,
    HIDREAM,
)

FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in _ALL}
"""The families of models that are known, by name."""
UNKNOWN: Final = Family(name="unknown", title="an unknown family", architecture="", base_version="")
"""What holds of a model of no family."""

UNET_FAMILIES: Final = frozenset(name for name, family in FAMILIES.items() if family.is_unet)
TRANSFORMERS: Final = tuple(name for name, family in FAMILIES.items() if family.rows)
CONTEXT_WIDTHS: Final = {family.context_widths[0]: family.name for family in _ALL if family.context_widths}
"""U-Nets are told apart by the width of the context that their cross attention reads."""
WIDTHS_BY_NAMES: Final = {width: family.name for family in _ALL for width in family.context_widths}
"""The same where only names are known, not what else the model has."""


def family_named(name: str | None) -> Family:
    """The record of a family; `UNKNOWN` of any other name."""
    return FAMILIES.get(name or "", UNKNOWN)


def likeliest(families: Iterable[str], shapes: Shapes) -> list[str]:
    """Of families that fit, those with models of that width; and of these, those that are not assumed to be another.

    Args:
        families: Their names.
        shapes: Of weights, by the layer's path in the denoiser.
    """
    fitting = list(families)
    width = _width(shapes)
    as_wide = [name for name in fitting if width in FAMILIES[name].widths] or fitting
    return [name for name in as_wide if FAMILIES[name].else_ not in as_wide]


def _width(shapes: Shapes) -> int | None:
    """The shorter side that most matrices have; of two as frequent, the wider: key and value may be narrow."""
    sides = Counter(min(shape) for shape in shapes.values() if len(shape) == 2)
    return max(sides, key=lambda side: (sides[side], side), default=None)


def _parts_by_encoder() -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for family in _ALL:
        for part, encoder in family.encoders.items():
            parts.setdefault(encoder, part)
    return parts


PARTS_BY_ENCODER: Final = _parts_by_encoder()
"""Which part a text encoder is, by ComfyUI's name, in a model of no known family: that of the first family that has it."""


# Layers by name.


def row_of_original(table: str, path: str) -> Row | None:
    """The line of a layer by its original name, with the block's number in it."""
    return _looked_up(table, _by_original(table), path)


def row_of_diffusers(table: str, path: str) -> Row | None:
    """The line of a layer by its name in diffusers, with the block's number in it."""
    return _looked_up(table, _by_part(table), path)


def unflattened(flat: str, tables: Iterable[str]) -> str | None:
    """The dotted path of a layer whose dots became underscores, in the naming that it is of.

    Args:
        flat: Such as `double_blocks_3_img_attn_proj`.
        tables: Families, or kinds of text encoders, whose layers to look through, in order.

    Returns:
        The path; None for one that is in no table.
    """
    numbers = re.findall(r"_(\d+)_", flat)
    templates = (flat, *(flat.replace(f"_{number}_", "_#_", 1) for number in numbers[:1]))
    for table in tables:
        for template in templates:
            path = _flat_names(table).get(template)
            if path is not None:
                return path.replace("#", numbers[0]) if "#" in path else path
    return None


def families_with(paths: Iterable[str]) -> list[str]:
    """The families that have every one of these dotted paths, in either naming."""
    wanted = list(paths)
    return [
        family
        for family in TRANSFORMERS
        if wanted and all(row_of_original(family, path) or row_of_diffusers(family, path) for path in wanted)
    ]


def is_layer_of(family: str, path: str) -> bool:
    """Whether a transformer of a family, or of a variant of it, has a layer of that path in either naming."""
    record = family_named(family)
    if record.variant is not None and re.fullmatch(record.variant, path):
        return True
    own = path if record.twin is None else path.removeprefix(record.twin)
    return row_of_original(family, own) is not None or row_of_diffusers(family, own) is not None


@cache
def rows(table: str) -> tuple[Row, ...]:
    """The layers of a family, or of a kind of text encoder; empty for one that is not looked up by name."""
    return ENCODERS.get(table, ()) or family_named(table).rows


@cache
def _numbered(table: str) -> re.Pattern[str]:
    """What stands before and after the number of a block in the names of a table."""
    lists = {
        name.partition(".#.")[0]
        for row in rows(table)
        for name in (row.original, *row.parts)
        if ".#." in name
    }
    return re.compile(rf"({'|'.join(map(re.escape, sorted(lists)))})\.(\d+)\.(.+)")


def _looked_up(table: str, rows: Mapping[str, Row], path: str) -> Row | None:
    block = _numbered(table).fullmatch(path)
    if block is None:
        return rows.get(path)
    row = rows.get(f"{block[1]}.#.{block[3]}")
    return None if row is None else row.numbered(block[2])


@cache
def _by_original(table: str) -> dict[str, Row]:
    return {name: row for row in rows(table) for name in (row.original, row.also) if name is not None}


@cache
def _by_part(table: str) -> dict[str, Row]:
    return {part: row for row in rows(table) for part in row.parts}


@cache
def _flat_names(table: str) -> dict[str, str]:
    names = [name for row in rows(table) for name in (row.original, *row.parts, row.also) if name is not None]
    return {name.replace(".", "_"): name for name in names}


# Blocks by name.


def _blocks(family: Family) -> list[tuple[str, str]]:
    """Each list of blocks or layer outside of them, `.#` after a list's name, and what reports call it."""
    lines = [line.partition(" = ") for line in map(str.strip, family.blocks.splitlines()) if line]
    return [(name, shown or name.removesuffix(".#")) for name, _, shown in lines]


def _shown() -> tuple[dict[str, str], dict[str, str]]:
    lists: dict[str, str] = {}
    singles: dict[str, str] = {}
    for family in _ALL:
        for name, shown in (*_blocks(family), *((name, name) for name in family.extra_blocks)):
            table = lists if name.endswith(".#") else singles
            known = table.setdefault(name.removesuffix(".#"), shown)
            if known != shown:
                raise ValueError(f"{family.name} calls {name} {shown}, another family {known}")
    return lists, singles


BLOCK_LISTS, SINGLE_BLOCKS = _shown()
"""What reports call numbered lists of blocks, and layers outside of blocks, by any family's name for them."""


def _flow() -> tuple[str, ...]:
    """One order for the blocks of all families, in which each family's own are in its order."""
    before: dict[str, list[str]] = {}  # lists: a set's order would differ from run to run
    for family in _ALL:
        order = list(dict.fromkeys(shown for _, shown in _blocks(family)))
        for index, shown in enumerate(order):
            before.setdefault(shown, []).extend(order[:index])
    return tuple(TopologicalSorter(before).static_order())


FLOW: Final = _flow()
"""What reports call blocks, in the order in which a latent passes them."""
ATTENTION: Final = tuple(family.attention for family in _ALL if family.attention is not None)
AROUND_ATTENTION: Final = tuple(family.around for family in _ALL if family.around is not None)
