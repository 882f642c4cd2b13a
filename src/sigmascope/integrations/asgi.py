"""ASGI middleware that times requests, counts their bytes and errors, and serves Prometheus metrics.

It is pure ASGI 3, so it serves Starlette, FastAPI, Litestar, Quart and bare applications alike; it imports none of
them. `Exchange` follows one request and its response, `route_of` finds the route that answered it, and `request_summary`
gives the remembered requests in a few figures. `sigmascope.reports.prometheus` counts.
"""

import inspect
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, Final

from sigmascope.analysis.run_figures import percentile
from sigmascope.errors import ConfigError
from sigmascope.history.keeper import keep
from sigmascope.integrations.autostart import say
from sigmascope.monitor.generation import SERVED, ServedRequest
from sigmascope.monitor.guard import Guard, whole_number
from sigmascope.monitor.publishing import PUBLISHER, counted_metrics
from sigmascope.probes.reading import describe, error_text, keeps_words
from sigmascope.records.performance import RequestRecord
from sigmascope.records.prompts import PromptPrivacy, privacy_of, without_texts
from sigmascope.records.run import Run
from sigmascope.reports.prometheus import CONTENT_TYPE

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""Ids of others that are taken as they come."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{0,40}")
_LONGEST_PATH: Final = 500
"""Letters of a request's path that its record keeps."""
_LONGEST_DRAIN_SECONDS: Final = 0.1
"""A server that is asked for metrics waits so long for another thread that is counting."""


