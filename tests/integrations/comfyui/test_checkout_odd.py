"""A real ComfyUI with odd nodes, graphs and options, as users have them."""

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.comfy_shapes.checkout import VARIABLE
from tests.integrations.comfyui.graphs import Graph, graph
from tests.integrations.comfyui.server import (
    Server,
    add_nodes,
    add_odd_nodes,
    node,
    python,
    serving,
    states,
)

from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run
from sigmascope.reports.html import to_html
from sigmascope.reports.markdown import to_markdown

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
EMPTY: Graph = {
    "1": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
}


def new_base(base: Path, folder: Path, pack: str) -> Path:
    """A base folder with a blank in its name, the same models, and a pack of odd nodes."""
    new = folder / "a base"
    new.mkdir()
    add_nodes(new, "sigmascope")
    add_odd_nodes(new, pack)
    (new / "models").symlink_to(base / "models")
    for name in ("input", "output"):
        (new / name).mkdir()
    return new


@pytest.fixture(scope="module")
def odd(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with odd nodes, of which one pack wrapped ComfyUI's functions before ours did."""
    new = new_base(base, tmp_path_factory.mktemp("odd"), "0 odd nodes that wraps")
    with serving(new) as server:
        yield server


def chain(*kinds: str, last: str = "OddEnd", **inputs: Any) -> Graph:
    """Nodes one after the other, of which the first gets these inputs too."""
    nodes = dict(EMPTY)
    for number, kind in enumerate((*kinds, last), 2):
        own = inputs if number == 2 else {}
        nodes[str(number)] = {"class_type": kind, "inputs": {"x": [str(number - 1), 0], **own}}
    return nodes


def pixels(server: Server, prompt_id: str) -> list[bytes]:
    """What a prompt saved, without the graph that ComfyUI writes into each file."""
    return [Image.open(BytesIO(picture)).tobytes() for picture in server.pictures(prompt_id)]


def is_whole(run: Run) -> bool:
    return run.complete and run.facts["comfyui"]["instruments_off"] == {}


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("OddList", {}),
        ("OddTakesList", {}),
        ("OddChanged", {}),
        ("OddThreads", {}),
        ("OddNew", {"choice": "this"}),
    ],
)
def test_an_odd_node_is_a_stage_like_any_other(odd: Server, kind: str, inputs: dict[str, Any]) -> None:
    run = odd.run(chain(kind, "Odd", **inputs))
    assert is_whole(run)
    assert set(states(run).values()) <= {"run", "cached"}
    assert {number: states(run)[number] for number in "234"} == dict.fromkeys("234", "run")
    if kind == "OddNew":
        assert node(run, "2").seconds >= 0.1
    if kind == "OddThreads":
        assert [file["file"] for file in node(run, "2").facts["files"]] == ["good.safetensors"] * 4


def test_a_lazy_node_runs_what_it_asks_for_alone(odd: Server) -> None:
    nodes = {
        **EMPTY,
        "2": {"class_type": "Odd", "inputs": {"x": ["1", 0]}},
        "3": {"class_type": "OddChanged", "inputs": {"x": ["1", 0]}},
        "4": {"class_type": "OddLazy", "inputs": {"first": False, "a": ["2", 0], "b": ["3", 0]}},
        "5": {"class_type": "OddEnd", "inputs": {"x": ["4", 0]}},
    }
    run = odd.run(nodes)
    assert is_whole(run)
    assert (states(run)["3"], states(run)["4"]) == ("run", "run")
    assert states(run)["2"] in ("not run", "cached")
    assert [stage.name for stage in run.stages[0].children].count("OddLazy") == 1


@pytest.mark.parametrize("says", ["", "this is switched off"])
def test_what_a_node_keeps_from_running_did_not_run(odd: Server, says: str) -> None:
    run = odd.run(chain("OddBlock", "Odd", says=says))
    assert is_whole(run)
    assert {number: states(run)[number] for number in "234"} == {"2": "run", "3": "blocked", "4": "blocked"}


def test_of_a_list_of_latents_each_is_sampled_and_every_step_counted(odd: Server) -> None:
    nodes = graph(seed=61)
    nodes["9"] = {"class_type": "OddList", "inputs": {"x": ["5", 0]}}
    nodes["6"]["inputs"]["latent_image"] = ["9", 0]
    sampler = node(odd.run(nodes), "6")
    assert len(sampler.steps) == 3 * nodes["6"]["inputs"]["steps"]
    assert "steps" not in sampler.unavailable


