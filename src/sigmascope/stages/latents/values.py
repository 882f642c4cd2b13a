"""Facts of pictures and latents without a delay that one would notice."""

from dataclasses import replace

import torch
from torch import Tensor

from sigmascope.probes.tensors import tensor_facts
from sigmascope.records.facts import TensorFacts
from sigmascope.stages.host_reading import read_host

MOST_ELEMENTS = 1 << 24
"""Up to here all statistics are read, which takes about 0.1 s."""

_TOO_MANY = "not computed: they are too many for it to go unnoticed; ask with statistics=True"


def quick_facts(tensor: Tensor, statistics: bool | None) -> TensorFacts:
    """As `probes.tensor_facts`, but of a large CPU tensor only the range unless all is asked for.

    The range tells of NaN and Inf too: with either of them in it, everything is read.

    Args:
        tensor: Pictures or latents.
        statistics: As in `probes.tensor_facts`.
    """
    large = read_host(lambda: tensor.device.type == "cpu" and tensor.numel() > MOST_ELEMENTS).value
    if statistics is not None or not large:
        return tensor_facts(tensor, statistics=statistics)
    read = read_host(lambda: _range(tensor)).value
    if read is None:
        return tensor_facts(tensor, statistics=statistics)
    facts = tensor_facts(tensor, statistics=False)
    reasons = dict.fromkeys(("mean", "std"), _TOO_MANY)
    return replace(facts, min=read[0], max=read[1], nan_count=0, inf_count=0, unavailable=reasons)


def _range(tensor: Tensor) -> tuple[float, float] | None:
    """Minimum and maximum; None if a NaN or an infinity is among the elements."""
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        return None
    return float(low), float(high)
