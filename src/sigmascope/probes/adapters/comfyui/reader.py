"""Everything that a patcher would do to its model's weights, as `AppliedPatch`es."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.adapters.comfyui.applying import applied
from sigmascope.probes.adapters.comfyui.bypass import bypassed
from sigmascope.probes.adapters.comfyui.doubts import settled
from sigmascope.probes.adapters.comfyui.found import Found
from sigmascope.probes.adapters.comfyui.hooks import hooked
from sigmascope.probes.adapters.comfyui.objects import replaced, wrapped
from sigmascope.probes.adapters.comfyui.patcher import original_weight, patcher_of, weight_at
from sigmascope.probes.adapters.comfyui.sources import sources_of
from sigmascope.probes.adapters.comfyui.standing import Standings
from sigmascope.probes.adapters.guarded import sequence
from sigmascope.probes.reading import Reading, describe


def read_patches(model: object) -> Reading[tuple[AppliedPatch, ...]]:
    """Every change that a `ModelPatcher`, or the patcher of a `CLIP`, has for its model's weights.

    Never raises. Nothing is loaded, merged, moved or copied. An entry that cannot be read is there as
    "unknown" with the reason.

    Args:
        model: A patcher, or what holds one.

    Returns:
        One `AppliedPatch` for an entry of `patches`, by key in the host's order; before them weights that are
        replaced as objects, after them the entries of hooks, functions around weights, and bypasses. Two kinds of entries are several, with one `index`: a model merge (its weight, and each
        change upon that) and `model_as_lora` (the other model's weight, less the original). ComfyUI keeps no
        names: `source` is "LoRA 1", "LoRA 2" …, the same for what was registered together.
    """
    patcher = patcher_of(model)
    if patcher is None:
        return Reading(None, f"{type(model).__name__} is no patcher and holds none")
    try:
        return Reading(tuple(_patches(patcher)))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return Reading(None, describe(error))


def _patches(patcher: Any) -> Iterator[AppliedPatch]:
    readers = (replaced, _registered, hooked, wrapped, bypassed)
    all_found = [found for read in readers for found in read(patcher)]
    counts = Counter(found.key for found in all_found)
    weights = {key: (original_weight(patcher, key), weight_at(patcher.model, key)) for key in counts}
    indices: Counter[str] = Counter()
    for found in all_found:
        original, now = weights[found.key]
        for patch in applied(found, indices[found.key], original):
            yield settled(patch, original, now, alone=counts[found.key] == 1)
        indices[found.key] += 1


def _registered(patcher: Any) -> Iterator[Found]:
    standings = Standings(patcher)
    patches = {str(key): sequence(entries) for key, entries in list(patcher.patches.items())}
    sources = sources_of(patches)
    for key, entries in patches.items():
        for index, kept in enumerate(entries):
            yield Found(key, kept, standings.of(key, kept), sources.get((key, index)))
