"""Whether a LoRA file is for a model (`judge_lora`), and whether its modules are really on it (`judge_applied`).

`shapes_of` reads a model's weights by name and shape, and `place` finds the weights that each module changes. For a
module that changes nothing, `MismatchReasons` says why, the likeliest reason first, and names the model's nearest layers.

A patch on the model is a module of the file if its numbers are the same (`is_same`), in any dtype and scale.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import ModelMismatchError, NonFiniteError, SigmascopeError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.alignment import align
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import UNET_FAMILIES, ModelLayout, Part, Shapes, layout_of
from sigmascope.lora.families.known import PARTS_BY_ENCODER
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import WEIGHT, NearestNames, block_of_module, is_layer
from sigmascope.lora.linalg import as_float64, same_matrix
from sigmascope.lora.module_names import (
    FileFamily,
    LayerIndex,
    ModuleName,
    file_family,
    flat,
    parse_name,
    title_of,
)
from sigmascope.lora.reader import OpaqueChange, open_any_kind
from sigmascope.lora.verdict import (
    ABSENCES,
    LoraVerdict,
    ModuleVerdict,
    Reason,
    unreadable,
    verdict_finding,
    verdict_findings,
)
from sigmascope.probes.applied_patch import AppliedPatch, PatchState
from sigmascope.probes.copies import on_host
from sigmascope.probes.peft import adapted_modules, base_weights
from sigmascope.probes.reading import describe
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted, first_few

_BIAS: Final = ".bias"
Model = object
"""An nn.Module, a mapping of shapes or modules by name, a Checkpoint, or a pipeline with `components`."""

_REASONS_WITHOUT_NEAREST: Final = frozenset({"text_encoder_missing", "part_missing", "twice"})
_PART_TITLES: Final = {"text_encoder_2": "second text encoder", "text_encoder_3": "third text encoder"}
_NUMBER: Final = re.compile(r"\d+")
_MAX_PREFIX_WORDS: Final = 4
_WORD: Final = re.compile(r"[^.]+\.")
_FLAT_WORD: Final = re.compile(r"[^_]+_")
_MATRIX_AXES: Final = 2

# Prefixes of ComfyUI's weights: those of text encoders, which are separate from the denoiser, and of denoisers.
_COMFYUI_ENCODERS: Final = tuple(f"{encoder}." for encoder in PARTS_BY_ENCODER)
_DENOISERS: Final = ("diffusion_model.", "model.diffusion_model.", "denoiser.")

Change = LoraFactors | WeightChange
_MIN_SAME_COSINE: Final = 0.999
"""Tensors that differ only by scale and by rounding to bfloat16 or float16 have a larger cosine."""
_PROBE_COUNT: Final = 4
_MIN_PROBE_COSINE: Final = 0.9
# The name that patches give a file's tensor, once its adapter prefix is removed.
_PATCH_NAMES: Final = {
    "lora_up.weight": "up",
    "lora_down.weight": "down",
    "lora_mid.weight": "mid",
    "diff_b": "diff",
    "w_norm": "diff",
    "b_norm": "diff",
    "set_weight": "set",
}
_ADAPTER_KEY_PREFIXES: Final = ("hada_", "lokr_")


def judge_lora(lora: str | PathLike[str] | LoraFile, model: Model, *, values: bool = True) -> LoraVerdict:
    """Say for every module of a LoRA whether it changes a weight of a model, and if not, why not.

    Names of every format (kohya, PEFT, native, ComfyUI) and of all known families are understood, so a module that is
    unmatched here matches in no loader. A loader may know fewer names; the findings say where that is known.

    Args:
        lora: A file of any format, or a LoRA in memory.
        model: The model's shapes by key, an `nn.Module`, an open `Checkpoint`, a diffusers pipeline, or modules by the
            name of their part in a pipeline (`{"unet": …, "text_encoder": …}`; ComfyUI's model and CLIP under
            any names). Only its shapes are read.
        values: Also read the LoRA's numbers: NaN and Inf, alphas and strength.

    Returns:
        The verdict. Nothing is raised: if the file or model cannot be read, the verdict has an `error`.
    """
    path = str(lora.path) if isinstance(lora, LoraFile) and lora.path else None
    try:
        if not isinstance(lora, LoraFile):
            path = str(lora)
        with _opened(lora) as (file, keys):
            return _module_verdicts(file, keys, shapes_of(model), path, values)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return LoraVerdict(path, error=_error_text(error), findings=(unreadable(error),))


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, SigmascopeError) else describe(error)


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
        unavailable={} if values else {"values": "the numbers were not read, as asked"},
    )
    return replace(verdict, findings=verdict_findings(verdict, keys))


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
            return Mismatch("twice", f"{twin} changes the same layer and comes first")
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
            numbers[part, _NUMBER.sub("#", name)] |= layers
        return dict(numbers)

    def _of_shape(self, misfit: Misfit) -> Mismatch:
        shapes = f"it is made for a weight {misfit.own}, but {misfit.key} is {misfit.model}"
        if self._other_family:
            return Mismatch("other_architecture", f"{shapes}: {self._families}")
        if misfit.own == misfit.model[::-1]:
            return Mismatch("transposed", f"{shapes}: its factors are transposed")
        return Mismatch("other_shape", shapes)

    def _of_part(self, parsed: ModuleName) -> Mismatch | None:
        there = self._placing.layout.prefixes
        if not parsed.parts or any(part in there for part in parsed.parts):
            return None
        part = parsed.parts[0]
        title = _PART_TITLES.get(part, part.replace("_", " "))
        reason: Reason = "text_encoder_missing" if part.startswith("text_encoder") else "part_missing"
        return Mismatch(reason, f"it is for the {title}, which was not given")

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
                    f"the model has this layer in {blocks} blocks, but not in {block_of_module(name)}",
                )
        return None

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
        return f"{title_of(self._model_family)} has no layer with that name"


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
    """The module with its norm, alpha and scale; if its numbers are not finite, only that is added."""
    name = module.name
    try:
        change = lora.change(name)
        if not isinstance(change, LoraFactors):
            norm = None if getattr(change, "needs_base", False) else change.frobenius_norm()
            return replace(module, finite=True, norm=norm)
        norm = change.frobenius_norm()
    except NonFiniteError:
        return replace(module, finite=False)
    has_alpha = f"{name}.alpha" in keys or (not keys and change.alpha != change.rank)
    stated = change.alpha if has_alpha or change.scale != 1.0 else None
    return replace(module, finite=True, norm=norm, alpha=stated, scale=change.scale)


def place(lora: LoraFile, shapes: Shapes) -> Placement:
    """Find the weights that every module changes. No tensor is read, and nothing is raised.

    Args:
        lora: In any format.
        shapes: The shapes of all the model's weights, by key.
    """
    layout = layout_of(shapes)
    layers = [key.removesuffix(WEIGHT) for key in shapes]
    index = LayerIndex.of(layers, layout)
    own = tuple(key.removesuffix(WEIGHT) for key, shape in shapes.items() if is_layer(key, shape))
    twins = _twins(lora, index)
    rest = lora.only({name for name in lora.names if name not in twins}) if twins else lora
    try:
        aligned = align(rest, layers, layout)
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
            hint="Pass an nn.Module, shapes by name, or the parts of a pipeline by name.",
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
    packed = {
        f"{name}.weight" if name else "weight": (module.out_features, module.in_features)
        for name, module in adapted_modules(model)
        if isinstance(module, nn.Linear)
    }
    for key, tensor in base_weights(model):
        yield key, packed.get(key, tuple(tensor.shape))


_CANCELLED: Final = 1e-6
"""A sum of strengths below this is rounding."""


@dataclass(frozen=True, slots=True)
class AppliedModule:
    """One module of a LoRA file, and where its numbers were found on the model.

    Attributes:
        name: Its name in the file.
        keys: The model's weights on which its numbers were found.
        times: How often it is applied to one weight, where it acts; above 1, more than once.
        states: The states of its patches, each once.
        state_reason: The reason for the first patch's state.
        strength: The factor on the file's ΔW, summed over all patches of one weight; None if the module was not found
            or is not a plain change.
        sources: The adapters that hold it, if the host names them.
        detail: Why it was not found; None if it was.
    """

    name: str
    keys: tuple[str, ...] = ()
    times: int = 0
    states: tuple[PatchState, ...] = ()
    state_reason: str = ""
    strength: float | None = None
    sources: tuple[str, ...] = ()
    detail: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is on the model, acting or not."""
        return bool(self.keys)

    @property
    def acts(self) -> bool:
        """Whether it changes, or will change, the model's outputs."""
        return bool({"merged", "lazy", "registered"} & set(self.states))

    @property
    def cancels(self) -> bool:
        """Whether it is applied more than once, with strengths that sum to 0."""
        sums_to_0 = self.strength is not None and abs(self.strength) < _CANCELLED
        return self.times > 1 and self.acts and sums_to_0

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        listed = {name: list(getattr(self, name)) for name in ("keys", "states", "sources")}
        return asdict(self) | listed | {"is_there": self.is_there, "acts": self.acts}


