"""The addresses on a stand-in of ComfyUI's server: what they give, and that it is what the records say."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.test_nodes import GRAPH, with_node

import sigmascope
from sigmascope.integrations.comfyui import loader, routes
from sigmascope.integrations.comfyui.browser import Shelf, view_of
from sigmascope.integrations.comfyui.session import Session
from sigmascope.integrations.comfyui.tiles import Tiles
from sigmascope.records.run import Run, Stage

PAYLOAD = "<img src=x onerror=attacked()>"


class Answer(NamedTuple):
    body: str
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = {}  # noqa: RUF012 - no test changes it


class Server:
    """A stand-in of ComfyUI's `PromptServer`: it keeps routes as they are added, and what is sent to pages."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Any], Any]] = {}
        self.sent: list[tuple[str, Any]] = []
        self.routes = SimpleNamespace(get=self._get)

    def _get(self, path: str) -> Callable[[Any], Any]:
        return lambda handler: self.handlers.setdefault(path, handler)

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        self.sent.append((event, json.loads(json.dumps(data))))

    def ask(self, path: str, **match_info: str) -> Answer:
        answer: Answer = asyncio.run(self.handlers[path](SimpleNamespace(match_info=match_info)))
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    web = ModuleType("aiohttp.web")
    vars(web).update(
        json_response=lambda data, status=200: Answer(json.dumps(data), int(status)),
        Response=lambda text, content_type, headers: Answer(text, 200, content_type, headers),
    )
    monkeypatch.setitem(sys.modules, "aiohttp", ModuleType("aiohttp"))
    monkeypatch.setitem(sys.modules, "aiohttp.web", web)
    return Server()


@pytest.fixture
def serving(watch: Watch, server: Server) -> Any:
    watched = watch()
    routes.serve(watched.session, server)
    return watched


def test_a_prompt_is_told_listed_and_shown_in_full(serving: Any, server: Server) -> None:
    run = serving.run(GRAPH)
    ((event, told),) = server.sent
    listed = json.loads(server.ask("/sigmascope/prompts").body)
    assert event == "sigmascope.prompt"
    assert listed["prompts"] == [told]
    assert told["seconds"] == run.seconds
    shown = json.loads(server.ask("/sigmascope/prompts/{name}", name=told["name"]).body)
    stages = {stage.facts["node"]["id"]: stage for stage in run.walk() if "node" in stage.facts}
    assert {node["id"]: node["seconds"] for node in shown["nodes"]} == {
        node: stage.seconds for node, stage in stages.items()
    }
    assert {node["id"]: node["peak_bytes"] for node in shown["nodes"]} == {
        node: stage.peak.rss_bytes for node, stage in stages.items() if stage.peak is not None
    }


def test_the_report_and_the_comparison_are_those_of_the_records(serving: Any, server: Server) -> None:
    first, second = serving.run(GRAPH, "prompt-1"), serving.run(GRAPH, "prompt-2")
    name, before = (told["name"] for _, told in reversed(server.sent))
    report = server.ask("/sigmascope/prompts/{name}/report.html", name=name)
    assert (report.content_type, report.headers["Content-Security-Policy"][:8]) == ("text/html", "sandbox ")
    assert second.name in report.body
    beside = server.ask("/sigmascope/prompts/{name}/comparison.html", name=name)
    assert first.id in beside.body
    assert second.id in beside.body
    shown = json.loads(server.ask("/sigmascope/prompts/{name}", name=name).body)
    assert shown["before"] == before
    assert server.ask("/sigmascope/prompts/{name}/comparison.html", name=before).status == 404


def test_only_a_prompt_of_the_same_nodes_is_the_one_before(serving: Any, server: Server) -> None:
    for number, graph in enumerate((GRAPH, with_node("Pass"), GRAPH)):
        serving.run(graph, f"prompt-{number}")
    oldest, _, newest = (told["name"] for _, told in server.sent)
    shelf = Shelf(serving.session.folder)
    assert (shelf.before(newest), shelf.before(oldest)) == (oldest, None)


@pytest.mark.parametrize(
    "name", ["", "..", "../secret", "/etc/passwd", "sigmascope-prompt-*", "status", "%2e%2e", "a\0b"]
)
@pytest.mark.parametrize("page", ["", "/report.html", "/comparison.html"])
def test_no_file_but_a_record_is_given(serving: Any, server: Server, name: str, page: str) -> None:
    serving.run(GRAPH)
    (serving.session.folder.parent / "secret.json").write_text('{"secret": 1}')
    answer = server.ask(f"/sigmascope/prompts/{{name}}{page}", name=name)
    assert (answer.status, "secret" in answer.body) == (404, False)


