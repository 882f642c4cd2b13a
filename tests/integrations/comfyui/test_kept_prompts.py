"""Prompts of ComfyUI go to the store of runs, beside their files."""

from pathlib import Path
from typing import Any

import pytest
from tests.integrations.comfyui.conftest import Watch

from sigmascope.history.keeper import finish
from sigmascope.history.store import open_store
from sigmascope.monitor.publishing import Published
from sigmascope.reports.measurements import measured

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


def test_a_prompt_is_handed_over_to_be_exported(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[Published]()
    monkeypatch.setattr(
        "sigmascope.integrations.comfyui.session.publish", lambda run: heard.append(Published(run))
    )
    run = watch().run(GRAPH)
    [part] = [part for published in heard for part in measured(published.run)]
    assert (part.pipeline, part.outcome, len(part.steps)) == ("ComfyUI", "ok", 3)
    assert part.generation_seconds == run.seconds
    assert [name for name, _ in part.stages] == ["Load", "Empty", "Sampler"]
    assert part.queue_seconds is not None
