"""What `dataclasses.replace` does, in less time (with 21 fields in less than half): for what is made anew for each of thousands of weights."""

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

_Thing = TypeVar("_Thing")


def replaced(thing: _Thing, **changes: Any) -> _Thing:
    """A copy of a dataclass's object with other values, of which all fields are given to `__init__` in their order.

    Raises:
        KeyError: It has no field of that name.
    """
    kind: Any = type(thing)
    places, values_of = _fields_of(kind)
    values = [*values_of(thing)]
    for name, value in changes.items():
        values[places[name]] = value
    return type(thing)(*values)


@lru_cache(maxsize=256)
def _fields_of(kind: Any) -> tuple[dict[str, int], Callable[[Any], tuple[Any, ...]]]:
    names = [field.name for field in fields(kind)]
    return {name: place for place, name in enumerate(names)}, attrgetter(*names)
