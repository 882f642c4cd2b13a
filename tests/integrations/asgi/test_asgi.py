import asyncio
import contextvars
import gc
import re
import sys
import weakref
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette import routing
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from sigmascope.errors import ConfigError
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.monitor.generation import SERVED, current_request_id, tell_request
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.publishing import PUBLISHER
from sigmascope.monitor.recorder import Recorder, stage, step
from sigmascope.records.performance import RequestRecord

DOCS = Path(__file__).parents[3] / "docs"
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def scope(
    path: str = "/generate",
    headers: list[tuple[bytes, bytes]] | None = None,
    kind: str = "http",
    method: str = "POST",
) -> Message:
    return {
        "type": kind,
        "method": method,
        "path": path,
        "headers": headers or [],
        "query_string": b"prompt=secret",
    }


async def answer(send: Send, *parts: bytes, status: int = 200) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]}
    )
    for index, part in enumerate(parts):
        await send({"type": "http.response.body", "body": part, "more_body": index + 1 < len(parts)})


def call(app: Any, given: Message | None = None, *received: Message) -> list[Message]:
    """What the application sends."""
    sent: list[Message] = []
    waiting = list(received) or [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(given or scope(), receive, send))
    return sent


def header(sent: list[Message], name: bytes = b"x-request-id") -> bytes | None:
    return next((value for key, value in sent[0]["headers"] if key == name), None)


def test_a_streamed_response_passes_unchanged_and_is_measured() -> None:
    clock = Clock()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        clock.ns += 2_000_000_000
        await send({"type": "http.response.start", "status": 201, "headers": []})
        for part in (b"abc", b"de"):
            clock.ns += 500_000_000
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    watched = PerformanceMonitoringMiddleware(app, clock=clock)
    request = [
        {"type": "http.request", "body": b"1234", "more_body": True},
        {"type": "http.request", "body": b"56", "more_body": False},
    ]
    sent = call(watched, scope(), *request)
    assert [message.get("body") for message in sent[1:]] == [b"abc", b"de", b""]
    (record,) = watched.requests()
    assert (record.status, record.request_bytes, record.response_bytes) == (201, 6, 5)
    assert (record.first_byte_seconds, record.seconds) == (2.0, 3.0)
    assert (record.method, record.path, record.in_flight) == ("POST", "/generate", 1)
    assert not record.failed
    assert "secret" not in str(record)


@pytest.mark.parametrize(
    ("sent_id", "is_taken"),
    [(b"abc-123.x:y_Z", True), (b"a" * 128, True), (b"a" * 129, False), (b"", False), (b"a b", False), (b"a\r\nx: y", False)],
)  # fmt: skip
def test_an_id_that_comes_in_is_taken_if_it_is_harmless(sent_id: bytes, is_taken: bool) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, (current_request_id() or "").encode())

    watched = PerformanceMonitoringMiddleware(app)
    sent = call(watched, scope(headers=[(b"X-Request-ID", sent_id)]))
    given = header(sent)
    assert given is not None
    assert (given == sent_id) is is_taken
    assert sent[1]["body"] == given
    assert watched.requests()[0].request_id == given.decode()
    assert current_request_id() is None


def test_an_id_that_the_application_sets_itself_stays() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"own")]})
        await send({"type": "http.response.body", "body": b""})

    sent = call(PerformanceMonitoringMiddleware(app))
    assert sent[0]["headers"] == [(b"x-request-id", b"own")]


def test_a_generation_carries_the_request_that_it_was_made_for() -> None:
    monitor = PerformanceMonitor(sample_hz=None)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        def generate() -> None:
            with monitor.monitor_generation(scope["path"]):
                pass

        await asyncio.to_thread(generate)
        await answer(send, b"image")

    watched = PerformanceMonitoringMiddleware(app)
    call(watched, scope("/a", [(b"x-request-id", b"one")]))
    call(watched, scope("/b", [(b"x-request-id", b"two")]))
    assert [run.stages[0].facts["request_id"] for run in monitor.runs] == ["one", "two"]
    made = [record.generations[0] for record in watched.requests()]
    assert [one["model_name"] for one in made] == ["/a", "/b"]
    assert [one["run_id"] for one in made] == [run.id for run in monitor.runs]


