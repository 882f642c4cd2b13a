"""A real ComfyUI, started as a process: workflows are posted over HTTP, and the records are held to what was planted."""

import json
import time
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.comfyui.graphs import SLEEP, graph
from tests.integrations.comfyui.server import Server, node, serving, states

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.integrations.comfyui.one_line import line_of
from sigmascope.records.failures import outcome_of

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


def test_pictures_are_those_of_the_bare_server_and_the_record_adds_up(base: Path) -> None:
    with serving(base) as server:
        server.watch("look")  # ComfyUI's own first prompt takes time before its first node
        prompt_id = server.prompt(graph())
        run, (watched,) = server.record(prompt_id), server.pictures(prompt_id)
        again = [server.run(graph(seed=seed)) for seed in range(2, 6)]  # other processes only add to one
    with serving(base, SIGMASCOPE="0") as bare:
        (picture,) = bare.pictures(bare.prompt(graph()))
        assert not bare.records.exists()
    assert picture == watched
    assert run.facts["comfyui"]["instruments_off"] == {}
    assert any(
        one.facts["comfyui"]["seconds_of_no_node"] < max(0.02, 0.01 * one.seconds) for one in (run, *again)
    )
    sampler = node(run, "6")
    told = {"sampler": "euler", "scheduler": "normal", "steps": 2, "cfg": 5.0, "seed": 1, "denoise": 1.0}
    assert sampler.facts["sampling"] == {**told, "latent": [1, 4, 8, 8], "unavailable": {}}
    assert len(sampler.steps) == 2
    checkpoint = base / "models" / "checkpoints" / "tiny.safetensors"
    (read,) = node(run, "1").facts["files"]
    assert (read["file"], read["from"], read["bytes"]) == (checkpoint.name, "disk", checkpoint.stat().st_size)
    assert node(run, "3").facts["text_encoding"]["conditioning"]["shape"] == [1, 77, 768]
    assert node(run, "7").facts["vae"]["tensors"] == {"latent": [1, 4, 8, 8], "pictures": [1, 64, 64, 3]}


def test_a_lora_is_judged_by_the_weights(server: Server) -> None:
    (good,) = node(server.run(graph(seed=2, strength=0.7)), "2").facts["lora_verdicts"]
    (zero,) = node(server.run(graph(seed=2, strength=0.0)), "2").facts["lora_verdicts"]
    (other,) = node(server.run(graph(seed=2, lora="other")), "2").facts["lora_verdicts"]
    assert good["effective"] is True
    assert good["modules_used"] == good["modules"] > 0
    assert zero["effective"] is False
    assert "both strengths are 0" in zero["says"]
    assert (other["effective"], other["modules_used"], other["modules"]) == (False, 0, 1)


