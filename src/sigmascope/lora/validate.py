"""Validate a LoRA (`validate_lora`): how far base + LoRA is from the tuned model, by layer, by block and overall.

A few layers are in memory at a time, and neither ΔW nor B·A is formed as a whole.

‖ΔW‖ and ‖ΔW − s·B·A‖ are summed over blocks of rows that fit a core's cache. The trace formula
‖ΔW‖² − 2·tr(Bᵀ(ΔW·Aᵀ)) + tr((BᵀB)(A·Aᵀ)) would cost the same products, but a small error would be the difference of two
large numbers there.

Products run in float32, and short runs are summed up in float64. If the remaining error is close to the bound of float32
rounding (`Subtraction.rounding_bound`), the tensor is measured again in float64.

`save_validation_picture` draws the error of every layer and block. In the SVG, each point names its layer.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import fsum, prod
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from sigmascope import svg
from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.files import atomic_path
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.alignment import ChangedKeys, changed_keys, weights_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.fingerprint import BASE_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.layer_names import (
    WEIGHT,
    block_of_module,
    block_position,
    layer_order,
)
from sigmascope.lora.linalg import blocked_energy, root_sum_square
from sigmascope.lora.pairs import PARTS, CheckpointPair, PairOptions, open_pair, pair_findings
from sigmascope.lora.parallel import ThreadScratch, run_layers
from sigmascope.lora.reader import open_lora
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding
from sigmascope.units import counted, rough_percent

__all__ = ["ModuleError", "ValidationReport", "validate_lora"]

Band = Literal["excellent", "good", "poor", "noise"]
_MIN_FITTING_SHARE: Final = 0.5
_MAX_WORSENED_SHARE: Final = 0.9
Status = Literal["applied", "missing", "unmatched", "wrong_shape"]

BANDS: Final[dict[Band, str]] = {
    "excellent": "< 5 %",
    "good": "5-50 %",
    "poor": "50-100 %",
    "noise": "> 100 %",
}
"""The bands of relative error. In `noise`, the layer would be closer to the tuned model without the LoRA."""

_VAE_PREFIXES: Final = ("vae.", "first_stage_model.")
_WORST_COUNT = 10

# The picture: its colours, and its positions and sizes in pixels.
_BAND_COLOURS: Final[dict[Band, str]] = {
    "excellent": "#2e7d32",
    "good": "#0277bd",
    "poor": "#e68a00",
    "noise": "#c62828",
}
_NO_BAND_COLOUR: Final = "#757575"
_GRID_COLOUR: Final = "#e0e0e0"
_WIDTH: Final = 960
_LEFT: Final = 200
_RIGHT: Final = 930
_LAYERS_TOP: Final = 118
_BOTTOM: Final = 400
_BLOCKS_TOP: Final = 460
_ROW_HEIGHT: Final = 20
_BARS_END: Final = 420
_STRIP_LEFT: Final = 490
_NUMBER_WIDTH: Final = 16
_MAX_NAME_LENGTH: Final = 24
_AXIS_LIMIT_RATIO: Final = 4.0  # of the error that nine of ten layers stay below
_HEAT_COLOURS: Final = ((0.0, "#f7f2ea"), (0.5, "#f0b452"), (1.0, "#c62828"), (2.0, "#5c0a0a"))
_HEAT_LEGEND: Final = ((0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %"), (None, "not applied"))

Change = LoraFactors | WeightChange

_BLOCK_ELEMENTS: Final = 1 << 18  # 1 MiB in float32
_MIN_ERROR_TO_ROUNDING: Final = 1e3
"""An error in float32 is trusted if it is at least this many times its rounding bound."""
_EFFICIENT_ROWS: Final = 256  # a block of as many rows is multiplied efficiently at any rank
_UNIT_ROUNDOFF: Final = 2.0**-24  # of float32
_FORMED_CHANGE_ROUNDINGS: Final = 100.0  # a generous bound, in unit roundoffs of the change's norm


@dataclass(frozen=True, slots=True)
class ModuleError:
    """One layer of the model, or one module of the LoRA that fits no layer.

    Attributes:
        name: Path of the layer.
        shape: Shape of the model's weight; of the LoRA's module if the model has no such layer.
        status: `applied`: the LoRA's factors fit the layer. `missing`: the layer changed, but the LoRA has no module for
            it. `unmatched`: the model has no such layer. `wrong_shape`: the layer has another shape.
        rank: Rank of the LoRA's factors; None if there are none.
        delta_norm: ‖ΔW‖ of the model; 0 for an unmatched module.
        error_norm: ‖ΔW − s·BA‖ of the stored factors. It is ‖ΔW‖ without fitting factors, and ‖s·BA‖ if the layer did
            not change.
        relative_error: `error_norm` / `delta_norm`; None if ΔW = 0.
        detail: What does not fit, in words.
        kind: What the LoRA holds for it: `lora` for factors, `loha`, `lokr`, `dora`, `diff`, …
    """

    name: str
    shape: tuple[int, ...]
    status: Status
    rank: int | None
    delta_norm: float
    error_norm: float
    detail: str | None = None
    kind: str | None = None

    @property
    def relative_error(self) -> float | None:
        """See the class."""
        return self.error_norm / self.delta_norm if self.delta_norm > 0 else None

    @property
    def band(self) -> Band | None:
        """The band of the relative error; None if there is none."""
        return None if self.relative_error is None else band_of(self.relative_error)

    @property
    def block(self) -> str:
        """The layer's block; the VAE is one block."""
        return "vae" if self.name.startswith(_VAE_PREFIXES) else block_of_module(self.name)

    @property
    def order(self) -> tuple[object, ...]:
        """Sorting key: by block, in the order in which a latent passes them, then by name, 2 before 10."""
        return block_position(self.block), layer_order(self.name)[1]

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        return asdict(self) | {"relative_error": self.relative_error, "band": self.band}


