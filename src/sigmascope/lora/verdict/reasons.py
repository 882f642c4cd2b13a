"""Why a module of a LoRA changes nothing in a model, the likeliest reason first."""

import re
from collections import defaultdict
from functools import cached_property
from typing import Final, NamedTuple

from sigmascope.lora.file import LoraFile
from sigmascope.lora.models.block_names import block_of_module
from sigmascope.lora.models.layout import Part
from sigmascope.lora.names.flat_names import flat
from sigmascope.lora.names.layer_paths import UNET_FAMILIES
from sigmascope.lora.names.module_names import ModuleName, parse_name
from sigmascope.lora.verdict.file_family import FileFamily, title_of
from sigmascope.lora.verdict.module_verdict import Reason
from sigmascope.lora.verdict.nearest import NearestNames
from sigmascope.lora.verdict.placing import Misfit, Placing

_BIAS: Final = ".bias"
_NOTHING_NEAR: Final = frozenset({"text_encoder_missing", "part_missing", "twice"})
_NUMBER: Final = re.compile(r"\d+")
_LONGEST_PREFIX: Final = 4  # words
_WORD: Final = re.compile(r"[^.]+\.")
_FLAT_WORD: Final = re.compile(r"[^_]+_")


class Explained(NamedTuple):
    """A reason, and the same in words."""

    reason: Reason
    detail: str


def part_of(name: str) -> Part:
    """The part of a model that a module's name says; the denoiser where it says none."""
    parts = parse_name(name.removesuffix(_BIAS)).parts
    return parts[0] if parts else "denoiser"


class Reasons:
    """Explains the modules of one LoRA that do not land in one model.

    Args:
        lora: The LoRA.
        placing: Where its modules land.
        family: What the file is for.
    """

    def __init__(self, lora: LoraFile, placing: Placing, family: FileFamily) -> None:
        self._lora = lora
        self._placing = placing
        self._family = family
        self._model_family = placing.layout.family
        self._near: dict[str, NearestNames] = {}

    def explain(self, name: str) -> Explained:
        """Say why a module changes nothing."""
        twin = self._placing.twins.get(name)
        if twin is not None:
            return Explained("twice", f"{twin} is for the same layer, and comes first")
        misfit = self._placing.misfits.get(name)
        if misfit is not None:
            return self._of_shape(misfit)
        parsed = parse_name(name.removesuffix(_BIAS))
        return (
            self._of_part(parsed)
            or self._of_family(parsed)
            or self._of_block(name, parsed)
            or self._of_prefix(name)
            or Explained("unknown", self._unknown(name))
        )

    def nearest(self, name: str) -> tuple[str, ...]:
        """Names of the model's layers that are nearest to a module's, in the part that it names if that is there."""
        if self.explain(name).reason in _NOTHING_NEAR:
            return ()
        misfit = self._placing.misfits.get(name)
        parsed = parse_name(name.removesuffix(_BIAS))
        parts = [part for part in parsed.parts if part in self._placing.layout.prefixes] or ["denoiser"]
        found = self._names(parts[0]).nearest(parsed.path)
        return found if misfit is None else tuple(dict.fromkeys((misfit.key, *found)))[:3]

    def _names(self, part: str) -> NearestNames:
        if part not in self._near:
            split = self._placing.layout.split
            own = [layer for layer in self._placing.layers if split(layer)[0] == part]
            self._near[part] = NearestNames(own or self._placing.layers)
        return self._near[part]

    @cached_property
    def _other_numbers(self) -> dict[tuple[Part, str], set[str]]:
        """The model's layers by part and flat name without numbers."""
        found: defaultdict[tuple[Part, str], set[str]] = defaultdict(set)
        for (part, name), layers in self._placing.index.by_name.items():
            found[part, _NUMBER.sub("#", name)] |= layers
        return dict(found)

    def _of_shape(self, misfit: Misfit) -> Explained:
        shapes = f"it is made for a weight of {misfit.own}, and {misfit.key} is {misfit.model}"
        if self._other_family:
            return Explained("other_architecture", f"{shapes}: {self._families}")
        if misfit.own == misfit.model[::-1]:
            return Explained("transposed", f"{shapes}: its factors are the wrong way round")
        return Explained("other_shape", shapes)

    def _of_part(self, parsed: ModuleName) -> Explained | None:
        there = self._placing.layout.prefixes
        if not parsed.parts or any(part in there for part in parsed.parts):
            return None
        part = parsed.parts[0]
        if part.startswith("text_encoder"):
            return Explained(
                "text_encoder_missing", f"it is for {_spoken(part)}, which the model given does not have"
            )
        return Explained(
            "part_missing", f"it is for the {_spoken(part)}, which the model given does not have"
        )

    def _of_family(self, parsed: ModuleName) -> Explained | None:
        in_denoiser = not parsed.parts or parsed.parts[0].startswith("denoiser")
        return Explained("other_architecture", self._families) if in_denoiser and self._other_family else None

    def _of_block(self, name: str, parsed: ModuleName) -> Explained | None:
        path = _NUMBER.sub("#", flat(parsed.path))
        parts: tuple[Part, ...] = parsed.parts or ("denoiser", "other")
        for part in parts:
            layers = self._other_numbers.get(
                (part, path.removeprefix("text_model_"))
            ) or self._other_numbers.get((part, path))
            if layers:
                blocks = len({block_of_module(layer) for layer in layers})
                return Explained(
                    "block_missing",
                    f"the model has such layers in {blocks} blocks, and no {block_of_module(name)} with one",
                )
        return None

    def _of_prefix(self, name: str) -> Explained | None:
        rest, cut = name, ""
        words = _WORD if "." in name else _FLAT_WORD
        for _ in range(_LONGEST_PREFIX):
            word = words.match(rest)
            if word is None or word[0][:-1].isdigit():  # a block of its own kind is no prefix
                return None
            rest, cut = rest[word.end() :], cut + word[0]
            for spelt in (rest, f"lora_unet_{rest}", f"lora_te_{rest}"):
                layer = self._placing.index.layer_of(spelt, self._lora.shape_of(name))
                if layer is not None:
                    return Explained("prefix", f"without {cut} before it, its name is that of {layer}")
        return None

    @property
    def _other_family(self) -> bool:
        known = self._model_family != "unknown"
        if self._family.family is not None:
            return known and self._family.family != self._model_family
        return known and self._family.is_unet and self._model_family not in UNET_FAMILIES

    @property
    def _families(self) -> str:
        is_unet = self._family.family is None and self._family.is_unet
        own = "a U-Net" if is_unet else title_of(self._family.family)
        return (
            f"the file is for {own} (by {self._family.evidence}), the model is {title_of(self._model_family)}"
        )

    def _unknown(self, name: str) -> str:
        if name.endswith(_BIAS):
            return "the model has no bias of that name"
        if self._model_family == "unknown":
            return "the model, whose family is not known, has no layer of that name"
        return f"{title_of(self._model_family)} has no layer of that name"


def _spoken(part: Part) -> str:
    numbered = {"text_encoder": "the text encoder", "text_encoder_2": "the second text encoder"}
    return numbered.get(
        part, "the third text encoder" if part == "text_encoder_3" else part.replace("_", " ")
    )