@pytest.mark.parametrize(
    ("lora", "kind", "used", "of", "says"),
    [
        ("text", "", 12, 12, "it changes the text encoder only"),
        ("text", "model only", 0, 12, "a text encoder that was not given"),
        ("text", "not wired", 0, 12, "no node takes the text encoder"),
        ("flux", "", 0, 19, "the file is for FLUX by its names, the model is Stable Diffusion 1.5"),
        ("half", "", 3, 7, "4 of 7 modules have an unknown prefix before a name that the model has"),
        ("zeros", "", 0, 7, "all its changes are zero"),
    ],
)
def test_a_lora_that_does_nothing_or_half_is_told_by_kind(
    server: Server, lora: str, kind: str, used: int, of: int, says: str
) -> None:
    nodes = graph(lora=lora, seed=5)
    if kind:
        nodes["3"]["inputs"]["clip"] = ["1", 1]
    if kind == "model only":
        nodes["2"]["class_type"] = "LoraLoaderModelOnly"
        del nodes["2"]["inputs"]["clip"], nodes["2"]["inputs"]["strength_clip"]
    (verdict,) = node(server.run(nodes), "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (used > 0, used, of)
    assert f"{used} of {of} modules used" in verdict["says"]
    assert says in verdict["says"]


def test_what_is_planted_is_found_where_it_was_planted(server: Server) -> None:
    server.run(graph())
    again = server.run(graph())
    assert set(states(again).values()) == {"cached"}
    (kept,) = again.facts["comfyui"]["loras_kept"]
    assert "good.safetensors: kept from prompt " in kept["says"]
    assert "7 of 7 modules used" in kept["says"]
    slept = server.run(graph("PlantedSubgraph"))
    assert [child.name for child in node(slept, "9").children] == ["PlantedSleep", "PlantedSleep"]
    assert node(slept, "9").seconds >= sum(child.seconds for child in node(slept, "9").children) >= 2 * SLEEP
    assert SLEEP <= node(server.run(graph("PlantedAsync")), "9").seconds < 3 * SLEEP
    held = node(server.run(graph("PlantedAllocation")), "9")
    assert held.memory is not None
    assert held.peak is not None
    before, peak = held.memory.baseline.process_rss_bytes, held.peak.rss_bytes
    assert peak is not None
    assert before is not None
    assert peak - before > 190 * 2**20
    nan = server.run(graph("PlantedNan")).facts["comfyui"]["first_odd_output"]
    assert nan == {"what": "NaN", "node": "9", "class_type": "PlantedNan", "output": 0}
    failed = server.run(graph("PlantedFailure"))
    assert (states(failed)["9"], states(failed)["7"]) == ("error", "not run")
    assert node(failed, "9").error == "ValueError: planted"
    assert (outcome_of(failed.stages), failed.complete) == ("failed", True)
    assert headline(failed).startswith("PlantedFailure failed after ")
    tiles = node(server.run(graph("PlantedOutOfMemory")), "7").facts["tiled"]
    assert tiles[0]["fallback"]


def test_an_interrupted_prompt_is_a_record_and_the_next_one_runs(server: Server) -> None:
    long = graph("PlantedSleep", seed=3)
    long["6"]["inputs"]["steps"] = 500
    prompt_id = server.ask("/prompt", {"prompt": long})["prompt_id"]
    for _ in range(1000):
        if any(item[1] == prompt_id for item in server.ask("/queue")["queue_running"]):
            break
        time.sleep(0.02)
    time.sleep(2.0)
    urllib.request.urlopen(f"http://127.0.0.1:{server.port}/interrupt", b"", timeout=20).read()
    run = server.run(graph(seed=4))
    assert states(run)["6"] == "run"
    (stopped,) = server.records.glob(f"*-{prompt_id[:8]}.json")
    interrupted = sigmascope.load_run(stopped)
    assert states(interrupted)["6"] == "interrupted"
    assert outcome_of(interrupted.stages) == "interrupted"


def test_of_two_prompts_in_the_queue_the_second_has_waited_and_no_record_is_mixed(server: Server) -> None:
    slow, next_one = graph("PlantedSleep", seed=51), graph("PlantedSubgraph", seed=52)
    slow["9"]["inputs"]["seconds"] = 1.5
    first, posted = server.post(slow), time.time()
    second = server.post(next_one)
    for prompt_id in (first, second):
        server.wait_for(prompt_id)
    one, other = server.record(first), server.record(second)
    waited = other.facts["comfyui"]["seconds_before"]["queue"]
    assert 1.5 <= waited <= datetime.fromisoformat(other.started_at).timestamp() - posted
    assert one.facts["comfyui"]["seconds_before"]["queue"] < 1.0
    assert "in the queue before" in line_of(other)
    assert node(one, "9").children == ()
    assert [child.name for child in node(other, "9").children] == ["PlantedSleep", "PlantedSleep"]
    seeds = {run.id: node(run, "6").facts["sampling"]["seed"] for run in (one, other)}
    assert seeds == {one.id: 51, other.id: 52}


def test_what_a_page_hears_of_a_prompt_is_what_the_record_has(server: Server) -> None:
    sockets = pytest.importorskip("websockets.sync.client")
    with sockets.connect(f"ws://127.0.0.1:{server.port}/ws?clientId=me", max_size=2**26) as socket:
        prompt_id = server.post(graph("PlantedFailure", seed=53), client_id="me")
        told: list[dict[str, Any]] = []
        while not any(message["type"] == "sigmascope.prompt" for message in told):
            text = socket.recv(timeout=60)
            if isinstance(text, str):
                told.append(json.loads(text))
    run = server.record(prompt_id)
    started = [message["data"]["node"] for message in told if message["type"] == "executing"]
    ran = sorted(
        (stage for stage in run.walk() if "node" in stage.facts), key=lambda stage: stage.started_seconds
    )
    assert [stage.facts["node"]["id"] for stage in ran] == [name for name in started if name is not None]
    (failed,) = (message["data"] for message in told if message["type"] == "execution_error")
    assert failed["node_id"] == run.facts["comfyui"]["stopped_by"]["node"] == "9"
    (ours,) = (message["data"] for message in told if message["type"] == "sigmascope.prompt")
    assert (ours["prompt_id"], ours["mark"]) == (prompt_id, "bad")
    kinds = [message["type"] for message in told]
    assert kinds.index("execution_error") < kinds.index("sigmascope.prompt")


def test_of_a_second_prompt_settings_that_changed_are_told_first_then_times(server: Server) -> None:
    server.run(graph("PlantedSleep", seed=54))
    nodes = graph("PlantedSleep", seed=55)
    nodes["6"]["inputs"] |= {"scheduler": "karras", "cfg": 6.0}
    nodes["3"]["inputs"]["text"] = "a dog"
    changed = server.run(nodes).facts["comfyui"]["changed"]
    assert list(changed).index("settings") < list(changed).index("times")
    settings = {(one["node"], one["input"]): (one["was"], one["now"]) for one in changed["settings"]}
    assert settings == {
        ("3", "text"): ("<text>", "<text>"),
        ("6", "cfg"): (5.0, 6.0),
        ("6", "scheduler"): ("normal", "karras"),
        ("6", "seed"): (54, 55),
    }
    times = {one["node"]: (one["was_seconds"], one["now_seconds"]) for one in changed["times"]}
    assert min(times["9"]) >= SLEEP
    assert changed["files_read_now"] is False
