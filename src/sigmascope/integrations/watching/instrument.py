"""What every instrument of a watch is: put on pipelines, taken off again, and switched off when it fails."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from sigmascope.integrations.watching.listeners import After, Arguments, Keywords, Listener
from sigmascope.integrations.watching.taps import listen

if TYPE_CHECKING:
    from sigmascope.integrations.watching.parts import Parts
    from sigmascope.integrations.watching.session import Session


def reference_to(thing: object) -> Callable[[], object]:
    """What gives the thing for as long as others keep it alive."""
    try:
        return weakref.ref(thing)
    except TypeError:  # it cannot be referred to weakly
        return lambda: thing


Before = Callable[[object, Arguments, Keywords], After | None]


class Instrument:
    """Follows one kind of event. The first failure switches it off, with one line in the log, and takes it off.

    Args:
        session: For which it works.
    """

    name: ClassVar[str] = ""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.works = True
        self._undo: dict[object, tuple[Callable[[], object], Callable[[], None]]] = {}
        self._targets: dict[int, Callable[[], object]] = {}

    def start(self) -> None:
        """Put on what belongs to no pipeline."""

    def attach_class(self, kind: type) -> None:
        """Put on what all pipelines of a class need."""

    def attach(self, parts: "Parts") -> None:
        """Put on what this pipeline needs and has not yet."""

    def detach(self) -> None:
        """Take off everything, whatever fails."""
        while self._undo:
            _, (_, undo) = self._undo.popitem()
            with suppress(Exception):
                undo()
        self._targets.clear()

    def failed(self, failure: Exception) -> None:
        """Work no more in this session."""
        if self.works:
            self.works = False
            self.session.guard.switch_off(f"watch.{self.name}", failure)
            self.detach()

    def tap(self, owner: object, attribute: str, before: Before) -> None:
        """Hear the calls of a method that a class defines, or of what lies on an object; again changes nothing.

        What is there but is no function is left alone, with the reason in the record.
        """
        self._listen(owner, attribute, Listener(before, self.failed))

    def _listen(self, owner: object, attribute: str, listener: Listener) -> None:
        key = (id(owner), attribute)
        if self.has(key, owner):
            return
        try:
            undo = listen(owner, attribute, listener)
        except TypeError as failure:  # no function, as a partialmethod: it says nothing of others
            kind = owner if isinstance(owner, type) else type(owner)
            self.session.guard.switch_off(f"watch.{self.name} of {kind.__name__}", failure)
        else:
            self.keep_undo(key, undo, owner)

    def tap_class(self, kind: type, attribute: str, before: Before) -> None:
        """Hear a method of a class, where it is defined: there all watches of all subclasses listen."""
        definer = _definer(kind, attribute)
        if definer is not None:
            self.tap(definer, attribute, before)

    def tap_ends(self, thing: object, attribute: str, after: After) -> None:
        """Hear where the calls of a method end, and nothing else of them: cheaper than `tap_method`.

        It is heard for all objects of the class, unless the thing has an attribute of its own in the method's place.
        """
        definer = _definer(type(thing), attribute)
        is_own = attribute in getattr(thing, "__dict__", {})
        if is_own and definer is not None:
            self.forget((id(definer), attribute))  # what was put in its place may call it
        owner = thing if is_own else definer
        if owner is not None:
            self._listen(owner, attribute, Listener(_nothing, self.failed, after))

    def tap_method(self, thing: object, attribute: str, before: Before) -> None:
        """Hear an object's method: its class's, and what lies on the object itself under that name."""
        self._targets[id(thing)] = reference_to(thing)

        def of_target(target: object, args: Arguments, kwargs: Keywords) -> After | None:
            return before(target, args, kwargs) if self._is_target(target) else None

        self.tap_class(type(thing), attribute, of_target)
        if attribute in getattr(thing, "__dict__", {}):
            self.tap(thing, attribute, of_target)

    def _is_target(self, thing: object) -> bool:
        known = self._targets.get(id(thing))
        return known is not None and known() is thing

    def keep_undo(self, key: object, undo: Callable[[], None], thing: object = None) -> None:
        """Remember how to take something off.

        Args:
            key: Under which to find it.
            undo: What takes it off.
            thing: On which it is, where the key is made of its `id`: another may get that when this one is gone.
        """
        self.forget(key)
        self._undo[key] = (reference_to(thing), undo)

    def forget(self, key: object) -> None:
        """Take one thing off, if it is on."""
        _, undo = self._undo.pop(key, (None, None))
        if undo is not None:
            with suppress(Exception):
                undo()

    def has(self, key: object, thing: object = None) -> bool:
        """Whether something of that key is on that thing."""
        kept = self._undo.get(key)
        return kept is not None and kept[0]() is thing


def holder_of(thing: object, attribute: str) -> object:
    """The object whose method this is: another one, where a wrapper hands on what it has not itself."""
    if attribute in getattr(thing, "__dict__", {}):
        return thing
    holder = getattr(getattr(thing, attribute, None), "__self__", None)
    return thing if holder is None or isinstance(holder, type) else holder


def _definer(kind: type, attribute: str) -> type | None:
    """The class of its bases that defines the attribute."""
    definer = next((base for base in kind.__mro__ if attribute in vars(base)), None)
    return None if definer is object else definer


def _nothing(_target: object, _args: Arguments, _kwargs: Keywords) -> None:
    pass
