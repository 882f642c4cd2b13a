"""The verdict on one LoRA file and one model."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sigmascope.lora.effect.block_effects import BlockEffect, by_block
from sigmascope.lora.effect.key_effect import Effect
from sigmascope.lora.verdict.module_verdict import REASONS, ModuleVerdict, Reason
from sigmascope.records.finding import Finding

_NOT_READ: Final = "the model's weights were not read"


@dataclass(frozen=True, slots=True)
class LoraVerdict:
    """Whether a LoRA is for a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        format: `native`, `kohya`, `peft` or `comfyui`; None if the file could not be read.
        file_family: What the file is for, such as `sdxl`; None where nothing tells.
        family_evidence: What that was told from.
        model_family: What the model is; None where it is of no known family.
        model_naming: How the model names its weights, as in `ModelLayout.naming`.
        modules: Every module of the file, in its order.
        unused_keys: Keys of the file that belong to no module.
        error: Why the file, or the model, could not be read; then nothing else is known.
        findings: What is wrong or worth knowing, with what to do, the worst first.
        unavailable: What could not be had, with the reason.
    """

    path: str | None
    format: str | None = None
    file_family: str | None = None
    family_evidence: str = ""
    model_family: str | None = None
    model_naming: str = "unknown"
    modules: tuple[ModuleVerdict, ...] = ()
    unused_keys: tuple[str, ...] = ()
    error: str | None = None
    findings: tuple[Finding, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> tuple[ModuleVerdict, ...]:
        """Modules that change a weight of the model."""
        return tuple(module for module in self.modules if module.matched)

    @property
    def unmatched(self) -> tuple[ModuleVerdict, ...]:
        """Modules that change none."""
        return tuple(module for module in self.modules if not module.matched)

    @property
    def fits(self) -> bool:
        """Whether there are modules, all of which change a weight and none of which holds NaN or Inf."""
        return bool(self.modules) and not self.unmatched and not self.not_finite

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Modules that hold NaN or Inf."""
        return tuple(module.name for module in self.modules if module.finite is False)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank."""
        return dict(sorted(Counter(m.rank for m in self.modules if m.rank is not None).items()))

    @property
    def reasons(self) -> dict[Reason, int]:
        """How many modules are unmatched for each reason."""
        counts = Counter(module.reason for module in self.unmatched)
        return {reason: counts[reason] for reason in REASONS if counts[reason]}

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """How many modules of each part of the model match, and how many there are."""
        found: dict[str, dict[str, int]] = {}
        for module in self.modules:
            counts = found.setdefault(module.part, {"matched": 0, "modules": 0})
            counts["matched"] += int(module.matched)
            counts["modules"] += 1
        return found

    @property
    def blocks(self) -> tuple[BlockEffect, ...]:
        """Strength by block, of the modules that match, at LoRA strength 1; from the file alone."""
        effects = {
            module.layers[0]: Effect(module.norm, None, None, unavailable=_why_no_norm(module))
            for module in self.matched
        }
        return by_block(effects)

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON values, totals first."""
        return {
            "path": self.path,
            "format": self.format,
            "fits": self.fits,
            "error": self.error,
            "file_family": self.file_family,
            "family_evidence": self.family_evidence,
            "model_family": self.model_family,
            "model_naming": self.model_naming,
            "total_modules": len(self.modules),
            "matched_modules": len(self.matched),
            "unmatched_modules": len(self.unmatched),
            "reasons": dict(self.reasons),
            "parts": self.parts,
            "ranks": self.ranks,
            "not_finite": list(self.not_finite),
            "unused_keys": list(self.unused_keys),
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [block.as_dict() for block in self.blocks],
            "modules": [module.as_dict() for module in self.modules],
            "unavailable": dict(self.unavailable),
        }


def _why_no_norm(module: ModuleVerdict) -> dict[str, str]:
    unread = {"weight_norm": _NOT_READ, "relative_change": _NOT_READ}
    if module.norm is not None:
        return unread
    if module.finite is False:
        return unread | {"delta_norm": "the module holds NaN or Inf"}
    if module.finite is None:
        return unread | {"delta_norm": "its numbers were not read"}
    return unread | {"delta_norm": f"what a {module.kind} change does depends on the model's weight"}
