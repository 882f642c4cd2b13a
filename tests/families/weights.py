"""Small models with weights that are the same in every process."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
Made = TypeVar("Made")


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` gives with random weights of seed 0, for inference; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def copied(make: Callable[P, Made]) -> Callable[P, Made]:
    """Make it once for each set of arguments, and give each caller a copy.

    Models keep what is done to them: transformers leaves its own hooks on one that was asked for hidden states.
    """
    patterns: Any = cache(lambda *args, **kwargs: _Pattern(make(*args, **kwargs)))

    @wraps(make)
    def copy_of(*args: P.args, **kwargs: P.kwargs) -> Made:
        own: Made = patterns(*args, **kwargs).copy()
        return own

    return copy_of


class _Pattern:
    """What copies are made from: a pickle, with the tensors beside it.

    `copy.deepcopy` of a pipeline's modules takes ten times as long, most of it for their thousands of empty dicts of
    hooks.
    """

    def __init__(self, made: object) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
        pickler.dump(made)
        self._pickled, self._tensors = stream.getvalue(), pickler.tensors

    def copy(self) -> Any:
        return _Unpickler(self._pickled, self._tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, held: object) -> int | None:
        if not isinstance(held, Tensor):
            return None
        self.tensors[id(held)] = held
        return id(held)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: dict[int, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        self._copies: dict[int, Any] = {}

    def persistent_load(self, name: int) -> Tensor:
        return copy.deepcopy(self._tensors[name], self._copies)
