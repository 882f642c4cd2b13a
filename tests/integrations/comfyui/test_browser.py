"""ComfyUI's page with our part in it, in Debian's Chromium: badges, the tab, payloads, both palettes, both kinds of nodes.

`SIGMASCOPE_COMFYUI_FRONTEND` names the folder with the frontend's `index.html` (in `comfyui_frontend_package`, it is
`static`). `SIGMASCOPE_COMFYUI_PICTURES` names a folder for pictures of what is looked at.
"""

import os
import re
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.comfy_shapes.checkout import VARIABLE, why_not
from tests.integrations.comfyui.graphs import graph
from tests.integrations.comfyui.server import Server, add_beside, node, serving

import sigmascope
from sigmascope.records.run import Run
from sigmascope.units import format_size, seconds

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
        not FRONTEND,
        reason=f"set {VARIABLE}_FRONTEND to the folder static of comfyui_frontend_package",
    ),
]
PAYLOAD = "<img src=x onerror=attacked()>"
FIRST_NEW_NODES = (1, 30)
"""Frontends from here on place their new nodes; seen of 1.27 (no) and 1.49 (yes)."""
NUMBERS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9]+(\.[0-9]+)?")
"""Ids and counts in a message, which differ each time."""


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
def server(base: Path) -> Iterator[Server]:
    loras = base / "models" / "loras"
    shutil.copy(loras / "other.safetensors", loras / f"{PAYLOAD}.safetensors")
    leave_out_the_tutorial(base)
    with serving(base, Path(str(FRONTEND))) as server:
        yield server


def leave_out_the_tutorial(base: Path) -> None:
    """Else the page begins with a dialog over everything."""
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text('{"Comfy.TutorialCompleted": true}')


class Page:
    """A page with ComfyUI in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.settings: dict[str, Any] = {}
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.add_init_script("window.attacked = () => { window.wasAttacked = true; };")

    def open(self, server: Server) -> None:
        self.page.goto(f"http://127.0.0.1:{server.port}/")
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_function("window.app?.graph && window.app?.extensionManager", timeout=60_000)
        self.page.wait_for_function("document.querySelector('.side-tool-bar-container')", timeout=60_000)
        self.settle()  # the page opens the last workflow again

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
        self.fit()

    def fit(self) -> None:
        """Bring all nodes into view."""
        self.page.evaluate("app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        before = None
        while (now := self.page.evaluate("[app.canvas.ds.scale, ...app.canvas.ds.offset]")) != before:
            before = now
            self.page.wait_for_timeout(400)

    def queue(self) -> None:
        """Run what is shown, to its end, and until the badges are those of its record."""
        self.page.evaluate(
            """async () => {
                window.told = null;
                app.api.addEventListener("sigmascope.prompt", ({ detail }) => { window.told = detail.name; }, { once: true });
                await app.queuePrompt(0);
            }"""
        )
        self.page.wait_for_function(
            "window.told && document.querySelector('.sigmascope-badges').dataset.prompt === window.told",
            timeout=120_000,
        )

    def has_badges(self, count: int) -> None:
        """Wait until there are so many."""
        self.page.wait_for_function(
            "count => document.querySelectorAll('.sigmascope-badge').length === count", arg=count
        )

    def settle(self) -> None:
        """Wait for what the page asks the server, and for it to be shown."""
        self.page.wait_for_load_state("networkidle")
        self.page.wait_for_timeout(200)

    def set(self, name: str, value: Any) -> None:
        """Change a setting of ComfyUI's, until `put_back`."""
        was = self.page.evaluate("name => app.extensionManager.setting.get(name)", name)
        self.settings.setdefault(name, was)
        self.page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])

    def put_back(self) -> None:
        """Give the settings back as they were: the server keeps them."""
        for name, value in self.settings.items():
            self.page.evaluate(
                "([name, value]) => app.extensionManager.setting.set(name, value)", [name, value]
            )

    def picture(self, name: str) -> None:
        """Keep a picture, if they are wanted."""
        if PICTURES:
            self.page.wait_for_timeout(600)
            self.page.screenshot(path=Path(PICTURES) / f"{name}.png")


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    pages: list[Page] = []

    def opened(server: Server) -> Page:
        window = browser.new_context(viewport={"width": 1400, "height": 900})
        pages.append(Page(window.new_page()))
        pages[-1].open(server)
        return pages[-1]

    yield opened
    for page in pages:
        page.put_back()
        page.page.context.close()


