"""What is wrong with a LoRA's application or worth knowing of it, with what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sigmascope.lora.verdict.applied_verdict import AppliedVerdict
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.records.finding import Finding
from sigmascope.stages.lora.model_findings import STAGE, on_patches, on_weights
from sigmascope.stages.lora.typed_models import PatchAnalysis, WeightChanges

_HOSTS: Final = {
    "lora_alpha_ignored": "diffusers",
    "lora_kohya_names": "diffusers",
    "lora_comfyui_names": "diffusers",
    "lora_whole_differences": "diffusers",
    "lora_prefix": "diffusers",
    "lora_some_biases": "diffusers",
    "lora_comfyui_loses_attention": "comfyui",
}
"""Whose loader a finding about the file's form is about."""
_NAMES: Final = frozenset(
    {"lora_kohya_names", "lora_comfyui_names", "lora_prefix", "lora_comfyui_loses_attention"}
)
"""Those that no longer matter where every module was found on the model."""
_ORDER: Final = ("critical", "error", "warning", "info")


@dataclass(frozen=True, slots=True)
class FileFindings:
    """What was judged of the file.

    Attributes:
        verdict: Whether it is for the models.
        applied: What of it is on them.
        host: `comfyui` or `diffusers`: what only the other does with such files is left out.
    """

    verdict: LoraVerdict | None
    applied: AppliedVerdict | None
    host: str

    def all(self) -> Iterator[Finding]:
        """The findings of both verdicts that matter here."""
        complete = self.applied is not None and self.applied.complete
        for finding in () if self.verdict is None else self.verdict.findings:
            if _HOSTS.get(finding.id, self.host) == self.host and not (complete and finding.id in _NAMES):
                yield replace(finding, stage=STAGE)
        for finding in () if self.applied is None else self.applied.findings:
            yield replace(finding, stage=STAGE)


def findings_of(
    sides: Sequence[tuple[str, WeightChanges, PatchAnalysis]],
    file: FileFindings,
    effective: bool | None,
    *,
    applied: bool,
) -> list[Finding]:
    """All findings, the worst first.

    Args:
        sides: Name, weight changes and patches of each model.
        file: What was judged of the file.
        effective: Whether anything does something else than before; None if nobody knows.
        applied: Whether the host says that it applied one.
    """
    found: list[Finding] = []
    for name, weights, patches in sides:
        found += [*on_patches(name, patches), *on_weights(name, weights)]
    known = {finding.id for finding in found}
    of_file = {(finding.id, finding.message): finding for finding in file.all() if finding.id not in known}
    found += of_file.values()
    if not any(finding.id == "lora_not_loaded" for finding in found):
        found += _on_whole(sides, effective, applied)
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))


def _on_whole(
    sides: Sequence[tuple[str, WeightChanges, PatchAnalysis]], effective: bool | None, applied: bool
) -> Iterator[Finding]:
    patched = sum(patches["total_patched_keys"] or 0 for _, _, patches in sides)
    read = any(patches["total_patched_keys"] is not None for _, _, patches in sides)
    if effective is None and read:
        yield Finding(
            "lora_not_seen",
            "warning",
            "No change is registered on the models, and what their weights held before is not known.",
            {"patched_keys": 0, "host_says_applied": applied},
            "Take a baseline before the application, of weights that are in memory.",
            STAGE,
        )
    if effective is not False:
        return
    if patched:
        yield Finding(
            "lora_without_effect",
            "warning",
            f"{patched} weights have changes, and none of them does anything.",
            {"patched_keys": patched, "host_says_applied": applied},
            "Look at the states: strength 0, switched off, or shapes that do not fit.",
            STAGE,
        )
    else:
        yield Finding(
            "lora_not_applied",
            "error",
            "No weight of the models changed, and no change was registered.",
            {"patched_keys": 0, "host_says_applied": applied},
            "The host may report this in its log alone. Compare the file with the model: sigmascope lora inspect FILE --model MODEL.",
            STAGE,
        )
