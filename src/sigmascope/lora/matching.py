"""Which layers of a model a LoRA changes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.model_layers import Layer, checkpoint_path, layers_of, weight_identity, weight_shape_of
from sigmascope.lora.models.layout import layout_of
from sigmascope.lora.names.alignment import align
from sigmascope.lora.shapes import same_matrix

_NAMED_IN_A_MESSAGE = 5


@dataclass(frozen=True, eq=False)
class LoraTarget:
    """One weight of the model and the change that the LoRA makes to it.

    Attributes:
        names: The LoRA modules that name this weight: more than one where layers share it.
        factors: The change.
        layers: Every layer that holds the weight, each once.
    """

    names: tuple[str, ...]
    factors: LoraFactors
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def weight(self) -> Tensor:
        """The weight itself, as the first layer holds it now."""
        return self.layers[0].weight


def match_modules(model: nn.Module, lora: LoraFile) -> list[LoraTarget]:
    """Find the layer of each LoRA module, all or none.

    Names are those of the model's checkpoint, or of any other format that `align` understands. The parts that
    torch.compile, DataParallel and PEFT put into a path are looked through, and where the model is one part of
    the checkpoint (a UNet for keys that begin with "denoiser."), the leading parts that all the LoRA's names
    share may be absent.

    Args:
        model: Holds the layers.
        lora: At least one module, and no changes of other kinds.

    Returns:
        A target for each weight, in the LoRA's order. Layers that share one weight are one target.

    Raises:
        ModelMismatchError: A module has no layer, or one of another kind or shape, or two modules ask for
            different changes of one shared weight. All are counted, the first few named.
        LoraFormatError: The LoRA holds LoHa, LoKr, DoRA, Tucker cores or whole differences.
    """
    _require_plain(lora)
    layers = dict(layers_of(model))
    cut = _prefix_to_cut(lora.modules, layers)
    if any(name.removeprefix(cut) not in layers for name in lora.modules):
        lora = _renamed(lora, layers)
    _require_present(model, lora, layers, cut)
    _require_fitting(lora, layers, cut)
    return _targets(lora, layers, cut)


def _require_plain(lora: LoraFile) -> None:
    """Refuse changes that a low-rank branch cannot make, because leaving them out gives another LoRA."""
    if lora.changes:
        named = [f"{name} ({lora.kind_of(name)})" for name in list(lora.changes)[:_NAMED_IN_A_MESSAGE]]
        raise LoraFormatError(
            f"{len(lora.changes)} modules of {lora} are more than up and down factors: "
            f"{', '.join(named)}{_and_more(len(lora.changes))}.",
            hint="Merge the LoRA into the model's checkpoint (sigmascope lora merge), and load that.",
        )
    if not lora.modules:
        raise ModelMismatchError(f"{lora} changes no module.", hint="Check what it was made from.")


def _renamed(lora: LoraFile, layers: Mapping[str, Layer]) -> LoraFile:
    """The LoRA under the layers' own names, where it is of another format; else as it is."""
    shapes = {f"{path}.weight": weight_shape_of(layer) for path, layer in layers.items()}
    aligned = align(lora, list(layers), layout_of(shapes))
    return lora if aligned.unmatched else aligned.lora


def _prefix_to_cut(names: Iterable[str], layers: Mapping[str, Layer]) -> str:
    """The shortest run of leading parts, shared by all names, without which every name is a layer's."""
    wanted = list(names)
    parts = wanted[0].split(".")[:-1]
    for depth in range(len(parts) + 1):
        prefix = "".join(f"{part}." for part in parts[:depth])
        if all(name.startswith(prefix) and name.removeprefix(prefix) in layers for name in wanted):
            return prefix
    return ""


def _require_present(model: nn.Module, lora: LoraFile, layers: Mapping[str, Layer], cut: str) -> None:
    missing = [name for name in lora.modules if name.removeprefix(cut) not in layers]
    if not missing:
        return
    others = {checkpoint_path(path): type(module).__name__ for path, module in model.named_modules()}
    named = [_describe_missing(name, layers, others) for name in missing[:_NAMED_IN_A_MESSAGE]]
    raise ModelMismatchError(
        f"{len(missing)} of {len(lora)} modules of {lora} are no Linear or Conv2d of this "
        f"{type(model).__name__}: {'; '.join(named)}{_and_more(len(missing))}.",
        hint="Apply the LoRA to the model it was made for.",
    )


def _describe_missing(name: str, layers: Mapping[str, Layer], others: Mapping[str, str]) -> str:
    if name in others:
        return f"{name} (there is a {others[name]} of that name)"
    near = get_close_matches(name, layers, n=1)
    return f"{name} (nearest: {near[0]})" if near else name


def _require_fitting(lora: LoraFile, layers: Mapping[str, Layer], cut: str) -> None:
    wrong: list[str] = []
    for name, factors in lora.modules.items():
        layer = layers[name.removeprefix(cut)]
        shape = weight_shape_of(layer)
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:
            wrong.append(f"{name} is a convolution in {layer.groups} groups, which has no low-rank form here")
        elif not same_matrix(shape, factors.weight_shape):
            wrong.append(f"{name} is {factors.weight_shape} in the LoRA and {shape} in the model")
    if wrong:
        raise ModelMismatchError(
            f"{len(wrong)} of {len(lora)} modules of {lora} do not fit: "
            f"{'; '.join(wrong[:_NAMED_IN_A_MESSAGE])}{_and_more(len(wrong))}.",
            hint="Apply the LoRA to the model it was made for.",
        )


def _targets(lora: LoraFile, layers: Mapping[str, Layer], cut: str) -> list[LoraTarget]:
    sharing: dict[int, list[Layer]] = {}
    for layer in layers.values():
        sharing.setdefault(weight_identity(layer), []).append(layer)
    asked: dict[int, list[str]] = {}
    for name in lora.modules:
        asked.setdefault(weight_identity(layers[name.removeprefix(cut)]), []).append(name)
    return [
        LoraTarget(
            tuple(names), _one_change(lora, names, sharing[weight][0]), tuple(dict.fromkeys(sharing[weight]))
        )
        for weight, names in asked.items()
    ]


def _one_change(lora: LoraFile, names: list[str], layer: Layer) -> LoraFactors:
    """The change that all names ask for, in the layer's own shape."""
    first, *others = (lora.modules[name] for name in names)
    if any(not torch.allclose(first.delta(), other.delta()) for other in others):
        raise ModelMismatchError(
            f"{', '.join(names)} share one weight in the model, and {lora} changes them differently.",
            hint="Untie the weights before applying this LoRA.",
        )
    return replace(first, weight_shape=weight_shape_of(layer))


def _and_more(count: int) -> str:
    return f"; and {count - _NAMED_IN_A_MESSAGE} more" if count > _NAMED_IN_A_MESSAGE else ""