def test_under_a_framework_an_exception_is_counted_as_what_the_client_sees() -> None:
    def broken(_request: Any) -> None:
        raise ValueError("no model")

    monitors: list[PerformanceMonitoringMiddleware] = []

    def monitoring(app: Any) -> PerformanceMonitoringMiddleware:
        monitors.append(PerformanceMonitoringMiddleware(app))
        return monitors[-1]

    site = Starlette(routes=[routing.Route("/broken", broken)])
    site.add_middleware(monitoring)
    with TestClient(site, raise_server_exceptions=False) as client:
        seen = [client.get(path).status_code for path in ("/broken", "/missing")]
    assert seen == [500, 404]
    assert monitors[-1].get_summary()["status_counts"] == {"500": 1, "404": 1}


def test_a_cancelled_request_has_no_status() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    watched = PerformanceMonitoringMiddleware(app)
    with suppress(asyncio.CancelledError):
        call(watched)
    assert watched.requests()[0].status is None


def test_an_exception_passes_and_nothing_of_it_is_kept() -> None:
    class Theirs(Exception):
        pass

    raised = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        error = Theirs("no model")
        raised.append(weakref.ref(error))
        raise error

    watched = PerformanceMonitoringMiddleware(app)
    with suppress(Theirs):
        call(watched)
    gc.collect()
    (record,) = watched.requests()
    assert (record.status, record.error, record.failed) == (500, "Theirs: no model", True)
    assert watched.in_flight == 0
    assert raised[0]() is None


def test_the_exception_that_passes_is_the_very_one() -> None:
    error = ValueError("theirs")

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        raise error

    with pytest.raises(ValueError, match="theirs") as caught:
        call(PerformanceMonitoringMiddleware(app))
    assert caught.value is error


def test_a_client_that_goes_away_is_told_from_one_that_is_done() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"

    async def done(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await answer(send, b"x")
        assert (await receive())["type"] == "http.disconnect"

    gone, complete = PerformanceMonitoringMiddleware(app), PerformanceMonitoringMiddleware(done)
    call(gone)
    call(complete)
    assert gone.requests()[0].disconnected
    assert not complete.requests()[0].disconnected


def test_a_send_to_a_client_that_is_gone_is_a_disconnect() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"x")

    async def refuse(message: Message) -> None:
        raise OSError("client is gone")

    async def nothing() -> Message:
        return {"type": "http.request"}

    watched = PerformanceMonitoringMiddleware(app)
    with pytest.raises(OSError, match="client is gone"):
        asyncio.run(watched(scope(), nothing, refuse))
    assert watched.requests()[0].disconnected


def test_a_request_that_is_cancelled_is_recorded_and_stays_cancelled() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)

    async def nothing() -> Message:
        return {"type": "http.request"}

    async def take(message: Message) -> None:
        pass

    watched = PerformanceMonitoringMiddleware(app)

    async def cancel() -> None:
        task = asyncio.create_task(watched(scope(), nothing, take))
        await asyncio.sleep(0)
        assert watched.in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert watched.in_flight == 0
    assert watched.requests()[0].error == "CancelledError"


def test_websockets_and_lifespans_are_handed_on_as_they_are() -> None:
    seen = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.append((scope["type"], receive, send, current_request_id()))

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        pass

    watched = PerformanceMonitoringMiddleware(app)
    for kind in ("websocket", "lifespan"):
        asyncio.run(watched(scope(headers=[(b"x-request-id", b"ws")], kind=kind), receive, send))
    assert seen == [("websocket", receive, send, "ws"), ("lifespan", receive, send, None)]
    assert watched.requests() == []


def test_concurrent_requests_count_those_in_flight_and_keep_their_ids_apart() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)
        assert current_request_id() == scope["path"][1:]
        await asyncio.sleep(0)
        await answer(send, b"x")

    async def nothing() -> Message:
        return {"type": "http.request"}

    async def take(message: Message) -> None:
        pass

    watched = PerformanceMonitoringMiddleware(app)

    async def everyone() -> None:
        await asyncio.gather(
            *(watched(scope(f"/{n}", [(b"x-request-id", str(n).encode())]), nothing, take) for n in range(20))
        )

    asyncio.run(everyone())
    assert sorted(record.in_flight for record in watched.requests()) == list(range(1, 21))
    assert all(record.request_id == record.path[1:] for record in watched.requests())


