"""What a model is at one moment, to compare with another: identity, placement, weights, changes on them.

A snapshot keeps no model and no weight alive. What a host hands over as its UNet or its CLIP may be one
model, several, or a whole pipeline (`parts_of`). Weights go by the names they have without adapters, whatever
wraps them (`weights_in`); so do the changes on them, whoever put them there (`read_model_patches`).
"""

import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from sigmascope.probes.adapted_modules import adapted_modules
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import (
    KeptWeight,
    bypasses_in_place,
    is_comfyui,
    kept_weights,
    read_patches,
    weights_of,
)
from sigmascope.probes.copies import Pending
from sigmascope.probes.fingerprints import (
    NO_SAMPLES,
    Fingerprint,
    Samples,
    begin_samples,
    fingerprints,
    join_small,
)
from sigmascope.probes.forward_passes import (
    detour_of,
    forwards_of_classes,
    graph_beside,
    is_of_host,
    settings_of,
    weight_readers,
)
from sigmascope.probes.joined_projections import joined_weights
from sigmascope.probes.models import (
    children_of,
    components_of,
    loadable_parts,
    tensors_at,
)
from sigmascope.probes.module_tree import ModuleTree, tree_of
from sigmascope.probes.peft import read_adapters
from sigmascope.probes.reading import Reading, attempt, attribute, reasons
from sigmascope.stages.baseline import NO_WEIGHTS, most_common
from sigmascope.stages.schema import IdentityChanges, PlacementChanges, as_dict
from sigmascope.stages.signed_patches import MOST_KEPT_BYTES, NOTHING_KEPT, KeptPatches, keep_patches

NOT_GIVEN = "no model was given"
NO_PATCHER = "only ComfyUI's patchers have it"
UNNAMED = "unnamed"
_WRAPPED: Final = ("base_layer", "original_module")
"""Under which names PEFT's layers keep the layer that they wrap."""
_TRANSPARENT: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Wrappers whose name is none of the weight's own: torch.compile's, FSDP's and checkpointing's."""
_BY_PEFT: Final = "base_model.model."  # before every name in a PeftModel
_REPLICATED: Final = "module."  # before every name in a data-parallel model
_REPLICATING: Final = ("DataParallel", "DistributedDataParallel")
_TEXT_TYPES: Final = re.compile(r"clip|text|^te\d?$|t5|encoder", re.IGNORECASE)
_TEXT_COMPONENTS: Final = re.compile(r"^text_encoder(_\d+)?$")
_DENOISER_COMPONENTS: Final = re.compile(r"^(unet|transformer|denoiser|prior|decoder)(_\d+)?$")


NOT_SAMPLED: Final = Pending(lambda: NO_SAMPLES)


class WeightOutline(NamedTuple):
    """One weight at one moment."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model is, and where its host would have it when it works and when it rests."""

    device: torch.device | None = None
    load_device: torch.device | None = None
    offload_device: torch.device | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelSnapshot:
    """A UNet or CLIP at one moment.

    Attributes:
        model_type: What the host calls it.
        model_id: Its `id()`; None if there was no model.
        kind: Its type.
        reference: A weak reference; None if it takes none.
        parts: Weak references to what it is made of; one "" for a single model.
        patch_count: How many weights have changes; None if that could not be read.
        patches_uuid: Of ComfyUI's patcher.
        placement: Where it is.
        kept: The changes that were on it, where it is a baseline.
        weights: By name without adapters.
        adapter_keys: Names of adapters' own tensors.
        wrapped_keys: How many weights are in layers that an adapter wraps.
        fingerprints: Of the weights that were looked at, as they are without what ComfyUI merged into them.
        begun_samples: Of all weights that can be read, a thousand elements each.
        forwards: What stands before, in place of or behind the modules' own forward passes, and the module's name.
        detours: By module, what a call of it runs in place of its layers; see `forward_passes`.
        strange: The first of these that is of nobody's library, in words; None if none is.
        classes: Of the modules, by name without adapters.
        class_forwards: The forward passes of these classes.
        settings: What modules and processors of nobody's library keep, where ComfyUI keeps nothing on them; see `settings_of`.
        fingerprint_seconds: What looking took; None if nothing was looked at.
        fingerprint_bytes: How much was looked at.
        unavailable: What could not be read, with the reason.
    """

    model_type: str
    model_id: int | None = None
    kind: type | None = None
    reference: Any = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    patch_count: int | None = None
    patches_uuid: Any = None
    placement: Placement = Placement()
    kept: Pending[KeptPatches] = NOTHING_KEPT
    weights: Mapping[str, WeightOutline] = field(default_factory=dict)
    adapter_keys: tuple[str, ...] = ()
    wrapped_keys: int = 0
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    begun_samples: Pending[Samples] = NOT_SAMPLED
    forwards: frozenset[tuple[str, str]] = frozenset()
    detours: Mapping[str, str] = field(default_factory=dict)
    strange: str | None = None
    classes: Mapping[str, type] = field(default_factory=dict)
    class_forwards: Mapping[type, object] = field(default_factory=dict)
    settings: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    fingerprint_seconds: float | None = None
    fingerprint_bytes: int = 0
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"ModelSnapshot({self.model_type!r}, {self.class_name!r}, …)"

    @property
    def class_name(self) -> str | None:
        """The class's name."""
        return None if self.kind is None else self.kind.__name__

    @property
    def samples(self) -> Samples:
        """See `begun_samples`; may wait for an accelerator."""
        return self.begun_samples.result()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all tensors, adapters' included."""
        return (*self.weights, *self.adapter_keys)

    def detour_of(self, key: str) -> str | None:
        """Why a layer's weight may not be what a call computes with; None if nothing stands in its place."""
        inside = (why for name, why in self.detours.items() if not name or key.startswith(f"{name}."))
        return next(inside, None)

    def model(self) -> object:
        """The model, if it still lives."""
        return None if self.reference is None else self.reference()


