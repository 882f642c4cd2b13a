"""Bring what users write in YAML to what the settings hold."""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from pydantic import BaseModel


def as_list(value: Any) -> Any:
    """One value in place of a list of one, as users write it; an empty one is none."""
    if isinstance(value, str) and not value.strip():
        return None
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


def user_path(value: Any) -> Any:
    """A path with `~` resolved, None for an empty one; anything else as it is.

    Templates of configs leave `""` where nothing is meant, and to `Path` that is the current folder.
    """
    if isinstance(value, str) and not value.strip():
        return None
    if isinstance(value, str | Path) and str(value).startswith("~"):
        return Path(value).expanduser()
    return value


def numbers_are_numbers(data: Any, model: type[BaseModel]) -> Any:
    """Refuse true and false where a number is meant; pydantic takes them for 1 and 0.

    Raises:
        ValueError: Names the keys.
    """
    if not isinstance(data, Mapping):
        return data
    wrong = [
        f"{key}: expected a number, got {str(value).lower()}"
        for key, value in data.items()
        if isinstance(value, bool) and key in model.model_fields and _is_number(model, key)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return data


def _is_number(model: type[BaseModel], key: str) -> bool:
    annotation: Any = model.model_fields[key].annotation
    kinds = set(get_args(annotation)) if isinstance(annotation, UnionType) else {annotation}
    return bool(kinds & {int, float}) and kinds <= {int, float, NoneType}
