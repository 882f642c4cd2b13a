"""Whether a LoRA file is for a model (`judge_lora`).

`shapes_of` reads a model's weights by name and shape, and `place` finds the weights that each module changes. For a
module that changes nothing, `MismatchReasons` says why, the likeliest reason first, and names the model's nearest layers.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import fsum, isfinite
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor, nn

from sigmascope.checkpoints import Checkpoint, open_checkpoint, shard_of
from sigmascope.errors import ModelMismatchError, NonFiniteError, SigmascopeError
from sigmascope.lora.alignment import align, layout_for
from sigmascope.lora.factors import LoraFactors, scale_of_factors
from sigmascope.lora.families import (
    UNET_FAMILIES,
    ModelLayout,
    Part,
    Shapes,
    family_named,
    is_layer_of,
    layout_of,
)
from sigmascope.lora.families.known import PARTS_BY_ENCODER, must_have
from sigmascope.lora.file import LoraFile
from sigmascope.lora.file_family import FileFamily, file_family, title_of
from sigmascope.lora.file_verdict import LoraVerdict, ModuleVerdict, verdict_findings
from sigmascope.lora.health import broken_config
from sigmascope.lora.kinds.base_change import norm_without_base
from sigmascope.lora.kinds.fused import Weights
from sigmascope.lora.layer_names import WEIGHT, NearestNames, block_of_module, is_layer
from sigmascope.lora.linalg import as_float64, same_matrix
from sigmascope.lora.module_names import LayerIndex, ModuleName, flat, is_of_controlnet, parse_name
from sigmascope.lora.reader import lora_in
from sigmascope.lora.verdict import Reason, unreadable
from sigmascope.probes.adapted_modules import base_tensors
from sigmascope.probes.reading import describe
from sigmascope.replaced import replaced
from sigmascope.units import counted, first_few

_BIAS: Final = ".bias"
Model = object
"""An nn.Module, a mapping of shapes or modules by name, a Checkpoint, or a pipeline with `components`."""

_REASONS_WITHOUT_NEAREST: Final = frozenset(
    {
        "controlnet",
        "text_encoder_missing",
        "part_missing",
        "base_incomplete",
        "layer_lost",
        "layer_missing",
        "bias_missing",
        "twice",
    }
)
_PART_TITLES: Final = {
    "denoiser": "first denoiser",
    "denoiser_2": "second denoiser",
    "text_encoder_2": "second text encoder",
    "text_encoder_3": "third text encoder",
}
_NUMBER: Final = re.compile(r"(?<=_)((?:block)?)\d+(?=_)")
"""Of a block, in a flat name: not that of `attn1`, `linear_1` or `net.2`, which are other layers of one block."""
_CLIP_LAYER: Final = re.compile(r"(?:text_model_)?encoder_layers_")
_MAX_PREFIX_WORDS: Final = 4
_WORD: Final = re.compile(r"[^.]+\.")
_FLAT_WORD: Final = re.compile(r"[^_]+_")
_MATRIX_AXES: Final = 2

# Prefixes of ComfyUI's weights: those of text encoders, which are separate from the denoiser, and of denoisers.
_COMFYUI_ENCODERS: Final = tuple(f"{encoder}." for encoder in PARTS_BY_ENCODER)
_DENOISERS: Final = ("diffusion_model.", "model.diffusion_model.", "denoiser.")


def judge_lora(
    lora: str | PathLike[str] | LoraFile | Mapping[str, Tensor], model: Model, *, values: bool = True
) -> LoraVerdict:
    """Say for every module of a LoRA whether it changes a weight of a model, and if not, why not.

    Names of every format (kohya, PEFT, native, ComfyUI) and of all known families are understood. A loader may know
    fewer names, and the findings say where that is known; it may also know names that are unmatched here.

    Args:
        lora: A file of any format, a LoRA in memory, or a file's tensors in memory, by key.
        model: The model's shapes by key, an `nn.Module`, an open `Checkpoint`, a diffusers pipeline, or modules by the
            name of their part in a pipeline (`{"unet": …, "text_encoder": …}`; ComfyUI's model and CLIP under
            any names). Only its shapes are read.
        values: Also read the LoRA's numbers: NaN and Inf, alphas and strength.

    Returns:
        The verdict. Nothing is raised: if the file or model cannot be read, the verdict has an `error`.
    """
    path = str(lora.path) if isinstance(lora, LoraFile) and lora.path else None
    try:
        if not isinstance(lora, LoraFile | Mapping):
            path = str(lora)
        with _opened(lora) as (file, keys):
            return judge_opened(file, keys, model, path, values=values)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return LoraVerdict(path, error=error_text(error), findings=(unreadable(error),))


def judge_opened(
    lora: LoraFile, keys: tuple[str, ...], model: Model, path: str | None, *, values: bool = True
) -> LoraVerdict:
    """`judge_lora` of a file that is open already.

    Args:
        lora: In the file.
        keys: All of the file's.
        model: See `judge_lora`.
        path: What the verdict says of where it is.
        values: See `judge_lora`.
    """
    try:
        base = model if isinstance(model, Checkpoint) else None
        return _module_verdicts(lora, keys, shapes_of(model), path, values, base)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return LoraVerdict(path, error=error_text(error), findings=(unreadable(error),))


def error_text(error: Exception) -> str:
    """Our own errors in their words, others with their class."""
    return str(error) if isinstance(error, SigmascopeError) else describe(error)


def unmatched_reasons(
    lora: LoraFile, names: Iterable[str], shapes: Shapes, path: Path | None = None
) -> dict[str, "Mismatch"]:
    """Why modules match nothing in a model.

    Args:
        lora: In any format.
        names: Of these modules.
        shapes: Of all the model's weights, by key.
        path: The model's file, whose name may say that it is one shard of several.
    """
    idle = list(names)
    if not idle:
        return {}
    placing = place(lora, shapes, path=path)
    reasons = MismatchReasons(lora, placing, file_family(lora), incomplete_base(shapes, path))
    return {name: reasons.explain(name) for name in idle}


def by_reason(reasons: Mapping[str, str]) -> str:
    """The first few names of each reason, and the reason once after them."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name)
    return first_few([f"{first_few(own)} ({reason})" for reason, own in names.items()], between="; ")


