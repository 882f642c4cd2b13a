"""What was read to load a model: its files, and which keys did not fit."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MIB = 2**20
_MOST_KEYS = 50
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def file_facts(files: object) -> dict[str, Any]:
    """Names, format and size of the files of a model's weights; nothing where there are none.

    Args:
        files: One path or several.
    """
    paths = [Path(one) for one in _several(files) if isinstance(one, str | os.PathLike)]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    if not sizes:
        return {}
    formats = sorted({path.suffix.removeprefix(".") for path in paths})
    return {
        "files": [path.name for path in paths],
        "folder": str(paths[0].parent),
        "format": "+".join(formats),
        "size_mb": sum(sizes) / _MIB,
    }


def key_facts(result: object) -> dict[str, Any]:
    """Keys that the model lacks in the file, the file has too many, or that are of another shape.

    Args:
        result: What the library's loader gives: an object or a tuple (model, missing, unexpected, mismatched, …).
    """
    told = result[0] if isinstance(result, tuple) and result and hasattr(result[0], _KEYS[0]) else result
    if isinstance(told, tuple) and len(told) >= 4:
        groups: dict[str, Any] = dict(zip(_KEYS, told[1:4], strict=True))
    else:
        groups = {name: getattr(told, name, None) for name in _KEYS}
    facts: dict[str, Any] = {}
    for name, keys in groups.items():
        if isinstance(keys, Iterable):
            named = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in keys)
            facts |= {name: named[:_MOST_KEYS], f"num_{name}": len(named)}
    return facts


def _several(files: object) -> list[object]:
    if isinstance(files, str | os.PathLike):
        return [files]
    return list(files) if isinstance(files, list | tuple) else []
