"""The three nodes in a real ComfyUI, started as a process."""

import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.integrations.comfyui.graphs import graph
from tests.integrations.comfyui.server import Server, node, serving, states

import sigmascope

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


def with_ours(seed: int) -> dict[str, Any]:
    """The graph with the verdict before the sampler, and a dump and a report behind it."""
    nodes = graph(seed=seed)
    nodes["20"] = {"class_type": "SigmascopeLoraVerdict", "inputs": {"model": ["2", 0], "clip": ["2", 1]}}
    nodes["21"] = {
        "class_type": "SigmascopeTensorDump",
        "inputs": {
            "keep": "statistics and file",
            "name": "after",
            "latent": ["6", 0],
            "conditioning": ["3", 0],
        },
    }
    nodes["22"] = {"class_type": "SigmascopeReport", "inputs": {"name": f"mine/{seed}"}}
    nodes["23"] = {"class_type": "PreviewAny", "inputs": {"source": ["20", 1]}}
    nodes["6"]["inputs"]["model"] = ["20", 0]
    nodes["7"]["inputs"]["samples"] = ["21", 0]
    return nodes


def shown(server: Server, prompt_id: str, node_id: str) -> str:
    """The text that a node gave the page."""
    (text,) = server.ask(f"/history/{prompt_id}")[prompt_id]["outputs"][node_id]["text"]
    return str(text)


def picture(base: Path) -> bytes:
    return max((base / "output").glob("*.png"), key=lambda file: file.stat().st_mtime).read_bytes()


def reports(base: Path, seed: int, least: int) -> list[Path]:
    """The reports that are written, once there are so many: each comes a moment after its record."""
    for _ in range(500):
        if len(found := list((base / "output" / "mine").glob(f"{seed}_*.html"))) >= least:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"{len(found)} reports of {least}")


def pixels(png: bytes) -> bytes:
    return Image.open(BytesIO(png)).tobytes()


def test_they_say_and_keep_what_passes_and_change_nothing(base: Path, server: Server) -> None:
    server.run(graph(seed=31))
    without = pixels(picture(base))
    run = server.run(with_ours(31))
    assert pixels(picture(base)) == without
    prompt_id = run.facts["comfyui"]["prompt_id"]
    (judged,) = node(server.run(graph(seed=31, strength=0.7)), "2").facts["lora_verdicts"]
    assert shown(server, prompt_id, "23") == judged["says"]
    (file,) = (server.records / "dumps").glob("*.safetensors")
    kept = sigmascope.load_tensors(file)
    facts = node(run, "21").tensors
    assert set(facts) == set(kept)
    assert facts["latent.samples"].mean == pytest.approx(kept["latent.samples"].double().mean().item())
    assert facts["latent.samples"].shape == (1, 4, 8, 8)
    (report,) = reports(base, 31, 1)
    assert run.id in report.read_text(encoding="utf-8")


def test_only_the_report_runs_again(base: Path, server: Server) -> None:
    server.run(with_ours(32))
    again = states(server.run(with_ours(32)))
    assert {id for id, state in again.items() if state != "cached"} == {"22"}
    assert len(reports(base, 32, 2)) == 2


def test_a_name_outside_of_the_output_folder_fails_no_prompt(base: Path, server: Server) -> None:
    nodes = with_ours(33)
    nodes["22"]["inputs"]["name"] = "../../outside"
    assert set(states(server.run(nodes)).values()) <= {"run", "cached"}
    assert list(base.parent.rglob("outside*")) == []
    assert "error" not in states(server.run(graph(seed=34))).values()


def test_workflows_that_have_them_run_where_the_watch_is_switched_off(base: Path) -> None:
    with serving(base, SIGMASCOPE="0") as bare:
        prompt_id = bare.prompt(with_ours(35))
        assert bare.ask(f"/history/{prompt_id}")[prompt_id]["status"]["status_str"] == "success"
        assert shown(bare, prompt_id, "22") == "no report: prompts are not watched"
        assert not bare.records.exists() or not list(bare.records.glob("*.json"))
