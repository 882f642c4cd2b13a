"""The middleware under a real server, with the example that serves the pocket model."""

import http.client
import importlib.util
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import uvicorn
from PIL import Image
from websockets.sync.client import connect

from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.monitor.performance import PerformanceMonitor

EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_pocket_model.py"


class Server:
    """uvicorn in a thread."""

    def __init__(self, app: Any) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> "Server":
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()

    def request(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                method, path, body, {key.replace("_", "-"): text for key, text in headers.items()}
            )
            response = connection.getresponse()
            return (
                response.status,
                {key.lower(): value for key, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_pocket_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def serving(example: ModuleType) -> Iterator[Server]:
    with Server(example.app) as server:
        yield server


def picture(brightness: int) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (80, 60), (brightness, 90, 60)).save(written, format="PNG")
    return written.getvalue()


@pytest.mark.slow
def test_concurrent_clients_each_get_their_picture_and_their_generation(
    serving: Server, example: ModuleType
) -> None:
    def client(number: int) -> tuple[int, dict[str, str], bytes]:
        return serving.request("POST", "/relight", picture(20 * number), x_request_id=f"client-{number}")

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(client, range(3)))
    for number, (status, headers, body) in enumerate(answers):
        assert status == 200
        assert headers["x-request-id"] == f"client-{number}"
        assert Image.open(io.BytesIO(body)).size == (80, 60)
    wait_for(lambda: len(example.app.requests()) >= 3)
    made = {record.request_id: record.generations for record in example.app.requests()}
    assert {name: len(one) for name, one in made.items()} == {f"client-{number}": 1 for number in range(3)}
    runs = {run.stages[0].facts["request_id"]: run.id for run in example.monitor.runs}
    assert {name: one[0]["run_id"] for name, one in made.items()} == runs


def test_a_bad_picture_is_an_answer_and_no_error_of_the_server(serving: Server, example: ModuleType) -> None:
    before = len(example.app.requests())
    status, _, body = serving.request("POST", "/relight", b"no picture")
    assert (status, body) == (415, b"Send a picture, such as PNG or JPEG.")
    wait_for(lambda: len(example.app.requests()) > before)
    record = example.app.requests()[-1]
    assert (record.status, record.failed, record.generations) == (415, False, ())


def test_what_was_measured_is_served_too(serving: Server) -> None:
    serving.request("POST", "/relight", picture(10))
    status, _, body = serving.request("GET", "/performance")
    told = json.loads(body)
    assert status == 200
    assert told["generations"]["current_generation"]["model_name"] == "pocket LBM"
    assert told["requests"]["generations"] >= 1
    status, headers, body = serving.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    assert b'sigmascope_generation_seconds_count{model="pocket LBM"}' in body


def test_a_client_that_hangs_up_in_the_middle_of_a_stream_is_a_disconnect() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2000):
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            gone = asyncio.ensure_future(receive())
            done, _ = await asyncio.wait([gone], timeout=0.005)
            if done and gone.result()["type"] == "http.disconnect":
                return
            gone.cancel()

    watched = PerformanceMonitoringMiddleware(app)
    with Server(watched) as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(4096)
        client.close()
        wait_for(lambda: watched.requests())
    (record,) = watched.requests()
    assert record.disconnected
    assert record.status == 200


def test_an_application_that_raises_answers_500_and_is_recorded() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            raise RuntimeError("out of ideas")

    watched = PerformanceMonitoringMiddleware(app)
    with Server(watched) as server:
        assert server.request("GET", "/")[0] == 500
        wait_for(lambda: watched.requests())
    assert watched.requests()[0].error == "RuntimeError: out of ideas"


def test_a_websocket_speaks_through_the_middleware_and_its_generations_carry_its_id() -> None:
    monitor = PerformanceMonitor()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            return
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            with monitor.monitor_generation("MMDiT", num_steps=1):
                await send({"type": "websocket.send", "text": message["text"].upper()})

    watched = PerformanceMonitoringMiddleware(app)
    with Server(watched) as server:
        url = f"ws://127.0.0.1:{server.port}/"
        with connect(url, additional_headers={"x-request-id": "talk-1"}) as client:
            client.send("first")
            assert client.recv(timeout=10) == "FIRST"
            client.send("second")
            assert client.recv(timeout=10) == "SECOND"
        wait_for(lambda: len(monitor.runs) == 2)
    assert [run.stages[0].facts["request_id"] for run in monitor.runs] == ["talk-1", "talk-1"]
    assert watched.requests() == []
