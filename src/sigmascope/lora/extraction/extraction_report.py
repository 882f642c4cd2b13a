"""What an extraction did, layer by layer."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sigmascope.lora.extraction.layer_extraction import LeftOutReason
from sigmascope.lora.extraction.options import ExtractOptions
from sigmascope.lora.formats.base import FormatName
from sigmascope.lora.models.layer_names import layer_order
from sigmascope.lora.validation.module_errors import (
    BlockError,
    ModuleError,
    applied_errors,
    mean,
    overall_error,
    summarise_blocks,
)
from sigmascope.records.finding import Finding


@dataclass(frozen=True, slots=True)
class ExtractedModule:
    """One layer of the LoRA.

    Attributes:
        name: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        shape: Shape of its weight.
        rank: Rank really stored.
        delta_norm: ‖ΔW‖.
        relative_change: ‖ΔW‖ / ‖W‖ of the base; None when the base's weight is all zero.
        error_norm: ‖ΔW − up·down‖ of the stored, rounded factors.
        relative_error: `error_norm` / `delta_norm`.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    delta_norm: float
    relative_change: float | None
    error_norm: float
    relative_error: float
    kept_energy: float


@dataclass(frozen=True, slots=True)
class LeftOutLayer:
    """One layer that is not in the LoRA, and why. An unchanged one needs no factors."""

    name: str
    shape: tuple[int, ...]
    reason: LeftOutReason
    delta_norm: float
    largest_change: float


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """The result of one extraction.

    Attributes:
        base, tuned: The models, as given.
        lora: The LoRA file that was written.
        sidecar: The YAML beside it.
        format: Of the LoRA file.
        architecture: Family of the model: `lbm`, `sdxl`, …
        options: What was asked for.
        modules: The LoRA's layers, in the model's order.
        left_out: The compared layers that it does not hold.
        diffs: ‖Δ‖ of changed biases, norms and embeddings that are stored whole, by key.
        uncovered: ‖Δ‖ of those that are not, by key; a LoRA of layers does not hold them.
        findings: What to know before using the LoRA.
        seconds: Time of the whole extraction.
        file_bytes: Size of the LoRA file.
    """

    base: Path
    tuned: Path
    lora: Path
    sidecar: Path
    format: FormatName
    architecture: str
    options: ExtractOptions
    modules: tuple[ExtractedModule, ...]
    left_out: tuple[LeftOutLayer, ...]
    diffs: dict[str, float]
    uncovered: dict[str, float]
    findings: tuple[Finding, ...]
    seconds: float
    file_bytes: int

    @property
    def total_lora_modules(self) -> int:
        """Number of layers in the LoRA."""
        return len(self.modules)

    @property
    def total_analyzed_layers(self) -> int:
        """Number of Linear and convolution layers compared."""
        return len(self.modules) + len(self.left_out)

    @property
    def coverage_percentage(self) -> float:
        """Share of the compared layers that the LoRA holds, 0 to 100."""
        return 100.0 * self.total_lora_modules / self.total_analyzed_layers

    @property
    def errors(self) -> tuple[ModuleError, ...]:
        """The error of every layer that changed, as a validation of this LoRA would find it."""
        kept = [
            ModuleError(
                module.name, module.shape, "applied", module.rank, module.delta_norm, module.error_norm
            )
            for module in self.modules
        ]
        lost = [
            ModuleError(
                layer.name, layer.shape, "missing", None, layer.delta_norm, layer.delta_norm, layer.reason
            )
            for layer in self.left_out
            if layer.reason != "unchanged"
        ]
        return tuple(sorted(kept + lost, key=lambda error: layer_order(error.name)))

    @property
    def blocks(self) -> tuple[BlockError, ...]:
        """One summary a block, in the model's order."""
        return summarise_blocks(self.errors)

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − up·down‖ / ‖ΔW‖ over all compared layers together; a layer left out counts as lost."""
        return overall_error(self.errors)

    @property
    def average_error(self) -> float | None:
        """Mean of the modules' relative errors."""
        return mean(applied_errors(self.errors))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        totals = {
            "total_analyzed_layers": self.total_analyzed_layers,
            "total_lora_modules": self.total_lora_modules,
            "coverage_percentage": self.coverage_percentage,
            "relative_error": self.relative_error,
            "average_error": self.average_error,
        }
        fields = asdict(self) | {"options": self.options.as_dict()}
        paths = {name: str(fields.pop(name)) for name in ("base", "tuned", "lora", "sidecar")}
        return paths | totals | fields
