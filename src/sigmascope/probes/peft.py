"""What PEFT and diffusers' LoRA loaders injected into a model: which adapters are on which weights, and which of them
act.

PEFT is not imported: its layers are known by what they hold, and found as `adapted_modules` finds them.

`read_adapters` gives each change of each weight with its state. `changes_of` reads a layer's factors by kind,
`scales_of` takes its scale apart into strength, rank and alpha.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from operator import itemgetter
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from sigmascope.probes.adapted_modules import adapter_layers, bare, own_tensors, roots_of
from sigmascope.probes.applied_patch import AdapterType, AppliedPatch, PatchType, Standing
from sigmascope.probes.joined_projections import bypassed_layers, is_joined_as_it_is, joined_weights
from sigmascope.probes.models import children_of, named_modules_in, own_parameters
from sigmascope.probes.module_tree import ModuleTree, answers_itself, once_a_look, registered, tree_of
from sigmascope.probes.reading import Reading, attempt, attribute, number, sequence

_PATCH_TYPES: Final[Mapping[str, PatchType]] = {"lora": "lora_up", "dora": "lora_up", "diff": "diff"}

_MAGNITUDE: Final = "lora_magnitude_vector"
_LOHA: Final = ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")
_LOKR: Final = ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2")
UP_BIAS: Final = "lora_B.bias"
NO_VALUES: Final = "it has no values: its tensors are on the meta device"
UNMERGED_NEXT: Final = "adapters are off: PEFT unmerges it at the next call"
_BYPASSED: Final = "its attention runs joined projections instead: unfuse_qkv_projections separates them"
_TAKE_FROM_WEIGHTS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT writes into the weights that an adapter is for."""
_TOOK_OUT: Final = "it took a part out of the model's weights"
_STRENGTH_DIGITS: Final = 12
"""Significant ones: PEFT keeps strength · alpha / rank; dividing gives the strength back but for float64's last digits."""


def read_adapters(model: object) -> Reading[tuple[AppliedPatch, ...]]:
    """Every adapter on every weight of a model, acting or not.

    Never raises. Nothing is merged, moved, copied or registered. A layer that cannot be read is there as "unknown"
    with the reason. The strength of a merged adapter is what the layer says now: PEFT keeps no other, so one that
    was set after merging is not the one in the weight.

    Args:
        model: A module that diffusers, transformers or PEFT injected adapters into, compiled or not, or a pipeline
            of such; then the component's name comes before each key.

    Returns:
        By weight in the model's order; the changes of one weight in the order in which they are applied. None of
        a model without adapters.
    """
    if not isinstance(model, nn.Module) and not isinstance(attribute(model, "components"), Mapping):
        return Reading(None, f"{type(model).__name__} is neither a module nor a pipeline")
    return attempt(lambda: tuple(_patches(model)))


def _patches(model: object) -> Iterator[AppliedPatch]:
    layers: dict[str, list[nn.Module]] = {}
    for name, module in adapter_layers(model):
        layers.setdefault(name, []).insert(0, module)  # the innermost acts first
    counts: dict[str, int] = {}
    bypassed = bypassed_layers(model) if layers else ()
    rows = joined_weights(model)[0] if bypassed else {}
    rewriting = dict(_rewriting_adapters(model)) if layers else {}
    for name, around in layers.items():
        is_bypassed = id(around[-1]) in bypassed
        for layer in around:
            states = adapter_states(layer)
            if is_bypassed:
                is_inside = bool(states.merged) and is_joined_as_it_is(bare(layer), rows)
                states = replace(states, bypassed=not is_inside)
            for patch in _of_layer(name, layer, states, counts):
                why = rewriting.get(patch.source or "", _nothing_in_base)(layer)
                yield patch if why is None else replace(patch, in_base=why)


def _nothing_in_base(_layer: nn.Module) -> None:
    return None


