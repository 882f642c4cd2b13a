"""The weights of a model by name and shape, whatever holds them: a module, a pipeline's parts, a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Final

from torch import nn

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import ModelMismatchError
from sigmascope.lora.models.layout import ModelLayout, Part, Shapes, layout_of
from sigmascope.probes.adapters.peft.walk import adapted_modules, base_weights

Model = object
"""An nn.Module, a mapping of shapes or modules by name, a Checkpoint, or a pipeline with `components`."""

_COMFYUI_ENCODERS: Final = ("clip_l.", "clip_g.", "clip_h.", "t5xxl.", "umt5xxl.", "qwen25_7b.")
_DENOISERS: Final = ("diffusion_model.", "model.diffusion_model.", "denoiser.")
_FURTHER_PARTS: Final[tuple[tuple[Part, str], ...]] = (
    ("text_encoder", "text_encoders.clip_l.transformer."),
    ("text_encoder", "text_encoders.clip_h.transformer."),
    ("text_encoder", "text_encoders.qwen25_7b.transformer."),
    ("text_encoder", "text_encoders.umt5xxl.transformer."),
    ("text_encoder_2", "text_encoders.clip_g.transformer."),
    ("text_encoder_2", "text_encoders.t5xxl.transformer."),
    ("text_encoder_3", "text_encoders.t5xxl.transformer."),
)


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights by the names that they have without adapters and wrappers.

    Args:
        model: See `Model`. Of several parts each name begins with the part's, as in a diffusers pipeline, but for
            ComfyUI's modules, whose names are those of its files.

    Raises:
        ModelMismatchError: It holds no weights that are known how to find.
    """
    if isinstance(model, nn.Module):
        found = dict(_named_shapes(model))
    elif isinstance(model, Checkpoint):
        found = {key: model.info(key).shape for key in model}
    else:
        parts = model if isinstance(model, Mapping) else getattr(model, "components", None)
        found = _of_parts(parts) if isinstance(parts, Mapping) else {}
    if not found:
        raise ModelMismatchError(
            f"{type(model).__name__} holds no weights that are known how to find.",
            hint="Give an nn.Module, shapes by name, or the parts of a pipeline by name.",
        )
    return found


def layout_for(shapes: Shapes) -> ModelLayout:
    """The layout of a model, with the text encoders that ComfyUI keeps apart from the denoiser."""
    layout = layout_of(shapes)
    prefixes = dict(layout.prefixes)
    taken = set(prefixes.values())
    for part, prefix in _FURTHER_PARTS:
        if prefix not in taken and part not in prefixes and any(key.startswith(prefix) for key in shapes):
            prefixes[part] = prefix
            taken.add(prefix)
    return ModelLayout(layout.family, layout.naming, prefixes)


def _of_parts(parts: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            found |= {_in_part(name, key): shape for key, shape in _named_shapes(part)}
        elif isinstance(part, tuple | list):
            found[str(name)] = tuple(int(size) for size in part)
    return found


def _in_part(name: str, key: str) -> str:
    if key.startswith(_DENOISERS):
        return key
    return f"text_encoders.{key}" if key.startswith(_COMFYUI_ENCODERS) else f"{name}.{key}"


def _named_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Weights by the names that they have without adapters; a quantised matrix by what it stands for."""
    packed = dict(_layer_shapes(model))
    for key, tensor in base_weights(model):
        yield key, packed.get(key, tuple(tensor.shape))


def _layer_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, module in adapted_modules(model):
        if isinstance(module, nn.Linear):
            yield f"{name}.weight" if name else "weight", (module.out_features, module.in_features)
