"""Put the names of a LoRA's modules, of any format, against the layers of a model in any naming.

kohya's names have underscores for dots, prefixes differ from tool to tool, and a U-Net or transformer has one name
for each layer in diffusers and another in its original file. All of that is undone here: names are compared
without dots and prefixes, part of the model by part, in both namings of the model's family.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.flat_names import flat
from sigmascope.lora.names.layer_paths import is_unet_layer
from sigmascope.lora.names.module_names import ModuleName, parse_name
from sigmascope.lora.names.transformer_names import row_of_diffusers, row_of_original
from sigmascope.lora.names.unet_names import UnetBlocks, blocks_of, to_diffusers, to_sgm

_BIAS: Final = ".bias"
_TEXT_MODEL: Final = "text_model_"
_PARTS: Final[tuple[Part, ...]] = (
    "denoiser",
    "denoiser_2",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "vae",
    "other",
)


@dataclass(frozen=True, slots=True)
class NameMatch:
    """Which layer each module of a LoRA is for.

    Attributes:
        matched: Layer path by module name, in the LoRA's order. For a change of a bias, `<layer>.bias`.
        unmatched: Modules for which the model has no layer, or none of their own: a matrix that is fused on one
            side and in parts on the other is put together by `align`.
    """

    matched: dict[str, str]
    unmatched: tuple[str, ...]


def resolve_names(lora: LoraFile, layers: Sequence[str], layout: ModelLayout) -> NameMatch:
    """Find the layer of each module and change of a LoRA.

    Args:
        lora: In any format; its tensors are not read.
        layers: Paths of the model's layers, without `.weight`; all of them, so that a U-Net of unusual size is
            counted right. Other tensors that a LoRA may change are named in the same way: a norm by its path,
            any other parameter by its key.
        layout: How the model names its weights.

    Returns:
        The matches. A name that could be two layers is unmatched.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one layer.
    """
    return LayerIndex.of(layers, layout).match(lora)


@dataclass(slots=True)
class LayerIndex:
    """The layers of a model by every name that they may have in a LoRA.

    Attributes:
        layers: The paths.
        by_name: The layers of each flat name, in each part of the model.
        swapped: Those whose rows lie otherwise under that name, if they have twice as many outputs as inputs.
    """

    layers: frozenset[str] = frozenset()
    by_name: defaultdict[tuple[Part, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    swapped: set[tuple[Part, str]] = field(default_factory=set)

    @classmethod
    def of(cls, layers: Iterable[str], layout: ModelLayout) -> "LayerIndex":
        """Index the layers of a model."""
        placed = [(layer, *layout.split(layer)) for layer in layers]
        index = cls(frozenset(layer for layer, _, _ in placed))
        blocks = blocks_of(path for _, part, path in placed if part == "denoiser")
        for layer, part, path in placed:
            for name, swapped in _names(part, path, layout, blocks):
                key = part, _comparable(part, name)
                index.by_name[key].add(layer)
                if swapped:
                    index.swapped.add(key)
        return index

    def match(self, lora: LoraFile) -> NameMatch:
        """Match a LoRA's names; see `resolve_names`."""
        matched: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in lora.names:
            layer = self.layer_of(name, lora.shape_of(name))
            if layer is None:
                continue
            if layer in taken:
                raise LoraFormatError(
                    f"{lora}: {taken[layer]} and {name} are both for {layer}.",
                    hint="The file holds one layer under two names: remove one of them.",
                )
            taken[layer], matched[name] = name, layer
        return NameMatch(matched, tuple(name for name in lora.names if name not in matched))

    def find(self, part: Part, path: str) -> str | None:
        """The layer of a path inside a part of the model, whatever stands before it."""
        found = self.by_name.get((part, _comparable(part, path)), set())
        return next(iter(found)) if len(found) == 1 else None

    def layer_of(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The layer that a module is for; None where there is none, or more than one.

        Args:
            name: The module's, in any format.
            shape: Of the weight that it changes.
        """
        if name in self.layers:
            return name
        module = name.removesuffix(_BIAS)
        layer = module if module in self.layers else self._look_up(parse_name(module), module, shape)
        return None if layer is None else layer + name[len(module) :]

    def _look_up(self, parsed: ModuleName, module: str, shape: tuple[int, ...]) -> str | None:
        whole = ModuleName((), module)
        for candidate in (parsed, whole):
            for part in candidate.parts or _PARTS:
                key = part, _comparable(part, candidate.path)
                found = self.by_name.get(key, set())
                is_swapped = key in self.swapped and len(shape) > 1 and shape[0] == 2 * shape[1]
                if len(found) == 1 and not is_swapped:
                    return next(iter(found))
        return None


def _comparable(part: Part, path: str) -> str:
    """A path without what formats and versions write differently."""
    name = flat(path)
    return name.removeprefix(_TEXT_MODEL) if part.startswith("text_encoder") else name


def _names(part: Part, path: str, layout: ModelLayout, blocks: UnetBlocks) -> Iterator[tuple[str, bool]]:
    """A layer's own path and its name in the other naming; and whether its rows are swapped there."""
    yield path, False
    if part.startswith("text_encoder"):
        row = row_of_original("open_clip", path)
        if row is not None and row.is_rename:
            yield row.parts[0], False
    elif part in {"denoiser", "denoiser_2"} and is_unet_layer(path, layout):
        other = to_diffusers(path, blocks) or to_sgm(path, blocks)
        if other is not None:
            yield other, False
    elif part in {"denoiser", "denoiser_2"}:
        yield from _transformer_names(path, layout)


def _transformer_names(path: str, layout: ModelLayout) -> Iterator[tuple[str, bool]]:
    by_original, by_part = row_of_original(layout.family, path), row_of_diffusers(layout.family, path)
    if layout.naming == "original" and by_original is not None and len(by_original.parts) == 1:
        yield by_original.parts[0], by_original.swapped
    elif layout.naming == "diffusers" and by_part is not None and len(by_part.parts) == 1:
        yield by_part.original, by_part.swapped