def _rewriting_adapters(model: object) -> Iterator[tuple[str, Callable[[nn.Module], str | None]]]:
    """The adapters that change the model itself, with what tells of a layer how.

    PEFT trains biases of the model with `bias` of "all" or "lora_only", and loads them into it. Some ways to begin a
    training take a part out of the weights, which the factors have then.
    """
    for _, root in roots_of(model):
        tree = tree_of(root)
        for configs in tree.held("peft_config", tree.holding("peft_config")):
            for adapter, config in configs.items() if isinstance(configs, Mapping) else ():
                tells = _in_base(config)
                if tells is not None:
                    yield str(adapter), tells


def configs_of(model: nn.Module) -> Mapping[str, object]:
    """What PEFT and diffusers keep of a model's adapters, by their names; of one that only holds models, of all these."""
    own = attribute(model, "peft_config")
    if isinstance(own, Mapping) and own:
        return {**own}
    held = (
        children_of(child).values() for child in children_of(model).values() if type(child) is nn.ModuleList
    )
    inner = (vars(member).get("peft_config") for members in held for member in members)
    return {name: config for configs in inner if configs for name, config in configs.items()}


def rewrites_model(model: nn.Module, adapter: str) -> bool:
    """Whether an adapter of a model changes the model itself: `AppliedPatch.in_base` says of a layer how."""
    return _in_base(configs_of(model).get(adapter)) is not None


def takes_from_weights(model: nn.Module, adapter: str) -> bool:
    """Whether an adapter began with a part of the model's weights, which they lack: it changes nothing until it is trained."""
    begun = attribute(configs_of(model).get(adapter), "init_lora_weights")
    return isinstance(begun, str) and begun.lower().startswith(_TAKE_FROM_WEIGHTS)


def took_from_weights(patch: AppliedPatch) -> bool:
    """The same of a change of such an adapter."""
    return patch.in_base is not None and _TOOK_OUT in patch.in_base


def _in_base(config: object) -> Callable[[nn.Module], str | None] | None:
    biases, begun = attribute(config, "bias"), attribute(config, "init_lora_weights")
    if isinstance(biases, str) and biases != "none":
        says = f'with bias="{biases}" it changes biases of the model itself, which act while it is off'
        return lambda layer: says if biases == "all" or "bias" in dict(own_parameters(bare(layer))) else None
    if isinstance(begun, str) and begun.lower().startswith(_TAKE_FROM_WEIGHTS):
        says = f'with init_lora_weights="{begun}" {_TOOK_OUT}, which they lack while it is off'
        return lambda _: says
    return None


def _of_layer(
    name: str, layer: nn.Module, states: "AdapterStates", counts: dict[str, int]
) -> Iterator[AppliedPatch]:
    for adapter in sorted(adapters_of(layer), key=states.order):
        for patch in _of_adapter(name, layer, adapter, states, counts):
            index = counts.get(patch.key, 0)
            counts[patch.key] = index + 1
            yield patch if patch.index == index else replace(patch, index=index)


@dataclass(frozen=True, slots=True)
class AdapterStates:
    """Which adapters of a layer act.

    Attributes:
        active: Those that were set active, in the order in which they run; the layer need not have them all.
        merged: Those that are in the weight, in the order in which they were merged.
        disabled: Whether adapters are switched off.
        bypassed: Whether neither the layer nor what was merged into it is run; see `bypassed_layers`.
    """

    active: tuple[str, ...]
    merged: tuple[str, ...]
    disabled: bool
    bypassed: bool = False

    def order(self, adapter: str) -> tuple[int, int]:
        """Sorting key: merged ones first, then active ones, then the others."""
        for place, names in enumerate((self.merged, self.active)):
            if adapter in names:
                return place, names.index(adapter)
        return 2, 0

    def of(self, adapter: str, strength: float | None, kind: AdapterType) -> Standing:
        """How far an adapter has come in this layer.

        A DoRA of strength 0 still scales the weight to its own magnitudes.
        """
        if adapter in self.merged and not self.bypassed:
            if self.disabled:
                return Standing("merged", UNMERGED_NEXT)
            return Standing("merged", "PEFT lists it among the merged adapters")
        if self.bypassed:
            return Standing("inactive", _BYPASSED, "bypassed")
        if self.disabled:
            return Standing("inactive", "adapters are switched off", "disabled")
        if adapter not in self.active:
            return Standing(
                "inactive", f"not among the active adapters: {_listed(self.active)}", "not_active"
            )
        if self.merged:
            why = f"PEFT does not run it while other adapters are merged: {_listed(self.merged)}"
            return Standing("inactive", why, "others_merged")
        if strength == 0.0 and kind != "dora":
            return Standing("inactive", "its strength is 0", "strength_zero")
        return Standing("lazy", "PEFT adds it to the layer's output in each forward pass")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none is"


