"""A moving average of the trained weights, by diffusers' `EMAModel`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from diffusers.training_utils import EMAModel
from torch import Tensor, nn


class MovingAverage:
    """Follows parameters: shadow ← decay·shadow + (1 − decay)·parameter after each step.

    The decay rises from 0 as (1 + step)/(10 + step), so that the beginning is soon forgotten.

    Args:
        parameters: What to follow, always in this order.
        decay: That the decay rises to, below 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._average = EMAModel(self._parameters, decay=decay)

    def update(self) -> None:
        """Take the parameters as they are after a step."""
        self._average.step(self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the parameters hold the average; after it, bit for bit what they held before."""
        self._average.store(self._parameters)
        self._average.copy_to(self._parameters)
        try:
            yield
        finally:
            self._average.restore(self._parameters)

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The average by the parameters' names, given in their order."""
        return dict(zip(names, self._average.shadow_params, strict=True))

    def numbers(self) -> dict[str, Any]:
        """All that is needed to go on, but for the weights."""
        state: dict[str, Any] = self._average.state_dict()
        return {key: value for key, value in state.items() if key != "shadow_params"}

    def restore(self, numbers: Mapping[str, Any], weights: Sequence[Tensor]) -> None:
        """Go on from `numbers` and `weights`."""
        places = [shadow.device for shadow in self._average.shadow_params]
        shadows = [weight.to(place) for weight, place in zip(weights, places, strict=True)]
        self._average.load_state_dict({**numbers, "shadow_params": shadows})
