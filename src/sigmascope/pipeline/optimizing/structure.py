"""How a pipeline is put together, noted before a choice is applied, so that just what it changed can be put back.

What is noted are references: attributes of the pipeline, of every module, attention processor and hook, and what
their dicts and lists hold. Values of tensors are another matter (`weights`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from sigmascope.pipeline.optimizing.kind import Undo

_ABSENT: Final = object()
_HOOKED: Final = ("_diffusers_hook", "_hf_hook", "processor")
"""Attributes of modules that hold objects with a state of their own."""

_SET_BY_USERS: Final = ("processor",)
"""What a user may have set anew meanwhile: then it stays. Hooks are not among these: libraries renew theirs."""

_PLAIN: Final = (str, int, float, bool, type(None), tuple)


@dataclass(frozen=True, slots=True)
class _Noted:
    """One object with its attributes, and copies of those that are dicts and lists."""

    thing: object
    attributes: Mapping[str, Any]
    contents: Mapping[str, Any]

    @classmethod
    def of(cls, thing: object) -> "_Noted":
        own = dict(_attributes(thing))
        contents = {name: _copied(value) for name, value in own.items() if isinstance(value, dict | list)}
        return cls(thing, own, contents)


class Structure:
    """The structure of a pipeline at one moment.

    Args:
        things: The pipeline and its modules; of modules all their parts are noted.
    """

    def __init__(self, things: Iterable[object]) -> None:
        self._noted = {id(thing): _Noted.of(thing) for thing in _reached(things)}

    def changes_since(self) -> list[Undo]:
        """What is different now, each as a function that puts it back.

        What others change later stays as they leave it, unless it is the very same attribute or entry.
        """
        found: list[Undo] = []
        for noted in self._noted.values():
            found += _differences(noted)
        return found


def _reached(things: Iterable[object]) -> Iterator[object]:
    """Things, the parts of modules, and the processors and hooks on these."""
    seen: set[int] = set()
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, _PLAIN) or not _has_attributes(thing):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, nn.Module):
            waiting += thing._modules.values()
        waiting += [held for name, held in _attributes(thing).items() if name in _HOOKED]
        if type(thing).__name__ == "HookRegistry":
            own = _attributes(thing)
            waiting += [*own.get("hooks", {}).values(), *own.get("_fn_refs", ())]


def _differences(noted: _Noted) -> Iterator[Undo]:
    now = _attributes(noted.thing)
    for name in {**noted.attributes, **now}:
        before, after = noted.attributes.get(name, _ABSENT), now.get(name, _ABSENT)
        if before is not after:
            yield _attribute_undo(noted.thing, name, before, after)
        if name in noted.contents:
            copy = noted.contents[name]
            if isinstance(before, dict):
                yield from _entry_undos(before, copy)
            elif not _same_items(before, copy):
                yield _list_undo(before, copy)


def _attribute_undo(thing: object, name: str, before: object, after: object) -> Undo:
    def undo() -> None:
        own = _attributes(thing)
        if name in _SET_BY_USERS and own.get(name, _ABSENT) is not after:
            return
        if before is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = before

    return undo


def _entry_undos(held: dict[Any, Any], copy: Mapping[Any, Any]) -> Iterator[Undo]:
    changed = {
        key: copy.get(key, _ABSENT)
        for key in {**copy, **held}
        if copy.get(key, _ABSENT) is not held.get(key, _ABSENT)
    }
    if not changed:
        return
    order = list(copy)

    def undo() -> None:
        now = dict(held)
        for key, before in changed.items():
            if before is _ABSENT:
                now.pop(key, None)
            else:
                now[key] = before
        held.clear()
        held.update({key: now.pop(key) for key in order if key in now} | now)

    yield undo


def _list_undo(held: list[Any], copy: list[Any]) -> Undo:
    def undo() -> None:
        held[:] = copy

    return undo


def _copied(held: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
    return dict(held) if isinstance(held, dict) else list(held)


def _same_items(held: list[Any], copy: list[Any]) -> bool:
    return len(held) == len(copy) and all(one is other for one, other in zip(held, copy, strict=True))


def _has_attributes(thing: object) -> bool:
    return isinstance(getattr(thing, "__dict__", None), dict) and not isinstance(thing, type)


def _attributes(thing: object) -> dict[str, Any]:
    own: dict[str, Any] = vars(thing)
    return own