def test_a_damaged_record_is_left_out_of_the_list_and_named_when_asked_for(
    serving: Any, server: Server
) -> None:
    serving.run(GRAPH)
    (serving.session.folder / "sigmascope-prompt-0.json").write_text("{")
    assert len(json.loads(server.ask("/sigmascope/prompts").body)["prompts"]) == 1
    answer = server.ask("/sigmascope/prompts/{name}", name="sigmascope-prompt-0")
    assert answer.status == 500
    assert "error" in json.loads(answer.body)


def test_records_of_an_earlier_start_are_listed(watch: Watch, server: Server) -> None:
    earlier = watch()
    earlier.run(GRAPH)
    routes.serve(Session(earlier.session.folder), server)
    assert len(json.loads(server.ask("/sigmascope/prompts").body)["prompts"]) == 1


def test_a_record_that_is_gone_is_no_longer_listed(serving: Any, server: Server) -> None:
    serving.run(GRAPH)
    assert len(json.loads(server.ask("/sigmascope/prompts").body)["prompts"]) == 1
    for file in serving.session.folder.glob("sigmascope-prompt-*.json"):
        file.unlink()
    assert json.loads(server.ask("/sigmascope/prompts").body)["prompts"] == []


def test_a_page_that_cannot_be_told_costs_nobody_else_the_record(serving: Any, server: Server) -> None:
    def refuse(event: str, data: Any, sid: str | None = None) -> None:
        raise RuntimeError("planted")

    heard: list[str] = []
    server.send_sync = refuse  # type: ignore[method-assign]
    serving.session.listeners.append(lambda run, path: heard.append(run.name))
    serving.run(GRAPH, "prompt-1")
    serving.run(GRAPH, "prompt-2")
    assert len(heard) == 2
    assert len(list(serving.session.folder.glob("sigmascope-prompt-*.json"))) == 2


def marks(run: Run) -> dict[str, tuple[str, list[str]]]:
    return {node["id"]: (node["mark"], node["reasons"]) for node in view_of(run, "x")["nodes"]}


def test_signs_follow_what_became_of_nodes(serving: Any, host: Host) -> None:
    host.nodes["Spoil"] = Node(("LATENT",), lambda x: (latent(float("nan")),))
    told = marks(serving.run(with_node("Spoil")))
    assert (told["3"], told["4"][0]) == (("good", []), "bad")
    assert "NaN begins" in told["4"][1][0]
    failed = marks(serving.run(with_node("Fail"), "prompt-2"))
    assert failed["4"] == ("bad", ["ValueError: a cat was planted"])


def test_a_fallback_to_tiles_is_a_warning(serving: Any, host: Host) -> None:
    host.nodes["Decode"] = Node(("LATENT",), lambda x: (host.module("comfy.sd").VAE().decode(True),))
    assert Tiles.name not in serving.off()
    mark, (reason,) = marks(serving.run(with_node("Decode")))["4"]
    assert (mark, "fell back to tiles" in reason) == ("warning", True)


@pytest.mark.parametrize(
    ("effective", "mark"),
    [(True, "good"), (False, "bad"), (None, "warning")],
    ids=["acts", "idle", "unknown"],
)
def test_a_lora_s_verdict_is_said_on_its_node(effective: bool | None, mark: str) -> None:
    verdict = {"effective": effective, "says": f"{PAYLOAD}.safetensors: 0 of 3 modules used"}
    facts = {"node": {"id": "2", "class_type": "LoraLoader"}, "lora_verdicts": [verdict]}
    table = [{**facts["node"], "title": PAYLOAD, "parent": None, "state": "run", "seconds": 1.0}]  # type: ignore[dict-item]
    run = Run(
        "1",
        "x",
        "2026-01-02T03:04:05+00:00",
        2.0,
        stages=(Stage("LoraLoader", 0.0, 1.0, facts=facts),),
        facts={"comfyui": {"prompt_id": "p", "nodes": table}},
    )
    (node,) = view_of(run, "x")["nodes"]
    assert (node["mark"], node["reasons"]) == (mark, [f"LoRA {verdict['says']}"])
    assert node["title"] == PAYLOAD


