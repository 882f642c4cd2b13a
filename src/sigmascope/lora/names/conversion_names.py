"""The layers that a LoRA's modules are for, as far as a conversion has to know them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.models.layout import ModelLayout, Part, layout_of
from sigmascope.lora.names.alignment import align
from sigmascope.lora.names.layer_paths import UNET_FAMILIES, renamed
from sigmascope.lora.names.own_names import OwnNames, understand_names
from sigmascope.lora.names.unet_names import UnetBlocks, blocks_of

_BIAS: Final = ".bias"
_WEIGHT: Final = ".weight"
# Namings of a model whose family is not known that a format can be written from: its own names are all there is.
_WRITABLE: Final = {
    "native": {"diffusers", "original", "unknown"},
    "kohya": {"original", "unknown"},
    "comfyui": {"original"},
    "peft": {"diffusers"},
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A module that is not in the new file.

    Attributes:
        name: As in the old file.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class NamedLora:
    """A LoRA whose names are understood.

    Attributes:
        lora: Under its own names, or the model's.
        layers: The layer of each name; for a change of a bias, `<layer>.bias`.
        layout: Of the checkpoint that has these layers.
        left_out: Names in the file that are of no layer.
        blocks: Of the U-Net, if it is one.
    """

    lora: LoraFile
    layers: Mapping[str, str]
    layout: ModelLayout
    left_out: tuple[LeftOut, ...]
    blocks: UnetBlocks | None = None


def named_by_model(lora: LoraFile, checkpoint: Checkpoint) -> NamedLora:
    """Understand a LoRA by the model that it is for.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one layer.
    """
    shapes = {key: checkpoint.info(key).shape for key in checkpoint.keys()}  # noqa: SIM118 - not a dict
    layers = tuple(key.removesuffix(_WEIGHT) for key in shapes)
    layout = layout_of(shapes)
    aligned = align(lora, layers, layout)
    left_out = tuple(LeftOut(name, f"{checkpoint.path.name} has no such layer") for name in aligned.unmatched)
    own = {name: name for name in aligned.lora.names}
    blocks = blocks_of(path for part, path in map(layout.split, layers) if part == "denoiser")
    return NamedLora(aligned.lora, own, layout, left_out, blocks)


def named_by_itself(
    lora: LoraFile, format: str, *, family: str | None = None, prefix: str | None = None
) -> NamedLora:
    """Understand a LoRA by its own names and header.

    Args:
        lora: In any format.
        format: That it is to be written in.
        family: Of the model, where nothing else tells.
        prefix: Before the denoiser's layers in native format.

    Raises:
        LoraFormatError: The names contradict each other.
        ConfigError: The format names layers by their family, and that cannot be told.
    """
    names = understand_names(lora, family)
    layout = names.layout
    denoisers = any(layout.split(layer)[0] == "denoiser" for layer in names.layers.values())
    if denoisers and layout.family == "unknown" and layout.naming not in _WRITABLE[format]:
        raise ConfigError(
            f"{lora}: the family of its model cannot be told, and {format} files name layers by it.",
            hint="Give the model (--model), or its family (--family).",
        )
    left_out = tuple(LeftOut(name, "could be several paths") for name in names.unknown)
    if format != "native":
        return NamedLora(lora, names.layers, layout, left_out, names.blocks)
    native = _native_layout(layout, prefix)
    layers = {name: _native_layer(layer, names, native) for name, layer in names.layers.items()}
    return NamedLora(lora, layers, native, left_out, names.blocks)


def _native_layout(layout: ModelLayout, prefix: str | None) -> ModelLayout:
    """Where a checkpoint of that family has its layers: an LBM's denoiser, or a component of a diffusers folder."""
    is_unet = layout.family in UNET_FAMILIES
    if prefix is None:
        prefix = (
            "denoiser" if is_unet else "transformer" if layout.naming == "diffusers" else "diffusion_model"
        )
    start = f"{prefix}." if prefix else ""
    prefixes: dict[Part, str] = {**layout.prefixes, "denoiser": start}
    return replace(layout, naming="diffusers" if is_unet else layout.naming, prefixes=prefixes)


def _native_layer(layer: str, names: OwnNames, native: ModelLayout) -> str:
    module = layer.removesuffix(_BIAS)
    part, path = names.layout.split(module)
    if part == "denoiser" and native.family in UNET_FAMILIES:
        path = str(renamed(path, part, names.layout, "diffusers", names.blocks))
    return native.prefixes.get(part, "") + path + layer[len(module) :]
