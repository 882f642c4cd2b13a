"""Everything that a watch could leave on a pipeline, on what it is made of, and on their classes."""

import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sigmascope.integrations.diffusers import watch_session
from sigmascope.integrations.imports import FINDER
from sigmascope.monitor import hooks


def marks(*things: Any) -> dict[str, dict[str, Any]]:
    """Attributes and hooks of things, of all modules in them and of all their classes, by identity.

    Args:
        *things: Pipelines and other objects.

    Returns:
        For each thing, module and class its attributes by name.
    """
    found: dict[str, dict[str, Any]] = {}
    kinds: dict[type, None] = {}
    for number, thing in enumerate(things):
        for name, one in _parts(thing):
            found.setdefault(f"{number}.{name}", {}).update(_attributes(one))
            kinds |= dict.fromkeys(type(one).__mro__)
    for kind in kinds:
        attributes = found.setdefault(f"{kind.__module__}.{kind.__qualname__}", {})
        attributes.update((key, id(value)) for key, value in vars(kind).items())
    return found


def left_behind() -> list[object]:
    """What the watching itself still holds."""
    finders = [one for one in sys.meta_path if one is FINDER]
    return [
        *hooks._METHOD_HOOKS.values(),
        *watch_session.OPEN_SESSIONS,
        *watch_session.STACKS.get(),
        *finders,
    ]


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    yield "", thing
    components = getattr(thing, "components", None)
    if isinstance(components, Mapping):
        for name, part in components.items():
            yield from _parts_of(name, part)
    else:
        yield from _parts_of("", thing)


def _parts_of(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        yield from ((f"{name}.{inner}", module) for inner, module in part.named_modules())
    elif part is not None and hasattr(part, "__dict__"):
        yield name, part


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(thing).items():
        if "hooks" in name and isinstance(value, (dict, Mapping)):  # at once of a dict, as PyTorch's are
            yield name, {key: id(hook) for key, hook in value.items()} if value else {}
        else:
            yield name, id(value) if callable(value) else type(value)


def staying(before: set[threading.Thread]) -> set[threading.Thread]:
    """The threads that have begun since and do not end by themselves: one that was told to needs its turn for it."""
    begun = {*threading.enumerate()} - before
    for thread in begun:
        thread.join(timeout=10)
    return {thread for thread in begun if thread.is_alive()}
