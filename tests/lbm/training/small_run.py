"""A whole training at the smallest size: a base, shards of noise, and settings that name them."""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from sigmascope.lbm.config import parse_config
from sigmascope.lbm.model import build_lbm
from sigmascope.lbm.training.settings import TrainSettings, parse_train_settings

SIDE = 32
SAMPLES = 10
MODEL: dict[str, Any] = {
    "resolution": SIDE,
    "denoiser": {
        "block_out_channels": [16],
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"],
        "transformer_layers_per_block": 1,
        "attention_head_dim": 2,
        "norm_num_groups": 8,
    },
    "vae": {
        "block_out_channels": [16, 16],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "mid_block_add_attention": False,
    },
}


@dataclass(frozen=True)
class SmallRun:
    """Files of a training."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base.safetensors"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def keys(self, **changes: Any) -> dict[str, Any]:
        """The YAML's content: 10 samples, 5 steps an epoch."""
        keys: dict[str, Any] = {
            **MODEL,
            "train_shards": str(self.folder / "train-{0..1}.tar"),
            "base_model_path": str(self.base),
            "save_ckpt_path": str(self.out),
            "rank": 2,
            "trainable_lora_modules": ["attn", "conv_out"],
            "batch_size": 2,
            "learning_rate": 0.01,
            "mixed_precision": "no",
            "max_grad_norm": 1.0,
            "timestep_sampling": "custom_timesteps",
            "selected_timesteps": [250, 500, 750, 1000],
            "prob": [0.25] * 4,
            "image_size": [SIDE, SIDE],
            "report_to": "none",
            "log_interval": 1,
            "device": "cpu",
        }
        keys |= changes
        return {key: value for key, value in keys.items() if value is not ...}

    def settings(self, **changes: Any) -> TrainSettings:
        return parse_train_settings(self.keys(**changes))


def write_small_run(folder: Path) -> SmallRun:
    """Write a base with random weights and its shards."""
    torch.manual_seed(0)
    model = build_lbm(parse_config(MODEL))
    run = SmallRun(folder)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, run.base)
    write_tar(folder / "train-0.tar", range(SAMPLES // 2))
    write_tar(folder / "train-1.tar", range(SAMPLES // 2, SAMPLES))
    write_tar(folder / "val-0.tar", range(100, 102))
    return run


def write_tar(path: Path, numbers: range) -> None:
    """A shard of pictures of noise, written with the standard library."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            pixels = np.random.default_rng(number).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
            for name, picture in zip(("source", "target"), pixels, strict=True):
                content = io.BytesIO()
                Image.fromarray(picture).save(content, "PNG")
                info = tarfile.TarInfo(f"{number:04d}.{name}.png")
                info.size = content.tell()
                content.seek(0)
                tar.addfile(info, content)


def weights_at(folder: Path, step: int) -> dict[str, Tensor]:
    """What a checkpoint says was trained."""
    weights: dict[str, Tensor] = load(
        (folder / f"checkpoint-{step:06d}" / "weights.safetensors").read_bytes()
    )
    return weights


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def near(first: Path, second: Path) -> None:
    """Check that two files hold the same weights, but for the order of additions."""
    one, two = load_file(first), load_file(second)
    assert one.keys() == two.keys()
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-4, atol=1e-5)
