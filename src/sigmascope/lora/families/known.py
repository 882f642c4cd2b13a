"""All known families, and the tables that are derived from all of them together.

Every module in this folder that has a `Family` is read: to add a family, write a file. The order of the files does not
matter. One index (`RowIndex`) holds the names of all families, so that the cost of a look-up does not grow with their
number.
"""

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from sigmascope.lora.families.family import (
    COMFYUI_ENCODERS,
    Family,
    Part,
    Row,
    Shapes,
    parsed_rows,
)
from sigmascope.lora.families.text_encoders import ENCODERS

_MODULES_WITHOUT_RECORD: Final = frozenset({"family", "known", "layouts"})
"""The modules in this folder that hold no record."""


def recorded() -> list[Family]:
    """The records of the modules here, by name."""
    package = __name__.rpartition(".")[0]
    names = (module.name for module in iter_modules(sys.modules[package].__path__))
    modules = [import_module(f"{package}.{name}") for name in names if name not in _MODULES_WITHOUT_RECORD]
    families = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, Family)
    }
    return sorted(families.values(), key=lambda family: family.name)


class RowIndex:
    """The layers of all families, and of text encoders, by name.

    Attributes:
        by_original: The lines (one for each table) with a layer of this original name; `#` is the number of a block.
        by_part: The same by diffusers' name.
        by_flat: The dotted names by their form with underscores. If two clash, a layer's own name wins over one of a
            second dialect (`Row.also`).
    """

    def __init__(self, tables: Mapping[str, Iterable[Row]]) -> None:
        self.by_original: dict[str, dict[str, Row]] = {}
        self.by_part: dict[str, dict[str, Row]] = {}
        own: set[str] = set()
        others: set[str] = set()
        for table, rows in tables.items():
            for row in rows:
                own |= {row.original, *row.parts}
                others.update(row.originals)
                for name in row.originals:
                    self.by_original.setdefault(name, {})[table] = row
                for name in row.parts:
                    self.by_part.setdefault(name, {})[table] = row
        self._having: dict[str, frozenset[str]] = {
            name: frozenset({*self.by_original.get(name, ()), *self.by_part.get(name, ())})
            for name in own | others
        }
        names = (*sorted(others), *sorted(own))  # the last of one flat name stays
        self.by_flat: dict[str, str] = {name.replace(".", "_"): name for name in names}

    def original(self, table: str, path: str) -> Row | None:
        """The line of a layer by its original name, with the block's number in it."""
        return _looked_up(self.by_original, table, path)

    def part(self, table: str, path: str) -> Row | None:
        """The line of a layer by its name in diffusers, with the block's number in it."""
        return _looked_up(self.by_part, table, path)

    def tables_with(self, path: str) -> frozenset[str]:
        """The tables that have a layer of that name, in either naming."""
        template, _ = _template(path)
        return self._having.get(template) or self._having.get(path, frozenset())

    def dotted(self, flat: str) -> str | None:
        """The path of a layer whose dots became underscores, such as `double_blocks_3_img_attn_proj`."""
        path = self.by_flat.get(flat)
        block = _FLAT_BLOCK.search(flat) if path is None else None
        if block is None:
            return path
        path = self.by_flat.get(f"{flat[: block.start(2)]}#{flat[block.end() :]}")
        return None if path is None else path.replace("#", block[2])


_BLOCK: Final = re.compile(r"(?<=\.)((?:block)?)(\d+)(?=\.)")  # Cosmos 1: `blocks.block3`
_FLAT_BLOCK: Final = re.compile(r"(?<=_)((?:block)?)(\d+)(?=_)")


def _template(path: str) -> tuple[str, str]:
    """A path with `#` for its first number, and that number; what tables call it, if it is in a block."""
    block = _BLOCK.search(path)
    return (path, "") if block is None else (f"{path[: block.start(2)]}#{path[block.end() :]}", block[2])


