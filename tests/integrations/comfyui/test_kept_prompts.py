"""Prompts of ComfyUI go to the store of runs, beside their files."""

from pathlib import Path
from typing import Any

from tests.integrations.comfyui.conftest import Watch

from sigmascope.history.keeper import finish
from sigmascope.history.store import open_store

GRAPH: dict[str, Any] = {
    "1": {"class_type": "Load", "inputs": {"ckpt_name": "flux.safetensors"}},
    "2": {"class_type": "Empty", "inputs": {}},
    "3": {"class_type": "Sampler", "inputs": {"latent_image": ["2", 0], "steps": 3, "sampler_name": "euler"}},
}


def test_a_prompt_is_kept_with_what_it_ran(watch: Watch, store_file: Path) -> None:
    run = watch().run(GRAPH)
    finish()
    with open_store() as store:
        [row] = store.runs()
        assert store.record(row.number) == run
    assert (row.source, row.row.outcome, row.row.steps) == ("comfyui", "ok", 3)
    assert (row.row.pipeline or "").startswith("ComfyUI ")
    assert row.row.model == "flux.safetensors"