def missing_in_variant(reasons: Mapping[str, "Mismatch"]) -> tuple[str, ...]:
    """The modules that a merge, a conversion or an application leaves out with a warning (`lora_layer_missing`).

    They are for layers that the model's family has and this variant does not, such as the image attention of WAN 2.1's
    I2V model, which 2.2 lacks; or that the model has lost in all its blocks. A module that matches nothing for another reason is an error there.

    Args:
        reasons: Of the modules that match nothing (`unmatched_reasons`).
    """
    return tuple(name for name, why in reasons.items() if why.reason in ("layer_missing", "layer_lost"))


_LIST_OF_BLOCKS: Final = re.compile(r"((?:[^.]+\.)*?(?!input_|output_)[^.]*blocks)\.(?:block)?(\d+)\.")
"""Those of a U-Net's original names count layers: a distilled one with fewer layers a block has holes there."""


def incomplete_base(shapes: Shapes, path: Path | None = None) -> str | None:
    """How a model shows that weights of it are missing: it is a shard of several, or its blocks have holes in their numbers.

    Args:
        shapes: Of all its weights, by key.
        path: Its file.
    """
    shard = None if path is None else shard_of(path.name)
    if path is not None and shard is not None:
        return f"{path.name} is one of {shard[1]} shards"
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for key in shapes:
        match = _LIST_OF_BLOCKS.match(key)
        if match is not None:
            numbers[match[1]].add(int(match[2]))
    for name, there in numbers.items():
        missing = sorted({*range(max(there))} - there)
        if missing:
            return (
                f"it has {name}.{max(there)}, but no {first_few([f'{name}.{number}' for number in missing])}"
            )
    return None


