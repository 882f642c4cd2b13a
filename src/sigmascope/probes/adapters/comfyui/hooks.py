"""Changes that belong to a conditioning and are merged while it is sampled (since December 2024)."""

import math
from collections.abc import Iterator
from typing import Any

from sigmascope.probes.adapters.comfyui.found import Found, Standing
from sigmascope.probes.adapters.guarded import attribute, mapping, number, sequence

_IN_FORCE = "a hook that is in force now"
_WAITING_FOR_SAMPLING = "a hook that is in force while the conditioning that carries it is sampled"


def hooked(patcher: object) -> Iterator[Found]:
    """The changes in `hook_patches`. A hook's own strength multiplies those of its entries."""
    hooks = _hooks_in_force(patcher)
    kept = mapping(patcher, "hook_backup")
    for place, (ref, patches) in enumerate(mapping(patcher, "hook_patches").items()):
        hook = next((hook for hook in hooks if attribute(hook, "hook_ref") is ref), None)
        for key, entries in patches.items():
            merged = hook is not None and key in kept
            standing = Standing("merged", _IN_FORCE) if merged else Standing("registered", _WAITING_FOR_SAMPLING)
            for entry in entries:
                yield Found(key, _times(entry, hook), standing, f"hook {place + 1}")


def _hooks_in_force(patcher: object) -> tuple[Any, ...]:
    return sequence(attribute(attribute(patcher, "current_hooks"), "hooks"))


def _times(entry: Any, hook: object) -> object:
    """The entry with the strength that the host multiplies in for this moment of the schedule."""
    strength = number(attribute(hook, "strength"))
    if hook is None or strength is None or math.isclose(strength, 1.0):
        return entry
    own, *rest = entry
    return (own * strength, *rest)
