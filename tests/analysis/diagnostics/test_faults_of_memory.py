"""Pipelines that really waste or keep memory, watched on a simulated GPU; beside each the same one without the fault."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.analysis.diagnostics.simulated import SimulatedGpu, found, number, watched
from tests.families import make_pipeline
from tests.fresh_memory import fresh_memory, give_back
from torch import nn

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.records.run import Run

SCALE = 2**14
"""With it the small pipeline peaks at about 14 GB."""
IMAGE = {"num_inference_steps": 1}
KEPT_MB = 36


@pytest.fixture(scope="module")
def healthy(pipe: Any) -> Run:
    """Ten images, one after another."""
    return watched(pipe, SimulatedGpu(scale=SCALE), *[IMAGE] * 10)


def test_a_healthy_pipeline_says_nothing_of_memory(healthy: Run) -> None:
    device = healthy.stages[-1].memory.current.accelerator("cuda:0")  # type: ignore[union-attr]
    assert (device.fragmentation() or 0.0) > 0.25  # the allocator keeps what the next image will need
    assert [name for name in found(healthy) if "memory" in name] == []


@pytest.mark.slow
def test_images_that_grow_leave_gaps_that_none_of_the_next_fits_into(pipe: Any) -> None:
    sizes = [{"height": size, "width": size, **IMAGE} for size in (32, 40, 48, 56, 64)]
    growing = watched(pipe, SimulatedGpu(scale=SCALE // 2), *sizes)
    finding = found(growing)["memory.fragmented"]
    assert number(finding, "fragmentation") > 0.25
    assert finding.stage in ("denoising", "latent_decoding")  # the innermost
    shrinking = watched(pipe, SimulatedGpu(scale=SCALE // 2), *sizes[::-2])
    assert "memory.fragmented" not in found(shrinking)


def test_an_image_that_hardly_fits(pipe: Any) -> None:
    finding = found(watched(pipe, SimulatedGpu(15.0, scale=SCALE), IMAGE))["memory.near_the_limit"]
    assert number(finding, "peak_mb") > 0.95 * number(finding, "total_mb")
    assert "memory.near_the_limit" not in found(watched(pipe, SimulatedGpu(24.0, scale=SCALE), IMAGE))


def test_hidden_states_that_a_hook_keeps(pipe: Any) -> None:
    kept: list[torch.Tensor] = []
    layers = [part for part in pipe.unet.modules() if isinstance(part, nn.Conv2d | nn.Linear | nn.GroupNorm)]
    hooks = [layer.register_forward_hook(lambda _m, _a, out: kept.append(out)) for layer in layers]
    finding = found(watched(pipe, SimulatedGpu(scale=SCALE), IMAGE))["memory.kept_after_stage"]
    for hook in hooks:
        hook.remove()
    assert finding.stage == "denoising"
    kept_mb = SCALE * sum(one.nbytes for one in kept) / 2**20
    assert number(finding, "kept_mb") == pytest.approx(kept_mb, rel=0.02)


@pytest.mark.slow
def test_a_pipeline_that_keeps_what_it_made() -> None:
    kept: list[Any] = []
    pipe = make_pipeline("sd15")

    class Keeping(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            more = torch.frombuffer(fresh_memory(KEPT_MB * 2**20), dtype=torch.uint8).fill_(1)
            kept.append((super().__call__(*args, **kwargs), more))
            return kept[-1][0]

    pipe.__class__ = Keeping
    give_back()
    leaks = {
        finding.evidence["where"]: finding
        for finding in diagnose(watched(pipe, SimulatedGpu(), *[IMAGE] * 10))
        if finding.id == "memory_leak"
    }
    assert {finding.stage for finding in leaks.values()} == {"generation"}
    image_mb = 3 * 32 * 32 * 4 / 2**20
    assert number(leaks["cuda:0"], "mb_per_call") == pytest.approx(KEPT_MB + image_mb, rel=0.01)
    assert number(leaks["process"], "mb_per_call") == pytest.approx(KEPT_MB, rel=0.1)


@pytest.mark.slow
def test_latents_that_a_callback_keeps(pipe: Any) -> None:
    kept: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        kept.append(kwargs["latents"].clone())
        return kwargs

    run = watched(pipe, SimulatedGpu(scale=SCALE), {"num_inference_steps": 10, "callback_on_step_end": keep})
    finding = found(run)["memory_leak"]
    assert (finding.stage, finding.evidence["where"]) == ("denoising", "the device in use")
    assert number(finding, "mb_per_call") == pytest.approx(SCALE * kept[0].nbytes / 2**20)


@pytest.mark.slow
def test_a_text_encoder_that_is_loaded_for_each_image(tmp_path: Path) -> None:
    pipe = make_pipeline("sd15")
    pipe.text_encoder.save_pretrained(tmp_path)
    with sigmascope.watch(pipe, sample_hz=None) as watch, torch.no_grad():
        pipe.to("cpu")
        for _ in range(3):
            pipe.text_encoder = type(pipe.text_encoder).from_pretrained(tmp_path)
            pipe("a fox", num_inference_steps=1, height=32, width=32, output_type="latent")
        pipe.to("cpu")
    (finding,) = (one for one in diagnose(watch.record()) if one.id == "placement.loaded_again")
    assert (finding.evidence["class"], finding.evidence["times"]) == (type(pipe.text_encoder).__name__, 3)


def test_a_lora_of_another_model_that_is_loaded_before_the_call(tmp_path: Path) -> None:
    pipe = make_pipeline("sd15")
    width = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q.in_features
    there = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    halves = {"lora_A": torch.ones(2, width), "lora_B": torch.ones(width, 2)}
    names = (there, there.replace("down_blocks.0", "down_blocks.7"))
    state = {f"{name}.{half}.weight": tensor.clone() for name in names for half, tensor in halves.items()}
    save_file(state, tmp_path / "lora.safetensors")
    with sigmascope.watch(pipe, sample_hz=None) as watch, torch.no_grad():
        pipe.load_lora_weights(tmp_path, weight_name="lora.safetensors")
        pipe("a fox", num_inference_steps=1, height=32, width=32, output_type="latent")
    finding = found(watch.record())["lora.modules_unmatched"]
    assert finding.evidence == {"modules": 2, "matched": 1}


def test_offloaded_weights_are_counted_by_the_steps_that_were_made(pipe: Any) -> None:
    from accelerate import cpu_offload

    offloaded = make_pipeline("sd15")
    cpu_offload(offloaded.unet, execution_device=torch.device("cpu"))
    finding = found(watched(offloaded, SimulatedGpu(), {"num_inference_steps": 2}))[
        "placement.weights_moved_every_step"
    ]
    nbytes = sum(tensor.nbytes for tensor in (*pipe.unet.parameters(), *pipe.unet.buffers()))
    assert number(finding, "moved_mb") == pytest.approx(2 * nbytes / 2**20, rel=0.01)
