"""The two names of every layer of the diffusion transformers and text encoders: diffusers' and the original's.

    transformer_blocks.3.attn.to_out.0     double_blocks.3.img_attn.proj         FLUX
    blocks.3.attn1.to_q                    blocks.3.self_attn.q                  WAN

Original files keep the query, key and value matrices of a block as one fused matrix where diffusers has one for
each: then several of diffusers' layers are rows of one original layer. See `layer_tables`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from sigmascope.lora.names.layer_tables import TABLES

_BLOCK: Final = re.compile(
    r"((?:\w+_)?(?:blocks|resblocks)|encoder\.layers|encoder\.block|transformer\.resblocks)\.(\d+)\.(.+)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        original: The layer's name in the original model.
        parts: Diffusers' layers that are its rows, in order; one where nothing is fused.
        swapped: Whether the halves of the rows lie the other way round, in a layer of twice as many outputs as
            inputs.
    """

    original: str
    parts: tuple[str, ...]
    swapped: bool = False

    @property
    def is_rename(self) -> bool:
        """Whether the two layers hold the same matrix under two names."""
        return len(self.parts) == 1 and not self.swapped

    def numbered(self, number: str) -> "Row":
        """The line for one block."""
        return Row(
            self.original.replace("#", number),
            tuple(part.replace("#", number) for part in self.parts),
            self.swapped,
        )


def rows(family: str) -> tuple[Row, ...]:
    """The table of a family; empty for one that has none."""
    return _parsed(TABLES.get(family, ""))


def row_of_original(family: str, path: str) -> Row | None:
    """The line of a layer by its original name, with the block's number in it."""
    return _looked_up(_by_original(family), path)


def row_of_diffusers(family: str, path: str) -> Row | None:
    """The line of a layer by its name in diffusers, with the block's number in it."""
    return _looked_up(_by_part(family), path)


def unflattened(flat: str, families: Iterable[str]) -> str | None:
    """The dotted path of a layer whose dots became underscores, in the naming that it is of.

    Args:
        flat: Such as `double_blocks_3_img_attn_proj`.
        families: Those whose tables to look in, in order.

    Returns:
        The path; None for one that is in no table.
    """
    for family in families:
        numbers = re.findall(r"_(\d+)_", flat)
        for template in (flat, *(flat.replace(f"_{number}_", "_#_", 1) for number in numbers[:1])):
            path = _flat_names(family).get(template)
            if path is not None:
                return path.replace("#", numbers[0]) if "#" in path else path
    return None


def families_with(paths: Iterable[str]) -> list[str]:
    """The families whose table has every one of these dotted paths, in either naming."""
    wanted = list(paths)
    return [
        family
        for family in TABLES
        if wanted and all(row_of_original(family, path) or row_of_diffusers(family, path) for path in wanted)
    ]


@cache
def _parsed(text: str) -> tuple[Row, ...]:
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        original, _, names = line.partition(" = ")
        swapped = names.endswith(" swapped")
        parts = tuple(name.strip() for name in names.removesuffix(" swapped").split(","))
        found.append(Row(original, parts, swapped))
    return tuple(found)


@cache
def _by_original(family: str) -> dict[str, Row]:
    return {row.original: row for row in rows(family)}


@cache
def _by_part(family: str) -> dict[str, Row]:
    return {part: row for row in rows(family) for part in row.parts}


@cache
def _flat_names(family: str) -> dict[str, str]:
    names = [name for row in rows(family) for name in (row.original, *row.parts)]
    return {name.replace(".", "_"): name for name in names}


def _looked_up(table: dict[str, Row], path: str) -> Row | None:
    block = _BLOCK.fullmatch(path)
    if block is None:
        return table.get(path)
    row = table.get(f"{block[1]}.#.{block[3]}")
    return None if row is None else row.numbered(block[2])
