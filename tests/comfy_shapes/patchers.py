"""`ModelPatcher` as ComfyUI 0.7 and 0.18 shape it, with changes that merge when they are loaded.

Written from what their attributes hold; the marked tests hold them to a real checkout.
"""

import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from tests.comfy_shapes.adapters import change_of
from torch import Tensor, nn


class Dimension(NamedTuple):
    """An entry of `backup`."""

    weight: Tensor
    inplace_update: bool


class LowVramPatch:
    """What stands in `weight_function` where a layer is not loaded."""

    def __init__(self, key: str, patches: dict[str, list[Any]]) -> None:
        self.key = key
        self.patches = patches

    def __call__(self, weight: Tensor) -> Tensor:
        return merged(self.patches[self.key], weight)


class ModelPatcher:
    """As in 0.7 and 0.18: entries of five, kept weights with names, functions in lists, hooks, parents."""

    model: Any

    def __init__(self, model: nn.Module, size: int = 0) -> None:
        self.model = model
        self.size = size
        self.patches: dict[str, list[Any]] = {}
        self.backup: dict[str, Any] = {}
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.load_device = torch.device("cpu")
        self.offload_device = torch.device("cpu")
        self.patches_uuid = uuid.uuid4()
        self.model.device = self.offload_device
        self._version_attributes()

    def _version_attributes(self) -> None:
        self.parent: ModelPatcher | None = None
        self.attachments: dict[str, Any] = {}
        self.additional_models: dict[str, Any] = {}
        self.callbacks: dict[str, Any] = {}
        self.wrappers: dict[str, Any] = {}
        self.injections: dict[str, Any] = {}
        self.is_injected = False
        self.weight_wrapper_patches: dict[str, Any] = {}
        self.hook_patches: dict[Any, dict[str, list[Any]]] = {}
        self.hook_backup: dict[str, tuple[Tensor, torch.device]] = {}
        self.current_hooks: Any = None
        self.forced_hooks: Any = None
        if not hasattr(self.model, "current_weight_patches_uuid"):
            self.model.current_weight_patches_uuid = None
            self.model.model_lowvram = False

    def clone(self) -> Self:
        """Another patcher of the same model: what was kept is shared, lists of entries are copied."""
        other = type(self)(self.model, self.size)
        other.patches = {key: entries[:] for key, entries in self.patches.items()}
        other.patches_uuid = self.patches_uuid
        other.backup = self.backup
        if hasattr(self, "parent"):
            other.parent = self
            other.hook_backup = self.hook_backup
        return other

    def is_clone(self, other: object) -> bool:
        return getattr(other, "model", None) is self.model

    def entry(self, strength: float, value: Any, strength_model: float, place: tuple[Any, ...]) -> Any:
        offset, function = (*place, None, None)[:2]
        return (strength, value, strength_model, offset, function)

    def add_patches(
        self, patches: Mapping[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Register changes; keys may be (name, offset[, function]). Returns those that the model has."""
        names, added = self.model.state_dict().keys(), []
        for place, value in patches.items():
            key, *rest = (place,) if isinstance(place, str) else place
            if key in names:
                entry = self.entry(strength_patch, value, strength_model, tuple(rest))
                self.patches.setdefault(key, []).append(entry)
                added.append(place)
        self.patches_uuid = uuid.uuid4()
        return added

    def keep(self, weight: Tensor) -> Any:
        return Dimension(weight, False)

    def load(self, *, lowvram: bool = False) -> None:
        """Merge every change, or with `lowvram` hang functions on the layers that cast."""
        for name, module in self.model.named_modules():
            if name and _has_layers(module):
                continue
            casts = lowvram and hasattr(module, "comfy_cast_weights")
            for part, _ in module.named_parameters(recurse=False):
                key = f"{name}.{part}"
                if key in self.patches:
                    self._hang(module, part, key) if casts else self._merge(module, part, key)
        if hasattr(self.model, "current_weight_patches_uuid"):
            self.model.current_weight_patches_uuid = self.patches_uuid
            self.model.model_lowvram = lowvram

    def unpatch_model(self) -> None:
        for key, kept in self.backup.items():
            module, part = _owner(self.model, key)
            setattr(module, part, nn.Parameter(getattr(kept, "weight", kept), requires_grad=False))
        self.backup.clear()
        if hasattr(self.model, "current_weight_patches_uuid"):
            self.model.current_weight_patches_uuid = None

    def _merge(self, module: nn.Module, part: str, key: str) -> None:
        weight = getattr(module, part)
        self.backup.setdefault(key, self.keep(weight))
        changed = merged(self.patches[key], weight.detach().clone())
        setattr(module, part, nn.Parameter(changed, requires_grad=False))

    def _hang(self, module: nn.Module, part: str, key: str) -> None:
        setattr(module, f"{part}_function", [LowVramPatch(key, self.patches)])


def merged(entries: list[Any], weight: Tensor) -> Tensor:
    """The weight after each entry in turn; what does not fit leaves it as it was, as in ComfyUI."""
    for strength, value, strength_model, *rest in entries:
        offset = rest[0] if rest else None
        part = weight if offset is None else weight.narrow(*offset)
        part *= strength_model
        try:
            part += change_of(value, part, strength)
        except RuntimeError:
            continue
    return weight


def _has_layers(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, part = key.rpartition(".")
    return model.get_submodule(path), part
