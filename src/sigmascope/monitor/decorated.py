"""A function with something open around each call, of the same kind: function, generator, coroutine function."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Any


def decorated(
    function: Callable[..., Any], around: Callable[[], AbstractContextManager[object]]
) -> Callable[..., Any]:
    """A function that does what another does, with a context around each call, or around each generator's life.

    Args:
        function: Of any kind; programs that ask for the kind are told the same of what is returned.
        around: Makes the context.
    """
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def streamed(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with around():
                inner = function(*args, **kwargs)
                try:
                    given = await anext(inner)
                    while True:
                        try:
                            sent = yield given
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 - thrown in for the function to handle
                            given = await inner.athrow(error)
                        else:
                            given = await inner.asend(sent)
                except StopAsyncIteration:
                    return
                finally:
                    await inner.aclose()

        return streamed
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:  # a generator
            with around():
                return (yield from function(*args, **kwargs))

        return generated
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with around():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return called