class PerformanceMonitoringMiddleware:
    """Times requests, counts bytes and errors, and gives each request an id that its generations carry.

    Bodies and the application's exceptions pass unchanged, and so do websockets and lifespan events. A websocket's
    generations carry its id.

    Args:
        app: The application.
        header: The header that holds the id in request and response. A request's id is used if it has at most 128
            characters, all letters, digits or `._:-`; otherwise a new one is made.
        history: How many requests to remember.
        metrics_path: Path that serves Prometheus metrics, such as "/metrics"; None: no path. This needs the package
            prometheus-client. They hold the stages of all generations of the process, whoever watches them.
        on_request: Called with the `RequestRecord` of each finished request.
        prompts: Exceptions and paths may quote a prompt. So unless this is "full", the record of a request has no text of
            the application's exception, and instead of the path its route, or its first part. Runs are kept without what
            this does not allow.
        keep_runs: Whether the run of each generation of a `PerformanceMonitor` goes to the store of runs (`docs/history.md`).
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: `metrics_path` without prometheus-client or without its "/", an invalid header name, a history
            below 1, an unknown `prompts`, or an `on_request` that would have to be awaited.

    Examples:
        >>> async def app(scope, receive, send):
        ...     await send({"type": "http.response.start", "status": 204, "headers": []})
        ...     await send({"type": "http.response.body", "body": b""})
        >>> watched = PerformanceMonitoringMiddleware(app)
        >>> watched.get_summary()["total_requests"]
        0
    """

    def __init__(
        self,
        app: App,
        *,
        header: str = "x-request-id",
        history: int = 1000,
        metrics_path: str | None = None,
        on_request: Callable[[RequestRecord], None] | None = None,
        prompts: PromptPrivacy = "full",
        keep_runs: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.app = app
        self._prompts = prompts
        self._on_run = self._keep_run if keep_runs else None
        self._header = _header_name(header)
        if metrics_path is not None and not metrics_path.startswith("/"):
            raise ConfigError(f"metrics_path is {metrics_path!r}.", hint='Begin it with "/".')
        self._metrics_path = metrics_path
        self._metrics = counted_metrics() if metrics_path is not None else None
        if inspect.iscoroutinefunction(on_request):
            raise ConfigError(
                "on_request is a coroutine function, which nothing would await.",
                hint="Give a plain function; it may start a task.",
            )
        self._on_request = on_request
        self._clock = clock
        self._records: deque[RequestRecord] = deque(maxlen=whole_number("history", history, least=1))
        self._guard = Guard(keeps_words=privacy_of(prompts).keeps_words)
        self._lock = Lock()
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] == "http":
            if self._is_for_metrics(scope):
                await self._send_metrics(send)
            else:
                await self._watch(scope, receive, send)
        elif scope["type"] == "websocket":
            with _serving(self._served(scope)):
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @property
    def in_flight(self) -> int:
        """How many requests are being served now."""
        return self._in_flight

    def requests(self) -> list[RequestRecord]:
        """The last finished requests, oldest first."""
        with self._lock:
            return list(self._records)

    def get_summary(self) -> dict[str, Any]:
        """Counts, errors, bytes and percentiles of seconds over the remembered requests."""
        return request_summary(self.requests(), self.in_flight)

    def _served(self, scope: Scope) -> ServedRequest:
        mounted_at = str(scope.get("root_path", ""))
        since_ns = (
            time.perf_counter_ns() if scope["type"] == "http" else None
        )  # nobody waits on an open websocket
        return ServedRequest(
            request_id_of(scope, self._header),
            on_run=self._on_run,
            route=lambda: route_of(scope, mounted_at),
            waits_since_ns=since_ns,
        )

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._served(scope)
        with self._lock:
            self._in_flight += 1
            in_flight = self._in_flight
        exchange = Exchange(receive, send, (self._header, served.request_id), self._clock)
        started_at = datetime.now(UTC).isoformat()
        error: BaseException | None = None
        try:
            with _serving(served):
                await self.app(scope, exchange.receive, exchange.send)
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
            record = self._guard.read(
                "requests", lambda: exchange.record(scope, served, started_at, in_flight, error)
            )
            error = None  # a traceback that is kept would keep the request's locals alive
            if record is not None:
                self._keep(record)

    def _keep(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.append(record)
        metrics, on_request = self._metrics, self._on_request
        if metrics is not None:
            self._guard.call("request metrics", lambda: metrics.add_request(record))
        if on_request is not None:
            self._guard.call("request listener", lambda: on_request(record))

    def _keep_run(self, run: Run) -> None:
        keep(without_texts(run, self._prompts), "asgi", say)

    def _is_for_metrics(self, scope: Scope) -> bool:
        is_asked_for = scope.get("path") == self._metrics_path and scope.get("method", "GET") in (
            "GET",
            "HEAD",
        )
        return self._metrics is not None and is_asked_for

    async def _send_metrics(self, send: Send) -> None:
        assert self._metrics is not None
        PUBLISHER.drain(_LONGEST_DRAIN_SECONDS)
        status, kind = 200, CONTENT_TYPE
        try:
            body = self._metrics.text(self.in_flight, {"runs": PUBLISHER.dropped})
        except Exception as failure:  # noqa: BLE001 - who asks for metrics is told, and the server's log is the host's
            status, kind, body = 503, "text/plain; charset=utf-8", f"{describe(failure)}\n".encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _header_name(header: str) -> bytes:
    """As ASGI writes it."""
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", header):
        raise ConfigError(f"header is {header!r}.", hint="Give a header's name, such as x-request-id.")
    return header.lower().encode("ascii")


@contextmanager
def _serving(served: ServedRequest) -> Iterator[None]:
    """Let what runs in this context be for that request."""
    token = SERVED.set(served)
    try:
        yield
    finally:
        with suppress(ValueError):  # a server that shuts down may close its coroutines from another context
            SERVED.reset(token)


def request_id_of(scope: MutableMapping[str, Any], header: bytes) -> str:
    """The id that came in, if it is a harmless one; else a new one."""
    request_id = _header(scope.get("headers") or (), header)
    if request_id is not None and _ID.fullmatch(request_id):
        return request_id.decode("ascii")
    return uuid.uuid4().hex


def _header(headers: Iterable[Any], name: bytes) -> bytes | None:
    """Its value. Text, which ASGI does not allow but some servers accept, does not fail."""
    return next((_as_bytes(value) for key, value in headers if _as_bytes(key).lower() == name), None)


def _as_bytes(text: Any) -> bytes:
    return text.encode("latin-1", "replace") if isinstance(text, str) else bytes(text)


class Exchange:
    """`receive` and `send` that note what passes through them and hand it on unchanged, but for the id's header."""

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
        """What passed."""
        first = self._first_byte_ns
        ended_ns = self._clock() if self._completed_ns is None else self._completed_ns
        return RequestRecord(
            request_id=served.request_id,
            method=str(scope.get("method", "")),
            path=_path_of(scope),
            started_at=started_at,
            seconds=(ended_ns - self._started_ns) / 1e9,
            first_byte_seconds=None if first is None else (first - self._started_ns) / 1e9,
            status=self._status if self._status is not None else self._status_of(error),
            request_bytes=self._request_bytes,
            response_bytes=self._response_bytes,
            in_flight=in_flight,
            error=None if error is None else error_text(error),
            disconnected=self._disconnected,
            generations=tuple(served.generations),
            route=served.route(),
        )

    def _status_of(self, error: BaseException | None) -> int | None:
        """The status that the client gets for an exception before any answer: 500, by the server or framework."""
        return 500 if isinstance(error, Exception) and not self._disconnected else None

    def _with_id(self, headers: Iterable[Any]) -> list[Any]:
        """The response's headers, as they are, with the id; one that the application set itself stays."""
        name, value = self._header
        kept = list(headers)
        return kept if _header(kept, name) is not None else [*kept, (name, value.encode("ascii"))]


def route_of(scope: MutableMapping[str, Any], mounted_at: str = "") -> str | None:
    """The template of the route that a framework has found, such as "/api/draw/{prompt}"; None: it does not say.

    Starlette and FastAPI say it under "route", Litestar under "path_template". Where applications are mounted in others,
    the route begins with where, with the names of parameters too.

    Args:
        scope: Of the request, once the framework has looked at it.
        mounted_at: Where the application itself was mounted before that (`root_path`).
    """
    template = scope.get("path_template")
    if isinstance(template, str):
        return template
    route = scope.get("route")
    template = getattr(route, "path", None)
    if not isinstance(template, str):
        return None
    around = str(scope.get("root_path", "")).removeprefix(mounted_at)
    parameters = scope.get("path_params") or {}
    names = {str(value): f"{{{name}}}" for name, value in parameters.items()}
    prefix = "/".join(names.get(part, part) for part in around.split("/"))
    whole = prefix if hasattr(route, "routes") else prefix + template  # a mount is where it is mounted
    is_named = all(f"{{{name}" in whole for name in parameters)  # else a part of the path is left in it
    return whole if is_named and whole else template


def _path_of(scope: MutableMapping[str, Any]) -> str:
    """The path; where no words are kept, the route's with the names of its parameters, or its first part."""
    path = str(scope.get("path", ""))
    if not keeps_words():
        route = getattr(scope.get("route"), "path", None)
        first, _, rest = path[1:].partition("/")
        first = first if _PLAIN.fullmatch(first) else "…"
        path = route if isinstance(route, str) else f"{path[:1]}{first}{'/…' if rest else ''}"
    return path[:_LONGEST_PATH]


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


def request_summary(records: Sequence[RequestRecord], in_flight: int) -> dict[str, Any]:
    """Counts, errors, bytes and percentiles of seconds; None where there was no request."""
    seconds = [record.seconds for record in records]
    statuses = [record.status for record in records]
    return {
        "total_requests": len(records),
        "in_flight": in_flight,
        "errors": sum(record.failed for record in records),
        "disconnected": sum(record.disconnected for record in records),
        "status_counts": {
            str(status or "none"): statuses.count(status) for status in dict.fromkeys(statuses)
        },
        "request_bytes": sum(record.request_bytes for record in records),
        "response_bytes": sum(record.response_bytes for record in records),
        "generations": sum(len(record.generations) for record in records),
        "seconds": {
            "mean": fmean(seconds) if seconds else None,
            **{f"p{share}": percentile(seconds, share) if seconds else None for share in (50, 90, 99)},
        },
    }
