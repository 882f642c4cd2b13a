"""Put LoRAs under the names of a model's layers, or under common names; fused matrices are divided or joined.

`align` names one LoRA's modules by a model's layers, `changed_keys` by its tensors; `align_all` finds common names for
several LoRAs without their model. All of them leave the tensors in their files.

If one side has a fused matrix and the other its parts, a change is divided or joined exactly (`divided`, `joined`). The
rows of a fused matrix W = [W₁; W₂; …] are those of its parts. ΔW = up·down divides by the rows of `up`, all parts
sharing `down`. Joined, the parts' factors stand on a block diagonal: the rank is the sum of their ranks. LoHa, LoKr and
Tucker changes are formed, and become whole differences of the parts or of the fused matrix. Kinds that need the weights
(OFT, DoRA, …) are divided or joined by their rows, in part once the weights are there (`sigmascope.lora.kinds.fused`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import torch

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import DiffChange, DoraChange, WeightChange, form_delta
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import (
    ModelLayout,
    Part,
    Row,
    UnetBlocks,
    families_with,
    row_of_diffusers,
    row_of_original,
)
from sigmascope.lora.families.unet import SDXL_BLOCKS
from sigmascope.lora.file import LazyDict, LoraFile, ModuleFacts
from sigmascope.lora.file_family import told_by_lora
from sigmascope.lora.kinds import NEEDS_BASE
from sigmascope.lora.kinds.fused import JoinedParts, PartOfFused, SwappedHalves, Weights, rows_of
from sigmascope.lora.layer_names import renamed, to_diffusers, to_sgm
from sigmascope.lora.linalg import at_least_float32
from sigmascope.lora.module_names import (
    LayerIndex,
    ParsedNames,
    flat,
    is_of_second_denoiser,
    layer_twice,
    parse_name,
    parse_names,
    redotted,
)

_BIAS: Final = ".bias"
_WEIGHT: Final = ".weight"
_TEXT_MODEL: Final = "text_model."
_SECOND: Final = "transformer_2"
_FLUX_MLP_RATIO = 4  # of the feed-forward part of FLUX' single blocks


@dataclass(frozen=True, slots=True)
class AlignedLora:
    """A LoRA whose modules have the names of a model's layers.

    Attributes:
        lora: The modules and changes by layer, read one at a time from the original LoRA's file.
        sources: For each layer, the names in the original LoRA that its module is made of.
        unmatched: Names in the original LoRA that belong to no layer of the model.
    """

    lora: LoraFile
    sources: dict[str, tuple[str, ...]]
    unmatched: tuple[str, ...]


def weights_of(base: Checkpoint) -> Weights:
    """Reads the weights of a checkpoint's layers, for `align`."""
    return lambda layer: base.tensor(f"{layer}{_WEIGHT}")


def align(
    lora: LoraFile,
    layers: Sequence[str],
    layout: ModelLayout,
    *,
    weights: Weights | None = None,
    index: LayerIndex | None = None,
) -> AlignedLora:
    """Name a LoRA's modules by the model's layers.

    If the LoRA has one matrix for a block's query, key and value but the model has three, or the other way round,
    its factors are divided or joined exactly. No tensor is read here.

    Args:
        lora: In any format.
        layers: Paths of the model's layers, without `.weight`; see `LayerIndex.of`.
        layout: How the model names its weights.
        weights: Reads the weight of a layer, which a few changes of fused matrices need that of other layers for; without,
            these cannot be formed.
        index: Of these layers in this layout, if it is made already.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one layer.
    """
    given, layout = layout, told_by_lora(lora, layers, layout)
    index = index if index is not None and layout is given else LayerIndex.of(layers, layout)
    match = index.match(lora)
    recipes = {layer: _Recipe((name,)) for name, layer in match.matched.items()}
    fused = _fused_recipes(lora, match.unmatched, index, layout)
    for layer, recipe in fused.items():
        if layer in recipes:
            raise LoraFormatError(
                f"{lora}: {', '.join((*recipes[layer].names, *recipe.names))} are all for {layer}.",
                hint="The file holds one layer under two names: remove one of them.",
            )
    recipes |= fused
    used = {name for recipe in recipes.values() for name in recipe.names}
    unmatched = tuple(name for name in lora.names if name not in used)
    return AlignedLora(
        _made_by(lora, recipes, weights),
        {layer: recipe.names for layer, recipe in recipes.items()},
        unmatched,
    )


