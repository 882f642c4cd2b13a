"""A thousand elements of a tensor, the same ones each time: how much a weight changed, when its old content is gone.

For two contents of one weight the sampled elements give ‖ΔW‖ to some per cent, as changes by LoRAs and by
rounding are spread over the whole weight.
"""

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from sigmascope.probes.fingerprints import why_unreadable
from sigmascope.probes.reading import PROBE_ERRORS

SAMPLE_SIZE: Final = 1024
_GOLDEN: Final = 0.6180339887498949


def samples(tensors: Mapping[str, Tensor]) -> dict[str, Shaped[Tensor, " n"]]:
    """Up to a thousand elements of each tensor, on the CPU, in the tensor's own dtype. Never raises.

    Tensors without readable floating-point values are left out. What lies on an accelerator is waited for.

    Args:
        tensors: Of any dtype, layout and device.
    """
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            try:
                if why_unreadable(tensor) is None and tensor.is_floating_point() and tensor.numel():
                    found[name] = _taken(tensor)
            except PROBE_ERRORS:
                continue
        return {name: sample.cpu() for name, sample in found.items()}


def positions(elements: int) -> Int64[Tensor, " n"]:
    """Where the sampled elements are in row-major order: all of few, else spread by the golden ratio.

    Multiples of an irrational number, modulo 1, hit no column or row more often than another.
    """
    if elements <= SAMPLE_SIZE:
        return torch.arange(elements)
    spread = torch.arange(1, SAMPLE_SIZE + 1, dtype=torch.float64).mul(_GOLDEN).remainder(1.0)
    return spread.mul(elements).to(torch.int64).clamp(max=elements - 1)


def _taken(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor)
    where = torch.unravel_index(positions(plain.numel()).to(plain.device), plain.shape)
    if plain.dtype.itemsize == 1:  # indexing does not know all kinds of float8
        return plain.view(torch.uint8)[where].view(plain.dtype)
    return plain[where]
