"""What a host hands over as its UNet or its CLIP: one model, several, or a whole pipeline."""

import re
from collections.abc import Mapping
from typing import Final

from torch import nn

from sigmascope.probes.adapters.comfyui import is_comfyui, weights_of

_TEXT: Final = re.compile(r"clip|text|^te\d?$|t5|encoder", re.IGNORECASE)
_TEXT_COMPONENTS: Final = re.compile(r"^text_encoder(_\d+)?$")
_DENOISER_COMPONENTS: Final = re.compile(r"^(unet|transformer|denoiser|prior|decoder)(_\d+)?$")


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
    components = None if isinstance(model, nn.Module) else getattr(model, "components", None)
    if isinstance(components, Mapping):
        return _of_pipeline(components, model_type)
    return {"": model}


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
    return _TEXT.search(model_type) is not None


def _of_pipeline(components: Mapping[str, object], model_type: str) -> dict[str, object]:
    wanted = _TEXT_COMPONENTS if is_text(model_type) else _DENOISER_COMPONENTS
    found = {name: part for name, part in components.items() if wanted.match(name) and _carries_weights(part)}
    if len(found) == 1:
        return {"": next(iter(found.values()))}
    return {f"{name}.": part for name, part in found.items()}


def _carries_weights(part: object) -> bool:
    return isinstance(part, nn.Module) or is_comfyui(part)


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index + 1}"
