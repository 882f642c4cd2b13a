from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.comfyui.conftest import Watched
from tests.integrations.comfyui.faults import Faults
from tests.integrations.comfyui.host import Host, Node
from tests.integrations.comfyui.test_guest import functions
from tests.integrations.comfyui.test_nodes import GRAPH

from sigmascope.integrations.comfyui.session import Session


def everything(host: Host) -> dict[str, Any]:
    """A graph in which each instrument is called."""

    def call_all(x: Any) -> Any:
        host.module("comfy.sd").VAE().decode_tiled()
        host.module("comfy.model_management").load_models_gpu([])
        host.module("comfy.lora").load_lora({"a": 1}, {"a": 1})
        return (x,)

    def sample(latent_image: Any, steps: int, **_: Any) -> Any:
        host.step_through(steps)
        return ({"samples": latent_image["samples"] + torch.arange(8.0)},)

    host.nodes |= {"All": Node(("LATENT",), call_all), "Sampler": Node(("LATENT",), sample)}
    expanded = {"class_type": "Expand", "inputs": {"x": ["4", 0]}}
    return {**GRAPH, "4": {"class_type": "All", "inputs": {"x": ["3", 0]}}, "5": expanded}


def outputs(host: Host, graph: dict[str, Any]) -> dict[str, torch.Tensor]:
    host.cache.clear()
    host.prompt(graph)
    found = {node: values[0] for (node, _), values in host.cache.items()}
    return {node: value["samples"] for node, value in found.items() if isinstance(value, dict)}


@pytest.mark.parametrize(
    "seed", [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(200)]
)
def test_with_faults_at_random_prompts_finish_alike_and_the_status_is_right(
    seed: int, host: Host, tmp_path: Path
) -> None:
    graph, before = everything(host), functions(host)
    expected = outputs(host, graph)
    session = Session(tmp_path)
    faults = Faults(session, seed)
    faults.plant_before()
    session.start()
    faults.plant_after()
    try:
        for _ in range(2):
            made = outputs(host, graph)
            assert made.keys() == expected.keys()
            assert all(torch.equal(made[node], tensor) for node, tensor in expected.items())
        watched = Watched(host, session)
        off = watched.off()
        for name, reason in faults.expected().items():
            assert (name in off) is (reason is not None), (name, off.get(name), faults.by_name)
            assert (off.get(name) or "").startswith(reason or "")
        made_at_the_end = 1 if faults.by_name.get("prompts") == "end" else 0
        assert len(watched.records()) == (2 if "prompts" not in off else made_at_the_end)
    finally:
        session.stop()
        faults.undo()
    assert functions(host) == before
