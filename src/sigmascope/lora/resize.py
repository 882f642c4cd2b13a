"""Change a LoRA's rank, without the models that it was made from.

QR of both factors and the SVD of their small core give all singular values of ΔW exactly, so any policy or
budget that an extraction knows works on a finished LoRA too, and the error of the result is known.

`Resizer` lowers the rank of many changes, a few in memory at a time. Merging several LoRAs uses it too, and gives
the same report.
"""

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import groupby
from math import fsum, prod, sqrt
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lora.adapters import Adapter, WeightChange, form_delta
from sigmascope.lora.alignment import align_all
from sigmascope.lora.budget import (
    PLAIN,
    RELATIVE,
    Budget,
    StorageCost,
    file_weights,
    needs_spread_ranks,
    require_weighing,
    weight_of,
)
from sigmascope.lora.decompose import FormedChange, Truncatable, Truncated, truncatable
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LazyDict, LoraFile, as_text, check_target, refuse_files, refuse_inputs
from sigmascope.lora.fingerprint import BASE_FINGERPRINT, TUNED_FINGERPRINT
from sigmascope.lora.kinds import NEEDS_BASE
from sigmascope.lora.layer_names import block_of_module, block_position, is_parameter
from sigmascope.lora.linalg import FULL_RANK, Spectrum, max_rank, root_sum_square
from sigmascope.lora.loadable import WrittenLoads
from sigmascope.lora.module_names import parse_name
from sigmascope.lora.parallel import run_layers_in_order
from sigmascope.lora.ranks import FixedRank, RankPolicy, RankRules
from sigmascope.lora.reader import open_lora
from sigmascope.lora.statistics import RIDGE, LayerMetric, ModelStatistics, load_statistics_of, require_ridge
from sigmascope.lora.writer import (
    STORAGE_DTYPES,
    LoraWriter,
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

__all__ = ["RankPlan", "ReductionReport", "ResizedModule", "resize_lora"]

_FINGERPRINTS: Final = (BASE_FINGERPRINT, TUNED_FINGERPRINT)  # of models that statistics may be of
_CPU: Final = torch.device("cpu")
_TARGET: Final = "OUT"  # what the command calls the file to write
_NAMED = 3  # keys in a finding

LeftOut = Literal["excluded", "rank_0", "no_change"]
Load = Callable[[str, int], Truncatable]
"""Read a module; told how many of its singular values are likely to be asked for."""
Weigh = Callable[[str, float], float]
"""How much the squared error of a module counts; told its ‖ΔW‖."""


class RankPlan(NamedTuple):
    """How much rank there is.

    Attributes:
        rules: The policy of every module; each keeps its rank when left out. With a budget, only its overrides and
            exclusions count.
        budget: What all modules share, if any.
        budget_weights: How much each module's squared error counts under the budget: `relative`, relative to the
            module's own ‖ΔW‖, since W is not known; `plain`, as it is; or a JSON file of layers and weights. Statistics
            replace it.
    """

    rules: RankRules = RankRules(FixedRank(FULL_RANK, FULL_RANK))
    budget: Budget | None = None
    budget_weights: str = RELATIVE

    def describe(self) -> str:
        """Canonical text, for reports."""
        if self.budget is None:
            return self.rules.describe()
        asked = json.loads(self.budget.describe()) | self.rules.describe_patterns()
        if self.budget_weights != RELATIVE:
            asked["budget_weights"] = as_text(Path(self.budget_weights).name)
        return json.dumps(asked, ensure_ascii=False)

    @property
    def header_text(self) -> str:
        """The same for the file's header; see `Budget.brief`."""
        is_bare = self.budget_weights == RELATIVE and not self.rules.describe_patterns()
        return (self.budget.brief if self.budget is not None and is_bare else None) or self.describe()


FULL_RANK_PLAN: Final = RankPlan()
"""All the rank that there is."""


@dataclass(frozen=True, slots=True)
class InputLora:
    """One input LoRA.

    Attributes:
        path: As given.
        weight: Factor of its change.
        format: `native`, `kohya`, `peft` or `comfyui`.
        modules: How many it has.
        file_bytes: Size of its file.
    """

    path: Path
    weight: float
    format: str
    modules: int
    file_bytes: int

    @classmethod
    def of(cls, lora: LoraFile, path: Path, weight: float = 1.0) -> "InputLora":
        """Describe an open LoRA; `path` is the one given, which may be a folder."""
        return cls(path, weight, lora.format, len(lora.names), (lora.path or path).stat().st_size)


@dataclass(frozen=True, slots=True)
class ResizedModule:
    """One module before and after.

    Attributes:
        name: Its name in the written file.
        shape: Shape of the weight that it changes.
        old_rank: Its rank before, summed over the LoRAs if several are combined; None if it had none.
        rank: Its stored rank; 0 if it is left out.
        norm: ‖ΔW‖ before.
        error_norm: ‖ΔW − up·down‖ of the stored factors; ‖ΔW‖ if it is left out.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1.
        left_out: Why it is left out; None if it is not. `no_change`: ΔW is zero.
        weighted_norm: `norm` in the metric of the statistics, or as the budget weighs it; None without either.
        weighted_error: `error_norm` in the same measure.
    """

    name: str
    shape: tuple[int, ...]
    old_rank: int | None
    rank: int
    norm: float
    error_norm: float
    kept_energy: float
    left_out: LeftOut | None = None
    weighted_norm: float | None = None
    weighted_error: float | None = None

    @property
    def block(self) -> str:
        """The block that the module is in."""
        return block_of_module(self.name)

    @property
    def relative_error(self) -> float | None:
        """`error_norm` / `norm`; None for a change that is zero."""
        return self.error_norm / self.norm if self.norm > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"relative_error": self.relative_error}


