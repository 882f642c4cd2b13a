"""What an adapter of one layer is made of, kind by kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor, nn

from sigmascope.probes.adapters.applied import AdapterType
from sigmascope.probes.adapters.guarded import attribute
from sigmascope.probes.adapters.peft.layer import by_adapter, tensor_of
from sigmascope.probes.walking import named_modules_in, own_parameters

_LOHA: Final = ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")
_LOKR: Final = ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2")


@dataclass(frozen=True, slots=True)
class Change:
    """A change to one parameter of the wrapped module.

    Attributes:
        parameter: The parameter's name in its module.
        kind: As `AppliedPatch.adapter_type`.
        tensors: As `AppliedPatch.tensors`.
        has_scale: Whether the layer keeps alpha, rank and a scale for it; without it is applied whole.
        unavailable: What could not be read.
    """

    parameter: str
    kind: AdapterType
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    has_scale: bool = True
    unavailable: Mapping[str, str] = field(default_factory=dict)


def changes_of(layer: nn.Module, adapter: str) -> list[Change]:
    """The changes that an adapter of the layer makes; more than one where it has a bias or replaces a module."""
    for mark, read in _KINDS.items():
        if adapter in by_adapter(layer, mark):
            return read(layer, adapter)
    return [_not_known(layer, _parameter(layer))]


def adapters_of(layer: nn.Module) -> list[str]:
    """The names of the adapters that a layer has."""
    names = attribute(layer, "adapter_layer_names")
    held = [by_adapter(layer, str(name)) for name in names] if isinstance(names, tuple) else []
    return list(dict.fromkeys(adapter for adapters in held for adapter in adapters))


def misfit(change: Change, shape: tuple[int, ...] | None) -> str | None:
    """Why a low-rank change cannot be one of a weight of that shape, or None."""
    up, down = (change.tensors.get(name) for name in ("up", "down"))
    if up is None or down is None:
        return None
    if up.is_meta or down.is_meta:
        return "its factors were never filled: they are on the meta device"
    own = (up.shape[0], *down.shape[1:])
    if up.shape[1] != down.shape[0] or (shape is not None and own != shape):
        return f"up {tuple(up.shape)} and down {tuple(down.shape)} are no change of a weight {shape}"
    return None


def _lora(layer: nn.Module, adapter: str) -> list[Change]:
    down, up = (tensor_of(by_adapter(layer, name).get(adapter)) for name in ("lora_A", "lora_B"))
    parameter = _parameter(layer)
    reason = _why_no_product(layer, adapter)
    if reason is not None or up is None or down is None:
        return [_not_known(layer, parameter, reason or "its factors are not where PEFT keeps them")]
    if attribute(layer, "fan_in_fan_out") is True:  # the weight lies transposed: (BA)ᵀ = AᵀBᵀ
        up, down = down.mT, up.mT
    found = [_product(layer, adapter, parameter, up, down)]
    bias = attribute(by_adapter(layer, "lora_B").get(adapter), "bias")
    if isinstance(bias, Tensor):
        found.append(Change("bias", "diff", {"diff": bias.detach()}))
    return found


def _embedding(layer: nn.Module, adapter: str) -> list[Change]:
    """PEFT keeps A (r, words) and B (width, r) of a weight (words, width)."""
    names = ("lora_embedding_A", "lora_embedding_B")
    first, second = (tensor_of(by_adapter(layer, name).get(adapter)) for name in names)
    if first is None or second is None:
        return [_not_known(layer, "weight", "its factors are not where PEFT keeps them")]
    return [_product(layer, adapter, "weight", first.mT, second.mT)]


def _product(layer: nn.Module, adapter: str, parameter: str, up: Tensor, down: Tensor) -> Change:
    tensors = {"up": up, "down": down}
    magnitude = tensor_of(by_adapter(layer, "lora_magnitude_vector").get(adapter))
    if magnitude is None:
        return Change(parameter, "lora", tensors)
    return Change(parameter, "dora", tensors | {"dora_scale": magnitude})


def _why_no_product(layer: nn.Module, adapter: str) -> str | None:
    """Why a LoRA is not up · down of the weight, if it is not."""
    if by_adapter(layer, "lora_E"):
        return "AdaLoRA's singular values are not read"
    variant = by_adapter(layer, "lora_variant").get(adapter)
    name = getattr(variant, "__name__", type(variant).__name__)
    if variant is not None and not name.startswith("Dora"):
        return f"PEFT's {name.removesuffix('Variant')} is more than up · down"
    if (attribute(attribute(layer, "base_layer"), "groups") or 1) != 1:
        return "a LoRA of a convolution in groups is no change of its weight"
    if (attribute(layer, "num_experts") or 1) != 1:
        return "a LoRA of stacked experts is not read"
    return None


def _lycoris(
    kind: AdapterType, prefix: str, parts: tuple[str, ...]
) -> Callable[[nn.Module, str], list[Change]]:
    def read(layer: nn.Module, adapter: str) -> list[Change]:
        found = {part: tensor_of(by_adapter(layer, prefix + part).get(adapter)) for part in parts}
        return [Change("weight", kind, {part: held for part, held in found.items() if held is not None})]

    return read


def _rotation(kind: AdapterType) -> Callable[[nn.Module, str], list[Change]]:
    def read(layer: nn.Module, adapter: str) -> list[Change]:
        reason = {"tensors": "PEFT keeps rotations in another form than blocks"}
        return [Change("weight", kind, has_scale=False, unavailable=reason)]

    return read


def _replacement(layer: nn.Module, adapter: str) -> list[Change]:
    """A module that stands in for the original: each of its parameters is set."""
    module = by_adapter(layer, "modules_to_save")[adapter]
    return [
        Change(f"{inner}.{name}" if inner else name, "set", {"set": parameter.detach()}, has_scale=False)
        for inner, part in named_modules_in(module)
        for name, parameter in own_parameters(part)
    ]


_KINDS: Final[Mapping[str, Callable[[nn.Module, str], list[Change]]]] = {
    "lora_A": _lora,
    "lora_embedding_A": _embedding,
    "hada_w1_a": _lycoris("loha", "hada_", _LOHA),
    "lokr_w1": _lycoris("lokr", "lokr_", _LOKR),
    "lokr_w1_a": _lycoris("lokr", "lokr_", _LOKR),
    "oft_R": _rotation("oft"),
    "boft_R": _rotation("boft"),
    "modules_to_save": _replacement,
}


def _not_known(layer: nn.Module, parameter: str, reason: str | None = None) -> Change:
    why = reason or f"what PEFT's {type(layer).__module__}.{type(layer).__name__} does is not read"
    has_scale = bool(by_adapter(layer, "scaling"))
    unavailable = {"tensors": why} if has_scale else dict.fromkeys(("tensors", "strength", "scale"), why)
    return Change(parameter, "unknown", has_scale=has_scale, unavailable=unavailable)


def _parameter(layer: nn.Module) -> str:
    """The parameter of the wrapped module that the layer is for: its weight, unless the layer says another."""
    named = attribute(layer, "parameter_name")
    if isinstance(named, str):
        return named
    return "in_proj_weight" if isinstance(attribute(layer, "base_layer"), nn.MultiheadAttention) else "weight"
