"""The request that a generation is made for: known to whatever runs in the context of its handling."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ServedRequest:
    """A request while it is served.

    Attributes:
        request_id: What generations are marked with.
        generations: The metrics of those that are over.
    """

    request_id: str
    generations: list[dict[str, Any]] = field(default_factory=list)


SERVED: ContextVar[ServedRequest | None] = ContextVar("sigmascope_request", default=None)
"""The request of this thread or task. A task starts with its creator's, and so does a server's worker thread."""


def current_request_id() -> str | None:
    """The id of the request that this context serves; None outside of all requests."""
    served = SERVED.get()
    return None if served is None else served.request_id
