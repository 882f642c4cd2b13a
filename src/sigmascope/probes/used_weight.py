"""The weight that a layer computes with, by its host's own functions, which are asked and not imitated.

ComfyUI's are those around a stored weight (`{name}_function`, `{name}_lowvram_function`), `convert_{name}` of scaled
weights, `get_weight` of ComfyUI-GGUF's layers, and an adapter's `h` and `g` for a bypass. PEFT's are `get_delta_weight`, the
norms of a DoRA and the rotations of an OFT; what else it has merges into a copy of the layer. A quantised weight is dequantised by its own class, or by the library that it is
from.

Nothing of the host changes: its functions are given copies, since ComfyUI's write into what they are given, and none that
is not known is called.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from sigmascope.probes.adapted_modules import bare, wrapped
from sigmascope.probes.comfyui_patcher import bypassed, is_comfyui, is_for_another, owner_of, patcher_of
from sigmascope.probes.copies import copy_to_device
from sigmascope.probes.joined_projections import joined_weights
from sigmascope.probes.models import children_of
from sigmascope.probes.peft import adapter_states, adapters_of, changes_of
from sigmascope.probes.reading import Reading, attempt, attribute, mapping, sequence
from sigmascope.probes.tensors import why_unreadable

_MOST_BYTES_OF_UNITS: Final = 64 << 20
"""Of the unit vectors that a bypass is asked about: a convolution of 3 × 3 has them for up to 455 channels."""
_NOT_OURS_TO_CALL: Final = "only the host knows what it does"


class UsedWeight(NamedTuple):
    """One weight of a layer, both in the weight's shape; they may be the host's own tensors.

    Attributes:
        used: What the layer computes with.
        stored: What is stored for it, dequantised: without what is put on it or beside it in each forward pass.
        is_changed: Whether anything is put on it or beside it.
    """

    used: Tensor
    stored: Tensor
    is_changed: bool


_Bypasses = Mapping[str, Sequence[Any]]


class UsedWeights:
    """Gives the weights of one model.

    Args:
        part: A module with or without PEFT's layers, or one of ComfyUI's patchers.
    """

    def __init__(self, part: object) -> None:
        self._patcher = patcher_of(part) if is_comfyui(part) else None
        self._module = part
        self._bypasses = attempt(lambda: _bypasses(self._patcher)).value or {}
        self._joined = attempt(lambda: joined_weights(part)[0]).value or {}

    def of(self, key: str) -> Reading[UsedWeight]:
        """The weight of a name that `AppliedPatch.key` has, or why it is not to be had. Never raises."""
        with torch.no_grad():
            found = attempt(lambda: self._of(key))
        return found.value or Reading(None, found.reason)

    def original(self, key: str, kept: Tensor) -> Reading[Tensor]:
        """What ComfyUI keeps of a weight that it merged changes into, dequantised."""
        with torch.no_grad():
            return attempt(lambda: _numbers(*owner_of(attribute(self._patcher, "model"), key), kept))

    def _of(self, key: str) -> Reading[UsedWeight]:
        if self._patcher is not None:
            return _in_comfyui(self._patcher, key, self._bypasses.get(key, ()))
        return _in_module(self._module, key, self._joined)


def _in_module(model: object, key: str, joined: Mapping[int, Tensor]) -> Reading[UsedWeight]:
    """Of PEFT's layers; one without any is as it is stored, and one that was joined into another is what that has of it."""
    *path, name = key.split(".")
    layer: Any = model
    for part in path:
        layer = children_of(bare(layer))[part]
    base = bare(layer)
    weight = attribute(base, name)
    why = _why_not(weight)
    if why is not None:
        return Reading(None, why)
    if id(weight) in joined:
        rows = joined[id(weight)]
        return Reading(UsedWeight(rows, rows, False))
    stored = used = _numbers(base, name, weight)
    around = []
    while (inner := wrapped(layer)) is not None:
        around.append(layer)
        layer = inner
    for layer in reversed(around):  # the innermost acts first
        running = [*_running(layer, name)]
        for sign, adapter, kind in running:
            form = _FORMS.get((kind, sign), _merged if sign > 0 and len(running) == 1 else None)
            if form is None:
                return Reading(None, f"PEFT forms no weight of this kind of change of {name}: {kind}")
            used = form(layer, adapter, used, stored)
    return Reading(UsedWeight(used, stored, used is not stored))


def _running(layer: Any, name: str) -> Iterator[tuple[int, str, str]]:
    """What the next forward pass makes of the parameter (1), or takes out of it (-1): adapters, and their kinds."""
    states = adapter_states(layer)
    running = [adapter for adapter in states.active if adapter in adapters_of(layer)]
    sign, adapters = (-1, states.merged) if states.merged else (1, running)
    if states.disabled is not bool(states.merged):
        return
    found = [
        (sign, adapter, change.kind)
        for adapter in adapters
        for change in changes_of(layer, adapter)
        if change.parameter == name
    ]
    rotations = [one for one in found if one[2] == "oft"]  # of the input: the last acts on the weight first
    yield from (one for one in found if one[2] != "oft")
    yield from reversed(rotations)