def take_snapshot(
    model: object,
    model_type: str,
    *,
    keys: Collection[str] | None = None,
    contents: bool = True,
    since: ModelSnapshot | None = None,
    applied: "ModelPatches | None" = None,
    weights: "Reading[Weights] | None" = None,
) -> ModelSnapshot:
    """Look at a model. Never raises; changes nothing, and calls no hook or method of its modules.

    Args:
        model: See `parts_of`.
        model_type: See `parts_of`.
        keys: Of which weights to take fingerprints; None: of all.
        contents: Whether to take any.
        since: The baseline that it is to be compared with; without one, it is a baseline.
        applied: The changes on the model, if they are known.
        weights: What `weights_in` gave, likewise.
    """
    if model is None:
        names = ("model_id", "class", "device", "patches_count", "patches_uuid", "weights")
        return ModelSnapshot(model_type, unavailable=dict.fromkeys(names, NOT_GIVEN))
    weights = weights or attempt(lambda: weights_in(model, model_type))
    applied = applied or read_model_patches(model, model_type)
    tensors = weights.value or Weights({}, {})
    parts = attempt(lambda: parts_of(model, model_type)).value or {}
    references = {name: attempt(lambda part=part: weakref.ref(part)).value for name, part in parts.items()}  # type: ignore[misc]
    count, uuid = _patch_count(model, applied), attribute(patcher_in(model), "patches_uuid")
    placement = placement_of(model, tensors)
    modules = attempt(lambda: list(_modules(parts))).value or []
    around = [*_marked(modules)]
    began = time.perf_counter()
    unpatched = tensors.unpatched if contents else {}
    wanted = {name: w for name, w in unpatched.items() if keys is None or name in keys}
    small = join_small(wanted)
    prints = fingerprints(wanted, joined=small)
    known = {name: reading.value for name, reading in prints.items() if reading.value is not None}
    seen = {name: wanted[name] for name in known}
    taken = begin_samples(seen | _others(tensors, since, known), floating_only=False, joined=small)
    seconds = time.perf_counter() - began
    kept = Reading(NOTHING_KEPT)
    if since is None:
        kept = attempt(lambda: keep_patches(applied.patches, tensors.kept, MOST_KEPT_BYTES))
    unread = reasons(prints)
    unavailable = reasons(
        {
            "patches": Reading(None, "; ".join(applied.unavailable.values()))
            if applied.unavailable
            else kept,
            "weights": weights,
            "patches_count": count,
            "patches_uuid": Reading(uuid, NO_PATCHER),
            "device": Reading(placement.device, NO_WEIGHTS),
            "load_device": Reading(placement.load_device, NO_PATCHER),
            "offload_device": Reading(placement.offload_device, NO_PATCHER),
        }
    )
    if unread:
        unavailable["fingerprints"] = (
            f"of {len(unread)} of {len(wanted)} weights: {next(iter(unread.values()))}"
        )
    return ModelSnapshot(
        model_type,
        id(model),
        type(model),
        attempt(lambda: weakref.ref(model)).value,
        references,
        count.value,
        uuid,
        placement,
        kept.value or NOTHING_KEPT,
        dict(_outlines(tensors.base)),
        tuple(tensors.adapters),
        len(tensors.wrapped),
        known,
        taken,
        attempt(lambda: frozenset(_forwards(parts.values(), around))).value or frozenset(),
        attempt(lambda: dict(_detours(parts, around))).value or {},
        attempt(lambda: _strange(parts.values(), around)).value,
        {name: type(module) for name, module in modules},
        attempt(lambda: forwards_of_classes(modules)).value or {},
        attempt(lambda: {} if any(map(is_comfyui, parts.values())) else settings_of(modules)).value or {},
        seconds if contents else None,
        sum(wanted[name].nbytes for name in known),
        unavailable,
    )


