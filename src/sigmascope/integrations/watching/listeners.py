"""Who hears the calls of a method, and how: before and after, with whatever fails kept from the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from sigmascope.integrations.watching.frames import without_this_frame

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
        after: Called after each call, in place of `before`, by who needs to hear no more.
    """

    before: Callable[[object, Arguments, Keywords], After | None]
    failed: Callable[[Exception], None]
    after: After | None = None


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
    afters = _before(listeners, target, seen, kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException as error:
        without_this_frame(error)
        tell_after(afters, None, error)
        raise
    tell_after(afters, result, None)
    return result


def _before(
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
