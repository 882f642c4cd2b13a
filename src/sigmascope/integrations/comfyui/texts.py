"""Which values of a graph are words that somebody wrote, and which were chosen from what a node offers.

A node's class says so by its `INPUT_TYPES`, which ComfyUI asks for with each prompt. Here it is asked once, and again where
a value is not among the choices that it gave, such as a file that came later. What no class knows counts as written.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sigmascope.probes.reading import attempt

TEXTS: Final = frozenset(
    {"text", "prompt", "text_g", "text_l", "clip_l", "clip_g", "t5xxl", "positive_prompt", "negative_prompt"}
)
"""Inputs whose text is a prompt, in whatever node."""


class _Input(NamedTuple):
    choices: frozenset[str]
    is_prompt: bool


_KNOWN: Final[WeakKeyDictionary[Any, Mapping[str, _Input]]] = WeakKeyDictionary()
"""By a node's class, its inputs by name."""


def is_prompt(class_type: str, name: str) -> bool:
    """Whether an input takes a prompt: by its name, or because its text may have several lines."""
    known = _inputs(class_type).get(name)
    return name in TEXTS or (known is not None and known.is_prompt)


def is_choice(class_type: str, name: str, value: str) -> bool:
    """Whether a value is one of those that the node offers for this input."""
    known = _inputs(class_type).get(name)
    if known is None or not known.choices:
        return False
    return value in known.choices or value in _inputs(class_type, anew=True).get(name, known).choices


def _inputs(class_type: str, *, anew: bool = False) -> Mapping[str, _Input]:
    return attempt(lambda: _known(class_type, anew=anew)).value or {}


def _known(class_type: str, *, anew: bool) -> Mapping[str, _Input]:
    """The inputs of a class. Raises whatever a class of another pack raises."""
    kind = sys.modules["nodes"].NODE_CLASS_MAPPINGS[class_type]
    if anew or kind not in _KNOWN:
        _KNOWN[kind] = attempt(lambda: dict(_read(kind.INPUT_TYPES()))).value or _KNOWN.get(kind, {})
    return _KNOWN[kind]


def _read(declared: Mapping[str, Any]) -> Iterator[tuple[str, _Input]]:
    """What a class declares: by "required" and "optional", for each input a type or a list of choices, and options."""
    for group in ("required", "optional"):
        for name, (kind, *rest) in (declared.get(group) or {}).items():
            options = rest[0] if rest and isinstance(rest[0], Mapping) else {}
            offered = kind if isinstance(kind, list | tuple) else options.get("options")
            choices = frozenset(filter(_is_text, offered or ())) if kind != "STRING" else frozenset()
            yield name, _Input(choices, kind == "STRING" and bool(options.get("multiline")))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