@dataclass(frozen=True, slots=True)
class BlockError:
    """The modules of one block together.

    Attributes:
        name: Such as `up_blocks.1`.
        modules: How many should be applied.
        applied: How many are applied.
        ranks: Lowest and highest rank; None if no module has factors.
        delta_norm: ‖ΔW‖ of all modules.
        relative_error: Of all modules together; None if nothing changed.
        average_error: Mean over the applied modules whose layer changed.
        largest_error: The largest among those.
    """

    name: str
    modules: int
    applied: int
    ranks: tuple[int, int] | None
    delta_norm: float
    relative_error: float | None
    average_error: float | None
    largest_error: float | None

    @property
    def band(self) -> Band | None:
        """The band of the block's relative error."""
        return None if self.relative_error is None else band_of(self.relative_error)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of one validation.

    Attributes:
        base, tuned, lora: The files, as given.
        modules: Every layer that changed and every module of the LoRA, in the model's order.
        unchanged_layers: How many layers have ΔW = 0 and no module.
        findings: What else to know.
        seconds: How long the validation took.
    """

    base: Path
    tuned: Path
    lora: Path
    modules: tuple[ModuleError, ...]
    unchanged_layers: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def applied(self) -> int:
        """Number of the LoRA's modules that fit a layer of the model."""
        return sum(module.status == "applied" for module in self.modules)

    @property
    def failures(self) -> tuple[ModuleError, ...]:
        """Changed layers without a module, and modules without a fitting layer."""
        return tuple(module for module in self.modules if module.status != "applied")

    @property
    def success_rate(self) -> float:
        """Percentage of modules that are applied, of all changed layers and all modules of the LoRA."""
        return 100.0 * self.applied / len(self.modules)

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − s·BA‖ / ‖ΔW‖ of all layers together; None if nothing changed."""
        return overall_error(self.modules)

    @property
    def fidelity(self) -> float | None:
        """How much of the change the LoRA reproduces, 0-100: 100·(1 − relative error), at least 0."""
        return None if self.relative_error is None else 100.0 * max(0.0, 1.0 - self.relative_error)

    @property
    def average_error(self) -> float | None:
        """Mean relative error of the applied modules whose layer changed."""
        return mean(applied_errors(self.modules))

    @property
    def band(self) -> Band | None:
        """The band of the overall relative error."""
        return None if self.relative_error is None else band_of(self.relative_error)

    @property
    def bands(self) -> dict[Band, int]:
        """How many applied modules are in each band."""
        bands = [module.band for module in self.modules if module.status == "applied"]
        return {band: bands.count(band) for band in BANDS}

    @property
    def blocks(self) -> tuple[BlockError, ...]:
        """A summary of each block, in the model's order."""
        return summarise_blocks(self.modules)

    @property
    def worst(self) -> tuple[ModuleError, ...]:
        """The ten applied modules with the largest relative errors, the largest first."""
        measured = [module for module in self.modules if module.status == "applied" and module.delta_norm > 0]
        return tuple(
            sorted(measured, key=lambda module: -module.error_norm / module.delta_norm)[:_WORST_COUNT]
        )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers that the LoRA changes, without biases and norms, as `lora_layer_names.txt` lists them."""
        applied = [module for module in self.modules if module.status == "applied"]
        return tuple(module.name for module in applied if len(module.shape) > 1)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        return {
            "base": str(self.base),
            "tuned": str(self.tuned),
            "lora": str(self.lora),
            "fidelity": self.fidelity,
            "total_modules": len(self.modules),
            "applied": self.applied,
            "success_rate": self.success_rate,
            "relative_error": self.relative_error,
            "average_error": self.average_error,
            "band": self.band,
            "bands": self.bands,
            "unchanged_layers": self.unchanged_layers,
            "seconds": self.seconds,
            "blocks": [asdict(block) | {"band": block.band} for block in self.blocks],
            "worst": [module.name for module in self.worst],
            "findings": [asdict(finding) for finding in self.findings],
            "modules": [module.as_dict() for module in self.modules],
        }


class Residual(NamedTuple):
    """The change of one tensor, and what a LoRA leaves of it.

    Attributes:
        delta_norm: ‖ΔW‖.
        error_norm: ‖ΔW − s·B·A‖; ‖ΔW‖ if there is nothing to subtract.
    """

    delta_norm: float
    error_norm: float


def validate_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    lora: str | PathLike[str],
    options: PairOptions | None = None,
    *,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> ValidationReport:
    """Compare base + LoRA with the tuned model in every layer, and in whatever else the LoRA changes.

    The error of a layer is ‖ΔW − s·BA‖ / ‖ΔW‖ with ΔW = tuned − base, summed in float64. Nothing is taken from the
    LoRA's metadata, so LoRAs of any origin can be validated.

    Args:
        base: The checkpoint that the LoRA is applied to.
        tuned: The checkpoint that base + LoRA should reproduce.
        lora: A LoRA file of any format that `open_lora` reads.
        options: What is compared and what may be skipped; the defaults compare the denoisers. Parts that the LoRA changes
            and both models have are compared in any case.
        workers: How many threads; as many as cores by default.
        progress: Called after each tensor.

    Returns:
        The errors, the success rate, and what does not fit.

    Raises:
        ModelMismatchError: The checkpoints do not belong together, or do not differ.
        CheckpointError: A file cannot be read.
        LoraFormatError: The LoRA's keys or shapes are not understood.
        NonFiniteError: One of the three files holds NaN or Inf.
    """
    started = time.perf_counter()
    with (
        open_lora(Path(lora)) as file,
        _open_with_changed_parts(base, tuned, file, options or PairOptions()) as pair,
    ):
        targets = changed_keys(file, pair.base, pair.layout, weights_of(pair.base))
        errors = _measure_all(pair, targets, workers, progress)
        layers = [layer + WEIGHT for layer in pair.layers]
        changed = [key for key in layers if key in targets.names or errors[key].delta_norm > 0]
        measured = [errors[key] for key in (*changed, *(key for key in pair.others if key in targets.names))]
        if all(module.delta_norm == 0 for module in measured):
            raise ModelMismatchError(
                f"{pair.base.path} and {pair.tuned.path} have the same weights in all {len(layers)} Linear and "
                "convolution layers: there is no change to compare the LoRA with.",
                hint="Give the fine-tuned checkpoint as --tuned_model_path.",
            )
        others = {key: errors[key].delta_norm for key in pair.others if key not in targets.names}
        uncovered = {key: norm for key, norm in others.items() if norm > 0}
        modules = [*measured, *_unmatched_modules(pair, file, targets)]
        findings = (
            *_other_model(modules),
            *_other_base(pair, file),
            *_unused_keys(file),
            *pair_findings(pair, uncovered, [module.delta_norm for module in measured]),
        )
    return ValidationReport(
        base=Path(base),
        tuned=Path(tuned),
        lora=Path(lora),
        modules=tuple(sorted(modules, key=lambda module: module.order)),
        unchanged_layers=len(layers) - len(changed),
        findings=findings,
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _open_with_changed_parts(
    base: str | PathLike[str], tuned: str | PathLike[str], lora: LoraFile, options: PairOptions
) -> Iterator[CheckpointPair]:
    """The pair with the requested parts, and with the other parts that the LoRA changes."""
    with open_pair(base, tuned, options) as pair:
        outside = {key: pair.layout.split(key)[0] for key in pair.outside}
        changed = changed_keys(lora, pair.base, pair.layout).names if outside else {}
        wanted = {*options.parts, *(outside[key] for key in changed if key in outside)}
        if wanted == {*options.parts}:
            yield pair
            return
    more = replace(options, parts=tuple(part for part in PARTS if part in wanted))
    with open_pair(base, tuned, more) as pair:
        yield pair


def _measure_all(
    pair: CheckpointPair, targets: ChangedKeys, workers: int | None, progress: Progress
) -> dict[str, ModuleError]:
    """Measure all compared tensors of a pair, several at a time."""
    keys = (*(layer + WEIGHT for layer in pair.layers), *pair.others)
    sizes = {key: prod(pair.base.info(key).shape) for key in keys}
    meter = ResidualMeter(pair)
    errors: dict[str, ModuleError] = {}
    for key, module in run_layers(
        sizes, lambda key: _measure_tensor(meter, pair, targets, key), workers=workers
    ):
        errors[key] = module
        progress(len(errors), len(sizes), module.name)
    return errors


def _measure_tensor(
    meter: "ResidualMeter", pair: CheckpointPair, targets: ChangedKeys, key: str
) -> ModuleError:
    layer, shape = key.removesuffix(WEIGHT), pair.base.info(key).shape
    name = targets.names.get(key)
    if name is None:
        norm = meter.measure(key).delta_norm
        return ModuleError(layer, shape, "missing", None, norm, norm)
    kind, rank = targets.lora.kind_of(name), targets.lora.rank_of(name)
    try:
        change = targets.change(key)
        require_shape(change, shape)
        residual = meter.measure(key, change)
    except ModelMismatchError as error:
        norm = meter.measure(key).delta_norm
        return ModuleError(layer, shape, "wrong_shape", rank, norm, norm, error.message, kind)
    return ModuleError(layer, shape, "applied", rank, residual.delta_norm, residual.error_norm, None, kind)


@dataclass(frozen=True, slots=True, eq=False)
class Subtraction:
    """How ΔW becomes ΔW − s·B·A.

    Attributes:
        take_off: Subtracts the change from a block of rows in place; called with the slice of rows and the block.
        rows: The smallest number of rows for which the product is efficient.
        magnitude: m of `rounding_bound`.
        roundings: k of `rounding_bound`.
    """

    take_off: Callable[[slice, Tensor], object]
    rows: int
    magnitude: float
    roundings: float

    def rounding_bound(self, delta_norm: float) -> float:
        """A bound of the norm of the float32 products' rounding: k·u·(‖ΔW‖ + m), with u = 2⁻²⁴.

        For factors of rank r, m = |s|·Σᵢ‖bᵢ‖‖aᵢ‖, which bounds ‖|B||A|‖, and k = √(r + 1): the rounding errors of r
        summands behave like a random walk (Higham and Mary, "A new approach to probabilistic rounding error analysis",
        SIAM J. Sci. Comput. 41, 2019).
        """
        return self.roundings * _UNIT_ROUNDOFF * (delta_norm + self.magnitude)


class ResidualMeter:
    """Measures the tensors of a pair. Safe to use from several threads; each reuses its own buffers.

    Args:
        pair: The two checkpoints, open.
    """

    def __init__(self, pair: CheckpointPair) -> None:
        self._pair = pair
        self._threads = ThreadScratch()

    def measure(self, key: str, change: Change | None = None) -> Residual:
        """Read one tensor from both files and measure it.

        Args:
            key: The tensor's name.
            change: What the LoRA adds to it, of the tensor's shape.

        Raises:
            NonFiniteError: Either file holds NaN or Inf there, or the change overflows.
            CheckpointError: The tensor cannot be read.
            ModelMismatchError: The change does not fit the tensor.
            LoraFormatError: The change cannot be formed.
        """
        if 0 in self._pair.base.info(key).shape:
            return Residual(0.0, 0.0)
        base, tuned = (
            side.tensor_into(key, self._threads.memory.scratch(name, side.info(key).nbytes, torch.uint8))
            for name, side in (("base", self._pair.base), ("tuned", self._pair.tuned))
        )
        dtype = self._pair.precision_of(key)
        residual, rounding = self._in(dtype, base, tuned, change)
        if dtype == torch.float32 and not _MIN_ERROR_TO_ROUNDING * rounding <= residual.error_norm < math.inf:
            residual, _ = self._in(torch.float64, base, tuned, change)
        if not math.isfinite(residual.delta_norm):
            self._pair.change(key, torch.device("cpu"))  # its error names the file
        if not math.isfinite(residual.error_norm):
            raise NonFiniteError(
                f"{key}: the LoRA's change is too large for float64.",
                hint="The LoRA is damaged: make it again.",
            )
        return residual

    def _in(
        self, dtype: torch.dtype, base: Tensor, tuned: Tensor, change: Change | None
    ) -> tuple[Residual, float]:
        """The residual calculated in a dtype, and the rounding bound for float32."""
        taken = None if change is None else subtraction(change, base, dtype)
        rows = base.shape[0] if base.ndim > 1 else 1
        before, after = (tensor.reshape(rows, -1) for tensor in (base, tuned))
        delta_energy, error_energy = self._sum(before, after, taken, dtype)
        residual = Residual(math.sqrt(delta_energy), math.sqrt(error_energy))
        return residual, 0.0 if taken is None else taken.rounding_bound(residual.delta_norm)

    def _sum(
        self, before: Tensor, after: Tensor, taken: Subtraction | None, dtype: torch.dtype
    ) -> tuple[float, float]:
        height, width = before.shape
        step = max(_BLOCK_ELEMENTS // max(width, 1), 1 if taken is None else taken.rows)
        delta_energy, error_energy = [], []
        for start in range(0, height, step):
            rows = slice(start, min(start + step, height))
            count = (rows.stop - start) * width
            block, other = (
                self._threads.memory.scratch(name, count, dtype).view(-1, max(width, 1))
                for name in ("delta", "other")
            )
            block.copy_(after[rows])
            other.copy_(before[rows])
            block.sub_(other)
            delta_energy.append(_energy(block))
            if taken is not None:
                taken.take_off(rows, block)
                error_energy.append(_energy(block))
        total = math.fsum(delta_energy)
        return total, total if taken is None else math.fsum(error_energy)


def _energy(block: Tensor) -> float:
    """‖block‖²; short runs are summed up in float64."""
    values = block.view(-1)
    return float(torch.dot(values, values) if values.dtype == torch.float64 else blocked_energy(values))


def subtraction(change: Change, base: Tensor, dtype: torch.dtype) -> Subtraction:
    """Prepare the subtraction of a change in `dtype`.

    Args:
        change: Factors; or another kind, which is formed as a whole here.
        base: The changed weight, in any floating-point dtype; only some kinds need its values.
        dtype: float32 or float64.

    Raises:
        ModelMismatchError: The change does not fit the weight.
        LoraFormatError: The change cannot be formed.
    """
    if isinstance(change, LoraFactors):
        return _factors_subtraction(change, dtype)
    formed = change.delta(base, dtype)
    whole = formed.reshape(formed.shape[0] if formed.ndim > 1 else 1, -1)
    magnitude = float(torch.linalg.vector_norm(whole))
    return Subtraction(lambda rows, block: block.sub_(whole[rows]), 1, magnitude, _FORMED_CHANGE_ROUNDINGS)


def _factors_subtraction(factors: LoraFactors, dtype: torch.dtype) -> Subtraction:
    up, down, scale = factors.up.to(dtype), factors.down.to(dtype), factors.scale
    for factor, other in ((up, down), (down, up)):
        gain = _scaled_identity(factor)
        if gain is not None:
            return _matrix_subtraction(other, gain * scale)

    def take_off(rows: slice, block: Tensor) -> None:
        block.addmm_(up[rows], down, alpha=-scale)

    sizes = torch.linalg.vector_norm(up, dim=0) * torch.linalg.vector_norm(down, dim=1)
    magnitude = abs(scale) * float(sizes.sum())
    return Subtraction(take_off, min(factors.rank, _EFFICIENT_ROWS), magnitude, math.sqrt(factors.rank + 1))


def _scaled_identity(matrix: Tensor) -> float | None:
    """The number c if a matrix is c times the identity, otherwise None."""
    size = matrix.shape[0]
    if matrix.shape[1] != size:
        return None
    diagonal = matrix.diagonal()
    gain = diagonal[0]
    is_identity = bool((diagonal == gain).all()) and int(matrix.count_nonzero()) == size
    return float(gain) if is_identity else None


def _matrix_subtraction(matrix: Tensor, gain: float) -> Subtraction:
    """A full-rank LoRA is often ΔW times a scaled identity: no product is needed, and nothing is rounded."""
    magnitude = abs(gain) * float(torch.linalg.vector_norm(matrix))
    return Subtraction(lambda rows, block: block.sub_(matrix[rows], alpha=gain), 1, magnitude, 2.0)


def require_shape(change: Change, shape: tuple[int, ...]) -> None:
    """Refuse factors for a weight of another shape; other kinds are checked when they are formed.

    Raises:
        ModelMismatchError: Names both shapes.
    """
    if isinstance(change, LoraFactors) and change.weight_shape != shape:
        raise ModelMismatchError(
            f"the weight is {shape}, but the LoRA's module is for {change.weight_shape}",
            hint="Use the LoRA with the model it was made for.",
        )


def formed(change: Change, weight: Tensor) -> Tensor:
    """ΔW in float32, in the shape of its weight.

    Raises:
        ModelMismatchError: The change does not fit the weight.
    """
    if not isinstance(change, LoraFactors):
        return change.delta(weight)
    require_shape(change, tuple(weight.shape))
    return change.delta()


def _other_base(pair: CheckpointPair, lora: LoraFile) -> list[Finding]:
    made_from = lora.metadata.get(BASE_FINGERPRINT)
    if made_from is None or made_from == denoiser_fingerprint(pair.base):
        return []
    name = lora.metadata.get("sigmascope_base", "another file")
    return [
        Finding(
            id="lora.other_base",
            severity="warning",
            message=f"The LoRA was made from another base ({name}), not from {pair.base.path}.",
            evidence={"made_from": name, "base": str(pair.base.path)},
            advice="Use and validate it with the base that it was made from.",
        )
    ]


def _unused_keys(lora: LoraFile) -> list[Finding]:
    if not lora.unused_keys:
        return []
    first = lora.unused_keys[0]
    return [
        Finding(
            id="lora.unused_keys",
            severity="warning",
            message=f"The LoRA file holds {counted(len(lora.unused_keys), 'tensor that belongs', 'tensors that belong')} to no module, first {first}.",
            evidence={"tensors": len(lora.unused_keys), "key": first},
        )
    ]


def _unmatched_modules(pair: CheckpointPair, lora: LoraFile, targets: ChangedKeys) -> list[ModuleError]:
    """The LoRA's modules without a compared layer. They change nothing, so their error is 0."""
    unmatched = [_unmatched_module(lora, name, "the model has no such layer") for name in targets.unmatched]
    compared = {*(layer + WEIGHT for layer in pair.layers), *pair.others}
    for key, name in targets.names.items():
        if key not in compared:
            reason = pair.skipped.get(key, "its part of the model is not compared")
            unmatched.append(_unmatched_module(targets.lora, name, f"it is not compared: {reason}"))
    return unmatched


