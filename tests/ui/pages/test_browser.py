"""The app in a real browser, Debian's Chromium without a window: light, dark, a phone, keys, and a dropped file."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.history.kept_runs import kept_run
from tests.reports.html.payloads import PAYLOADS, run_that_holds
from tests.ui.pages.test_live import NOW
from tests.ui.pages.test_lora import lora_bytes

from sigmascope.history.location import SQLITE
from sigmascope.history.store import open_store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed (pip install playwright)"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt install chromium)"),
]
PAGES = (
    "runs",
    "runs/1",
    "runs/2",
    "compare?run=1&run=2",
    "trend",
    "live",
    "lora",
    "doctor",
    "nothing",
    "LORA",
    "LORAS",
)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 400, "height": 800}},
    "dark phone": {"color_scheme": "dark", "viewport": {"width": 400, "height": 800}},
}
CONTRAST = """() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const paint = getComputedStyle(at).backgroundColor;
      if (/^rgb\\(/.test(paint)) return paint;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest("svg, script, template, :disabled")) continue;
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${walker.currentNode.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""

UNREADABLE = """() => {
  const seen = (element) => element.checkVisibility({ visibilityProperty: true });
  const faults = [];
  for (const text of document.querySelectorAll("svg text")) {
    if (seen(text) && text.getBoundingClientRect().height < 10) faults.push(`small: ${text.textContent}`);
  }
  for (const head of document.querySelectorAll("th")) {
    if (seen(head) && !head.textContent.trim()) faults.push(`no head: ${head.closest("tr").textContent}`);
  }
  for (const control of document.querySelectorAll("a, button, select, input:not([type=hidden])")) {
    const named = [...(control.labels ?? [])].map((label) => label.textContent).join("");
    const name = control.getAttribute("aria-label") ?? (named || control.textContent);
    if (seen(control) && !name.trim()) faults.push(`no name: ${control.outerHTML}`);
  }
  for (const line of document.querySelectorAll("main p, caption, main li")) {
    const around = line.closest(".scroll, .panel");
    if (seen(line) && around && line.scrollWidth > around.clientWidth) faults.push(`cut off: ${line.textContent}`);
  }
  const levels = [...document.querySelectorAll("h1, h2, h3, h4")].filter(seen).map((head) => Number(head.tagName[1]));
  if (levels[0] !== 1 || levels.some((level, at) => level > (levels[at - 1] ?? 0) + 1)) faults.push(`levels: ${levels}`);
  return faults;
}"""


class Server:
    """`sigmascope ui` as a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.store = folder / "runs.db"
        command = [
            sys.executable,
            "-m",
            "sigmascope",
            "ui",
            "--store",
            str(self.store),
            "--port",
            "0",
            "--json",
        ]
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        (folder / "tmp").mkdir()
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.address: dict[str, Any] = json.loads(line)
        self.url: str = self.address["url"]

    def end(self, how: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Exit code, and what was said on stderr."""
        self.process.send_signal(how)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("app")
    with open_store(f"{SQLITE}{folder / 'runs.db'}") as store:
        for number in range(60):
            run = kept_run(started_at=f"2026-03-01T00:00:{number:02}+00:00", seconds=10.0 + number % 7)
            store.add(run, "watch", tags=["before"] if number == 3 else [])
        for text in PAYLOADS:
            evil = replace(
                run_that_holds(text), id=f"{text} {id(text)}", started_at="2026-02-01T00:00:00+00:00"
            )
            store.add(evil, "watch", notes=[text], imported=True)
    started = Server(folder, "--prompts", "full")
    yield started
    started.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any, server: Server) -> Iterator[Callable[..., Any]]:
    """Opens a page; `said` is what its console complained of, `asked` the addresses that it loaded."""
    windows = []

    def opened(path: str, **options: Any) -> Any:
        windows.append(browser.new_context(**options))
        page = windows[-1].new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.add_init_script("window.attacked = () => { window.wasAttacked = true; };")
        page.goto(server.url + path)
        return page

    yield opened
    for window in windows:
        window.close()


def send(page: Any, *names: str) -> None:
    files = [{"name": name, "mimeType": "", "buffer": lora_bytes()} for name in names]
    page.set_input_files("input[type=file]", files)
    page.locator("button[type=submit]").click()
    page.wait_for_url(re.compile(r"/lora/.+"))


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_readable_in_every_light(show: Callable[..., Any], server: Server, look: str) -> None:
    width = LOOKS[look].get("viewport", {}).get("width", 1280)
    for path in PAGES:
        page = show("lora" if path.startswith("LORA") else path, **LOOKS[look])
        if path.startswith("LORA"):
            send(page, *["a.safetensors", "b.safetensors"][: 1 + path.count("S")])
        for shut in page.query_selector_all("details:not([open]) > summary"):
            shut.click()
        assert page.evaluate(CONTRAST) == [], path
        assert page.evaluate(UNREADABLE) == [], path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert [line for line in page.said if path != "nothing"] == [], path
        assert all(address.startswith(server.url) for address in page.asked), path
        dark = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((part) => part < 60)"
        )
        assert dark is look.startswith("dark")


