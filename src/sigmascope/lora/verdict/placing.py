"""Which weights of a model each module of a LoRA lands on, with nothing refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from sigmascope.errors import SigmascopeError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.lazy import LazyMapping
from sigmascope.lora.models.layer_kinds import WEIGHT, is_layer
from sigmascope.lora.models.layout import ModelLayout, Shapes
from sigmascope.lora.names.alignment import align
from sigmascope.lora.names.naming import LayerIndex
from sigmascope.lora.shapes import same_matrix
from sigmascope.lora.verdict.model_shapes import layout_for

_MATRIX: Final = 2


@dataclass(frozen=True, slots=True)
class Misfit:
    """A module whose name fits a weight of another shape."""

    key: str
    own: tuple[int, ...]
    model: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placing:
    """A LoRA's modules against a model's weights.

    Attributes:
        lora: The LoRA under the model's names, as far as it could be aligned; None if it could not.
        layout: The model's.
        index: Its layers and other tensors, by every name.
        layers: Paths of its Linear and convolution layers.
        keys: The weights that each module lands on, by the module's name.
        misfits: Modules that would land on weights of other shapes.
        twins: Modules that are for a layer another module has already: that module.
    """

    lora: LoraFile | None
    layout: ModelLayout
    index: LayerIndex
    layers: tuple[str, ...] = ()
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    misfits: dict[str, Misfit] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)


def place(lora: LoraFile, shapes: Shapes) -> Placing:
    """Find the weights of every module; nothing is read and nothing raised.

    Args:
        lora: In any format.
        shapes: Of all the model's weights, by key.
    """
    layout = layout_for(shapes)
    layers = [key.removesuffix(WEIGHT) for key in shapes]
    index = LayerIndex.of(layers, layout)
    own = tuple(key.removesuffix(WEIGHT) for key, shape in shapes.items() if is_layer(key, shape))
    twins = _twins(lora, index)
    rest = without(lora, twins) if twins else lora
    try:
        aligned = align(rest, layers, layout)
    except SigmascopeError:  # names or shapes that no table of fused matrices can divide
        return _one_by_one(rest, shapes, Placing(None, layout, index, own, twins=twins))
    placing = Placing(aligned.lora, layout, index, own, twins=twins)
    for layer, names in aligned.sources.items():
        for name in names:
            _land(placing, shapes, name, layer, aligned.lora.shape_of(layer))
    return placing


def _one_by_one(lora: LoraFile, shapes: Shapes, placing: Placing) -> Placing:
    for name in lora.names:
        layer = placing.index.layer_of(name, lora.shape_of(name))
        if layer is not None:
            _land(placing, shapes, name, layer, lora.shape_of(name))
    return placing


def _land(placing: Placing, shapes: Shapes, name: str, layer: str, own: tuple[int, ...]) -> None:
    key = f"{layer}{WEIGHT}" if f"{layer}{WEIGHT}" in shapes else layer
    if key not in shapes:  # the bias of a layer that has none
        return
    if fits(own, shapes[key]):
        placing.keys[name] = (*placing.keys.get(name, ()), key)
    else:
        placing.misfits[name] = Misfit(key, own, shapes[key])


def fits(own: tuple[int, ...], model: tuple[int, ...]) -> bool:
    """Whether a change of a weight of one shape is one of a weight of the other; () fits any."""
    if not own:
        return True
    if min(len(own), len(model)) < _MATRIX:
        return own == model
    return same_matrix(own, model)


def without(lora: LoraFile, names: Mapping[str, object]) -> LoraFile:
    """The LoRA without some of its modules; the others stay in their file."""
    modules = {name: name for name in lora.modules if name not in names}
    changes = {name: name for name in lora.changes if name not in names}
    return replace(
        lora,
        modules=LazyMapping(modules, lora.modules.__getitem__),
        changes=LazyMapping(changes, lora.changes.__getitem__),
    )


def _twins(lora: LoraFile, index: LayerIndex) -> dict[str, str]:
    taken: dict[str, str] = {}
    twins: dict[str, str] = {}
    for name in lora.names:
        layer = index.layer_of(name, lora.shape_of(name))
        if layer in taken:
            twins[name] = taken[layer]
        elif layer is not None:
            taken[layer] = name
    return twins
