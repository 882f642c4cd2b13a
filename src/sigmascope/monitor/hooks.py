"""Hooks on methods and modules of the host, put on from outside and taken off without a trace.

A `HookSet` keeps what is on and how to take it off. Whatever it is told of, it only listens: the host's arguments,
results and exceptions pass unchanged, and the first failure of a listener takes the whole set off. A method is
replaced while somebody listens (`listen`, `MethodHook`); several listeners share one replacement. A module is heard
at its class's `__call__` (`HookSet.hook_calls`).
"""

import copy
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from torch import nn
from torch.compiler import is_compiling

from sigmascope.monitor.guard import Guard, to_the_end

T = TypeVar("T")
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
After: TypeAlias = Callable[[object, BaseException | None], None]
"""Called once with what a call returned, or with what it raised."""
Before = Callable[[object, Arguments, Keywords], After | None]
"""Called before a call of a method with its target and arguments; gives what is to be called after it."""


class HookSet:
    """Hooks of one kind on any number of things. The first failure of one takes all off, with one line in the log.

    Attributes:
        instrument: What the reason of a failure is kept under.
        works: Whether nothing has failed so far.
        gives_way_to: Those whose calls it is not told of: where they want to be called after one, it is theirs.
    """

    def __init__(self, guard: Guard, instrument: str) -> None:
        self.guard = guard
        self.instrument = instrument
        self.works = True
        self.gives_way_to: HookSet | None = None
        self._undo: dict[object, tuple[Callable[[], object], Callable[[], None]]] = {}
        self._heard: dict[str, ByIdentity[tuple[type, Before]]] = {}

    def hook_method(self, thing: object, attribute: str, before: Before) -> None:
        """Hear a method of an object, whether its class or the object itself has it. A second call changes nothing."""
        kind = type(thing)
        heard = self._heard.setdefault(attribute, ByIdentity())
        heard.put(thing, (kind, before))
        definer = next((base for base in kind.__mro__[:-1] if attribute in vars(base)), None)
        if definer is not None and isinstance(vars(definer)[attribute], staticmethod):
            failure = TypeError(f"{attribute} is static: its calls do not say on which object")
            self.guard.switch_off(f"{self.instrument} of {kind.__name__}", failure)
        elif definer is not None:
            self.hook_attribute(kind, attribute, _before_targets(heard, kind))
        if attribute in getattr(thing, "__dict__", {}):
            self.hook_attribute(thing, attribute, before)

    def hook_calls(self, module: nn.Module, before: Before) -> None:
        """Hear a module's calls, around its hooks and around what `module.compile()` puts in their place.

        `nn.DataParallel` calls copies of a module, in threads. That is heard as one call of the module, where the wrapper
        is called.
        """
        self.hook_method(module, "__call__", before)
        by_wrapper = functools.partial(_before_replicas, self._heard["__call__"])
        self._listen("replicas", nn.DataParallel, "__call__", by_wrapper)

    def hook_class(self, kind: type, attribute: str, before: Before) -> None:
        """Hear a method of a class, where it is defined: there all watches of all subclasses listen."""
        definer = next((base for base in kind.__mro__ if attribute in vars(base)), object)
        if definer is not object:
            self.hook_attribute(definer, attribute, before)

    def hook_attribute(self, owner: object, attribute: str, before: Before) -> None:
        """Hear the calls of a method that a class defines, or of what lies on an object; again changes nothing.

        What cannot be replaced, because it is not a function for example, is left alone; the record has the reason.
        """
        self._listen((id(owner), attribute), owner, attribute, before)

    def _listen(self, key: object, owner: object, attribute: str, before: Before) -> None:
        if self.has(key, owner):
            return
        try:
            undo = listen(owner, attribute, Listener(before, self.failed, self, self.gives_way_to))
        except Exception as failure:  # noqa: BLE001 - it refuses, in whatever words; that says nothing of others
            kind = owner if isinstance(owner, type) else type(owner)
            self.guard.switch_off(f"{self.instrument} of {kind.__name__}", failure)
        else:
            self._keep_or_undo(key, undo, owner)

    def hears_calls(self, module: object) -> bool:
        """Whether `hook_calls` was given this module."""
        heard = self._heard.get("__call__")
        return heard is not None and heard.get(module) is not None

    def has(self, key: object, thing: object = None) -> bool:
        """Whether something of that key is on that thing."""
        kept = self._undo.get(key)
        return kept is not None and kept[0]() is thing

    def keep_undo(self, key: object, undo: Callable[[], None], thing: object = None) -> None:
        """Remember how to take something off.

        Args:
            key: Under which to find it.
            undo: What takes it off.
            thing: On which it is, where the key is made of its `id`: another may get that when this one is gone.
        """
        self.forget(key)
        gone = functools.partial(_pop, self._undo, key)
        self._undo[key] = ((lambda: None) if thing is None else reference_to(thing, gone), undo)

    def _keep_or_undo(self, key: object, undo: Callable[[], None], thing: object) -> None:
        """Remember how to take off what is on already; if that fails, take it off now."""
        try:
            self.keep_undo(key, undo, thing)
        except BaseException:
            undo()
            raise

    def forget(self, key: object) -> None:
        """Take one thing off, if it is on."""
        _, undo = self._undo.pop(key, (None, None))
        if undo is not None:
            with suppress(Exception):
                undo()

    def failed(self, failure: Exception) -> None:
        """Stop working, and take everything off."""
        if self.works:
            self.works = False
            self.guard.switch_off(self.instrument, failure)
            self.detach()

    def detach(self) -> None:
        """Take off everything, whatever fails. Ctrl-C is raised when that is done."""
        to_the_end(self._detach, None)

    def _detach(self, _error: BaseException | None) -> None:
        for key, (_, undo) in reversed(list(self._undo.items())):
            with suppress(Exception):
                undo()
            self._undo.pop(key, None)  # only now: Ctrl-C may have come before
        self._heard.clear()