def test_nan_that_a_node_left_in_what_comfyui_kept_is_found_there(odd: Server) -> None:
    nodes = {**EMPTY, "2": {"class_type": "OddSpoil", "inputs": {"x": ["1", 0]}}}
    nodes["1"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 72, "batch_size": 1}}
    end = {"class_type": "OddEnd", "inputs": {"x": ["2", 0]}}
    first = odd.run({**nodes, "3": end}).facts["comfyui"]["first_odd_output"]
    assert (first["node"], first.get("kept")) == ("2", None)
    nodes["2"] = {"class_type": "Odd", "inputs": {"x": ["1", 0]}}
    again = odd.run({**nodes, "3": end}).facts["comfyui"]["first_odd_output"]
    assert (again["what"], again["node"], again["kept"], again["taken_by"]) == ("NaN", "1", True, "2")


def test_a_loop_of_many_turns_is_a_record_that_shows_where_memory_grows(odd: Server) -> None:
    """Comfy-Org/ComfyUI issue 4646: "RAM overflow in cycles": what a loop makes stays until the prompt's end."""
    turns, mib = 100, 4
    run = odd.run(chain("OddLoop", turns=turns, mib=mib))
    assert is_whole(run)
    ran = [stage for stage in run.walk() if stage.name == "OddHold"]
    assert len(ran) == turns
    grown = [
        (stage.memory.current.process_rss_bytes or 0) - (stage.memory.baseline.process_rss_bytes or 0)
        for stage in ran
        if stage.memory is not None
    ]
    assert sum(size > 0.9 * mib * 2**20 for size in grown) > 0.9 * turns
    assert "OddLoop" in to_html(run)


def test_a_node_that_runs_a_prompt_of_its_own_gives_two_records(odd: Server) -> None:
    outer = odd.run(chain("OddExecutor", "Odd"))
    inner = odd.record("inner")
    assert is_whole(outer)
    assert {number: states(outer)[number] for number in "234"} == dict.fromkeys("234", "run")
    assert inner.facts["comfyui"]["prompt_id"] == "inner"
    assert states(inner) == {"1": "run", "2": "run"}


def test_of_a_prompt_that_runs_again_without_a_change_the_node_that_asked_for_it_is_seen(odd: Server) -> None:
    """capitan01R/ComfyUI-Krea2T-Enhancer issue 2: "node re-executes every time even with fixed seed"."""
    nodes = chain("Odd", "OddChanged", "OddList", "Odd")
    odd.run(nodes)
    run = odd.run(nodes)
    ran = [stage.facts["node"]["id"] for stage in run.stages[0].children]
    assert (states(run)["2"], ran[0], set(ran)) == ("cached", "3", set("3456"))
    assert run.facts["comfyui"]["changed"]["settings"] == []


def test_a_node_that_interrupts_is_named(odd: Server) -> None:
    run = odd.run(chain("OddInterrupt", "Odd"))
    assert (states(run)["2"], states(run)["3"]) == ("interrupted", "not run")
    assert run.facts["comfyui"]["stopped_by"]["how"] == "execution_interrupted"


@pytest.mark.parametrize("node_id", ["a/b c", "<img src=x onerror=alert(1)>", "ü\n", "1:2"])
def test_a_node_s_id_may_be_any_text(odd: Server, node_id: str) -> None:
    nodes = {
        node_id: {"class_type": "OddChanged", "inputs": {"x": ["1", 0]}},
        "3": {"class_type": "OddEnd", "inputs": {"x": [node_id, 0]}},
        **EMPTY,
    }
    run = odd.run(nodes)
    assert is_whole(run)
    assert states(run)[node_id] == "run"
    assert "<img src=x" not in to_html(run)


