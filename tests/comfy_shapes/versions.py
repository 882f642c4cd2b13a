"""`ModelPatcher` as other versions and forks of ComfyUI shape it, and `CLIP`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.comfy_shapes.patchers import LowVramPatch, ModelPatcher, merged
from torch import Tensor, nn


class PatchTuple(NamedTuple):
    """An entry of `patches` where a fork names its parts."""

    strength_patch: float
    patch: Any
    strength_model: float
    offset: tuple[int, int, int] | None
    function: Callable[[Tensor], Tensor] | None


class OldLowVramPatch:
    """The same before September 2024: it holds the patcher."""

    def __init__(self, key: str, model_patcher: "ModelPatcher") -> None:
        self.key = key
        self.model_patcher = model_patcher

    def __call__(self, weight: Tensor) -> Tensor:
        return merged(self.model_patcher.patches[self.key], weight)


class NamedModelPatcher(ModelPatcher):
    """A fork's: its entries have names."""

    def entry(self, strength: float, value: Any, strength_model: float, place: tuple[Any, ...]) -> Any:
        return PatchTuple(*super().entry(strength, value, strength_model, place))


class DynamicModelPatcher(ModelPatcher):
    """As in 0.18 with dynamic loading: functions beside the layers, casting layers alone are changed."""

    def is_dynamic(self) -> bool:
        return True

    def load(self, *, lowvram: bool = False) -> None:
        super().load(lowvram=True)

    def _hang(self, module: nn.Module, part: str, key: str) -> None:
        setattr(module, f"{part}_lowvram_function", LowVramPatch(key, self.patches))

    def _merge(self, module: nn.Module, part: str, key: str) -> None:
        self.backup.setdefault(key, self.keep(getattr(module, part)))  # cast and kept, not changed


class EarlyModelPatcher(ModelPatcher):
    """As from September to November 2024: no name of the set that is loaded, one function, no parents, no hooks."""

    def _version_attributes(self) -> None:
        self.model.model_lowvram = False

    def _hang(self, module: nn.Module, part: str, key: str) -> None:
        setattr(module, f"{part}_function", LowVramPatch(key, self.patches))


class OldModelPatcher(EarlyModelPatcher):
    """As until June 2024: entries of three, and tensors in `backup`."""

    def entry(self, strength: float, value: Any, strength_model: float, place: tuple[Any, ...]) -> Any:
        return (strength, value, strength_model)

    def keep(self, weight: Tensor) -> Any:
        return weight

    def _hang(self, module: nn.Module, part: str, key: str) -> None:
        setattr(module, f"{part}_function", OldLowVramPatch(key, self))


class CLIP:
    """A text encoder: the patcher, the model under it again, a tokenizer."""

    def __init__(self, patcher: ModelPatcher) -> None:
        self.patcher = patcher
        self.cond_stage_model = patcher.model
        self.tokenizer = None
        self.layer_idx = None

    def clone(self) -> "CLIP":
        return CLIP(self.patcher.clone())

    def add_patches(self, patches: Mapping[Any, Any], *strengths: float) -> list[Any]:
        return self.patcher.add_patches(patches, *strengths)


PATCHERS = (ModelPatcher, NamedModelPatcher, EarlyModelPatcher, OldModelPatcher)
"""Those that merge. `DynamicModelPatcher` never does."""


def load_lora_for_models(
    model: ModelPatcher | None, clip: CLIP | None, loaded: Mapping[Any, Any], *strengths: float
) -> tuple[ModelPatcher | None, CLIP | None]:
    """Register one file's changes on clones, as the loader node does with what it mapped to keys."""
    new_model, new_clip = (None if thing is None else thing.clone() for thing in (model, clip))
    for thing, strength in zip((new_model, new_clip), strengths, strict=True):
        if thing is not None:
            thing.add_patches(loaded, strength)
    return new_model, new_clip  # type: ignore[return-value]
