"""The server: it takes a port, tells its address once it answers, and ends promptly."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sigmascope.errors import STOPPED_BY_USER, ConfigError
from sigmascope.ui.app import Part, make_app
from sigmascope.ui.security import Limits, is_loopback, new_token

LAST_SECONDS: Final = 1.5
"""How long answers that are being sent may go on after the end; uvicorn itself waits for 2 seconds."""
STOP_WAIT_SECONDS: Final = 3.0
"""How long the end waits for what a thread does."""
HEADER_SECONDS: Final = 20.0
"""How long a request's headers may take."""
SEND_BUFFER_BYTES: Final = 128 * 1024
"""What the system keeps of an answer. Left to itself it keeps megabytes, and a slow peer seems to take nothing."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is.

    Attributes:
        host: As the user gave it.
        port: The one that was really taken.
        token: That every request must have; None where other machines cannot reach the page.
    """

    host: str
    port: int
    token: str | None = None

    @property
    def url(self) -> str:
        """For a browser on this machine, with the token."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        at = f"[{host}]" if ":" in host else host
        return f"http://{at}:{self.port}/" + ("" if self.token is None else f"?token={self.token}")


def serve(
    parts: Sequence[Part],
    listening: socket.socket,
    host: str,
    on_ready: Callable[[Address], object],
    limits: Limits | None = None,
) -> None:
    """Serve until Ctrl-C, SIGTERM, or the end of the process.

    Args:
        parts: What there is to see; the first is shown first.
        listening: From `bind`; closed in the end.
        host: As given to `bind`. If other machines reach it, requests need a token.
        on_ready: Told the address and the token once requests are answered.
        limits: How much may be asked for.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    limits = limits or Limits()
    token = None if is_loopback(host) else new_token()
    app = make_app(parts, host=host, token=token)
    address = Address(host, listening.getsockname()[1], token)
    config = uvicorn.Config(
        app,
        http=cast("type[H11Protocol]", partial(_Connection, limits)),
        limit_concurrency=limits.connections,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    try:
        _Server(config, parts, lambda: on_ready(address)).run(sockets=[listening])
    finally:
        listening.close()
        _leave(parts)


class _Connection(H11Protocol):
    """uvicorn's connection that closes when a request's headers do not end, or the peer takes no more of an answer.

    uvicorn's own end of a connection waits until the peer has taken all, however long that is. Where as many are open
    as may be, a new one takes the place of the one that has asked for nothing the longest.
    """

    def __init__(self, limits: Limits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._patience: asyncio.TimerHandle | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._left_bytes, self._taken_at = 0, 0.0
        self._idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, and nothing of an answer is left to send."""
        cycle: RequestResponseCycle | None = self.cycle
        has_asked = cycle is not None and not cycle.response_complete
        return not has_asked and self.transport.get_write_buffer_size() == 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._make_room()
        if len(self.connections) > 2 * self._limits.connections:  # those that ask are told, up to here
            transport.abort()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._wait()
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:  # a part of a request does not make it younger
            self._idle_since = self.loop.time()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._look_again is not None:
            self._look_again.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._taken_at = self.loop.time()
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        # What is still being sent then, uvicorn would cancel, with a traceback for each.
        self.loop.call_later(LAST_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        """Drop idle connections while there are as many as uvicorn refuses requests at."""
        others = cast("set[_Connection]", self.connections - {self})
        idle = sorted((peer for peer in others if peer.is_idle), key=lambda peer: peer._idle_since)
        for peer in idle[: max(0, len(self.connections) - self._limits.connections + 1)]:
            peer.transport.abort()
            self.connections.discard(peer)

    def _look(self) -> None:
        left_bytes, now = self.transport.get_write_buffer_size(), self.loop.time()
        if not left_bytes or left_bytes != self._left_bytes:
            self._left_bytes, self._taken_at = left_bytes, now
        elif now - self._taken_at >= self._limits.silent_seconds:
            self.transport.abort()
            return
        self._look_again = self.loop.call_later(self._limits.silent_seconds / 4, self._look)

    def _wait(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    """uvicorn's server that says when it is ready, and tells all parts of the first signal.

    Waiting requests are answered then: otherwise the server would wait for them, and they for a model.
    """

    def __init__(self, config: uvicorn.Config, parts: Sequence[Part], on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._parts = parts
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            for part in self._parts:
                self._loop.call_soon_threadsafe(part.stop)


def _leave(parts: Sequence[Part]) -> None:
    """Give what works in threads a moment to come to its end, then leave without it.

    A step of a large model may take minutes, and Python waits for its threads. Nothing is lost: what the
    thread makes is nowhere but in memory.
    """
    ends = time.monotonic() + STOP_WAIT_SECONDS
    while any(part.is_busy() for part in parts):
        if time.monotonic() > ends:
            for part in parts:
                part.clean()
            os._exit(STOPPED_BY_USER)
        time.sleep(0.02)


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a port in use is an error at once.

    Args:
        host: Name or address of an interface of this machine.
        port: 0 takes any that is free.

    Raises:
        ConfigError: The port is taken or out of range, or the host is not one of this machine's.
    """
    if not 0 <= port < 65536:
        raise ConfigError(
            f"--port: expected 0 to 65535, got {port}.", hint="Use 7860, or 0 for any free one."
        )
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = addresses[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        raise _cannot_bind(host, port, error) from error


def _cannot_bind(host: str, port: int, error: Exception) -> ConfigError:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return ConfigError(
            f"--port: {port} is taken on {host}.", hint="Choose another, or 0 for any that is free."
        )
    if code == errno.EACCES:
        return ConfigError(f"--port: you may not use {port}.", hint="Choose one above 1023.")
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"--host: cannot bind to {host} ({reason}).", hint="Use 127.0.0.1.")