def badge(page: Page, node: str) -> Any:
    return page.page.locator(f'.sigmascope-badge[data-node="{node}"]')


def open_tab(page: Page) -> Any:
    page.page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.sigmascope')")
    tab = page.page.locator(".sigmascope-tab")
    tab.wait_for()
    return tab


def last_run(server: Server) -> Run:
    return sigmascope.load_run(max(server.records.glob("sigmascope-prompt-*.json")))


def hover(page: Page, node: str) -> str:
    """What is said of a node on hover."""
    badge(page, node).hover()
    said: str = page.page.locator(".sigmascope-tip").inner_text()
    page.page.mouse.move(5, 500)
    return said


def test_badges_and_tab_show_the_record_of_the_prompt(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph(seed=11), {"6": "My sampler"})
    page.queue()
    run = last_run(server)
    for id in ("6", "7"):
        stage = node(run, id)
        assert stage.peak is not None
        assert stage.peak.rss_bytes is not None
        assert badge(page, id).inner_text().split("\n") == [
            "✓",
            seconds(stage.seconds),
            format_size(stage.peak.rss_bytes),
        ]
    assert "2 steps" in hover(page, "6")
    tab = open_tab(page)
    page.picture("tab")
    rows = tab.locator(".sigmascope-row")
    assert rows.first.locator(".sigmascope-row-time").inner_text() == seconds(run.seconds)
    named = {
        row.split("\n")[1]: row.split("\n")[2] for row in tab.locator(".sigmascope-node").all_inner_texts()
    }
    assert named["My sampler"] == seconds(node(run, "6").seconds)
    assert len(named) == sum(1 for stage in run.walk() if "node" in stage.facts)
    with page.page.context.expect_page() as opened:
        tab.get_by_text("Open the report").click()
    report = opened.value
    report.wait_for_load_state()
    assert run.name in report.title()
    assert "My sampler" in report.content() or "KSampler" in report.inner_text("body")


def test_the_next_prompt_comes_by_itself_and_can_be_compared(server: Server, open_page: Open) -> None:
    page = open_page(server)
    tab = open_tab(page)
    page.load(graph(seed=12))
    page.queue()
    before = last_run(server)
    page.load(graph(seed=13))
    page.queue()
    now = last_run(server)
    rows = tab.locator(".sigmascope-row")
    assert rows.nth(0).locator(".sigmascope-row-time").inner_text() == seconds(now.seconds)
    assert rows.nth(1).locator(".sigmascope-row-time").inner_text() == seconds(before.seconds)
    assert "KSampler (6), seed\n12 → 13" in tab.locator(".sigmascope-changes").inner_text()
    with page.page.context.expect_page() as opened:
        tab.get_by_text("Compare with the one before").click()
    opened.value.wait_for_load_state()
    assert "2 runs" in opened.value.title()
    rows.nth(1).click()
    playwright.expect(tab.locator(".sigmascope-card strong")).to_have_text(seconds(before.seconds))


def test_the_switch_takes_badges_away_and_brings_them_back(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph(seed=14))
    page.queue()
    tab = open_tab(page)
    switch = tab.get_by_role("switch")
    switch.click()
    page.has_badges(0)
    page.page.reload()
    page.ready()
    assert page.page.evaluate("app.extensionManager.setting.get('Sigmascope.Badges')") is False
    open_tab(page).get_by_role("switch").click()
    page.load(graph(seed=14))
    page.queue()
    page.has_badges(7)


def test_payloads_in_titles_and_file_names_stay_text(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph(seed=15, lora=PAYLOAD), {"6": PAYLOAD, "2": PAYLOAD})
    page.queue()
    said = hover(page, "2")
    assert f"LoRA {PAYLOAD}.safetensors: 0 of 1 module used" in said
    assert "bad" in badge(page, "2").get_attribute("class")
    tab = open_tab(page)
    page.picture("payload")
    assert tab.locator(".sigmascope-name", has_text=PAYLOAD).count() == 2
    with page.page.context.expect_page() as opened:
        tab.get_by_text("Open the report").click()
    opened.value.wait_for_load_state()
    for shown in (page.page, opened.value):
        assert shown.evaluate("window.wasAttacked") is None
        assert shown.locator("img[src=x]").count() == 0