def _added(layer: Any, adapter: str, used: Tensor, _stored: Tensor) -> Tensor:
    changed: Tensor = used + layer.get_delta_weight(adapter).reshape(used.shape)
    return changed


def _taken_out(layer: Any, adapter: str, used: Tensor, _stored: Tensor) -> Tensor:
    changed: Tensor = used - layer.get_delta_weight(adapter).reshape(used.shape)
    return changed


def _rescaled(layer: Any, adapter: str, used: Tensor, stored: Tensor) -> Tensor:
    """A DoRA's: the sum, with its own magnitudes in place of those of W + ΔW (arXiv:2402.09353, equation 5)."""
    magnitude = copy(layer.lora_magnitude_vector[adapter])
    vars(magnitude)["_dora_cache"] = {}  # it empties its cache
    is_transposed = magnitude.fan_in_fan_out is True
    delta = layer.get_delta_weight(adapter).reshape(used.shape)
    norm = magnitude.get_weight_norm(stored, delta.mT if is_transposed else delta, scaling=1)
    across = (1, -1) if is_transposed else (-1, *[1] * (used.ndim - 1))
    scaled: Tensor = (magnitude.weight / norm).reshape(across) * (used + delta)
    return scaled


def _rotated(layer: Any, adapter: str, used: Tensor, _stored: Tensor) -> Tensor:
    """An OFT's: its input is rotated, x·R·Wᵀ.

    Raises:
        LookupError: Of a larger convolution PEFT rotates overlapping windows, which no weight does.
    """
    if prod(used.shape[2:]) != 1:
        raise LookupError("PEFT's rotation of a convolution's windows is no change of its weight")
    rotation = copy(layer.oft_R[adapter])  # it may write into its weight
    vars(rotation)["_parameters"] = {
        "weight": nn.Parameter(rotation.weight.detach().to(torch.float32, copy=True))
    }
    matrix: Tensor = rotation.get_weight()
    return (used.flatten(1).to(torch.float32) @ matrix.T).reshape(used.shape)


def _merged(layer: Any, adapter: str, used: Tensor, _stored: Tensor) -> Tensor:
    """Any other kind's: what `merge` makes of a copy of the layer around a copy of the weight.

    Raises:
        LookupError: The weight is no plain one, or the layer does not merge.
    """
    base: Any = wrapped(layer)
    if type(base) not in _PLAIN_LAYERS or base.weight.shape != used.shape:
        raise LookupError(
            f"a {type(layer).__name__} around a {type(base).__name__} is not merged to be looked at"
        )
    held, around = _apart(base), copy(layer)
    held._parameters["weight"] = nn.Parameter(used.detach().clone())
    adapters = {name: _apart(own) for name, own in layer._modules.items() if name != "base_layer"}
    vars(around).update(_modules={**adapters, "base_layer": held}, merged_adapters=[])
    around.merge(adapter_names=[adapter])
    if adapter not in around.merged_adapters:
        raise LookupError(f"a {type(layer).__name__} does not merge")
    merged: Tensor = held.weight.detach()
    return merged


def _apart(module: Any) -> Any:
    """A copy with parameters of its own: a merge may write into an adapter's too (MiSS in bfloat16 on a CPU does)."""
    apart = copy(module)
    vars(apart)["_parameters"] = {
        name: own if own is None else nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad)
        for name, own in module._parameters.items()
    }
    return apart


_PLAIN_LAYERS: Final = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding})
_FORMS: Final[Mapping[tuple[str, int], Callable[[Any, str, Tensor, Tensor], Tensor]]] = {
    **dict.fromkeys((("lora", 1), ("loha", 1), ("lokr", 1)), _added),
    **dict.fromkeys((("lora", -1), ("loha", -1), ("lokr", -1)), _taken_out),
    ("dora", 1): _rescaled,
    ("oft", 1): _rotated,
}
"""What an adapter of a kind makes of a weight, by the layer, its name, the weight so far, and the stored one."""


def _in_comfyui(patcher: Any, key: str, beside: Sequence[Any]) -> Reading[UsedWeight]:
    module, name = owner_of(patcher.model, key)
    weight = attribute(module, name)
    why = _why_not(weight)
    if why is not None:
        return Reading(None, why)
    if is_for_another(patcher, key):
        return Reading(None, "the model holds the changes of another patcher")
    is_packed = callable(attribute(module, "get_weight")) and not weight.is_floating_point()
    functions = () if is_packed else (*_functions(module, name),)  # its layers ignore them
    if any(attribute(function, "key") is None for function in functions):
        kind = type(functions[-1]).__name__
        return Reading(None, f"a {kind} is around the weight, and {_NOT_OURS_TO_CALL}")
    if is_packed:
        stored, used = (_unpacked(module, held) for held in (_without_patches(weight), weight))
    else:
        stored = used = _numbers(module, name, weight)
    if functions:
        raw = _dequantised(weight).to(torch.float32, copy=True)
        for function in functions:
            raw = function(raw)
        used = _converted(module, name, weight, raw)
    for adapter in beside:
        used = _beside(adapter, used)
    return Reading(UsedWeight(used, stored, bool(functions or beside or is_packed)))


