"""What is wrong with a LoRA's application or worth knowing of it, with what to do.

Findings are about the file, about one model's weights and the changes on them, and about the application as a
whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sigmascope.lora.compatibility import AppliedVerdict
from sigmascope.lora.verdict import LoraVerdict
from sigmascope.records.run import Finding
from sigmascope.stages.schema import PatchAnalysis, WeightChanges

_HOST_OF_FINDING: Final = {
    "lora_alpha_ignored": "diffusers",
    "lora_kohya_names": "diffusers",
    "lora_comfyui_names": "diffusers",
    "lora_whole_differences": "diffusers",
    "lora_prefix": "diffusers",
    "lora_some_biases": "diffusers",
    "lora_comfyui_loses_attention": "comfyui",
}
"""Whose loader a finding about the file's form is about."""
_ABOUT_NAMES: Final = frozenset(
    {"lora_kohya_names", "lora_comfyui_names", "lora_prefix", "lora_comfyui_loses_attention"}
)
"""Those that no longer matter where every module was found on the model."""
_ORDER: Final = ("critical", "error", "warning", "info")
STAGE: Final = "lora_application"
_OF_MISSING: Final = frozenset({"lora_not_loaded", "lora_partly_loaded"})
_LEFT_OFF: Final = Finding(
    "lora_not_applied",
    "warning",
    "The models are the very ones from before, and nothing was registered on them.",
    {"patched_keys": 0},
    "ComfyUI's loader does so where both strengths are 0. Else hand over the models that it returned.",
    STAGE,
)
_MUCH_OVERLAP: Final = 0.5


@dataclass(frozen=True, slots=True)
class FileFindings:
    """What was found out of the file."""

    verdict: LoraVerdict | None
    applied: AppliedVerdict | None
    host: str

    def all(self) -> Iterator[Finding]:
        """The findings of both verdicts that matter here."""
        complete = self.applied is not None and self.applied.complete
        on_model = () if self.applied is None else self.applied.findings
        left_out = (
            {"lora_text_encoder_missing"}
            if any(finding_on_model.id == "lora_part_left_out" for finding_on_model in on_model)
            else ()
        )
        for finding in () if self.verdict is None else self.verdict.findings:
            if _HOST_OF_FINDING.get(finding.id, self.host) == self.host and not (
                finding.id in left_out or (complete and finding.id in _ABOUT_NAMES)
            ):
                yield replace(finding, stage=STAGE)
        for finding in on_model:
            yield replace(finding, stage=STAGE)


def findings_of(
    models: Sequence[tuple[str, WeightChanges, PatchAnalysis]],
    file: FileFindings,
    effective: bool | None,
    *,
    applied: bool,
    left_off: bool = False,
) -> list[Finding]:
    """All findings, the worst first."""
    findings: list[Finding] = []
    for name, weights, patches in models:
        findings += [*on_patches(name, patches), *on_weights(name, weights)]
    known = {finding.id for finding in findings}
    of_file = {(finding.id, finding.message): finding for finding in file.all() if finding.id not in known}
    findings += of_file.values()
    if left_off:
        findings = [finding for finding in findings if finding.id not in _OF_MISSING] + [_LEFT_OFF]
    elif not any(finding.id == "lora_not_loaded" for finding in findings):
        findings += _on_whole(models, effective, applied)
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def _on_whole(
    models: Sequence[tuple[str, WeightChanges, PatchAnalysis]], effective: bool | None, applied: bool
) -> Iterator[Finding]:
    patched = sum(patches["total_patched_keys"] or 0 for _, _, patches in models)
    read = any(patches["total_patched_keys"] is not None for _, _, patches in models)
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