@dataclass(frozen=True, slots=True)
class BlockReduction:
    """The modules of one block together.

    Attributes:
        name: Such as `up_blocks.1`.
        modules: How many there were.
        kept: How many are in the written file.
        old_ranks: Lowest and highest rank before; None if no module had one.
        ranks: Lowest and highest rank of those kept; None if none is.
        relative_error: ‖ΔW − ΔW'‖ / ‖ΔW‖ of all together; None if all changes are zero.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept; None if all changes are zero.
    """

    name: str
    modules: int
    kept: int
    old_ranks: tuple[int, int] | None
    ranks: tuple[int, int] | None
    relative_error: float | None
    kept_energy: float | None


@dataclass(frozen=True, slots=True)
class ReductionReport:
    """The result of a resize or merge.

    Attributes:
        inputs: The LoRAs, in the order given.
        lora: The file that was written.
        format: Its format.
        dtype: Dtype of the stored factors.
        method: How the changes became one; `linear` for a single LoRA.
        plan: The rank plan that was asked for.
        modules: Every module, before and after, in the order of the files.
        carried: Changes that have no rank (biases, norms) or depend on the base; they are written unchanged.
        formed: Modules whose change was more than up and down, so that it was formed and decomposed.
        findings: What to know before using the LoRA.
        file_bytes: Size of the written file.
        seconds: How long all of it took.
        unread: Tensors of the inputs that belong to no module, so that `kept_energy` does not count what they change.
        loads: What hosts make of the new file; see `loadable.loads_of_written`.
    """

    inputs: tuple[InputLora, ...]
    lora: Path
    format: str
    dtype: str
    method: str
    plan: str
    modules: tuple[ResizedModule, ...]
    carried: tuple[str, ...]
    formed: tuple[str, ...]
    findings: tuple[Finding, ...]
    file_bytes: int
    seconds: float
    unread: tuple[str, ...] = ()
    loads: WrittenLoads | None = None

    @property
    def bytes_before(self) -> int:
        """Size of all input files."""
        return sum(lora.file_bytes for lora in self.inputs)

    @property
    def left_out(self) -> tuple[ResizedModule, ...]:
        """Modules that are not in the file, each with its reason."""
        return tuple(module for module in self.modules if module.left_out is not None)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules of the file have each rank, by rising rank."""
        return dict(sorted(Counter(module.rank for module in self.modules if module.rank).items()))

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − ΔW'‖ / ‖ΔW‖ over all modules; one that is left out counts as lost."""
        return relative_error(self.modules)

    @property
    def weighted_error(self) -> float | None:
        """`relative_error` as the statistics or the budget weigh it; None where all errors count alike."""
        return weighted_error(self.modules)

    @property
    def kept_energy(self) -> float | None:
        """Share of ‖ΔW‖² in the singular values that were kept; in the metric of statistics, where there are any."""
        return _kept_energy(self.modules)

    @property
    def blocks(self) -> tuple[BlockReduction, ...]:
        """One summary a block, in the order in which a latent passes them."""
        ordered = sorted(self.modules, key=lambda module: block_position(module.block))
        return tuple(
            _summarise_block(name, list(group)) for name, group in groupby(ordered, lambda m: m.block)
        )

    @property
    def worst(self) -> tuple[ResizedModule, ...]:
        """The ten modules that lost the largest share of their change, largest first."""
        measured = [module for module in self.modules if module.relative_error is not None]
        return tuple(sorted(measured, key=lambda module: -(module.relative_error or 0.0))[:10])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        totals = (
            "format",
            "dtype",
            "method",
            "plan",
            "relative_error",
            "weighted_error",
            "kept_energy",
            "bytes_before",
        )
        return {
            "lora": str(self.lora),
            "inputs": [asdict(lora) | {"path": str(lora.path)} for lora in self.inputs],
            **{name: getattr(self, name) for name in totals},
            "file_bytes": self.file_bytes,
            "seconds": self.seconds,
            "total_modules": len(self.modules),
            "left_out": [module.name for module in self.left_out],
            "unread": list(self.unread),
            "carried": list(self.carried),
            "formed": list(self.formed),
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [asdict(block) for block in self.blocks],
            "modules": [module.as_dict() for module in self.modules],
            "loads": None if self.loads is None else self.loads.as_dict(),
        }


