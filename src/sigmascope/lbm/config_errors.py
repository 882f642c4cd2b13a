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
    details = _causes(error.errors())
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
    if detail["type"] == "missing":
        return f"{key} is required"
    return f"{key}: {_expected(detail)}, got {_shortened(detail['input'])}"


def _causes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out that a list is too short where its values were refused: pydantic counts those that remain."""
    inside = {detail["loc"][:-1] for detail in details}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]


def _expected(detail: ErrorDetails) -> str:
    """What was expected, without the names of Python's types."""
    match detail["type"]:
        case "too_short":
            return f"expected at least {_values(detail['ctx']['min_length'])}"
        case "too_long":
            return f"expected at most {_values(detail['ctx']['max_length'])}"
        case "tuple_type":
            return "expected a list of values"
        case "path_type":
            return "expected a path"
        case _:
            return detail["msg"][:1].lower() + detail["msg"][1:]


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"


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
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
