"""The real process of `sigmascope lbm create-base`, stopped while it writes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

DENOISER = {
    "block_out_channels": [128, 512],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "transformer_layers_per_block": 4,
    "attention_head_dim": 8,
}
VAE = {"block_out_channels": [32, 32], "layers_per_block": 1, "norm_num_groups": 8}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that writing its base takes a while; the commands only read it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "backbone"
    UNet2DConditionModel(
        in_channels=4, out_channels=4, cross_attention_dim=768, use_linear_projection=True, **DENOISER
    ).save_pretrained(folder / "unet")
    AutoencoderKL(
        **VAE, down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2
    ).save_pretrained(folder / "vae")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals for one process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_everything_as_it_was(
    backbone: Path, tmp_path: Path, number: int, code: int
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = {"exact.ckpt": b"earlier", "exact.safetensors": b"earlier too", "notes.txt": b"mine"}
    for name, content in before.items():
        (out / name).write_bytes(content)
    (tmp_path / "config.yaml").write_text(json.dumps({"denoiser": DENOISER, "vae": VAE}))  # JSON is YAML
    command = [
        *(sys.executable, "-m", "sigmascope", "lbm", "create-base", "--torch_dtype", "float32"),
        *("--config_path", str(tmp_path / "config.yaml"), "--save_path", str(out / "exact.ckpt")),
        *("--backbone_signature", str(backbone)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while half_written(out, before) < 10_000_000:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def half_written(folder: Path, before: dict[str, bytes]) -> int:
    """Bytes in files that were not there before."""
    total = 0
    for path in folder.iterdir():
        if path.name not in before:
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total
