import pytest
from starlette.datastructures import Headers

from sigmascope.ui.security import Refusal, check_request, is_loopback, known_names

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