def energy_of(lora: LoraFile, names: Iterable[str]) -> float | None:
    """Σ ‖ΔW‖² of some modules of a LoRA, which are read; None if one depends on the model's weights."""
    norms = [norm_without_base(lora.change(name)) for name in names]
    known = [norm for norm in norms if norm is not None]
    return fsum(norm**2 for norm in known) if len(known) == len(norms) else None


@contextmanager
def _opened(
    lora: str | PathLike[str] | LoraFile | Mapping[str, Tensor],
) -> Iterator[tuple[LoraFile, tuple[str, ...]]]:
    """The LoRA with its modules still in the file, and the file's keys."""
    if isinstance(lora, LoraFile):
        yield lora, ()
        return
    with open_checkpoint(lora) as checkpoint:
        yield lora_in(checkpoint, allow_broken=True), tuple(checkpoint.keys())


def _module_verdicts(
    lora: LoraFile,
    keys: tuple[str, ...],
    shapes: Shapes,
    path: str | None,
    values: bool,
    base: Checkpoint | None,
) -> LoraVerdict:
    file, undescribed = (None, {}) if base is None else (base.path, base.undescribed)
    placing, family = place(lora, shapes, path=file), file_family(lora)
    reasons = MismatchReasons(lora, placing, family, incomplete_base(shapes, file), undescribed)
    names = [name for name in lora.names if not is_of_no_bias(lora, name, placing.keys)]
    modules = tuple(_module_verdict(lora, name, placing, shapes, reasons) for name in names)
    if values:
        stated = _Stated(lora, {*keys})
        modules = tuple(_with_values(lora, module, stated) for module in modules)
    broken = tuple(
        ModuleVerdict(name, "unknown", (), _part_of(name), reason="broken", detail=part.why)
        for name, part in lora.broken.items()
    )
    known = placing.layout.family
    verdict = LoraVerdict(
        path=path,
        format=lora.format,
        file_family=family.family,
        family_evidence=family.evidence,
        family_doubt=family.doubt,
        model_family=None if known == "unknown" else known,
        model_naming=placing.layout.naming,
        modules=(*modules, *broken),
        unused_keys=lora.unused_keys,
        unavailable={} if values else {"values": "the numbers were not read, as asked"},
    )
    return replaced(verdict, findings=(*verdict_findings(verdict, keys), *broken_config(lora)))


def is_of_no_bias(lora: LoraFile, name: str, placed: Collection[str]) -> bool:
    """Whether it scales the bias of a layer that has none, as (IA)³ does beside the layer's weight."""
    return (
        name.endswith(_BIAS)
        and lora.kind_of(name) == "ia3"
        and name not in placed
        and name.removesuffix(_BIAS) in placed
    )


