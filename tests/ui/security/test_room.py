import asyncio

import pytest
from starlette.types import Message

from sigmascope.ui.security import PIECE_BYTES, Kept, Refusal, Room

SCOPE = {"type": "http", "method": "GET"}


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_bytes_count_once_however_many_get_them() -> None:
    room, shared, other = Room(limit_bytes=10), bytes(8), bytes(3)
    with room.holding(shared), room.holding(shared):
        with pytest.raises(Refusal) as caught, room.holding(other):
            pass
        assert caught.value.status == 503
        assert caught.value.response.headers["retry-after"] == "5"
        assert room.held_bytes == 8
    with room.holding(other):
        assert room.held_bytes == 3
    assert room.held_bytes == 0


def test_what_is_larger_than_all_room_passes_alone() -> None:
    room = Room(limit_bytes=10)
    with room.reserved(100):
        assert room.held_bytes == 100
        with pytest.raises(Refusal), room.reserved(1):
            pass
    assert room.held_bytes == 0


def test_an_answer_is_sent_in_pieces_and_gives_its_room_back_when_the_peer_is_gone() -> None:
    room, data = Room(limit_bytes=10**9), bytes(range(256)) * 1000
    sent: list[Message] = []

    async def send(message: Message) -> None:
        assert room.held_bytes == len(data)
        sent.append(message)

    async def gone(message: Message) -> None:
        raise OSError

    asyncio.run(Kept(data, room, "image/png")(SCOPE, never, send))
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(data)).encode()
    assert b"".join(message["body"] for message in sent[1:]) == data
    assert max(len(message["body"]) for message in sent[1:]) == PIECE_BYTES
    assert [message["more_body"] for message in sent[-2:]] == [True, False]
    with pytest.raises(OSError, match=r"^$"):
        asyncio.run(Kept(data, room, "image/png")(SCOPE, never, gone))
    assert room.held_bytes == 0
