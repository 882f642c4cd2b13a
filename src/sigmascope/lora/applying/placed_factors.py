"""A LoRA's factors as weights of two small layers, on the device and in the dtype where they run."""

from math import frexp, isfinite

import torch
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.model_layers import Layer
from sigmascope.lora.precision import at_least_float32


class PlacedFactors:
    """Factors as weights of the two small layers, wherever and in whatever dtype the layer has run.

    Several threads may ask at once, as those of nn.DataParallel do for one hook.

    Args:
        name: The layer, for messages.
        factors: The change, (out, in) or (out, in, kh, kw).
        layer: The Linear or Conv2d that they are for; they are placed where its weight is at once.

    Raises:
        NonFiniteError: Here and in `near`: they hold NaN or Inf, or do so in the dtype however they share the change.
    """

    def __init__(self, name: str, factors: LoraFactors, layer: Layer) -> None:
        kernel = factors.weight_shape[2:]
        out_features, rank = factors.up.shape
        self.scale = factors.scale
        self._name = name
        self._up = factors.up.reshape(out_features, rank, *(1 for _ in kernel))
        self._down = factors.down.reshape(rank, *factors.weight_shape[1:])
        self._largest = _largest(factors.up), _largest(factors.down)
        self._placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        if layer.weight.is_floating_point() and not layer.weight.is_meta:
            self.near(layer.weight)

    def near(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Up and down on the tensor's device and in its dtype; made once for each."""
        place = tensor.device, tensor.dtype
        placed = self._placed.get(place)
        if placed is None:
            placed = self._place(*place)
            self._placed[place] = placed
        return placed

    def _place(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shift = _balancing_shift(self._name, *self._largest, dtype)
        # An inference tensor kept from here would fail in a later call that records gradients.
        with torch.inference_mode(mode=False), torch.no_grad():
            if shift == 0:
                return self._up.to(device, dtype), self._down.to(device, dtype)
            # By powers of two, before narrowing: the product stays what it was, to the bit.
            wide = at_least_float32(self._up.dtype, self._down.dtype)
            up, down = self._up.to(wide) * 2.0**-shift, self._down.to(wide) * 2.0**shift
            return up.to(device, dtype), down.to(device, dtype)


def _largest(factor: Tensor) -> float:
    return float(factor.detach().to(at_least_float32(factor.dtype)).abs().max())


def _balancing_shift(name: str, up: float, down: float, dtype: torch.dtype) -> int:
    """The n for which up·2⁻ⁿ and down·2ⁿ fit a dtype; 0 where they do as they are.

    Args:
        name: The layer, for the message.
        up: Largest magnitude in that factor.
        down: Likewise.
        dtype: Where they must fit. Factors that it can hold as subnormal numbers only do not fit either.
    """
    if not dtype.is_floating_point:
        return 0
    limits = torch.finfo(dtype)
    if all(value == 0.0 or limits.smallest_normal <= value <= limits.max for value in (up, down)):
        return 0
    shift = 0
    if isfinite(up) and isfinite(down):
        apart = frexp(up)[1] - frexp(down)[1]
        shift = apart // 2 if up and down else apart  # a factor of zeros takes any shift
        up, down = up * 2.0**-shift, down * 2.0**shift
    if not (up <= limits.max and down <= limits.max):
        raise NonFiniteError(
            f"{name}: the LoRA's factors hold NaN or Inf in {dtype}.",
            hint="Run the model in bfloat16 or float32, which hold larger values than float16.",
        )
    return shift
