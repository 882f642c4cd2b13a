"""Whether weights were written to without a trace: some elements of a few of them, others at each look (`Glimpses`).

PyTorch counts what is written to a tensor, but not what is written to its `data`, as code does that merges a LoRA by
hand. To read all weights at each call would take long; of a change to all layers a few of them tell.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from random import Random
from typing import Final

import torch
from torch import Tensor

from sigmascope.probes.accelerators import is_capturing
from sigmascope.probes.copies import HostCopy, Pending, copy_to_host
from sigmascope.probes.reading import PROBE_ERRORS, attempt
from sigmascope.probes.tensors import why_unreadable

_MOST: Final = 256
"""Tensors of which it is remembered what they held: of more, some that were drawn."""
_AT_ONCE: Final = 16
"""Of each look. Those of the next one are others, until all were looked at."""
_ELEMENTS: Final = 8

_Seen = Mapping[int, bytes]
"""Elements of tensors as bytes, by their place among all."""


class Glimpses:
    """Some elements of weights, as they were when all of them were read.

    None is kept alive. What lies on an accelerator is not waited for: a look compares what the one before began to copy.

    Args:
        tensors: The weights, the host's own ones, as they are being read.
    """

    __slots__ = ("_before", "_begun", "_next", "_tensors")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        known = [*tensors]
        drawn = Random(len(known)).sample(known, min(_MOST, len(known)))  # every second one is a LoRA's A
        some = [tensor for tensor in drawn if why_unreadable(tensor) is None]
        self._tensors = [weakref.ref(tensor) for tensor in some]
        self._before = attempt(lambda: _begin(enumerate(some))).value
        self._begun: Pending[_Seen] | None = None
        self._next = 0

    def has_changed(self) -> bool:
        """Whether a weight that is looked at now, or was on an accelerator before, holds other elements than then. Never raises."""
        return attempt(self._look).value is True

    def _look(self) -> bool:
        if self._before is None or not self._before.has_arrived():
            return False
        last, now = self._begun, _begin(self._some())
        self._begun = None if now.has_arrived() else now
        looks = [look for look in (last, now) if look is not None and look.has_arrived()]
        before = self._before.result()
        return any(before.get(place, seen) != seen for look in looks for place, seen in look.result().items())

    def _some(self) -> Iterator[tuple[int, Tensor]]:
        count = len(self._tensors)
        start, self._next = self._next, self._next + _AT_ONCE
        for place in range(start, min(self._next, start + count)):
            tensor = self._tensors[place % count]()
            if tensor is not None:
                yield place % count, tensor
        self._next %= max(count, 1)


def _begin(tensors: Iterable[tuple[int, Tensor]]) -> Pending[_Seen]:
    """Take elements of tensors, some that lie far apart in memory; one copy comes of each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    with torch.no_grad():
        for place, tensor in tensors:
            length = tensor.numel()
            if tensor.is_meta or not length:
                continue
            size = min(_ELEMENTS, length)
            try:
                taken = tensor.as_strided((size,), (length // size,))
            except PROBE_ERRORS:  # its memory is smaller than it, or no plain one
                continue
            places, parts = groups.setdefault((tensor.device, tensor.dtype), ([], []))
            places.append(place)
            parts.append(taken)
        copies: list[tuple[list[int], list[int], HostCopy]] = []
        for (device, _), (places, parts) in groups.items():
            with suppress(
                *PROBE_ERRORS
            ):  # of a dtype that PyTorch cannot copy, such as uint4, nothing is looked at
                if not is_capturing(device.type):
                    ends = [*accumulate(part.nbytes for part in parts)]
                    copies.append((places, ends, copy_to_host(torch.cat(parts).view(torch.uint8))))

    def seen() -> _Seen:
        found: dict[int, bytes] = {}
        for places, ends, copy in copies:
            raw = copy.tensor.numpy().tobytes()
            found |= zip(places, (raw[start:end] for start, end in pairwise([0, *ends])), strict=True)
        return found

    return Pending(seen, [copy for _, _, copy in copies])