def test_a_payload_that_is_not_escaped_would_be_seen(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.page.evaluate("markup => { document.body.insertAdjacentHTML('beforeend', markup); }", PAYLOAD)
    page.page.wait_for_function("window.wasAttacked === true", timeout=5_000)


def test_what_failed_and_where_nan_begins_is_on_the_badge(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph("PlantedNan", seed=16))
    page.queue()
    assert "NaN begins in PlantedNan" in hover(page, "9")
    assert "✗" in badge(page, "9").inner_text()
    page.load(graph("PlantedFailure", seed=16))
    page.queue()
    page.page.keyboard.press("Escape")  # ComfyUI's own dialog on the failure
    page.page.wait_for_timeout(500)
    assert "ValueError: planted" in hover(page, "9")
    assert badge(page, "7").count() == 0
    assert badge(page, "6").inner_text().split("\n")[1:] == ["cached"]


def test_badges_belong_to_the_workflow_that_was_run(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph(seed=17))
    whole = page.page.evaluate("(app.rootGraph ?? app.graph).serialize()")
    first, second = ({**whole, "id": f"{number}" * 8 + "-0000-4000-8000-000000000000"} for number in (1, 2))

    def show(workflow: Any) -> None:
        page.page.evaluate("async workflow => { await app.loadGraphData(workflow); }", workflow)
        page.settle()

    show(first)
    page.has_badges(0)
    page.queue()
    page.has_badges(7)
    show(second)
    page.has_badges(0)
    show(first)
    page.has_badges(7)


def test_a_workflow_without_an_id_is_known_by_its_nodes(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph(seed=23))
    page.queue()
    page.has_badges(7)
    page.load({id: node for id, node in graph(seed=23).items() if id in "15"})
    page.has_badges(0)


def test_a_subgraph_has_the_time_of_what_is_in_it(server: Server, open_page: Open) -> None:
    page = open_page(server)
    page.load(graph(seed=19))
    made = page.page.evaluate(
        """() => {
            const graph = app.rootGraph ?? app.graph;
            const inner = [6, 7].map((id) => graph.getNodeById(id));
            const { node } = graph.convertToSubgraph(new Set(inner));
            return String(node.id);
        }"""
    )
    page.queue()
    run = last_run(server)
    inner = [
        stage for stage in run.walk() if str(stage.facts.get("node", {}).get("id")).startswith(f"{made}:")
    ]
    assert {stage.name for stage in inner} == {"KSampler", "VAEDecode"}
    assert badge(page, made).inner_text().split("\n")[1] == seconds(sum(stage.seconds for stage in inner))
    page.page.evaluate(
        "id => { const graph = app.rootGraph ?? app.graph;"
        " app.canvas.setGraph(graph.getNodeById(Number(id)).subgraph); }",
        made,
    )
    page.has_badges(2)
    shown = page.page.locator(".sigmascope-badge").all()
    assert {one.get_attribute("data-node") for one in shown} == {stage.facts["node"]["id"] for stage in inner}


def boxes(page: Page, id: str) -> tuple[dict[str, float], dict[str, float]]:
    """Where the badge of a node is, and where the node is, in pixels of the page."""
    page.page.evaluate("app.canvas.setDirty(true, true)")
    page.page.wait_for_timeout(300)
    place = page.page.evaluate(
        """id => {
            const drawn = document.querySelector(`[data-node-id="${id}"]`);
            if (drawn) { const { left, top } = drawn.getBoundingClientRect(); return { left, top }; }
            const node = (app.rootGraph ?? app.graph).getNodeById(Number(id));
            const { scale, offset } = app.canvas.ds;
            const around = app.canvas.canvas.getBoundingClientRect();
            return {
                left: around.left + (node.pos[0] + offset[0]) * scale,
                top: around.top + (node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT + offset[1]) * scale,
            };
        }""",
        id,
    )
    return badge(page, id).bounding_box(), place


ON_TOP = """id => {
    const { x, y, width, height } = document.querySelector(`.sigmascope-badge[data-node="${id}"]`).getBoundingClientRect();
    const seen = document.elementFromPoint(x + width / 2, y + height / 2);
    return seen?.closest(".sigmascope-badge")?.dataset.node === id;
}"""
"""Whether nothing lies over a badge."""


@pytest.mark.parametrize("vue", [False, True], ids=["classic nodes", "new nodes"])
def test_badges_stay_above_their_nodes(server: Server, open_page: Open, vue: bool) -> None:
    page = open_page(server)
    version = page.page.evaluate("window.__COMFYUI_FRONTEND_VERSION__")
    if vue and tuple(map(int, version.split(".")[:2])) < FIRST_NEW_NODES:
        pytest.skip(
            f"the new nodes of frontend {version} are a prototype, which draws them where they are not"
        )
    page.set("Comfy.VueNodes.Enabled", vue)
    page.page.reload()
    page.ready()
    page.load(graph(seed=20 + vue))
    page.queue()
    assert (page.page.locator("[data-node-id]").count() > 0) is vue
    ran = {stage.facts["node"]["id"] for stage in last_run(server).walk() if "node" in stage.facts}
    assert {"6", "7", "8"} <= ran
    page.page.wait_for_function(
        "ran => ran.every(id => (" + ON_TOP + ")(id))", arg=sorted(ran), timeout=10_000
    )
    page.picture(f"nodes-{'new' if vue else 'classic'}")
    for move in ("", "app.canvas.ds.scale = 0.6", "app.canvas.ds.offset[0] += 40"):
        page.page.evaluate(f"() => {{ {move} }}")
        mark, place = boxes(page, "6")
        scale = page.page.evaluate("app.canvas.ds.scale")
        assert mark["x"] == pytest.approx(place["left"], abs=2)
        assert 0 <= place["top"] - (mark["y"] + mark["height"]) <= 10 * scale + 2


CONTRAST = """element => {
    const numbers = (colour) => { const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const light = ([red, green, blue]) => [red, green, blue].map((part) => part / 255)
        .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    let paper = element;
    while (numbers(getComputedStyle(paper).backgroundColor)[3] < 255) paper = paper.parentElement;
    const pair = [getComputedStyle(element).color, getComputedStyle(paper).backgroundColor].map(numbers).map(light);
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""
"""By WCAG 2.1, of an element's text on what lies behind it."""


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_both_palettes_can_be_read(server: Server, open_page: Open, palette: str) -> None:
    page = open_page(server)
    page.set("Comfy.ColorPalette", palette)
    seed = 24 if palette == "light" else 25  # a prompt that was run before shows no time
    page.load(graph("PlantedOutOfMemory", seed=seed, lora="half"), {"9": "VAE of a small card"})
    page.queue()
    tab = open_tab(page)
    badge(page, "2").hover()
    page.picture(f"palette-{palette}")
    for texts in (
        page.page.locator(".sigmascope-badge span"),
        page.page.locator(".sigmascope-tip p"),
        tab.locator(
            "h2, h3, p, li, dt, dd, a, figcaption span, .sigmascope-name, .sigmascope-figure, .sigmascope-sign"
        ),
    ):
        told = {text.inner_text(): text.evaluate(CONTRAST) for text in texts.all() if text.is_visible()}
        assert told
        too_faint = {text: contrast for text, contrast in told.items() if contrast < 4.5}
        assert too_faint == {}, too_faint


def test_the_console_says_no_more_than_the_bare_server_s(
    base: Path,
    server: Server,
    open_page: Open,
) -> None:
    with serving(base, Path(str(FRONTEND)), SIGMASCOPE="0") as bare:
        said = []
        for each in (bare, server):
            page = open_page(each)
            page.load(graph(seed=22))
            before = len(each.ask("/history"))
            page.page.evaluate("app.queuePrompt(0)")
            while len(each.ask("/history")) == before:
                page.page.wait_for_timeout(200)
            if each is server:
                open_tab(page)
            page.settle()
            said.append(Counter(NUMBERS.sub("#", line) for line in page.said))
    more = said[1] - said[0]
    assert more == Counter(), more


@pytest.mark.parametrize("page", ["", "/x", "/x/report.html", "/x/comparison.html"])
def test_another_origin_is_refused(server: Server, page: str) -> None:
    address = f"http://127.0.0.1:{server.port}/sigmascope/prompts{page}"
    request = urllib.request.Request(address, headers={"Origin": "http://elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    with refused.value as answer:
        assert answer.code == 403


@pytest.mark.parametrize("ours_first", [True, False])
def test_badges_are_there_beside_comfyui_manager(
    ours_first: bool, base: Path, tmp_path: Path, open_page: Open
) -> None:
    options = add_beside(base, tmp_path, "ComfyUI-Manager", ours_first=ours_first)
    leave_out_the_tutorial(tmp_path)
    with serving(tmp_path, Path(str(FRONTEND)), options) as server:
        page = open_page(server)
        page.load(graph(seed=13))
        page.queue()
        page.has_badges(7)
        assert badge(page, "7").inner_text().startswith("✓")
        assert page.page.evaluate("app.extensions.some(({ name }) => name === 'Comfy.ManagerMenu')")
        open_tab(page).get_by_text("VAE Decode").first.wait_for()
