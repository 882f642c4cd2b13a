"""What is worth knowing of a card: how long an extraction takes, what a watch costs, how well peaks are predicted."""

import math
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from tests.gpu.conftest import ON_CPU
from tests.gpu.figures import measured
from tests.gpu.memory import MIB
from torch import Tensor

import sigmascope
from lora_bench.pairs import DENOISER, is_layer, lbm_shapes, pair_files
from sigmascope.checkpoints import StreamingWriter
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.pipeline.encode_decode import decode_latents

pytestmark = pytest.mark.gpu

FEWER_LAYERS = 40 if ON_CPU else 1
"""Every one of so many layers."""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(device: torch.device, function: Callable[[], object]) -> float:
    _synchronize(device)
    began = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - began


def _changed(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight and the same after a tuning: its change's singular values fall as i^-0.7, over a floor."""
    rows, columns = shape[0], math.prod(shape[1:])
    base = torch.randn(rows, columns, device=device) / math.sqrt(columns)
    kept = min(256, rows, columns)
    falling = torch.arange(1, kept + 1, device=device) ** -0.7
    change = torch.randn(rows, kept, device=device) * falling @ torch.randn(kept, columns, device=device)
    change = change / change.norm() + 0.65 * torch.randn_like(change) / math.sqrt(rows * columns)
    tuned = base + 0.05 * base.norm() * change
    return base.reshape(shape).bfloat16().cpu(), tuned.reshape(shape).bfloat16().cpu()


def _write_pair(folder: Path, device: torch.device) -> int:
    """Write both models of a full-size LBM's denoiser, made on the device; gives the number of layers."""
    layers = {name: shape for name, shape in lbm_shapes().items() if is_layer(name, shape)}
    some = dict(list(layers.items())[::FEWER_LAYERS])
    nbytes = 2 * sum(math.prod(shape) for shape in some.values())
    with ExitStack() as files:
        base, tuned = (
            files.enter_context(StreamingWriter(path, {"format": "pt"}, expected=some, data_bytes=nbytes))
            for path in pair_files(folder)
        )
        for name, shape in some.items():
            before, after = _changed(shape, device)
            base.write(name, before)
            tuned.write(name, after)
    return len(some)


def test_extraction_of_all_layers_of_an_lbm(device: torch.device, tmp_path: Path) -> None:
    """At rank 32, of convolutions 16, as benchmarks/lora_extraction.py does; about 10 GB of disk."""
    assert DENOISER == "denoiser."
    free = shutil.disk_usage(tmp_path).free
    assert ON_CPU or free > 16e9, f"{free / 1e9:.0f} GB are free in {tmp_path}; use pytest --basetemp"
    torch.manual_seed(0)
    layers = _write_pair(tmp_path, device)
    files = pair_files(tmp_path)
    options = ExtractOptions(rank=32, conv_rank=16, device=str(device))
    seconds = []
    peak = 0
    for number in range(2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        lora = tmp_path / f"{number}.safetensors"
        seconds.append(_seconds(device, lambda lora=lora: extract_lora(*files, lora, options)))  # type: ignore[misc]
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
    for path in files:
        path.unlink()
    assert layers == 792 or ON_CPU
    measured(
        "extraction", layers=layers, first_seconds=seconds[0], seconds=seconds[1], device_peak_mib=peak / MIB
    )


def _sdxl(device: torch.device) -> Any:
    """A pipeline with a denoiser of SDXL's size and random weights, without text encoders."""
    dtype = torch.float32 if ON_CPU else torch.float16
    widths, heads, depths, text = (
        ((32, 64, 128), [1, 2, 4], [1, 1, 1], 64)
        if ON_CPU
        else ((320, 640, 1280), [5, 10, 20], [1, 2, 10], 2048)
    )
    torch.set_default_dtype(dtype)
    try:
        with device:
            unet = UNet2DConditionModel(
                sample_size=128,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                block_out_channels=widths,
                transformer_layers_per_block=depths,
                attention_head_dim=heads,
                cross_attention_dim=text,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            )
    finally:
        torch.set_default_dtype(torch.float32)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8] * 4,
        norm_num_groups=4,
    )
    pipeline = StableDiffusionXLPipeline(
        vae.to(device, dtype), None, None, None, None, unet, EulerDiscreteScheduler(), add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_a_watched_step_of_sdxls_size(device: torch.device) -> None:
    pipeline = _sdxl(device)
    steps, side = (2, 64) if ON_CPU else (20, 1024)
    generator = torch.Generator().manual_seed(0)
    dtype = pipeline.unet.dtype
    embeds = torch.randn(1, 77, pipeline.unet.config.cross_attention_dim, generator=generator)
    pooled = torch.randn(1, 1280, generator=generator)
    call = {
        "prompt_embeds": embeds.to(device, dtype),
        "pooled_prompt_embeds": pooled.to(device, dtype),
        "guidance_scale": 1.0,
        "num_inference_steps": steps,
        "height": side,
        "width": side,
        "output_type": "latent",
    }

    def generate() -> None:
        pipeline(**call, generator=torch.Generator(device).manual_seed(0))

    generate()
    bare, watched, first = [], [], []
    for _ in range(3):
        bare.append(_seconds(device, generate))
        with sigmascope.watch(pipeline) as run:
            first.append(_seconds(device, generate))
            watched.append(_seconds(device, generate))
    denoising = [stage for stage in run.record().walk() if stage.name == "denoising"]
    assert [len(stage.steps) for stage in denoising] == [steps, steps]
    weights = sum(weight.numel() for weight in pipeline.unet.parameters())
    measured(
        f"a watched step, {weights / 1e9:.2f} B weights, {side} px",
        bare_ms=1e3 * median(bare) / steps,
        watched_ms=1e3 * median(watched) / steps,
        first_watched_call_more_ms=1e3 * (median(first) - median(bare)),
    )
    if device.type == "cuda":  # on the CPU other programs are in the way
        assert median(watched) < 1.05 * median(bare) + 0.05


@pytest.mark.parametrize("side", [128, 256] if ON_CPU else [1024, 2048])
@pytest.mark.parametrize("strategy", ["direct", "tiled"])
def test_predicted_peaks_of_a_vae(strategy: Any, side: int, device: torch.device) -> None:
    """A decoder of SDXL's size with random weights."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[32] * 4 if ON_CPU else [128, 256, 512, 512],
        layers_per_block=2,
    )
    vae = vae.eval().to(device, torch.bfloat16)
    latent = torch.randn(1, 4, side // 8, side // 8, device=device, dtype=torch.bfloat16)
    tile = None if strategy == "direct" else 64 if ON_CPU else 512
    decode_latents(vae, latent, strategies=strategy, tile=tile)  # cuDNN chooses
    picture, record = decode_latents(vae, latent, strategies=strategy, tile=tile)
    attempt = record.attempts[-1]
    assert attempt.outcome == "succeeded"
    assert picture.shape[-2:] == (side, side)
    predicted, seen = attempt.predicted_peak_bytes, attempt.measured_peak_bytes
    assert predicted is not None
    measured(
        f"decoding {side} px, {strategy}",
        predicted_mib=predicted / MIB,
        measured_mib=None if seen is None else seen / MIB,
        ratio=None if not seen else predicted / seen,
    )
    if device.type == "cuda":
        assert seen
        assert 0.5 < predicted / seen < 2.0
