"""Who hears the calls of a method, and how: before and after, with whatever fails kept from the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
After: TypeAlias = Callable[[object, BaseException | None], None]
"""Called once with what a call returned, or with what it raised."""


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """Who hears the calls of a method.

    Attributes:
        before: Called with the object (or class) that is called on, and the call's arguments; gives what is to be
            called after it, or None.
        failed: Called with what `before` or its `After` raised, which goes no further.
    """

    before: Callable[[object, Arguments, Keywords], After | None]
    failed: Callable[[Exception], None]


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
        listeners: Some.
        target: What they are told it is called on.
        args: Its arguments.
        kwargs: Those by name.
        seen: Those of `args` that the listeners are told.
    """
    if len(listeners) == 1:
        return _call_heard_by_one(original, listeners[0], target, args, kwargs, seen)
    afters = _before(listeners, target, seen, kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException as error:
        _after(afters, None, error)
        raise
    _after(afters, result, None)
    return result


def _call_heard_by_one(
    original: Callable[..., Any],
    listener: Listener,
    target: object,
    args: Arguments,
    kwargs: Keywords,
    seen: Arguments,
) -> Any:
    """The same for the usual case, which the scheduler's step is: the hot path."""
    after = None
    try:
        after = listener.before(target, seen, kwargs)
    except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
        listener.failed(failure)
    if after is None:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException as error:
        _after([(after, listener)], None, error)
        raise
    try:
        after(result, None)
    except Exception as failure:  # noqa: BLE001 - as above
        listener.failed(failure)
    return result


def _before(
    listeners: tuple[Listener, ...], target: object, args: Arguments, kwargs: Keywords
) -> list[tuple[After, Listener]]:
    afters = []
    for listener in listeners:
        try:
            after = listener.before(target, args, kwargs)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            listener.failed(failure)
        else:
            if after is not None:
                afters.append((after, listener))
    return afters


def _after(afters: list[tuple[After, Listener]], result: object, error: BaseException | None) -> None:
    for after, listener in reversed(afters):
        try:
            after(result, error)
        except Exception as failure:  # noqa: BLE001 - as above
            listener.failed(failure)