def resize_lora(
    lora: str | PathLike[str],
    save_to: str | PathLike[str],
    plan: RankPlan,
    *,
    save_precision: SavePrecision | None = None,
    format: str | None = None,
    statistics: str | PathLike[str] | None = None,
    ridge: float = RIDGE,
    progress: Progress = no_progress,
) -> ReductionReport:
    """Write a LoRA at another rank.

    Each module gets the nearest change of the rank that the plan gives it (Eckart and Young, 1936), with alpha equal to
    the stored rank. If nothing has to be cut or rounded, its factors stay the same, bit for bit. LoHa, LoKr and Tucker
    changes become plain factors. Biases, norms and changes that depend on the base (DoRA) are copied unchanged.

    In the plan's patterns and in the report, layers have the names of the model (`denoiser.conv_in`), whatever
    the format of the file.

    Args:
        lora: In any format; read one module at a time.
        save_to: The `.safetensors` file to write.
        plan: How much rank each module gets, or all together.
        save_precision: Dtype of the stored factors; by default the input's (float16 for an 8-bit one).
        format: `native`, `kohya`, `peft` or `comfyui`; by default the input's, with its own names.
        statistics: A file of `sigmascope.lora.statistics` for the LoRA's model: the factors then minimise the error of
            the layers' outputs instead of that of their weights.
        ridge: Weight of directions that never occurred in the statistics, as a share of the mean.
        progress: Called after each module.

    Returns:
        Every module's old and new rank, and the true error of the factors as stored.

    Raises:
        ConfigError: The target is the input or a folder, a pattern matches no module, the budget cannot be met,
            or the plan leaves out every module.
        ModelMismatchError: The statistics are of a model other than the LoRA's.
        CheckpointError: The input is missing, damaged, or not a file of tensors.
        LoraFormatError: Its keys follow no known format, its factors do not fit together, or the format to write
            cannot hold it.
        NonFiniteError: NaN or Inf in the input, or factors too large for the storage precision.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    source, target = Path(lora), Path(save_to)
    require_weighing(plan.budget_weights, is_of_use=plan.budget is not None and statistics is None)
    check_target(target, _TARGET)
    with open_checkpoint(source) as checkpoint:
        refuse_inputs(target, checkpoint, flag=_TARGET)
        if statistics is not None:
            refuse_files(target, [Path(statistics)])
        dtype = storage_dtype(checkpoint) if save_precision is None else STORAGE_DTYPES[save_precision]
    with open_lora(source) as original:
        aligned = align_all([original])
        layers = aligned.loras[0]
        formed = tuple(name for name in layers.changes if _has_rank(layers, name))
        carried = tuple(name for name in layers.changes if name not in set(formed))
        shapes = {name: layers.shape_of(name) for name in (*layers.modules, *formed)}
        metrics = None
        if statistics is not None:
            metrics = Metrics.read(statistics, ridge, [original], shapes, plan)
        metadata = {
            "sigmascope_version": __version__,
            "sigmascope_resized_from": as_text(source.name),
            "sigmascope_rank": plan.header_text,
            **({} if metrics is None else metrics.metadata),
        }
        unchanged = LazyDict({name: name for name in carried}, layers.changes.__getitem__)
        new_writer = partial(
            writer_of_aligned,
            target,
            aligned,
            [original],
            format,
            metadata,
            own_names=names_to_keep(aligned, [original], format),
            compact=plan.budget is not None,
        )
        with new_writer() as output:
            resizer = Resizer(
                shapes=shapes,
                old_ranks={name: layers.rank_of(name) if name in layers.modules else None for name in shapes},
                load=partial(_load, layers, dtype, metrics),
                plan=plan,
                storage=measured_storage(new_writer, dtype, shapes, unchanged),
                family=aligned.layout.family,
                has_metric=metrics is not None,
            )
            modules = write_reduced(output, resizer, unchanged, progress, [source])
        return ReductionReport(
            inputs=(InputLora.of(original, source),),
            lora=target,
            format=output.format.name,
            dtype=dtype_name(dtype),
            method="linear",
            plan=plan.describe(),
            modules=modules,
            carried=carried,
            formed=formed,
            findings=tuple(unused_keys([original])),
            unread=unread_tensors([original]),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
            loads=output.loads,
        )


def _has_rank(lora: LoraFile, name: str) -> bool:
    """Whether a change that is more than up and down can be formed without the base, and cut."""
    return lora.kind_of(name) not in NEEDS_BASE and is_cut(name, lora.shape_of(name))


def is_cut(layer: str, shape: Sequence[int]) -> bool:
    """Whether a change of that shape is a matrix with a rank, and not a bias's, a norm's or another parameter's."""
    return len(shape) > 1 and not is_parameter(layer)


