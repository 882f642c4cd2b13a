"""Group offloading: every move of a group's weights is counted and timed in the step and stage that waited for it."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.group_offload import needs_group_offload
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope

CPU = torch.device("cpu")
SECONDS = 0.001
KINDS: dict[str, dict[str, Any]] = {
    "leaves": {"offload_type": "leaf_level"},
    "blocks": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "on disk": {"offload_type": "block_level", "num_blocks_per_group": 2},
}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the library moves, each of which takes a millisecond longer, as a copy to a device does."""
    from diffusers.hooks.group_offloading import ModuleGroup

    needs_group_offload()
    seen: Counter[str] = Counter()
    for name in ("_onload_from_memory", "_offload_to_memory", "_onload_from_disk", "_offload_to_disk"):
        original = getattr(ModuleGroup, name)

        def move(group: Any, name: str = name, original: Any = original) -> None:
            seen[name.split("_")[1]] += 1
            time.sleep(SECONDS)
            original(group)

        monkeypatch.setattr(ModuleGroup, name, move)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_move_of_a_group_is_counted_and_timed(
    kind: str, moves: Counter[str], unwatched: Tensor, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    disk = {"offload_to_disk_path": str(tmp_path)} if kind == "on disk" else {}
    pipeline.unet.enable_group_offload(onload_device=CPU, offload_device=CPU, **KINDS[kind], **disk)
    generate(pipeline, "sd15")
    moves.clear()
    with sigmascope.watch(pipeline) as run:
        image = generate(pipeline, "sd15")
    assert torch.equal(image, unwatched)
    assert left_behind() == []
    denoising = run.stage("denoising")
    moved = denoising.facts["weights_moved"]
    assert moved["times"] == moves["onload"] + moves["offload"] > 4
    assert moved["seconds"] > SECONDS * moved["times"]
    by_step = denoising.facts["weights_moved_in_steps"]
    assert len(by_step) == 2
    assert sum(by_step) == pytest.approx(moved["seconds"])
    assert all(0 < one < took for one, took in zip(by_step, denoising.steps.seconds, strict=True))
    assert [stage.name for stage in run.walk() if "weights_moved" in stage.facts] == ["denoising"]
