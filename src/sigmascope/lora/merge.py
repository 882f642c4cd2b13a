"""Merge several LoRAs into one: the exact weighted sum, or TIES and DARE, at any rank.

The combined change of a layer is formed when it is asked for, so memory holds only a few layers.

TIES and DARE drop most of each change, so that the changes of several LoRAs interfere less. Their results do not have
low rank.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from os import PathLike
from pathlib import Path
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, file_sha256, open_checkpoint
from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import DiffChange, form_delta
from sigmascope.lora.alignment import AlignedLoras, align, align_all
from sigmascope.lora.budget import require_weighing
from sigmascope.lora.decompose import FormedChange, Truncatable, truncatable
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import UNET_FAMILIES, layout_of
from sigmascope.lora.file import (
    LazyDict,
    LoraFile,
    as_text,
    check_target,
    family_in,
    refuse_files,
    refuse_inputs,
)
from sigmascope.lora.file_family import file_family, title_of
from sigmascope.lora.fingerprint import BASE_FINGERPRINT
from sigmascope.lora.kinds import NEEDS_BASE
from sigmascope.lora.linalg import FULL_RANK, at_least_float32, same_matrix
from sigmascope.lora.module_names import is_of_family, parse_names
from sigmascope.lora.reader import open_lora
from sigmascope.lora.resize import (
    FULL_RANK_PLAN,
    InputLora,
    Metrics,
    RankPlan,
    ReductionReport,
    Resizer,
    is_cut,
    unread_tensors,
    unused_keys,
    write_reduced,
)
from sigmascope.lora.statistics import RIDGE
from sigmascope.lora.writer import (
    STORAGE_DTYPES,
    SavePrecision,
    dtype_name,
    measured_storage,
    names_to_keep,
    storage_dtype,
    writer_of_aligned,
)
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding
from sigmascope.units import counted

__all__ = ["CombineOptions", "MergeMethod", "RankPlan", "ReductionReport", "merge_lora_files"]


_NAMED: Final = 5  # modules in a message
_WEIGHT = ".weight"
# Header fields that say from which checkpoint a LoRA was made.
_BASE_FIELDS = (BASE_FINGERPRINT, "ss_new_sd_model_hash", "ss_sd_model_hash")


MethodName = Literal["linear", "ties", "ties_mergekit", "dare"]


_SEED_BITS: Final = 63  # that a generator takes


# For `kth_largest`.
_SORTED_WHOLE_UP_TO: Final = 1 << 16  # values up to which all are looked at
_SAMPLE_VALUES: Final = 1 << 14  # values of the sample


@dataclass(frozen=True, slots=True)
class MergeMethod:
    """One way to merge.

    Attributes:
        name: `linear`: the weighted sum. `ties` and `dare`: see the functions of that name; DARE's results are
            summed. `ties_mergekit`: TIES whose signs are elected by the weighted changes, as mergekit does it.
        density: For all but `linear`: the share of values to keep.
        seed: For `dare`: what the random choice starts from.

    Raises:
        ConfigError: The density is out of range.
    """

    name: MethodName = "linear"
    density: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_density(self.density)

    @property
    def is_linear(self) -> bool:
        """Whether the result is a plain sum, whose rank is at most the sum of its parts' ranks."""
        return self.name == "linear"

    def combine(
        self,
        module: str,
        deltas: Mapping[int, Float[Tensor, "*shape"]],
        weights: Mapping[int, float] | None = None,
    ) -> Float[Tensor, "*shape"]:
        """Make one change of several.

        Args:
            module: Its name, which is part of DARE's seed.
            deltas: The change that each LoRA makes at strength 1, by the LoRA's position among all.
            weights: Factor of each change, by the same positions; None for 1.

        Returns:
            In the changes' dtype.
        """
        if self.name == "ties":
            strengths = None if weights is None else [weights[position] for position in deltas]
            return ties(list(deltas.values()), self.density, strengths)
        if weights is not None:
            deltas = {position: delta * weights[position] for position, delta in deltas.items()}
        if self.name == "ties_mergekit":
            return ties(list(deltas.values()), self.density)
        if self.name == "dare":
            kept = [
                dare(delta, self.density, self._generator(module, position))
                for position, delta in deltas.items()
            ]
            return reduce(torch.add, kept)
        return reduce(torch.add, deltas.values())

    def describe(self) -> str:
        """Canonical text, for reports and headers."""
        if self.is_linear:
            return self.name
        seed = f", seed {self.seed}" if self.name == "dare" else ""
        return f"{self.name}, density {self.density:g}{seed}"

    def _generator(self, module: str, position: int) -> torch.Generator:
        """One stream a module and LoRA: the order of the work does not matter, nor what else is merged."""
        digest = hashlib.sha256(f"{self.seed}\n{position}\n{module}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS))


@dataclass(frozen=True, slots=True)
class CombineOptions:
    """The choices of one merge.

    Attributes:
        weights: Factor of each LoRA's change; 1 by default.
        method: How the changes of one layer become one.
        plan: How much rank each layer gets, or all layers together. By default, a plain sum keeps its whole rank;
            other results need a plan.
        save_precision: Dtype of the stored factors; by default the widest of the inputs'.
        format: `native`, `kohya`, `peft` or `comfyui`; by default the first LoRA's.
        base: The model, for DoRA and whole weights, whose change depends on it.
        statistics: A file of `sigmascope.lora.statistics` for the LoRAs' model: if the plan cuts ranks, the factors
            then minimise the error of the layers' outputs instead of that of their weights.
        ridge: Weight of directions that never occurred in the statistics, as a share of the mean.
    """

    weights: tuple[float, ...] | None = None
    method: MergeMethod = field(default_factory=MergeMethod)
    plan: RankPlan | None = None
    save_precision: SavePrecision | None = None
    format: str | None = None
    base: Path | None = None
    statistics: Path | None = None
    ridge: float = RIDGE


def merge_lora_files(
    loras: Sequence[str | PathLike[str]],
    save_to: str | PathLike[str],
    options: CombineOptions | None = None,
    *,
    progress: Progress = no_progress,
) -> ReductionReport:
    """Write one LoRA that makes the changes of several together.

    Formats may differ, and modules may be in only some of the LoRAs. A plain sum is exact: its factors are the LoRAs'
    factors side by side, reduced by QR and SVD to the requested rank. Memory holds a few layers at a time.

    Args:
        loras: LoRA files, at least one.
        save_to: The `.safetensors` file to write.
        options: Weights, method and ranks.
        progress: Told after each layer.

    Returns:
        Every layer's rank, and the true error of the stored factors compared with the merged change.

    Raises:
        ConfigError: The target is an input or a folder, there is not one weight for each LoRA, or ranks are needed and
            not given.
        CheckpointError: A file is missing, damaged, or no file of tensors.
        LoraFormatError: A file is not understood, or holds changes that depend on a base that is not given.
        ModelMismatchError: The LoRAs are for different models or change layers of different shape, or the statistics are
            of another model.
        NonFiniteError: NaN or Inf in a LoRA, or factors too large for the storage precision.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    options = options or CombineOptions()
    paths, target = [Path(path) for path in loras], Path(save_to)
    weights = require_weights(options.weights, len(paths))
    if options.plan is not None:
        is_of_use = options.plan.budget is not None and options.statistics is None
        require_weighing(options.plan.budget_weights, is_of_use=is_of_use)
    check_target(target)
    with ExitStack() as files:
        originals = [files.enter_context(open_lora(path)) for path in paths]
        lora_files = [lora.path or path for lora, path in zip(originals, paths, strict=True)]
        refuse_files(target, lora_files)
        _require_one_model(originals)
        bases = None
        if options.base is not None:
            checkpoint = files.enter_context(open_checkpoint(options.base))
            refuse_inputs(target, checkpoint)
            bases = BaseWeights(checkpoint, originals)
        if options.save_precision is not None:
            dtype = STORAGE_DTYPES[options.save_precision]
        else:
            with ExitStack() as read:
                dtype = storage_dtype(*(read.enter_context(open_checkpoint(file)) for file in lora_files))
        changes = MergedChanges(align_all(originals), weights, options.method, dtype, bases)
        shapes = {name: changes.shape(name) for name in changes.layers}
        plan = _rank_plan(changes, options)
        metrics = None
        if options.statistics is not None:
            if options.plan is None:
                raise ConfigError(
                    "--statistics only matter where ranks are cut, and nothing is cut.",
                    hint="Add --rank, --max_size or another rank option.",
                )
            refuse_files(target, [options.statistics])
            metrics = Metrics.read(options.statistics, options.ridge, originals, shapes, plan)
            changes = replace(changes, metrics=metrics)
        vectors = LazyDict({name: name for name in changes.vectors}, changes.vector)
        new_writer = partial(
            writer_of_aligned,
            target,
            changes.united,
            originals,
            options.format,
            _provenance(lora_files, weights, options.method, plan) | (metrics.metadata if metrics else {}),
            own_names=names_to_keep(changes.united, originals, options.format),
            compact=plan.budget is not None,
        )
        with new_writer() as output:
            resizer = Resizer(
                shapes=shapes,
                old_ranks={name: changes.old_rank(name) for name in changes.layers},
                load=changes.load,
                plan=plan,
                storage=measured_storage(new_writer, changes.dtype, shapes, vectors),
                family=changes.united.layout.family,
                has_metric=metrics is not None,
            )
            modules = write_reduced(output, resizer, vectors, progress, paths)
        return ReductionReport(
            inputs=tuple(map(InputLora.of, originals, paths, weights)),
            lora=target,
            format=output.format.name,
            dtype=dtype_name(changes.dtype),
            method=options.method.describe(),
            plan=plan.describe(),
            modules=modules,
            carried=changes.vectors,
            formed=changes.formed,
            findings=tuple(merge_findings(originals, changes.united)),
            unread=unread_tensors(originals),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
            loads=output.loads,
        )


def _told_family(lora: LoraFile, family: str) -> str:
    is_any_unet = file_family(lora).family is None and family in UNET_FAMILIES
    return "a U-Net" if is_any_unet else title_of(family)


def _require_one_model(loras: Sequence[LoraFile]) -> None:
    """Refuse LoRAs of which no family has layers of each: no model has a place for their sum.

    LoRAs that change no denoiser, or one of an unknown family, fit any model.
    """
    told: list[tuple[LoraFile, str, list[str]]] = []
    for lora in loras:
        names = parse_names(lora)
        placed = map(names.layout.split, names.layers.values())
        denoiser = [path for part, path in placed if part.startswith("denoiser")]
        if denoiser and names.layout.family != "unknown":
            told.append((lora, names.layout.family, denoiser))
    families = {family for _, family, _ in told}
    if len(families) > 1 and not any(
        all(any(is_of_family(family, path) for path in paths) for _, _, paths in told) for family in families
    ):
        listed = ", ".join(f"{lora} is for {_told_family(lora, family)}" for lora, family, _ in told)
        raise ModelMismatchError(
            f"No model has layers for each of these LoRAs: {listed}.",
            hint="Merge LoRAs of one base model. sigmascope lora inspect tells what a LoRA is for.",
        )


def _rank_plan(changes: "MergedChanges", options: CombineOptions) -> RankPlan:
    """The plan asked for; by default everything is kept, if that is less than the whole weight."""
    if options.plan is not None:
        return options.plan
    if changes.formed:
        what = (
            f"--method {options.method.name} gives changes of full rank"
            if not options.method.is_linear
            else f"{counted(len(changes.formed), 'module is', 'modules are')} more than up and down factors: {', '.join(changes.formed[:_NAMED])}"
        )
        raise ConfigError(
            f"{what}, so a rank has to be chosen.",
            hint=f"Give --rank, --max_size or another rank option; --rank {FULL_RANK} keeps everything.",
        )
    return FULL_RANK_PLAN


def _provenance(
    lora_files: Sequence[Path], weights: Sequence[float], method: MergeMethod, plan: RankPlan
) -> dict[str, str]:
    return {
        "sigmascope_version": __version__,
        "sigmascope_merged_loras": merged_from(lora_files, weights),
        "sigmascope_merge_method": method.describe(),
        "sigmascope_rank": plan.header_text,
    }


def merged_from(files: Sequence[Path], weights: Sequence[float]) -> str:
    """What was merged, as JSON for a header: names, weights, and hashes that identify the files."""
    return json.dumps(
        [
            {"file": as_text(file.name), "weight": weight, "sha256": file_sha256(file)}
            for file, weight in zip(files, weights, strict=True)
        ]
    )


def merge_findings(loras: Sequence[LoraFile], aligned: AlignedLoras) -> Iterator[Finding]:
    """Give reasons to doubt that the LoRAs belong together.

    Args:
        loras: Under their own names.
        aligned: The same under common names.
    """
    families = {family for lora in loras if (family := family_in(lora.metadata)) is not None}
    if len(families) > 1:
        yield Finding(
            "lora.merge.families",
            "warning",
            f"The LoRAs say that they are for different models: {', '.join(sorted(families))}.",
            advice="Merge LoRAs of one base model.",
        )
    elif any(
        len({lora.metadata[name] for lora in loras if name in lora.metadata}) > 1 for name in _BASE_FIELDS
    ):
        yield Finding(
            "lora.merge.bases",
            "info",
            "By their headers, the LoRAs were made from different checkpoints of a model.",
            advice="Check the result: each change was made for its own base.",
        )
    shared = sum(len(aligned.positions(name)) > 1 for name in aligned.names)
    if len(loras) > 1 and shared == 0:
        yield Finding(
            "lora.merge.apart",
            "warning",
            "No two of the LoRAs change the same layer.",
            {"layers": len(aligned.names)},
            advice="Check that they are for the same model, and that their names are understood: lora inspect.",
        )
    yield from unused_keys(loras)


@dataclass(frozen=True)
class MergedChanges:
    """The merged change of each layer.

    Attributes:
        united: The LoRAs under common names.
        weights: Factor of each LoRA's change.
        method: How the changes of one layer become one.
        dtype: Dtype of the stored factors.
        bases: Weights of the base model, for changes that depend on them.
        metrics: The metrics in which errors are minimised; None for the Frobenius norm.

    Raises:
        ModelMismatchError: Two LoRAs change a layer of different shape.
        LoraFormatError: A change depends on the base model, and none is given.
    """

    united: AlignedLoras
    weights: Sequence[float]
    method: MergeMethod
    dtype: torch.dtype
    bases: "BaseWeights | None" = None
    metrics: Metrics | None = None

    def __post_init__(self) -> None:
        self._require_same_shapes()
        waiting = [name for name in self.united.names if self._needs_base(name)] if self.bases is None else []
        if waiting:
            raise LoraFormatError(
                f"{counted(len(waiting), 'module depends', 'modules depend')} on the base model (DoRA, rotations, whole weights): "
                f"{', '.join(waiting[:_NAMED])}.",
                hint="Give --base_model_path, or merge into a checkpoint with --into.",
            )
        shapeless = [name for name in self.united.names if self._needs_base(name) and not self.shape(name)]
        if shapeless:
            raise LoraFormatError(
                f"{counted(len(shapeless), 'module rotates or scales', 'modules rotate or scale')} a weight whose "
                f"shape the file does not tell: {', '.join(shapeless[:_NAMED])}.",
                hint="Merge into a checkpoint with --into.",
            )

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers whose change is a matrix, and so has a rank."""
        return tuple(name for name in self.united.names if is_cut(name, self.shape(name)))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Biases, norms, other parameters and single numbers."""
        return tuple(name for name in self.united.names if not is_cut(name, self.shape(name)))

    @property
    def formed(self) -> tuple[str, ...]:
        """Layers whose change has to be formed, because of the method or because a LoRA has more there than up and
        down.
        """
        return tuple(name for name in self.layers if not self._is_plain(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the changed weight; if the LoRAs' shapes differ in form, the one with a kernel."""
        shapes = [self.united.loras[position].shape_of(name) for position in self.united.positions(name)]
        return max(shapes, key=len)

    def old_rank(self, name: str) -> int | None:
        """The sum of the LoRAs' ranks for the layer; None if its change is formed."""
        if not self._is_plain(name):
            return None
        return sum(self.united.loras[position].rank_of(name) or 0 for position in self._acting(name))

    def load(self, name: str, wanted: int) -> Truncatable:
        """Read and combine one layer's changes; safe to call from threads."""
        if not self._is_plain(name):
            delta = self.combined(name)
            metric = None if self.metrics is None else self.metrics.of(name, delta.dtype)
            return FormedChange(delta, self.dtype, metric)
        shape = self.shape(name)
        parts, weights = [], []
        for position in self._acting(name):
            change = self.united.change(position, name)
            assert isinstance(change, LoraFactors)
            parts.append(replace(change, weight_shape=shape))
            weights.append(self.weights[position])
        metric = None if self.metrics is None else self.metrics.of(name, torch.float64)
        return truncatable(LoraFactors.concatenate(parts, weights), wanted, self.dtype, metric)

    def combined(self, name: str) -> Tensor:
        """Read and combine one layer's, bias's or norm's changes, in float32."""
        shape = self.shape(name)
        deltas = {
            position: self._delta(position, name).reshape(shape)
            for position in self.united.positions(name)
            if self.weights[position] != 0.0
        }
        if not deltas:
            return torch.zeros(shape)
        return self.method.combine(name, deltas, {position: self.weights[position] for position in deltas})

    def vector(self, name: str) -> DiffChange:
        """Read and combine one bias's or norm's changes."""
        return DiffChange({"diff": self.combined(name)})

    def _delta(self, position: int, name: str) -> Tensor:
        change = self.united.change(position, name)
        if isinstance(change, LoraFactors) or change.kind not in NEEDS_BASE:
            return form_delta(name, change)
        assert self.bases is not None  # or the constructor has refused it
        return form_delta(name, change, self.bases.weight(position, self.united.sources[position][name]))

    def _is_plain(self, name: str) -> bool:
        return self.method.is_linear and all(
            name in self.united.loras[position].modules for position in self._acting(name)
        )

    def _needs_base(self, name: str) -> bool:
        return any(self.united.loras[position].kind_of(name) in NEEDS_BASE for position in self._acting(name))

    def _acting(self, name: str) -> tuple[int, ...]:
        """The LoRAs of a layer without those of weight 0; all of them if none is left."""
        positions = self.united.positions(name)
        return tuple(position for position in positions if self.weights[position] != 0.0) or positions

    def _require_same_shapes(self) -> None:
        for name in self.united.names:
            positions = self.united.positions(name)
            shapes = {position: self.united.loras[position].shape_of(name) for position in positions}
            first = shapes[positions[0]]
            for position, shape in shapes.items():
                if not same_matrix(first, shape):
                    raise ModelMismatchError(
                        f"{name} is {first} in {self.united.loras[positions[0]]} and {shape} in "
                        f"{self.united.loras[position]}.",
                        hint="Merge LoRAs of the same base model.",
                    )


class BaseWeights:
    """Reads the weight that a LoRA's module changes.

    Args:
        base: An open checkpoint.
        loras: The LoRAs under their own names.

    Raises:
        LoraFormatError: Two modules of a LoRA are for one layer.
    """

    def __init__(self, base: Checkpoint, loras: Sequence[LoraFile]) -> None:
        self._base = base
        layers = [key.removesuffix(".weight") for key in base]
        layout = layout_of({key: base.info(key).shape for key in base})
        self._layers: list[dict[str, list[str]]] = []
        self._joined: dict[str, str] = {}
        for lora in loras:
            of_names: dict[str, list[str]] = {}
            for layer, names in align(lora, layers, layout).sources.items():
                for name in names:
                    of_names.setdefault(name, []).append(layer)
                self._joined |= dict.fromkeys(names, layer) if len(names) > 1 else {}
            self._layers.append(of_names)

    def weight(self, position: int, name: str) -> Tensor:
        """The base weight of one module, in float32 or wider.

        Args:
            position: Of the LoRA.
            name: Of the module in its file.

        Raises:
            ModelMismatchError: The checkpoint has no such weight, or has it as rows of a fused one.
        """
        if name in self._joined:
            raise ModelMismatchError(
                f"{self._base.path} has the weight of {name} as rows of {self._joined[name]}.",
                hint="Give the model as a diffusers folder, which has it by itself.",
            )
        layers = self._layers[position].get(name, [])
        keys = [key for layer in layers for key in (f"{layer}{_WEIGHT}", layer) if key in self._base]
        if not layers or len(keys) < len(layers):
            raise ModelMismatchError(
                f"{self._base.path} has no weight for {name}.",
                hint="Give the model that the LoRA was made for as --base_model_path.",
            )
        weight = (
            torch.cat([self._base.tensor(key) for key in keys])
            if len(keys) > 1
            else self._base.tensor(keys[0])
        )
        return weight.to(at_least_float32(weight.dtype))


def require_weights(weights: tuple[float, ...] | None, count: int) -> tuple[float, ...]:
    """Give the weight of each LoRA, 1 where none are asked for.

    Raises:
        ConfigError: Their number is not that of the LoRAs, or one is NaN or infinite.
    """
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise ConfigError(
            f"--weights has {counted(len(weights), 'number')} for {counted(count, 'LoRA')}.",
            hint="Give one for each, such as 0.7,0.3.",
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise ConfigError(f"--weights {weight} is not a number.", hint="Give numbers such as 0.7,0.3.")
    return weights


def ties(
    changes: Sequence[Float[Tensor, "*shape"]], density: float, weights: Sequence[float] | None = None
) -> Float[Tensor, "*shape"]:
    """Trim, elect sign, disjoint merge (Yadav et al., arXiv 2306.01708, algorithm 1), for one weight.

    Each change is trimmed to its largest values. If the signs disagree, that of the sum wins, and the mean is taken
    over the changes with this sign, each times its weight. As in PEFT, the weights have no influence on the election.
    The paper trims whole models; this function trims each weight by itself, so that only one weight's changes are in
    memory.

    Args:
        changes: Of one weight, at strength 1.
        density: The share k of values to keep.
        weights: Factor of each change after the election; None for 1.

    Returns:
        The merged change, in the changes' dtype. A value that only one change kept is that value times its weight.
    """
    kept = [trimmed(change, density) for change in changes]
    elected = reduce(torch.add, kept).sign()
    merged, voters = torch.zeros_like(elected), torch.zeros_like(elected)
    for change, weight in zip(kept, weights or (1.0,) * len(kept), strict=True):
        agrees = change * elected > 0.0
        merged += torch.where(agrees, change * weight, 0.0)
        voters += agrees
    return merged / voters.clamp_min_(1.0)


def trimmed(change: Float[Tensor, "*shape"], density: float) -> Float[Tensor, "*shape"]:
    """Keep the largest values by magnitude and set the rest to zero: the first step of TIES.

    Args:
        change: One weight's change.
        density: Share of the values to keep; at least one stays. Values equal to the smallest that is kept
            stay too.
    """
    size = change.numel()
    kept = max(1, round(density * size))
    if kept >= size:
        return change
    magnitudes = change.abs()
    return torch.where(magnitudes >= kth_largest(magnitudes.flatten(), kept), change, 0.0)


def kth_largest(values: Float[Tensor, " n"], k: int) -> Float[Tensor, ""]:
    """The k-th largest of many values, exactly.

    A sample brackets it, and only the values between are sorted; if the sample misleads, all values are.

    Args:
        values: Finite.
        k: From 1 to n.
    """
    size = len(values)
    if size <= _SORTED_WHOLE_UP_TO:
        return values.kthvalue(size - k + 1).values
    sample = values[:: size // _SAMPLE_VALUES].sort(descending=True).values
    share, last = k / size, len(sample) - 1
    margin = 4.0 * (len(sample) * share * (1.0 - share)) ** 0.5 + 4.0
    high = sample[max(int(share * len(sample) - margin), 0)]
    low = sample[min(int(share * len(sample) + margin), last)]
    above = int((values > high).sum())
    between = values[(values >= low) & (values <= high)]
    if above < k <= above + len(between):
        return between.kthvalue(above + len(between) - k + 1).values
    return values.kthvalue(size - k + 1).values


def dare(
    change: Float[Tensor, "*shape"], density: float, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Drop values at random and rescale the rest (Yu et al., arXiv 2311.03099): the mean stays the same.

    Args:
        change: One weight's change.
        density: 1 − p for the paper's drop rate p: the chance of each value to stay. Kept values are divided by it.
        generator: On the CPU; its state alone decides which values are dropped.
    """
    if density >= 1.0:
        return change
    drawn = torch.rand(change.shape, generator=generator, dtype=torch.float32).to(change.device)
    return torch.where(drawn < density, change / density, 0.0)


def require_density(density: float) -> float:
    """Return the density if it is valid.

    Raises:
        ConfigError: It is not above 0 and at most 1.
    """
    if not 0.0 < density <= 1.0:
        raise ConfigError(
            f"--density {density} is not a share of values to keep.", hint="Use a number above 0, up to 1."
        )
    return density