def _load(
    lora: LoraFile, dtype: torch.dtype, metrics: "Metrics | None", name: str, wanted: int
) -> Truncatable:
    if name in lora.modules:
        metric = None if metrics is None else metrics.of(name, torch.float64)
        return truncatable(lora.modules[name], wanted, dtype, metric)
    return form_change(name, lora.changes[name], dtype, metrics)


def form_change(
    name: str, change: WeightChange, dtype: torch.dtype, metrics: "Metrics | None" = None
) -> FormedChange:
    """Form a change that is more than plain factors, to be cut.

    Args:
        name: Of the module.
        change: One that does not depend on the base.
        dtype: To store the factors in.
        metrics: In which the error is least; Frobenius norm without.
    """
    delta = form_delta(name, change)
    most_values = change.most_values if isinstance(change, Adapter) else None
    return FormedChange(delta, dtype, None if metrics is None else metrics.of(name, delta.dtype), most_values)


def write_reduced(
    output: LoraWriter,
    resizer: "Resizer",
    carried: Mapping[str, WeightChange],
    progress: Progress,
    sources: Sequence[str | PathLike[str]],
) -> tuple[ResizedModule, ...]:
    """Reduce and write every module, then the changes without a rank.

    Args:
        output: Open.
        resizer: Of the modules.
        carried: Changes that are written as they are, read when their turn comes.
        progress: Told after each module.
        sources: The LoRAs, for messages.

    Raises:
        ConfigError: As of `Resizer.run`, or nothing is left to write.
    """
    modules = []
    for module, factors in resizer.run(progress):
        modules.append(module)
        if factors is not None:
            output.write(module.name, factors)
    for name, change in carried.items():
        output.write_change(name, change)
    _require_modules(modules, resizer.plan, sources)
    return tuple(modules)


