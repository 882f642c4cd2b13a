"""ComfyUI's page with our part in it, in Debian's Chromium: badges, the tab, payloads, both palettes, both kinds of nodes.

`SIGMASCOPE_COMFYUI_FRONTEND` names the folder with the frontend's `index.html` (in `comfyui_frontend_package`, it is
`static`). `SIGMASCOPE_COMFYUI_PICTURES` names a folder for pictures of what is looked at.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.comfy_shapes.checkout import VARIABLE, why_not
from tests.integrations.comfyui.test_checkout import Server, base, graph, serving

__all__ = ["base"]  # a fixture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FRONTEND, PICTURES = os.environ.get(f"{VARIABLE}_FRONTEND"), os.environ.get(f"{VARIABLE}_PICTURES")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed (pip install playwright)"
)
pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt install chromium)"),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.skipif(
        FRONTEND is None,
        reason=f"set {VARIABLE}_FRONTEND to the folder static of comfyui_frontend_package",
    ),
]
PAYLOAD = "<img src=x onerror=attacked()>"
NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)?")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Server]:  # noqa: F811 - the fixture above
    loras = base / "models" / "loras"
    shutil.copy(loras / "other.safetensors", loras / f"{PAYLOAD}.safetensors")
    with serving(base, Path(str(FRONTEND))) as server:
        yield server


class Page:
    """A page with ComfyUI in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.add_init_script("window.attacked = () => { window.wasAttacked = true; };")

    def open(self, server: Server) -> None:
        self.page.goto(f"http://127.0.0.1:{server.port}/")
        self.page.wait_for_function("window.app?.graph && window.app?.extensionManager", timeout=60_000)
        self.page.wait_for_function("document.querySelector('.side-tool-bar-container')", timeout=60_000)

    def load(self, nodes: dict[str, Any], titles: dict[str, str] | None = None) -> None:
        """Show a graph, with titles of its nodes by their ids."""
        self.page.evaluate(
            """async ([nodes, titles]) => {
                await app.loadApiJson(nodes, "test");
                for (const [id, title] of Object.entries(titles))
                    (app.rootGraph ?? app.graph).getNodeById(Number(id)).title = title;
            }""",
            [nodes, titles or {}],
        )

    def queue(self) -> None:
        """Run what is shown, to its end."""
        before = self.page.evaluate("window.ended ?? 0")
        self.page.evaluate(
            """async () => {
                if (window.ended === undefined) {
                    window.ended = 0;
                    app.api.addEventListener("sigmascope.prompt", () => { window.ended += 1; });
                }
                await app.queuePrompt(0);
            }"""
        )
        self.page.wait_for_function(f"window.ended > {before}", timeout=120_000)
        self.page.wait_for_timeout(400)

    def set(self, name: str, value: Any) -> None:
        """Change a setting of ComfyUI's."""
        self.page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])

    def picture(self, name: str) -> None:
        """Keep a picture, if they are wanted."""
        if PICTURES is not None:
            self.page.wait_for_timeout(600)
            self.page.screenshot(path=Path(PICTURES) / f"{name}.png")


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Page]]:
    windows = []

    def opened(server: Server, **options: Any) -> Page:
        windows.append(browser.new_context(viewport={"width": 1400, "height": 900}, **options))
        page = Page(windows[-1].new_page())
        page.open(server)
        return page

    yield opened
    for window in windows:
        window.close()


def badge(page: Page, node: str) -> Any:
    return page.page.locator(f'.sigmascope-badge[data-node="{node}"]')


def test_first_slice(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    page.load(graph())
    page.queue()
    page.picture("slice")
    print(page.said)
    print(Counter(NUMBERS.sub("#", line) for line in page.said))
    assert badge(page, "6").count() == 1
