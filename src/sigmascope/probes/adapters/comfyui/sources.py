"""Which entries came from one LoRA: ComfyUI keeps no file names, but leaves traces of its loading."""

from collections.abc import Mapping, Sequence
from typing import Any

from sigmascope.probes.adapters.comfyui.values import is_list_of_patches
from sigmascope.probes.adapters.guarded import attribute, sequence

Place = tuple[str, int]
_Group = tuple[str, int, int]  # what the token is of, the token, and how often it had come before


def sources_of(patches: Mapping[str, Sequence[Any]]) -> dict[Place, str]:
    """A name for each entry, the same for entries that were registered together: "LoRA 1" and so on.

    Adapters of one file share one set of `loaded_keys`; all entries of one call share the very number that is
    their strength. One call gives a weight, or a part of it, one entry: if the same trace is there twice, it
    was two calls.

    Args:
        patches: By key, the entries in the host's order.

    Returns:
        By key and the entry's index. Merged models are named "merged model 1" and so on.
    """
    groups = _groups(patches)
    strengths = _files_by_strength(patches, groups)
    joined = {place: strengths.get(group) or group for place, group in groups.items()}
    names: dict[_Group, str] = {}
    counts: dict[str, int] = {}
    for group in joined.values():
        if group not in names:
            word = "merged model" if group[0] == "merge" else "LoRA"
            counts[word] = counts.get(word, 0) + 1
            names[group] = f"{word} {counts[word]}"
    return {place: names[group] for place, group in joined.items()}


def _groups(patches: Mapping[str, Sequence[Any]]) -> dict[Place, _Group]:
    groups: dict[Place, _Group] = {}
    for key, entries in patches.items():
        seen: dict[object, int] = {}
        for index, entry in enumerate(entries):
            word, token = _trace(entry)
            again = (word, token, repr(_offset(entry)))
            groups[key, index] = (word, token, seen.get(again, 0))
            seen[again] = seen.get(again, 0) + 1
    return groups


def _trace(entry: object) -> tuple[str, int]:
    parts = sequence(entry)
    value = parts[1] if len(parts) > 1 else None
    loaded = attribute(value, "loaded_keys")
    if loaded is not None:
        return "file", id(loaded)
    word = "merge" if is_list_of_patches(value) else "call"
    return word, id(parts[0]) if parts else 0


def _offset(entry: object) -> object:
    parts = sequence(entry)
    return parts[3] if len(parts) > 3 else None


def _files_by_strength(
    patches: Mapping[str, Sequence[Any]], groups: Mapping[Place, _Group]
) -> dict[_Group, _Group]:
    """For entries that are no adapters, the one file whose adapters came with the very same strength."""
    files: dict[tuple[int, int], set[_Group]] = {}
    for (key, index), group in groups.items():
        if group[0] == "file":
            strength = sequence(patches[key][index])[0]
            files.setdefault((id(strength), group[2]), set()).add(group)
    only = {trace: next(iter(found)) for trace, found in files.items() if len(found) == 1}
    return {("call", *trace): group for trace, group in only.items()}
