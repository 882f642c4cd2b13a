"""One budget for the whole LoRA: the singular values of all layers compete for it.

A fixed rank spends as many values on a layer that hardly changed as on one that changed much. Here each value
stands for what it saves, its weighted σ², and what it costs, its bytes; `rank_search` says why the choice is
optimal. No layer is decomposed further than the outcome needs: the search says which unknown values could still
matter (`Allocation.wanted`), and once none can, the choice is that of complete spectra.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.allocation import Allocation, allocate
from sigmascope.lora.ranking.layer_patterns import require_matches
from sigmascope.lora.ranking.layer_weights import WEIGHT_FOR, require_weights, weight_of
from sigmascope.lora.ranking.rank_contest import Contest, Contestant
from sigmascope.lora.ranking.spectrum import Spectrum
from sigmascope.lora.ranking.storage_cost import StorageCost
from sigmascope.lora.ranks import require_limits
from sigmascope.lora.shapes import is_convolution, max_rank

__all__ = ["Allocation", "Budget", "StorageCost"]

_FIRST_GUESS: Final = 64
_LEAST_GUESS: Final = 16


@dataclass(frozen=True)
class Budget:
    """What the ranks of all layers together may cost: bytes, or error. One of the two.

    Attributes:
        max_bytes: The file's size, header included, is at most this, and its error as small as it can be.
        max_error: The overall relative error is at most this fraction, and the file as small as it can be.
        weights: (pattern, weight): the squared error of layers whose path matches counts `weight` times; of
            several that match, the last wins. Layers without count once.
        max_rank: No layer gets more.
        max_conv_rank: The same for convolutions; `max_rank` when left out.
        min_rank: No layer that changed gets less; 0 lets layers go that bring too little for their bytes.

    Raises:
        ConfigError: Neither or both limits, or a value that makes no sense.
    """

    max_bytes: int | None = None
    max_error: float | None = None
    weights: tuple[tuple[str, float], ...] = ()
    max_rank: int | None = None
    max_conv_rank: int | None = None
    min_rank: int = 0

    def __post_init__(self) -> None:
        if (self.max_bytes is None) == (self.max_error is None):
            raise ConfigError(
                "a budget is either a size or an error.", hint="Give one of --max_size and --max_error."
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"--max_size {self.max_bytes} holds nothing.", hint="Write it as 100MB.")
        if self.max_error is not None and not 0.0 < self.max_error < 1.0:
            raise ConfigError(
                f"--max_error {self.max_error:g} is no share of the change.", hint="Write it as 5% or 0.05."
            )
        if self.max_conv_rank is None:  # left out and spelt out are the same budget
            object.__setattr__(self, "max_conv_rank", self.max_rank)
        require_limits(self.min_rank, {"--max_rank": self.max_rank, "--max_conv_rank": self.max_conv_rank})
        require_weights(self.weights)

    def allocate(
        self,
        spectra: Mapping[str, Spectrum],
        storage: StorageCost,
        pinned: Mapping[str, int] | None = None,
    ) -> Allocation:
        """Choose the rank of every layer.

        Args:
            spectra: By layer, with any number of leading singular values; those of layers that did not change
                need not be here.
            storage: What the values and modules take.
            pinned: Ranks that are set already. They count towards size and error; of a layer at full rank no
                singular value needs to be known.

        Raises:
            ConfigError: The budget cannot be met; the message says what can.
        """
        pinned = pinned or {}
        storage = storage if self.max_bytes is None else storage.within(self.max_bytes)
        contestants = [self._contestant(*item, storage, pinned) for item in spectra.items()]
        return allocate(Contest.of(contestants), storage, max_bytes=self.max_bytes, max_error=self.max_error)

    def first_guess(self, shapes: Mapping[str, Sequence[int]], storage: StorageCost) -> dict[str, int]:
        """How many singular values of each layer to compute first.

        For a size: twice the one rank for all layers that would fill the file.

        Args:
            shapes: Weight shapes by layer.
            storage: What the values and modules take.
        """
        guess = _FIRST_GUESS
        if self.max_bytes is not None:
            modules = sum(storage.module_bytes(layer, shape) for layer, shape in shapes.items())
            one_rank = sum(storage.rank_bytes(layer, shape) for layer, shape in shapes.items())
            room = max(self.max_bytes - storage.empty_bytes - modules, 0)
            guess = max(2 * room // max(one_rank, 1), _LEAST_GUESS)
        return {layer: min(guess, self._cap(shape)) for layer, shape in shapes.items()}

    def check(self, layers: Sequence[str]) -> None:
        """Refuse a weight whose pattern matches no layer.

        Args:
            layers: Paths of all layers of the model.

        Raises:
            ConfigError: With the pattern and the nearest layers.
        """
        for pattern, _ in self.weights:
            require_matches(pattern, layers, WEIGHT_FOR)

    def describe(self) -> str:
        """Canonical text, as JSON of what is set."""
        limits = {
            "max_size": self.max_bytes,
            "max_error": self.max_error,
            "weight_for": [list(pair) for pair in self.weights] or None,
            "max_rank": self.max_rank,
            "max_conv_rank": self.max_conv_rank,
            "min_rank": self.min_rank or None,
        }
        return json.dumps({name: value for name, value in limits.items() if value is not None})

    def _cap(self, weight_shape: Sequence[int]) -> int:
        cap = self.max_conv_rank if is_convolution(weight_shape) else self.max_rank
        return max_rank(weight_shape) if cap is None else min(cap, max_rank(weight_shape))

    def _contestant(
        self, layer: str, spectrum: Spectrum, storage: StorageCost, pinned: Mapping[str, int]
    ) -> Contestant:
        shape = spectrum.weight_shape
        if pinned.get(layer, 0) >= spectrum.largest_rank:
            spectrum = _known_to_the_end(spectrum)
        most = spectrum.significant if spectrum.complete else spectrum.largest_rank
        cap = min(pinned.get(layer, self._cap(shape)), most)
        return Contestant(
            layer=layer,
            spectrum=spectrum,
            weight=weight_of(layer, self.weights),
            floor=cap if layer in pinned else min(self.min_rank, cap),
            cap=cap,
            rank_bytes=storage.rank_bytes(layer, shape),
            module_bytes=storage.module_bytes(layer, shape),
        )


def _known_to_the_end(spectrum: Spectrum) -> Spectrum:
    """Some spectrum of the same energy: all of it is kept, so it does not matter which."""
    rank = spectrum.largest_rank
    value = math.sqrt(max(spectrum.total_energy, 0.0) / rank)
    return Spectrum(
        torch.full((rank,), value, dtype=torch.float64), spectrum.total_energy, spectrum.weight_shape
    )
