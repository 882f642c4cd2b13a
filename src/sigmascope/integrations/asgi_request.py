"""One request and its response, as they pass through the middleware."""

import os
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, Final

from sigmascope.monitor.guard import describe
from sigmascope.monitor.request import ServedRequest
from sigmascope.records.requests import RequestRecord

_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_LONGEST_PATH: Final = 500

Message = MutableMapping[str, Any]


def request_id_of(scope: MutableMapping[str, Any], header: bytes) -> str:
    """The id that came in, if it is a harmless one; else a new one.

    Args:
        scope: Of the connection.
        header: Its name in lower case.
    """
    found = _header(scope.get("headers") or (), header)
    if found is not None and _ID.fullmatch(found):
        return found.decode("ascii")
    return uuid.uuid4().hex


class Exchange:
    """`receive` and `send` that note what passes through them and hand it on unchanged, but for the id's header.

    Args:
        receive: The server's.
        send: The server's.
        header: Name and value of the id, for the response.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        header: tuple[bytes, str],
        clock: Callable[[], int],
    ) -> None:
        self._receive = receive
        self._send = send
        self._header = header
        self._clock = clock
        self._started_ns = clock()
        self._first_byte_ns: int | None = None
        self._status: int | None = None
        self._request_bytes = 0
        self._response_bytes = 0
        self._completed_ns: int | None = None
        self._disconnected = False

    async def receive(self) -> Message:
        """Hand on what the client sent."""
        message = await self._receive()
        kind = message.get("type")
        if kind == "http.request":
            self._request_bytes += len(message.get("body") or b"")
        elif kind == "http.disconnect" and self._completed_ns is None:
            self._disconnected = True
        return message

    async def send(self, message: Message) -> None:
        """Hand on what the application answers; a client that is gone shows by the server's OSError."""
        kind = message.get("type")
        if kind == "http.response.start":
            self._first_byte_ns = self._clock()
            self._status = message.get("status")
            message = {**message, "headers": self._with_id(message.get("headers") or ())}
        try:
            await self._send(message)
        except OSError:
            self._disconnected = True
            raise
        if kind == "http.response.body":
            self._response_bytes += len(message.get("body") or b"")
        elif kind == "http.response.pathsend":  # the server sends that file by itself
            self._response_bytes += _size_of(message.get("path"))
        elif kind == "http.response.zerocopysend":  # and that one: as much as it is told, or up to its end
            self._response_bytes += _sent_of(message)
        else:
            return
        if not message.get("more_body", False):
            self._completed_ns = self._clock()

    def record(
        self,
        scope: MutableMapping[str, Any],
        served: ServedRequest,
        started_at: str,
        in_flight: int,
        error: BaseException | None,
    ) -> RequestRecord:
        """What passed.

        Args:
            scope: Of the connection.
            served: With the id and the generations.
            started_at: ISO 8601.
            in_flight: Requests being served when this one began.
            error: What the application raised.
        """
        first = self._first_byte_ns
        ended_ns = self._clock() if self._completed_ns is None else self._completed_ns
        return RequestRecord(
            request_id=served.request_id,
            method=str(scope.get("method", "")),
            path=str(scope.get("path", ""))[:_LONGEST_PATH],
            started_at=started_at,
            seconds=(ended_ns - self._started_ns) / 1e9,
            first_byte_seconds=None if first is None else (first - self._started_ns) / 1e9,
            status=self._status,
            request_bytes=self._request_bytes,
            response_bytes=self._response_bytes,
            in_flight=in_flight,
            error=None if error is None else describe(error),
            disconnected=self._disconnected,
            generations=tuple(served.generations),
        )

    def _with_id(self, headers: Iterable[Any]) -> list[Any]:
        """The response's headers, as they are, with the id; one that the application set itself stays."""
        name, value = self._header
        kept = list(headers)
        return kept if _header(kept, name) is not None else [*kept, (name, value.encode("ascii"))]


def _size_of(path: object) -> int:
    try:
        return Path(str(path)).stat().st_size
    except (OSError, ValueError):
        return 0


def _sent_of(message: Message) -> int:
    """Of a part of an open file, as far as the message tells."""
    count, file = message.get("count"), message.get("file")
    if isinstance(count, int):
        return count
    try:
        size = os.fstat(file if isinstance(file, int) else file.fileno()).st_size  # type: ignore[union-attr]
        return max(0, size - (message.get("offset") or 0))
    except (AttributeError, OSError, TypeError, ValueError):
        return 0


def _header(headers: Iterable[Any], name: bytes) -> bytes | None:
    """Its value. Text, which ASGI has not and some servers take, is no reason to fail."""
    return next((_as_bytes(value) for key, value in headers if _as_bytes(key).lower() == name), None)


def _as_bytes(text: Any) -> bytes:
    return text.encode("latin-1", "replace") if isinstance(text, str) else bytes(text)