@dataclass(frozen=True)
class Metrics:
    """The metric of each layer of a LoRA, from the statistics of its model.

    Attributes:
        statistics: Statistics of the model's layers.
        ridge: Weight of directions that never occurred in them.
        paths: Path in the denoiser of each of the LoRA's layers; layers elsewhere have no statistics.
        shapes: Shapes of their weights.
    """

    statistics: ModelStatistics
    ridge: float
    paths: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(
        cls,
        path: str | PathLike[str],
        ridge: float,
        loras: Sequence[LoraFile],
        shapes: Mapping[str, tuple[int, ...]],
        plan: RankPlan,
        paths: Mapping[str, str] | None = None,
    ) -> "Metrics":
        """Read the statistics, and refuse those of another model.

        Args:
            path: Of the file.
            ridge: As the attribute.
            loras: Whose headers may say which model they are for.
            shapes: Of the weights that they change, by layer.
            plan: How much rank there is to be.
            paths: As the attribute; as the layers' names say when left out.

        Raises:
            CheckpointError: The file cannot be read.
            ConfigError: The ridge makes no sense, or the plan goes by the singular values of ΔW themselves.
            ModelMismatchError: The statistics are of another model.
        """
        require_ridge(ridge)
        plan.rules.require_for_statistics()
        if paths is None:
            names = {name: parse_name(name) for name in shapes}
            paths = {name: of.path for name, of in names.items() if not of.parts or of.parts[0] == "denoiser"}
        known = {lora.metadata[name] for lora in loras for name in _FINGERPRINTS if name in lora.metadata}
        layers = [paths.get(name) for name in shapes]
        statistics = load_statistics_of(
            path, known or None, layers
        )  # most makers' files say nothing of their model
        return cls(statistics, ridge, paths, shapes)

    @property
    def metadata(self) -> dict[str, str]:
        """For the header of a file that was made with them."""
        return {"sigmascope_statistics": json.dumps({**self.statistics.facts, "ridge": self.ridge})}

    def of(self, layer: str, dtype: torch.dtype) -> LayerMetric:
        """A layer's metric; if the statistics lack the layer, its error gets the typical weight of the others."""
        known = self.paths.get(layer)
        return self.statistics.metric_of(known, layer, self.shapes[layer], self.ridge, _CPU, dtype)


