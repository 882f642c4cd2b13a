"""The server around the page: a port of its own, an end that is prompt, and an address that is told when it answers."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final

import uvicorn

from sigmascope.errors import ConfigError
from sigmascope.lbm.serving.app import make_app
from sigmascope.lbm.serving.guard import is_loopback
from sigmascope.lbm.serving.jobs import JobLine
from sigmascope.lbm.serving.limits import Limits
from sigmascope.lbm.serving.models import ServedModel

ANYWHERE: Final = ("0.0.0.0", "::")
STOPPED_BY_USER: Final = 130
PATIENCE_SECONDS: Final = 3.0
"""How long the end waits for a step of the model."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is. `host` is as the user gave it, `port` the one that was really taken."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    @property
    def is_loopback(self) -> bool:
        """Whether other machines cannot reach it."""
        return is_loopback(self.host)


def bind(host: str, port: int) -> socket.socket:
    """Take the port, before a model is loaded for nothing.

    Args:
        host: Name or address of an interface of this machine.
        port: 0 takes any that is free.

    Raises:
        ConfigError: The port is taken or out of range, or the host is none of this machine.
    """
    if not 0 <= port < 65536:
        raise ConfigError(
            f"--port: expected 0 to 65535, got {port}.", hint="Use 7860, or 0 for any free one."
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
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
        return ConfigError(f"--port: {port} is not yours to take.", hint="Choose one above 1023.")
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"--host: cannot bind to {host} ({reason}).", hint="Use 127.0.0.1.")


def serve(
    served: ServedModel,
    listening: socket.socket,
    host: str,
    on_ready: Callable[[Address], object],
    limits: Limits | None = None,
) -> None:
    """Serve until Ctrl-C, SIGTERM, or the end of the process.

    Args:
        served: Model and LoRA.
        listening: From `bind`; closed in the end.
        host: As given to `bind`.
        on_ready: Told the address once requests are answered.
        limits: Of requests.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    lines: list[JobLine] = []
    app = make_app(served, limits, host=host, on_line=lines.append)
    address = Address(host, listening.getsockname()[1])
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    try:
        _Server(config, lines[0], lambda: on_ready(address)).run(sockets=[listening])
    finally:
        listening.close()
        _leave(lines[0])


class _Server(uvicorn.Server):
    """uvicorn's server that says when it is ready, and ends the line of jobs with the first signal.

    Waiting requests are answered then: otherwise the server would wait for them, and they for the model.
    """

    def __init__(self, config: uvicorn.Config, line: JobLine, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._line = line
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._line.stop)


def _leave(line: JobLine) -> None:
    """Give the model a moment to come to the end of its step, then leave without it.

    A step of a large model may take minutes, and Python waits for its threads. Nothing is lost: what the
    thread makes is nowhere but in memory.
    """
    ends = time.monotonic() + PATIENCE_SECONDS
    while line.busy:
        if time.monotonic() > ends:
            os._exit(STOPPED_BY_USER)
        time.sleep(0.02)