def _unmatched_module(lora: LoraFile, name: str, detail: str) -> ModuleError:
    shape, rank, kind = lora.shape_of(name), lora.rank_of(name), lora.kind_of(name)
    return ModuleError(name, shape, "unmatched", rank, 0.0, 0.0, detail, kind)


def _other_model(modules: Sequence[ModuleError]) -> list[Finding]:
    """A finding if the LoRA is for another model: most of it fits no layer, or nearly every layer gets worse.

    Even a LoRA of very low rank does not make a layer worse than no LoRA.
    """
    own = [module for module in modules if module.status != "missing"]
    fitting = [module for module in own if module.status == "applied"]
    worse = [module for module in fitting if module.band == "noise"]
    if len(fitting) < _MIN_FITTING_SHARE * len(own):
        message = f"{len(own) - len(fitting)} of its {counted(len(own), 'module')} fit no layer of this one."
    elif fitting and len(worse) > _MAX_WORSENED_SHARE * len(fitting):
        message = f"it moves {len(worse)} of {len(fitting)} layers away from the tuned model."
    else:
        return []
    return [
        Finding(
            id="lora.other_model",
            severity="error",
            message=f"The LoRA is for another model: {message}",
            evidence={"modules": len(own), "fitting": len(fitting), "worse": len(worse)},
            advice="Check that base, tuned model and LoRA belong together, and check the LoRA's alpha.",
        )
    ]