def on_patches(name: str, patches: PatchAnalysis) -> Iterator[Finding]:
    """What is wrong with the changes on a model."""
    failed = patches["failed"]
    if failed:
        key, reason = next(iter(failed.items()))
        yield Finding(
            "lora_changes_failed",
            "error",
            f"{name}: {len(failed)} weights cannot take their change, such as {key}: {reason}.",
            {"keys": len(failed), "example": key, "reason": reason},
            "The LoRA is for a model of other sizes.",
            STAGE,
        )
    for key in patches["not_finite"][:1]:
        yield Finding(
            "lora_not_finite",
            "error",
            f"{name}: the changes of {len(patches['not_finite'])} weights hold NaN or Inf, such as {key}.",
            {"keys": len(patches["not_finite"]), "example": key},
            "Take the LoRA off: every image through these weights is black or noise. Train it in bf16 or float32.",
            STAGE,
        )
    for twice in patches["applied_twice"]:
        yield Finding(
            "lora_applied_twice",
            "warning",
            f"{name}: the same change acts more than once on {twice['keys']} weights ({' and '.join(twice['sources'])}).",
            {"keys": twice["keys"], "example": twice["example"]},
            "Load it once, with the sum of the strengths if that was meant.",
            STAGE,
        )
    yield from _on_overlaps(name, patches)
    yield from _on_states(name, patches)


def _on_overlaps(name: str, patches: PatchAnalysis) -> Iterator[Finding]:
    for pair in patches["overlaps"]:
        overall, chance = pair["overall"], pair["chance"]
        if overall is None or overall < max(_MUCH_OVERLAP, 2 * (chance or 0.0)):
            continue
        together = "add up" if (pair["cosine"] or 0.0) > 0 else "work against each other"
        yield Finding(
            "lora_overlap",
            "info",
            f"{name}: {pair['a']} and {pair['b']} act in the same directions of {pair['shared_keys']} weights "
            f"(overlap {overall:.2f}, chance {chance or 0.0:.2f}): they {together} there.",
            {"overlap": overall, "chance": chance, "cosine": pair["cosine"], "keys": pair["shared_keys"]},
            "Lower one of the strengths if the image is overdone.",
            STAGE,
        )


def _on_states(name: str, patches: PatchAnalysis) -> Iterator[Finding]:
    states, total = patches["states"], patches["total_patched_keys"] or 0
    if states.get("registered"):
        yield Finding(
            "lora_registered_only",
            "info",
            f"{name}: {states['registered']} changes are registered and in no weight yet.",
            {"registered": states["registered"], "keys": total},
            "ComfyUI merges when the model is loaded for sampling; the figures are predicted until then.",
            STAGE,
        )
    if states.get("inactive"):
        yield Finding(
            "lora_inactive",
            "info",
            f"{name}: {states['inactive']} changes are switched off or of strength 0.",
            {"inactive": states["inactive"], "keys": total},
            None,
            STAGE,
        )


def on_weights(name: str, weights: WeightChanges) -> Iterator[Finding]:
    """What is odd about a model's weights."""
    drift = weights["drift"]
    if drift["keys"]:
        largest = drift["largest_relative_change"]
        size = "" if largest is None else f", at most {largest:.1e} of their length"
        yield Finding(
            "lora_drift",
            "info",
            f"{name}: {len(drift['keys'])} weights differ from before by rounding{size}, as after fusing and unfusing or in another dtype.",
            {"keys": len(drift["keys"]), "largest_relative_change": largest},
            "This is no change. Reload the weights if results must be the same bit for bit.",
            STAGE,
        )
    for key in weights["unexplained"][:1]:
        yield Finding(
            "weights_changed_unexplained",
            "warning",
            f"{name}: {len(weights['unexplained'])} weights changed with no change on them that would explain it, such as {key}.",
            {"keys": len(weights["unexplained"]), "example": key},
            "A LoRA was fused and its adapter deleted, or something else wrote into the weights.",
            STAGE,
        )
    for key in weights["not_as_predicted"][:1]:
        change = weights["keys_value_changed"][key]
        yield Finding(
            "lora_not_as_predicted",
            "warning",
            f"{name}: {len(weights['not_as_predicted'])} merged weights did not change by what their changes say, such as {key}.",
            {
                "keys": len(weights["not_as_predicted"]),
                "example": key,
                "predicted": change["predicted_delta_norm"],
                "found": change["delta_norm"]
                if change["measured_from"] == "contents"
                else change["sampled_delta_norm"],
            },
            "The strength was set after merging, the change was merged twice, or the dtype is too coarse for it.",
            STAGE,
        )
