"""Small models with weights that are the same in every process."""

import copy
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
Made = TypeVar("Made")


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` gives with random weights of seed 0, for inference; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def copied(make: Callable[P, Made]) -> Callable[P, Made]:
    """Make it once for each set of arguments, and give each caller a copy.

    Models keep what is done to them: transformers leaves its own hooks on one that was asked for hidden states,
    and a model that has them cannot be pickled.
    """
    made: Any = cache(make)

    @wraps(make)
    def copy_of(*args: P.args, **kwargs: P.kwargs) -> Made:
        own: Made = copy.deepcopy(made(*args, **kwargs))
        return own

    return copy_of