def test_a_listener_that_fails_hurts_nobody() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"x")

    def fails(record: RequestRecord) -> None:
        raise RuntimeError("the log is full")

    watched = PerformanceMonitoringMiddleware(app, on_request=fails)
    assert call(watched)[1]["body"] == b"x"
    assert len(watched.requests()) == 1


def test_the_summary_counts_and_takes_percentiles() -> None:
    clock = Clock()
    seconds = iter(range(1, 11))

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        clock.ns += next(seconds) * 1_000_000_000
        await answer(send, b"1234", status=500 if scope["path"] == "/bad" else 200)

    watched = PerformanceMonitoringMiddleware(app, clock=clock, history=100)
    for _ in range(9):
        call(watched)
    call(watched, scope("/bad"))
    summary = watched.get_summary()
    assert (summary["total_requests"], summary["errors"], summary["response_bytes"]) == (10, 1, 40)
    assert summary["status_counts"] == {"200": 9, "500": 1}
    assert summary["seconds"] == {"mean": 5.5, "p50": 6.0, "p90": 10.0, "p99": 10.0}


def test_history_is_bounded() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"")

    watched = PerformanceMonitoringMiddleware(app, history=2)
    for path in ("/a", "/b", "/c"):
        call(watched, scope(path))
    assert [record.path for record in watched.requests()] == ["/b", "/c"]


def test_metrics_are_served_where_asked_for() -> None:
    monitor = PerformanceMonitor(1e-9, on_warning=lambda progress: None, sample_hz=None)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        with monitor.monitor_generation("pocket"):
            pass
        await answer(send, b"12345")

    watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    call(watched)
    sent = call(watched, scope("/metrics", method="GET"))
    text = sent[1]["body"].decode()
    assert 'sigmascope_requests_total{method="POST",route="unknown",status="200"} 1.0' in text
    assert "sigmascope_response_bytes_total 5.0" in text
    assert 'sigmascope_generation_targets_missed_total{model="pocket"} 1.0' in text
    assert len(watched.requests()) == 1  # not the request for the metrics
    named = set(
        re.findall(r"^\| `(sigmascope_\w+)`", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    served = set(re.findall(r"^# TYPE (sigmascope_\w+) (?:counter|histogram|gauge)", text, re.MULTILINE))
    assert named == {name for name in served if not name.endswith("_created")}


def test_only_get_and_head_ask_for_metrics() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"the application's own", status=201)

    watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    assert call(watched, scope("/metrics", method="HEAD"))[0]["status"] == 200
    assert call(watched, scope("/metrics", method="POST"))[0]["status"] == 201


def test_methods_that_clients_invent_are_one_label() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"")

    watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    for number in range(20):
        call(watched, scope(method=f"M{number}"))
    text = call(watched, scope("/metrics", method="GET"))[1]["body"].decode()
    assert text.count("sigmascope_requests_total{") == 1
    assert 'sigmascope_requests_total{method="other",route="unknown",status="200"} 20.0' in text


def test_work_after_the_response_is_none_of_its_seconds() -> None:
    clock = Clock()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        clock.ns += 1_000_000_000
        await answer(send, b"x")
        clock.ns += 60_000_000_000  # a background task

    watched = PerformanceMonitoringMiddleware(app, clock=clock)
    call(watched)
    assert watched.requests()[0].seconds == 1.0


def test_a_file_that_the_server_sends_is_a_complete_response(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"12345")

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": str(tmp_path / "image.png")})
        assert (await receive())["type"] == "http.disconnect"

    watched = PerformanceMonitoringMiddleware(app)
    call(watched)
    (record,) = watched.requests()
    assert (record.response_bytes, record.disconnected) == (5, False)


