"""How well base + LoRA reproduces a tuned model, layer by layer, block by block and as a whole."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sigmascope.lora.validation.module_errors import (
    BANDS,
    Band,
    BlockError,
    ModuleError,
    applied_errors,
    band_of,
    mean,
    overall_error,
    summarise_blocks,
)
from sigmascope.records.finding import Finding

_WORST = 10


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of one validation.

    Attributes:
        base, tuned, lora: The files, as given.
        modules: Every layer that changed and every module of the LoRA, in the model's order.
        unchanged_layers: Layers with ΔW = 0 and without a module: nothing to do for them.
        findings: What else to know.
        seconds: Time of the validation.
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
        """Applied modules in per cent of all that should be: changed layers and the LoRA's modules together."""
        return 100.0 * self.applied / len(self.modules)

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − s·BA‖ / ‖ΔW‖ of all layers together; None when a LoRA is measured against no change at all."""
        return overall_error(self.modules)

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
        """How many applied modules fall into each band."""
        found = [module.band for module in self.modules if module.status == "applied"]
        return {band: found.count(band) for band in BANDS}

    @property
    def blocks(self) -> tuple[BlockError, ...]:
        """One summary a block, in the model's order."""
        return summarise_blocks(self.modules)

    @property
    def worst(self) -> tuple[ModuleError, ...]:
        """The ten applied modules with the largest relative errors, largest first."""
        measured = [module for module in self.modules if module.status == "applied" and module.delta_norm > 0]
        return tuple(sorted(measured, key=lambda module: -module.error_norm / module.delta_norm)[:_WORST])

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers that the LoRA changes, without biases and norms: what `lora_layer_names.txt` lists."""
        applied = [module for module in self.modules if module.status == "applied"]
        return tuple(module.name for module in applied if len(module.shape) > 1)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        return {
            "base": str(self.base),
            "tuned": str(self.tuned),
            "lora": str(self.lora),
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
