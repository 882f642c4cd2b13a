"""Which tensors of a live model a LoRA changes: each with its change (`match_modules`), and what is for others.

Factors change the weights of Linear and convolution layers; whole differences change any parameter, such as that of a norm.

A file may change several models of a pipeline. A single model gets the changes that are for it; `left_out` names the
others.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.alignment import AlignedLora, align
from sigmascope.lora.compatibility import missing_in_variant, unmatched_reasons
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile
from sigmascope.lora.file_verdict import variant_finding
from sigmascope.lora.linalg import same_matrix
from sigmascope.lora.module_names import parse_name
from sigmascope.probes.models import components_of
from sigmascope.units import counted, first_few

__all__ = ["LoraTarget", "match_modules"]

logger = logging.getLogger(__name__)

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = nn.Linear | Convolution
_WHOLE = frozenset({"diff", "set"})
"""Kinds of change that a parameter of any module takes."""
_MAX_DESCRIBED = 5
_BIAS = ".bias"
# Wrappers put these into a layer's path; a checkpoint's keys do not have them.
_WRAPPER_PARTS = frozenset({"_orig_mod", "base_layer"})


def for_this_model(model: Any, lora: LoraFile) -> tuple[LoraFile, tuple[str, ...]]:
    """The LoRA without its modules for other models of the pipeline, and their names.

    A single model does not say which part of a pipeline it is; its layers' names and shapes tell.
    """
    names_by_part: defaultdict[str, list[str]] = defaultdict(list)
    for name in lora.names:
        names_by_part[next(iter(parse_name(name).parts), "")].append(name)
    if len(names_by_part) < 2:
        return lora, ()
    layers = dict(layers_of(model))
    places = _places(model, layers)
    fitting: dict[str, frozenset[str]] = {}
    complete = []
    for part, names in names_by_part.items():
        aligned = _aligned(model, lora.only(frozenset(names)), layers, places)
        own = aligned.lora
        fitting[part] = frozenset(
            name for name in own.names if name in places and _may_fit(own.shape_of(name), places[name])
        )
        if fitting[part] and len(fitting[part]) == len(own.names) and not aligned.unmatched:
            complete.append(part)
    for part, other in combinations(complete, 2):
        if fitting[part] & fitting[other]:
            whose = " and ".join(
                f"those for {one}" if one else "those that name no part" for one in (part, other)
            )
            raise ModelMismatchError(
                f"{lora}: of its modules, {whose} both fit this {type(model).__name__}.",
                hint="Apply it to the whole pipeline, which says which is which."
                if part and other
                else "The file holds one layer under two names: remove one of them.",
            )
    # Both text encoders name their layers alike; only the shapes differ.
    kept = [
        part
        for part, layers_of_part in fitting.items()
        if part in complete
        or (layers_of_part and not any(layers_of_part & fitting[other] for other in complete))
    ]
    if not kept:
        return lora, ()
    left_out = tuple(name for part, names in names_by_part.items() if part not in kept for name in names)
    return lora.only({name for part in kept for name in names_by_part[part]}), left_out


def log_unapplied(
    model: Any, lora: LoraFile, left_out: Sequence[str], not_in_variant: Sequence[str] = ()
) -> None:
    if not_in_variant:
        logger.warning("%s: %s", lora, variant_finding(not_in_variant, len(lora.names)).message)
    if lora.unused_keys:
        keys = counted(len(lora.unused_keys), "key is", "keys are")
        logger.warning("%s: %s not applied: %s", lora, keys, lora.unused_keys[:3])
    if left_out:
        logger.warning(
            "%s: %s for other models than this %s and not applied, such as %s. "
            "Pass the whole pipeline to apply all of them.",
            lora,
            counted(len(left_out), "module is", "modules are"),
            type(model).__name__,
            left_out[0],
        )


@dataclass(frozen=True, eq=False)
class LoraTarget:
    """One tensor of the model and the change that the LoRA makes to it.

    Attributes:
        names: The LoRA modules for this tensor; several if layers share it.
        change: What is added to the tensor, in its shape if it is plain factors.
        layers: Every layer that holds the tensor; a norm or any other module for a whole difference.
        of: Which of the layers' tensors it is.
    """

    names: tuple[str, ...]
    change: LoraFactors | WeightChange
    layers: tuple[nn.Module, ...]
    of: str = "weight"

    @property
    def factors(self) -> LoraFactors:
        """The change of a LoRA of plain factors."""
        assert isinstance(self.change, LoraFactors)  # `match_modules` refuses others, unless they are merged
        return self.change

    @property
    def layer(self) -> Layer:
        """The first of the layers, of a change of plain factors."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)  # `_takes` refuses others
        return layer

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def places(self) -> "tuple[Place, ...]":
        """The tensor in each of the layers."""
        return tuple(Place(layer, self.of) for layer in self.layers)

    @property
    def weight(self) -> Tensor:
        """The tensor, as the first layer holds it now."""
        return tensor_of(self.layers[0], self.of)


