"""Several LoRAs of any formats under common names, without their model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile, ModuleFacts
from sigmascope.lora.formats.lazy import LazyMapping
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.names.flat_names import flat
from sigmascope.lora.names.fused import divided, part_sizes
from sigmascope.lora.names.layer_paths import renamed
from sigmascope.lora.names.module_names import parse_name
from sigmascope.lora.names.own_names import OwnNames, understand_names
from sigmascope.lora.names.transformer_names import Row
from sigmascope.lora.names.unet_names import SDXL_BLOCKS, UnetBlocks

_BIAS: Final = ".bias"


@dataclass(frozen=True, slots=True)
class UnitedLoras:
    """LoRAs whose modules have the same names where they are for the same layer.

    Attributes:
        loras: Each with its modules by layer, still in its file. A matrix that is fused in one LoRA and in parts
            in another is in parts here.
        sources: The name in its file that each layer's module is made of, by LoRA.
        layout: Of a checkpoint that would have these layers.
        names: Every layer of any LoRA, in the first's order, then what only later ones have.
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
        lora = self.loras[position]
        return lora.modules[name] if name in lora.modules else lora.changes[name]


@dataclass(frozen=True, slots=True)
class _Source:
    """What a layer's change is made of: a module, or one part of a fused one."""

    name: str
    row: Row | None = None
    part: str = ""


def unite(loras: Sequence[LoraFile]) -> UnitedLoras:
    """Find common names for the modules of several LoRAs; nothing is read.

    The names are diffusers' where any of the LoRAs has those, and the first's own otherwise.

    Args:
        loras: At least one, in any formats.

    Raises:
        LoraFormatError: Two modules of one LoRA are for one layer.
    """
    understood = _understood(loras)
    chosen = next((one for one in understood if one.layout.naming == "diffusers"), understood[0])
    layout = chosen.layout
    known = {
        _comparable(layer): layer
        for lora, one in zip(loras, understood, strict=True)
        for layer, _ in _layers(lora, one, layout)
    }
    found = [_sources(lora, one, layout, known) for lora, one in zip(loras, understood, strict=True)]
    return UnitedLoras(
        loras=tuple(_named(lora, sources) for lora, sources in zip(loras, found, strict=True)),
        sources=tuple({layer: one.name for layer, one in sources.items()} for sources in found),
        layout=layout,
        names=tuple(dict.fromkeys(layer for sources in found for layer in sources)),
        blocks=chosen.blocks,
    )


def _understood(loras: Sequence[LoraFile]) -> list[OwnNames]:
    """Each LoRA's names; one whose family cannot be told is taken to be of the others'."""
    found = [understand_names(lora) for lora in loras]
    family = next((one.layout.family for one in found if one.layout.family != "unknown"), None)
    return [
        understand_names(lora, family) if one.layout.family == "unknown" and family is not None else one
        for lora, one in zip(loras, found, strict=True)
    ]


def _sources(
    lora: LoraFile, names: OwnNames, layout: ModelLayout, known: Mapping[str, str]
) -> dict[str, _Source]:
    sources: dict[str, _Source] = {}
    flat_ones = [(known.get(_comparable(name), name), _Source(name)) for name in names.unknown]
    for layer, source in (*_layers(lora, names, layout), *flat_ones):
        if layer in sources:
            raise LoraFormatError(
                f"{lora}: {sources[layer].name} and {source.name} are both for {layer}.",
                hint="The file holds one layer under two names: remove one of them.",
            )
        sources[layer] = source
    order = {name: index for index, name in enumerate(lora.names)}
    return dict(sorted(sources.items(), key=lambda item: order[item[1].name]))


def _layers(lora: LoraFile, names: OwnNames, layout: ModelLayout) -> Iterator[tuple[str, _Source]]:
    """Each of a LoRA's layers by its path in the naming of a layout, and what it is made of."""
    same_naming = layout.naming != "diffusers" or names.layout.naming == "diffusers"
    for name, layer in names.layers.items():
        path = layer.removesuffix(_BIAS)
        found = path if same_naming else _in_diffusers(path, names)
        if isinstance(found, str):
            yield found + layer[len(path) :], _Source(name)
        elif name in lora.modules:
            for part in found.parts:
                yield _beside(path, names.layout, part), _Source(name, found, part)
        else:  # what is not up and down cannot be divided
            yield layer, _Source(name)


def _in_diffusers(layer: str, names: OwnNames) -> str | Row:
    layout = names.layout
    part, path = layout.split(layer)
    try:
        found = renamed(path, part, layout, "diffusers", names.blocks)
    except LoraFormatError:  # a layer that has no other name keeps its own
        return layer
    return found if isinstance(found, Row) else _beside(layer, layout, found)


def _beside(layer: str, layout: ModelLayout, path: str) -> str:
    """Another path in the same part of the model."""
    _, own = layout.split(layer)
    return layer.removesuffix(own) + path


def _comparable(name: str) -> str:
    return flat(parse_name(name).path)


def _named(lora: LoraFile, sources: Mapping[str, _Source]) -> LoraFile:
    """The LoRA under the layers' names, each change read when it is asked for."""
    plain = {layer: source for layer, source in sources.items() if source.name in lora.modules}
    others = {layer: source.name for layer, source in sources.items() if source.name not in lora.modules}
    return replace(
        lora,
        modules=LazyMapping(plain, lambda source: _factors(lora, source)),
        changes=LazyMapping(others, lora.changes.__getitem__),
        facts={layer: _part_facts(lora, source) for layer, source in sources.items()},
    )


def _factors(lora: LoraFile, source: _Source) -> LoraFactors:
    factors = lora.modules[source.name]
    return factors if source.row is None else divided(factors, source.row)[source.part]


def _part_facts(lora: LoraFile, source: _Source) -> ModuleFacts:
    whole = lora.facts_of(source.name)
    if source.row is None:
        return whole
    sizes = part_sizes(whole.weight_shape, source.row)
    out, width = dict(zip(source.row.parts, sizes, strict=True))[source.part], whole.weight_shape[1:]
    return ModuleFacts("lora", (out, *width), whole.rank, (whole.rank or 0) * (out + prod(width)))
