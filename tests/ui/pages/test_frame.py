"""What all pages share: the bar, the guard, and errors that say the next step."""

from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient
from tests.ui.conftest import HOST
from tests.ui.pages.conftest import HTML
from tests.ui.pages.parsed import Parsed, faults_of

from sigmascope.cli.ui import own_parts
from sigmascope.ui.app import Part, make_app

PAGES = ("/runs", "/live", "/trend", "/lora", "/doctor")


def test_the_bar_leads_to_each_page_and_says_where_one_is(browser: TestClient) -> None:
    for path in PAGES:
        page = browser.get(path).text
        assert [link for link in Parsed(page).links if link.startswith("./") and "static" not in link][
            :6
        ] == [
            "./",
            *(f".{path}" for path in PAGES),
        ]
        assert f'href=".{path}" aria-current="page"' in page


def test_errors_are_pages_for_browsers_and_json_for_programs(browser: TestClient) -> None:
    page = browser.get("/runs/1")
    assert page.headers["content-type"].startswith("text/html")
    assert not faults_of(page.text)
    told = browser.get("/runs/1", headers={"accept": "*/*"})
    assert told.status_code == page.status_code
    assert set(told.json()["error"]) == {"message", "hint"}


def test_an_unforeseen_failure_is_a_page_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("<b>secret</b>")

    monkeypatch.setattr("sigmascope.ui.doctor_page.examine", fail)
    app = make_app(own_parts(url, "hash"))
    with TestClient(app, base_url=HOST, headers=HTML, raise_server_exceptions=False) as client:
        answer = client.get("/doctor")
    assert answer.status_code == 500
    assert "The server failed (RuntimeError)" in answer.text
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "path", [*PAGES, "/", "/live/events", "/compare", "/static/look.css", "/runs/1/record.json"]
)
def test_beyond_loopback_each_address_needs_the_token(url: str, path: str) -> None:
    app = make_app(own_parts(url, "hash"), host="0.0.0.0", token="t0ken")
    with TestClient(app, base_url=HOST, headers=HTML, follow_redirects=False) as client:
        answer = client.get(path)
        assert answer.status_code == 401
        assert "Open the link that it printed" in answer.text
        assert client.get("/?token=t0ken").headers["location"] == "."
        client.cookies.set("sigmascope-7860", "t0ken")
        if path != "/live/events":
            assert client.get(path).status_code != 401


def test_a_foreign_name_is_refused_on_each_page(browser: TestClient) -> None:
    for path in PAGES:
        answer = browser.get(path, headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert "evil.example is not a name of this server" in answer.text


def test_every_answer_keeps_the_page_to_itself(browser: TestClient) -> None:
    for path in (*PAGES, "/static/look.css", "/nothing"):
        policy = browser.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy


def test_the_look_is_the_reports(browser: TestClient) -> None:
    from sigmascope.reports import html

    for name in ("look.css", "report.js"):
        assert browser.get(f"/static/{name}").text == (Path(html.__file__).parent / name).read_text(
            encoding="utf-8"
        )


def test_a_part_is_all_that_a_page_needs(url: str) -> None:
    async def own(request: Request) -> Response:
        return PlainTextResponse("mine")

    app = make_app([Part("Own", "own", (Route("/own", own),))])
    with TestClient(app, base_url=HOST, headers=HTML) as client:
        assert [client.get(path).text for path in ("/", "/own")] == ["mine", "mine"]
        assert 'href="./own">Own' in client.get("/nothing").text