@dataclass(frozen=True, slots=True)
class AppliedVerdict:
    """Which modules of a file are on a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        modules: Every module of the file, in its order.
        error: Why the file or the model could not be read; then nothing else is known.
        findings: What is wrong, with advice, the worst first.
    """

    path: str | None
    modules: tuple[AppliedModule, ...] = ()
    error: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def there(self) -> tuple[AppliedModule, ...]:
        """Modules that are on the model."""
        return tuple(module for module in self.modules if module.is_there)

    @property
    def missing(self) -> tuple[AppliedModule, ...]:
        """Modules that are not on the model."""
        return tuple(module for module in self.modules if not module.is_there)

    @property
    def twice(self) -> tuple[AppliedModule, ...]:
        """Modules that are applied more than once."""
        return tuple(module for module in self.modules if module.times > 1)

    @property
    def complete(self) -> bool:
        """Whether all modules are on the model and act."""
        return bool(self.modules) and all(module.acts for module in self.modules)

    @property
    def states(self) -> dict[str, int]:
        """How many modules have a patch in each state."""
        return dict(Counter(state for module in self.there for state in module.states))

    @property
    def strengths(self) -> dict[float, int]:
        """How many modules have each strength, the most frequent first."""
        strengths = [round(module.strength, 2) for module in self.there if module.strength is not None]
        return dict(Counter(strengths).most_common())

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON values, totals first."""
        return {
            "path": self.path,
            "complete": self.complete,
            "error": self.error,
            "total_modules": len(self.modules),
            "modules_there": len(self.there),
            "modules_missing": len(self.missing),
            "modules_twice": len(self.twice),
            "states": self.states,
            "strengths": self.strengths,
            "findings": [asdict(finding) for finding in self.findings],
            "modules": [module.as_dict() for module in self.modules],
        }


def judge_applied(
    lora: str | PathLike[str] | LoraFile, patches: Sequence[AppliedPatch], model: Model | None = None
) -> AppliedVerdict:
    """Say for every module of a file whether it is on a model now. Modules are recognised by their numbers.

    Args:
        lora: A file of any format, or a LoRA in memory.
        patches: All patches on the model, as read from ComfyUI or PEFT; those of other LoRAs are ignored.
        model: The patched model; see `judge_lora`. Without it, a file whose naming differs from the model's is only
            found if the names of the patched weights alone show the model's family.

    Returns:
        The verdict. Nothing is raised: if the file cannot be read, the verdict has an `error`.
    """
    path = str(lora.path or "") or None if isinstance(lora, LoraFile) else str(lora)
    try:
        if model is not None:
            shapes = shapes_of(model)
        else:
            shapes = {patch.key: patch.weight_shape for patch in patches if patch.weight_shape is not None}
        by_key: defaultdict[str, list[AppliedPatch]] = defaultdict(list)
        for patch in _on_host(patches):
            by_key[patch.key].append(patch)
        opened = (
            nullcontext(lora) if isinstance(lora, LoraFile) else open_any_kind(Path(lora), check_finite=False)
        )
        with opened as file:
            placing = place(file, shapes)
            modules = tuple(_applied_module(file, name, placing, by_key) for name in file.names)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return AppliedVerdict(path, error=_error_text(error), findings=(unreadable(error),))
    return AppliedVerdict(path, modules, findings=applied_findings(modules))


def _on_host(patches: Sequence[AppliedPatch]) -> Iterator[AppliedPatch]:
    """The patches with their tensors on the CPU, so that a device is not waited for once for each."""
    held = on_host(
        {(place, name): part for place, patch in enumerate(patches) for name, part in patch.tensors.items()}
    )
    for place, patch in enumerate(patches):
        yield replace(patch, tensors={name: held[place, name] for name in patch.tensors})


def _applied_module(
    lora: LoraFile, name: str, placing: Placement, patches: Mapping[str, Sequence[AppliedPatch]]
) -> AppliedModule:
    misfit = placing.misfits.get(name)
    keys = placing.keys.get(name) or (() if misfit is None else (misfit.key,))
    if not keys:
        return AppliedModule(name, detail=ABSENCES["no_weight"])
    candidates = [(key, patch) for key in keys for patch in patches.get(key, ())]
    if not candidates:
        return AppliedModule(name, detail=ABSENCES["no_change"].format(key=keys[0]))
    try:
        own = _without_nan(lora.change(name))
    except NonFiniteError:  # of a kind that is read whole
        return AppliedModule(name, detail=ABSENCES["not_finite"])
    same = [
        (key, patch, change)
        for key, patch in candidates
        for change in [_matching_form(own, placing, key, _patch_without_nan(patch))]
        if change is not None
    ]
    if not same:
        others = {patch.source for _, patch in candidates if patch.source is not None}
        sources = f" of {', '.join(sorted(others))}" if others else ""
        return AppliedModule(name, detail=ABSENCES["others"].format(key=keys[0], sources=sources))
    return _there(name, same)


def _without_nan(change: Change) -> Change:
    """Zeros for NaN and Inf, so that the other numbers can be recognised."""
    if isinstance(change, LoraFactors) and not (_is_finite(change.up) and _is_finite(change.down)):
        return replace(
            change, up=torch.nan_to_num(change.up, 0, 0, 0), down=torch.nan_to_num(change.down, 0, 0, 0)
        )
    return change


def _patch_without_nan(patch: AppliedPatch) -> AppliedPatch:
    if all(map(_is_finite, patch.tensors.values())):
        return patch
    return replace(
        patch, tensors={name: torch.nan_to_num(tensor, 0, 0, 0) for name, tensor in patch.tensors.items()}
    )


def _is_finite(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize == 1 or bool(torch.isfinite(tensor).all())


def _matching_form(own: Change, placing: Placement, key: str, patch: AppliedPatch) -> Change | None:
    """The file's change if the patch is that; or its divided or joined form, for a fused matrix; or None."""
    if is_same(own, patch):
        return own
    lora, layer = placing.lora, key.removesuffix(WEIGHT)
    if lora is None or layer not in lora.modules:
        return None
    aligned = lora.modules[layer]
    return aligned if is_same(aligned, patch) else None


