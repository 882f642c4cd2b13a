"""Memory that really runs out: an address space with a limit, and a capped CUDA allocator."""

import subprocess
import sys
from typing import Any

import pytest
import torch

CHILD = """
import resource, torch
from diffusers import AutoencoderKL
from sigmascope import encode_latents

torch.set_num_threads(1)
vae = AutoencoderKL(
    block_out_channels=(32, 32), down_block_types=["DownEncoderBlock2D"] * 2, norm_num_groups=8,
    up_block_types=["UpDecoderBlock2D"] * 2, layers_per_block=1, mid_block_add_attention=False,
).eval()
encode_latents(vae, torch.zeros(1, 3, 64, 64), strategies="tiled", tile=32)
pixels = torch.rand(1, 3, 1024, 1024) * 2 - 1
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, resource.RLIM_INFINITY))
latent, record = encode_latents(vae, pixels, strategies=("direct", "tiled"), tile=256, predict=False)
for attempt in record.attempts:
    print(attempt.name, attempt.outcome, attempt.reason)
print(tuple(latent.shape), bool(latent.isfinite().all()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
def test_ram_that_is_really_full_is_got_along_with_in_tiles() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("direct failed RuntimeError")
    assert "can't allocate memory" in lines[0]
    assert lines[1:] == ["tiled succeeded None", "(1, 4, 512, 512) True"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("strategy", ["tiled", "cpu"])
def test_a_gpu_that_is_really_full_is_got_along_with(strategy: Any) -> None:
    from diffusers import AutoencoderKL

    from sigmascope import encode_latents

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(
        block_out_channels=(64, 64), layers_per_block=1, **blocks, mid_block_add_attention=False
    )
    vae = vae.eval().to("cuda")
    pixels = torch.rand(1, 3, 2048, 2048) * 2 - 1
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**30) / total))
    try:
        latent, record = encode_latents(vae, pixels, strategies=("direct", strategy), tile=512, predict=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [(one.name, one.outcome) for one in record.attempts] == [
        ("direct", "failed"),
        (strategy, "succeeded"),
    ]
    assert record.attempts[0].error_type == "OutOfMemoryError"
    assert (latent.device.type, latent.shape) == ("cuda", (1, 4, 1024, 1024))
    assert {one.device.type for one in vae.parameters()} == {"cuda"}
