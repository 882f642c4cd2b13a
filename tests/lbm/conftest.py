"""A model of LBM's shape with a few thousand weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.lbm.sdxl_forms import make_form, refiner, sdxl, sdxl_config, sdxl_folder

from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import LbmModel, build_lbm

__all__ = ["make_form", "refiner", "sdxl", "sdxl_config", "sdxl_folder"]  # fixtures

TINY: dict[str, Any] = {
    "resolution": 64,
    "denoiser": {
        "block_out_channels": [32, 64],
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": 1,
        "attention_head_dim": [2, 4],
        "norm_num_groups": 8,
    },
    "vae": {
        "block_out_channels": [32, 32],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "mid_block_add_attention": False,
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
    },
}


@pytest.fixture
def tiny_yaml() -> dict[str, Any]:
    return {**TINY, "denoiser": dict(TINY["denoiser"]), "vae": dict(TINY["vae"])}


@pytest.fixture(scope="session")
def tiny_config() -> LbmConfig:
    return parse_config(TINY)


@pytest.fixture(scope="session")
def tiny_model(tiny_config: LbmConfig) -> LbmModel:
    """Shared and so never to be changed."""
    torch.manual_seed(0)
    return build_lbm(tiny_config).eval().requires_grad_(False)


def save_tiny_pair(folder: Path) -> None:
    """Write a small LBM, `base.safetensors`, one that was tuned from it, `tuned.safetensors`, and its `config.yaml`."""
    config = parse_config(TINY)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    torch.manual_seed(0)
    model = build_lbm(config)
    save_file(model.state_dict(), folder / "base.safetensors")
    for parameter in model.denoiser.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape)
    save_file(model.state_dict(), folder / "tuned.safetensors")
