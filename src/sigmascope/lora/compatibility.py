"""Whether a LoRA file is for a model (judge_lora): where each module lands, or why it does not.

`place` finds the weights that each module lands on, with nothing refused; `shapes_of` gives a model's weights by name
and shape, whatever holds them: a module, a pipeline's parts, a checkpoint. Of a module that changes nothing, `MismatchReasons`
says why, the likeliest reason first, with the model's names that are nearest to its own (`NearestNames`).

`relative_strengths` measures how much of the model's weights a LoRA changes, ‖ΔW‖ / ‖W‖, from files: one weight in
memory at a time.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError, SigmascopeError
from sigmascope.lora.alignment import align
from sigmascope.lora.effect import Effect, finite, weight_norm
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout, Part, Shapes, layout_of
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats import ALPHA
from sigmascope.lora.layer_names import UNET_FAMILIES, WEIGHT, block_of_module, is_layer
from sigmascope.lora.linalg import root_sum_square, same_matrix
from sigmascope.lora.module_names import (
    FileFamily,
    LayerIndex,
    ModuleName,
    file_family,
    flat,
    parse_name,
    title_of,
)
from sigmascope.lora.reader import open_any_kind
from sigmascope.lora.verdict import LoraVerdict, ModuleVerdict, Reason, findings_of, unreadable
from sigmascope.probes.peft import adapted_modules, base_weights
from sigmascope.probes.reading import describe
from sigmascope.progress import Progress, no_progress

_BIAS: Final = ".bias"
Model = object
"""An nn.Module, a mapping of shapes or modules by name, a Checkpoint, or a pipeline with `components`."""

# Why a module changes nothing.
_NOTHING_NEAR: Final = frozenset({"text_encoder_missing", "part_missing", "twice"})
_SPOKEN: Final = {"text_encoder_2": "second text encoder", "text_encoder_3": "third text encoder"}
_NUMBER: Final = re.compile(r"\d+")
_LONGEST_PREFIX: Final = 4  # words
_WORD: Final = re.compile(r"[^.]+\.")
_FLAT_WORD: Final = re.compile(r"[^_]+_")
_NAME_WORDS = re.compile(r"[^._]+")
_MATRIX: Final = 2  # axes

# How ComfyUI's modules name their weights, and the text encoders that it keeps apart from the denoiser.
_COMFYUI_ENCODERS: Final = ("clip_l.", "clip_g.", "clip_h.", "t5xxl.", "umt5xxl.", "qwen25_7b.")
_DENOISERS: Final = ("diffusion_model.", "model.diffusion_model.", "denoiser.")


def judge_lora(lora: str | PathLike[str] | LoraFile, model: Model, *, values: bool = True) -> LoraVerdict:
    """Say of every module of a LoRA whether it changes a weight of a model, and if not, why not.

    Names are understood in every format (kohya, PEFT, native, ComfyUI) and naming of the known families, so a
    module that is unmatched here matches in no loader. A loader may still know fewer names than this does: what is
    known of that is among the findings.

    Args:
        lora: A file of any format, or a LoRA in memory.
        model: The model's shapes by key, or an `nn.Module`, an open `Checkpoint`, a diffusers pipeline, or
            modules by the names that their parts have there (`{"unet": …, "text_encoder": …}`; ComfyUI's model
            and CLIP under any names). Only shapes are looked at.
        values: Also read the LoRA's numbers: NaN and Inf, alphas and strength.

    Returns:
        The verdict. Nothing is raised: a file or model that cannot be read is a verdict with an `error`.
    """
    path = str(lora.path) if isinstance(lora, LoraFile) and lora.path else None
    try:
        if not isinstance(lora, LoraFile):
            path = str(lora)
        with _opened(lora) as (file, keys):
            return _module_verdicts(file, keys, shapes_of(model), path, values)
    except SigmascopeError as error:
        return LoraVerdict(path, error=str(error), findings=(unreadable(error),))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return LoraVerdict(path, error=describe(error), findings=(unreadable(error),))


@contextmanager
def _opened(lora: str | PathLike[str] | LoraFile) -> Iterator[tuple[LoraFile, tuple[str, ...]]]:
    """The LoRA with its modules still in the file, and the file's keys."""
    if isinstance(lora, LoraFile):
        yield lora, ()
        return
    with open_checkpoint(Path(lora)) as checkpoint:
        keys = tuple(checkpoint.keys())
    with open_any_kind(Path(lora)) as file:
        yield file, keys


