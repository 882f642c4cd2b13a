"""Facts about the pictures and latents that go in and come out, for the record."""

from dataclasses import replace

import torch
from torch import Tensor

from sigmascope.probes import tensor_facts
from sigmascope.records.facts import TensorFacts
from sigmascope.records.latents import Layout, SampleFacts
from sigmascope.stages.latents.layouts import sizes_of

_MOST_ELEMENTS = 1 << 24
_TOO_MANY = "not computed: they are too many for it to go unnoticed"


def sample_facts(tensor: Tensor, layout: Layout | None, form: str = "tensor") -> SampleFacts:
    """Shape, axes and range of a tensor. An accelerator's tensor is not read, since that waits for it.

    Args:
        tensor: Pictures or latents.
        layout: What its axes are; None if nothing tells.
        form: What it was handed over as.
    """
    facts = _tensor_facts(tensor)
    if layout is None or len(layout) != tensor.ndim:
        return SampleFacts(facts, form=form, unavailable={"layout": "nothing tells its axes apart"})
    sizes = sizes_of(tensor.shape, layout)
    batch = 1 if sizes.batch is None else sizes.batch
    return SampleFacts(facts, layout, batch, sizes.frames, sizes.channels, sizes.height, sizes.width, form)


def _tensor_facts(tensor: Tensor) -> TensorFacts:
    """All statistics of a small tensor; of a large one the range, which also tells whether NaN is in it."""
    if tensor.numel() <= _MOST_ELEMENTS or tensor.device.type != "cpu":
        return tensor_facts(tensor)
    facts = tensor_facts(tensor, statistics=False)
    low, high = torch.aminmax(tensor.detach())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        return tensor_facts(tensor)
    reasons = dict.fromkeys(("mean", "std"), _TOO_MANY)
    return replace(facts, min=float(low), max=float(high), nan_count=0, inf_count=0, unavailable=reasons)