def _looked_up(names: Mapping[str, Mapping[str, Row]], table: str, path: str) -> Row | None:
    row = names.get(path, {}).get(table)
    if row is not None:
        return row
    template, number = _template(path)
    row = names.get(template, {}).get(table)
    return None if row is None else row.numbered(number)


def parts_by_encoder(families: Iterable[Family]) -> dict[str, Part]:
    """The part of each text encoder in a model of an unknown family, by ComfyUI's name: families agree, or one decides.

    Raises:
        ValueError: Families differ, and not exactly one of them decides.
    """
    said: dict[str, set[Part]] = {}
    decided: dict[str, set[Part]] = {}
    for family in families:
        for part, encoders in family.encoders.items():
            for encoder in encoders:
                said.setdefault(encoder, set()).add(part)
                if encoder in family.decides:
                    decided.setdefault(encoder, set()).add(part)
    parts = {encoder: decided.get(encoder, said[encoder]) for encoder in sorted(said)}
    for encoder, of_encoder in parts.items():
        if len(of_encoder) > 1:
            raise ValueError(
                f"{encoder} is {' and '.join(sorted(of_encoder))}: one family's record has to name it in `decides`"
            )
    return {encoder: next(iter(of_encoder)) for encoder, of_encoder in parts.items()}


def encoder_parts(families: Iterable[Family]) -> dict[str, tuple[Part, ...]]:
    """The parts that a text encoder may be, by ComfyUI's name: the usual, those of families, and a model's only one."""
    usual = {encoder: part for part, encoder in COMFYUI_ENCODERS.items()}
    known = list(families)
    said = {
        (encoder, part) for family in known for part, names in family.encoders.items() for encoder in names
    }
    return {
        encoder: tuple(
            dict.fromkeys(
                (
                    usual.get(encoder, part),
                    *sorted(also for name, also in said if name == encoder),
                    "text_encoder",
                )
            )
        )
        for encoder, part in parts_by_encoder(known).items()
    }


def shown_blocks(families: Iterable[Family]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """What reports call numbered lists of blocks, and layers outside of blocks, by any family's name for them.

    One family's original list may have the name of another family's own: WAN calls its blocks `blocks` in both namings,
    PixArt calls `transformer_blocks` so in its original files. Then the layers in a block tell them apart.

    Returns:
        The lists, the layers outside of blocks, and the lists of layers (such as `blocks.#.attn.qkv`) whose list has
        another name there.

    Raises:
        ValueError: Two families show one name differently.
    """
    known = list(families)
    said: dict[str, set[str]] = {}
    for family in known:
        for name, shown in (*family.shown_blocks, *((name, name) for name in family.extra_blocks)):
            said.setdefault(name, set()).add(shown)
    lists: dict[str, str] = {}
    singles: dict[str, str] = {}
    for name, ways in said.items():
        own = {name.removesuffix(".#")} & ways or ways
        if len(own) > 1:
            raise ValueError(f"families call {name} {' and '.join(sorted(own))}")
        (lists if name.endswith(".#") else singles)[name.removesuffix(".#")] = next(iter(own))
    return lists, singles, _lists_of_layers(known, {name for name, ways in said.items() if len(ways) > 1})


def _lists_of_layers(families: Iterable[Family], shared: Collection[str]) -> dict[str, str]:
    """A layer that both kinds of families have, such as `blocks.#.scale_shift_table`, is left to the list's own."""
    said: dict[str, set[str]] = {}
    for family in families:
        for name, shown in family.shown_blocks:
            if name in shared:
                inside = re.compile(rf"{re.escape(name.removesuffix('.#'))}\.(?:block)?#\.")
                names = (one for row in family.rows for one in (*row.originals, *row.parts))
                for layer in filter(inside.match, names):
                    said.setdefault(layer, set()).add(shown)
    return {
        layer: next(iter(shown))
        for layer, shown in sorted(said.items())
        if len(shown) == 1 and not layer.startswith(f"{next(iter(shown))}.")
    }


def flow(families: Iterable[Family]) -> tuple[str, ...]:
    """One order of the block names of all families, which keeps each family's own order."""
    before: dict[str, set[str]] = {}
    for family in families:
        order = list(dict.fromkeys(shown for _, shown in family.shown_blocks))
        for index, shown in enumerate(order):
            before.setdefault(shown, set()).update(order[:index])
    sorter = TopologicalSorter(before)
    sorter.prepare()
    ordered: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())  # by name where nothing else says so: the same in every run
        ordered += ready
        sorter.done(*ready)
    return tuple(ordered)