def test_of_a_prompt_that_runs_in_part_the_rest_is_not_run(odd: Server) -> None:
    """yolain/ComfyUI-Easy-Use issue 844: "partial execution does not seem to work" beside another pack."""
    nodes = {
        **EMPTY,
        "2": {"class_type": "OddChanged", "inputs": {"x": ["1", 0]}},
        "3": {"class_type": "OddEnd", "inputs": {"x": ["2", 0]}},
        "4": {
            "class_type": "OddText",
            "inputs": {"x": ["1", 0], "one_line": "", "lines": "", "choice": "this"},
        },
        "5": {"class_type": "OddEnd", "inputs": {"x": ["4", 0]}},
    }
    prompt_id = odd.post(nodes, partial_execution_targets=["3"])
    odd.wait_for(prompt_id)
    run = odd.record(prompt_id)
    assert is_whole(run)
    assert {number: states(run)[number] for number in "2345"} == {
        "2": "run",
        "3": "run",
        "4": "not run",
        "5": "not run",
    }


def test_words_in_inputs_of_any_name_stay_out_of_reports(odd: Server) -> None:
    words = {"one_line": "Xylophonist", "lines": "Zeppelinist", "choice": "that"}
    run = odd.run(chain("OddText", **words))
    values = {name: value for number, name, value in run.facts["comfyui"]["graph"]["values"] if number == "2"}
    assert values["choice"] == "that"
    assert all("sha256" in values[name] for name in ("one_line", "lines"))
    for text in (to_html(run), to_markdown(run)):
        assert "ylophonist" not in text
        assert "eppelinist" not in text


@pytest.mark.parametrize("kind", ["OddLoras", "OddLorasBackwards"])
def test_several_loras_of_one_node_are_judged_one_by_one(odd: Server, kind: str) -> None:
    """rgthree/rgthree-comfy issue 367: "in some cases, the LoRAs have no effect on the resulting image whatsoever"."""
    nodes = graph(seed=61)
    switched = {"good": True, "zeros": True, "flux": False, "text": True}
    loras = {
        f"lora_{name}": {"on": on, "lora": f"{name}.safetensors", "strength": 0.7}
        for name, on in switched.items()
    }
    nodes["2"] = {"class_type": kind, "inputs": {"model": ["1", 0], "clip": ["1", 1], **loras}}
    run = odd.run(nodes)
    verdicts = {one["lora"]: one for one in node(run, "2").facts["lora_verdicts"]}
    told = {name: (one["effective"], one["modules_used"], one["modules"]) for name, one in verdicts.items()}
    assert told == {
        "good.safetensors": (True, 7, 7),
        "zeros.safetensors": (False, 0, 7),
        "text.safetensors": (True, 12, 12),
    }


def test_with_another_seed_the_lora_of_the_kept_loader_is_named(odd: Server) -> None:
    odd.run(graph(seed=71, strength=0.71))
    run = odd.run(graph(seed=72, strength=0.71))
    assert states(run)["2"] == "cached"
    (kept,) = run.facts["comfyui"]["loras_kept"]
    assert (kept["node"], kept["effective"], kept["modules_used"], kept["modules"]) == ("2", True, 7, 7)


@pytest.mark.parametrize("way", ["switch", "merge"])
def test_a_lora_whose_model_no_step_is_made_with_does_nothing(odd: Server, way: str) -> None:
    """The picture is that of the same graph without the LoRA."""
    models = {"a": ["2", 0], "b": ["1", 0]} if way == "switch" else {"model1": ["2", 0], "model2": ["1", 0]}
    kind = {"class_type": "OddSwitch" if way == "switch" else "ModelMergeSimple"}
    setting = {"first": False} if way == "switch" else {"ratio": 0.0}
    nodes = graph(seed=73, strength=0.73)
    nodes["3"]["inputs"]["clip"] = ["1", 1]
    nodes["9"] = {**kind, "inputs": {**models, **setting}}
    nodes["6"]["inputs"]["model"] = ["9", 0]
    run = odd.run(nodes)
    (verdict,) = (
        [*node(run, "2").facts["lora_verdicts"]]
        if states(run)["2"] == "run"
        else run.facts["comfyui"]["loras_kept"]
    )
    assert (verdict["effective"], verdict["modules_used"]) == (False, 0)
    without = graph(seed=73)
    del without["2"]
    without["3"]["inputs"]["clip"] = ["1", 1]
    without["6"]["inputs"]["model"] = ["1", 0]
    assert pixels(odd, run.facts["comfyui"]["prompt_id"]) == pixels(odd, odd.prompt(without))