_IDLE: Final = frozenset({"inactive", "failed"})


def _there(name: str, same: Sequence[tuple[str, AppliedPatch, Change]]) -> AppliedModule:
    keys = tuple(dict.fromkeys(key for key, _, _ in same))
    acting = [key for key, patch, _ in same if patch.state not in _IDLE]
    counts = [acting.count(key) for key in keys]
    on_first = [(patch, change) for key, patch, change in same if key == keys[0]]
    strengths = [_strength(patch, change) for patch, change in on_first]
    known = [strength for strength in strengths if strength is not None]
    return AppliedModule(
        name=name,
        keys=keys,
        times=max(counts),
        states=tuple(dict.fromkeys(patch.state for _, patch, _ in same)),
        state_reason=same[0][1].state_reason,
        strength=sum(known) if len(known) == len(strengths) else None,
        sources=tuple(dict.fromkeys(patch.source for _, patch, _ in same if patch.source is not None)),
    )


def _strength(patch: AppliedPatch, change: Change) -> float | None:
    """The factor that one patch puts on the file's ΔW."""
    if patch.state in _IDLE:
        return 0.0
    if not isinstance(change, LoraFactors) or patch.strength is None or patch.scale is None:
        return None
    times = times_of(change, patch)
    return None if times is None else patch.strength * patch.scale * times


