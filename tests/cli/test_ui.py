"""`sigmascope ui` as a process: its address, many clients, and an end that leaves nothing behind."""

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals
from urllib.parse import urlsplit

import pytest
from tests.history.kept_runs import kept_run
from tests.ui.pages.test_browser import Server
from typer.testing import CliRunner

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError
from sigmascope.history.location import SQLITE
from sigmascope.history.store import open_store


def test_help_names_every_flag() -> None:
    result = CliRunner().invoke(app, ["ui", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for flag in ("--store", "--prompts", "--host", "--port", "--open", "--json"):
        assert flag in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "--port: expected 0 to 65535"),
        (["--host", "192.0.2.1", "--port", "0"], "--host: cannot bind to 192.0.2.1"),
        (["--prompts", "some"], "some"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["ui", *arguments], catch_exceptions=False)


def test_a_port_that_is_taken_is_an_error_with_a_next_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--port: {port} is taken on 127.0.0.1") as caught:
            CliRunner().invoke(app, ["ui", "--port", port], catch_exceptions=False)
    assert "Choose another" in str(caught.value.hint)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with open_store(f"{SQLITE}{tmp_path / 'runs.db'}") as store:
        for number in range(20):
            store.add(kept_run(started_at=f"2026-03-01T00:00:{number:02}+00:00"), "watch")
    started = Server(tmp_path)
    yield started
    if started.process.poll() is None:
        started.end()


def ask(server: Server, path: str) -> tuple[int, bytes]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
    try:
        connection.request("GET", path, headers={"accept": "text/html"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.slow
def test_thirty_two_clients_at_once_are_all_answered(server: Server) -> None:
    paths = (
        "/runs",
        "/runs/latest",
        "/compare?run=1&run=2",
        "/trend",
        "/live",
        "/lora",
        "/doctor",
        "/runs?tag=none",
    )
    with ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(lambda number: ask(server, paths[number % len(paths)]), range(96)))
    assert {status for status, _ in answers} == {200}
    assert all(body.endswith(b"</html>") for _, body in answers)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(SIGINT, 130), (SIGTERM, -SIGTERM)])
def test_the_end_leaves_nothing_behind_in_the_middle_of_an_upload_and_a_stream(
    server: Server, how: Signals, code: int
) -> None:
    address = urlsplit(server.url)
    assert address.port is not None
    host = f"Host: 127.0.0.1:{address.port}\r\n"
    with (
        socket.create_connection(("127.0.0.1", address.port), timeout=60) as upload,
        socket.create_connection(("127.0.0.1", address.port), timeout=60) as stream,
    ):
        stream.sendall(f"GET /live/events HTTP/1.1\r\n{host}\r\n".encode())
        assert stream.recv(12) == b"HTTP/1.1 200"
        begin = (
            f"POST /lora HTTP/1.1\r\n{host}content-type: multipart/form-data; boundary=x\r\n"
            'content-length: 1000000\r\n\r\n--x\r\ncontent-disposition: form-data; name="lora"; filename="a"\r\n\r\n'
        )
        upload.sendall(begin.encode() + (900).to_bytes(8, "little") + b"{" + bytes(20_000))
        temporary = server.folder / "tmp"
        deadline = time.monotonic() + 30
        while not list(temporary.glob("*/*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(list(temporary.glob("*/*"))) == 1
        ended, said = server.end(how)
    assert ended == code
    assert list(temporary.iterdir()) == []
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_watched_run_of_ten_thousand_steps_is_seen_while_it_goes_on(server: Server) -> None:
    script = server.folder / "long.py"
    script.write_text(
        "import time\nimport sigmascope.monitor as m\n"
        "with m.stage('denoising'):\n    for _ in range(10_000):\n        with m.step():\n            time.sleep(0.0005)\n"
    )
    watched = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sigmascope",
            "watch",
            "-q",
            "-o",
            str(server.folder / "long.json"),
            str(script),
        ],
        env={**_environment(), "SIGMASCOPE_STORE": str(server.store)},
        stderr=subprocess.PIPE,
    )
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
    connection.request("GET", "/live/events")
    stream, seen, run = connection.getresponse(), set[str](), ""
    while line := stream.readline():
        if not line.startswith(b"data: "):
            continue
        runs = json.loads(line.removeprefix(b"data: "))
        if not runs and seen:
            break
        for told in runs:
            seen.add(told["steps"])
            run = told["id"]
    connection.close()
    watched.communicate(timeout=120)
    assert watched.returncode == 0
    assert len(seen) >= 3
    assert not list(server.store.with_suffix(".live").glob("*"))
    status, page = ask(server, f"/runs/{run}")
    assert status == 200
    assert b"10,000 steps: median" in page


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "SIGMASCOPE_KEEP"} | {
        "OMP_NUM_THREADS": "1"
    }