@pytest.mark.parametrize(("told", "nbytes"), [({}, 5), ({"offset": 2}, 3), ({"offset": 1, "count": 2}, 2)])
def test_an_open_file_that_the_server_sends_is_a_complete_response(
    tmp_path: Path, told: Message, nbytes: int
) -> None:
    (tmp_path / "image.png").write_bytes(b"12345")

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with (tmp_path / "image.png").open("rb") as file:
            await send({"type": "http.response.zerocopysend", "file": file, **told})
        assert (await receive())["type"] == "http.disconnect"

    watched = PerformanceMonitoringMiddleware(app)
    call(watched)
    (record,) = watched.requests()
    assert (record.response_bytes, record.disconnected) == (nbytes, False)


def test_headers_in_text_which_some_servers_take_reach_them_as_they_are() -> None:
    pairs = [("content-type", "text/plain"), ["x-own", b"1"]]

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": iter(pairs)})
        await send({"type": "http.response.body", "body": b""})

    sent = call(PerformanceMonitoringMiddleware(app), {**scope(), "headers": [("X-Request-Id", "from-text")]})
    assert sent[0]["headers"] == [*pairs, (b"x-request-id", b"from-text")]


async def waited_for(record: object) -> None:
    """A listener that somebody would have to await."""


@pytest.mark.parametrize(
    "options", [{"header": ""}, {"header": "x id"}, {"header": "x\r\nset-cookie: a"}, {"header": "ä"},
                {"metrics_path": "metrics"}, {"history": 0}, {"on_request": waited_for}],
)  # fmt: skip
def test_what_cannot_be_is_refused_when_it_is_made(options: dict[str, Any]) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"")

    with pytest.raises(ConfigError, match=next(iter(options))):
        PerformanceMonitoringMiddleware(app, **options)


def test_a_request_that_another_context_ends_is_over_all_the_same() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)

    async def nothing() -> Message:
        return {"type": "http.request"}

    async def take(message: Message) -> None:
        pass

    async def begun() -> object:
        return contextvars.copy_context().run(request.send, None)

    watched = PerformanceMonitoringMiddleware(app)
    request = watched(scope(), nothing, take)
    asyncio.run(begun())
    assert watched.in_flight == 1
    request.close()
    assert watched.in_flight == 0


def test_metrics_without_their_package_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"")

    with pytest.raises(ConfigError) as refused:
        PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    assert "[prometheus]" in str(refused.value.hint)


class Route:
    path = "/draw/{prompt}"


@pytest.mark.parametrize(
    ("path", "route", "kept"),
    [
        ("/draw/a red fox", None, "/draw/…"),
        ("/draw/a red fox", Route(), "/draw/{prompt}"),
        ("/a red fox", None, "/…"),
        ("/generate", None, "/generate"),
    ],
)
def test_a_private_record_quotes_neither_error_nor_path(path: str, route: object, kept: str) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        raise ValueError(f"cannot draw {scope['path']}")

    watched = PerformanceMonitoringMiddleware(app, prompts="hash")
    with pytest.raises(ValueError, match=path):
        call(watched, {**scope(path), "route": route})
    (record,) = watched.requests()
    assert record.path == kept
    assert record.error is not None
    assert record.error.startswith("ValueError (")
    assert "fox" not in str(record)


def test_models_that_clients_invent_share_a_label_from_some_number_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sigmascope.reports.measurements._MOST_MODELS", 5)
    monitor = PerformanceMonitor(sample_hz=None)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        with monitor.monitor_generation(scope["path"]):
            pass
        await answer(send, b"")

    watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    for number in range(8):
        call(watched, scope(f"/model-{number}"))
    text = call(watched, scope("/metrics", method="GET"))[1]["body"].decode()
    assert text.count("sigmascope_generation_seconds_count{") == 6
    assert 'sigmascope_generation_seconds_count{model="other"} 3.0' in text
    assert 'sigmascope_generation_seconds_count{model="model-4"} 1.0' in text


def test_a_websocket_that_is_served_for_days_remembers_its_last_generations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sigmascope.monitor.generation._MOST_OF_REQUEST", 5)
    monitor, held = PerformanceMonitor(sample_hz=None), []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        for _ in range(8):
            with monitor.monitor_generation("pocket"):
                pass
        served = SERVED.get()
        assert served is not None
        held.append(len(served.generations))

    call(PerformanceMonitoringMiddleware(app), scope(kind="websocket"))
    assert held == [5]


