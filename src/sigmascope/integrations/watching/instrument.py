"""What every instrument of a watch is: put on pipelines, taken off again, and switched off when it fails."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from sigmascope.integrations.watching.taps import After, Arguments, Keywords, Listener, listen

if TYPE_CHECKING:
    from sigmascope.integrations.watching.parts import Parts
    from sigmascope.integrations.watching.session import Session

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
        self._undo: dict[object, Callable[[], None]] = {}

    def start(self) -> None:
        """Put on what belongs to no pipeline."""

    def attach(self, parts: "Parts") -> None:
        """Put on what this pipeline needs and has not yet."""

    def detach(self) -> None:
        """Take off everything, whatever fails."""
        while self._undo:
            _, undo = self._undo.popitem()
            with suppress(Exception):
                undo()

    def failed(self, failure: Exception) -> None:
        """Work no more in this session."""
        if self.works:
            self.works = False
            self.session.guard.switch_off(f"watch.{self.name}", failure)
            self.detach()

    def tap(self, owner: object, attribute: str, before: Before) -> None:
        """Hear a method's calls from now on; a second time changes nothing."""
        key = (id(owner), attribute)
        if key not in self._undo:
            self._undo[key] = listen(owner, attribute, Listener(before, self.failed))

    def tap_method(self, thing: object, attribute: str, before: Before) -> None:
        """Hear an object's method: its class's, and what lies on the object itself under that name."""
        if callable(getattr(type(thing), attribute, None)):
            self.tap(type(thing), attribute, before)
        if attribute in getattr(thing, "__dict__", {}):
            self.tap(thing, attribute, before)

    def keep_undo(self, key: object, undo: Callable[[], None]) -> None:
        """Remember how to take something off."""
        self._undo[key] = undo

    def forget(self, key: object) -> None:
        """Take one thing off, if it is on."""
        undo = self._undo.pop(key, None)
        if undo is not None:
            undo()

    def has(self, key: object) -> bool:
        """Whether something of that key is on."""
        return key in self._undo