@dataclass(frozen=True, slots=True)
class Misfit:
    """A module whose name is that of a weight with another shape."""

    key: str
    own: tuple[int, ...]
    model: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which of a model's weights a LoRA's modules change.

    Attributes:
        lora: The LoRA under the model's names; None if it could not be aligned.
        layout: The model's layout.
        index: The model's layers and other tensors, by all their names.
        layers: Paths of the model's Linear and convolution layers.
        keys: The weights that each module changes, by the module's name.
        misfits: Modules whose weights have another shape.
        twins: For a module whose layer another module changes already, that other module.
    """

    lora: LoraFile | None
    layout: ModelLayout
    index: LayerIndex
    layers: tuple[str, ...] = ()
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    misfits: dict[str, Misfit] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)


class Mismatch(NamedTuple):
    """A reason, and its explanation in words."""

    reason: Reason
    detail: str


class MismatchReasons:
    """Explains why modules of a LoRA change nothing in a model.

    Args:
        lora: The LoRA.
        placing: Which weights its modules change.
        family: The model family that the file is for.
        incomplete: How the model shows that weights of it are missing (`incomplete_base`).
        undescribed: See `Checkpoint.undescribed`.
    """

    def __init__(
        self,
        lora: LoraFile,
        placing: Placement,
        family: FileFamily,
        incomplete: str | None = None,
        undescribed: Mapping[str, str] | None = None,
    ) -> None:
        self._incomplete = incomplete
        self._undescribed = undescribed or {}
        self._lora = lora
        self._placing = placing
        self._family = family
        self._model_family = placing.layout.family
        self._near: dict[str, NearestNames] = {}
        has_controlnet = any(map(is_of_controlnet, placing.layers))
        self.is_for_controlnet = not has_controlnet and any(
            is_of_controlnet(lora.stored_names.get(name, name)) for name in lora.names
        )

    def explain(self, name: str) -> Mismatch:
        """Say why a module changes nothing."""
        if self.is_of_controlnet(name):
            return Mismatch("controlnet", "the file is for a ControlNet")
        parsed = parse_name(name.removesuffix(_BIAS))
        absent = self._of_absent_encoder(parsed)
        if absent is not None:
            return absent
        twin = self._placing.twins.get(name)
        if twin is not None:
            return Mismatch("twice", f"{twin} changes the same layer and comes first")
        misfit = self._placing.misfits.get(name)
        if misfit is not None:
            return self._of_shape(misfit)
        layer = self._placing.index.layer_of(name, self._lora.shape_of(name))
        if layer is not None and name.endswith(_BIAS):
            return Mismatch("bias_missing", f"{layer.removesuffix(_BIAS)} has no bias")
        return (
            self._of_part(parsed)
            or self._of_family(parsed)
            or self._of_incomplete()
            or self._of_block(name, parsed)
            or self._of_variant(parsed)
            or self._of_encoder(parsed)
            or self._of_prefix(name)
            or Mismatch("unknown", self._unknown(name))
        )

    def is_of_controlnet(self, name: str) -> bool:
        """Whether a module is for a ControlNet and for nothing in the model, though this may have a layer of that name."""
        stored = self._lora.stored_names.get(name, name)
        return self.is_for_controlnet and (is_of_controlnet(stored) or not parse_name(name).parts)

    def nearest(self, name: str) -> tuple[str, ...]:
        """The model's layer names that are nearest to a module's, in the module's part if the model has it."""
        if self.explain(name).reason in _REASONS_WITHOUT_NEAREST:
            return ()
        misfit = self._placing.misfits.get(name)
        parsed = parse_name(name.removesuffix(_BIAS))
        parts = [part for part in parsed.parts if part in self._placing.layout.prefixes] or ["denoiser"]
        nearest = self._names(parts[0]).nearest(parsed.path)
        return nearest if misfit is None else tuple(dict.fromkeys((misfit.key, *nearest)))[:3]

    def _names(self, part: str) -> NearestNames:
        if part not in self._near:
            split = self._placing.layout.split
            own = [layer for layer in self._placing.layers if split(layer)[0] == part]
            self._near[part] = NearestNames(own or self._placing.layers)
        return self._near[part]

    @cached_property
    def _other_numbers(self) -> dict[tuple[Part, str], set[str]]:
        """The model's layers by part and flat name without numbers."""
        numbers: defaultdict[tuple[Part, str], set[str]] = defaultdict(set)
        for (part, name), layers in self._placing.index.by_name.items():
            numbers[part, _NUMBER.sub(r"\1#", name)] |= layers
        return dict(numbers)

    def _of_shape(self, misfit: Misfit) -> Mismatch:
        shapes = f"it is made for a weight {misfit.own}, but {misfit.key} is {misfit.model}"
        if misfit.key in self._undescribed:
            shapes += f" as it is stored, and how is not known: {self._undescribed[misfit.key]}"
            return Mismatch("other_shape", shapes)
        if self._other_family:
            return Mismatch("other_architecture", f"{shapes}: {self._families}")
        if misfit.own == misfit.model[::-1]:
            return Mismatch("transposed", f"{shapes}: its factors are transposed")
        return Mismatch("other_shape", shapes)

    def _of_absent_encoder(self, parsed: ModuleName) -> Mismatch | None:
        """The layers tell T5 and CLIP apart, and `lora_te2_` and `lora_te3_` are other encoders in other families."""
        encoders, path = family_named(self._model_family).encoders, flat(parsed.path)
        if not encoders or not (parsed.parts and parsed.parts[0].startswith("text_encoder")):
            return None
        second = encoders.get("text_encoder_2", ())
        if path.startswith("encoder_block_"):
            title, names = "T5", tuple(name for names in encoders.values() for name in names if "t5" in name)
        elif parsed.parts[0] == "text_encoder_2" and _CLIP_LAYER.match(path):
            title = "a second CLIP" if second else f"the {_PART_TITLES['text_encoder_2']}"
            names = tuple(name for name in second if name.startswith("clip"))
        else:
            return None
        family = title_of(self._model_family)
        return (
            None
            if names
            else Mismatch("other_architecture", f"it is for {title}, which {family} does not have")
        )

    def _of_part(self, parsed: ModuleName) -> Mismatch | None:
        there = self._placing.layout.prefixes
        if not parsed.parts or any(part in there for part in parsed.parts):
            return None
        part = parsed.parts[0]
        title = _PART_TITLES.get(part, part.replace("_", " "))
        encoders = family_named(self._model_family).encoders
        if part.startswith("text_encoder") and encoders and part not in encoders:
            family = title_of(self._model_family)
            return Mismatch("other_architecture", f"it is for the {title}, which {family} does not have")
        reason: Reason = "text_encoder_missing" if part.startswith("text_encoder") else "part_missing"
        return Mismatch(reason, f"it is for the {title}, which was not given")

    def _of_family(self, parsed: ModuleName) -> Mismatch | None:
        in_denoiser = not parsed.parts or parsed.parts[0].startswith("denoiser")
        return Mismatch("other_architecture", self._families) if in_denoiser and self._other_family else None

    def _of_incomplete(self) -> Mismatch | None:
        if self._incomplete is None:
            return None
        return Mismatch("base_incomplete", f"the model is incomplete: {self._incomplete}")

    def _of_encoder(self, parsed: ModuleName) -> Mismatch | None:
        """Text encoders of several families have layers of one name, so that a family tells only where none matches."""
        in_encoder = bool(parsed.parts) and parsed.parts[0].startswith("text_encoder")
        return Mismatch("other_architecture", self._families) if in_encoder and self._other_family else None

    def _of_block(self, name: str, parsed: ModuleName) -> Mismatch | None:
        path = _NUMBER.sub(r"\1#", flat(parsed.path))
        parts: tuple[Part, ...] = parsed.parts or ("denoiser", "other")
        for part in parts:
            layers = self._other_numbers.get((part, path.removeprefix("text_model_")))
            if layers:
                blocks = len({block_of_module(layer) for layer in layers})
                return Mismatch(
                    "block_missing",
                    f"the model has this layer in {counted(blocks, 'block')}, but not in {block_of_module(name)}",
                )
        return None

    def _of_variant(self, parsed: ModuleName) -> Mismatch | None:
        path, title = parsed.dotted("denoiser") or parsed.path, title_of(self._model_family)
        if not is_layer_of(self._model_family, path):
            return None
        blocks = must_have(self._model_family, path)
        if blocks is not None and self._has_blocks(blocks):
            _, _, layer = path.partition(f"{blocks}.")
            name = layer.partition(".")[2]
            return Mismatch(
                "layer_lost",
                f"the model is incomplete: none of its {blocks} has {name}, which every {title} model has",
            )
        return Mismatch("layer_missing", f"some {title} models have this layer, not this one")

    def _has_blocks(self, blocks: str) -> bool:
        """Whether the denoiser has blocks of a list, by either of its names."""
        start = f"{flat(blocks)}_#_"
        return any(part == "denoiser" and name.startswith(start) for part, name in self._other_numbers)

    def _of_prefix(self, name: str) -> Mismatch | None:
        rest, cut = name, ""
        words = _WORD if "." in name else _FLAT_WORD
        for _ in range(_MAX_PREFIX_WORDS):
            word = words.match(rest)
            if word is None or word[0][:-1].isdigit():  # a numbered block is not a prefix
                return None
            rest, cut = rest[word.end() :], cut + word[0]
            for spelling in (rest, f"lora_unet_{rest}", f"lora_te_{rest}"):
                layer = self._placing.index.layer_of(spelling, self._lora.shape_of(name))
                if layer is not None:
                    return Mismatch("prefix", f"without the prefix {cut} its name matches {layer}")
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
            return "the model has no bias with that name"
        if self._model_family == "unknown":
            return "the model, whose family is not known, has no layer with that name"
        if self._model_family in UNET_FAMILIES:  # of which no list of layers is kept
            return "the model has no layer with that name"
        return f"{title_of(self._model_family)} has no layer with that name"


