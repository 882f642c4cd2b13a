"""The report in a real browser, Debian's Chromium without a window, used as a person does: clicks, keys, a phone, paper."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.reports.html.payloads import PAYLOADS, run_that_holds

from sigmascope.records.memory import PeakMemory
from sigmascope.records.run import Run, Stage, Steps
from sigmascope.records.serialization import run_from_json
from sigmascope.reports.html import write_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed (pip install playwright)"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt install chromium)"),
]
SOME = 10
OPEN_ALL = """() => {
  for (const shut of document.querySelectorAll("details:not([open]) > summary")) shut.click();
}"""
HANDLERS = """() => [...document.querySelectorAll("*")].flatMap((element) =>
  [...element.attributes].filter((one) => one.name.startsWith("on")).map((one) => `${one.name}=${one.value}`)
)"""
ATTACKED = "window.attacked = () => { window.wasAttacked = true; };"
"""What a payload calls if it runs."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file in a window of its own; `said` of the page is what its console and its scripts complained of."""
    windows = []

    def opened(path: Path, **options: Any) -> Any:
        windows.append(browser.new_context(**options))
        page = windows[-1].new_page()
        page.said = []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.add_init_script(ATTACKED)
        page.goto(path.as_uri())
        return page

    yield opened
    for window in windows:
        window.close()


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Of one harmless run."""
    write_html(run_that_holds("harmless"), tmp_path / "report.html")
    return tmp_path / "report.html"


def with_script(path: Path, script: str) -> Path:
    """The page with one more element at its end."""
    path.write_text(path.read_text(encoding="utf-8").replace("</main>", f"{script}</main>"), encoding="utf-8")
    return path


# Ten steps in half of the time, the last of which takes three times as long as the others.
FIGURES = Run(
    "1",
    "figures",
    "2026-01-02T03:04:05+00:00",
    2.5,
    stages=(
        Stage("denoising", 0.0, 1.25, steps=Steps(tuple(i / 10 for i in range(10)), (0.1,) * 9 + (0.3,))),
    ),
)


def test_no_payload_runs_and_the_console_is_silent(show: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html([run_that_holds(payload) for payload in PAYLOADS], path, prompts="full")
    page = show(path)
    for shut in page.query_selector_all("details:not([open]) > summary")[:SOME]:
        shut.click()
    page.evaluate(OPEN_ALL)  # a hand takes half a minute for all
    assert page.locator("details").count() > 3 * len(PAYLOADS)
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate(HANDLERS) == []  # whatever a mouse would do
    assert page.evaluate("window.wasAttacked") is None
    assert page.said == []
    assert "Made by Sigmascope" in page.inner_text("body")


@pytest.mark.parametrize("payload", ["<img src=x onerror=attacked()>", "<script>attacked()</script>"])
def test_a_payload_that_were_not_escaped_would_be_seen(
    show: Callable[..., Any], report: Path, payload: str
) -> None:
    page = show(with_script(report, payload))
    page.wait_for_function("window.wasAttacked === true", timeout=5_000)
    assert page.evaluate("window.wasAttacked")


def test_a_handler_that_no_click_reaches_would_be_seen(show: Callable[..., Any], report: Path) -> None:
    page = show(with_script(report, "<p onmouseover=attacked()>"))
    assert page.evaluate(HANDLERS) == ["onmouseover=attacked()"]


def test_an_error_of_a_script_would_be_seen(show: Callable[..., Any], report: Path) -> None:
    assert "absent is not defined" in " ".join(show(with_script(report, "<script>absent()</script>")).said)


def test_the_figures_are_the_records(show: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "figures.html"
    write_html(FIGURES, path)
    page = show(path)
    row = page.locator("tr", has=page.locator("th", has_text="denoising")).first
    assert row.inner_text().split("\t")[:3] == ["denoising, steps", "1.20 s", "48 %"]
    steps = (
        page.locator("h2", has_text="Steps of denoising")
        .locator("xpath=following-sibling::p[1]")
        .inner_text()
    )
    assert "10 steps" in steps
    assert "0.3 s (step 10)" in steps.replace("0.30", "0.3").replace("300 ms", "0.3 s")
    assert "1 took more than twice the median" in steps
    assert page.locator("rect.step.slow").count() == 1


def test_the_saved_record_is_the_run(show: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "figures.html"
    write_html(FIGURES, path)
    page = show(path)
    with page.expect_download() as waited:
        page.get_by_text("Save the record as JSON").click()
    saved = tmp_path / "saved.json"
    waited.value.save_as(saved)
    assert waited.value.suggested_filename == "figures.json"
    assert run_from_json(saved.read_text(encoding="utf-8")) == FIGURES


def test_buttons_keys_and_the_wheel_zoom_the_timeline(show: Callable[..., Any], report: Path) -> None:
    page = show(report)
    timeline = page.locator(".zoom[tabindex]")
    whole: float = timeline.locator(".wide").bounding_box()["width"]

    def zoomed() -> float:
        return float(timeline.locator(".wide").bounding_box()["width"]) / whole

    page.get_by_text("Zoom in").click()
    assert zoomed() == pytest.approx(2, rel=0.01)
    timeline.focus()
    page.keyboard.press("+")
    assert zoomed() == pytest.approx(4, rel=0.01)
    page.keyboard.press("-")
    timeline.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    assert zoomed() == pytest.approx(2.5, rel=0.01)


def test_the_first_tab_leads_to_the_verdict(show: Callable[..., Any], report: Path) -> None:
    page = show(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the verdict"
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")


def test_every_picture_and_button_has_a_name(show: Callable[..., Any], report: Path) -> None:
    """What a screen reader says."""
    page = show(report)
    for role in ("img", "button"):
        named = page.get_by_role(role, name=re.compile(r"\w"))
        assert named.count() == page.get_by_role(role).count() > 0


@pytest.mark.parametrize("width", [320, 400])
def test_it_fits_a_phone(show: Callable[..., Any], tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    write_html([run_that_holds("harmless")] * 2, path)
    page = show(path, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_peaks_table_fits_a_phone_without_scrolling(show: Callable[..., Any], tmp_path: Path) -> None:
    peak = PeakMemory(rss_bytes=7 * 2**30, rss_at_seconds=1.0)
    denoising = Stage("denoising", 0.0, 2.0, peak=peak)
    run = replace(FIGURES, stages=(Stage("generation", 0.0, 2.0, peak=peak, children=(denoising,)),))
    write_html(run, tmp_path / "report.html")
    page = show(tmp_path / "report.html", viewport={"width": 400, "height": 800})
    table = page.locator("h2", has_text="Peaks of memory").locator("xpath=following-sibling::div[1]")
    inner, outer = table.evaluate("box => [box.scrollWidth, box.clientWidth]")
    assert inner <= outer <= 400
    assert "Highest" in table.locator("td").first.evaluate(
        "cell => getComputedStyle(cell, '::before').content"
    )


def test_dark_rooms_get_a_dark_page(show: Callable[..., Any], report: Path) -> None:
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, part) => sum + +part, 0)"
    )
    assert show(report, color_scheme="light").evaluate(brightness) > 600
    assert show(report, color_scheme="dark").evaluate(brightness) < 150


def test_paper_is_white_in_a_dark_room_too(show: Callable[..., Any], report: Path) -> None:
    page = show(report, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    background, ink = page.evaluate(
        "[document.body].flatMap(body => [getComputedStyle(body).backgroundColor, getComputedStyle(body).color])"
    )
    assert background == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", ink))) < 100


def test_paper_shows_no_buttons_and_the_whole_timeline(show: Callable[..., Any], report: Path) -> None:
    page = show(report)
    page.get_by_text("Zoom in").click()
    page.emulate_media(media="print")
    assert not page.get_by_text("Zoom in").is_visible()
    box, wide = page.locator(".zoom[tabindex]"), page.locator(".zoom[tabindex] .wide")
    assert wide.bounding_box()["width"] <= box.bounding_box()["width"]