@pytest.mark.parametrize(("effective", "mark"), [(True, "good"), (False, "bad")])
def test_a_kept_loader_has_the_mark_that_it_had_when_it_ran(effective: bool, mark: str) -> None:
    kept = {"node": "2", "effective": effective, "says": "a: kept from prompt 1: 0 of 3 modules used"}
    row = {"title": None, "parent": None, "state": "cached", "seconds": None}
    table = [{"id": id, "class_type": "LoraLoader", **row} for id in ("1", "2")]
    facts = {"comfyui": {"prompt_id": "p", "nodes": table, "loras_kept": [kept]}}
    run = Run("1", "x", "2026-01-02T03:04:05+00:00", 2.0, stages=(), facts=facts)
    view = view_of(run, "x")
    said = [(node["mark"], node["reasons"]) for node in view["nodes"]]
    assert said == [("good", []), (mark, [f"LoRA {kept['says']}"])]
    assert view["mark"] == mark


def test_nodes_of_the_browser_s_subgraphs_add_up_in_the_node_that_stands_for_them() -> None:
    table = [
        {"id": node, "class_type": "A", "title": None, "parent": None, "state": "run", "seconds": seconds}
        for node, seconds in (("5:1", 1.0), ("5:2:7", 2.0), ("6", 4.0))
    ]
    stages = tuple(
        Stage(
            "A",
            0.0,
            float(row["seconds"]),  # type: ignore[arg-type]
            facts={"node": row, "A": {"findings": [{"severity": "error", "message": "planted"}]}},
        )
        for row in table[1:]
    )
    run = Run(
        "1",
        "x",
        "2026-01-02T03:04:05+00:00",
        7.0,
        stages=(Stage("A", 0.0, 1.0, facts={"node": table[0]}), *stages),
        facts={"comfyui": {"prompt_id": "p", "nodes": table}},
    )
    told = {one["id"]: (one["time"], one["mark"]) for one in view_of(run, "x")["subgraphs"]}
    assert told == {"5": ("3.00 s", "bad"), "5:2": ("2.00 s", "bad")}


def test_the_workflow_is_known_by_its_id(serving: Any, server: Server, host: Host) -> None:
    host.prompt(GRAPH, "prompt-1", {"extra_pnginfo": {"workflow": {"id": "w", "nodes": []}}})
    host.prompt(GRAPH, "prompt-2", {"extra_pnginfo": {"workflow": "none"}})
    serving.records()
    assert [told["workflow"] for _, told in server.sent] == ["w", None]


def test_scripts_and_style_are_in_the_package_and_use_no_markup() -> None:
    folder = Path(sigmascope.__file__).parent / "integrations" / "comfyui" / "web"
    names = {file.name for file in folder.iterdir()}
    assert names == {"sigmascope.js", "badges.js", "tab.js", "elements.js", "sigmascope.css"}
    scripts = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.js"))
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http://",
        "https://",
    ):
        assert way not in scripts


class Begun:
    """What `loader.load` finds of ComfyUI."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Any, folder: Path) -> None:
        module = ModuleType("server")
        vars(module)["PromptServer"] = SimpleNamespace(instance=server)
        monkeypatch.setitem(sys.modules, "server", module)
        monkeypatch.setenv("SIGMASCOPE_COMFYUI_RECORDS", str(folder))


@pytest.fixture
def begin(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from sigmascope.integrations.comfyui import session

    def begun(server: Any) -> loader.Pack:
        Begun(monkeypatch, server, tmp_path)
        return loader.load()

    yield begun
    session.stop()


def test_the_loader_gives_nodes_and_the_folder_of_scripts(begin: Any, server: Server) -> None:
    pack = begin(server)
    assert (
        set(pack.nodes)
        == set(pack.titles)
        == {f"Sigmascope{n}" for n in ("LoraVerdict", "TensorDump", "Report")}
    )
    assert pack.web is not None
    assert (Path(pack.web) / "sigmascope.js").is_file()
    assert len(server.handlers) == 4


def test_a_second_copy_of_the_loader_does_nothing(
    begin: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    from sigmascope.integrations.comfyui import session

    begin(server)
    watching = session.current()
    assert watching is not None
    listeners = list(watching.listeners)
    assert begin(server) == loader.Pack({}, {}, None)
    assert watching.listeners == listeners
    assert "twice" in caplog.text


def test_without_a_server_to_show_them_prompts_are_watched_all_the_same(begin: Any) -> None:
    from sigmascope.integrations.comfyui import session

    pack = begin(None)
    assert (pack.web, len(pack.nodes)) == (None, 3)
    assert session.current() is not None


def test_switched_off_there_are_nodes_alone(
    begin: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMASCOPE", "0")
    pack = begin(server)
    assert (pack.web, len(pack.nodes), server.handlers) == (None, 3, {})
