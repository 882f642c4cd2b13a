import secrets

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from sigmascope.ui.security import Refusal, check_request, check_token, is_loopback, known_names, new_token

NAMES = frozenset({"localhost", "127.0.0.1", "studio"})


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"host": "127.0.0.1:7860"}),
        ("GET", {"host": "LOCALHOST:7860"}),
        ("GET", {"host": "[::1]:7860"}),
        ("GET", {"host": "192.168.1.7:7860"}),  # nobody can rebind an address
        ("GET", {"host": "studio"}),
        ("GET", {"host": "Studio.:7860"}),  # with the root's dot
        ("GET", {"host": "[::ffff:127.0.0.1]"}),
        ("GET", {"host": "127.0.0.1:"}),
        ("POST", {"host": "127.0.0.1:7860"}),  # a program, not a browser
        ("POST", {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860"}),
        ("POST", {"host": "127.0.0.1:7860", "sec-fetch-site": "same-origin"}),
        ("GET", {"host": "127.0.0.1:7860", "sec-fetch-site": "cross-site"}),  # a link from elsewhere
    ],
)
def test_the_page_itself_and_programs_pass(method: str, headers: dict[str, str]) -> None:
    check_request(method, Headers(headers), NAMES)


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 400),
        ("GET", {"host": "[::1"}, 400),
        ("GET", {"host": "evil.example:7860"}, 403),
        ("GET", {"host": "127.0.0.1.evil.example"}, 403),
        ("GET", {"host": "127.0.0.1@evil.example"}, 400),
        ("GET", {"host": "evil.example\\@127.0.0.1"}, 400),
        ("GET", {"host": "127.0.0.1/evil"}, 400),
        ("GET", {"host": "127.0.0.1#evil.example"}, 400),
        ("GET", {"host": "127.0.0.1:port"}, 400),
        ("GET", {"host": "localhost, evil.example"}, 400),
        ("GET", {"host": "2130706433"}, 403),  # the same address to some resolvers
        ("POST", {"host": "127.0.0.1:7860", "origin": "http://evil.example"}, 403),
        ("POST", {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:9999"}, 403),
        ("POST", {"host": "127.0.0.1:7860", "origin": "null"}, 403),
        ("POST", {"host": "127.0.0.1:7860", "sec-fetch-site": "cross-site"}, 403),
        ("POST", {"host": "127.0.0.1:7860", "sec-fetch-site": "same-site"}, 403),
        ("DELETE", {"host": "127.0.0.1:7860", "origin": "http://evil.example"}, 403),
    ],
)
def test_foreign_names_and_foreign_pages_do_not(method: str, headers: dict[str, str], status: int) -> None:
    with pytest.raises(Refusal) as caught:
        check_request(method, Headers(headers), NAMES)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("studio", False),
    ],
)
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_name_that_was_bound_is_allowed() -> None:
    assert {"localhost", "studio.lan"} <= known_names("Studio.LAN.")


def asked(path: str = "/", query: bytes = b"", **headers: str) -> Request:
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    address = {"path": path, "query_string": query, "server": ("127.0.0.1", 7860)}
    return Request({"type": "http", "method": "GET", "headers": sent, **address})


@pytest.mark.parametrize(
    "request_",
    [
        asked(authorization="Bearer right"),
        asked(authorization="bearer right"),
        asked("/api/about", cookie="other=1; sigmascope-7860=right"),
    ],
)
def test_who_has_the_token_passes(request_: Request) -> None:
    assert check_token(request_, "right") is None


@pytest.mark.parametrize(
    "request_",
    [
        asked(),
        asked(authorization="right"),
        asked(authorization="Bearer wrong"),
        asked(authorization="Bearer righ\xe9"),
        asked(authorization="Basic right"),
        asked(cookie="sigmascope-7861=right"),
        asked(query=b"token=wrong"),
        asked(query=b"token=%ff"),
        asked("/api/about", query=b"token=right"),  # nothing but the link itself: addresses are kept in logs
    ],
)
def test_who_has_not_does_not(request_: Request) -> None:
    with pytest.raises(Refusal) as caught:
        check_token(request_, "right")
    assert caught.value.status == 401


def test_the_link_is_answered_with_a_cookie_and_the_page_without_the_token() -> None:
    answer = check_token(asked(query=b"token=right"), "right")
    assert answer is not None
    assert (answer.status_code, answer.headers["location"]) == (303, ".")
    assert answer.headers["set-cookie"] == "sigmascope-7860=right; HttpOnly; Path=/; SameSite=lax"


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, ...]] = []

    def noting(*both: bytes) -> bool:
        compared.append(both)
        return False

    monkeypatch.setattr(secrets, "compare_digest", noting)
    with pytest.raises(Refusal):
        check_token(asked(query=b"token=a", authorization="Bearer b", cookie="sigmascope-7860=c"), "right")
    assert sorted(compared) == [(b"a", b"right"), (b"b", b"right"), (b"c", b"right")]


def test_a_token_is_new_each_time_and_long() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43  # 256 bits in base 64