def summarise_blocks(modules: Sequence[ModuleError]) -> tuple[BlockError, ...]:
    """A summary of each block, in the order in which a latent passes them."""
    ordered = sorted(modules, key=lambda module: block_position(module.block))
    return tuple(_summarise(name, list(group)) for name, group in groupby(ordered, lambda m: m.block))


def _summarise(name: str, modules: Sequence[ModuleError]) -> BlockError:
    errors = applied_errors(modules)
    ranks = [module.rank for module in modules if module.rank is not None]
    return BlockError(
        name=name,
        modules=len(modules),
        applied=sum(module.status == "applied" for module in modules),
        ranks=(min(ranks), max(ranks)) if ranks else None,
        delta_norm=root_sum_square([module.delta_norm for module in modules]),
        relative_error=overall_error(modules),
        average_error=mean(errors),
        largest_error=max(errors, default=None),
    )


def overall_error(modules: Sequence[ModuleError]) -> float | None:
    """‖error‖ / ‖ΔW‖ of several layers together; None if none of them changed."""
    change = root_sum_square([module.delta_norm for module in modules])
    return root_sum_square([module.error_norm for module in modules]) / change if change > 0 else None


def applied_errors(modules: Sequence[ModuleError]) -> list[float]:
    """Relative errors of the applied modules whose layer changed."""
    applied = [module.relative_error for module in modules if module.status == "applied"]
    return [error for error in applied if error is not None]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    return fsum(values) / len(values) if values else None


