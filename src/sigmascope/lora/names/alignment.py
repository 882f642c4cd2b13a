"""A LoRA of any format under the names of one model's layers, with fused matrices divided or put together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile, ModuleFacts
from sigmascope.lora.formats.lazy import LazyMapping
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.flat_names import unflattened_denoiser, unflattened_text_encoder
from sigmascope.lora.names.fused import divided, joined, joined_sizes, part_sizes
from sigmascope.lora.names.module_names import parse_name
from sigmascope.lora.names.naming import LayerIndex
from sigmascope.lora.names.transformer_names import Row, row_of_diffusers, row_of_original

_TEXT_MODEL: Final = "text_model."


@dataclass(frozen=True, slots=True)
class AlignedLora:
    """A LoRA whose modules are named as a model's layers are.

    Attributes:
        lora: The modules and changes by layer. Read from the same file, one at a time, as the LoRA it came from.
        sources: The names in that LoRA which a layer's module is made of.
        unmatched: The names there that are of no layer of the model.
    """

    lora: LoraFile
    sources: dict[str, tuple[str, ...]]
    unmatched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a layer's factors are made of a LoRA's modules.

    Attributes:
        names: The modules.
        row: The fused matrix; None for a module that is taken as it is.
        parts: With several modules, or one that is to be joined: which part each is. Else the part wanted.
        joins: Whether the modules are the parts, and the layer the whole.
    """

    names: tuple[str, ...]
    row: Row | None = None
    parts: tuple[str, ...] = ()
    joins: bool = False


def align(lora: LoraFile, layers: Sequence[str], layout: ModelLayout) -> AlignedLora:
    """Name a LoRA's modules by the model's layers.

    Where the LoRA has one matrix for a block's query, key and value and the model three, or the other way round,
    its factors are divided or joined, exactly. Nothing is read here.

    Args:
        lora: In any format.
        layers: Paths of the model's layers, without `.weight`; see `resolve_names`.
        layout: How the model names its weights.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one layer.
    """
    index = LayerIndex.of(layers, layout)
    match = index.match(lora)
    recipes = {layer: _Recipe((name,)) for name, layer in match.matched.items()}
    fused = _fused(lora, match.unmatched, index, layout)
    for layer, recipe in fused.items():
        if layer in recipes:
            raise LoraFormatError(
                f"{lora}: {', '.join((*recipes[layer].names, *recipe.names))} are all for {layer}.",
                hint="The file holds one layer under two names: remove one of them.",
            )
    recipes |= fused
    plain = {layer: recipe for layer, recipe in recipes.items() if recipe.names[0] in lora.modules}
    others = {layer: recipe.names[0] for layer, recipe in recipes.items() if layer not in plain}
    used = {name for recipe in recipes.values() for name in recipe.names}
    named = replace(
        lora,
        modules=LazyMapping(plain, lambda recipe: _made(lora, recipe)),
        changes=LazyMapping(others, lora.changes.__getitem__),
        facts={layer: _facts(lora, recipe) for layer, recipe in recipes.items()},
    )
    unmatched = tuple(name for name in lora.names if name not in used)
    return AlignedLora(named, {layer: recipe.names for layer, recipe in recipes.items()}, unmatched)


def _made(lora: LoraFile, recipe: _Recipe) -> LoraFactors:
    if recipe.row is None:
        return lora.modules[recipe.names[0]]
    if recipe.joins:
        parts = {part: lora.modules[name] for part, name in zip(recipe.parts, recipe.names, strict=True)}
        return joined(parts, recipe.row)
    return divided(lora.modules[recipe.names[0]], recipe.row)[recipe.parts[0]]


def _facts(lora: LoraFile, recipe: _Recipe) -> ModuleFacts:
    first = lora.facts_of(recipe.names[0])
    if recipe.row is None:
        return first
    width, ranks = first.weight_shape[1:], [lora.rank_of(name) or 0 for name in recipe.names]
    if recipe.joins:
        sizes = {part: lora.shape_of(name)[0] for part, name in zip(recipe.parts, recipe.names, strict=True)}
        out = sum(joined_sizes(sizes, recipe.row, prod(width)))
    else:
        out = dict(zip(recipe.row.parts, part_sizes(first.weight_shape, recipe.row), strict=True))[
            recipe.parts[0]
        ]
    rank = sum(ranks)
    return ModuleFacts("lora", (out, *width), rank, rank * (out + prod(width)))


def _fused(
    lora: LoraFile, names: Sequence[str], index: LayerIndex, layout: ModelLayout
) -> dict[str, _Recipe]:
    """Recipes for the layers that modules without a layer of their own are parts of, or have as parts."""
    recipes: dict[str, _Recipe] = {}
    joins: defaultdict[str, list[tuple[str, str, Row]]] = defaultdict(list)
    for name in names:
        if name not in lora.modules:
            continue
        for part, path, family in _candidates(name, layout):
            whole, one = row_of_original(family, path), row_of_diffusers(family, path)
            layers = [index.find(part, inner) for inner in whole.parts] if whole is not None else []
            target = None if one is None else index.find(part, one.original)
            if whole is not None and None not in layers:
                recipes |= {
                    str(layer): _Recipe((name,), whole, (inner,))
                    for layer, inner in zip(layers, whole.parts, strict=True)
                }
            elif one is not None and target is not None:
                joins[target].append((name, path, one))
            else:
                continue
            break
    for layer, found in joins.items():
        sources, parts, lines = zip(*found, strict=True)
        recipes[layer] = _Recipe(sources, lines[0], parts, joins=True)
    return recipes


def _candidates(name: str, layout: ModelLayout) -> Iterator[tuple[Part, str, str]]:
    """The parts that a module may be of, its dotted path there, and the table to look it up in."""
    parsed = parse_name(name)
    for part in parsed.parts or ("denoiser",):
        is_text = part.startswith("text_encoder")
        undo = unflattened_text_encoder if is_text else unflattened_denoiser
        path = undo(parsed.path) if parsed.is_flat else parsed.path
        if path is not None:
            yield part, path.removeprefix(_TEXT_MODEL), "open_clip" if is_text else layout.family