def adapter_states(layer: object) -> AdapterStates:
    """Read from the layer itself: diffusers and PEFT both set it there."""
    active = _held(layer, "active_adapters")
    names = (active,) if isinstance(active, str) else sequence(active)
    merged = sequence(_held(layer, "merged_adapters"))
    return AdapterStates(
        tuple(map(str, names)), tuple(map(str, merged)), _held(layer, "disable_adapters") is True
    )


class Standings(NamedTuple):
    """How the layers of a model's adapters stand.

    Attributes:
        places: Where they are in the tree.
        each: What each of them keeps: scales, active adapters, whether they are off, and which are merged.
        tell: Whether each of them keeps the last three.
    """

    places: Sequence[int]
    each: list[tuple[Any, ...]]
    tell: bool

    @property
    def merged(self) -> list[Any]:
        """The adapters that are merged in each of them; None of one that merges none."""
        return [*map(_MERGED_OF, self.each)]


_MERGED: Final = "merged_adapters"
_WHICH_ACT: Final = frozenset({"_active_adapter", "_disable_adapters", _MERGED})
"""Where PEFT's layers of every kind keep which adapters act."""
_STANDING: Final = ("scaling", *sorted(_WHICH_ACT))
"""Where they keep that, and how strongly: HRA, BOFT, OFT and (IA)³ keep no scale. Rank and alpha alone change nothing."""
_STANDING_OF: Final = itemgetter(*_STANDING)
_MERGED_OF: Final = itemgetter(_STANDING.index(_MERGED))


def standings_in(tree: ModuleTree) -> Standings:
    """How the layers of adapters stand now; asked once while a look lasts."""
    return once_a_look("standings", tree, lambda: _standings_in(tree))


def _standings_in(tree: ModuleTree) -> Standings:
    places: list[int] = tree.derive("layers of adapters", lambda: _places_of_adapters(tree))
    try:
        return Standings(places, [*map(_STANDING_OF, tree.own_at(places))], True)
    except KeyError:
        each = [*zip(*(tree.held(name, places) for name in _STANDING), strict=True)]
        tell = all(len(tree.holding(name, places)) == len(places) for name in _WHICH_ACT)
        return Standings(places, each, tell)


def _places_of_adapters(tree: ModuleTree) -> list[int]:
    """Where PEFT's layers are, and the modules that it trained whole, which keep less."""
    whole = [place for place, _ in tree.having("modules_to_save")]
    return sorted({*tree.holding(_MERGED), *whole})