def band_of(relative_error: float) -> Band:
    """The band of a relative error, given as a fraction (0.05 is 5 %)."""
    if relative_error < 0.05:
        return "excellent"
    if relative_error < 0.5:
        return "good"
    return "poor" if relative_error <= 1.0 else "noise"


def save_validation_picture(path: str | PathLike[str], report: ValidationReport) -> None:
    """Draw a report as a picture of 960 pixels in width; the file appears complete or not at all.

    Args:
        path: An `.svg` or `.png` file; an existing one is replaced.
        report: What to draw.

    Raises:
        WriteError: The file cannot be written.
    """
    size = _WIDTH, _BLOCKS_TOP + _ROW_HEIGHT * len(report.blocks) + 24
    content = svg.drawn(Path(path).suffix, size, list(_shapes(report)))
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _shapes(report: ValidationReport) -> Iterator[svg.Shape]:
    yield from _heading(report)
    yield from _layers(report.modules)
    yield from _block_rows(report)


def _heading(report: ValidationReport) -> Iterator[svg.Shape]:
    yield svg.Label(16, 30, f"LoRA validation: {report.lora.name}", size=18)
    caption = (
        f"Lower is better: at 0 % a layer equals the tuned model's, at 100 % the LoRA does not help. "
        f"Overall {_percent(report.relative_error)}, average {_percent(report.average_error)}."
    )
    yield svg.Label(16, 52, caption, size=13, colour=svg.FAINT)
    for index, (band, count) in enumerate(report.bands.items()):
        x = 16 + 190 * index
        yield svg.Dot(x + 5, 74, 5, _BAND_COLOURS[band])
        yield svg.Label(x + 16, 78, f"{band} ({BANDS[band]}): {count}")
    if report.failures:
        yield svg.Dot(781, 74, 4, _BAND_COLOURS["noise"], is_cross=True)
        yield svg.Label(792, 78, f"not applied: {len(report.failures)}")


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else rough_percent(fraction, 3)


