import os
import socket
import threading
import time
from functools import partial
from typing import Any

import pytest
import uvicorn
from tests.ui.conftest import make_app

from sigmascope.errors import ConfigError
from sigmascope.ui import server as app
from sigmascope.ui.app import Part
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.security import Limits
from sigmascope.ui.server import Address, bind


def test_a_port_is_taken_at_once_and_any_free_one_for_0() -> None:
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert port > 0
        with pytest.raises(ConfigError, match=f"--port: {port} is taken on 127.0.0.1") as caught:
            bind("127.0.0.1", port)
        assert caught.value.exit_code == 2
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 65536, "--port: expected 0 to 65535, got 65536"),
        ("127.0.0.1", -1, "--port: expected 0 to 65535"),
        ("192.0.2.1", 0, "--host: cannot bind to 192.0.2.1"),  # reserved for documentation: nobody's
        ("a" * 64, 0, "--host: cannot bind to"),
    ],
)
def test_an_address_that_cannot_be_had_is_named(host: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind(host, port)


def test_a_port_that_only_the_system_may_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ConfigError, match="--port: you may not use 80"):
        bind("127.0.0.1", 80)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("localhost", "http://localhost:80/"),
        ("::1", "http://[::1]:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
        ("192.168.1.7", "http://192.168.1.7:80/"),
    ],
)
def test_addresses_are_told_for_a_browser(host: str, url: str) -> None:
    assert Address(host, 80).url == url
    assert Address(host, 80, "abc").url == f"{url}?token=abc"


def test_the_end_does_not_wait_for_a_step_of_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, left, cleaned = [True], list[int](), list[bool]()

    def leave(code: int) -> None:
        left.append(code)
        busy.clear()  # where the process would be gone

    part = Part("LBM", "lbm", (), is_busy=lambda: bool(busy), clean=lambda: cleaned.append(True))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(app, "STOP_WAIT_SECONDS", 0.0)
    app._leave([part])
    assert (left, cleaned) == ([130], [True])


def test_the_end_of_an_idle_server_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(time, "sleep", slept.append)
    app._leave([Part("LBM", "lbm", ())])
    assert (left, slept) == ([], [])


@pytest.mark.slow
def test_a_connection_whose_headers_do_not_end_is_closed(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "HEADER_SECONDS", 0.3)
    http: Any = partial(app._Connection, Limits())
    config = uvicorn.Config(make_app(served), http=http, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with socket.create_connection(address, timeout=20) as half:
                half.sendall(b"GET / HTTP/1.1\r\nHost: loc")
                assert half.recv(100) == b""  # closed, and not by a reset
            with socket.create_connection(address, timeout=20) as second:
                second.sendall(b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert second.recv(12) == b"HTTP/1.1 200"
                while b"}" not in second.recv(65536):
                    pass
                second.sendall(b"GET /")
                while second.recv(65536):
                    pass
        finally:
            server.should_exit = True
            thread.join()
