"""LoRA application (SPEC sections 1, 2 and 3): what a LoRA did to a model, and whether it did anything.

    baseline = capture_lora_baseline(unet, clip, "style.safetensors")
    result = apply_lora(...)
    analysis = analyze_lora_application_results(baseline, unet, clip, result)
    print_lora_analysis_summary(analysis)

The functions change nothing, move nothing, put nothing on the host's objects, and keep no model and no weight alive.
They know ComfyUI's patchers and PEFT's layers (and with these diffusers' loaders). What cannot be read is None, with the
reason in the `unavailable` beside it.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.records.peak import PeakMemory
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.lora.analysis import (
    Outcome,
    analyze,
)
from sigmascope.stages.lora.applied import read_applied
from sigmascope.stages.lora.baseline import Keys, capture, captured_of
from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.capturing import capture_model
from sigmascope.stages.lora.identity import identity_changes, is_same
from sigmascope.stages.lora.memory import memory_change
from sigmascope.stages.lora.moments import moments_of
from sigmascope.stages.lora.placement import placement_changes
from sigmascope.stages.lora.report import TITLE, sections
from sigmascope.stages.lora.safely import safe_patch_analysis, safe_weight_changes
from sigmascope.stages.lora.typed import LoraAnalysis, LoraBaseline
from sigmascope.stages.lora.typed_models import (
    IdentityChanges,
    MemoryChangeOfModel,
    PatchAnalysis,
    PlacementChanges,
    WeightChanges,
)
from sigmascope.stages.summary import print_summary

__all__ = [
    "LoraAnalysis",
    "LoraBaseline",
    "analyze_lora_application_results",
    "analyze_lora_patches",
    "calculate_memory_change",
    "capture_lora_baseline",
    "print_lora_analysis_summary",
    "track_model_identity_changes",
    "track_model_placement_changes",
    "track_weight_modifications",
]


def capture_lora_baseline(
    unet_model: object,
    clip_model: object,
    lora_path: object = None,
    *,
    keys: Keys = None,
    accelerator: Accelerator | None = None,
) -> LoraBaseline:
    """Models, contents of their weights, file and memory before the application. Never raises.

    Contents are kept as fingerprints and a thousand sampled elements a weight. Taking them reads every weight
    once; those on an accelerator are waited for.

    Args:
        unet_model: The denoiser: a module, ComfyUI's patcher, a pipeline, or several of them; None if there is none.
        clip_model: The text encoder or encoders, likewise, or ComfyUI's CLIP.
        lora_path: The LoRA's file, for its facts and for what of it matches the models.
        keys: Whose contents to look at: None all weights, "lora" those that the file changes, "none" nothing, or
            names.
        accelerator: What to ask about devices; None finds out.
    """
    return capture(unet_model, clip_model, lora_path, keys, accelerator)


def track_model_identity_changes(
    original_model: object, modified_model: object, model_type: str
) -> IdentityChanges:
    """Whether a model was cloned or changed its class, and how many weights got changes. Never raises.

    Args:
        original_model: Before; the model itself or its part of a baseline, `baseline["unet"]`. A model that was
            changed in place can be compared with its baseline alone.
        modified_model: After.
        model_type: Such as "UNet" or "CLIP".
    """
    before, after = _before(original_model, model_type, contents=False), _look(modified_model, model_type)
    return identity_changes(before, after, is_same(before, modified_model))


def track_weight_modifications(
    original_model: object, modified_model: object, model_type: str
) -> WeightChanges:
    """Which weights were added, removed and changed, and by how much. Never raises.

    Args:
        original_model: See `track_model_identity_changes`.
        modified_model: After.
        model_type: Such as "UNet" or "CLIP".
    """
    before = _before(original_model, model_type, contents=True)
    applied = read_applied(modified_model, model_type)
    return safe_weight_changes(moments_of(before, modified_model, model_type, applied))


def analyze_lora_patches(modified_model: object, model_type: str) -> PatchAnalysis:
    """Every change that is on a model now: what it is, how strong, and how far it has come. Never raises.

    Args:
        modified_model: With LoRAs or without.
        model_type: Such as "UNet" or "CLIP".
    """
    return safe_patch_analysis(read_applied(modified_model, model_type))


def track_model_placement_changes(
    original_model: object, modified_model: object, model_type: str
) -> PlacementChanges:
    """Whether a model went to another device, or its host would have it on another. Never raises.

    Args:
        original_model: See `track_model_identity_changes`.
        modified_model: After.
        model_type: Such as "UNet" or "CLIP"; a CLIP has three more keys.
    """
    return placement_changes(
        _before(original_model, model_type, contents=False), _look(modified_model, model_type)
    )


def calculate_memory_change(baseline_info: object, current_model: object) -> MemoryChangeOfModel:
    """What PyTorch's allocator holds more than at the baseline, in MiB. Never raises.

    Args:
        baseline_info: `baseline["unet"]` or `baseline["clip"]`.
        current_model: The model now; for its size.
    """
    captured = captured_of(baseline_info)
    model_type = "" if captured is None else captured.model_type
    return memory_change(baseline_info, current_model, model_type, memory_snapshot())


def analyze_lora_application_results(
    baseline: object,
    modified_unet: object,
    modified_clip: object,
    lora_result: object,
    *,
    elapsed_time: object = None,
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
) -> LoraAnalysis:
    """Everything that seed 000 and SPEC section 3 name, each model against its own original. Never raises.

    Args:
        baseline: What `capture_lora_baseline` gave; None: only what is on the models now can be told.
        modified_unet: The denoiser after the application, cloned or changed in place.
        modified_clip: The text encoder or encoders.
        lora_result: What the application returned, such as ComfyUI's (model, clip). diffusers returns None, which
            the seed calls no success: hand over the pipeline. Whether anything changed is in `effective`.
        elapsed_time: Seconds that the application took.
        peak_memory: The peak of the stage that watched it.
        error: What the application raised, if it did.
    """
    return analyze(
        baseline, modified_unet, modified_clip, Outcome(lora_result, elapsed_time, peak_memory, error)
    )


def print_lora_analysis_summary(analysis: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_lora_application_results` gave, or the same read from a file.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_summary(TITLE, sections(analysis), console)


def _before(original: object, model_type: str, *, contents: bool) -> CapturedModel:
    return captured_of(original) or capture_model(original, model_type, contents=contents)


def _look(model: object, model_type: str) -> CapturedModel:
    return capture_model(model, model_type, contents=False)
