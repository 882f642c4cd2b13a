"""Calls of methods and modules heard from outside, with hooks that are taken off without a trace.

Everything that a session puts on a pipeline is an `Instrument`: put on, taken off again, and switched off when it
fails. `listen` replaces a method while somebody listens, then puts it back as it was; whatever fails in a listener
is kept from the host. `hook_calls` hears a module through forward hooks, or around what torch.compile made of it.
`take_apart` gives what of a pipeline instruments are put on.
"""

import copy
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from sigmascope.integrations.import_hook import without_this_frame
from sigmascope.probes.models import components_of, unwrap
from sigmascope.probes.pipelines import pipeline_facts
from sigmascope.records.facts import PipelineFacts, Role

if TYPE_CHECKING:
    from sigmascope.integrations.diffusers.watch_session import Session

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
After: TypeAlias = Callable[[object, BaseException | None], None]
"""Called once with what a call returned, or with what it raised."""
Before = Callable[[object, Arguments, Keywords], After | None]
"""Called before a call of a method with its target and arguments; gives what is to be called after it."""
COMPILED = "_compiled_call_impl"
"""Where `module.compile()` puts what is called in place of the module, hooks and all."""
BeforeCall = Callable[[Arguments, Keywords], After | None]
"""The same for a module, whose target is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """Who hears the calls of a method.

    Attributes:
        before: Called with the object (or class) that is called on, and the call's arguments; gives what is to be
            called after it, or None.
        failed: Called with what `before` or its `After` raised, which goes no further.
        after: Called after each call, in place of `before`, by who needs to hear no more.
    """

    before: Callable[[object, Arguments, Keywords], After | None]
    failed: Callable[[Exception], None]
    after: After | None = None


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

    def known_things(self) -> int:
        """How many things it has put something on, those that are no more included."""
        return len(self._undo) + len(self._targets)

    def forget_gone(self) -> None:
        """Let go of what was put on things that are no more, whose `id` another thing may get."""
        for key, (thing, _) in list(self._undo.items()):
            if thing is not _no_thing and thing() is None:
                self.forget(key)
        forget_gone(self._targets)

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
            self._keep_or_undo(key, undo, owner)

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

    def _keep_or_undo(self, key: object, undo: Callable[[], None], thing: object) -> None:
        """Remember how to take off what is on already; if that fails, take it off now."""
        try:
            self.keep_undo(key, undo, thing)
        except BaseException:
            undo()
            raise

    def keep_undo(self, key: object, undo: Callable[[], None], thing: object = None) -> None:
        """Remember how to take something off.

        Args:
            key: Under which to find it.
            undo: What takes it off.
            thing: On which it is, where the key is made of its `id`: another may get that when this one is gone.
        """
        self.forget(key)
        self._undo[key] = (_no_thing if thing is None else reference_to(thing), undo)

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


def _definer(kind: type, attribute: str) -> type | None:
    """The class of its bases that defines the attribute."""
    definer = next((base for base in kind.__mro__ if attribute in vars(base)), None)
    return None if definer is object else definer


def _nothing(_target: object, _args: Arguments, _kwargs: Keywords) -> None:
    pass


def _no_thing() -> object:
    """Refers to nothing, where something is kept that is on no single thing."""
    return None


def forget_gone(references: dict[int, Callable[[], object]]) -> None:
    """Take out of a table by `id` the things that are no more."""
    for key, reference in list(references.items()):
        if reference() is None:
            references.pop(key, None)


def forget_others(table: dict[int, Any], known: Container[int]) -> None:
    """Take out of a table what is not known."""
    for key in list(table):
        if key not in known:
            table.pop(key, None)


def reference_to(thing: object) -> Callable[[], object]:
    """What gives the thing for as long as others keep it alive."""
    try:
        return weakref.ref(thing)
    except TypeError:  # it cannot be referred to weakly
        return lambda: thing


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
        undo = functools.partial(_forget, key, tap, listener)
        try:
            tap.put_on()
            tap.tell((*tap.listeners, listener))
        except BaseException:
            undo()
            raise
    return undo


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
        self._is_on = False
        self._before = vars(owner)[name]
        self._replacement = self._replaced(self._before, isinstance(owner, type))

    def tell(self, listeners: tuple[Listener, ...]) -> None:
        """Let these listen from now on, and no others."""
        self.only_after = listeners[0] if len(listeners) == 1 and listeners[0].after is not None else None
        self.listeners = listeners

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


def tell_after(afters: list[tuple[After, Listener]], result: object, error: BaseException | None) -> None:
    """Tell listeners of a call's end, the last first.

    Args:
        afters: What their `before` gave, and whose it is.
        result: What the call returned; None if it raised.
        error: What it raised.
    """
    for after, listener in reversed(afters):
        try:
            after(result, error)
        except Exception as failure:  # noqa: BLE001 - as above
            listener.failed(failure)


_TAPS: dict[tuple[int, str], Tap] = {}
_LOCK = threading.RLock()


def _forget(key: tuple[int, str], tap: Tap, listener: Listener) -> None:
    with _LOCK:
        tap.tell(tuple(one for one in tap.listeners if one is not listener))
        if not tap.listeners and _TAPS.get(key) is tap:
            del _TAPS[key]
            tap.take_off()


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # another thread may have held the old one when this process was forked off


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def call_heard(
    original: Callable[..., Any],
    listeners: tuple[Listener, ...],
    target: object,
    args: Arguments,
    kwargs: Keywords,
    seen: Arguments,
) -> Any:
    """What the original gives, with all listeners told.

    Args:
        original: The function.
        listeners: Any number.
        target: What they are told it is called on.
        args: Its arguments.
        kwargs: Those by name.
        seen: Those of `args` that the listeners are told.
    """
    afters = _tell_before(listeners, target, seen, kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException as error:
        without_this_frame(error)
        tell_after(afters, None, error)
        raise
    tell_after(afters, result, None)
    return result


def _tell_before(
    listeners: tuple[Listener, ...], target: object, args: Arguments, kwargs: Keywords
) -> list[tuple[After, Listener]]:
    afters = []
    for listener in listeners:
        try:
            after = listener.after or listener.before(target, args, kwargs)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            listener.failed(failure)
        else:
            if after is not None:
                afters.append((after, listener))
    return afters


def hook_calls(instrument: Instrument, module: object, before: BeforeCall, *, after: bool = True) -> None:
    """Let an instrument hear every call of a module; a second time changes nothing.

    A module that is compiled in place is heard around its compiled call, where hooks would never run.

    Args:
        instrument: Which keeps how to take the hooks off.
        module: A module; anything else is left alone.
        before: Called before a call with its arguments; gives what is to be called after it.
        after: False: nothing is to be called after it, which is cheaper. A hook is then put on as it is.
    """
    if not isinstance(module, nn.Module):
        return
    if getattr(module, COMPILED, None) is not None:
        instrument.forget(id(module))
        instrument.tap(module, COMPILED, lambda _, args, kwargs: before(args, kwargs))
    elif not instrument.has(id(module), module):
        instrument._keep_or_undo(id(module), _hooked(module, before, after, instrument.failed), module)


def _hooked(
    module: nn.Module, before: BeforeCall, after: bool, failed: Callable[[Exception], None]
) -> Callable[[], None]:
    if not after:
        alone = before if isinstance(before, ModuleHook) else ModuleHook(before, failed)
        return module.register_forward_pre_hook(alone, prepend=True, with_kwargs=True).remove
    pairs = _Pairs(before)
    first = module.register_forward_pre_hook(ModuleHook(pairs.enter, failed), prepend=True, with_kwargs=True)
    try:
        last = module.register_forward_hook(ModuleHook(pairs.leave, failed), always_call=True)
    except BaseException:
        first.remove()
        raise

    def undo() -> None:
        with suppress(Exception):
            first.remove()
        last.remove()

    return undo


class _Pairs:
    """Brings what is to be called after a call from its first hook to its last, in each thread by itself."""

    def __init__(self, before: BeforeCall) -> None:
        self._before = before
        self._threads = threading.local()

    def enter(self, args: Arguments, kwargs: Keywords) -> None:
        threads = self._threads
        if not hasattr(threads, "afters"):
            threads.afters = []
        threads.afters.append(None)
        threads.afters[-1] = self._before(args, kwargs)

    def leave(self, _args: object, result: object) -> None:
        afters = getattr(self._threads, "afters", None)
        after = afters.pop() if afters else None
        if after is not None:
            after(result, sys.exception() if result is None else None)


class ModuleHook:
    """A forward hook of either kind.

    A copy or pickle of the hooked module gets one of the standard library's in its place, which does nothing, so that
    it can be loaded where there is no Sigmascope.

    Args:
        act: What to do with what the hook is given after the module; it may raise.
        failed: Told of what it raised.
    """

    __slots__ = ("act", "failed")

    def __init__(self, act: Callable[..., object], failed: Callable[[Exception], None]) -> None:
        self.act = act
        self.failed = failed

    def __call__(self, _module: object, *seen: Any) -> None:
        """Act on a call, unless it is being traced."""
        if is_compiling():
            return
        try:
            self.act(*seen)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            self.failed(failure)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


@dataclass(frozen=True, slots=True)
class Parts:
    """A pipeline taken apart, for as long as instruments are put on it.

    Attributes:
        pipeline: Itself.
        components: By name; those that are there.
        facts: Of them all.
    """

    pipeline: object
    components: Mapping[str, object]
    facts: PipelineFacts = field(default_factory=lambda: PipelineFacts("unknown"))

    def of_role(self, role: Role) -> Iterator[tuple[str, object]]:
        """The components that do this, with their names."""
        for name in self.facts.of_role(role):
            if name in self.components:
                yield name, self.components[name]


def take_apart(pipeline: object, known: PipelineFacts | None = None) -> Parts:
    """The parts of a pipeline, or of a denoiser alone.

    Args:
        pipeline: What has `components`, or a module.
        known: Its facts, if they were read before.
    """
    components = {name: part for name, part in components_of(pipeline).items() if part is not None}
    if not components and isinstance(pipeline, nn.Module):
        components = {"denoiser": pipeline}
    return Parts(pipeline, components, known or pipeline_facts(pipeline))


def pipelines_in(pipeline: object) -> list[object]:
    """Pipelines that a pipeline is made of, such as a prior's and a decoder's."""
    held = getattr(pipeline, "__dict__", {}).values()
    return [one for one in held if callable(one) and callable(getattr(type(one), "register_modules", None))]


def set_up_of(pipeline: object) -> tuple[object, ...]:
    """What tells cheaply that a pipeline's facts are no longer those that were read."""
    return tuple((name, id(part), *_state(part)) for name, part in components_of(pipeline).items())


def _state(part: object) -> tuple[object, ...]:
    module = unwrap(part) if isinstance(part, nn.Module) else None
    if module is None:
        return (type(part).__name__,)
    first = next(module.parameters(), None)
    return (
        None if first is None else (first.dtype, first.device),
        type(getattr(module, "_hf_hook", None)).__name__,
        getattr(module, "_diffusers_hook", None) is None,
        getattr(module, "_compiled_call_impl", None) is None,
        bool(getattr(module, "peft_config", None)),
    )


def holder_of(thing: object, attribute: str) -> object:
    """The object whose method this is: another one, where a wrapper hands on what it has not itself."""
    if attribute in getattr(thing, "__dict__", {}):
        return thing
    holder = getattr(getattr(thing, attribute, None), "__self__", None)
    return thing if holder is None or isinstance(holder, type) else holder