def _why_not(weight: object) -> str | None:
    if not isinstance(weight, Tensor):
        return "the layer has no such weight"
    return None if _dequantises_itself(weight) and not weight.is_meta else why_unreadable(weight)


def _functions(module: object, name: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """What ComfyUI puts a weight through in each forward pass, in its order."""
    lazy = attribute(module, f"{name}_lowvram_function")
    if lazy is not None:
        yield lazy
    held = attribute(module, f"{name}_function")
    yield from sequence(held) or (() if held is None or isinstance(held, list) else (held,))


def _bypasses(patcher: object) -> _Bypasses:
    """The adapters that stand beside a layer now, by the weight's name."""
    found: dict[str, list[Any]] = {}
    if mapping(patcher, "injections"):
        for entry in bypassed(patcher):
            if entry.standing.state == "lazy":
                found.setdefault(entry.key, []).append(sequence(entry.kept)[1])
    return found


def _beside(adapter: Any, weight: Tensor) -> Tensor:
    """What a layer and a bypass make together of the unit vectors: Wᵀ + h(1), then g. A convolution's are single windows.

    Raises:
        LookupError: The bypass is of another form.
    """
    options = attribute(adapter, "kw_dict") or {}
    if weight.ndim < 2 or "bypass_forward" in vars(type(adapter)) or options.get("groups", 1) != 1:
        raise LookupError(f"a bypass of a {type(adapter).__name__} on this layer forms no weight")
    inputs, ones = prod(weight.shape[1:]), [1] * (weight.ndim - 2)
    if 4 * inputs**2 > _MOST_BYTES_OF_UNITS:
        raise LookupError(f"a bypass is not asked about {inputs} inputs of each output")
    alone = copy(adapter)
    alone.kw_dict = {}  # of a convolution: no padding and no stride
    device = next(part.device for part in sequence(adapter.weights) if isinstance(part, Tensor))
    output = copy_to_device(weight, device).to(torch.float32).flatten(1).T.reshape(inputs, -1, *ones)
    units = torch.eye(inputs, device=device).reshape(inputs, *weight.shape[1:])
    made: Tensor = alone.g(output + alone.h(units, output))
    return made.reshape(inputs, -1).T.reshape(weight.shape)


def _unpacked(module: Any, weight: Tensor) -> Tensor:
    unpacked: Tensor = module.get_weight(weight, torch.float32)
    return unpacked.as_subclass(Tensor)


def _without_patches(weight: Tensor) -> Tensor:
    """Another view of ComfyUI-GGUF's weight: the class gives itself for a copy."""
    plain: Tensor = weight.as_subclass(Tensor).as_subclass(type(weight))
    vars(plain).update({**vars(weight), "patches": []})
    return plain


def _numbers(module: object, name: str, weight: Tensor) -> Tensor:
    return _converted(module, name, weight, _dequantised(weight))


def _converted(module: object, name: str, weight: Tensor, numbers: Tensor) -> Tensor:
    """With the scale that a layer of ComfyUI keeps beside its weight."""
    convert = attribute(module, f"convert_{name}")
    is_own = numbers is weight or weight.is_floating_point()
    converted: Tensor = convert(numbers.to(torch.float32)) if callable(convert) and is_own else numbers
    return converted


def _dequantised(weight: Tensor) -> Tensor:
    """The numbers that a weight's codes stand for.

    Raises:
        LookupError: There is no function for it.
    """
    if _dequantises_itself(weight):
        return weight.dequantize()
    if weight.is_floating_point():
        return weight.detach()
    for mark, module, function, arguments in _BY_LIBRARIES:
        dequantise = attribute(sys.modules.get(module), function)
        if attribute(weight, mark) is not None and callable(dequantise):
            numbers: Tensor = dequantise(*arguments(weight))
            return numbers.as_subclass(Tensor)
    raise LookupError(f"no known function dequantises a {type(weight).__name__} of {weight.dtype}")


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight holds codes, whatever dtype it says it has."""
    return _dequantises_itself(weight) or not weight.is_floating_point()


def _dequantises_itself(weight: Tensor) -> bool:
    """Whether its class does, as torchao's and ComfyUI's do."""
    return type(weight).dequantize is not Tensor.dequantize


_BY_LIBRARIES: Final[Sequence[tuple[str, str, str, Callable[[Any], tuple[Any, ...]]]]] = (
    ("quant_state", "bitsandbytes.functional", "dequantize_4bit", lambda w: (w.data, w.quant_state)),
    ("SCB", "bitsandbytes.functional", "int8_vectorwise_dequant", lambda w: (w.data, w.SCB)),
    ("quant_type", "diffusers.quantizers.gguf.utils", "dequantize_gguf_tensor", lambda w: (w,)),
)
"""What a quantised weight has, the function that dequantises it, and its arguments."""
