"""Turn pydantic's errors into one message a user can act on."""

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sigmascope.errors import ConfigError


def config_error(error: ValidationError, model: type[BaseModel], where: str) -> ConfigError:
    """Name every wrong key, what was expected of it, and the nearest known key.

    Args:
        error: What pydantic found.
        model: The model that was being filled; its fields are the known keys.
        where: The file, or what was being read.
    """
    details = error.errors()
    lines = [_describe(detail, model) for detail in details]
    unknown = any(detail["type"] == "extra_forbidden" for detail in details)
    hint = "Remove or rename the unknown keys." if unknown else "Correct these values."
    return ConfigError(f"{where}: {'; '.join(lines)}.", hint=hint)


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(detail["loc"], model)
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return f"{key}.{text}" if key else text
    return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {_shortened(detail['input'])}"


def _unknown_key(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    name = str(location[-1])
    known = _known_keys(model, location[:-1])
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    key = ".".join(str(part) for part in location)
    if nearest:
        return f"unknown key {key} (did you mean {nearest[0]}?)"
    return f"unknown key {key} (known: {', '.join(sorted(known))})"


def _known_keys(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    for part in parents:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
