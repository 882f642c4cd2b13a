"""Nodes of other packs that do what ComfyUI's own do not."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.test_nodes import GRAPH, nodes, states, with_node

from sigmascope.integrations.comfyui.one_line import line_of
from sigmascope.integrations.comfyui.recording import FACTS, PromptRecording
from sigmascope.records.serialization import load_run
from sigmascope.reports.html import to_html


def in_a_thread(act: Any) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_node_that_runs_a_prompt_of_its_own_gives_two_records_that_are_not_mixed(
    watch: Watch, host: Host
) -> None:
    spoiled = {
        **with_node("Spoil"),
        "1": {"class_type": "Load", "inputs": {"ckpt_name": "inner.safetensors"}},
    }

    def run_another(x: Any) -> Any:
        here = host.here
        host.cache.clear()
        in_a_thread(lambda: host.prompt(spoiled, "inner"))
        host.here = here
        return (x,)

    host.nodes["Another"] = Node(("LATENT",), run_another)
    host.nodes["Spoil"] = Node(("LATENT",), lambda x: ({"samples": x["samples"] * float("nan")},))
    watched = watch()
    watched.run({**with_node("Another"), "5": {"class_type": "Pass", "inputs": {"x": ["4", 0]}}}, "outer")
    records = {run.facts["comfyui"]["prompt_id"]: run for run in watched.records()}
    assert records.keys() == {"outer", "inner"}
    assert states(records["outer"]) == dict.fromkeys("12345", "run")
    assert states(records["inner"]) == dict.fromkeys("1234", "run")
    odd = {name: run.facts["comfyui"].get("first_odd_output") for name, run in records.items()}
    assert odd["outer"] is None
    assert odd["inner"]["class_type"] == "Spoil"
    read = {name: nodes(run)["1"].facts["files"][0]["file"] for name, run in records.items()}
    assert read == {"outer": "model.safetensors", "inner": "inner.safetensors"}


@pytest.mark.slow
def test_a_loop_that_expands_again_and_again_is_a_record(watch: Watch, host: Host, tmp_path: Path) -> None:
    def loop(x: Any, turns: int) -> Any:
        if not turns:
            return (x,)
        inner = {"class_type": "Loop", "inputs": {"x": x, "turns": turns - 1}}
        return {"expand": {"a": inner}, "last": "a"}

    host.nodes["Loop"] = Node(("LATENT",), loop)
    watched = watch()
    run = watched.run({"1": {"class_type": "Loop", "inputs": {"x": 1, "turns": 450}}})
    assert watched.off() == {}
    assert len(nodes(run)) == 451
    deepest = nodes(run)["1" + ".0.0.a" * 450]
    assert deepest.facts["node"]["parent"] == "1" + ".0.0.a" * 449
    (saved,) = tmp_path.glob("sigmascope-prompt-*.json")
    assert load_run(saved).id == run.id
    assert "Loop" in line_of(run)
    assert "Loop" in to_html(run)


def test_bars_that_threads_move_at_once_are_heard(watch: Watch, host: Host) -> None:
    def sample(latent_image: Any, **_: Any) -> Any:
        bar = host.module("comfy.utils").ProgressBar(400, "3")
        numbers = iter(range(1, 401))
        threads = [
            threading.Thread(target=lambda: [bar.update_absolute(next(numbers)) for _ in range(100)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (latent_image,)

    host.nodes["Sampler"] = Node(("LATENT",), sample)
    watched = watch()
    watched.run(GRAPH)
    assert watched.off() == {}


def test_a_bar_that_a_thread_goes_on_moving_is_not_the_next_node_s(watch: Watch, host: Host) -> None:
    """A download that goes on in the background, say: its bar told of steps of the sampler that came next."""
    main = threading.main_thread()
    host.module("comfy_execution.utils").get_executing_context = lambda: (
        host.here if threading.current_thread() is main else None
    )
    bar = host.module("comfy.utils").ProgressBar(1000)

    def move(*places: int) -> None:
        in_a_thread(lambda: [bar.update_absolute(place) for place in places])

    def start() -> Any:
        move(1, 2, 3)
        return (latent(),)

    def sample(latent_image: Any, steps: int, **_: Any) -> Any:
        move(4, 5, 6)
        host.step_through(steps)
        move(7, 8)
        return (latent(),)

    host.nodes |= {"Empty": Node(("LATENT",), start), "Sampler": Node(("LATENT",), sample)}
    watched = watch()
    first = nodes(watched.run(GRAPH))
    assert (first["2"].facts["progress"], len(first["3"].steps)) == ({"done": 3, "of": 1000}, 3)
    changed = {**GRAPH, "3": {**GRAPH["3"], "inputs": {**GRAPH["3"]["inputs"], "seed": 8}}}
    assert len(nodes(watched.run(changed, "prompt-2"))["3"].steps) == 3


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", torch.tensor([1, 2])])
@pytest.mark.parametrize("total", [3, None, float("inf"), float("nan")])
def test_a_bar_that_stands_nowhere_is_not_heard(watch: Watch, host: Host, value: Any, total: Any) -> None:
    def sample(latent_image: Any, **_: Any) -> Any:
        host.module("comfy.utils").ProgressBar(total).update_absolute(value, total)
        return (latent(),)

    host.nodes["Sampler"] = Node(("LATENT",), sample)
    host.module("comfy.utils").ProgressBar.update_absolute = lambda self, value, total=None, preview=None: (
        None
    )
    watched = watch()
    watched.run(GRAPH)
    assert watched.off() == {}


def test_what_ends_comfyui_s_worker_is_in_the_record(watch: Watch, host: Host) -> None:
    def stop(x: Any) -> Any:
        raise KeyboardInterrupt

    host.nodes["Stop"] = Node(("LATENT",), stop)
    watched = watch()
    with pytest.raises(KeyboardInterrupt):
        host.prompt(with_node("Stop"))
    (run,) = watched.records()
    assert states(run)["4"] == "error"
    assert nodes(run)["4"].error == "KeyboardInterrupt"


@pytest.mark.parametrize("prompt_id", ["../../up", "a/b", "", "\x00\ud800", "a b"])
def test_an_id_that_is_no_file_s_name_is_a_record_all_the_same(
    watch: Watch, tmp_path: Path, prompt_id: str
) -> None:
    run = watch().run(GRAPH, prompt_id)
    assert run.facts["comfyui"]["prompt_id"] == prompt_id
    (saved,) = tmp_path.rglob("*prompt-*.json")
    assert saved.parent == tmp_path


@pytest.mark.parametrize("node_id", ["a/b", "<script>alert(1)</script>", "\ud800", "1:2:3", "", "ä \n"])
def test_a_node_s_id_may_be_any_text(watch: Watch, tmp_path: Path, node_id: str) -> None:
    graph = {node_id: GRAPH["2"], "3": {"class_type": "Pass", "inputs": {"x": [node_id, 0]}}}
    run = watch().run(graph)
    assert states(run) == {node_id: "run", "3": "run"}
    assert "<script>alert" not in to_html(run)
    assert list(tmp_path.glob("sigmascope-prompt-*.json"))


def test_a_record_that_cannot_be_made_costs_no_other(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch()
    with monkeypatch.context() as patch:
        patch.setattr(PromptRecording, "run", lambda _: 1 / 0)
        watched.host.prompt(GRAPH, "first")
    assert watched.run(GRAPH, "second").facts["comfyui"]["prompt_id"] == "second"
    assert watched.off() == {}


@pytest.mark.parametrize(
    "kind", [*sorted(FACTS), "generation", "denoising", "steps", "a/b: c", "", "💥", "x" * 600, "\ud800"]
)
def test_a_class_may_have_any_name(watch: Watch, host: Host, tmp_path: Path, kind: str) -> None:
    host.nodes["Noise"] = Node(("LATENT",), lambda: (latent(),))
    host.nodes[kind] = Node(("LATENT",), lambda x: ({"samples": x["samples"] * float("nan")},))
    graph = {
        "1": {"class_type": "Noise", "inputs": {}},
        "2": {"class_type": kind, "inputs": {"x": ["1", 0]}},
    }
    watched = watch()
    run = watched.run(graph)
    assert watched.off() == {}
    assert states(run) == {"1": "run", "2": "run"}
    assert run.facts["comfyui"]["first_odd_output"]["node"] == "2"
    assert [finding.id for finding in run.findings].count("comfyui.odd_output") == 1
    assert len(run.stages) == 1
    (saved,) = tmp_path.glob("sigmascope-prompt-*.json")
    assert states(load_run(saved)) == states(run)
    assert to_html(run)
    assert line_of(run)
