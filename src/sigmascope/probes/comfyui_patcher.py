"""What ComfyUI's `ModelPatcher` and `CLIP` hold, in every shape that their versions have given it.

`read_patches` lists every change, with how far it has come and what was registered together. Nothing of ComfyUI is
imported: its objects are known by what they have. Nothing is called that could load, merge, move or wrap anything, and
no mark is left on a patcher, whose clones compare their attributes.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from sigmascope.probes.applied_patch import AppliedPatch, Standing
from sigmascope.probes.comfyui_weight_adapter import (
    PatcherEntry,
    applied,
    is_list_of_patches,
    settled,
)
from sigmascope.probes.models import named_modules_in
from sigmascope.probes.reading import (
    Reading,
    attempt,
    attribute,
    has,
    lookup,
    mapping,
    number,
    sequence,
)

__all__ = ["KeptWeight", "is_comfyui", "kept_weights", "original_weight", "read_patches", "weights_of"]

_MARKS = ("patches_uuid", "backup", "add_patches", "load_device", "offload_device")
_MOST_HOLDERS = 3
_MOST_PARENTS = 64

# Where a change of an object, a hook, a function or a bypass stands.
_REPLACED = Standing("merged", "the original object is kept")
_TO_BE_REPLACED = Standing("registered", "to be replaced when the model is loaded")
_IN_FORCE = Standing("merged", "by an active hook")
_WAITING_FOR_SAMPLING = Standing("registered", "by a hook that is active while its conditioning is sampled")
_TO_BE_WRAPPED = Standing("registered", "to be wrapped around the weight when the model is loaded")
_BESIDE = Standing("lazy", "beside the layer in each forward pass, its weight unchanged")
_WAITING_FOR_LOADING = Standing("registered", "to be put beside the layer when the model is loaded")

Place = tuple[str, int]
_Group = tuple[str, int, int]  # what the token is of, the token, and how often it had come before


def read_patches(model: object) -> Reading[tuple[AppliedPatch, ...]]:
    """Every change that a `ModelPatcher`, or the patcher of a `CLIP`, has for its model's weights.

    Never raises. Nothing is loaded, merged, moved or copied. An entry that cannot be read is there as
    "unknown" with the reason.

    Returns:
        One `AppliedPatch` for an entry of `patches`, by key in the host's order; before them weights that are
        replaced as objects, after them the entries of hooks, functions around weights, and bypasses. Two kinds of
        entries are several, with one `index`: a model merge (its weight, and each change upon that) and
        `model_as_lora` (the other model's weight, less the original). ComfyUI keeps no names: `source` is
        "LoRA 1", "LoRA 2" …, the same for what was registered together.
    """
    patcher = patcher_of(model)
    if patcher is None:
        return Reading(None, f"{type(model).__name__} is not a patcher and has no patches")
    return attempt(lambda: tuple(_patches(patcher)))


def _patches(patcher: Any) -> Iterator[AppliedPatch]:
    readers = (replaced, _registered, hooked, wrapped, bypassed)
    entries = [entry for read in readers for entry in read(patcher)]
    counts = Counter(entry.key for entry in entries)
    kept = kept_weights(patcher)
    weights = {key: (original_weight(patcher, key, kept), weight_at(patcher.model, key)) for key in counts}
    indices: Counter[str] = Counter()
    for entry in entries:
        original, now = weights[entry.key]
        for patch in applied(entry, indices[entry.key], original):
            alone = counts[entry.key] == 1 and (entry.key not in kept or kept[entry.key].is_own)
            yield settled(patch, original, now, alone=alone)
        indices[entry.key] += 1


def identities_of(patcher: Any) -> dict[Place, int]:
    """The identity of each entry of `patches`, by its weight and `AppliedPatch.index`."""
    before = Counter(entry.key for entry in replaced(patcher))
    return {
        (str(key), before[str(key)] + index): id(kept)
        for key, entries in list(patcher.patches.items())
        for index, kept in enumerate(sequence(entries))
    }


def replaced(patcher: object) -> Iterator[PatcherEntry]:
    """Tensors among `object_patches`, most of which are other things: a sampling, a dtype, a function."""
    kept = mapping(patcher, "object_patches_backup")
    for key, value in mapping(patcher, "object_patches").items():
        if isinstance(value, Tensor):
            standing = _TO_BE_REPLACED if key not in kept else _REPLACED
            yield PatcherEntry(key, (1.0, ("set", (value,)), 1.0, None, None), standing, "object patch")


def _registered(patcher: Any) -> Iterator[PatcherEntry]:
    standings = Standings(patcher)
    patches = {str(key): sequence(entries) for key, entries in list(patcher.patches.items())}
    sources = sources_of(patches)
    for key, entries in patches.items():
        for index, kept in enumerate(entries):
            yield PatcherEntry(key, kept, standings.of(key, kept), sources.get((key, index)))


class Standings:
    """How far each entry of one patcher has come.

    Merging is lazy: entries are registered until the model is loaded. Clones share the model and what was
    kept of its weights, so a kept weight alone does not say whose changes were merged. The model names the
    set of changes that it holds (since December 2024); the patcher of that set is this one, one that it was
    cloned from, or one that ComfyUI has loaded, and clones share the entries themselves.
    """

    def __init__(self, patcher: object) -> None:
        self._model = attribute(patcher, "model")
        self._kept = mapping(patcher, "backup")
        self._patches = mapping(patcher, "patches")
        self._names_its_set = has(self._model, "current_weight_patches_uuid")
        self._loaded = self._loaded_patcher(patcher)
        self._loaded_patches = mapping(self._loaded, "patches")

    def of(self, key: str, entry: object) -> Standing:
        """Where an entry of `patches[key]` stands.

        Args:
            key: The weight's name.
            entry: The host's own object, which is looked for where the host uses it.
        """
        module, name = owner_of(self._model, key)
        if any(_holds(lookup(patches, key), entry) for patches in lazy_patches(module, name)):
            return Standing("lazy", f"applied by a function of {type(module).__name__} in each forward pass")
        if any(_is_moved(held, entry) for held in _on_packed_weight(attribute(module, name), key)):
            return Standing(
                "lazy", f"applied to the dequantised weight of {type(module).__name__} in each forward pass"
            )
        if not self._names_its_set:
            return self._by_what_is_kept(key)
        if self._loaded is None or not _holds(self._loaded_patches.get(key), entry):
            return Standing("registered", self._why_not_loaded())
        return self._of_loaded(key, module)

    def is_own(self, key: str) -> bool:
        """Whether a weight whose original is kept holds exactly this patcher's changes: all of them, and no others."""
        own = sequence(self._patches.get(key))
        if self._loaded is None and not self._names_its_set:
            return bool(own)
        loaded = sequence(self._loaded_patches.get(key))
        return bool(own) and [*map(id, own)] == [*map(id, loaded)]

    def _by_what_is_kept(self, key: str) -> Standing:
        if key in self._kept:
            return Standing(
                "merged",
                "the original weight is kept; this ComfyUI version does not say which changes were merged",
            )
        return Standing("registered", "no original weight is kept and no function is set")

    def _why_not_loaded(self) -> str:
        if attribute(self._model, "current_weight_patches_uuid") is None:
            return "the model has not been loaded with any changes"
        return "the model holds another set of changes; the next load merges this one"

    def _of_loaded(self, key: str, module: object) -> Standing:
        casts = attribute(module, "comfy_cast_weights") is not None
        dynamic = _is_dynamic(self._loaded)
        if dynamic and not casts:
            return Standing("failed", "dynamic loading changes no weight of a layer that does not cast")
        if key in self._kept:
            return Standing("merged", "the original weight is kept, and the model holds this set of changes")
        if dynamic:
            return Standing("registered", "its merged weight was dropped to free memory")
        if attribute(self._model, "model_lowvram"):
            return Standing("registered", "the model is partly loaded, without this layer")
        return Standing(
            "failed", "the model was loaded with this set, but this weight was neither backed up nor wrapped"
        )

    def _loaded_patcher(self, patcher: object) -> object | None:
        """The patcher whose changes the model holds; None if there is none, or nobody says which."""
        if not self._names_its_set:
            return next(_loaded_by_comfyui(self._model), None)
        holding = attribute(self._model, "current_weight_patches_uuid")
        if holding is None:
            return None
        for candidate in (*_with_parents(patcher), *_loaded_by_comfyui(self._model)):
            if attribute(candidate, "patches_uuid") == holding:
                return candidate
        return None


def owner_of(model: object, key: str) -> tuple[object, str]:
    """The module that a weight belongs to, and the weight's name in it."""
    *path, name = key.split(".")
    for part in path:
        model = attribute(model, part)
    return model, name


def _holds(entries: object, entry: object) -> bool:
    return any(held is entry for held in sequence(entries))


def lazy_patches(module: object, name: str) -> Iterator[object]:
    """The patches that functions of a module apply to one of its weights.

    A function is a `LowVramPatch`: alone in `weight_function` until 2025, in a list there since, and in
    `weight_lowvram_function` where weights are loaded dynamically. Before September 2024 it holds the patcher
    in place of the patches.
    """
    held = attribute(module, f"{name}_function")
    functions = (*(sequence(held) or (held,)), attribute(module, f"{name}_lowvram_function"))
    for function in functions:
        if function is not None and attribute(function, "key") is not None:
            patches = attribute(function, "patches")
            yield attribute(attribute(function, "model_patcher"), "patches") if patches is None else patches


def is_for_another(patcher: object, key: str) -> bool:
    """Whether a layer changes its weight in each forward pass by other patches than a patcher's: another clone's."""
    module, name = owner_of(attribute(patcher, "model"), key)
    own = sequence(mapping(patcher, "patches").get(key))
    in_functions = [sequence(lookup(patches, key)) for patches in lazy_patches(module, name)]
    on_weight = [*_on_packed_weight(attribute(module, name), key)]
    return any([*map(id, held)] != [*map(id, own)] for held in in_functions) or (
        bool(on_weight) and not _is_moved(on_weight, own)
    )


def _on_packed_weight(weight: object, key: str) -> Iterator[object]:
    """The entries on a packed weight itself: ComfyUI-GGUF puts pairs (entries, key) there and keeps no original."""
    for pair in map(sequence, sequence(attribute(weight, "patches"))):
        if len(pair) > 1 and pair[1] == key:
            yield from sequence(pair[0])


def _is_moved(held: object, entry: object) -> bool:
    """Whether it is the entry, or made from it with its tensors on another device."""
    if held is entry:
        return True
    if isinstance(held, Tensor) and isinstance(entry, Tensor):
        is_elsewhere = held.device != entry.device
        return is_elsewhere and (held.shape, held.dtype) == (entry.shape, entry.dtype)
    parts, own = sequence(held), sequence(entry)
    if parts or own:
        return len(parts) == len(own) and all(map(_is_moved, parts, own))
    return number(held) is not None and number(held) == number(entry)


def _is_dynamic(patcher: Any) -> bool:
    return attempt(lambda: bool(patcher.is_dynamic())).value is True  # absent before 2026


def _with_parents(patcher: object) -> Iterator[object]:
    for _ in range(_MOST_PARENTS):
        if patcher is None:
            return
        yield patcher
        patcher = attribute(patcher, "parent")


def _loaded_by_comfyui(model: object) -> Iterator[object]:
    """The patchers of this model among those that ComfyUI's memory management has loaded."""
    management = sys.modules.get("comfy.model_management")
    for loaded in sequence(attribute(management, "current_loaded_models")):
        patcher = attribute(loaded, "model")
        if attribute(patcher, "model") is model:
            yield patcher


def sources_of(patches: Mapping[str, Sequence[Any]]) -> dict[Place, str]:
    """A name for each entry, the same for entries that were registered together: "LoRA 1" and so on.

    Adapters of one file share one set of `loaded_keys`; all entries of one call share the very number that is
    their strength. One call gives a weight, or a part of it, one entry: if the same trace is there twice, it
    was two calls.

    Returns:
        By key and the entry's index. Merged models are named "merged model 1" and so on.
    """
    groups = _groups_of(patches)
    strengths = _files_by_strength(patches, groups)
    joined = {place: strengths.get(group) or group for place, group in groups.items()}
    names: dict[_Group, str] = {}
    counts: dict[str, int] = {}
    for group in joined.values():
        if group not in names:
            word = "merged model" if group[0] == "merge" else "LoRA"
            counts[word] = counts.get(word, 0) + 1
            names[group] = f"{word} {counts[word]}"
    return {place: names[group] for place, group in joined.items()}


def _groups_of(patches: Mapping[str, Sequence[Any]]) -> dict[Place, _Group]:
    groups: dict[Place, _Group] = {}
    for key, entries in patches.items():
        seen: dict[object, int] = {}
        for index, entry in enumerate(entries):
            word, token = _trace_of(entry)
            again = (word, token, repr(_offset_of(entry)))
            groups[key, index] = (word, token, seen.get(again, 0))
            seen[again] = seen.get(again, 0) + 1
    return groups


def _trace_of(entry: object) -> tuple[str, int]:
    parts = sequence(entry)
    value = parts[1] if len(parts) > 1 else None
    loaded = attribute(value, "loaded_keys")
    if loaded is not None:
        return "file", id(loaded)
    word = "merge" if is_list_of_patches(value) else "call"
    return word, id(parts[0]) if parts else 0


def _offset_of(entry: object) -> object:
    parts = sequence(entry)
    return parts[3] if len(parts) > 3 else None


def _files_by_strength(
    patches: Mapping[str, Sequence[Any]], groups: Mapping[Place, _Group]
) -> dict[_Group, _Group]:
    """For entries that are not adapters, the one file whose adapters came with the very same strength."""
    files: dict[tuple[int, int], set[_Group]] = {}
    for (key, index), group in groups.items():
        if group[0] == "file":
            strength = sequence(patches[key][index])[0]
            files.setdefault((id(strength), group[2]), set()).add(group)
    only = {trace: next(iter(found)) for trace, found in files.items() if len(found) == 1}
    return {("call", *trace): group for trace, group in only.items()}


def hooked(patcher: object) -> Iterator[PatcherEntry]:
    """The changes in `hook_patches`. A hook's own strength multiplies those of its entries."""
    hooks = _hooks_in_force(patcher)
    kept = mapping(patcher, "hook_backup")
    for place, (ref, patches) in enumerate(mapping(patcher, "hook_patches").items()):
        hook = next((hook for hook in hooks if attribute(hook, "hook_ref") is ref), None)
        for key, entries in patches.items():
            standing = _IN_FORCE if hook is not None and key in kept else _WAITING_FOR_SAMPLING
            for entry in entries:
                yield PatcherEntry(key, _times(entry, hook), standing, f"hook {place + 1}")


def _hooks_in_force(patcher: object) -> tuple[Any, ...]:
    return sequence(attribute(attribute(patcher, "current_hooks"), "hooks"))


def _times(entry: Any, hook: object) -> object:
    """The entry with the strength that the host multiplies in for this moment of the schedule."""
    strength = number(attribute(hook, "strength"))
    if hook is None or strength is None or math.isclose(strength, 1.0):
        return entry
    own, *rest = entry
    return (own * strength, *rest)


def wrapped(patcher: object) -> Iterator[PatcherEntry]:
    """Functions in `weight_wrapper_patches` (since 2025), of which only the host knows what they do."""
    model = attribute(patcher, "model")
    for key, functions in mapping(patcher, "weight_wrapper_patches").items():
        module, name = owner_of(model, key)
        in_place = attribute(module, f"{name}_function")
        for function in sequence(functions):
            why = f"wrapped around the weight of {type(module).__name__} in each forward pass"
            standing = Standing("lazy", why) if _holds(in_place, function) else _TO_BE_WRAPPED
            yield PatcherEntry(key, (1.0, function, 1.0, None, None), standing, "weight wrapper")


def bypassed(patcher: object) -> Iterator[PatcherEntry]:
    """The adapters that a patcher's injections put beside layers.

    An injection is a pair of functions that share a manager, whose hooks each have a module, an adapter, its
    multiplier, and the module's own forward while they are in place.
    """
    hooks = list(_bypass_hooks(patcher))
    names = _module_names(attribute(patcher, "model")) if hooks else {}
    for position, hook in hooks:
        key = names.get(id(attribute(hook, "module")), "")
        standing = _WAITING_FOR_LOADING if attribute(hook, "original_forward") is None else _BESIDE
        entry = (attribute(hook, "multiplier"), attribute(hook, "adapter"), 1.0, None, None)
        yield PatcherEntry(f"{key}.weight", entry, standing, f"bypass {position}", bypass=True)


def _bypass_hooks(patcher: object) -> Iterator[tuple[int, object]]:
    for place, injections in enumerate(mapping(patcher, "injections").values(), 1):
        for injection in sequence(injections):
            for hook in _hooks_of(attribute(injection, "inject")):
                yield place, hook


def bypasses_of(model: object) -> frozenset[int]:
    """The identities of what `bypassed` reads of a model's injections."""
    return frozenset(id(hook) for _, hook in _bypass_hooks(patcher_of(model)))


def bypasses_in_place(model: object) -> frozenset[int]:
    """The same, and of the clones whose injections may be in place now: clones share the model's layers."""
    patcher = patcher_of(model)
    clones = (*_with_parents(patcher), *_loaded_by_comfyui(attribute(patcher, "model")))
    return frozenset(id(hook) for clone in clones for _, hook in _bypass_hooks(clone))


def _hooks_of(function: Any) -> list[object]:
    """The hooks of the manager that a function closes over."""
    for cell in sequence(attribute(function, "__closure__")):
        hooks = sequence(attribute(attribute(cell, "cell_contents"), "hooks"))
        if hooks and all(attribute(hook, "adapter") is not None for hook in hooks):
            return list(hooks)
    return []


def _module_names(model: object) -> dict[int, str]:
    if not isinstance(model, nn.Module):
        return {}
    return {id(module): name for name, module in named_modules_in(model)}


def weight_at(module: object, key: str) -> Tensor | None:
    """The parameter or buffer of a dotted name."""
    held = attribute(*owner_of(module, key))
    return held if isinstance(held, Tensor) else None


def is_comfyui(model: object) -> bool:
    """Whether it is ComfyUI's: a `ModelPatcher`, or a `CLIP` or `VAE` that holds one."""
    return patcher_of(model) is not None


def weights_of(model: object) -> Reading[nn.Module]:
    """The module whose state dict has the names that the patches are kept under."""
    patcher = patcher_of(model)
    if patcher is None:
        return Reading(None, f"{type(model).__name__} is not a patcher and has no patches")
    inner = attribute(patcher, "model")
    if not isinstance(inner, nn.Module):
        return Reading(None, f"the patcher's model is {type(inner).__name__}, not a module")
    return Reading(inner)


class KeptWeight(NamedTuple):
    """The original of a weight that the model holds changed.

    Attributes:
        weight: The host's own tensor, not a copy.
        is_own: Whether the model holds this patcher's version of the weight, and not a clone's.
    """

    weight: Tensor
    is_own: bool


def kept_weights(model: object) -> dict[str, KeptWeight]:
    """The originals of the weights that a patcher's model holds changed, by name in `weights_of(model)`'s state dict.

    Clones share one model, which holds the changes of the clone that was loaded last. That clone keeps the originals;
    since 2024, all clones share them.
    """
    patcher = patcher_of(model)
    return {} if patcher is None else attempt(lambda: _kept_weights(patcher)).value or {}


def _kept_weights(patcher: object) -> dict[str, KeptWeight]:
    inner, standings = attribute(patcher, "model"), Standings(patcher)
    holders = [
        candidate
        for candidate in (*_with_parents(patcher), *_loaded_by_comfyui(inner))
        if attribute(candidate, "model") is inner
    ]
    merged, by_hooks, objects_kept = (
        _kept_by(holders, name) for name in ("backup", "hook_backup", "object_patches_backup")
    )
    objects = mapping(patcher, "object_patches")
    hooks = attempt(lambda: {kept.key for kept in hooked(patcher) if kept.standing.state == "merged"})

    def is_own(key: str) -> bool:
        return (
            (key not in merged or standings.is_own(key))
            and (key not in by_hooks or key in (hooks.value or ()))
            and (key not in objects_kept or objects.get(key) is weight_at(inner, key))
        )

    # A hook changes the weight with everything else merged, so what was kept of that is older.
    kept = by_hooks | merged | objects_kept
    return {
        key: KeptWeight(weight, attempt(lambda key=key: is_own(key)).value is True)  # type: ignore[misc]
        for key, weight in kept.items()
    }


def _kept_by(holders: Iterable[object], name: str) -> dict[str, Tensor]:
    held = {id(attribute(holder, name)): mapping(holder, name) for holder in holders}
    kept = {str(key): kept_weight(entry) for entries in held.values() for key, entry in entries.items()}
    return {key: weight for key, weight in kept.items() if weight is not None}


def original_weight(model: object, key: str, kept: Mapping[str, KeptWeight] | None = None) -> Tensor | None:
    """The weight before anything was merged into it: the host's own tensor, not a copy.

    Args:
        model: A patcher, or what holds one.
        key: The weight's name in the state dict of `weights_of(model)`.
        kept: Its `kept_weights`, for a caller that asks for many weights.

    Returns:
        None if the model has no such weight.
    """
    found = (kept_weights(model) if kept is None else kept).get(key)
    return weight_at(attribute(patcher_of(model), "model"), key) if found is None else found.weight


def kept_weight(kept: object) -> Tensor | None:
    """The tensor in an entry of `backup` or `hook_backup`.

    Until August 2024 the entry was the tensor; since then (weight, inplace_update) with names. Hooks keep
    (weight, device).
    """
    held = kept if isinstance(kept, Tensor) else attribute(kept, "weight")
    if held is None and isinstance(kept, tuple) and kept:
        held = kept[0]
    return held if isinstance(held, Tensor) else None


def patcher_of(model: object) -> Any:
    """The patcher that a model is or holds, or None."""
    return attempt(lambda: _patcher_of(model)).value  # even asking for the class of a host's object may raise


def _patcher_of(model: object) -> Any:
    for _ in range(_MOST_HOLDERS):
        if model is None or isinstance(model, type):
            return None
        if isinstance(attribute(model, "patches"), Mapping) and _is_marked(model):
            return model
        model = attribute(model, "patcher")
    return None


def _is_marked(model: object) -> bool:
    return attribute(model, "model") is not None and any(
        attribute(model, mark) is not None for mark in _MARKS
    )