def _before_targets(heard: "ByIdentity[tuple[type, Before]]", owner: type) -> Before:
    """What tells the listeners of an object and class; a base's method that its own method calls is part of that call."""
    known = heard.known

    def before(target: object, args: Arguments, kwargs: Keywords) -> After | None:
        entry = known.get(id(target))  # as `ByIdentity.get` does, without the time of a call
        if entry is None or entry[0]() is not target:
            return None
        kind, tell = entry[1]
        return tell(target, args, kwargs) if kind is owner else None

    return before


def _before_replicas(
    heard: "ByIdentity[tuple[type, Before]]", wrapper: Any, args: Arguments, kwargs: Keywords
) -> After | None:
    """Tell the listeners of the module that a wrapper replicates; on one device it calls the module itself."""
    if len(wrapper.device_ids) < 2 or heard.get(wrapper) is not None:
        return None
    known = heard.get(wrapper.module)
    return None if known is None else known[1](wrapper.module, args, kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """Who hears the calls of a method.

    Attributes:
        before: Called with the object (or class) that is called on, and the call's arguments; gives what is to be
            called after it, or None.
        failed: Called with what `before` or its `After` raised, which goes no further.
        hooks: Whose it is.
        gives_way_to: It is not told of a call after which a listener of these, before it, wants to be called.
    """

    before: Before
    failed: Callable[[Exception], None]
    hooks: HookSet | None = None
    gives_way_to: HookSet | None = None


_METHOD_HOOKS: dict[tuple[int, str], "MethodHook"] = {}
"""Those that are on, by the owner's `id` and the attribute."""
_LOCK = threading.RLock()


def listen(owner: object, name: str, listener: Listener) -> Callable[[], None]:
    """Let the listener hear every call of `owner.name` until the function that is returned is called.

    Args:
        owner: The class that defines a method, which is meant on all instances, or an object on which a callable lies.
        name: The attribute.
        listener: Who is told.

    Raises:
        KeyError: The owner has no such attribute, or an object none of its own.
        TypeError: It is not a function.
    """
    key = (id(owner), name)
    with _LOCK:
        hook = _METHOD_HOOKS.get(key)
        if hook is None or hook._owner() is not owner:
            hook = _METHOD_HOOKS[key] = MethodHook(owner, name)
        undo = functools.partial(_forget, key, hook, listener)
        try:
            hook.put_on()
            hook.listeners = (*hook.listeners, listener)
        except BaseException:
            undo()
            raise
    return undo


def _forget(key: tuple[int, str], hook: "MethodHook", listener: Listener) -> None:
    with _LOCK:
        hook.listeners = tuple(other for other in hook.listeners if other is not listener)
        if not hook.listeners and _METHOD_HOOKS.get(key) is hook:
            hook.take_off()
            del _METHOD_HOOKS[key]  # only now: Ctrl-C may have come before


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # another thread may have held the old one when this process was forked off


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


_INHERITED = object()
"""Stands for what a class has from its bases."""
_NOTHING = object()
"""Stands for an object that was not given."""


class MethodHook:
    """One method of one class, or one callable attribute of one object.

    The host's results and exceptions pass unchanged. Inside what torch.compile traces nobody is told, so that no graph
    breaks. Whoever replaces the method meanwhile stays: our part in it then does nothing.

    Raises:
        KeyError: It is not the owner's own.
        TypeError: The attribute is not a function.
    """

    def __init__(self, owner: object, name: str) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._owner = weakref.ref(owner, functools.partial(_pop, _METHOD_HOOKS, (id(owner), name)))
        self._name = name
        self._is_on = False
        self._before = vars(owner).get(name, _INHERITED) if isinstance(owner, type) else vars(owner)[name]
        self.is_inherited = self._before is _INHERITED
        original = _inherited(owner, name) if self.is_inherited else self._before
        self._replacement = self._replaced(original, isinstance(owner, type))

    def put_on(self) -> None:
        """Replace the attribute, once."""
        owner = self._owner()
        if self._is_on:
            return
        self._is_on = True
        if isinstance(owner, type):
            setattr(owner, self._name, self._replacement)
        elif owner is not None:
            vars(owner)[self._name] = self._replacement

    def take_off(self) -> None:
        """Put the attribute back, unless somebody has put another in our place."""
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self._replacement:
            return
        if not isinstance(owner, type):
            vars(owner)[self._name] = self._before
        elif self.is_inherited:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, self._before)

    def _replaced(self, attribute: object, of_class: bool) -> object:
        if not of_class:
            if not callable(attribute):
                raise TypeError(f"{self._name} is a {type(attribute).__name__} and cannot be called")
            return _Attribute(attribute, self, self._owner)
        if isinstance(attribute, classmethod):
            return classmethod(_with_listeners(attribute.__func__, self))
        if isinstance(attribute, staticmethod):
            return staticmethod(_with_listeners(attribute.__func__, self, is_static=True))
        if inspect.isfunction(attribute):
            return _with_listeners(attribute, self)
        raise TypeError(f"{self._name} is a {type(attribute).__name__}, not a function")


