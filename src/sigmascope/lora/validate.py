"""Validate a LoRA: how far base + LoRA is from the tuned model, on the factors as stored.

Models and LoRA are read a layer at a time, several layers at once, and nothing is kept of any of them. ΔW
and B·A are never formed as a whole.

‖ΔW‖ and ‖ΔW − s·B·A‖ are summed over blocks of rows that stay in a core's cache: a block is read from both
files' tensors, subtracted, summed, reduced by its rows of s·B·A and summed again. That costs the products of
the trace formula ‖ΔW‖² − 2·tr(Bᵀ(ΔW·Aᵀ)) + tr((BᵀB)(A·Aᵀ)), and nothing cancels: the square of a small error is
not the difference of two large numbers.

Products run in float32, and sums in float64 across short runs. Rounding of the products can be mistaken for an
error of the LoRA only where little error is left: there, by a stated bound, the tensor is measured again in float64.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.alignment import align
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import BASE_FINGERPRINT, ModelLayout, denoiser_fingerprint
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layers import WEIGHT, write_layer_names
from sigmascope.lora.linalg import blocked_energy
from sigmascope.lora.pairs import PARTS, CheckpointPair, PairOptions, counted, open_pair, pair_findings
from sigmascope.lora.parallel import ThreadScratch, run_layers
from sigmascope.lora.reader import open_lora
from sigmascope.lora.validation_report import ModuleError, ValidationReport, other_model
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding

__all__ = ["ModuleError", "ValidationReport", "validate_lora", "write_layer_names"]

Change = LoraFactors | WeightChange

_BLOCK: Final = 1 << 18  # elements of ΔW at a time: 1 MiB in float32
_WORTH_TRUSTING: Final = 1e3
"""How many times the bound of its rounding an error must be to count as measured in float32."""
_MOST_ROWS: Final = 256  # from which a product of a block is efficient, whatever the rank
_UNIT_ROUNDOFF: Final = 2.0**-24  # of float32
# Unit roundoffs of its size that a change of another kind than factors may be off by, and more.
_ROUNDINGS_OF_OTHER_KINDS: Final = 100.0


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

    The error of a layer is ‖ΔW − s·BA‖ / ‖ΔW‖ with ΔW = tuned − base, sums in float64. It does not come
    from the LoRA's metadata, so it holds for LoRAs of any origin.

    Args:
        base: Checkpoint that the LoRA is put on.
        tuned: Checkpoint that it should reproduce.
        lora: LoRA file of any format that `open_lora` reads.
        options: What is compared and what may be left out of it; the defaults compare the denoisers. Parts that
            the LoRA changes and both models have are compared in any case.
        workers: Threads; as many as cores when left out.
        progress: Told after each tensor.

    Returns:
        The errors, the success rate, and what does not fit.

    Raises:
        ModelMismatchError: The checkpoints do not belong together, or nothing differs between them.
        CheckpointError: A file cannot be read.
        LoraFormatError: The LoRA's keys or shapes are not understood.
        NonFiniteError: NaN or Inf in one of the three.
    """
    started = time.perf_counter()
    with (
        open_lora(Path(lora)) as file,
        _open_with_changed_parts(base, tuned, file, options or PairOptions()) as pair,
    ):
        targets = changed_keys(file, pair.base, pair.layout)
        measured = measure_layers(pair, targets, workers=workers, progress=progress)
        if all(module.delta_norm == 0 for module in measured.modules):
            raise ModelMismatchError(
                f"{pair.base.path} and {pair.tuned.path} hold the same weights in all {len(pair.layers)} Linear and "
                "convolution layers: there is no change to compare the LoRA with.",
                hint="Give the fine-tuned checkpoint as --tuned_model_path.",
            )
        norms = [module.delta_norm for module in measured.modules]
        findings = [
            *_other_base(pair, file),
            *_unused_keys(file),
            *pair_findings(pair, dict(measured.uncovered), norms),
        ]
        modules = [*measured.modules, *_unmatched_modules(pair, file, targets)]
    return ValidationReport(
        base=Path(base),
        tuned=Path(tuned),
        lora=Path(lora),
        modules=tuple(sorted(modules, key=lambda module: module.order)),
        unchanged_layers=measured.unchanged_layers,
        findings=(*other_model(modules), *findings),
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _open_with_changed_parts(
    base: str | PathLike[str], tuned: str | PathLike[str], lora: LoraFile, options: PairOptions
) -> Iterator[CheckpointPair]:
    """The pair of the parts asked for, and of those that the LoRA changes beside them."""
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


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """A LoRA sorted by what it changes in a model.

    Attributes:
        lora: The LoRA under the names of the model's layers, with fused matrices divided or put together.
        names: The name in `lora` by key of the tensor that it changes.
        unmatched: Names in the LoRA as it was given that no tensor of the model fits.
    """

    lora: LoraFile
    names: Mapping[str, str]
    unmatched: tuple[str, ...]

    def change(self, key: str) -> Change:
        """Read what is added to a tensor of the model.

        Raises:
            LoraFormatError: Its tensors do not fit together.
            NonFiniteError: They hold NaN or Inf.
        """
        return self.lora.change(self.names[key])


def changed_keys(lora: LoraFile, keys: Iterable[str], layout: ModelLayout) -> ChangedKeys:
    """Find the tensor of each change by name alone; nothing is read.

    Args:
        lora: Of any format.
        keys: Of all the model's tensors, such as `denoiser.conv_in.weight` and `denoiser.conv_in.bias`.
        layout: How the model names them.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one tensor.
    """
    paths = {key.removesuffix(WEIGHT): key for key in keys}
    aligned = align(lora, tuple(paths), layout)
    names = {paths[path]: path for path in aligned.lora.names if path in paths}
    # A change of the bias of a layer that has none is aligned all the same.
    lost = [name for path in aligned.lora.names if path not in paths for name in aligned.sources[path]]
    return ChangedKeys(aligned.lora, names, (*aligned.unmatched, *lost))


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured.

    Attributes:
        modules: The layers that changed, and whatever else the LoRA changes.
        unchanged_layers: How many layers did not change and have no module.
        uncovered: ‖Δ‖ by key of other tensors (biases, norms) that changed and are not in the LoRA.
    """

    modules: tuple[ModuleError, ...]
    unchanged_layers: int
    uncovered: Mapping[str, float]


def measure_layers(
    pair: CheckpointPair,
    targets: ChangedKeys,
    *,
    workers: int | None,
    progress: Progress,
) -> Measured:
    """Measure all compared tensors of a pair, several at a time.

    Args:
        pair: The two models.
        targets: The LoRA, whose modules are read one at a time.
        workers: Threads; as many as cores when None.
        progress: Told after each tensor.
    """
    layers = [layer + WEIGHT for layer in pair.layers]
    sizes = {key: prod(pair.base.info(key).shape) for key in (*layers, *pair.others)}
    meter = ResidualMeter(pair)
    errors: dict[str, ModuleError] = {}
    for key, module in run_layers(
        sizes, lambda key: _measure_tensor(meter, pair, targets, key), workers=workers
    ):
        errors[key] = module
        progress(len(errors), len(sizes), module.name)
    changed = [errors[key] for key in layers if key in targets.names or errors[key].delta_norm > 0]
    covered = [errors[key] for key in pair.others if key in targets.names]
    uncovered = {key: errors[key].delta_norm for key in pair.others if key not in targets.names}
    return Measured(
        (*changed, *covered),
        len(layers) - len(changed),
        {key: norm for key, norm in uncovered.items() if norm > 0},
    )


@dataclass(frozen=True, slots=True)
class Residual:
    """The change of one tensor, and what a LoRA leaves of it.

    Attributes:
        delta_norm: ‖ΔW‖.
        error_norm: ‖ΔW − s·B·A‖; ‖ΔW‖ where there is nothing to subtract.
    """

    delta_norm: float
    error_norm: float


@dataclass(frozen=True, slots=True, eq=False)
class Subtraction:
    """How ΔW becomes ΔW − s·B·A.

    Attributes:
        take_off: Changes a block of rows in place; called with which rows they are, and the block.
        rows: The least number of rows at which the product is efficient.
        magnitude: m of `rounding_bound`.
        roundings: k of `rounding_bound`.
    """

    take_off: Callable[[slice, Tensor], object]
    rows: int
    magnitude: float
    roundings: float

    def rounding_bound(self, delta_norm: float) -> float:
        """Norm that the rounding of float32 products may reach: k·u·(‖ΔW‖ + m), with u = 2⁻²⁴.

        For factors of rank r, m = |s|·Σᵢ‖bᵢ‖‖aᵢ‖ and k = √(r + 1): rounding errors of r summands behave as a
        random walk (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
        Comput. 41, 2019), and the sum bounds ‖|B||A|‖.
        """
        return self.roundings * _UNIT_ROUNDOFF * (delta_norm + self.magnitude)


class ResidualMeter:
    """Measures the tensors of a pair, from any thread, in memory that each thread uses again.

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
            ModelMismatchError: The change is none of such a tensor.
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
        if dtype == torch.float32 and not _WORTH_TRUSTING * rounding <= residual.error_norm < math.inf:
            residual, _ = self._in(torch.float64, base, tuned, change)
        if not math.isfinite(residual.delta_norm):
            self._pair.change(key, torch.device("cpu"))  # says which file holds what
        if not math.isfinite(residual.error_norm):
            raise NonFiniteError(
                f"{key}: the LoRA's change of it is too large for float64.",
                hint="Make the LoRA again: no weight changes by so much.",
            )
        return residual

    def _in(
        self, dtype: torch.dtype, base: Tensor, tuned: Tensor, change: Change | None
    ) -> tuple[Residual, float]:
        """The residual in a dtype, and the bound of that dtype's rounding for float32."""
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
        step = max(_BLOCK // max(width, 1), 1 if taken is None else taken.rows)
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


def _measure_tensor(
    meter: ResidualMeter, pair: CheckpointPair, targets: ChangedKeys, key: str
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


def _energy(block: Tensor) -> float:
    """‖block‖², summed in float64 across short runs."""
    values = block.view(-1)
    return float(torch.dot(values, values) if values.dtype == torch.float64 else blocked_energy(values))


def subtraction(change: Change, base: Tensor, dtype: torch.dtype) -> Subtraction:
    """Prepare a change for a calculation in `dtype`.

    Args:
        change: Factors, or any other kind, which is formed as a whole here.
        base: The weight that is changed, in any floating-point dtype; only some kinds look at its values.
        dtype: float32 or float64.

    Raises:
        ModelMismatchError: The change is none of such a weight.
        LoraFormatError: The change cannot be formed.
    """
    if isinstance(change, LoraFactors):
        return _factors_subtraction(change, dtype)
    formed = change.delta(base, dtype)
    whole = formed.reshape(formed.shape[0] if formed.ndim > 1 else 1, -1)
    magnitude = float(torch.linalg.vector_norm(whole))
    return Subtraction(lambda rows, block: block.sub_(whole[rows]), 1, magnitude, _ROUNDINGS_OF_OTHER_KINDS)


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
    return Subtraction(take_off, min(factors.rank, _MOST_ROWS), magnitude, math.sqrt(factors.rank + 1))


def _scaled_identity(matrix: Tensor) -> float | None:
    """The number c of a matrix that is c times the identity."""
    size = matrix.shape[0]
    if matrix.shape[1] != size:
        return None
    diagonal = matrix.diagonal()
    gain = diagonal[0]
    is_one = bool((diagonal == gain).all()) and int(matrix.count_nonzero()) == size
    return float(gain) if is_one else None


def _matrix_subtraction(matrix: Tensor, gain: float) -> Subtraction:
    """A LoRA of full rank is often ΔW itself beside a scaled identity: no product is needed, and none rounds."""
    magnitude = abs(gain) * float(torch.linalg.vector_norm(matrix))
    return Subtraction(lambda rows, block: block.sub_(matrix[rows], alpha=gain), 1, magnitude, 2.0)


def require_shape(change: Change, shape: tuple[int, ...]) -> None:
    """Refuse factors of another weight; other kinds know what they fit only when they are formed.

    Raises:
        ModelMismatchError: With both shapes.
    """
    if isinstance(change, LoraFactors) and change.weight_shape != shape:
        raise ModelMismatchError(
            f"the weight is {shape}, the LoRA's module is for {change.weight_shape}",
            hint="Use the LoRA with the model it was made for.",
        )


def formed(change: Change, weight: Tensor) -> Tensor:
    """ΔW in the shape of the weight that it changes, float32.

    Raises:
        ModelMismatchError: The change is none of such a weight.
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
            message=f"The LoRA was made from another base ({name}) than {pair.base.path}.",
            evidence={"made_from": name, "base": str(pair.base.path)},
            advice="Validate and use it with the base that it was made from.",
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
            message=f"The LoRA file holds {counted(len(lora.unused_keys), 'tensor')} of no module, first {first}.",
            evidence={"tensors": len(lora.unused_keys), "key": first},
        )
    ]


def _unmatched_modules(pair: CheckpointPair, lora: LoraFile, targets: ChangedKeys) -> list[ModuleError]:
    """The LoRA's modules for which there is no layer to compare. They reach nothing, so their error is 0."""
    lost = [_unmatched_module(lora, name, "the model has no such layer") for name in targets.unmatched]
    compared = {*(layer + WEIGHT for layer in pair.layers), *pair.others}
    for key, name in targets.names.items():
        if key not in compared:
            reason = pair.skipped.get(key, "its part of the models is not")
            lost.append(_unmatched_module(targets.lora, name, f"it is not compared: {reason}"))
    return lost


def _unmatched_module(lora: LoraFile, name: str, detail: str) -> ModuleError:
    shape, rank, kind = lora.shape_of(name), lora.rank_of(name), lora.kind_of(name)
    return ModuleError(name, shape, "unmatched", rank, 0.0, 0.0, detail, kind)
