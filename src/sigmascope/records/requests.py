"""One request that a server answered, and the generations made for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one HTTP request took. No query, header or body is kept.

    Attributes:
        request_id: Of the incoming header, or made.
        method: Such as "POST".
        path: Without the query.
        started_at: ISO 8601 in UTC.
        seconds: From the first line to the end of the response.
        first_byte_seconds: Until the response began; None: it never did.
        status: Of the response; None: the application sent none.
        request_bytes: Of the body, as far as the application read it.
        response_bytes: Of the body, before the server compresses or frames it.
        in_flight: How many requests were being served when this one began, itself included.
        error: What the application raised.
        disconnected: Whether the client went away before the response was complete.
        generations: The metrics of each generation made while it was served, with `run_id`.
    """

    request_id: str
    method: str
    path: str
    started_at: str
    seconds: float
    first_byte_seconds: float | None
    status: int | None
    request_bytes: int
    response_bytes: int
    in_flight: int
    error: str | None = None
    disconnected: bool = False
    generations: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    @property
    def failed(self) -> bool:
        """Whether the application raised, answered with a status of 500 or above, or with nothing."""
        return self.error is not None or self.status is None or self.status >= 500

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"generations": [dict(one) for one in self.generations]}
