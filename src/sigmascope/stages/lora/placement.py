"""Where a model was and is."""

import torch

from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.parts import is_text
from sigmascope.stages.lora.typed_models import PlacementChanges


def placement_changes(before: CapturedModel, after: CapturedModel) -> PlacementChanges:
    """Compare two moments of a model; of a text encoder also by the seed's own names.

    Args:
        before: The original.
        after: What came of it.
    """
    old, new = before.placement, after.placement
    found: PlacementChanges = {
        "model_device_changed": _changed(old.device, new.device),
        "load_device_changed": _changed(old.load_device, new.load_device),
        "offload_device_changed": _changed(old.offload_device, new.offload_device),
        "original_device": _named(old.device),
        "modified_device": _named(new.device),
        "original_load_device": _named(old.load_device),
        "modified_load_device": _named(new.load_device),
        "original_offload_device": _named(old.offload_device),
        "modified_offload_device": _named(new.offload_device),
    }
    if is_text(after.model_type):
        found["clip_model_device"] = _named(new.device)
        found["clip_patcher_load_device"] = _named(new.load_device)
        found["clip_patcher_offload_device"] = _named(new.offload_device)
    found["unavailable"] = _placement_reasons(found, before, after)
    return found


def _changed(old: torch.device | None, new: torch.device | None) -> bool | None:
    return None if old is None or new is None else old != new


def _named(device: torch.device | None) -> str | None:
    return None if device is None else str(device)


def _placement_reasons(
    found: PlacementChanges, before: CapturedModel, after: CapturedModel
) -> dict[str, str]:
    reasons = {**before.unavailable, **after.unavailable}
    unknown = "nothing is known of where it is"
    return {
        name: reasons.get(_what(name), reasons.get("device", unknown))
        for name, value in found.items()
        if value is None
    }


def _what(name: str) -> str:
    return next((f"{kind}_device" for kind in ("offload", "load") if f"{kind}_device" in name), "device")