def _module_verdict(
    lora: LoraFile, name: str, placing: Placement, shapes: Shapes, reasons: MismatchReasons
) -> ModuleVerdict:
    facts = lora.facts_of(name)
    module = partial(ModuleVerdict, name, facts.kind, facts.weight_shape, _part_of(name), facts.rank)
    keys = placing.keys.get(name, ())
    if keys and name not in placing.misfits and not reasons.is_of_controlnet(name):
        return module(layers=keys, model_shape=tuple(shapes[keys[0]]))
    why = reasons.explain(name)
    misfit = placing.misfits.get(name)
    return module(
        model_shape=None if misfit is None else misfit.model,
        reason=why.reason,
        detail=why.detail,
        nearest=reasons.nearest(name),
    )


def _with_values(lora: LoraFile, module: ModuleVerdict, stated: "_Stated") -> ModuleVerdict:
    """The module with its norm, alpha and scale; if its numbers are not finite, only that is added."""
    name = module.name
    product = stated.norms.get(name)
    try:
        if product is not None and isfinite(product):
            alpha, rank = lora.alpha_of(name), lora.rank_of(name) or 1
            scale = scale_of_factors(alpha, rank, lora.shape_of(name))
            norm = abs(scale) * product
            return replaced(
                module, finite=True, norm=norm, alpha=stated.alpha(name, alpha, rank, scale), scale=scale
            )
        change = lora.change(name)
        norm_there = norm_without_base(change)
        if not isinstance(change, LoraFactors):
            return replaced(module, finite=True, norm=norm_there)
    except NonFiniteError:
        return replaced(module, finite=False)
    alpha_there = stated.alpha(name, change.alpha, change.rank, change.scale)
    return replaced(module, finite=True, norm=norm_there, alpha=alpha_there, scale=change.scale)