_JOINT_PROJECTIONS: Final = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
"""What `fuse_qkv_projections` of diffusers' models, and trainers, make of an attention's projections."""


_JOINT_ENDS: Final = tuple(f"{start}{end}" for end in _JOINT_PROJECTIONS for start in "._")


def unfused(lora: LoraFile) -> LoraFile:
    """A LoRA that was trained on a model whose projections diffusers had joined (`fuse_qkv_projections`), in parts.

    No file of a model has such matrices, so that no table of a family does either. A name is left as it is where a
    family has a layer of that name, or none has the parts.

    Args:
        lora: As the file has it; nothing is read.
    """
    if not any(name.removesuffix(_BIAS).endswith(_JOINT_ENDS) for name in lora.names):
        return lora
    recipes: dict[str, _Recipe] = {}
    stored: dict[str, str] = {}
    for name in lora.names:
        own = _joint_projection(name, lora)
        if own is None:
            recipes[name] = _Recipe((name,))
            continue
        row, parts = own
        recipes |= {
            part: _Recipe((name,), row, (inner,), layers=parts)
            for part, inner in zip(parts, row.parts, strict=True)
        }
        stored |= dict.fromkeys(parts, lora.stored_names.get(name, name))
    if not stored or stored.keys() & {*lora.names}:
        return lora
    return replace(_made_by(lora, recipes), stored_names={**lora.stored_names, **stored})


def layout_for(lora: LoraFile, layout: ModelLayout, path: Path | None) -> ModelLayout:
    """A model's layout as a LoRA sees it: for one with modules for both denoisers, the model in a folder `transformer_2` is the
    second.

    Args:
        lora: In any format.
        layout: As the model's names tell.
        path: The model's file; None where it is not known.
    """
    is_second = path is not None and path.parent.name == _SECOND and [*layout.prefixes] == ["denoiser"]
    parts = {part for name in lora.names for part in parse_name(name).parts[:1]}
    if not is_second or not {"denoiser", "denoiser_2"} <= parts:
        return layout
    return replace(layout, prefixes={"denoiser_2": layout.prefixes["denoiser"]})


def of_first_denoiser(lora: LoraFile) -> LoraFile:
    """A LoRA of a pipeline's second denoiser alone, as one of its first: for formats whose files are of one denoiser."""
    if not is_of_second_denoiser(lora.names):
        return lora
    return _made_by(lora, {name.replace("_2.", ".", 1): _Recipe((name,)) for name in lora.names})


def _joint_projection(name: str, lora: LoraFile) -> tuple[Row, tuple[str, ...]] | None:
    """How a joint matrix is divided, and the names of its parts."""
    module = name.removesuffix(_BIAS)
    end = next((end for end in _JOINT_PROJECTIONS if module.endswith((f".{end}", f"_{end}"))), None)
    if end is None:
        return None
    start, parts = module.removesuffix(end), _JOINT_PROJECTIONS[end]
    paths = [_path_of(start + part) for part in (*parts, end)]
    inner = [path for path in paths[:-1] if path is not None]
    if len(inner) < len(parts):
        return None
    with_parts = families_with(inner)
    if not with_parts and not all(to_sgm(path) or to_diffusers(path) for path in inner):
        return None
    if paths[-1] is not None and {*with_parts} & {*families_with([paths[-1]])}:
        return None
    shape = lora.shape_of(name)
    is_grouped = len(parts) == 3 and len(shape) > 1 and shape[0] != 3 * prod(shape[1:]) and end == "to_qkv"
    suffix = name.removeprefix(module)
    row = Row(module, tuple(inner), grouped=is_grouped)
    return row, tuple(f"{start}{part}{suffix}" for part in parts)


