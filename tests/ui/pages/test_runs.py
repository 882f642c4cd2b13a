"""The list of runs, one run, two beside each other, and what is said where there is none."""

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.history.kept_runs import kept_run
from tests.reports.html.payloads import PAYLOADS, run_that_holds
from tests.ui.conftest import HOST
from tests.ui.pages.conftest import HTML
from tests.ui.pages.parsed import Parsed, faults_of

from sigmascope.analysis.breakdown import headline
from sigmascope.cli.ui import own_parts
from sigmascope.history.location import SQLITE
from sigmascope.history.store import Store
from sigmascope.records.serialization import run_from_json
from sigmascope.reports.html import private_runs
from sigmascope.ui.app import make_app


def listed(page: str) -> list[str]:
    """The runs of a list, from top to bottom."""
    return re.findall(r'href="\./runs/\d+">(\w+)</a>', page)


def test_runs_are_listed_the_newest_first(browser: TestClient, three: list[int]) -> None:
    page = browser.get("/")
    assert page.text == browser.get("/runs").text
    assert listed(page.text) == ["cccc3333", "bbbb2222", "aaaa1111"]
    assert {"before", "new driver", "failed"} <= set(Parsed(page.text).texts)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("outcome=failed", ["aaaa1111"]),
        ("tag=before", ["bbbb2222"]),
        ("source=bench", ["cccc3333"]),
        ("since=2026-03-02&until=2026-03-03", ["bbbb2222"]),
        ("pipeline=flux&model=&lora=", ["cccc3333", "bbbb2222", "aaaa1111"]),
        ("model=none%20such", []),
    ],
)
def test_filters_are_those_of_the_command(
    browser: TestClient, three: list[int], query: str, found: list[str]
) -> None:
    page = browser.get(f"/runs?{query}").text
    assert listed(page) == found
    assert ("No run passes these filters." in page) is (not found)


def test_what_was_asked_for_stays_in_the_form(browser: TestClient, three: list[int]) -> None:
    page = browser.get("/runs", params={"pipeline": '"><b>', "outcome": "ok"}).text
    assert 'value="&#34;&gt;&lt;b&gt;"' in page
    assert "<option selected>ok</option>" in page


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("outcome=fine", "Outcome is"),
        ("since=soon", "Since is"),
        ("since=2d&until=3d", "Since 2d is not before Until 3d"),
    ],
)
def test_a_filter_that_is_none_is_a_page_with_a_next_step(
    browser: TestClient, three: list[int], query: str, words: str
) -> None:
    answer = browser.get(f"/runs?{query}")
    assert answer.status_code == 422
    assert words in answer.text
    assert "What to do: " in answer.text
    assert "--" not in " ".join(Parsed(answer.text).texts)  # what commands call them
    assert not faults_of(answer.text)


def test_the_list_has_pages(browser: TestClient, store: Store) -> None:
    for number in range(53):
        store.add(kept_run(id=f"{number:08}", started_at=f"2026-03-01T00:00:{number:02}+00:00"), "watch")
    first, second = browser.get("/runs?pipeline=flux").text, browser.get("/runs?pipeline=flux&page=2").text
    assert listed(first) + listed(second) == [f"{number:08}" for number in reversed(range(53))]
    assert 'href="./runs?pipeline=flux&amp;page=2"' in first
    assert "51 to 53 of 53" in second
    for odd in ("0", "-1", "x", "9" * 30):
        assert len(listed(browser.get(f"/runs?page={odd}").text)) == 50
    beyond = browser.get("/runs?page=9999").text
    assert "This page of the list is empty" in beyond
    assert '<p class="fine">53 in ' in beyond


def test_a_run_is_its_report(browser: TestClient, store: Store, three: list[int]) -> None:
    page = Parsed(browser.get(f"/runs/{three[1]}").text)
    assert headline(private_runs(store.record(three[1]), "hash")[0]) in page.texts
    assert page.cells_after("Time", 1) == ["10.00 s"]
    assert page.cells_after("Peak", 1) == ["20 GB"]
    assert page.cells_after("Kept by", 1) == ["watch"]
    assert page.cells_after("Note 1", 1) == ["new driver"]
    assert any(link.endswith(f"compare?run={three[1]}&run={three[2]}") for link in page.links) is False
    later = Parsed(browser.get(f"/runs/{three[2]}").text)
    assert f"../compare?run={three[1]}&run={three[2]}" in later.links