@dataclass(frozen=True)
class Resizer:
    """Reduces the ranks of a set of changes.

    Attributes:
        shapes: Of the changed weights, by module, in the order of the file.
        old_ranks: By module; None where it has none.
        load: Reads one module; safe to call from threads.
        plan: How much rank there is.
        storage: What a module takes in the file that is written.
        family: Of the model that the changes are for.
        has_metric: Whether statistics weigh the errors of what `load` gives.
    """

    shapes: Mapping[str, tuple[int, ...]]
    old_ranks: Mapping[str, int | None]
    load: Load
    plan: RankPlan
    storage: StorageCost
    family: str = "unknown"
    has_metric: bool = False

    def run(self, progress: Progress) -> Iterator[tuple[ResizedModule, LoraFactors | None]]:
        """Reduce every module, in order, on all cores.

        Yields:
            Each module's result, and its factors (None if it is left out).

        Raises:
            ConfigError: A pattern of the rules matches no module, or the budget cannot be met.
            NonFiniteError: Factors do not fit the storage dtype.
        """
        names = list(self.shapes)
        self.plan.rules.check(names)
        weigh = self._weighing(names)
        with _one_thread_here():
            ranks = None if self.plan.budget is None else self._within(self.plan.budget, weigh, progress)
            work = run_layers_in_order(self._sizes(names), lambda name: self._reduce(name, ranks, weigh))
            for done, (name, result) in enumerate(work, start=1):
                progress(done, len(names), name)
                yield result

    def _weighing(self, names: Sequence[str]) -> Weigh | None:
        """How much a squared error counts under the budget; None if statistics weigh it, or all count the same."""
        if self.plan.budget is None or self.has_metric:
            return None
        patterns, is_relative = self.plan.budget.weights, self.plan.budget_weights == RELATIVE
        if self.plan.budget_weights == PLAIN and not patterns:
            return None
        given = {} if is_relative else file_weights(self.plan.budget_weights, names)

        def weigh(name: str, norm: float) -> float:
            own = 1.0 / norm if is_relative and norm > 0.0 else given.get(name, 1.0)
            return own * weight_of(name, patterns)

        return weigh

    def _within(self, budget: Budget, weigh: Weigh | None, progress: Progress) -> dict[str, int]:
        """The rank of every module that is not excluded, under a budget."""
        rules = self.plan.rules
        shapes = {name: shape for name, shape in self.shapes.items() if not rules.is_excluded(name)}
        if not shapes:
            raise ConfigError(
                "--max_size and --max_error choose ranks, and no module of this LoRA has one that may be cut: what is "
                "excluded stays, and DoRA depends on its base model.",
                hint="Leave the two out, exclude fewer layers, or for DoRA use sigmascope lora merge with --base_model_path.",
            )
        budget.check(list(shapes))
        wanted = budget.first_guess(shapes, self.storage)
        spread = needs_spread_ranks(self.plan.budget_weights, self.family, has_statistics=self.has_metric)
        if weigh is not None:
            budget = replace(budget, weights=())  # counted in the weights
        spectra: dict[str, Spectrum] = {}
        pinned: dict[str, int] = {}
        while wanted:
            work = partial(self._spectrum, wanted)
            for name, (spectrum, rank) in run_layers_in_order(self._sizes(wanted), work):
                spectra[name] = spectrum
                if rank is not None:
                    pinned[name] = rank
                progress(len(spectra), len(shapes), name)
            weights = (
                None
                if weigh is None
                else {name: weigh(name, sqrt(spectrum.total_energy)) for name, spectrum in spectra.items()}
            )
            allocation = budget.allocate(spectra, self.storage, pinned, weights, spread=spread)
            wanted = allocation.wanted
        return allocation.ranks

    def _spectrum(self, wanted: Mapping[str, int], name: str) -> tuple[Spectrum, int | None]:
        change = self.load(name, wanted[name])
        policy = self.plan.rules.override_for(name)
        rank = None if policy is None else _rank_by(policy, change)
        return change.spectrum(max(wanted[name], rank or 1)), rank

    def _reduce(
        self, name: str, ranks: Mapping[str, int] | None, weigh: Weigh | None
    ) -> tuple[ResizedModule, LoraFactors | None]:
        module, factors = self._reduced(name, ranks)
        if weigh is not None:
            root = sqrt(weigh(name, module.norm))
            module = replace(
                module, weighted_norm=root * module.norm, weighted_error=root * module.error_norm
            )
        return module, factors

    def _reduced(
        self, name: str, ranks: Mapping[str, int] | None
    ) -> tuple[ResizedModule, LoraFactors | None]:
        shape = self.shapes[name]
        policy = self.plan.rules.policy_for(name, shape)
        guess = policy.first_guess(shape) if policy is not None and ranks is None else 1
        change = self.load(name, guess if ranks is None else ranks.get(name, 1))
        if policy is None:
            return self._left_out(name, change, "excluded"), None
        rank = _rank_by(policy, change) if ranks is None else ranks[name]
        cut = _cut(name, change, rank) if rank > 0 else None  # before the norm, which then costs nothing
        if change.norm == 0.0:
            return self._left_out(name, change, "no_change"), None
        if cut is None:
            return self._left_out(name, change, "rank_0"), None
        module = ResizedModule(
            name=name,
            shape=shape,
            old_rank=self.old_ranks[name],
            rank=cut.factors.rank,
            norm=change.norm,
            error_norm=cut.error_norm,
            kept_energy=cut.kept_energy,
            weighted_norm=change.weighted_norm,
            weighted_error=cut.weighted_error,
        )
        return module, cut.factors

    def _left_out(self, name: str, change: Truncatable, why: LeftOut) -> ResizedModule:
        weighted = change.weighted_norm
        shape, rank = self.shapes[name], self.old_ranks[name]
        return ResizedModule(name, shape, rank, 0, change.norm, change.norm, 0.0, why, weighted, weighted)

    def _sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Numbers that are read for each module."""
        sizes = {}
        for name in names:
            out, inner = self.shapes[name][0], prod(self.shapes[name][1:])
            rank = self.old_ranks[name]
            sizes[name] = out * inner if rank is None else rank * (out + inner)
        return sizes


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """Let what the caller does with each result (checks, conversions) not wait for cores that are at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rank_by(policy: RankPolicy, change: Truncatable) -> int:
    """Ask a policy, with more singular values until it knows."""
    if isinstance(policy, FixedRank):
        return policy.rank_for(change.weight_shape)  # needs none
    largest = max_rank(change.weight_shape)
    wanted = policy.first_guess(change.weight_shape)
    while (rank := policy.choose(change.spectrum(wanted))) is None:
        wanted = min(2 * wanted, largest)
    return rank