def _layers(modules: Sequence[ModuleError]) -> Iterator[svg.Shape]:
    """A point for each layer, in the order in which a latent passes them; a cross if its module is not applied.

    A few layers far above the others, as in the band `noise`, would squeeze these, so they are drawn at the upper edge.
    """
    errors = sorted(module.relative_error or 0.0 for module in modules if module.status == "applied")
    usual = errors[min(len(errors) * 9 // 10, len(errors) - 1)] if errors else 1.0
    most = _AXIS_LIMIT_RATIO * usual or math.inf
    axis = svg.Axis.of([min(error, most) for error in errors], _LAYERS_TOP, _BOTTOM)
    above = sum(error > axis.ticks[-1] for error in errors)
    more = f"; {counted(above, 'layer')} beyond the axis" if above else ""
    scale = ", on a logarithmic axis" if axis.is_logarithmic else ""
    yield svg.Label(16, _LAYERS_TOP - 10, f"Error by layer{scale}{more}", size=13)
    yield from axis.lines(_LEFT, _RIGHT, _GRID_COLOUR)
    step = (_RIGHT - _LEFT) / max(len(modules), 1)
    ordered = sorted(modules, key=lambda module: block_position(module.block))
    x, free = _LEFT + step / 2, 0.0
    for number, (_, members) in enumerate(groupby(ordered, lambda module: module.block), start=1):
        group, edge = list(members), x - step / 2
        yield svg.Line((edge, _LAYERS_TOP), (edge, _BOTTOM + 5), _GRID_COLOUR)
        middle = edge + len(group) * step / 2
        if middle - _NUMBER_WIDTH / 2 >= free:
            yield svg.Label(middle, _BOTTOM + 18, str(number), anchor="middle")
            free = middle + _NUMBER_WIDTH / 2
        for module in group:
            yield _mark(x, axis, module)
            x += step


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 1]}…"