class _Stated:
    """What a file says of its modules' numbers.

    Args:
        lora: In the file.
        keys: All of the file's; none of a LoRA in memory.
    """

    def __init__(self, lora: LoraFile, keys: Collection[str]) -> None:
        self._keys = keys
        self._stored_names = lora.stored_names
        self.norms = _norms_of_products(lora)

    def alpha(self, name: str, alpha: float, rank: int, scale: float) -> float | None:
        """The alpha, if it is stated, or tells something."""
        if self._keys:
            is_stated = f"{self._stored_names.get(name, name)}.alpha" in self._keys
        else:
            is_stated = alpha != rank
        return alpha if is_stated or scale != 1.0 else None


def _norms_of_products(lora: LoraFile) -> dict[str, float]:
    """‖up · down‖ of the modules that are read together; NaN or Inf where a factor has one.

    ‖up · down‖² = Σ (upᵀup) ∘ (down·downᵀ): if a number is not finite, its square makes a sum so, and the norm.
    """
    norms: dict[str, float] = {}
    for names, ups, downs in lora.stacks(lora.names):
        wide_ups, wide_downs = as_float64(ups), as_float64(downs)
        squares = ((wide_ups.mT @ wide_ups) * (wide_downs @ wide_downs.mT)).sum((1, 2))
        norms |= zip(names, squares.clamp(min=0.0).sqrt().tolist(), strict=True)
    return norms


