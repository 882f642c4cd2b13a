"""Bodies that come slowly, not at all, or from too many at once; and what the server does when it fails itself."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message
from tests.ui.conftest import HOST, encoded, make_app

from sigmascope.ui import lbm_model, lbm_page
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.security import Limits

Receive = Callable[[], Awaitable[Message]]


async def post(app: ASGIApp, path: str, receive: Receive) -> tuple[int, dict[str, str], str]:
    """Send a request whose body is as `receive` gives it; status, headers and the error's message."""
    told: list[Message] = []

    async def send(message: Message) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in told[0]["headers"]}
    return told[0]["status"], headers, json.loads(told[1]["body"]).get("error", {}).get("message", "")


def piece(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("path", ["/api/pictures", "/api/jobs"])
def test_a_body_that_does_not_end_in_time_is_given_up(served: ServedModel, path: str) -> None:
    app = make_app(served, Limits(body_seconds=0.01))
    status, headers, message = asyncio.run(post(app, path, never))
    assert status == 408
    assert "within 0.01 s" in message
    assert headers["connection"] == "close"  # the rest of the body is no request


def test_a_body_that_falls_silent_is_given_up_long_before_its_time(served: ServedModel) -> None:
    sent = [piece(b"abc", more=True), piece(b"abc", more=True)]

    async def falls_silent() -> Message:
        return sent.pop(0) if sent else await never()

    app = make_app(served, Limits(body_seconds=60.0, silent_seconds=0.05))
    status, _, message = asyncio.run(post(app, "/api/pictures", falls_silent))
    assert (status, sent) == (408, [])
    assert "0.05 s went by without a part of it" in message


@pytest.mark.parametrize("path", ["/api/pictures", "/api/jobs"])
def test_a_client_that_leaves_is_no_fault_of_the_server(served: ServedModel, path: str) -> None:
    messages = [piece(b"abc", more=True), {"type": "http.disconnect"}]

    async def leave() -> Message:
        return messages.pop(0)

    assert asyncio.run(post(make_app(served), path, leave))[0] == 400


def test_only_so_many_pictures_are_sent_at_once_and_places_are_given_back(
    served: ServedModel, photograph: Image.Image
) -> None:
    app = make_app(served, Limits(uploads=2))
    picture = encoded(photograph)

    async def scenario() -> None:
        proceed = asyncio.Event()

        async def slow() -> Message:
            await proceed.wait()
            return piece(picture, more=False)

        async def at_once() -> Message:
            return piece(picture, more=False)

        slow_ones = [asyncio.create_task(post(app, "/api/pictures", slow)) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await post(app, "/api/pictures", at_once))[0] == 429
        proceed.set()
        assert [answer[0] for answer in await asyncio.gather(*slow_ones)] == [201, 201]
        assert (await post(app, "/api/pictures", at_once))[0] == 201

    asyncio.run(scenario())


def test_a_picture_keeps_its_place_until_it_is_decoded(
    served: ServedModel, photograph: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(served, Limits(uploads=1))
    decoding, proceed = threading.Event(), threading.Event()
    real = lbm_model.decode

    def held(data: bytes, limits: Limits) -> Image.Image:
        decoding.set()
        assert proceed.wait(20)
        return real(data, limits)

    monkeypatch.setattr(lbm_model, "decode", held)

    async def sent() -> Message:
        return piece(encoded(photograph), more=False)

    async def scenario() -> None:
        first = asyncio.create_task(post(app, "/api/pictures", sent))
        await asyncio.to_thread(decoding.wait, 20)
        assert (await post(app, "/api/pictures", sent))[0] == 429
        proceed.set()
        assert (await first)[0] == 201
        assert (await post(app, "/api/pictures", sent))[0] == 201

    asyncio.run(scenario())


def test_a_fault_of_the_server_is_told_as_every_error_is(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(lbm_page, "read_wish", fail)
    with TestClient(make_app(served), base_url=HOST, raise_server_exceptions=False) as client:
        answer = client.post("/api/jobs", content=b"{}")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "The server failed (ZeroDivisionError)."
