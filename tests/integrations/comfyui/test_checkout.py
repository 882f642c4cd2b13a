"""A real ComfyUI, started as a process: workflows are posted over HTTP, and the records are held to what was planted.

`SIGMASCOPE_COMFYUI` names the checkout, and `SIGMASCOPE_COMFYUI_PYTHON` a Python with its requirements (else this one).
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.comfy_shapes.checkout import VARIABLE, why_not

import sigmascope
from sigmascope.integrations.comfyui.node_pack import _LOADER
from sigmascope.records.run import Run, Stage

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
HERE = Path(__file__).parent
SLEEP = 0.3
FOUND_IN = Path(sigmascope.__file__).parents[1]


class Server:
    """A ComfyUI that answers."""

    def __init__(self, port: int, base: Path, records: Path) -> None:
        self.port, self.base, self.records = port, base, records

    def ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def prompt(self, graph: dict[str, Any]) -> str:
        """Post a graph, wait for its end, and give its id."""
        prompt_id: str = self.ask("/prompt", {"prompt": graph})["prompt_id"]
        for _ in range(6000):
            if prompt_id in self.ask(f"/history/{prompt_id}"):
                return prompt_id
            time.sleep(0.02)
        raise TimeoutError(prompt_id)

    def run(self, graph: dict[str, Any]) -> Run:
        """The record of a prompt."""
        prompt_id = self.prompt(graph)
        for _ in range(1000):
            if found := list(self.records.glob(f"*-{prompt_id[:8]}.json")):
                return sigmascope.load_run(found[0])
            time.sleep(0.02)
        raise TimeoutError(f"no record of {prompt_id}")


def python() -> str:
    return os.environ.get(f"{VARIABLE}_PYTHON", sys.executable)


@contextmanager
def serving(base: Path, pages: Path | None = None, **variables: str) -> Iterator[Server]:
    """Start the checkout's server, with the pages of a frontend if one is given, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    records = base / f"records-{port}"
    if pages is None:
        pages = base / "pages"
        pages.mkdir(exist_ok=True)
    words = [
        python(),
        str(Path(os.environ[VARIABLE]) / "main.py"),
        "--cpu",
        "--port",
        str(port),
        "--disable-api-nodes",
    ]
    words += [
        "--base-directory",
        str(base),
        "--front-end-root",
        str(pages),
        "--database-url",
        "sqlite:///:memory:",
    ]
    told = {
        "SIGMASCOPE_COMFYUI_RECORDS": str(records),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(FOUND_IN),
        **variables,
    }
    with (base / f"server-{port}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=base, env={**os.environ, **told})
        server = Server(port, base, records)
        try:
            for _ in range(1200):
                assert process.poll() is None, Path(log.name).read_text()[-2000:]
                try:
                    server.ask("/system_stats")
                    break
                except OSError:
                    time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's base folder with tiny models, nodes that plant faults, and our loader."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("comfyui")
    subprocess.run(
        [python(), HERE / "tiny_models.py", os.environ[VARIABLE], base], check=True, capture_output=True
    )
    for name, text in {"planted": (HERE / "planted_nodes.py").read_text(), "sigmascope": _LOADER}.items():
        (base / "custom_nodes" / name).mkdir()
        (base / "custom_nodes" / name / "__init__.py").write_text(text)
    return base


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Server]:
    with serving(base) as server:
        yield server


def graph(planted: str = "", *, seed: int = 1, lora: str = "good", strength: float = 0.8) -> dict[str, Any]:
    """Checkpoint, LoRA, prompts, sampling and decoding; a planted node between the last two."""
    nodes: dict[str, Any] = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
        "2": {
            "class_type": "LoraLoader",
            "inputs": {
                "model": ["1", 0],
                "clip": ["1", 1],
                "lora_name": f"{lora}.safetensors",
                "strength_model": strength,
                "strength_clip": strength,
            },
        },
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["2", 1], "text": "a cat"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "6": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["2", 0],
                "positive": ["3", 0],
                "negative": ["3", 0],
                "latent_image": ["5", 0],
                "seed": seed,
                "steps": 2,
                "cfg": 5.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 2]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "x"}},
    }
    if planted == "PlantedOutOfMemory":
        nodes["9"] = {"class_type": planted, "inputs": {"vae": ["1", 2]}}
        nodes["7"]["inputs"]["vae"] = ["9", 0]
    elif planted:
        nodes["9"] = {"class_type": planted, "inputs": {"x": ["6", 0], "seconds": SLEEP}}
        nodes["7"]["inputs"]["samples"] = ["9", 0]
    return nodes


def node(run: Run, node_id: str) -> Stage:
    return next(stage for stage in run.walk() if stage.facts.get("node", {}).get("id") == node_id)


def states(run: Run) -> dict[str, str]:
    return {one["id"]: one["state"] for one in run.facts["comfyui"]["nodes"]}


def test_pictures_are_those_of_the_bare_server_and_the_record_adds_up(base: Path, server: Server) -> None:
    run = server.run(graph())
    watched = max((base / "output").glob("*.png"), key=lambda file: file.stat().st_mtime).read_bytes()
    shutil.rmtree(base / "output")
    with serving(base, SIGMASCOPE="0") as bare:
        bare.prompt(graph())
        assert not bare.records.exists()
    (picture,) = (base / "output").glob("*.png")
    assert picture.read_bytes() == watched
    assert run.facts["comfyui"]["instruments_off"] == {}
    assert run.facts["comfyui"]["seconds_of_no_node"] < max(0.02, 0.01 * run.seconds)
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
        ("half", "", 3, 7, "4 of the file's 7 modules are not on the model"),
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
    assert states(sigmascope.load_run(stopped))["6"] == "interrupted"