def by_header(families: Iterable[Family]) -> dict[str, str]:
    """The family of each name in headers, reduced to its letters and digits; "" for another model.

    Raises:
        ValueError: Two families have one name.
    """
    named: dict[str, str] = {}
    for family in families:
        for names, name in ((family.header_names, family.name), (family.not_called, "")):
            for spelling in map(plain, names):
                if named.setdefault(spelling, name) != name:
                    raise ValueError(f"{spelling} is the name of {name} and of {named[spelling]}")
    return named


def plain(name: str) -> str:
    """Only the letters and digits, in lower case: tools write Flux.2-dev, flux-2-dev and flux_2_dev."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_ALL: Final = tuple(recorded())
FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in _ALL}
"""The families of models that are known, by name."""
UNKNOWN: Final = Family(name="unknown", title="an unknown family", architecture="", base_version="")
"""The record of a model whose family is not known."""

UNET_FAMILIES: Final = frozenset(name for name, family in FAMILIES.items() if family.is_unet)
CONTEXT_WIDTHS: Final = {family.context_widths[0]: family.name for family in _ALL if family.context_widths}
"""U-Nets are told apart by the width of the context that their cross attention reads."""
WIDTHS_BY_NAMES: Final = {width: family.name for family in _ALL for width in family.context_widths}
"""The same for files that show only names, not what else the model has."""
PARTS_BY_ENCODER: Final = parts_by_encoder(_ALL)
ENCODER_PARTS: Final = encoder_parts(_ALL)
BLOCK_LISTS, SINGLE_BLOCKS, LISTS_OF_LAYERS = shown_blocks(_ALL)
FLOW: Final = flow(_ALL)
"""What reports call blocks, in the order in which a latent passes them."""
ATTENTION: Final = tuple(family.attention for family in _ALL if family.attention is not None)
AROUND_ATTENTION: Final = tuple(family.around for family in _ALL if family.around is not None)

_LAYERS: Final = RowIndex({family.name: family.rows for family in _ALL})
_VECTORS: Final = RowIndex({family.name: parsed_rows(family.vectors) for family in _ALL})
_ENCODER_LAYERS: Final = RowIndex(ENCODERS)
_VARIANTS: Final = [
    (family.name, re.compile(family.variant.replace(r"\.", "[._]")))  # dotted, or flat as in kohya's files
    for family in _ALL
    if family.variant is not None
]
_TWINS: Final = {family.twin: family.name for family in _ALL if family.twin is not None}
_TWIN: Final = re.compile("|".join(map(re.escape, _TWINS)))
_BY_HEADER: Final = by_header(_ALL)


def family_named(name: str | None) -> Family:
    """The record of a family; `UNKNOWN` for any other name."""
    return FAMILIES.get(name or "", UNKNOWN)


def family_of_header(text: str) -> str | None:
    """The family that a header's value names, such as `Flux.2-klein-4b`; None if it names no known one.

    A model's name is followed by its version, so the longest known name at the beginning of the value counts.
    """
    value = plain(text)
    beginnings = (value[:length] for length in range(len(value), 0, -1))
    return next((_BY_HEADER[name] or None for name in beginnings if name in _BY_HEADER), None)


def likeliest(families: Iterable[str], shapes: Shapes) -> list[str]:
    """Of families that fit, those with models of that width, but none for which another of them is assumed (`else_`).

    Args:
        families: Their names.
        shapes: Of weights, by the layer's path in the denoiser.
    """
    wide = as_wide(families, shapes)
    return [name for name in wide if family_named(name).else_ not in wide] if len(wide) > 1 else wide


def as_wide(families: Iterable[str], shapes: Shapes) -> list[str]:
    """Of families that fit, those with models of that width; all of them if none has such models."""
    fitting = list(families)
    width = _width(shapes) if len(fitting) > 1 else None
    return [name for name in fitting if width in family_named(name).widths] or fitting


def _width(shapes: Shapes) -> int | None:
    """The shorter side that most matrices have; of two as frequent, the wider: key and value may be narrow."""
    sides = Counter(min(shape) for shape in shapes.values() if len(shape) == 2)
    return max(sides, key=lambda side: (sides[side], side), default=None)


# Layers by name.


def row_of_original(table: str, path: str) -> Row | None:
    """The line of a layer of a family, or of a kind of text encoder, by its original name, with the block's number in it."""
    return (_ENCODER_LAYERS if table in ENCODERS else _LAYERS).original(table, path)


