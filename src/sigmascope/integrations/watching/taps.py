"""Methods heard from outside: replaced while somebody listens, then put back as they were."""

import copy
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling, is_dynamo_compiling

from sigmascope.integrations.watching.frames import without_this_frame
from sigmascope.integrations.watching.listeners import Listener, call_heard, tell_after


class Tap:
    """One method of one class, or one callable attribute of one object.

    The host's results and exceptions pass unchanged. Inside what torch.compile traces nobody is told, so that no graph
    breaks. Whoever replaces the method meanwhile stays: our part in it then does nothing.

    Args:
        owner: The class or object whose attribute it is.
        name: The attribute.

    Raises:
        KeyError: It is not the owner's own.
        TypeError: The attribute is no function.
    """

    def __init__(self, owner: object, name: str) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self.only_after: Listener | None = None
        self._owner = weakref.ref(owner)
        self._name = name
        self._before = vars(owner)[name]
        self._replacement = self._replaced(self._before, isinstance(owner, type))

    def tell(self, listeners: tuple[Listener, ...]) -> None:
        """Let these listen from now on, and no others."""
        self.only_after = listeners[0] if len(listeners) == 1 and listeners[0].after is not None else None
        self.listeners = listeners

    def put_on(self) -> None:
        """Replace the attribute."""
        owner = self._owner()
        if isinstance(owner, type):
            setattr(owner, self._name, self._replacement)
        elif owner is not None:
            vars(owner)[self._name] = self._replacement

    def take_off(self) -> None:
        """Put the attribute back, unless somebody has put another in our place."""
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self._replacement:
            return
        if isinstance(owner, type):
            setattr(owner, self._name, self._before)
        else:
            vars(owner)[self._name] = self._before

    def _replaced(self, found: object, of_class: bool) -> object:
        if not of_class:
            if not callable(found):
                raise TypeError(f"{self._name} is a {type(found).__name__} and cannot be called")
            return _Attribute(found, self, self._owner)
        if isinstance(found, classmethod):
            return classmethod(_heard(found.__func__, self))
        if isinstance(found, staticmethod):
            return staticmethod(_heard(found.__func__, self, is_static=True))
        if inspect.isfunction(found):
            return _heard(found, self)
        raise TypeError(f"{self._name} is a {type(found).__name__} and no function")


class _Attribute:
    """Stands for a callable that lies on one object. A copy of that object gets a copy of the callable alone."""

    def __init__(self, original: Callable[..., Any], tap: Tap, owner: Callable[[], object]) -> None:
        self._original = original
        self._tap = tap
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self._original(*args, **kwargs)
        try:
            return call_heard(self._original, self._tap.listeners, self._owner(), args, kwargs, args)
        except BaseException as error:
            without_this_frame(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_original"), name)

    def __copy__(self) -> Any:
        return self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        return _itself, (self._original,)


def _itself(thing: Any) -> Any:
    return thing


def _heard(original: Callable[..., Any], tap: Tap, *, is_static: bool = False) -> Callable[..., Any]:
    """The function, with its name, documentation and signature, and the tap's listeners around it."""
    skipped = 0 if is_static else 1

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        listener = tap.only_after
        if listener is None or listener.after is None:
            if is_compiling():  # dearer: it tells of an export too
                return original(*args, **kwargs)
            target = None if is_static or not args else args[0]
            try:
                return call_heard(original, tap.listeners, target, args, kwargs, args[skipped:])
            except BaseException as error:
                without_this_frame(error)
                raise
        try:  # the hot path of the scheduler's step: written out here
            result = original(*args, **kwargs)
        except BaseException as error:
            without_this_frame(error)
            tell_after([(listener.after, listener)], None, error)
            raise
        try:
            listener.after(result, None)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            listener.failed(failure)
        return result

    call.__dict__["__signature__"] = inspect.signature(original)
    return call


_LOCK = threading.RLock()
_TAPS: dict[tuple[int, str], Tap] = {}


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # another thread may have held the old one when this process was forked off


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def listen(owner: object, name: str, listener: Listener) -> Callable[[], None]:
    """Let the listener hear every call of `owner.name` until the function that is returned is called.

    Args:
        owner: The class that defines a method, which is meant on all instances, or an object on which a callable lies.
        name: The attribute.
        listener: Who is told.

    Raises:
        KeyError: The owner has no such attribute of its own.
        TypeError: It is no function.
    """
    key = (id(owner), name)
    with _LOCK:
        tap = _TAPS.get(key)
        if tap is None or tap._owner() is not owner:
            tap = _TAPS[key] = Tap(owner, name)
            tap.put_on()
        tap.tell((*tap.listeners, listener))
    return functools.partial(_forget, key, tap, listener)


def _forget(key: tuple[int, str], tap: Tap, listener: Listener) -> None:
    with _LOCK:
        tap.tell(tuple(one for one in tap.listeners if one is not listener))
        if not tap.listeners and _TAPS.get(key) is tap:
            del _TAPS[key]
            tap.take_off()