def is_same(change: Change, patch: AppliedPatch) -> bool:
    """Whether a patch is a change from a file, in any dtype and scale."""
    if isinstance(change, LoraFactors) and {"up", "down"} <= patch.tensors.keys():
        if "mid" in patch.tensors:
            return False
        return _same_product(change, patch)
    own = tensors_of(change)
    shared = own.keys() & patch.tensors.keys()
    return bool(shared) and all(_same_numbers(own[name], patch.tensors[name]) for name in shared)


def tensors_of(change: Change) -> Mapping[str, Tensor]:
    """A change's tensors, named as in `AppliedPatch.tensors`."""
    if isinstance(change, LoraFactors):
        return {"up": change.up, "down": change.down}
    if isinstance(change, DoraChange):
        return {**tensors_of(change.direction), "dora_scale": change.magnitude}
    if isinstance(change, OpaqueChange):
        return change.parts
    if isinstance(change, Adapter):
        return {_patch_name(name): tensor for name, tensor in change.parts.items()}
    return {}


def times_of(change: LoraFactors, patch: AppliedPatch) -> float | None:
    """The factor between a plain patch, at strength and scale 1, and the file's ΔW; None for other kinds and for ΔW = 0."""
    if patch.adapter_type != "lora" or not {"up", "down"} <= patch.tensors.keys() or change.scale == 0.0:
        return None
    if _are_the_factors(change, patch):
        return 1.0 / change.scale
    own = change.frobenius_norm()
    return _patch_factors(patch).frobenius_norm() / own if own > 0.0 else None