def _outlines(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, WeightOutline]]:
    """Each with its outline: those that are alike share one."""
    known: dict[WeightOutline, WeightOutline] = {}
    for name, weight in weights.items():
        outline = WeightOutline(weight.shape, weight.dtype, weight.device)
        yield name, known.setdefault(outline, outline)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The host's own tensors: let go of it when they have been looked at.

    Attributes:
        base: By name in the model's state dict, as it would be without any adapter.
        adapters: Of adapters inside the model, by name in its state dict as it is.
        wrapped: Names in `base` that the state dict has under another name, since an adapter wraps the layer.
        kept: Of ComfyUI's patchers, those in `base` that changes were merged into, as they were before.
    """

    base: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    wrapped: frozenset[str] = field(default_factory=frozenset)
    kept: Mapping[str, KeptWeight] = field(default_factory=dict)

    @property
    def unpatched(self) -> dict[str, Tensor]:
        """As `base`, without what ComfyUI merged: clones share one model, and it holds the changes of only one."""
        return {name: self.kept[name].weight if name in self.kept else w for name, w in self.base.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ModelPatches:
    """All changes on what a host calls its UNet or CLIP. It holds the host's own tensors.

    Attributes:
        patches: In the order in which the parts hold them.
        unavailable: By part ("model" for a single one), why it could not be read.
    """

    patches: tuple[AppliedPatch, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def by_key(self) -> dict[str, list[AppliedPatch]]:
        """The changes of each weight."""
        return _grouped((patch.key, patch) for patch in self.patches)

    def by_source(self) -> dict[str, list[AppliedPatch]]:
        """The changes of each LoRA."""
        return _grouped((patch.source or UNNAMED, patch) for patch in self.patches)


def _others(weights: Weights, since: ModelSnapshot | None, seen: Collection[str]) -> dict[str, Tensor]:
    """The weights that are not looked at in full: all of a baseline, later those that it has samples of."""
    unpatched = weights.unpatched
    keys: Collection[str] = unpatched if since is None else since.samples
    return {key: unpatched[key] for key in keys if key not in seen and key in unpatched}


def _modules(parts: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, part in parts.items():
        for name, module in adapted_modules(module_of(part)):
            yield prefix + name, module


def _marked(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Those that may have something around their forward passes."""
    for name, module in modules:
        held = vars(module)
        if "forward" in held or held.get("_forward_hooks") or held.get("_forward_pre_hooks"):
            yield name, module


