"""Facts about one tensor, without touching it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sigmascope.probes.accelerators.capturing import is_capturing
from sigmascope.probes.reading import PROBE_ERRORS, describe
from sigmascope.records.facts import TensorFacts

_STATISTICS = ("min", "max", "mean", "std")
_COUNTS = ("nan_count", "inf_count")
_CPU_PIECE = 1 << 16  # half a MiB as float64: stays in the cache, and the allocator keeps it between pieces
_DEVICE_PIECE = 1 << 24  # 128 MiB as float64: few synchronisations, little extra memory


def tensor_facts(tensor: Tensor, *, statistics: bool | None = None) -> TensorFacts:
    """Shape, dtype, device, bytes and, if wanted, min, max, mean, std and NaN/Inf counts.

    The statistics are over the finite elements: mean and std are accumulated in float64, std is the
    sample's (n - 1, as `torch.std`). NaN and Inf are noticed in the minimum and maximum, and counted only
    if there are some. The tensor, its graph and the random state stay as they are; the extra memory is a
    MiB or two on the CPU.

    Args:
        tensor: Any tensor: any dtype, layout or device, with or without gradient.
        statistics: True: compute them, which waits for an accelerator's stream; False: do not;
            None: for CPU tensors only.
    """
    try:
        facts = _outline(tensor)
    except PROBE_ERRORS as error:  # nested tensors have no shape
        return _unknown(tensor, describe(error))
    reason = _why_no_statistics(tensor, statistics)
    if reason is not None:
        return replace(facts, unavailable=dict.fromkeys((*_STATISTICS, *_COUNTS), reason))
    try:
        with torch.no_grad():
            moments = _moments(tensor.detach())
    except PROBE_ERRORS as error:
        return replace(facts, unavailable=dict.fromkeys((*_STATISTICS, *_COUNTS), describe(error)))
    return _with_moments(facts, moments)


def _outline(tensor: Tensor) -> TensorFacts:
    return TensorFacts(
        shape=tuple(int(size) for size in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        nbytes=_nbytes(tensor),
        num_elements=tensor.numel(),
    )


def _unknown(tensor: Tensor, reason: str) -> TensorFacts:
    """Facts of a tensor whose very shape cannot be read: the zeros here stand for nothing."""
    names = ("shape", "nbytes", "num_elements", *_STATISTICS, *_COUNTS)
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    return TensorFacts((), dtype, device, 0, 0, unavailable=dict.fromkeys(names, reason))


def _why_no_statistics(tensor: Tensor, wanted: bool | None) -> str | None:
    """The reason to leave the values alone, if there is one."""
    if wanted is False:
        return "not asked for"
    if tensor.is_meta:
        return "a meta tensor has no values"
    if torch.compiler.is_compiling():
        return "the values are not there while torch.compile traces"
    if hasattr(tensor, "placements"):
        return "the values are spread over several processes"
    if tensor.layout is not torch.strided:
        return f"the layout is {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_complex():
        return "complex numbers have no order"
    if wanted is None and tensor.device.type != "cpu":
        return f"reading values from {tensor.device} would wait for it; ask with statistics=True"
    if tensor.device.type != "cpu" and is_capturing(tensor.device.type):
        return "a graph is being captured, which waiting for values would end with an error"
    return None


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the elements, of a sparse tensor those of its indices and values."""
    try:
        if tensor.layout is torch.sparse_coo:
            return tensor._indices().nbytes + tensor._values().nbytes
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    except PROBE_ERRORS:
        pass  # a layout that this version handles otherwise: the dense size is the next best
    return tensor.numel() * tensor.element_size()


@dataclass(slots=True)
class _Moments:
    """Count, mean and sum of squared deviations of what was seen so far, and its extremes."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    nan_count: int = 0
    inf_count: int = 0

    def add(self, values: Tensor, low: float, high: float) -> None:
        """Take in finite `values` and their extremes, combining as Chan, Golub and LeVeque (1983) do."""
        count = values.numel()
        mean = values.mean()
        deviations = values - mean
        squares = torch.dot(deviations, deviations).item()  # torch.var is several times slower
        total = self.count + count
        difference = mean.item() - self.mean
        self.mean += difference * count / total
        self.squares += squares + difference * difference * self.count * count / total
        self.count = total
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)


def _moments(tensor: Tensor) -> _Moments:
    moments = _Moments()
    values = tensor.dequantize() if tensor.is_quantized else tensor
    accumulator = torch.float32 if tensor.device.type == "mps" else torch.float64  # Metal has no float64
    piece_elements = _CPU_PIECE if tensor.device.type == "cpu" else _DEVICE_PIECE
    for piece in _pieces(values, piece_elements):
        _add_piece(moments, piece.to(accumulator))
    return moments


def _add_piece(moments: _Moments, values: Tensor) -> None:
    low, high = _extremes(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = values[values.isfinite()]
        nan_count = int(values.isnan().sum().item())
        moments.nan_count += nan_count
        moments.inf_count += values.numel() - finite.numel() - nan_count
        if finite.numel() == 0:
            return
        values = finite
        low, high = _extremes(values)
    moments.add(values, low, high)


def _extremes(values: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(values)
    return low.item(), high.item()


def _pieces(tensor: Tensor, elements: int) -> Iterator[Tensor]:
    """Cut a tensor into pieces of at most `elements` elements, in any order, copying none of it whole."""
    if tensor.numel() == 0:
        return
    in_memory_order = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if in_memory_order.is_contiguous():
        flat = in_memory_order.view(-1)
        for start in range(0, flat.numel(), elements):
            yield flat[start : start + elements]
    elif tensor.numel() <= elements:
        yield tensor.reshape(-1)
    else:
        longest = max(range(tensor.ndim), key=tensor.size)
        for half in tensor.tensor_split(2, dim=longest):
            yield from _pieces(half, elements)


def _with_moments(facts: TensorFacts, moments: _Moments) -> TensorFacts:
    counts = replace(facts, nan_count=moments.nan_count, inf_count=moments.inf_count)
    if moments.count == 0:
        reason = "no finite element" if facts.num_elements else "no elements"
        return replace(counts, unavailable=dict.fromkeys(_STATISTICS, reason))
    known = replace(counts, min=moments.minimum, max=moments.maximum, mean=moments.mean)
    if moments.count == 1:
        return replace(known, unavailable={"std": "one element has no spread"})
    return replace(known, std=math.sqrt(moments.squares / (moments.count - 1)))
