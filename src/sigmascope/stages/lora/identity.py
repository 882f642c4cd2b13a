"""Whether a model is still the same object of the same class, and how many of its weights have changes."""

from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.parts import parts_of
from sigmascope.stages.lora.typed_models import IdentityChanges


def identity_changes(before: CapturedModel, after: CapturedModel, same: bool | None) -> IdentityChanges:
    """Compare two moments.

    Args:
        before: The original.
        after: What came of it.
        same: Whether it is one object; None if nobody knows, as where there is no model.
    """
    unavailable = {**_identity_reasons(before, "original"), **_identity_reasons(after, "modified")}
    counts = before.patch_count, after.patch_count
    known = before.kind is not None and after.kind is not None
    if not known:
        reason = unavailable.get("original_class") or unavailable.get("modified_class") or "unknown"
        unavailable |= dict.fromkeys(("model_cloned", "class_changed"), reason)
    if None in counts:
        unavailable["patches_added"] = "the changes of one of the two could not be counted"
    uuids = before.patches_uuid, after.patches_uuid
    if None in uuids:
        unavailable["uuid_changed"] = after.unavailable.get("patches_uuid", "there is none to compare with")
    return {
        "model_cloned": None if same is None else not same,
        "class_changed": before.kind != after.kind if known else None,
        "patches_added": None if counts[0] is None or counts[1] is None else counts[1] - counts[0],
        "uuid_changed": None if None in uuids else bool(uuids[0] != uuids[1]),
        "original_patch_count": counts[0],
        "modified_patch_count": counts[1],
        "original_class": before.class_name,
        "modified_class": after.class_name,
        "unavailable": unavailable,
    }


def is_same(before: CapturedModel, modified: object) -> bool | None:
    """Whether a model is the one that was captured; None if there is none or was none.

    The weak reference says so even when another object has been given a dead one's `id()`. Lists and mappings take
    none, and are the models in them.
    """
    if before.model_id is None or modified is None:
        return None
    if before.reference is not None:
        return before.reference() is modified
    if before.model_id == id(modified):
        return True
    now = read_host(lambda: parts_of(modified, before.model_type)).value or {}
    if not now or before.parts.keys() != now.keys():
        return False
    return all(held is not None and held() is now[name] for name, held in before.parts.items())


def _identity_reasons(captured: CapturedModel, which: str) -> dict[str, str]:
    names = {"class": f"{which}_class", "patches_count": f"{which}_patch_count"}
    return {new: captured.unavailable[old] for old, new in names.items() if old in captured.unavailable}