def _cut(name: str, change: Truncatable, rank: int) -> Truncated:
    try:
        return change.cut(rank)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error.message}", hint=error.hint) from error


def _require_modules(
    modules: Sequence[ResizedModule], plan: RankPlan, sources: Sequence[str | PathLike[str]]
) -> None:
    """Raise a ConfigError if no module is left to write."""
    reasons = {module.left_out for module in modules}
    if reasons == {"no_change"}:
        raise ConfigError(
            f"{' and '.join(map(str, sources))}: all {len(modules)} changes are zero.",
            hint=f"See why: sigmascope lora inspect {shlex.quote(str(sources[0]))}"
            + ("" if len(sources) == 1 else ", or change --weights."),
        )
    if modules and None not in reasons:
        raise ConfigError(
            f"{plan.describe()} leaves out all {len(modules)} modules.",
            hint="Allow more rank, or exclude less.",
        )


def unread_tensors(loras: Sequence[LoraFile]) -> tuple[str, ...]:
    """The keys that belong to no module and may change something; an alpha alone changes nothing."""
    return tuple(key for lora in loras for key in lora.unused_keys if not key.endswith(".alpha"))


def unused_keys(loras: Sequence[LoraFile]) -> Iterator[Finding]:
    """Say which LoRAs have keys that are not in the result."""
    for lora in loras:
        if lora.unused_keys:
            yield Finding(
                "lora.unused_keys",
                "warning",
                f"{lora}: {counted(len(lora.unused_keys), 'key belongs to no module and is', 'keys belong to no module and are')} left out: "
                f"{', '.join(lora.unused_keys[:_NAMED])}.",
                {"keys": len(lora.unused_keys)},
                advice="lora inspect --json lists them.",
            )


def _summarise_block(name: str, modules: Sequence[ResizedModule]) -> BlockReduction:
    return BlockReduction(
        name=name,
        modules=len(modules),
        kept=sum(module.left_out is None for module in modules),
        old_ranks=_rank_range([module.old_rank for module in modules]),
        ranks=_rank_range([module.rank or None for module in modules]),
        relative_error=relative_error(modules),
        kept_energy=_kept_energy(modules),
    )


def relative_error(modules: Sequence[ResizedModule]) -> float | None:
    """‖ΔW − ΔW'‖ / ‖ΔW‖ over all modules together; None where nothing changes."""
    change = root_sum_square([module.norm for module in modules])
    return root_sum_square([module.error_norm for module in modules]) / change if change > 0.0 else None


def weighted_error(modules: Sequence[ResizedModule]) -> float | None:
    """The same as statistics or a budget weigh it; None where all errors count alike."""
    if any(module.weighted_norm is None for module in modules):
        return None
    change = root_sum_square([module.weighted_norm or 0.0 for module in modules])
    lost = root_sum_square([module.weighted_error or 0.0 for module in modules])
    return lost / change if change > 0.0 else None


def _kept_energy(modules: Sequence[ResizedModule]) -> float | None:
    energy = fsum(module.norm**2 for module in modules)
    kept = fsum(module.kept_energy * module.norm**2 for module in modules)
    return kept / energy if energy > 0.0 else None


def _rank_range(ranks: Sequence[int | None]) -> tuple[int, int] | None:
    known = [rank for rank in ranks if rank is not None]
    return (min(known), max(known)) if known else None
