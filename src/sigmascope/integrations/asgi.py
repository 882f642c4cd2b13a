"""`PerformanceMonitoringMiddleware`: what requests to a server took, and which generations they were for (SPEC section 6).

Pure ASGI 3, so for Starlette, FastAPI, Litestar, Quart and bare applications alike; it imports none of them.
"""

import inspect
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from sigmascope.errors import ConfigError
from sigmascope.integrations.asgi_metrics import METRICS_TYPE, RequestMetrics
from sigmascope.integrations.asgi_request import Exchange, request_id_of
from sigmascope.integrations.request_summary import request_summary
from sigmascope.monitor.generation_plan import whole_number
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.request import SERVED, ServedRequest
from sigmascope.records.requests import RequestRecord

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class PerformanceMonitoringMiddleware:
    """Times requests, counts bytes and errors, and gives each request an id that its generations carry.

    Bodies stream through untouched; what the application raises passes unchanged. Websockets and lifespan events are
    handed on as they are, a websocket's generations with its id.

    Args:
        app: The application.
        header: Where the id comes in and goes out. An id that comes in is taken if it is at most 128 letters, digits and
            `._:-`; else one is made.
        history: How many requests to remember.
        metrics_path: Answer GET here with Prometheus metrics, such as "/metrics"; None: nowhere. It takes the package
            prometheus-client.
        on_request: Called with the `RequestRecord` of each request that is over.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: `metrics_path` without prometheus-client or without its "/", a header that can be none, a history
            below 1, or an `on_request` that would have to be awaited.

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
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.app = app
        self._header = _header_name(header)
        if metrics_path is not None and not metrics_path.startswith("/"):
            raise ConfigError(f"metrics_path is {metrics_path!r}.", hint='Begin it with "/".')
        self._metrics_path = metrics_path
        self._metrics = RequestMetrics() if metrics_path is not None else None
        if inspect.iscoroutinefunction(on_request):
            raise ConfigError(
                "on_request is a coroutine function, and nobody waits for it.",
                hint="Give a plain function; it may start a task.",
            )
        self._on_request = on_request
        self._clock = clock
        self._records: deque[RequestRecord] = deque(maxlen=whole_number("history", history, least=1))
        self._guard = Guard()
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
            with _serving(ServedRequest(request_id_of(scope, self._header))):
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @property
    def in_flight(self) -> int:
        """How many requests are being served now."""
        return self._in_flight

    def requests(self) -> list[RequestRecord]:
        """The last requests that are over, oldest first."""
        with self._lock:
            return list(self._records)

    def get_summary(self) -> dict[str, Any]:
        """Counts, errors, bytes and percentiles of seconds over the requests that are remembered."""
        return request_summary(self.requests(), self.in_flight)

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = ServedRequest(request_id_of(scope, self._header))
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
            )[0]
            error = None  # a traceback that is kept would keep the request's locals alive
            if record is not None:
                self._keep(record)

    def _keep(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.append(record)
        metrics, on_request = self._metrics, self._on_request
        if metrics is not None:
            self._guard.call("request metrics", lambda: metrics.add(record))
        if on_request is not None:
            self._guard.call("request listener", lambda: on_request(record))

    def _is_for_metrics(self, scope: Scope) -> bool:
        asked = scope.get("path") == self._metrics_path and scope.get("method", "GET") in ("GET", "HEAD")
        return self._metrics is not None and asked

    async def _send_metrics(self, send: Send) -> None:
        assert self._metrics is not None
        body = self._metrics.text(self.in_flight)
        headers = [(b"content-type", METRICS_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
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