def site(seen: list[str | None]) -> Starlette:
    """Routes in routes, which note what the middleware makes of them while they answer."""

    async def draw(request: Request) -> Response:
        served = SERVED.get()
        assert served is not None
        seen.append(served.route())
        return Response("x")

    inner = [routing.Route("/draw/{prompt}", draw), routing.Route("/apiary", draw)]
    return Starlette(
        routes=[
            routing.Route("/draw/{prompt:path}", draw),
            routing.Mount("/api", routes=inner),
            routing.Mount("/of/{tenant}", routes=inner),
            routing.Mount("/files", app=Starlette(routes=[routing.Route("/{name}", draw)])),
        ]
    )


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/draw/a red fox", "/draw/{prompt:path}"),
        ("/api/draw/a red fox", "/api/draw/{prompt}"),
        ("/api/apiary", "/api/apiary"),
        ("/of/fox/draw/red", "/of/{tenant}/draw/{prompt}"),
        ("/files/fox.png", "/files/{name}"),
        ("/nothing/fox", None),
    ],
)
def test_a_request_is_known_by_the_template_of_its_route(path: str, route: str | None) -> None:
    seen: list[str | None] = []
    watched = PerformanceMonitoringMiddleware(site(seen), metrics_path="/metrics")
    client = TestClient(watched)
    client.get(path)
    assert watched.requests()[0].route == route
    assert seen == ([] if route is None else [route])
    text = client.get("/metrics").text
    assert f'sigmascope_request_seconds_count{{route="{route or "unknown"}"}} 1.0' in text
    assert "fox" not in text


def test_litestar_says_the_template_itself() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        scope["path_template"] = "/draw/{prompt:str}"
        await answer(send, b"x")

    watched = PerformanceMonitoringMiddleware(app)
    call(watched)
    assert watched.requests()[0].route == "/draw/{prompt:str}"


def test_stages_of_a_generation_are_served_with_its_route_and_its_wait() -> None:
    monitor = PerformanceMonitor(sample_hz=None)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        scope["path_template"] = "/draw"
        with monitor.monitor_generation("pocket"), stage("denoising"), step():
            pass
        with monitor.monitor_generation("pocket"):  # it has not waited since the request came
            pass
        await answer(send, b"x")

    watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    call(watched)
    text = call(watched, scope("/metrics", method="GET"))[1]["body"].decode()
    for line in (
        'sigmascope_generations_total{outcome="ok",pipeline="pocket",route="/draw"} 2.0',
        'sigmascope_stage_seconds_count{pipeline="pocket",stage="denoising"} 1.0',
        'sigmascope_stage_seconds_count{pipeline="pocket",stage="generation"} 2.0',
        'sigmascope_step_seconds_count{pipeline="pocket"} 1.0',
        'sigmascope_queue_wait_seconds_count{pipeline="pocket",route="/draw"} 1.0',
        'sigmascope_dropped_total{what="runs"} 0.0',
    ):
        assert line in text


def test_a_middleware_that_is_gone_counts_no_more() -> None:
    gc.collect()
    before = len(PUBLISHER._listeners)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await answer(send, b"x")

    watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
    assert len(PUBLISHER._listeners) == before + 1
    del watched
    gc.collect()
    assert len(PUBLISHER._listeners) == before


def test_nobody_waits_on_an_open_websocket() -> None:
    monitor = PerformanceMonitor(sample_hz=None)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        with monitor.monitor_generation("pocket"):
            pass

    call(PerformanceMonitoringMiddleware(app), scope(kind="websocket"))
    [run] = monitor.runs
    assert "request_id" in run.stages[0].facts
    assert "seconds_before" not in run.stages[0].facts


def test_a_watched_call_is_told_its_route_and_its_wait_too() -> None:
    recorder = Recorder()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        scope["path_template"] = "/draw"
        with recorder.stage("generation") as generation:
            pass
        tell_request(generation, recorder.clock)
        await answer(send, b"x")

    call(PerformanceMonitoringMiddleware(app))
    facts = recorder.run().stages[0].facts
    assert facts["route"] == "/draw"
    assert facts["seconds_before"]["queue"] > 0