def _module_verdicts(
    lora: LoraFile, keys: tuple[str, ...], shapes: Shapes, path: str | None, values: bool
) -> LoraVerdict:
    placing, family = place(lora, shapes), file_family(lora)
    reasons = MismatchReasons(lora, placing, family)
    modules = tuple(_module_verdict(lora, name, placing, shapes, reasons) for name in lora.names)
    if values:
        modules = tuple(_with_values(lora, module, keys) for module in modules)
    known = placing.layout.family
    verdict = LoraVerdict(
        path=path,
        format=lora.format,
        file_family=family.family,
        family_evidence=family.evidence,
        model_family=None if known == "unknown" else known,
        model_naming=placing.layout.naming,
        modules=modules,
        unused_keys=lora.unused_keys,
        unavailable={} if values else {"values": "not asked for: numbers were not read"},
    )
    return replace(verdict, findings=findings_of(verdict, keys))


@dataclass(frozen=True, slots=True)
class Misfit:
    """A module whose name fits a weight of another shape."""

    key: str
    own: tuple[int, ...]
    model: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A LoRA's modules against a model's weights.

    Attributes:
        lora: The LoRA under the model's names, as far as it could be aligned; None if it could not.
        layout: The model's.
        index: Its layers and other tensors, by every name.
        layers: Paths of its Linear and convolution layers.
        keys: The weights that each module lands on, by the module's name.
        misfits: Modules that would land on weights of other shapes.
        twins: Modules that are for a layer another module has already: that module.
    """

    lora: LoraFile | None
    layout: ModelLayout
    index: LayerIndex
    layers: tuple[str, ...] = ()
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    misfits: dict[str, Misfit] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)


class Mismatch(NamedTuple):
    """A reason, and the same in words."""

    reason: Reason
    detail: str


class NearestNames:
    """Names compared by their words, dots and underscores alike, rare words counting for more.

    Args:
        names: Of the model's layers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        counts = [Counter(_NAME_WORDS.findall(name)) for name in self._names]
        self._times: dict[str, NDArray[np.float64]] = {}
        for index, words in enumerate(counts):
            for word, times in words.items():
                self._times.setdefault(word, np.zeros(len(self._names)))[index] = times
        # Of two names that share as much the shorter is nearer.
        self._lengths = np.array([sum(words.values()) or 1 for words in counts], dtype=np.float64) ** 0.25

    def nearest(self, name: str, count: int = 3) -> tuple[str, ...]:
        """Up to `count` names, the nearest first; none that shares no word."""
        scores = np.zeros(len(self._names))
        for word, times in Counter(_NAME_WORDS.findall(name)).items():
            having = self._times.get(word)
            if having is not None:
                rarity = log(1.0 + len(self._names) / np.count_nonzero(having))
                scores += rarity * np.minimum(having, times)
        scores /= self._lengths
        best = np.argsort(-scores, kind="stable")[:count]
        return tuple(self._names[index] for index in best if scores[index] > 0.0)


