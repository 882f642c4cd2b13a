"""No call waits for the GPU because it is watched, or because a LoRA is on the model."""

from typing import Any

import pytest
import torch
from tests.gpu.figures import measured
from tests.gpu.waits import waits_of
from tests.lora.conftest import MakeLora
from tests.pocket_pipelines.pipelines import load_pocket
from torch import nn

import sigmascope
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.live_merge import merge_into_model

pytestmark = pytest.mark.gpu


def pocket(device: torch.device) -> Any:
    pipeline = load_pocket("unet", "base").to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def two_calls(pipeline: Any, output_type: str, device: torch.device) -> list[list[str]]:
    """Where each of two calls waits."""
    waits = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        torch.cuda.synchronize() if device.type == "cuda" else None
        with waits_of(device) as places:
            pipeline(
                "a red cube",
                num_inference_steps=3,
                height=64,
                width=64,
                output_type=output_type,
                generator=generator,
            )
        waits.append(places)
    return waits


@pytest.mark.parametrize("output_type", ["pt", "latent"])
def test_a_watched_call_waits_no_more_often_than_an_unwatched_one(
    output_type: str, device: torch.device
) -> None:
    two_calls(pocket(device), output_type, device)  # libraries load, kernels are chosen
    bare = two_calls(pocket(device), output_type, device)
    pipeline = pocket(device)
    with sigmascope.watch(pipeline) as run:
        watched = two_calls(pipeline, output_type, device)
    assert [stage.name for stage in run.record().stages].count("generation") == 2
    for own, without in zip(watched, bare, strict=True):
        assert len(own) == len(without), "\n".join(sorted(set(own) - set(without)))


class HalfNet(nn.Module):
    """A convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.relu(self.first(self.conv(x).flatten(2).mT)))
        return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_forward_pass_with_a_lora_does_not_wait_and_unmerging_is_exact(
    dtype: torch.dtype, device: torch.device, make_lora: MakeLora
) -> None:
    torch.manual_seed(0)
    model = HalfNet()
    lora = make_lora(model)
    model = model.to(device, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 4, 16, 16, device=device, dtype=dtype)
    with torch.no_grad():
        plain = model(x)
        with attach_lora(model, lora) as attached:
            changed = model(x)
            with waits_of(device) as places:
                attached.scale = 0.5
                model(x)
                attached.scale = 0.0
                switched_off = model(x)
        assert places == []
        assert torch.equal(switched_off, plain)
        assert not torch.equal(changed, plain)
        with waits_of(device) as merging:
            merged = merge_into_model(model, lora)
        with waits_of(device) as places:
            after = model(x)
        assert places == []
        torch.testing.assert_close(after, changed, rtol=5e-2, atol=5e-2)
        merged.unmerge()
    assert {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    } == set()
    assert {value.device for value in model.state_dict().values()} == {plain.device}
    # A merge copies each weight to RAM and looks for NaN: a few waits for each, and never one an element.
    weights = len(lora.modules)
    assert len(merging) <= 6 * weights
    measured(f"merging {weights} weights, {dtype}", waits=len(merging))
