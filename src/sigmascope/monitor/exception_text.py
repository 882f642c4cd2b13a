"""An exception as text."""

import traceback

from sigmascope.records.facts import ExceptionDetails


def details(error: BaseException) -> ExceptionDetails:
    """Return an exception as text, its causes included; nothing of it stays alive."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ExceptionDetails(name, str(error), "".join(traceback.format_exception(error)))