class MismatchReasons:
    """Explains the modules of one LoRA that do not land in one model.

    Args:
        lora: The LoRA.
        placing: Where its modules land.
        family: What the file is for.
    """

    def __init__(self, lora: LoraFile, placing: Placement, family: FileFamily) -> None:
        self._lora = lora
        self._placing = placing
        self._family = family
        self._model_family = placing.layout.family
        self._near: dict[str, NearestNames] = {}

    def explain(self, name: str) -> Mismatch:
        """Say why a module changes nothing."""
        twin = self._placing.twins.get(name)
        if twin is not None:
            return Mismatch("twice", f"{twin} is for the same layer, and comes first")
        misfit = self._placing.misfits.get(name)
        if misfit is not None:
            return self._of_shape(misfit)
        parsed = parse_name(name.removesuffix(_BIAS))
        return (
            self._of_part(parsed)
            or self._of_family(parsed)
            or self._of_block(name, parsed)
            or self._of_prefix(name)
            or Mismatch("unknown", self._unknown(name))
        )

    def nearest(self, name: str) -> tuple[str, ...]:
        """Names of the model's layers that are nearest to a module's, in the part that it names if that is there."""
        if self.explain(name).reason in _NOTHING_NEAR:
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
            numbers[part, _NUMBER.sub("#", name)] |= layers
        return dict(numbers)

    def _of_shape(self, misfit: Misfit) -> Mismatch:
        shapes = f"it is made for a weight of {misfit.own}, and {misfit.key} is {misfit.model}"
        if self._other_family:
            return Mismatch("other_architecture", f"{shapes}: {self._families}")
        if misfit.own == misfit.model[::-1]:
            return Mismatch("transposed", f"{shapes}: its factors are the wrong way round")
        return Mismatch("other_shape", shapes)

    def _of_part(self, parsed: ModuleName) -> Mismatch | None:
        there = self._placing.layout.prefixes
        if not parsed.parts or any(part in there for part in parsed.parts):
            return None
        part = parsed.parts[0]
        spoken = _SPOKEN.get(part, part.replace("_", " "))
        reason: Reason = "text_encoder_missing" if part.startswith("text_encoder") else "part_missing"
        return Mismatch(reason, f"it is for the {spoken}, which the model given does not have")

    def _of_family(self, parsed: ModuleName) -> Mismatch | None:
        in_denoiser = not parsed.parts or parsed.parts[0].startswith("denoiser")
        return Mismatch("other_architecture", self._families) if in_denoiser and self._other_family else None

    def _of_block(self, name: str, parsed: ModuleName) -> Mismatch | None:
        path = _NUMBER.sub("#", flat(parsed.path))
        parts: tuple[Part, ...] = parsed.parts or ("denoiser", "other")
        for part in parts:
            layers = self._other_numbers.get((part, path.removeprefix("text_model_")))
            if layers:
                blocks = len({block_of_module(layer) for layer in layers})
                return Mismatch(
                    "block_missing",
                    f"the model has such layers in {blocks} blocks, and no {block_of_module(name)} with one",
                )
        return None

    def _of_prefix(self, name: str) -> Mismatch | None:
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
                    return Mismatch("prefix", f"without {cut} before it, its name is that of {layer}")
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


def _module_verdict(
    lora: LoraFile, name: str, placing: Placement, shapes: Shapes, reasons: MismatchReasons
) -> ModuleVerdict:
    facts = lora.facts_of(name)
    module = ModuleVerdict(name, facts.kind, facts.weight_shape, _part_of(name), facts.rank)
    keys = placing.keys.get(name, ())
    if keys and name not in placing.misfits:
        return replace(module, layers=keys, model_shape=tuple(shapes[keys[0]]))
    why = reasons.explain(name)
    misfit = placing.misfits.get(name)
    return replace(
        module,
        model_shape=None if misfit is None else misfit.model,
        reason=why.reason,
        detail=why.detail,
        nearest=reasons.nearest(name),
    )


def _with_values(lora: LoraFile, module: ModuleVerdict, keys: tuple[str, ...]) -> ModuleVerdict:
    """The module with what its numbers say; one that cannot be read keeps what its header says."""
    name = module.name
    try:
        change = lora.change(name)
        if not isinstance(change, LoraFactors):
            norm = None if getattr(change, "needs_base", False) else change.frobenius_norm()
            return replace(module, finite=True, norm=norm)
        norm = change.frobenius_norm()
    except NonFiniteError:
        return replace(module, finite=False)
    has_alpha = f"{name}.{ALPHA}" in keys or (not keys and change.alpha != change.rank)
    stated = change.alpha if has_alpha or change.scale != 1.0 else None
    return replace(module, finite=True, norm=norm, alpha=stated, scale=change.scale)