def test_the_record_is_saved_without_what_pages_do_not_show(
    browser: TestClient, store: Store, three: list[int]
) -> None:
    answer = browser.get(f"/runs/{three[1]}/record.json")
    assert answer.headers["content-disposition"] == f'attachment; filename="run-{three[1]}.json"'
    assert run_from_json(answer.text) == private_runs(store.record(three[1]), "hash")[0]


@pytest.mark.parametrize("word", ["latest", "cccc", "cccc3333"])
def test_a_run_is_found_by_the_words_of_commands(browser: TestClient, three: list[int], word: str) -> None:
    assert "cccc3333" in browser.get(f"/runs/{word}").text


@pytest.mark.parametrize(
    "path",
    [
        "/runs/999",
        "/runs/zzzz",
        "/runs/0",
        "/runs/-1",
        f"/runs/{'9' * 400}",
        "/runs/..%2f..%2fetc%2fpasswd",
        "/runs/../../etc/passwd",
        "/runs/latest~9",
        "/runs/@none",
        "/runs/%00",
        "/runs/999/record.json",
        "/compare?run=999&run=1",
        "/compare?run=latest~9",
        "/runs/zzzz/record.json",
        "/trend?of=999",
        "/nothing",
        "/static/..%2f..%2fapp.py",
        "/lora/0000",
        "/lora/0000/1111",
    ],
)
def test_what_is_not_there_is_a_page_that_says_so(browser: TestClient, three: list[int], path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "That did not work" in answer.text
    assert "root:" not in answer.text
    assert not faults_of(answer.text)


def test_a_run_that_is_removed_while_its_page_is_open_is_missed_politely(
    browser: TestClient, store: Store, three: list[int]
) -> None:
    assert browser.get(f"/runs/{three[0]}").status_code == 200
    store.remove([three[0]])
    answer = browser.get(f"/runs/{three[0]}")
    assert answer.status_code == 404
    assert "It may have been removed" in answer.text
    assert browser.get("/compare", params={"run": three}).status_code == 422


def test_two_runs_are_compared_the_older_first(browser: TestClient, three: list[int]) -> None:
    page = Parsed(browser.get(f"/compare?run={three[2]}&run={three[1]}").text)
    assert any(text.startswith("2.00 × as long (10.00 s → 20.00 s)") for text in page.texts)


def test_one_run_is_compared_with_the_last_like_it(browser: TestClient, three: list[int]) -> None:
    two = browser.get(f"/compare?run={three[1]}&run={three[2]}").text
    assert browser.get(f"/compare?run={three[2]}").text == two
    assert browser.get(f"/compare?run={three[1]}").status_code == 404


@pytest.mark.parametrize("chosen", [[], [0, 1, 2], [1, 1]])
def test_other_numbers_of_runs_are_refused(browser: TestClient, three: list[int], chosen: list[int]) -> None:
    answer = browser.get("/compare", params={"run": [three[index] for index in chosen]})
    assert answer.status_code == 422
    assert "Tick two runs" in answer.text


@pytest.mark.parametrize(
    "path", ["/runs", "/live", "/trend", "/lora", "/doctor", "/runs/latest", "/compare?run=latest"]
)
def test_pages_are_whole_without_eyes_or_mouse(browser: TestClient, three: list[int], path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 200
    assert faults_of(answer.text) == []
    assert not re.search(r'\sstyle="|\son[a-z]+="', answer.text)  # which the policy would block


@pytest.mark.slow
def test_links_lead_to_pages(browser: TestClient, three: list[int]) -> None:
    for path in ("/runs", "/runs/latest", f"/compare?run={three[1]}&run={three[2]}", "/trend"):
        page = browser.get(path)
        for link in set(Parsed(page.text).links) - {"#main"}:
            assert browser.get(str(page.url.join(link))).status_code == 200, f"{path}: {link}"


def test_without_a_store_the_list_says_how_to_get_a_run(browser: TestClient, tmp_path: Path) -> None:
    page = browser.get("/runs")
    assert page.status_code == 200
    assert "sigmascope watch" in page.text
    assert browser.get("/trend").status_code == 200
    assert browser.get("/runs/1").status_code == 503
    assert not (tmp_path / "runs.db").exists()


def newer(file: Path) -> None:
    with sqlite3.connect(file) as opened:
        opened.execute("UPDATE alembic_version SET version_num = '999'")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (newer, "later version"),
        (folder, "is a folder"),
        (lambda file: file.write_bytes(b"garbage " * 9000), "damaged"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_page_and_the_next_one_is_found(
    browser: TestClient, store: Store, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    store.add(kept_run(), "watch")
    store.close()
    file = tmp_path / "runs.db"
    good = file.read_bytes()
    damage(file)
    for path in ("/runs", "/runs/1", "/trend", "/compare?run=1&run=2"):
        answer = browser.get(path)
        assert (answer.status_code, words in answer.text) == (503, True), path
        assert "What to do" in answer.text
    if file.is_dir():
        file.rmdir()
    file.write_bytes(good)
    assert len(listed(browser.get("/runs").text)) == 1


def test_a_store_that_another_process_writes_to_is_read(
    browser: TestClient, store: Store, three: list[int], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "runs.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM runs")
        assert len(listed(browser.get("/runs").text)) == 3


def test_a_store_that_cannot_be_written_is_read(
    browser: TestClient, store: Store, three: list[int], tmp_path: Path
) -> None:
    store.close()
    file = tmp_path / "runs.db"
    for beside in tmp_path.glob("runs.db*"):
        beside.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert len(listed(browser.get("/runs").text)) == 3
    finally:
        tmp_path.chmod(0o700)
    assert file.exists()


def test_prompts_are_shown_only_if_asked_for(url: str, store: Store) -> None:
    prompt = "a portrait of nobody you know"
    run = kept_run()
    facts = {**run.stages[0].facts, "prompts": {"prompt": {"sha256": "ab" * 32, "text": prompt}}}
    store.add(replace(run, stages=(replace(run.stages[0], facts=facts),)), "watch")
    for privacy in ("full", "hash", "none"):
        with TestClient(make_app(own_parts(url, privacy)), base_url=HOST, headers=HTML) as client:
            for path in ("/runs/1", "/runs/1/record.json"):
                assert (prompt in client.get(path).text) is (privacy == "full")


@pytest.mark.slow
def test_sixty_texts_of_strangers_stay_text(url: str, store: Store) -> None:
    plain, *others = ("harmless", *PAYLOADS)
    for number, text in enumerate((plain, *others)):
        run = replace(run_that_holds(text), id=f"{text} {number}", started_at="2026-03-01T00:00:00+00:00")
        store.add(run, "watch", tags=[re.sub(r"[\s@~,/\\]", "", text)[:90]], notes=[text])
    assert len(others) >= 60
    with TestClient(make_app(own_parts(url, "full")), base_url=HOST, headers=HTML) as client:
        expected = Parsed(client.get("/runs/1").text).elements
        for number, text in enumerate(others, 2):
            page = Parsed(client.get(f"/runs/{number}").text)
            assert page.elements == expected, text
            assert any(text in shown for shown in page.texts), text
        for path in ("/runs", "/runs?page=2", "/compare?run=1&run=2", "/trend"):
            page = Parsed(client.get(path).text)
            handlers = [name for _, names in page.elements for name in names if name.startswith("on")]
            scripts = sum(tag == "script" for tag, _ in page.elements)
            assert (handlers, scripts <= 1) == ([], True), path
        assert any("<script>attacked()</script>" in text for text in Parsed(client.get("/runs").text).texts)


@pytest.mark.parametrize("page", ["runs", "trend", "live", "runs/latest"])
def test_a_store_where_nobody_may_look_is_a_page_that_says_so(tmp_path: Path, page: str) -> None:
    url = f"{SQLITE}{tmp_path / ('x' * 300) / 'runs.db'}"
    with TestClient(make_app(own_parts(url, "hash")), base_url=HOST, headers=HTML) as client:
        answer = client.get(page)
    assert ("cannot be opened" in answer.text) is (page != "live")
    assert answer.status_code == (200 if page == "live" else 503)
