"""How far a patcher's changes have come: read from what is kept, not from what is registered."""

import sys
from collections.abc import Iterator

from sigmascope.probes.adapters.comfyui.found import Standing
from sigmascope.probes.adapters.guarded import attribute, has, lookup, mapping, sequence

_MOST_PARENTS = 64


class Standings:
    """Where each entry of one patcher stands.

    Merging is lazy: entries are registered until the model is loaded. Clones share the model and what was
    kept of its weights, so a kept weight alone does not say whose changes were merged. The model names the
    set of changes that it holds (since December 2024); the patcher of that set is this one, one that it was
    cloned from, or one that ComfyUI has loaded, and clones share the entries themselves.
    """

    def __init__(self, patcher: object) -> None:
        self._model = attribute(patcher, "model")
        self._kept = mapping(patcher, "backup")
        self._names_its_set = has(self._model, "current_weight_patches_uuid")
        self._loaded = self._loaded_patcher(patcher) if self._names_its_set else None
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
        if not self._names_its_set:
            return self._by_what_is_kept(key)
        if self._loaded is None or not _holds(self._loaded_patches.get(key), entry):
            return Standing("registered", self._why_not_loaded())
        return self._of_loaded(key, module)

    def _by_what_is_kept(self, key: str) -> Standing:
        if key in self._kept:
            return Standing("merged", "the original weight is kept; this version does not say whose changes")
        return Standing("registered", "no original weight is kept and no function is set")

    def _why_not_loaded(self) -> str:
        if attribute(self._model, "current_weight_patches_uuid") is None:
            return "the model has not been loaded with any changes"
        return "the model holds another set of changes; this one comes when it is loaded next"

    def _of_loaded(self, key: str, module: object) -> Standing:
        casts = attribute(module, "comfy_cast_weights") is not None
        dynamic = _is_dynamic(self._loaded)
        if dynamic and not casts:
            return Standing("failed", "dynamic loading changes no weight of a layer that does not cast")
        if key in self._kept:
            return Standing("merged", "the original weight is kept, and the model holds this set of changes")
        if dynamic:
            return Standing("registered", "its merged weight was let go of to free memory")
        if attribute(self._model, "model_lowvram"):
            return Standing("registered", "the model is loaded in part, and this layer is not")
        return Standing(
            "failed", "the model was loaded with this set and neither kept nor wrapped this weight"
        )

    def _loaded_patcher(self, patcher: object) -> object | None:
        """The patcher whose changes the model holds."""
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


def _holds(entries: object, entry: object) -> bool:
    return any(held is entry for held in sequence(entries))


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


def _is_dynamic(patcher: object) -> bool:
    try:
        return bool(patcher.is_dynamic())  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - absent before 2026, or the host's own trouble
        return False