def _mark(x: float, axis: svg.Axis, module: ModuleError) -> svg.Shape:
    colour = _NO_BAND_COLOUR if module.band is None else _BAND_COLOURS[module.band]
    if module.status != "applied":
        return svg.Dot(x, axis.place(1.0), 3, _BAND_COLOURS["noise"], _tip(module), is_cross=True)
    return svg.Dot(x, axis.place(module.relative_error or 0.0), 2.6, colour, _tip(module))


def _tip(module: ModuleError) -> str:
    if module.status != "applied":
        return f"{module.name}: {module.status.replace('_', ' ')}"
    rank = "" if module.rank is None else f", rank {module.rank}"
    return f"{module.name}: {_percent(module.relative_error)}{rank}"


def _block_rows(report: ValidationReport) -> Iterator[svg.Shape]:
    """A row for each block, numbered as above: a bar for its error, and a cell for each layer."""
    largest = max((block.relative_error or 0.0 for block in report.blocks), default=0.0) or 1.0
    yield svg.Label(16, _BLOCKS_TOP - 10, "Error by block", size=13)
    yield svg.Label(_STRIP_LEFT, _BLOCKS_TOP - 10, "Its layers")
    for index, (share, words) in enumerate(_HEAT_LEGEND):
        x = _STRIP_LEFT + 100 + 92 * index
        yield svg.Bar(
            x,
            _BLOCKS_TOP - 20,
            11,
            11,
            svg.mixed(share, _HEAT_COLOURS) if share is not None else _NO_BAND_COLOUR,
        )
        yield svg.Label(x + 16, _BLOCKS_TOP - 10, words)
    for index, block in enumerate(report.blocks):
        y = _BLOCKS_TOP + _ROW_HEIGHT * index
        error = block.relative_error or 0.0
        colour = _NO_BAND_COLOUR if block.band is None else _BAND_COLOURS[block.band]
        length = (_BARS_END - _LEFT) * error / largest
        tip = f"{block.name}: {block.applied} of {block.modules} modules applied"
        yield svg.Label(_LEFT - 8, y + 14, f"{index + 1}  {_shortened(block.name)}", anchor="end")
        yield svg.Bar(_LEFT, y + 3, length, _ROW_HEIGHT - 6, colour, tip)
        yield svg.Label(_LEFT + length + 6, y + 14, _percent(block.relative_error))
        cells = [(_heat(module), "") for module in report.modules if module.block == block.name]
        yield from svg.strip(_STRIP_LEFT, y + 3, (_RIGHT - _STRIP_LEFT, _ROW_HEIGHT - 6), cells)


def _heat(module: ModuleError) -> str:
    if module.status != "applied" or module.relative_error is None:
        return _NO_BAND_COLOUR
    return svg.mixed(module.relative_error, _HEAT_COLOURS)
