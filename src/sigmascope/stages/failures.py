"""What the watched code raised, as plain text."""

import traceback
from collections.abc import Callable

Redact = Callable[[str], str]


def error_text(error: BaseException | str, redact: Redact) -> str:
    """`Type: message`, or the text as it is, without the prompts that `redact` takes out."""
    if isinstance(error, str):
        return redact(error)
    message = _message(error)
    return redact(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def exception_dict(error: BaseException, redact: Redact) -> dict[str, str]:
    """`exception_details` of SPEC section 2: type, message and stack trace. Nothing of it stays alive."""
    return {
        "type": type(error).__qualname__,
        "message": redact(_message(error)),
        "traceback": redact("".join(traceback.format_exception(error))),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - any class may have written that __str__
        return "(its message cannot be read)"