class Matched(NamedTuple):
    """What a LoRA changes in a model.

    Attributes:
        targets: One for each tensor, in the LoRA's order. Layers that share one weight are one target.
        not_in_variant: Modules for layers that the model's family has and this variant does not.
    """

    targets: list[LoraTarget]
    not_in_variant: tuple[str, ...] = ()


def match_modules(model: Any, lora: LoraFile, *, any_kind: bool = False) -> Matched:
    """Find the tensor of every LoRA module; if one is missing that the model ought to have, none is returned.

    Names may be those of the model's checkpoint, or of any format that `align` understands. Path parts that
    torch.compile, DataParallel and PEFT add are ignored. If the model is one part of the checkpoint (a U-Net, for
    keys that begin with "denoiser."), the leading parts that all names share may be missing.

    Args:
        model: A module, or a pipeline with `components`, whose layers' names begin with the component's.
        lora: At least one module, and no changes of other kinds unless `any_kind`.
        any_kind: Whether changes that are more than up and down factors are targets too.

    Returns:
        The targets, and the modules that this variant of the model has no layer for.

    Raises:
        ModelMismatchError: A module has no layer, or its layer has another kind or shape, or two modules change one
            shared weight differently. The message counts all of them and names the first few.
        LoraFormatError: The LoRA holds LoHa, LoKr, DoRA, Tucker cores or whole differences, and not `any_kind`.
    """
    if not any_kind:
        _require_plain(lora)
    if not lora.names:
        raise ModelMismatchError(f"{lora} changes no module.", hint="Check what it was made from.")
    layers = dict(layers_of(model))
    places = _places(model, layers)
    cut = _prefix_to_cut(lora.names, places)
    not_in_variant: tuple[str, ...] = ()
    if any(name.removeprefix(cut) not in places for name in lora.names):
        aligned = _aligned(model, lora, layers, places)
        beyond = [path for path in aligned.lora.names if path not in places]
        # (IA)³ scales a bias if there is one, and changes nothing if there is none.
        idle = [path for path in beyond if path.endswith(_BIAS) and aligned.lora.kind_of(path) == "ia3"]
        lost = [name for path in beyond if path not in idle for name in aligned.sources[path]]
        missing = [*aligned.unmatched, *lost]
        not_in_variant = missing_in_variant(unmatched_reasons(lora, missing, _shapes_of(model, layers)))
        others = [name for name in missing if name not in not_in_variant]
        if others or len(missing) == len(lora.names):
            _require_present(model, lora, missing, layers)
        lora, cut = aligned.lora.only(set(aligned.lora.names) - {*idle, *beyond}), ""
    odd = [name for name in lora.names if not _takes(places[name.removeprefix(cut)], lora.kind_of(name))]
    if odd:
        _require_present(model, lora, odd, layers)
    _require_fitting(lora, places, cut)
    return Matched(_targets(lora, places, cut), not_in_variant)


class Place(NamedTuple):
    """A tensor of a layer, or of another module, that a LoRA can change."""

    layer: nn.Module
    of: str

    @property
    def shape(self) -> tuple[int, ...]:
        """From a layer's settings, because a quantised layer packs its weight into another shape."""
        if not isinstance(self.layer, Layer):
            return tuple(tensor_of(*self).shape)
        shape = weight_shape_of(self.layer)
        return shape if self.of == "weight" else shape[:1]