def stored_tensors(layer: nn.Module, adapter: str) -> dict[str, Tensor]:
    """An adapter's tensors in a layer, as PEFT's files name them."""
    names = _held(layer, "adapter_layer_names")
    found = {str(name): _factor_of(layer, str(name), adapter) for name in names or ()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _stored_beside(change: "Change", layer: nn.Module, adapter: str) -> dict[str, Tensor]:
    """As `AppliedPatch.stored`."""
    if change.kind != "dora":
        return {} if change.tensors else stored_tensors(layer, adapter)
    norm = (attribute(layer, "_caches") or {}).get(f"{adapter}-weight_norm")
    weight = dict(own_parameters(bare(layer))).get(change.parameter)
    return {"norm": norm} if isinstance(norm, Tensor) else {} if weight is None else {"weight": weight}


def adapters_of(layer: nn.Module) -> list[str]:
    """The names of the adapters that a layer has."""
    names = _held(layer, "adapter_layer_names")
    found: dict[str, None] = {}
    for name in names if isinstance(names, tuple) else ():
        held = _by_adapter(layer, str(name))
        if held:
            found |= dict.fromkeys(map(str, held._modules if type(held) is nn.ModuleDict else held))
    return [*found]


def _of_adapter(
    name: str, layer: nn.Module, adapter: str, states: AdapterStates, counts: Mapping[str, int]
) -> list[AppliedPatch]:
    patches = attempt(
        lambda: [
            _applied(name, layer, adapter, change, states, counts) for change in changes_of(layer, adapter)
        ]
    )
    if patches.value is None:
        return [_unreadable(name, layer, adapter, patches.reason or "unknown")]
    return patches.value


_NOTHING: Final[Mapping[str, Any]] = {}


class Change(NamedTuple):
    """A change to one parameter of the wrapped module.

    Attributes:
        parameter: The parameter's name in its module.
        kind: As `AppliedPatch.adapter_type`.
        tensors: As `AppliedPatch.tensors`.
        host_names: As `AppliedPatch.host_names`.
        has_scale: Whether the layer keeps alpha, rank and a scale for it; without it is applied whole.
        unavailable: What could not be read.
    """

    parameter: str
    kind: AdapterType
    tensors: Mapping[str, Tensor] = _NOTHING
    host_names: Mapping[str, str] = _NOTHING
    has_scale: bool = True
    unavailable: Mapping[str, str] = _NOTHING


def _applied(
    name: str,
    layer: nn.Module,
    adapter: str,
    change: Change,
    states: AdapterStates,
    counts: Mapping[str, int],
) -> AppliedPatch:
    key = f"{name}.{change.parameter}" if name else change.parameter
    scales = scales_of(layer, adapter, change)
    shape = _shape(layer, change.parameter)
    unavailable = {**change.unavailable, **scales.unavailable}
    if shape is None:
        unavailable["weight_shape"] = "the layer has no weight of that name"
    standing = states.of(adapter, scales.strength, change.kind)
    why = adapter_misfit(change, shape)
    if why is not None and (why != NO_VALUES or standing.cause in (None, "strength_zero")):
        standing = Standing("failed", why)
    return AppliedPatch(
        key=key,
        adapter_type=change.kind,
        patch_type=_PATCH_TYPES.get(change.kind, "unknown"),
        data_type=str(type(layer)),
        state=standing.state,
        state_reason=standing.reason,
        cause=standing.cause,
        source=adapter,
        index=counts.get(key, 0),
        strength=scales.strength,
        rank=scales.rank,
        alpha=scales.alpha,
        scale=scales.scale,
        tensors=change.tensors,
        stored=_stored_beside(change, layer, adapter),
        host_names=change.host_names,
        weight_shape=shape,
        unavailable=unavailable,
    )


def _shape(layer: nn.Module, parameter: str) -> tuple[int, ...] | None:
    """The weight's shape; of a quantised matrix what it stands for, not how it is packed."""
    *path, own = parameter.split(".")
    module = base = bare(layer)
    for part in path:
        module = bare(children_of(module)[part])
    weight = registered(module, "_parameters").get(own)  # but for buffers, and attention while it is merged
    if not isinstance(weight, Tensor):
        weight = next((tensor for name, tensor in own_tensors(module) if name == own), None)
    if weight is None:
        return None
    if not weight.is_floating_point():
        sizes = attribute(base, "out_features"), attribute(base, "in_features")
        if all(isinstance(size, int) for size in sizes):
            return sizes
    return tuple(weight.shape)


def _unreadable(name: str, layer: nn.Module, adapter: str, reason: str) -> AppliedPatch:
    return AppliedPatch(
        key=f"{name}.weight" if name else "weight",
        adapter_type="unknown",
        patch_type="unknown",
        data_type=str(type(layer)),
        state="registered",
        state_reason="the layer cannot be read",
        source=adapter,
        strength=None,
        scale=None,
        unavailable=dict.fromkeys(("patch", "strength", "scale"), reason),
    )


def changes_of(layer: nn.Module, adapter: str) -> list[Change]:
    """The changes that an adapter of the layer makes; more than one where it has a bias or replaces a module."""
    for mark, read in _READERS.items():
        if adapter in (_by_adapter(layer, mark) or ()):
            return read(layer, adapter)
    return [_unknown_change(layer, _parameter(layer))]


def by_adapter(layer: object, name: str) -> dict[str, Any]:
    """What a layer keeps under `name` for each adapter: a dict, a ModuleDict or a ParameterDict."""
    held = _by_adapter(layer, name)
    return {} if held is None else {str(adapter): held[adapter] for adapter in list(held.keys())}


def held_by(layer: object, name: str, adapter: str) -> Any:
    """What a layer keeps under `name` for one adapter; None if it keeps nothing."""
    held = _by_adapter(layer, name)
    if type(held) is nn.ModuleDict:  # past its own methods, which take longer
        return held._modules.get(adapter)
    return held[adapter] if held is not None and adapter in held else None


_PLAIN_HOLDERS: Final = frozenset({dict, nn.ModuleDict, nn.ParameterDict, type(None)})


def _by_adapter(layer: object, name: str) -> Any:
    """What holds something for each adapter; None if there is no such thing."""
    held = _held(layer, name)
    # These are asked first, since asking an abstract class takes long for thousands of layers.
    is_plain = type(held) in _PLAIN_HOLDERS
    return held if is_plain or isinstance(held, Mapping | nn.ModuleDict | nn.ParameterDict) else None


def _held(thing: object, name: str) -> Any:
    """`attribute`, faster where a module lacks it: PyTorch words an error then."""
    kind: Any = type(thing)
    if not isinstance(thing, nn.Module) or answers_itself(kind, name):
        return attribute(thing, name)
    own = vars(thing)
    if name in own:
        return own[name]
    held = own.get("_parameters")
    if held and name in held:
        return held[name]
    held = own.get("_modules")
    if held and name in held:
        return held[name]
    held = own.get("_buffers")
    return held[name] if held and name in held else None


def tensor_of(held: object) -> Tensor | None:
    """A factor, whether kept as a parameter or as the weight of a layer; it shares the host's memory."""
    tensor = held if isinstance(held, Tensor) else _held(held, "weight")
    if not isinstance(tensor, Tensor):
        return None
    return _at_hand(held, "weight", tensor)


def _at_hand(held: object, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a layer, or what Accelerate keeps of it while it is offloaded."""
    kept = _offloaded(held, name) if tensor.is_meta else None
    return (tensor if kept is None else kept).detach()


def _factor_of(layer: nn.Module, name: str, adapter: str) -> Tensor | None:
    """`tensor_of` what a layer keeps under `name` for an adapter; of a ParameterDict its hook keeps what is offloaded."""
    tensor = tensor_of(held_by(layer, name, adapter))
    kept = _offloaded(_by_adapter(layer, name), adapter) if tensor is not None and tensor.is_meta else None
    return tensor if kept is None else kept.detach()


def _offloaded(held: object, name: str) -> Tensor | None:
    """The tensor of a layer that Accelerate offloads, leaf by leaf: its hook keeps it."""
    kept = attribute(attribute(held, "_hf_hook"), "weights_map")
    tensor = attempt(lambda: kept[name]).value if isinstance(kept, Mapping) else None
    return tensor if isinstance(tensor, Tensor) else None


def _read_lora(layer: nn.Module, adapter: str) -> list[Change]:
    down, up = (tensor_of(held_by(layer, name, adapter)) for name in ("lora_A", "lora_B"))
    parameter = _parameter(layer)
    reason = _why_no_product(layer, adapter)
    if reason is not None or up is None or down is None:
        return [_unknown_change(layer, parameter, reason or "its factors are not where PEFT keeps them")]
    names = {"up": "lora_B", "down": "lora_A"}
    if _held(layer, "fan_in_fan_out") is True:  # the weight lies transposed: (BA)ᵀ = AᵀBᵀ
        up, down, names = down.mT, up.mT, {"up": "lora_A", "down": "lora_B"}
    changes = [_low_rank_change(layer, adapter, parameter, up, down, names)]
    second = held_by(layer, "lora_B", adapter)
    bias = _held(second, "bias")
    if isinstance(bias, Tensor):
        changes.append(Change("bias", "diff", {"diff": _at_hand(second, "bias", bias)}, {"diff": UP_BIAS}))
    return changes


def _read_embedding(layer: nn.Module, adapter: str) -> list[Change]:
    """PEFT keeps A (r, words) and B (width, r) of a weight (words, width)."""
    names = ("lora_embedding_A", "lora_embedding_B")
    first, second = (_factor_of(layer, name, adapter) for name in names)
    if first is None or second is None:
        return [_unknown_change(layer, "weight", "its factors are not where PEFT keeps them")]
    own = {"up": names[0], "down": names[1]}
    return [_low_rank_change(layer, adapter, "weight", first.mT, second.mT, own)]


def _low_rank_change(
    layer: nn.Module, adapter: str, parameter: str, up: Tensor, down: Tensor, names: Mapping[str, str]
) -> Change:
    tensors = {"up": up, "down": down}
    magnitude = tensor_of(held_by(layer, _MAGNITUDE, adapter))
    if magnitude is None:
        return Change(parameter, "lora", tensors, names)
    return Change(parameter, "dora", tensors | {"dora_scale": magnitude}, {**names, "dora_scale": _MAGNITUDE})


_PRODUCTS: Final = ("Dora", "Velora")
"""Variants of PEFT's that are up · down, scaled to magnitudes or with gradients of their own."""


def _why_no_product(layer: nn.Module, adapter: str) -> str | None:
    """Why a LoRA is not up · down of the weight, if it is not."""
    if _by_adapter(layer, "lora_E"):
        return "AdaLoRA's singular values are not read"
    variant = held_by(layer, "lora_variant", adapter)
    name = getattr(variant, "__name__", type(variant).__name__)
    if variant is not None and not name.startswith(_PRODUCTS):
        return f"PEFT's {name.removesuffix('Variant')} does more than up · down"
    if (_held(_held(layer, "base_layer"), "groups") or 1) != 1:
        return "a LoRA of a grouped convolution is not a plain change of its weight"
    if (_held(layer, "num_experts") or 1) != 1:
        return "a LoRA of stacked experts is not read"
    return None


def _read_lycoris(
    kind: AdapterType, prefix: str, parts: tuple[str, ...], layer: nn.Module, adapter: str
) -> list[Change]:
    found = {part: _factor_of(layer, prefix + part, adapter) for part in parts}
    tensors = {part: held for part, held in found.items() if held is not None}
    return [Change("weight", kind, tensors, {part: prefix + part for part in tensors})]


def _read_rotation(kind: AdapterType, _layer: nn.Module, _adapter: str) -> list[Change]:
    reason = {"tensors": "PEFT does not store rotations as blocks"}
    return [Change("weight", kind, has_scale=False, unavailable=reason)]


def _read_bias(layer: nn.Module, adapter: str) -> list[Change]:
    """A BEFT's, which is added to the bias."""
    own = _factor_of(layer, "beft_bias", adapter)
    if own is None:
        return [_unknown_change(layer, "bias", "its bias is not where PEFT keeps it")]
    return [Change("bias", "diff", {"diff": own.flatten()}, {"diff": "beft_bias"}, has_scale=False)]


def _read_replacement(layer: nn.Module, adapter: str) -> list[Change]:
    """A module that stands in for the original: each of its parameters is set."""
    module = by_adapter(layer, "modules_to_save")[adapter]
    return [
        Change(
            f"{inner}.{name}" if inner else name,
            "set",
            {"set": _at_hand(part, name, parameter)},
            has_scale=False,
        )
        for inner, part in named_modules_in(module)
        for name, parameter in own_parameters(part)
    ]


def _unknown_change(layer: nn.Module, parameter: str, reason: str | None = None) -> Change:
    why = reason or f"what PEFT's {type(layer).__module__}.{type(layer).__name__} does is not read"
    has_scale = bool(by_adapter(layer, "scaling"))
    unavailable = {"tensors": why} if has_scale else dict.fromkeys(("tensors", "strength", "scale"), why)
    return Change(parameter, "unknown", has_scale=has_scale, unavailable=unavailable)


def _parameter(layer: nn.Module) -> str:
    """The parameter of the wrapped module that the layer is for: its weight, unless the layer says another."""
    named = _held(layer, "parameter_name")
    if isinstance(named, str):
        return named
    return "in_proj_weight" if isinstance(_held(layer, "base_layer"), nn.MultiheadAttention) else "weight"


_READERS: Final[Mapping[str, Callable[[nn.Module, str], list[Change]]]] = {
    "lora_A": _read_lora,
    "lora_embedding_A": _read_embedding,
    "hada_w1_a": partial(_read_lycoris, "loha", "hada_", _LOHA),
    "lokr_w1": partial(_read_lycoris, "lokr", "lokr_", _LOKR),
    "lokr_w1_a": partial(_read_lycoris, "lokr", "lokr_", _LOKR),
    "oft_R": partial(_read_rotation, "oft"),
    "boft_R": partial(_read_rotation, "boft"),
    "beft_bias": _read_bias,
    "modules_to_save": _read_replacement,
}


def adapter_misfit(change: Change, shape: tuple[int, ...] | None) -> str | None:
    """Why a change has no values, or a low-rank one cannot be one of a weight of that shape, or None."""
    if any(tensor.is_meta for tensor in change.tensors.values()):
        return NO_VALUES
    up, down = (change.tensors.get(name) for name in ("up", "down"))
    if up is None or down is None:
        return None
    (out, rank, *_), (own_rank, *inner) = up.shape, down.shape
    if rank != own_rank or (shape is not None and (out, *inner) != shape):
        return f"up {tuple(up.shape)} and down {tuple(down.shape)} do not fit a weight {shape}"
    return None


class Scales(NamedTuple):
    """As `AppliedPatch` names them."""

    strength: float | None = 1.0
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = 1.0
    unavailable: Mapping[str, str] = _NOTHING


def scales_of(layer: nn.Module, adapter: str, change: Change) -> Scales:
    """Read them from the layer; what has no scale there is applied whole."""
    if not change.has_scale:
        known = None if "strength" in change.unavailable else 1.0
        return Scales(strength=known, scale=known)
    whole = number_for(layer, "scaling", adapter)
    if whole is None:
        return Scales(
            None, scale=None, unavailable=dict.fromkeys(("strength", "scale"), "the layer does not store it")
        )
    if change.kind == "diff":  # a bias of the adapter, which no rank divides
        return Scales(strength=whole)
    return _strength_and_scale(layer, adapter, whole)


def _strength_and_scale(layer: nn.Module, adapter: str, whole: float) -> Scales:
    rank = number_for(layer, "r", adapter)
    alpha = number_for(layer, "lora_alpha", adapter)
    if alpha is None:
        alpha = number_for(layer, "alpha", adapter)
    if rank is None or alpha is None or rank <= 0:
        why = dict.fromkeys(("rank", "alpha"), "the layer does not store it; the strength includes it")
        return Scales(strength=whole, unavailable=why)
    scale = alpha / (sqrt(rank) if held_by(layer, "use_rslora", adapter) is True else rank)
    strength = float(f"{whole / scale:.{_STRENGTH_DIGITS}g}") if scale else 1.0
    return Scales(strength, int(rank), alpha, scale)


def number_for(layer: object, name: str, adapter: str) -> float | None:
    """A number that a layer keeps for an adapter."""
    value = held_by(layer, name, adapter)
    return None if value is None else number(value)