def _same_product(change: LoraFactors, patch: AppliedPatch) -> bool:
    """Compare ΔW, so that the host may scale and re-factor it; zero changes are compared by their factors."""
    if _are_the_factors(change, patch):
        return True
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    if (up.shape[0], down.shape[1]) != (change.up.shape[0], change.down.shape[1]):
        return False
    if _clearly_differ(change, up, down):
        return False
    factors = _patch_factors(patch)
    plain = LoraFactors(
        as_float64(change.up).cpu(), as_float64(change.down).cpu(), change.alpha, factors.weight_shape
    )
    lengths = plain.frobenius_norm() * factors.frobenius_norm()
    if lengths > 0.0:
        return plain.inner(factors) > _MIN_SAME_COSINE * lengths
    return _same_numbers(change.up, patch.tensors["up"]) and _same_numbers(change.down, patch.tensors["down"])


def _clearly_differ(change: LoraFactors, up: Tensor, down: Tensor) -> bool:
    """Whether a few random inputs already show that two ΔW are not multiples of each other."""
    probe = torch.randn(down.shape[1], _PROBE_COUNT, generator=torch.Generator().manual_seed(0))
    from_file, from_patch = (
        (up_factor.detach().cpu().float() @ (down_factor.detach().cpu().float() @ probe)).flatten()
        for up_factor, down_factor in ((change.up, change.down), (up, down))
    )
    lengths = float(torch.linalg.vector_norm(from_file)) * float(torch.linalg.vector_norm(from_patch))
    return lengths > 0.0 and float(from_file @ from_patch) < _MIN_PROBE_COSINE * lengths


