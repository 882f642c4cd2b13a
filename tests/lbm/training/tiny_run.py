"""Settings and batches for the tiny model of `tests/lbm/conftest.py`."""

from typing import Any

import torch
from tests.lbm.conftest import TINY
from torch import nn

from sigmascope.lbm.config import parse_config
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.settings import TrainSettings, parse_train_settings

RUN: dict[str, Any] = {"train_shards": "a.tar", "base_model_path": "base.ckpt", "save_ckpt_path": "out"}
FOUR_TIMESTEPS: dict[str, Any] = {
    "timestep_sampling": "custom_timesteps",
    "selected_timesteps": [250, 500, 750, 1000],
    "prob": [0.25] * 4,
}
"""As the published relighting model was trained (arXiv 2503.07535)."""


def tiny_settings(**keys: Any) -> TrainSettings:
    """A LoRA of rank 4, without a pixel loss unless it is asked for."""
    rank = {} if "full_finetune" in keys or "lora_weights_path" in keys else {"rank": 4}
    return parse_train_settings({**RUN, **FOUR_TIMESTEPS, **TINY, "mixed_precision": "no", **rank, **keys})


def new_model(seed: int = 0, **keys: Any) -> LbmModel:
    """A model of its own, to be changed."""
    torch.manual_seed(seed)
    return build_lbm(parse_config({**TINY, **keys})).eval().requires_grad_(False)


def randomised(parameters: list[tuple[str, nn.Parameter]], std: float = 0.1) -> None:
    """Give factors values, so that they do something."""
    generator = torch.Generator().manual_seed(5)
    for _, parameter in parameters:
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def batch_of(count: int, side: int = 32, first: int = 0, epoch: int = 0, **more: Any) -> Batch:
    """Pictures of noise; sample n is the same in every batch."""
    numbers = tuple(range(first, first + count))
    pictures = [
        torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(number)) * 2 - 1
        for number in numbers
    ]
    source, target = torch.stack(pictures).unbind(1)
    return Batch(source, target, numbers, tuple(map(str, numbers)), epoch=epoch, **more)