def test_all_steps_of_a_sampler_that_finds_them_itself_are_counted(odd: Server) -> None:
    """Its bar stands at the end after as many as were asked for."""
    nodes = graph(seed=74)
    nodes["6"]["inputs"] |= {"sampler_name": "dpm_adaptive", "steps": 2}
    sampler = node(odd.run(nodes), "6")
    assert len(sampler.steps) > 2
    assert "steps" not in sampler.unavailable
    assert sum(sampler.steps.seconds) > 0.5 * sampler.seconds


def test_of_two_nodes_with_the_same_inputs_one_runs(odd: Server) -> None:
    nodes = chain("OddChanged", "OddList")
    nodes["5"] = nodes["3"]
    nodes["6"] = {"class_type": "OddEnd", "inputs": {"x": ["5", 0]}}
    run = odd.run(nodes)
    assert sorted((states(run)["3"], states(run)["5"])) == ["cached", "run"]


def test_three_hundred_nodes_are_a_record(odd: Server) -> None:
    started = time.time()
    run = odd.run(chain(*["OddChanged"] * 300))
    assert is_whole(run)
    assert list(states(run).values()).count("run") >= 301
    assert time.time() - started < 60
    own = run.facts["comfyui"]["watch"]
    assert sum(one["calls"] for one in own.values()) >= 300


@pytest.mark.parametrize("options", [["--cache-none"], ["--cache-lru", "2"], ["--cache-ram", "1"]])
def test_with_another_cache_records_are_right(base: Path, tmp_path: Path, options: list[str]) -> None:
    help_text = subprocess.run(
        [python(), str(Path(os.environ[VARIABLE]) / "main.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    if options[0] not in help_text:
        pytest.skip(f"this ComfyUI has no {options[0]}")
    new = new_base(base, tmp_path, "odd nodes")
    more = [*options, "--disable-metadata", "--multi-user", "--output-directory", str(tmp_path / "out")]
    # ComfyUI 0.3.64 itself fails at a node that expands, with this option.
    nodes = graph("PlantedAsync" if options[0] == "--cache-none" else "PlantedSubgraph")
    with serving(new, options=more) as server:
        first, again = server.run(nodes), server.run(nodes)
    assert is_whole(first)
    assert is_whole(again)
    assert set(states(first).values()) == {"run"}
    assert states(again)["8"] == ("run" if options[0] == "--cache-none" else "cached")


def test_records_that_cannot_be_written_cost_no_prompt(base: Path, tmp_path: Path) -> None:
    new = new_base(base, tmp_path, "odd nodes")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where a folder is wanted")
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with serving(
        new,
        SIGMASCOPE_COMFYUI_RECORDS=str(blocked / "records"),
        SIGMASCOPE_STORE=str(store / "runs.db"),
        SIGMASCOPE_KEEP="1",
    ) as server:
        prompt_id = server.prompt(graph())
        assert server.wait_for(prompt_id)["status"]["status_str"] == "success"
        assert server.pictures(prompt_id)
        assert server.ask("/sigmascope/prompts")["prompts"] == []
        server.wait_for_log(r"sigmascope: a record was not written .*blocked")


def test_what_ends_the_worker_is_in_the_last_record(base: Path, tmp_path: Path) -> None:
    new = new_base(base, tmp_path, "odd nodes")
    with serving(new) as server:
        prompt_id = server.post(chain("OddExit"))
        run = server.record(prompt_id)
    assert states(run)["2"] == "error"
    assert node(run, "2").error == "KeyboardInterrupt"


def test_a_session_that_is_watched_without_the_loader_has_records(base: Path, tmp_path: Path) -> None:
    new = new_base(base, tmp_path, "odd nodes")
    for file in (new / "custom_nodes" / "sigmascope").iterdir():
        file.unlink()
    (new / "custom_nodes" / "sigmascope").rmdir()
    watched = tmp_path / "watched"
    with serving(new, launcher=["-m", "sigmascope", "watch", "-o", str(watched)]) as server:
        server.prompt(graph())
        for _ in range(500):
            if found := list(watched.glob("sigmascope-prompt-*.json")):
                break
            time.sleep(0.02)
    assert is_whole(load_run(found[0]))