def _are_the_factors(change: LoraFactors, patch: AppliedPatch) -> bool:
    """Whether the factors are equal after rounding to the narrower of the two dtypes."""
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    return _are_equal(change.up, up) and _are_equal(change.down, down)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(first.detach().to(second.device, narrow), second.detach().to(narrow))


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    first, second = as_float64(a).cpu().flatten(), as_float64(b).cpu().flatten()
    if len(first) != len(second):
        return False
    lengths = float(torch.linalg.vector_norm(first)), float(torch.linalg.vector_norm(second))
    if 0.0 in lengths:
        return lengths == (0.0, 0.0)
    return float(first @ second) > _MIN_SAME_COSINE * lengths[0] * lengths[1]


def _patch_factors(patch: AppliedPatch) -> LoraFactors:
    up, down = (as_float64(patch.tensors[name]).cpu().flatten(1) for name in ("up", "down"))
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _patch_name(part: str) -> str:
    for start in _ADAPTER_KEY_PREFIXES:
        part = part.removeprefix(start)
    return _PATCH_NAMES.get(part, part)


def applied_findings(modules: Sequence[AppliedModule]) -> tuple[Finding, ...]:
    """The findings for one file's modules, the worst first."""
    return (*_missing(modules), *_idle(modules), *_twice(modules))


def _missing(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    missing = [module for module in modules if not module.is_there]
    if not missing:
        return
    details = (module.detail or "" for module in missing)
    no_change = ABSENCES["no_change"]
    start = no_change.partition("{key}")[0]
    without_weight = (
        no_change.format(key="its weights") if detail.startswith(start) else detail for detail in details
    )
    why, _ = Counter(without_weight).most_common(1)[0]
    evidence: dict[str, JsonScalar] = {
        "modules": len(modules),
        "missing": len(missing),
        "first": missing[0].name,
        "detail": missing[0].detail,
    }
    total = counted(len(modules), "module")
    if len(missing) == len(modules):
        yield verdict_finding("lora_not_loaded", evidence, modules=total, why=why)
    else:
        yield verdict_finding(
            "lora_partly_loaded",
            evidence,
            missing=len(missing),
            modules=total,
            are=_are(missing),
            first=_named(missing),
        )


def _are(modules: Sequence[AppliedModule]) -> str:
    return "is" if len(modules) == 1 else "are"


def _idle(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    idle = [module for module in modules if module.is_there and not module.acts]
    if not idle:
        return
    failed = [module for module in idle if "failed" in module.states]
    reason = idle[0].state_reason or "switched off"
    yield verdict_finding(
        "lora_not_applicable" if failed else "lora_not_acting",
        {"modules": len(modules), "idle": len(idle), "failed": len(failed), "reason": reason},
        idle=len(idle),
        modules=counted(len(modules), "module"),
        are=_are(idle),
        reason=reason,
        first=_named(idle),
    )


def _twice(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    several = [module for module in modules if module.times > 1]
    cancelled = [module for module in several if module.cancels]
    twice = [module for module in several if not module.cancels]
    if cancelled:
        yield verdict_finding(
            "lora_cancelled",
            {"modules": len(cancelled), "strength": 0.0},
            holders=f"{len(cancelled)} of the file's {counted(len(modules), 'module')}",
            weights=_named(cancelled),
        )
    if twice:
        yield Finding(
            "lora_applied_twice",
            "warning",
            f"{len(twice)} of the file's {counted(len(modules), 'module')} {_are(twice)} applied more than once: {_named(twice)}.",
            {
                "modules": len(twice),
                "times": max(module.times for module in twice),
                "strength": twice[0].strength,
            },
            "Remove one, unless the doubled strength is intended.",
        )


def _named(modules: Sequence[AppliedModule]) -> str:
    return first_few([module.name for module in modules], most=3)
