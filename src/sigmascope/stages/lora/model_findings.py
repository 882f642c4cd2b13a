"""What is wrong with one model's weights and the changes on them, or worth knowing."""

from collections.abc import Iterator
from typing import Final

from sigmascope.records.finding import Finding
from sigmascope.stages.lora.typed_models import PatchAnalysis, WeightChanges

STAGE: Final = "lora_application"
_MUCH: Final = 0.5


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
        if overall is None or overall < max(_MUCH, 2 * (chance or 0.0)):
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