def _places(model: Any, layers: Mapping[str, Layer]) -> dict[str, Place]:
    """Each module's weight by the module's path, and any other of its parameters by the path with the parameter's name."""
    others = {
        _joined(f"{prefix}{checkpoint_path(path)}", name): Place(module, name)
        for prefix, part in modules_of(model)
        for path, module in part.named_modules(remove_duplicate=False)
        if not isinstance(module, Layer)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    places = {path: Place(layer, "weight") for path, layer in layers.items()}
    biased = {path: layer for path, layer in layers.items() if isinstance(layer.bias, Tensor)}
    return others | places | {f"{path}{_BIAS}": Place(layer, "bias") for path, layer in biased.items()}


def _joined(path: str, name: str) -> str:
    return path if name == "weight" else f"{path}.{name}".removeprefix(".")


def _takes(place: Place, kind: str) -> bool:
    """Whether a tensor can have a change of that kind: factors are for layers only."""
    return isinstance(place.layer, Layer) or kind in _WHOLE


def _require_plain(lora: LoraFile) -> None:
    """Refuse changes that a low-rank branch cannot make; without them it would be another LoRA."""
    if lora.changes:
        changes = [f"{name} ({lora.kind_of(name)})" for name in lora.changes]
        raise LoraFormatError(
            f"{counted(len(lora.changes), 'module')} of {lora} {'is' if len(lora.changes) == 1 else 'are'} more than up and down factors: {first_few(changes)}.",
            hint="Use merge_into_model, which forms them, or merge into the checkpoint (sigmascope lora merge).",
        )


def _prefix_to_cut(names: Iterable[str], places: Mapping[str, Place]) -> str:
    """The shortest prefix, shared by all names, without which every name is a layer's."""
    wanted = list(names)
    parts = wanted[0].split(".")[:-1]
    for depth in range(len(parts) + 1):
        prefix = "".join(f"{part}." for part in parts[:depth])
        if all(name.startswith(prefix) and name.removeprefix(prefix) in places for name in wanted):
            return prefix
    return ""


def _aligned(
    model: Any, lora: LoraFile, layers: Mapping[str, Layer], places: Mapping[str, "Place"]
) -> AlignedLora:
    """The LoRA under the layers' own names."""
    layout = layout_of(_shapes_of(model, layers))
    own_parts = {parse_name(name).parts[:1] for name in lora.names}
    if layout.prefixes == {"text_encoder": ""} and len(own_parts) == 1:
        # On its own, the second text encoder of a pipeline looks like the first.
        layout = replace(layout, prefixes=dict.fromkeys(own_parts.pop(), "") or layout.prefixes)
    return align(lora, list(places), layout, weights=lambda path: _held(path, layers[path]))


def _shapes_of(model: Any, layers: Mapping[str, Layer]) -> dict[str, tuple[int, ...]]:
    shapes = {
        f"{prefix}{checkpoint_path(name)}": tuple(parameter.shape)
        for prefix, module in modules_of(model)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return shapes | {f"{path}.weight": weight_shape_of(layer) for path, layer in layers.items()}


def _held(path: str, layer: Layer) -> Tensor:
    """A layer's weight, for a change of a fused matrix that depends on it.

    Raises:
        ModelMismatchError: Its numbers cannot be read.
    """
    weight = tensor_of(layer, "weight")
    if weight.is_meta or not weight.is_floating_point() or tuple(weight.shape) != weight_shape_of(layer):
        raise ModelMismatchError(
            f"the change depends on the weight of {path}, which is quantised or holds no values.",
            hint="Load the model unquantised, with its weights in memory.",
        )
    return weight


def _require_present(model: Any, lora: LoraFile, missing: Sequence[str], layers: Mapping[str, Layer]) -> None:
    if not missing:
        return
    others = {
        f"{prefix}{checkpoint_path(path)}": type(module).__name__
        for prefix, part in modules_of(model)
        for path, module in part.named_modules()
    }
    described = [_describe_missing(name, layers, others) for name in missing[:_MAX_DESCRIBED]]
    raise ModelMismatchError(
        f"{len(missing)} of {counted(len(lora), 'module')} of {lora} {'has' if len(missing) == 1 else 'have'} no Linear or convolution layer in this "
        f"{type(model).__name__}: {first_few([*described, *missing[_MAX_DESCRIBED:]], _MAX_DESCRIBED, between='; ')}.",
        hint="Apply the LoRA to the model it was made for.",
    )


def _describe_missing(name: str, layers: Mapping[str, Layer], others: Mapping[str, str]) -> str:
    if name in others:
        return f"{name} (a {others[name]} has that name)"
    near = get_close_matches(name, layers, n=1)
    return f"{name} (nearest: {near[0]})" if near else name


def _require_fitting(lora: LoraFile, places: Mapping[str, Place], cut: str) -> None:
    wrong: list[str] = []
    for name in lora.names:
        place, own = places[name.removeprefix(cut)], lora.shape_of(name)
        if isinstance(place.layer, Convolution) and place.layer.groups > 1 and place.of == "weight":
            wrong.append(
                f"{name} is a grouped convolution ({place.layer.groups} groups), which is not supported"
            )
        elif not _may_fit(own, place):
            wrong.append(f"{name} is {own} in the LoRA and {place.shape} in the model")
    if wrong:
        raise ModelMismatchError(
            f"{len(wrong)} of {counted(len(lora), 'module')} of {lora} {'does' if len(wrong) == 1 else 'do'} not fit: {first_few(wrong, between='; ')}.",
            hint="Apply the LoRA to the model it was made for.",
        )


def _may_fit(own: tuple[int, ...], place: Place) -> bool:
    """Whether a change of this shape is for the tensor; if its tensors do not tell a shape, forming it will show."""
    return not own or own == place.shape or (place.of == "weight" and same_matrix(own, place.shape))


def _targets(lora: LoraFile, places: Mapping[str, Place], cut: str) -> list[LoraTarget]:
    sharing: dict[int, list[Place]] = {}
    for place in places.values():
        sharing.setdefault(_identity(place), []).append(place)
    names_by_tensor: dict[int, list[str]] = {}
    for name in lora.names:
        names_by_tensor.setdefault(_identity(places[name.removeprefix(cut)]), []).append(name)
    return [
        LoraTarget(
            tuple(names),
            _one_change(lora, names, sharing[tensor][0]),
            tuple(dict.fromkeys(place.layer for place in sharing[tensor])),
            sharing[tensor][0].of,
        )
        for tensor, names in names_by_tensor.items()
    ]


def _one_change(lora: LoraFile, names: list[str], place: Place) -> LoraFactors | WeightChange:
    """The change that all modules of one tensor agree on, in the layer's own shape if it is plain factors."""
    first, *others = (lora.change(name) for name in names)
    if others:
        tensor = tensor_of(*place)
        whole = _formed(first, tensor, torch.float32).flatten()
        formed = (_formed(other, tensor, torch.float32).flatten() for other in others)
        if any(not torch.allclose(whole, other) for other in formed):
            raise ModelMismatchError(
                f"{', '.join(names)} share one weight in the model, but {lora} changes them differently.",
                hint="Untie the weights before applying this LoRA.",
            )
    return replace(first, weight_shape=place.shape) if isinstance(first, LoraFactors) else first


def layers_of(model: Any) -> Iterator[tuple[str, Layer]]:
    """Every Linear and convolution by its path in the checkpoint; in a pipeline, with the component's name before it."""
    for prefix, module in modules_of(model):
        for path, layer in module.named_modules(remove_duplicate=False):
            if isinstance(layer, Layer):
                yield f"{prefix}{checkpoint_path(path)}", layer


def paths_in(model: Any) -> dict[nn.Module, str]:
    """Every module's path in the checkpoint; in a pipeline, with the component's name before it."""
    return {
        module: f"{prefix}{checkpoint_path(path)}"
        for prefix, part in modules_of(model)
        for path, module in part.named_modules(remove_duplicate=False)
    }


def modules_of(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold the weights, each with the prefix of its layers' names."""
    parts = {f"{name}.": part for name, part in components_of(model).items()} or {"": model}
    for prefix, part in parts.items():
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            yield prefix, part.module
        elif isinstance(part, nn.Module):
            yield prefix, part
        elif not prefix:
            raise ConfigError(
                f"a {type(model).__name__} is neither a module nor a pipeline with components.",
                hint="Pass the model that holds the layers, such as pipe.unet.",
            )


def checkpoint_path(path: str) -> str:
    """The path without the parts that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)


def weight_shape_of(layer: Layer) -> tuple[int, ...]:
    """The shape from the layer's settings, because a quantised layer packs its weight into another shape."""
    if isinstance(layer, nn.Linear):
        return (layer.out_features, layer.in_features)
    return (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)


def tensor_of(layer: nn.Module, name: str) -> Tensor:
    """A layer's weight or bias, or any module's parameter, without what attached LoRAs add to it."""
    tensor = layer._parameters.get(name)
    if tensor is None:  # computed from others
        tensor = getattr(layer, name)
    assert isinstance(tensor, Tensor)  # `_places` has no bias of a layer without one
    return tensor


def _identity(place: Place) -> int:
    """Equal for layers that share a tensor. A parametrized layer computes a new one at each access."""
    return id(tensor_of(*place) if is_stored(*place) else place.layer)


def is_stored(layer: nn.Module, name: str) -> bool:
    """Whether the tensor is a parameter of the layer, not computed from others (weight_norm, parametrize)."""
    return layer._parameters.get(name) is not None


def finite_scale(scale: float) -> float:
    """Return the scale if it is finite.

    Raises:
        ConfigError: It is NaN or infinite.
    """
    if not isfinite(scale):
        raise ConfigError(f"the LoRA scale {scale} is not a finite number.", hint="Use a scale such as 1.0.")
    return scale


def _formed(change: LoraFactors | WeightChange, weight: Tensor, compute: torch.dtype) -> Tensor:
    """The change of a weight; DoRA's depends on it."""
    if isinstance(change, LoraFactors):
        return change.delta(compute)
    return change.delta(weight.detach().to(compute), compute)


def formed_for(name: str, change: LoraFactors | WeightChange, weight: Tensor, compute: torch.dtype) -> Tensor:
    """The change of a weight; an error names the layer."""
    try:
        return _formed(change, weight, compute)
    except (LoraFormatError, ModelMismatchError) as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error
