"""Small models with weights that are the same in every process."""

from collections.abc import Callable

import torch
from torch import nn


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` gives with random weights of seed 0, for inference; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)