def row_of_diffusers(table: str, path: str) -> Row | None:
    """The same by its name in diffusers."""
    return (_ENCODER_LAYERS if table in ENCODERS else _LAYERS).part(table, path)


def vector_of_original(family: str, path: str) -> Row | None:
    """The line of a norm, or another tensor that is no layer, by its original name (`Family.vectors`)."""
    return _VECTORS.original(family, path)


def vector_of_diffusers(family: str, path: str) -> Row | None:
    """The same by its name in diffusers."""
    return _VECTORS.part(family, path)


def unflattened(flat: str, *, text_encoder: bool = False) -> str | None:
    """The dotted path of a layer whose dots became underscores, in the naming that it is of.

    Args:
        flat: Such as `double_blocks_3_img_attn_proj`.
        text_encoder: Whether it is a text encoder's layer, and not a denoiser's.

    Returns:
        The path; None for one that no family has.
    """
    return (_ENCODER_LAYERS if text_encoder else _LAYERS).dotted(flat)


def families_with(paths: Iterable[str]) -> list[str]:
    """The families that have every one of these dotted paths, in either naming."""
    having: frozenset[str] | None = None
    for path in paths:
        having = _LAYERS.tables_with(path) if having is None else having & _LAYERS.tables_with(path)
        if not having:
            return []
    return sorted(having or ())


def known_names(paths: Iterable[str]) -> Counter[str]:
    """How many of these paths each family or a variant of it has; families without any are left out."""
    return Counter(family for path in paths for family in _families_of(path))


def is_known_layer(path: str) -> bool:
    """Whether any family, or a variant of one, has a layer of that path in either naming."""
    return bool(_families_of(path))


def is_layer_of(family: str, path: str) -> bool:
    """Whether a transformer of a family, or of a variant of it, has a layer of that path in either naming."""
    return family in _families_of(path)


def must_have(family: str, path: str) -> str | None:
    """The list of blocks of which every model of a family has a layer in some block.

    Args:
        family: The family.
        path: The layer's dotted path, in either naming.

    Returns:
        The list, such as `double_blocks`; None if the layer is in no block, or models of the family differ in it.
    """
    if _LAYERS.original(family, path) is None and _LAYERS.part(family, path) is None:
        return None
    blocks, number, _ = _template(path)[0].partition(".#.")
    sometimes = family_named(family).sometimes
    if not number or (sometimes is not None and re.fullmatch(sometimes, path)):
        return None
    return blocks


def without_twin(path: str) -> str:
    """A layer's path, dotted or flat, without `Family.twin`: as in the model's own blocks."""
    return path[len(_twin(path)) :]


def _twin(path: str) -> str:
    match = _TWIN.match(path)
    return "" if match is None else match[0]


@cache
def _families_of(path: str) -> frozenset[str]:
    families = _LAYERS.tables_with(path) | {name for name, variant in _VARIANTS if variant.fullmatch(path)}
    twin = _twin(path)
    return families | ({_TWINS[twin]} & _LAYERS.tables_with(path[len(twin) :]) if twin else set())