def _inherited(kind: Any, name: str) -> object:
    """What a class inherits under that name, without our replacements."""
    for base in kind.__mro__[1:]:
        hook = _METHOD_HOOKS.get((id(base), name))
        attribute = vars(base).get(name, _INHERITED) if hook is None else hook._before
        if attribute is not _INHERITED:
            return attribute
    raise KeyError(name)


def _with_listeners(
    original: Callable[..., Any], hook: MethodHook, *, is_static: bool = False
) -> Callable[..., Any]:
    """A class's function, with its name, documentation and signature, and the hook's listeners around it."""
    told = _told(original, hook, takes_target=not is_static)
    call = functools.update_wrapper(_without_target(told) if is_static else told, original)
    call.__dict__["__signature__"] = inspect.signature(original)
    return call


def _without_target(told: Callable[..., Any]) -> Callable[..., Any]:
    """What is called on no object, as a static method is."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return told(None, *args, **kwargs)
        except BaseException as error:
            without_this_frame(error)
            raise

    return call


class _Attribute:
    """Stands for a callable that lies on one object. A copy of that object gets a copy of the callable alone."""

    def __init__(self, original: Callable[..., Any], hook: MethodHook, owner: Callable[[], object]) -> None:
        self._original = original
        self._owner = owner
        self._told = _told(original, hook, takes_target=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self._original(*args, **kwargs)
        try:
            return self._told(self._owner(), *args, **kwargs)
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


def _told(original: Callable[..., Any], hook: MethodHook, *, takes_target: bool) -> Callable[..., Any]:
    """What gives what the original gives, and tells the hook's listeners: the hot path, in one frame.

    It takes the target, and then the arguments that the caller sees.

    Args:
        original: What is called.
        hook: Its listeners are told of the target and the arguments.
        takes_target: Whether the original takes the target, too.
    """
    name, kind_of = hook._name, hook._owner
    is_inherited = takes_target and hook.is_inherited

    def call(target: Any = _NOTHING, /, *seen: Any, **kwargs: Any) -> Any:
        if is_compiling():
            has_target = takes_target and target is not _NOTHING
            return original(target, *seen, **kwargs) if has_target else original(*seen, **kwargs)
        act, given, listeners = original, seen, hook.listeners
        if target is _NOTHING:  # a method that is called on its class, without an object
            listeners = ()
        elif is_inherited:  # a base's method may have been replaced meanwhile, as `torch.fx` does
            try:
                act = getattr(super(kind_of(), target), name)
            except TypeError:  # another class's object, to which the function was given by hand
                given = (target, *seen)
        elif takes_target:
            given = (target, *seen)
        last: tuple[After, Listener] | None = None  # of each what it wants to be called after the call
        others: tuple[tuple[After, Listener], ...] = ()
        for listener in listeners:
            first = listener.gives_way_to
            if first is not None and last is not None and last[1].hooks is first:
                continue
            try:
                after = listener.before(target, seen, kwargs)
            except Exception as failure:  # noqa: BLE001 - what a listener raises must not reach the host
                listener.failed(failure)
            else:
                if after is not None:
                    if last is not None:
                        others = (*others, last)
                    last = (after, listener)
        try:
            result = act(*given, **kwargs)
        except BaseException as error:
            without_this_frame(error)
            if last is not None:
                _call_after((*others, last), None, error)
            raise
        if last is not None:  # the last first
            after, listener = last
            try:
                after(result, None)
            except Exception as failure:  # noqa: BLE001 - as above
                listener.failed(failure)
            if others:
                _call_after(others, result, None)
        return result

    return call


def _call_after(
    afters: tuple[tuple[After, Listener], ...], result: object, error: BaseException | None
) -> None:
    """Tell listeners of what a call gave or raised, the last first."""
    for after, listener in reversed(afters):
        try:
            after(result, error)
        except Exception as failure:  # noqa: BLE001 - as above
            listener.failed(failure)


class ByIdentity(Generic[T]):
    """Values for objects, each kept as long as its object lives: another object may get its `id` afterwards.

    Attributes:
        known: By an object's `id` what gives the object, and its value.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[Callable[[], object], T]] = {}

    def __len__(self) -> int:
        return len(self.known)

    def get(self, thing: object) -> T | None:
        """The object's value; None if there is none."""
        known = self.known.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def put(self, thing: object, value: T) -> None:
        """Keep this value for the object."""
        self.known[id(thing)] = (reference_to(thing, functools.partial(_pop, self.known, id(thing))), value)

    def clear(self) -> None:
        """Forget all."""
        self.known.clear()


def without_this_frame(error: BaseException) -> None:
    """Take the frame that has just caught an error out of its traceback, where a bare `raise` follows.

    `integrations.imports` has the same, for where nothing of this package may be loaded.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


def _pop(table: dict[Any, Any], key: object, _: object) -> None:
    """Take something out of a table. No lock is taken: garbage is collected anywhere."""
    table.pop(key, None)


def reference_to(thing: object, gone: Callable[[object], object] | None = None) -> Callable[[], object]:
    """A function that gives the object as long as others keep it alive; `gone` is called once nobody does."""
    try:
        return weakref.ref(thing, gone)
    except TypeError:  # it cannot be referred to weakly
        return lambda: thing


def holder_of(thing: object, attribute: str) -> object:
    """The object whose method this is: another one, where a wrapper hands on what it has not itself."""
    if attribute in getattr(thing, "__dict__", {}):
        return thing
    holder = getattr(getattr(thing, attribute, None), "__self__", None)
    return thing if holder is None or isinstance(holder, type) else holder