def test_poor_contrast_would_be_seen(show: Callable[..., Any]) -> None:
    page = show("runs")
    page.evaluate("document.querySelector('h1').style.color = '#aaa'")
    assert any(text.startswith("Runs: ") for text in page.evaluate(CONTRAST))


def test_no_text_of_a_stranger_runs(show: Callable[..., Any]) -> None:
    page = show("runs?until=2026-02-15")
    links = [link.get_attribute("href") for link in page.query_selector_all("th a")]
    assert len(links) == 50
    for path in [link.removeprefix("./") for link in links] + ["runs?until=2026-02-15&page=2"]:
        page.goto(page.url.split("runs")[0] + path)
        assert page.evaluate("window.wasAttacked") is None, path
        assert page.said == [], path


def test_two_ticks_lead_to_a_comparison(show: Callable[..., Any]) -> None:
    page = show("runs?pipeline=flux")
    assert page.get_by_role("button", name="Compare").is_disabled()
    boxes = page.get_by_role("checkbox")
    boxes.nth(0).check()
    boxes.nth(1).check()
    assert boxes.nth(2).is_disabled()
    assert "Two runs are ticked" in page.inner_text("#ticked")
    page.get_by_role("button", name="Compare").click()
    assert page.inner_text("h1").endswith(", before and now")


def test_fields_say_what_the_list_shows_after_going_back(show: Callable[..., Any]) -> None:
    page = show("runs")
    page.fill("#f-tag", "before")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url(re.compile("tag=before"))
    page.go_back()
    page.wait_for_url(re.compile("runs$"))
    assert page.locator("tbody tr").count() > 1
    assert page.input_value("#f-tag") == ""


def test_keys_are_enough(show: Callable[..., Any]) -> None:
    page = show("runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.focus("input[name=run]")
    for _ in range(2):
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") != "checkbox":
            page.keyboard.press("Tab")
    page.keyboard.press("Enter")


def test_a_file_dropped_on_the_page_is_inspected(show: Callable[..., Any]) -> None:
    page = show("lora")
    page.evaluate(
        """(bytes) => {
          const carried = new DataTransfer();
          carried.items.add(new File([new Uint8Array(bytes)], "<b>fox&.safetensors"));
          for (const kind of ["dragenter", "dragover", "drop"]) {
            document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true }));
          }
        }""",
        list(lora_bytes()),
    )
    page.wait_for_url(re.compile(r"/lora/.+"))
    assert page.inner_text("h1") == "<b>fox&.safetensors"


def test_without_javascript_lists_forms_and_files_work(show: Callable[..., Any]) -> None:
    page = show("runs", java_script_enabled=False)
    page.fill("#f-tag", "before")
    page.get_by_role("button", name="Filter").click()
    assert page.locator("tbody tr").count() == 1
    page.get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare").click()
    assert page.inner_text("h1") == "a run, before and now"
    page.goto(page.url.split("compare")[0] + "lora")
    send(page, "a.safetensors")
    assert page.inner_text("h1") == "a.safetensors"


def test_a_run_of_ten_thousand_steps_is_followed(show: Callable[..., Any], server: Server) -> None:
    folder = server.folder / "runs.live"
    folder.mkdir(exist_ok=True)
    file = folder / "1.json"

    def tell(steps: int) -> None:
        told = replace(
            NOW, id="5" * 32, steps=steps, seconds=steps / 100, step_seconds=(0.01,) * 120,
            process_id=os.getpid(), host=socket.gethostname(), told_at=time.time(),
        )  # fmt: skip
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(asdict(told)), encoding="utf-8")
        beside.replace(file)

    page = show("live")
    assert page.get_by_text("No watched run is going on.").is_visible()
    for steps in (1, 5_000, 10_000):
        tell(steps)
        page.get_by_text(f"{steps:,} of 10,000", exact=True).wait_for(timeout=20_000)
        assert page.locator("progress").evaluate("bar => bar.value") == steps / 100
    assert page.locator("[data-bars] rect").count() == 60
    file.unlink()
    link = page.get_by_text("It is over: see the run")
    link.wait_for(timeout=20_000)
    assert link.get_attribute("href") == f"./runs/{'5' * 32}"
    assert page.said == []