def _forwards(parts: Iterable[object], modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, str]]:
    """What is put around forward passes, by its name: hosts put their own off and on again."""
    for name, around in _around_forwards(parts, modules):
        yield name, _name_of(around)


def _strange(parts: Iterable[object], modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    strange = (each for each in _around_forwards(parts, modules) if not is_of_host(each[1]))
    name, around = next(strange, ("", None))
    if around is None:
        return None
    where = name or "the model"
    return f"{_name_of(around)} stands around the forward pass of {where}, and only its author knows what it does"


def _name_of(around: object) -> str:
    function = getattr(around, "func", around)
    return str(getattr(function, "__qualname__", type(function).__name__))


def _around_forwards(
    parts: Iterable[object], modules: Iterable[tuple[str, nn.Module]]
) -> Iterator[tuple[str, object]]:
    bypasses = {bypass for part in parts for bypass in bypasses_in_place(part)}
    for name, module in modules:
        held = vars(module)
        hooks = (*held.get("_forward_hooks", {}).values(), *held.get("_forward_pre_hooks", {}).values())
        for around in (*hooks, *_replaced_forward(module, held.get("forward"), bypasses)):
            yield name, around


def _detours(
    parts: Mapping[str, object], modules: Iterable[tuple[str, nn.Module]]
) -> Iterator[tuple[str, str]]:
    """What modules run in place of their layers, but for ComfyUI's bypasses, which are read of the patcher that they are of."""
    bypasses = {bypass for part in parts.values() for bypass in bypasses_in_place(part)}
    for name, module in modules:
        forward = vars(module).get("forward")
        if forward is not None and [*_replaced_forward(module, forward, bypasses)]:
            why = detour_of(module)
            if why is not None:
                yield name, f"the forward pass of {name or 'the model'} is {why}"
    for prefix, part in parts.items():
        whole = module_of(part)
        why = None if whole is None else graph_beside(whole)
        if why is not None:
            yield prefix.rstrip("."), f"{why}, and which of the two runs is not known"
        for name, reads in weight_readers(whole).items() if whole is not None else ():
            yield f"{prefix}{name}", reads


def _replaced_forward(module: nn.Module, forward: object, bypasses: Collection[int]) -> Iterator[object]:
    """What stands in place of a module's method, but for bypasses that are read and the method itself.

    Hosts leave the method on the module where they took something off.
    """
    while id(holder := attribute(forward, "__self__")) in bypasses:
        forward = attribute(holder, "original_forward")
    is_own = holder is module and attribute(forward, "__func__") is attribute(type(module), "forward")
    if forward is not None and not is_own:
        yield forward


def _grouped(named: Iterable[tuple[str, AppliedPatch]]) -> dict[str, list[AppliedPatch]]:
    groups: dict[str, list[AppliedPatch]] = {}
    for name, patch in named:
        groups.setdefault(name, []).append(patch)
    return groups


def _patch_count(model: object, applied: ModelPatches) -> Reading[int]:
    patches = attribute(patcher_in(model), "patches")
    if isinstance(patches, Mapping):
        return attempt(lambda: len(patches))
    if applied.unavailable:
        return Reading(None, "; ".join(applied.unavailable.values()))
    return Reading(len(applied.by_key()))


def patcher_in(model: object) -> object:
    """ComfyUI's patcher: the model itself, or what its CLIP or VAE holds."""
    return model if isinstance(attribute(model, "patches"), Mapping) else attribute(model, "patcher")


def placement_of(model: object, weights: Weights) -> Placement:
    """Read where a model is."""
    patcher = patcher_in(model)
    inner = attribute(patcher, "model")
    named = [_device(_own_device(thing)) for thing in (model, inner)]
    device = next((place for place in named if place is not None), None)
    if device is None:
        device = _usual_device(weights.base.values())
    return Placement(device, *(_device(attribute(patcher, f"{name}_device")) for name in ("load", "offload")))


def _usual_device(tensors: Collection[Tensor]) -> torch.device | None:
    """Where most of their elements are; None without tensors."""
    if all(map(_IS_ON_CPU, tensors)):  # asked first, since devices are slowly compared
        return next((tensor.device for tensor in tensors), None)
    elements: Counter[tuple[str, int | None]] = Counter()
    devices: dict[tuple[str, int | None], torch.device] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        place = tensor.device
        name = place.type, place.index
        elements[name] += tensor.numel()
        devices[name] = place
    usual = most_common(elements)
    return None if usual is None else devices[usual]


_IS_ON_CPU: Final = attrgetter("is_cpu")


def _own_device(thing: object) -> object:
    """A module of diffusers looks through all its modules to answer for its device, so that modules are not asked."""
    is_module = issubclass(type(thing), nn.Module)  # `isinstance` asks the thing
    return attempt(lambda: vars(thing).get("device")).value if is_module else attribute(thing, "device")


def _device(value: object) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    return attempt(lambda: torch.device(value)).value if isinstance(value, str) else None


def identity_changes(before: ModelSnapshot, after: ModelSnapshot, same: bool | None) -> IdentityChanges:
    """Compare two moments."""
    known = before.kind is not None and after.kind is not None
    why = before.unavailable.get("class") or after.unavailable.get("class")
    old, new = before.patch_count, after.patch_count
    uuids = before.patches_uuid, after.patches_uuid
    return as_dict(
        IdentityChanges,
        model_cloned=Reading(None if same is None else not same, why),
        class_changed=Reading(before.kind != after.kind if known else None, why),
        patches_added=Reading(
            None if old is None or new is None else new - old,
            "the changes of one model could not be counted",
        ),
        uuid_changed=Reading(
            None if None in uuids else bool(uuids[0] != uuids[1]),
            after.unavailable.get("patches_uuid", "there is no model to compare with"),
        ),
        original_patch_count=Reading(old, before.unavailable.get("patches_count")),
        modified_patch_count=Reading(new, after.unavailable.get("patches_count")),
        original_class=Reading(before.class_name, before.unavailable.get("class")),
        modified_class=Reading(after.class_name, after.unavailable.get("class")),
    )


def is_same(before: ModelSnapshot, modified: object) -> bool | None:
    """Whether a model is the one that was captured; None if there is none or was none.

    The weak reference says so even when another object has been given a dead one's `id()`. Lists and mappings take
    none, and are the models in them.
    """
    if before.model_id is None or modified is None:
        return None
    if before.reference is not None:
        return before.reference() is modified
    if before.model_id == id(modified):
        return True
    now = attempt(lambda: parts_of(modified, before.model_type)).value or {}
    if not now or before.parts.keys() != now.keys():
        return False
    return all(held is not None and held() is now[name] for name, held in before.parts.items())


def placement_changes(before: ModelSnapshot, after: ModelSnapshot) -> PlacementChanges:
    """Compare two moments of a model; a text encoder has three more keys, `clip_…`."""
    changes: dict[str, Any] = {}
    why_unknown = {**before.unavailable, **after.unavailable}
    unavailable: dict[str, str] = {}
    names = {"device": "model_device", "load_device": "load_device", "offload_device": "offload_device"}
    for kind, name in names.items():
        old, new = getattr(before.placement, kind), getattr(after.placement, kind)
        figures = {
            f"{name}_changed": None if old is None or new is None else old != new,
            f"original_{kind}": None if old is None else str(old),
            f"modified_{kind}": None if new is None else str(new),
        }
        if is_text(after.model_type):
            of_clip = "clip_model_device" if kind == "device" else f"clip_patcher_{kind}"
            figures[of_clip] = figures[f"modified_{kind}"]
        why = why_unknown.get(kind, why_unknown.get("device", "its device is unknown"))
        unavailable |= {figure: why for figure, value in figures.items() if value is None}
        changes |= figures
    changes["unavailable"] = unavailable
    return cast(PlacementChanges, changes)


def weights_in(model: object, model_type: str) -> Weights:
    """All weights of what a host calls its UNet or CLIP. No hook or method of the modules is called.

    Parameters and those buffers that a state dict has, under dotted names; each name once, also where several
    are one tensor. What joined projections run (`fuse_qkv_projections`) goes by the names of those that they were joined of.
    """
    base: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    wrapped: set[str] = set()
    kept: dict[str, KeptWeight] = {}
    for prefix, part in parts_of(model, model_type).items():
        module = module_of(part)
        kept |= {prefix + name: weight for name, weight in kept_weights(part).items()}
        named = _namer(module)
        rows, joined = joined_weights(module)
        for (start, path, in_adapter, is_wrapped), own, tensor in (
            () if module is None else _tensors_in(module)
        ):
            if joined and id(tensor) in joined:
                continue
            if in_adapter:
                adapters[f"{prefix}{path}{own}"] = tensor
                continue
            name = prefix + named(start + own)
            base[name] = rows.get(id(tensor), tensor) if rows else tensor
            if is_wrapped:
                wrapped.add(name)
    return Weights(base, adapters, frozenset(wrapped), kept)


_Place = tuple[str, str, bool, bool]
"""Where a module is: the name without wrappers and the path with them, as they stand before those of its tensors; whether it
is part of an adapter; whether it is inside of what an adapter wraps."""


def _tensors_in(module: nn.Module) -> Iterator[tuple[_Place, str, Tensor]]:
    """Each tensor with its module's place and its own name."""
    tree = tree_of(module)
    placed: list[tuple[_Place, int]] = tree.derive("places of tensors", lambda: _places(tree))
    indices: list[int] = tree.derive("where tensors may be", lambda: [index for _, index in placed])
    for at, name, tensor in tensors_at(tree, indices):
        yield placed[at][0], name, tensor


def _places(tree: ModuleTree) -> "list[tuple[_Place, int]]":
    shape = tree.shape
    if shape.has_repeats:
        indices = tree.indices()
        walked = ((place, indices.get(id(module))) for place, module in _walk(tree.modules[0]))
        return [(place, index) for place, index in walked if index is not None]
    around = {parent for parent, own in zip(shape.parents, shape.own_names, strict=True) if own in _WRAPPED}
    wrapping = {index for index in around if hasattr(type(tree.modules[index]), "adapter_layer_names")}
    places = [("", "", False, False)]
    for parent, own in zip(shape.parents[1:], shape.own_names[1:], strict=True):
        name, path, in_adapter, is_wrapped = places[parent]
        if parent in wrapping and own in _WRAPPED:
            places.append((name, f"{path}{own}.", in_adapter, True))
        elif parent in wrapping:
            places.append((f"{name}{own}.", f"{path}{own}.", True, is_wrapped))
        else:
            inner = name if own in _TRANSPARENT else f"{name}{own}."
            places.append((inner, f"{path}{own}.", in_adapter, is_wrapped))
    for index in wrapping:  # what such a layer has itself is an adapter's
        name, path, _, is_wrapped = places[index]
        places[index] = name, path, True, is_wrapped
    return [*zip(places, range(len(places)), strict=True)]


def _walk(module: nn.Module) -> Iterator[tuple[_Place, nn.Module]]:
    """Each module as often as it occurs."""
    waiting: list[tuple[_Place, nn.Module]] = [(("", "", False, False), module)]
    while waiting:
        (name, path, in_adapter, is_wrapped), module = waiting.pop()
        children = children_of(module)
        wraps = hasattr(type(module), "adapter_layer_names") and any(own in children for own in _WRAPPED)
        yield (name, path, in_adapter or wraps, is_wrapped), module
        for own, child in reversed([*children.items()]):
            is_inner = wraps and own in _WRAPPED
            inner = name if is_inner or own in _TRANSPARENT else f"{name}{own}."
            is_adapter = in_adapter or (wraps and not is_inner)
            waiting.append(((inner, f"{path}{own}.", is_adapter, is_wrapped or is_inner), child))


def _namer(module: nn.Module | None) -> Callable[[str], str]:
    """Takes off names what PEFT's and data parallelism's classes put around a whole model."""
    classes = {base.__name__ for base in type(module).__mro__}
    if classes.isdisjoint((*_REPLICATING, "PeftModel")):
        return str
    replicated = _REPLICATED if classes.intersection(_REPLICATING) else ""
    by_peft = _BY_PEFT if "PeftModel" in classes else ""
    return lambda name: name.removeprefix(replicated).removeprefix(by_peft)


def weights_nbytes(weights: Weights) -> int | None:
    """Bytes of all weights and adapters, each tensor once; None without any."""
    distinct = {id(tensor): tensor for tensor in (*weights.base.values(), *weights.adapters.values())}
    return sum(tensor.nbytes for tensor in distinct.values()) if distinct else None


def read_model_patches(model: object, model_type: str = "") -> ModelPatches:
    """Read the changes of ComfyUI's patchers and PEFT's layers. Never raises."""
    parts = attempt(lambda: parts_of(model, model_type))
    if parts.value is None:
        return ModelPatches(unavailable={"model": parts.reason or "unknown"})
    patches: list[AppliedPatch] = []
    unavailable: dict[str, str] = {}
    for prefix, part in parts.value.items():
        reading = _read_part(part)
        if reading.value is None:
            unavailable[prefix.rstrip(".") or "model"] = reading.reason or "unknown"
        else:
            patches += [
                replace(patch, key=prefix + patch.key) if prefix else patch for patch in reading.value
            ]
    return ModelPatches(tuple(patches), unavailable)


def _read_part(part: object) -> Reading[tuple[AppliedPatch, ...]]:
    by_comfyui = attempt(lambda: is_comfyui(part)).value
    reading = attempt(lambda: read_patches(part) if by_comfyui else read_adapters(module_of(part)))
    return Reading(None, reading.reason) if reading.value is None else reading.value


def parts_of(model: object, model_type: str) -> dict[str, object]:
    """The models that carry weights, by what their weights' names begin with ("" for a single one).

    Args:
        model: A module, a ComfyUI patcher or CLIP, a mapping or list of them, or a diffusers pipeline.
        model_type: Such as "UNet" or "CLIP": which components of a pipeline are meant.
    """
    if model is None:
        return {}
    if isinstance(model, Mapping):
        return {f"{name}.": part for name, part in model.items() if _carries_weights(part)}
    if isinstance(model, list | tuple):
        named = {
            _numbered("text_encoder" if is_text(model_type) else "unet", i): m for i, m in enumerate(model)
        }
        return {f"{name}.": part for name, part in named.items() if _carries_weights(part)}
    components = components_of(model)
    if components:
        return _pipeline_parts(components, loadable_parts(model), model_type)
    return {"": model}


def _carries_weights(part: object) -> bool:
    return isinstance(part, nn.Module) or is_comfyui(part)


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index + 1}"


def _pipeline_parts(
    components: Mapping[str, object], loadable: Collection[str], model_type: str
) -> dict[str, object]:
    names = [name for name in components if _TEXT_COMPONENTS.match(name)]
    if not is_text(model_type):
        texts = {*names}
        names = [n for n in components if _DENOISER_COMPONENTS.match(n) or (n in loadable and n not in texts)]
    parts = {name: components[name] for name in names if _carries_weights(components[name])}
    if len(parts) == 1:
        return {"": next(iter(parts.values()))}
    return {f"{name}.": part for name, part in parts.items()}


def module_of(part: object) -> nn.Module | None:
    """The module whose weights have the names that changes are known by."""
    if is_comfyui(part):
        return weights_of(part).value
    if isinstance(part, nn.Module):
        return part
    held = getattr(part, "model", None)
    return held if isinstance(held, nn.Module) else None


def is_text(model_type: str) -> bool:
    """Whether a model's type names a text encoder."""
    return _TEXT_TYPES.search(model_type) is not None
