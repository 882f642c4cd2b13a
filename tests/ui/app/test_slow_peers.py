"""The server from outside, in a process of its own, by raw sockets: peers that take nothing, and those without a token."""

import http.client
import io
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

pytestmark = pytest.mark.slow
NONE: Mapping[str, str] = {}

SERVERS = """
import json, os, sys
from sigmascope.lbm.config import load_config
from sigmascope.lbm.model import build_lbm
from sigmascope.lbm.pocket import CONFIG_PATH
from sigmascope.ui.lbm_page import lbm_part
from sigmascope.ui.server import bind, serve
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.security import Limits

served = ServedModel(build_lbm(load_config(CONFIG_PATH), device="meta"), base_name="tiny", resolution=128)
for line in sys.stdin:
    host, limits = json.loads(line)
    if os.fork() == 0:  # importing takes seconds
        ready = lambda at: print(json.dumps([os.getpid(), at.port, at.token]), flush=True)
        limits = Limits(**limits)
        serve([lbm_part(served, limits)], bind(host, 0), host, ready, limits)
"""


class Server:
    def __init__(self, pid: int, port: int, token: str) -> None:
        self.process, self.port, self.token = psutil.Process(pid), port, token

    @property
    def rss_mib(self) -> float:
        return float(self.process.memory_info().rss / 2**20)

    @property
    def connections(self) -> int:
        return sum(each.status != psutil.CONN_LISTEN for each in self.process.net_connections("tcp"))

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NONE
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def never_read(self, path: str, buffer_bytes: int = 4096) -> socket.socket:
        """A connection that asks and takes nothing but what its system does."""
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        peer.settimeout(60)
        peer.connect(("127.0.0.1", self.port))
        peer.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return peer


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def servers() -> Iterator[subprocess.Popen[str]]:
    """A process that starts one for each line that it reads."""
    command = [sys.executable, "-c", SERVERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def start(servers: subprocess.Popen[str]) -> Iterator[Start]:
    started: list[Server] = []

    def begin(host: str = "127.0.0.1", **limits: Any) -> Server:
        assert servers.stdin is not None
        assert servers.stdout is not None
        print(json.dumps([host, limits]), file=servers.stdin, flush=True)
        started.append(Server(*json.loads(servers.stdout.readline())))
        return started[-1]

    yield begin
    for server in started:
        server.process.kill()


def until(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    ends = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends:
        time.sleep(0.05)
    return holds()


def noise(width: int, height: int) -> bytes:
    """A picture that PNG makes no smaller."""
    written = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(written, "BMP")
    return written.getvalue()


def add(server: Server, picture: bytes) -> str:
    status, _, answer = server.ask("POST", "/api/pictures", picture)
    assert status == 201
    return f"/api/pictures/{json.loads(answer)['id']}.png"


def test_24_peers_that_take_nothing_cost_no_memory_and_are_dropped(start: Start) -> None:
    server = start(silent_seconds=2.0)
    path = add(server, noise(4000, 2000))  # 24 MB
    whole = server.ask("GET", path)[2]
    before = server.rss_mib
    with ExitStack() as peers:
        asked = time.monotonic()
        for _ in range(24):
            peers.enter_context(server.never_read(path))
        assert until(lambda: server.connections == 24, 2)
        assert server.ask("GET", path) == (
            200,
            server.ask("HEAD", path)[1],
            whole,
        )  # others are served meanwhile
        assert server.rss_mib - before < 60  # 24 × 24 MB are 576
        assert until(lambda: server.connections == 0)
        assert time.monotonic() - asked > 2.0


def test_a_peer_that_takes_little_at_a_time_gets_all(start: Start) -> None:
    server = start(silent_seconds=1.0)
    path = add(
        server, noise(1000, 1000)
    )  # 3 MB: left to itself, the system keeps most of it for a connection
    whole, got = server.ask("GET", path)[2], b""
    began = time.monotonic()
    with server.never_read(path, buffer_bytes=16384) as peer:
        while len(got) < len(whole):
            piece = peer.recv(65536)
            assert piece, f"dropped after {len(got)} bytes"
            got += piece
            time.sleep(0.02)
    assert got.endswith(whole[-1000:])
    assert time.monotonic() - began > 2.0


def test_answers_that_wait_in_a_closed_connection_are_dropped_too(start: Start) -> None:
    server = start(silent_seconds=1.0)
    with server.never_read("/static/style.css") as peer:
        request = b"GET /static/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        peer.settimeout(2)
        with pytest.raises((TimeoutError, ConnectionError)):
            peer.sendall(request * 10**6)
        assert until(lambda: server.connections == 0, 10)


def test_no_more_is_sent_at_once_than_there_is_room_for(start: Start) -> None:
    server = start(sending_bytes=8_000_000, kept_pictures_bytes=1)
    with ExitStack() as peers:
        for height in (1000, 1001):  # 3 MB each; forgotten with the next, but still being sent
            peers.enter_context(server.never_read(path := add(server, noise(1000, height))))
            assert until(lambda: server.connections > 0)
        assert server.ask("GET", path)[0] == 200  # the same bytes again
        status, headers, answer = server.ask("GET", add(server, noise(1000, 1002)))
        assert (status, headers["retry-after"]) == (503, "5")
        assert json.loads(answer)["error"]["hint"] == "Try again in a while."
    path = add(server, noise(1000, 1003))
    assert until(lambda: server.ask("GET", path)[0] == 200)  # the others have gone


def test_uploads_that_never_end_hold_no_more_than_there_is_room_for(start: Start) -> None:
    server = start(receiving_bytes=100_000_000, silent_seconds=5.0)
    before = server.rss_mib
    with ExitStack() as peers:
        for _ in range(16):
            peer = peers.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            peer.sendall(
                b"POST /api/pictures HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 40000000\r\n\r\n"
            )
            try:
                peer.sendall(bytes(39_000_000))
            except OSError:
                continue  # refused
        assert server.rss_mib - before < 200  # 16 × 39 MB are 624
        assert server.ask("POST", "/api/pictures", bytes(30_000_000))[0] == 503


def test_connections_are_bounded(start: Start) -> None:
    server = start(connections=4)
    path = add(server, noise(1500, 1000))
    with ExitStack() as peers:
        for _ in range(3):
            assert peers.enter_context(server.never_read(path)).recv(4) == b"HTTP"
        assert server.ask("GET", "/api/about")[0] == 503
        idle = [
            peers.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            for _ in range(8)
        ]
        assert until(lambda: server.connections <= 8)
        assert idle[0].recv(1) == b""
    assert until(lambda: server.ask("GET", "/api/about")[0] == 200)


def test_idle_connections_lock_nobody_out(start: Start) -> None:
    """Those that ask for nothing, or send a request without an end, make room for those that ask; the oldest first."""
    server = start()
    with ExitStack() as peers:
        idle = [
            peers.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            for _ in range(300)
        ]
        for peer in idle[-20:]:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: ")
        begin = time.monotonic()
        assert [server.ask("GET", "/api/about")[0] for _ in range(40)] == [200] * 40
        assert time.monotonic() - begin < 5
        assert idle[0].recv(1) == b""
        idle[-1].sendall(b"127.0.0.1\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 200"


ADDRESSES = [
    ("GET", "/"),
    ("GET", "/?token=wrong"),
    ("GET", "/static/main.js"),
    ("GET", "/api/about"),
    ("POST", "/api/pictures"),
    ("POST", "/api/scenes/1"),
    ("GET", "/api/pictures/a.png"),
    ("POST", "/api/jobs"),
    ("GET", "/api/jobs/a"),
    ("GET", "/api/results/a/picture.png"),
    ("GET", "/api/results/a/run.json"),
    ("GET", "/nothing"),
]


def test_every_address_beyond_loopback_needs_the_token(start: Start) -> None:
    server = start("0.0.0.0")
    for method, path in ADDRESSES:
        status, headers, body = server.ask(method, path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
        assert server.token not in body.decode()
        for sent, is_right in ((server.token, True), (server.token[:-1], False), ("", False)):
            answer = server.ask(method, path, headers={"Authorization": f"Bearer {sent}"})
            assert (answer[0] != 401) is is_right
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert (
        server.ask("GET", "/", headers={**upgrade, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})[0] == 401
    )


def test_the_link_leads_to_the_page_and_a_cookie_keeps_the_token(start: Start) -> None:
    server = start("0.0.0.0")
    status, headers, _ = server.ask("GET", f"/?token={server.token}")
    assert (status, headers["location"]) == (303, ".")
    cookie, *rest = headers["set-cookie"].split("; ")
    assert cookie == f"sigmascope-{server.port}={server.token}"
    assert {"HttpOnly", "SameSite=lax"} <= set(rest)
    for path in ("/", "/static/main.js", "/api/about"):
        assert server.ask("GET", path, headers={"Cookie": cookie})[0] == 200
    foreign = {"Cookie": cookie, "Origin": "http://evil.example"}
    assert server.ask("POST", "/api/scenes/1", headers=foreign)[0] == 403


def test_each_start_has_a_token_of_its_own_and_loopback_none(start: Start) -> None:
    tokens = [start("0.0.0.0").token for _ in range(2)]
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) >= 43
    assert start("127.0.0.1").token is None


def test_ctrl_c_ends_the_server_though_peers_take_nothing() -> None:
    once = SERVERS.replace("os.fork() == 0", "True")
    command = [sys.executable, "-c", once]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as peers,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(["127.0.0.1", {}]), file=process.stdin, flush=True)
        server = Server(*json.loads(process.stdout.readline()))
        path = add(server, noise(1500, 1000))
        for _ in range(24):
            peers.enter_context(server.never_read(path))
        assert until(lambda: server.connections == 24, 5)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in told  # as `serve` says, and the command turns into its exit code
    assert "ASGI" not in told