def _path_of(name: str) -> str | None:
    """The dotted path in the denoiser."""
    return parse_name(name).dotted("denoiser")


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """A LoRA sorted by what it changes in a model.

    Attributes:
        lora: The LoRA under the names of the model's layers, with fused matrices divided or put together.
        names: The name in `lora`, by the key of the tensor that it changes.
        unmatched: Names in the original LoRA that fit no tensor of the model.
    """

    lora: LoraFile
    names: Mapping[str, str]
    unmatched: tuple[str, ...]

    def change(self, key: str) -> LoraFactors | WeightChange:
        """Read what is added to a tensor of the model.

        Raises:
            LoraFormatError: Its tensors do not fit together.
            NonFiniteError: They hold NaN or Inf.
        """
        return self.lora.change(self.names[key])


def changed_keys(
    lora: LoraFile, keys: Iterable[str], layout: ModelLayout, weights: Weights | None = None
) -> ChangedKeys:
    """Find the tensor of each change by name alone; nothing is read.

    Args:
        lora: Of any format.
        keys: Of all the model's tensors, such as `denoiser.conv_in.weight` and `denoiser.conv_in.bias`.
        layout: How the model names them.
        weights: As for `align`.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one tensor.
    """
    paths = {key.removesuffix(_WEIGHT): key for key in keys}
    aligned = align(lora, tuple(paths), layout, weights=weights)
    names = {paths[path]: path for path in aligned.lora.names if path in paths}
    # A change of the bias of a layer that has none is aligned all the same.
    # (IA)³ scales a bias if there is one, and changes nothing if there is none.
    lost = [
        name
        for path in aligned.lora.names
        if path not in paths and aligned.lora.kind_of(path) != "ia3"
        for name in aligned.sources[path]
    ]
    return ChangedKeys(aligned.lora, names, (*aligned.unmatched, *lost))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a layer's factors are made of a LoRA's modules.

    Attributes:
        names: The modules.
        row: The fused matrix; None for a module that is taken as it is.
        parts: With several modules, or one that is to be joined: which part each is. Else the part wanted.
        joins: Whether the modules are the parts, and the layer the whole.
        layers: The model's layers that are all parts of the fused matrix, where it is divided; of a bias, with `.bias`.
    """

    names: tuple[str, ...]
    row: Row | None = None
    parts: tuple[str, ...] = ()
    joins: bool = False
    layers: tuple[str, ...] = ()


def _fused_recipes(
    lora: LoraFile, names: Sequence[str], index: LayerIndex, layout: ModelLayout
) -> dict[str, _Recipe]:
    """Recipes for the layers that modules without a layer of their own are parts of, or have as parts."""
    recipes: dict[str, _Recipe] = {}
    joins: defaultdict[str, list[tuple[str, str, Row]]] = defaultdict(list)
    for name in names:
        end = _BIAS if name.endswith(_BIAS) else ""
        for part, path, family in _candidates(name.removesuffix(_BIAS), layout):
            whole, single = row_of_original(family, path), row_of_diffusers(family, path)
            layers = [index.find(part, inner) for inner in whole.parts] if whole is not None else []
            target = None if single is None else index.find(part, single.original)
            if whole is not None and None not in layers:
                ends = tuple(f"{layer}{end}" for layer in layers)
                recipes |= {
                    layer: _Recipe((name,), whole, (inner,), layers=ends)
                    for layer, inner in zip(ends, whole.parts, strict=True)
                }
            elif single is not None and target is not None:
                joins[target + end].append((name, path, single))
            else:
                continue
            break
    for layer, rows in joins.items():
        sources, parts, lines = zip(*rows, strict=True)
        recipes[layer] = _Recipe(sources, lines[0], parts, joins=True)
    return recipes


def _candidates(name: str, layout: ModelLayout) -> Iterator[tuple[Part, str, str]]:
    """The parts that a module may be of, its dotted path there, and the table to look it up in."""
    parsed = parse_name(name)
    for part in parsed.parts or ("denoiser",):
        path = parsed.dotted(part)
        if path is not None:
            if part.startswith("text_encoder"):
                yield part, path.removeprefix(_TEXT_MODEL), "open_clip"
            else:
                yield part, redotted(layout.family, path), layout.family


def _made_by(lora: LoraFile, recipes: Mapping[str, _Recipe], weights: Weights | None = None) -> LoraFile:
    """The LoRA under the layers' names, each change read when it is asked for."""
    plain = {layer: recipe for layer, recipe in recipes.items() if lora.modules.keys() >= {*recipe.names}}
    others = {layer: (layer, recipe) for layer, recipe in recipes.items() if layer not in plain}
    return replace(
        lora,
        modules=LazyDict(plain, lambda recipe: _factors_by_recipe(lora, recipe)),
        changes=LazyDict(others, lambda of: _change_by_recipe(lora, *of, weights)),
        facts={layer: _facts_by_recipe(lora, recipe) for layer, recipe in recipes.items()},
        source=None,
    )


