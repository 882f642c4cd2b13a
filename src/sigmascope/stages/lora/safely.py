"""The parts of an analysis that look deepest into the host's objects, with a reason in place of what they raise."""

from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.applied import Applied
from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.moments import Moments
from sigmascope.stages.lora.patch_facts import patch_analysis
from sigmascope.stages.lora.typed_models import PatchAnalysis, WeightChanges
from sigmascope.stages.lora.weight_changes import weight_changes


def safe_weight_changes(moments: Moments) -> WeightChanges:
    """`weight_changes`, or its structure with the reason why there is nothing in it."""
    found = read_host(lambda: weight_changes(moments))
    if found.value is not None:
        return found.value
    nothing = CapturedModel(moments.after.model_type, unavailable={"weights": found.reason or "unknown"})
    return weight_changes(Moments(nothing, nothing, None, Applied()))


def safe_patch_analysis(applied: Applied) -> PatchAnalysis:
    """`patch_analysis`, or its structure with the reason why there is nothing in it."""
    found = read_host(lambda: patch_analysis(applied))
    if found.value is not None:
        return found.value
    return patch_analysis(Applied(unavailable={"model": found.reason or "unknown"}))