def place(lora: LoraFile, shapes: Shapes) -> Placement:
    """Find the weights of every module; nothing is read and nothing raised.

    Args:
        lora: In any format.
        shapes: Of all the model's weights, by key.
    """
    layout = layout_of(shapes)
    layers = [key.removesuffix(WEIGHT) for key in shapes]
    index = LayerIndex.of(layers, layout)
    own = tuple(key.removesuffix(WEIGHT) for key, shape in shapes.items() if is_layer(key, shape))
    twins = _twins(lora, index)
    rest = lora.only({name for name in lora.names if name not in twins}) if twins else lora
    try:
        aligned = align(rest, layers, layout)
    except SigmascopeError:  # names or shapes that no table of fused matrices can divide
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
    if key not in shapes:  # the bias of a layer that has none
        return
    if fits(own, shapes[key]):
        placing.keys[name] = (*placing.keys.get(name, ()), key)
    else:
        placing.misfits[name] = Misfit(key, own, shapes[key])


def fits(own: tuple[int, ...], model: tuple[int, ...]) -> bool:
    """Whether a change of a weight of one shape is one of a weight of the other; () fits any."""
    if not own:
        return True
    if min(len(own), len(model)) < _MATRIX:
        return own == model
    return same_matrix(own, model)


def _part_of(name: str) -> Part:
    """The part of a model that a module's name says; the denoiser where it says none."""
    parts = parse_name(name.removesuffix(_BIAS)).parts
    return parts[0] if parts else "denoiser"


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights by the names that they have without adapters and wrappers.

    Args:
        model: See `Model`. Of several parts each name begins with the part's, as in a diffusers pipeline, but for
            ComfyUI's modules, whose names are those of its files.

    Raises:
        ModelMismatchError: It holds no weights that are known how to find.
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
            f"{type(model).__name__} holds no weights that are known how to find.",
            hint="Give an nn.Module, shapes by name, or the parts of a pipeline by name.",
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
    """Weights by the names that they have without adapters; a quantised matrix by what it stands for."""
    packed = {
        f"{name}.weight" if name else "weight": (module.out_features, module.in_features)
        for name, module in adapted_modules(model)
        if isinstance(module, nn.Linear)
    }
    for key, tensor in base_weights(model):
        yield key, packed.get(key, tuple(tensor.shape))


def relative_strengths(
    lora: str | PathLike[str], verdict: LoraVerdict, model: Checkpoint, *, progress: Progress = no_progress
) -> Mapping[str, Effect]:
    """Measure every module that matches beside the weights that it changes, at LoRA strength 1.

    Args:
        lora: The file.
        verdict: Of this file and model, with values.
        model: The open checkpoint, of which only the weights that the LoRA changes are read.
        progress: Told after each module.

    Returns:
        The effects by the file's module names. A fused module's weight is all that it changes together.
    """
    effects: dict[str, Effect] = {}
    with open_any_kind(Path(lora)) as file:
        for module in verdict.matched:
            effects[module.name] = _effect(file, module, model)
            progress(len(effects), len(verdict.matched), module.name)
    return effects


def _effect(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> Effect:
    try:
        whole = root_sum_square([weight_norm(model.tensor(key)) for key in module.layers])
        delta = module.norm if module.norm is not None else _beside_base(lora, module, model)
    except SigmascopeError as error:
        missing = "delta_norm" if module.norm is None else "weight_norm"
        unavailable = dict.fromkeys((missing, "relative_change"), error.message)
        return Effect(module.norm, None, None, True, 1, unavailable=unavailable)
    if whole == 0.0:
        return Effect(delta, None, whole, True, 1, unavailable={"relative_change": "the weight is all zeros"})
    return Effect(delta, delta / whole, whole, True, 1)


def _beside_base(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> float:
    """‖ΔW‖ of a change that depends on the weight."""
    if module.finite is False:
        raise LoraFormatError("the module holds NaN or Inf.")
    if len(module.layers) != 1:
        raise LoraFormatError(f"a {module.kind} change of several weights is not measured.")
    base = model.tensor(module.layers[0]).to(torch.float64)
    return finite(lora.changes[module.name].frobenius_norm(base))