def _change_by_recipe(lora: LoraFile, layer: str, recipe: _Recipe, weights: Weights | None) -> WeightChange:
    """A change of another kind as it is, or as a whole difference where it is divided or joined."""
    if recipe.row is None:
        return lora.changes[recipe.names[0]]
    if any(lora.kind_of(name) in NEEDS_BASE for name in recipe.names):
        return _beside_weights(lora, layer, recipe, recipe.row, weights)
    formed = [form_delta(name, lora.change(name)).to(torch.float32) for name in recipe.names]
    row, (out, inner) = recipe.row, (len(formed[0]), prod(formed[0].shape[1:]))
    if row.swapped:
        (whole,) = formed
        swaps = _swapping(layer, row, weights)
        return DiffChange({"diff": whole.roll(out // 2, dims=0) if swaps(out, inner) else whole}, 1.0)
    if recipe.joins:
        parts = {
            part: DiffChange({"diff": change}) for part, change in zip(recipe.parts, formed, strict=True)
        }
        joined_parts = joined_diff(parts, row)
        assert joined_parts is not None
        return joined_parts
    pieces = torch.split(formed[0], part_sizes(formed[0].shape, row))
    return DiffChange({"diff": pieces[row.parts.index(recipe.parts[0])].clone()}, 1.0)


def _beside_weights(
    lora: LoraFile, layer: str, recipe: _Recipe, row: Row, weights: Weights | None
) -> WeightChange:
    """A change that needs the weight, of a part of a fused matrix or of the whole of it."""
    changes = {name: lora.change(name) for name in recipe.names}
    sizes = partial(part_sizes, row=row)
    first = changes[recipe.names[0]]
    if row.swapped:
        assert not isinstance(first, LoraFactors)  # it needs the weight
        return SwappedHalves(first, _swapping(layer, row, weights))
    if recipe.joins:
        own = {
            row.parts.index(part): change for part, change in zip(recipe.parts, changes.values(), strict=True)
        }
        whole = joined_dora([own[index] for index in sorted(own)], row)
        return JoinedParts(own, sizes) if whole is None else whole
    assert not isinstance(first, LoraFactors)
    index = row.parts.index(recipe.parts[0])
    part = rows_of(first, sizes(first.weight_shape), index) if first.weight_shape else None
    if part is not None:
        return part
    return PartOfFused(first, recipe.layers, index, sizes, weights)


def _swapping(layer: str, row: Row, weights: Weights | None) -> Callable[[int, int], bool]:
    """As `Row.swaps`; a bias goes by its layer's weight."""
    if row.gated or not layer.endswith(_BIAS):
        return row.swaps
    if weights is None:
        raise LoraFormatError(
            f"{layer}: only the weight of its layer tells the order of its halves.",
            hint="Give the model: --model.",
        )
    shape = weights(layer.removesuffix(_BIAS)).shape
    return lambda *_: row.swaps(shape[0], prod(shape[1:]))


def _factors_by_recipe(lora: LoraFile, recipe: _Recipe) -> LoraFactors:
    if recipe.row is None:
        return lora.modules[recipe.names[0]]
    if recipe.joins:
        parts = {part: lora.modules[name] for part, name in zip(recipe.parts, recipe.names, strict=True)}
        return joined(parts, recipe.row)
    return divided(lora.modules[recipe.names[0]], recipe.row)[recipe.parts[0]]


def _facts_by_recipe(lora: LoraFile, recipe: _Recipe) -> ModuleFacts:
    first = lora.facts_of(recipe.names[0])
    if recipe.row is None:
        return first
    needing = [name for name in recipe.names if lora.kind_of(name) in NEEDS_BASE]
    parameters = sum(lora.facts_of(name).parameters for name in recipe.names)
    if needing and (len(needing) < len(recipe.names) or not first.weight_shape or recipe.row.swapped):
        return ModuleFacts(lora.kind_of(needing[0]), (), None, parameters)
    width, ranks = first.weight_shape[1:], [lora.rank_of(name) or 0 for name in recipe.names]
    if recipe.joins:
        sizes = {part: lora.shape_of(name)[0] for part, name in zip(recipe.parts, recipe.names, strict=True)}
        out = sum(joined_sizes(sizes, recipe.row, prod(width)))
    else:
        out = dict(zip(recipe.row.parts, part_sizes(first.weight_shape, recipe.row), strict=True))[
            recipe.parts[0]
        ]
    if needing:
        return ModuleFacts(lora.kind_of(needing[0]), (out, *width), first.rank, parameters)
    if not lora.modules.keys() >= {*recipe.names}:
        return ModuleFacts("diff", (out, *width), None, out * prod(width))
    rank = sum(ranks)
    return ModuleFacts("lora", (out, *width), rank, rank * (out + prod(width)))


@dataclass(frozen=True, slots=True)
class AlignedLoras:
    """LoRAs under common names: modules for the same layer have the same name.

    Attributes:
        loras: Each with its modules by layer, still in its file. A matrix that is fused in one LoRA and in parts
            in another is in parts here.
        sources: For each LoRA, the name in its file that each layer's module is made of.
        layout: The layout of a checkpoint that would have these layers.
        names: Every layer of any LoRA, in the first's order, then those that only later LoRAs have.
        blocks: Of the U-Net, as far as the names tell.
    """

    loras: tuple[LoraFile, ...]
    sources: tuple[dict[str, str], ...]
    layout: ModelLayout
    names: tuple[str, ...]
    blocks: UnetBlocks = SDXL_BLOCKS

    def positions(self, name: str) -> tuple[int, ...]:
        """Which LoRAs change a layer."""
        return tuple(index for index, sources in enumerate(self.sources) if name in sources)

    def change(self, position: int, name: str) -> LoraFactors | WeightChange:
        """Read one LoRA's change of a layer."""
        return self.loras[position].change(name)


def align_all(loras: Sequence[LoraFile]) -> AlignedLoras:
    """Find common names for the modules of several LoRAs; nothing is read.

    The names are diffusers' if any of the LoRAs uses them, otherwise the first LoRA's own.

    Args:
        loras: At least one, in any formats.

    Raises:
        LoraFormatError: Two modules of one LoRA are for one layer.
    """
    understood = _understood(loras)
    chosen = next((names for names in understood if names.layout.naming == "diffusers"), understood[0])
    layout = chosen.layout
    known = {
        _comparable(layer): layer
        for lora, names in zip(loras, understood, strict=True)
        for layer, _ in _layers(lora, names, layout)
    }
    layer_recipes = [
        _recipes(lora, names, layout, known) for lora, names in zip(loras, understood, strict=True)
    ]
    return AlignedLoras(
        loras=tuple(_made_by(lora, recipes) for lora, recipes in zip(loras, layer_recipes, strict=True)),
        sources=tuple(
            {layer: recipe.names[0] for layer, recipe in recipes.items()} for recipes in layer_recipes
        ),
        layout=layout,
        names=tuple(dict.fromkeys(layer for recipes in layer_recipes for layer in recipes)),
        blocks=chosen.blocks,
    )


def _understood(loras: Sequence[LoraFile]) -> list[ParsedNames]:
    """Each LoRA's names; one of unknown family is assumed to have the others' family."""
    parsed = [parse_names(lora) for lora in loras]
    family = next((names.layout.family for names in parsed if names.layout.family != "unknown"), None)
    return [
        parse_names(lora, family) if names.layout.family == "unknown" and family is not None else names
        for lora, names in zip(loras, parsed, strict=True)
    ]


def _layers(lora: LoraFile, names: ParsedNames, layout: ModelLayout) -> Iterator[tuple[str, _Recipe]]:
    """Each of a LoRA's layers by its path in the naming of a layout, and what it is made of."""
    same_naming = layout.naming != "diffusers" or names.layout.naming == "diffusers"
    for name, layer in names.layers.items():
        path = layer.removesuffix(_BIAS)
        layer_path = path if same_naming else _in_diffusers(path, names)
        if isinstance(layer_path, str):
            yield layer_path + layer[len(path) :], _Recipe((name,))
        elif name in lora.modules:
            for part in layer_path.parts:
                yield _beside(path, names.layout, part), _Recipe((name,), layer_path, (part,))
        else:  # what is not up and down cannot be divided
            yield layer, _Recipe((name,))


def _in_diffusers(layer: str, names: ParsedNames) -> str | Row:
    layout = names.layout
    part, path = layout.split(layer)
    try:
        path_there = renamed(path, part, layout, "diffusers", names.blocks)
    except LoraFormatError:  # a layer that has no other name keeps its own
        return layer
    return path_there if isinstance(path_there, Row) else _beside(layer, layout, path_there)


def _beside(layer: str, layout: ModelLayout, path: str) -> str:
    """Another path in the same part of the model."""
    _, own = layout.split(layer)
    return layer.removesuffix(own) + path


def _recipes(
    lora: LoraFile, names: ParsedNames, layout: ModelLayout, known: Mapping[str, str]
) -> dict[str, _Recipe]:
    recipes: dict[str, _Recipe] = {}
    flat_names = [(known.get(_comparable(name), name), _Recipe((name,))) for name in names.unknown]
    for layer, recipe in (*_layers(lora, names, layout), *flat_names):
        if layer in recipes:
            raise layer_twice(lora, recipes[layer].names[0], recipe.names[0], layer)
        recipes[layer] = recipe
    order = {name: index for index, name in enumerate(lora.names)}
    return dict(sorted(recipes.items(), key=lambda item: order[item[1].names[0]]))


def _comparable(name: str) -> str:
    return flat(parse_name(name).path)


def divided(factors: LoraFactors, row: Row) -> dict[str, LoraFactors]:
    """The change of each part of a fused layer, by the part's name.

    Raises:
        LoraFormatError: The layer's rows cannot be those of its parts.
    """
    if row.swapped:
        return {row.parts[0]: _swapped(factors, row)}
    ups = torch.split(factors.up, part_sizes(factors.weight_shape, row))
    return {
        part: LoraFactors(up, factors.down, factors.alpha, (len(up), *factors.weight_shape[1:]))
        for part, up in zip(row.parts, ups, strict=True)
    }


def joined(parts: Mapping[str, LoraFactors], row: Row) -> LoraFactors:
    """The change of a fused layer, joined from those of its parts; a missing part stays unchanged.

    Args:
        parts: At least one, by the part's name.
        row: The fused layer.

    Raises:
        LoraFormatError: The parts are of different width.
    """
    if row.swapped:
        return _swapped(parts[row.parts[0]], row)
    widths = {factors.weight_shape[1:] for factors in parts.values()}
    if len(widths) > 1:
        raise LoraFormatError(
            f"the parts of {row.original} have inputs of different shape: {sorted(widths)}."
        )
    (width,) = widths
    sizes = joined_sizes({name: factors.weight_shape[0] for name, factors in parts.items()}, row, prod(width))
    dtype = _common_dtype(list(parts.values()))
    rank, row_begin, column = sum(factors.rank for factors in parts.values()), 0, 0
    device = next(iter(parts.values())).up.device
    up = torch.zeros(sum(sizes), rank, dtype=dtype, device=device)
    downs = []
    for name, size in zip(row.parts, sizes, strict=True):
        factors = parts.get(name)
        if factors is not None:
            scaled = factors.up.to(at_least_float32(dtype)).mul(factors.scale)
            up[row_begin : row_begin + size, column : column + factors.rank] = scaled.to(dtype)
            downs.append(factors.down.to(dtype))
            column += factors.rank
        row_begin += size
    return LoraFactors(up, torch.cat(downs), float(rank), (sum(sizes), *width))


def joined_dora(parts: Sequence[LoraFactors | WeightChange], row: Row) -> DoraChange | None:
    """DoRA of a fused layer by that of all its parts; None where a part has no magnitudes of outputs, or no factors.

    Args:
        parts: In the order of the rows.
        row: The fused layer.
    """
    doras = [part for part in parts if isinstance(part, DoraChange) and part.per_output]
    directions = [part.direction for part in doras if isinstance(part.direction, LoraFactors)]
    if len(directions) < len(row.parts):
        return None
    direction = joined(dict(zip(row.parts, directions, strict=True)), row)
    return DoraChange(direction, torch.cat([part.magnitude.flatten() for part in doras]))


def joined_diff(parts: Mapping[str, WeightChange], row: Row) -> DiffChange | None:
    """The difference of a fused layer, joined from those of its parts; a missing part stays as it is.

    Args:
        parts: At least one, by the part's name; None where one is no whole difference.
        row: The fused layer.
    """
    diffs = {part: change.delta() for part, change in parts.items() if isinstance(change, DiffChange)}
    if len(diffs) < len(parts):
        return None
    first = next(iter(diffs.values()))
    sizes = joined_sizes({part: len(diff) for part, diff in diffs.items()}, row, prod(first.shape[1:]))
    rows = [
        diffs.get(part, first.new_zeros(size, *first.shape[1:]))
        for part, size in zip(row.parts, sizes, strict=True)
    ]
    return DiffChange({"diff": torch.cat(rows)})


def _swapped(factors: LoraFactors, row: Row) -> LoraFactors:
    """The halves of the rows exchanged, where the row says so of a layer of that size; any other as it is."""
    out, inner = factors.up.shape[0], factors.down.shape[1]
    if not row.swaps(out, inner):
        return factors
    up = factors.up.roll(out // 2, dims=0)
    return LoraFactors(up, factors.down, factors.alpha, factors.weight_shape)


def _common_dtype(parts: Sequence[LoraFactors]) -> torch.dtype:
    """The parts' own dtype where they share one and no scale would round it; else float32 or wider."""
    dtypes = {tensor.dtype for factors in parts for tensor in (factors.up, factors.down)}
    unscaled = all(factors.scale == 1.0 for factors in parts)
    return next(iter(dtypes)) if len(dtypes) == 1 and unscaled else at_least_float32(*dtypes)


def part_sizes(weight_shape: Sequence[int], row: Row) -> list[int]:
    """How many rows of a fused weight belong to each of its parts.

    Two or three parts share the rows equally. Of four, as in FLUX' single blocks, the first three have as many rows as the
    layer has inputs, and the last has the rest; of a bias, which has no inputs, four times as many.

    Raises:
        LoraFormatError: The rows cannot be divided so.
    """
    out, inner, count = weight_shape[0], prod(weight_shape[1:]), len(row.parts)
    if count == 1:
        return [out]
    if len(weight_shape) == 1:
        inner = 0 if row.grouped else out // (count - 1 + _FLUX_MLP_RATIO)
    if row.grouped:
        sizes = [inner] + [(out - inner) // (count - 1)] * (count - 1)
    else:
        sizes = [out // count] * count if count < 4 else [inner] * (count - 1) + [out - (count - 1) * inner]
    if min(sizes) < 1 or sum(sizes) != out:
        raise LoraFormatError(
            f"{row.original} of shape {tuple(weight_shape)} cannot be divided into {', '.join(row.parts)}.",
            hint="The LoRA is for another architecture.",
        )
    return sizes


def joined_sizes(sizes: Mapping[str, int], row: Row, inner: int) -> list[int]:
    """How many rows each part of a fused layer has.

    Args:
        sizes: Of the parts that are there. Those of the others follow from the width, as in all these models.
        row: The fused layer.
        inner: Its number of inputs.
    """
    if len(row.parts) == 1:
        return [sizes[row.parts[0]]]
    if row.grouped:
        known = next((sizes[name] for name in row.parts[1:] if name in sizes), inner)
        return [sizes.get(row.parts[0], inner), *(sizes.get(name, known) for name in row.parts[1:])]
    if (
        len(row.parts) < 4
    ):  # of one size, which need not be the inputs': Mochi's text is narrower than its attention
        return [next(iter(sizes.values()))] * len(row.parts)
    inner = next((sizes[name] for name in row.parts[:3] if name in sizes), inner)
    usual = [inner] * 3 + [_FLUX_MLP_RATIO * inner]
    return [sizes.get(name, size) for name, size in zip(row.parts, usual, strict=True)]
