"""LoRAs of several ranks that are swapped in place in a compiled denoiser, against their factors in float64."""

from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import State, lora_state, modules_of, write
from torch import Tensor

import sigmascope

pytestmark = pytest.mark.slow
RANKS = (2, 3, 1)
SWAPS = (1, 2, 2, 0)
DENOISERS = {"sd15": "unet", "sdxl": "unet", "flux": "transformer", "wan": "transformer"}


def products(state: State) -> dict[str, Tensor]:
    return {
        module: state[f"{module}.lora_B.weight"].double() @ state[f"{module}.lora_A.weight"].double()
        for module in modules_of(state)
    }


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sqrt(sum(float((one[module] - other[module]).square().sum()) for module in one))


@pytest.mark.parametrize("family", DENOISERS)
def test_swaps_in_a_compiled_model_change_it_by_what_their_factors_differ(
    family: str, tmp_path: Path
) -> None:
    pipeline, part = make_pipeline(family), DENOISERS[family]
    states = [lora_state(pipeline, [part], rank=rank, seed=rank, only="to_q") for rank in RANKS]
    files = [str(write(state, tmp_path / f"{i}.safetensors")) for i, state in enumerate(states)]
    contents = [products(state) for state in states]
    pipeline.enable_lora_hotswap(target_rank=max(RANKS))
    pipeline.load_lora_weights(files[0], adapter_name="style")
    getattr(pipeline, part).compile(backend="eager")
    pictures = [generate(pipeline, family)]
    with sigmascope.watch(pipeline) as run:
        for number in SWAPS:
            pipeline.load_lora_weights(files[number], adapter_name="style", hotswap=True)
            pictures.append(generate(pipeline, family))
    found = [stage for stage in run.record().walk() if stage.name == "lora_application"]
    analyses = [stage.facts["lora_application"] for stage in found]
    moved = [not torch.equal(before, after) for before, after in pairwise(pictures)]
    assert [analysis["effective"] for analysis in analyses] == moved == [True, True, False, True]
    norms = [analysis["unet_weight_changes"]["delta_norm"] for analysis in analyses]
    expected = [distance(contents[old], contents[new]) for old, new in zip((0, *SWAPS), SWAPS, strict=False)]
    assert norms == pytest.approx(expected, rel=1e-3)