def place(
    lora: LoraFile, shapes: Shapes, weights: Weights | None = None, path: Path | None = None
) -> Placement:
    """Find the weights that every module changes. No tensor is read, and nothing is raised.

    Args:
        lora: In any format.
        shapes: The shapes of all the model's weights, by key.
        weights: As for `align`.
        path: The model's file, if it is known.
    """
    layout = layout_for(lora, layout_of(shapes), path)
    layers = [key.removesuffix(WEIGHT) for key in shapes]
    index = LayerIndex.of(layers, layout)
    own = tuple(key.removesuffix(WEIGHT) for key, shape in shapes.items() if is_layer(key, shape))
    twins = _twins(lora, index)
    rest = lora.only({name for name in lora.names if name not in twins}) if twins else lora
    try:
        aligned = align(rest, layers, layout, weights=weights, index=index)
    except SigmascopeError:  # no table of fused matrices can divide these names or shapes
        placing = Placement(None, layout, index, own, twins=twins)
        for name in rest.names:
            layer = index.layer_of(name, rest.shape_of(name))
            if layer is not None:
                _land(placing, shapes, name, layer, rest.shape_of(name))
        return placing
    placing = Placement(aligned.lora, layout, index, own, twins=twins)
    for layer, names in aligned.sources.items():
        for name in names:
            _land(placing, shapes, name, layer, aligned.lora.shape_of(layer))
    return placing


def _twins(lora: LoraFile, index: LayerIndex) -> dict[str, str]:
    taken: dict[str, str] = {}
    twins: dict[str, str] = {}
    for name in lora.names:
        layer = index.layer_of(name, lora.shape_of(name))
        if layer in taken:
            twins[name] = taken[layer]
        elif layer is not None:
            taken[layer] = name
    return twins


def _land(placing: Placement, shapes: Shapes, name: str, layer: str, own: tuple[int, ...]) -> None:
    key = f"{layer}{WEIGHT}" if f"{layer}{WEIGHT}" in shapes else layer
    if key not in shapes:  # a bias that the layer does not have
        return
    if fits(own, shapes[key]):
        placing.keys[name] = (*placing.keys.get(name, ()), key)
    else:
        placing.misfits[name] = Misfit(key, own, shapes[key])


def fits(own: tuple[int, ...], model: tuple[int, ...]) -> bool:
    """Whether a change for a weight of one shape can be applied to a weight of another; () fits any."""
    if not own:
        return True
    if min(len(own), len(model)) < _MATRIX_AXES:
        return own == model
    return same_matrix(own, model)


def _part_of(name: str) -> Part:
    """The part of a model in a module's name; the denoiser if the name says none."""
    parts = parse_name(name.removesuffix(_BIAS)).parts
    return parts[0] if parts else "denoiser"


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights, by their names without adapters and wrappers.

    Args:
        model: See `Model`. With several parts, each name begins with the part's name, as in a diffusers pipeline.
            Weights of ComfyUI's modules keep the names of its files.

    Raises:
        ModelMismatchError: No weights are found in it.
    """
    if isinstance(model, nn.Module):
        shapes = dict(_named_shapes(model))
    elif isinstance(model, Checkpoint):
        shapes = {key: model.info(key).shape for key in model}
    else:
        parts = model if isinstance(model, Mapping) else getattr(model, "components", None)
        shapes = _of_parts(parts) if isinstance(parts, Mapping) else {}
    if not shapes:
        raise ModelMismatchError(
            f"no weights were found in the {type(model).__name__}.",
            hint="Pass an nn.Module, open_checkpoint(PATH) of a file or folder, shapes by name, or the parts of a "
            "pipeline by name.",
        )
    return shapes


def _of_parts(parts: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            for key, shape in _named_shapes(part):
                if key.startswith(_COMFYUI_ENCODERS):
                    key = f"text_encoders.{key}"
                elif not key.startswith(_DENOISERS):
                    key = f"{name}.{key}"
                shapes[key] = shape
        elif isinstance(part, tuple | list):
            shapes[str(name)] = tuple(int(size) for size in part)
    return shapes


def _named_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of weights by their names without adapters; a quantised matrix has its unpacked shape."""
    for name, module, tensor in base_tensors(model):
        if isinstance(module, nn.Linear) and (name == "weight" or name.endswith(WEIGHT)):
            yield name, (int(module.out_features), int(module.in_features))
        else:
            yield name, tuple(tensor.shape)
