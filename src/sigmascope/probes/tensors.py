"""Facts about tensors: shape, statistics, and where they are in memory.

`tensor_facts` describes one tensor, `leaves_of` finds the tensors in a nesting of the host's.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.probes.accelerators import has_float64, is_capturing
from sigmascope.probes.reading import PROBE_ERRORS, attempt, describe
from sigmascope.records.run import TensorFacts

_STATISTICS = ("min", "max", "mean", "std")
_COUNTS = ("nan_count", "inf_count")
_CPU_PIECE = 1 << 16  # half a MiB as float64: stays in the cache, and the allocator keeps it between pieces
_DEVICE_PIECE = 1 << 24  # 128 MiB as float64: few synchronisations, little extra memory

# Of `quick_facts`.
MOST_ELEMENTS = 1 << 24
"""Up to here all statistics are read, which takes about 0.1 s."""
_TOO_MANY = "not computed: the tensor is too large to read quickly; pass statistics=True"

# Of `leaves_of`.
_DEEPEST, _MOST_TENSORS = 12, 4096


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
        return _unreadable_facts(tensor, describe(error))
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


def _unreadable_facts(tensor: Tensor, reason: str) -> TensorFacts:
    """Facts of a tensor whose very shape cannot be read: the zeros here stand for nothing."""
    names = ("shape", "nbytes", "num_elements", *_STATISTICS, *_COUNTS)
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    return TensorFacts((), dtype, device, 0, 0, unavailable=dict.fromkeys(names, reason))


def _why_no_statistics(tensor: Tensor, wanted: bool | None) -> str | None:
    """The reason to leave the values alone, if there is one."""
    if wanted is False:
        return "not asked for"
    why = _why_out_of_reach(tensor)
    if why is not None:
        return why
    if tensor.is_complex():
        return "complex numbers have no order"
    if wanted is None and tensor.device.type != "cpu":
        return f"reading values from {tensor.device} would wait for the device; pass statistics=True"
    if tensor.device.type != "cpu" and is_capturing(tensor.device.type):
        return "a CUDA graph is being captured, and reading values would break it"
    return None


PLAIN_TENSORS: Final = frozenset({Tensor, torch.nn.Parameter})
"""Classes that keep their values as PyTorch does."""


def _why_out_of_reach(tensor: Tensor) -> str | None:
    """Why the values are nowhere, or not where they can be looked at; None if they are there."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, so there are no values"
    if tensor.is_meta or tensor.device.type == "meta":
        return "a meta tensor has no values"
    if type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "placements"):
        return "the values are sharded across processes"
    if tensor.layout is not torch.strided:
        return f"the layout is {str(tensor.layout).removeprefix('torch.')}"
    return None


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
    accumulator = torch.float64 if has_float64(tensor.device) else torch.float32
    piece_elements = _CPU_PIECE if tensor.device.type == "cpu" else _DEVICE_PIECE
    for piece in _pieces(values, piece_elements):
        _add_piece(moments, piece.to(accumulator))
    return moments


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


def _with_moments(facts: TensorFacts, moments: _Moments) -> TensorFacts:
    counts = replace(facts, nan_count=moments.nan_count, inf_count=moments.inf_count)
    if moments.count == 0:
        reason = "no finite element" if facts.num_elements else "no elements"
        return replace(counts, unavailable=dict.fromkeys(_STATISTICS, reason))
    known = replace(counts, min=moments.minimum, max=moments.maximum, mean=moments.mean)
    if moments.count == 1:
        return replace(known, unavailable={"std": "a single element has no standard deviation"})
    return replace(known, std=math.sqrt(moments.squares / (moments.count - 1)))


def quick_facts(tensor: Tensor, statistics: bool | None) -> TensorFacts:
    """As `tensor_facts`, but for a large CPU tensor only the range, unless all is asked for.

    The range also shows NaN and Inf; if it has either, everything is read.
    """
    large = attempt(lambda: tensor.device.type == "cpu" and tensor.numel() > MOST_ELEMENTS).value
    if statistics is not None or not large:
        return tensor_facts(tensor, statistics=statistics)
    read = attempt(lambda: _finite_range(tensor)).value
    if read is None:
        return tensor_facts(tensor, statistics=statistics)
    facts = tensor_facts(tensor, statistics=False)
    reasons = dict.fromkeys(("mean", "std"), _TOO_MANY)
    return replace(facts, min=read[0], max=read[1], nan_count=0, inf_count=0, unavailable=reasons)


def _finite_range(tensor: Tensor) -> tuple[float, float] | None:
    """Minimum and maximum; None if a NaN or an infinity is among the elements."""
    with torch.no_grad():
        low, high = _extremes(tensor.detach())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def place_of(tensor: Tensor) -> object:
    """Equal for two tensors exactly if they are the same elements in memory, read in the same way."""
    try:
        address = tensor.data_ptr()
        if address == 0 or tensor.numel() == 0:  # meta, empty or freed: the object itself is all there is
            return id(tensor)
        layout = tuple(tensor.shape), tensor.stride()  # nested tensors have none
        turned = tensor.is_conj(), tensor.is_neg()
    except PROBE_ERRORS:
        return id(tensor)
    return (tensor.device, address, *layout, tensor.dtype, *turned)


def places_of(tensors: Sequence[Tensor]) -> list[object]:
    """Of each something that is equal exactly where `place_of` is, in a third of the time."""
    addresses = [*map(_address, tensors)]
    counts = Counter(addresses)
    return [
        address if address and counts[address] == 1 else place_of(tensor)
        for address, tensor in zip(addresses, tensors, strict=True)
    ]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except PROBE_ERRORS:
        return 0


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor and the names and indices on the way to it."""

    path: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The innermost name on the way to it; indices are not names."""
        return next((part for part in reversed(self.path) if not part.isdigit()), "")


def leaves_of(thing: object) -> Iterator[Leaf]:
    """Every tensor in a nesting with the names on the way to it; each object is entered once."""
    todo: list[tuple[tuple[str, ...], object]] = [((), thing)]
    seen: set[int] = set()
    given = 0
    while todo and given < _MOST_TENSORS:
        path, item = todo.pop()
        tensor = as_tensor(item)
        if tensor is not None:
            given += 1
            yield Leaf(path, tensor)
        elif len(path) < _DEEPEST and id(item) not in seen:
            seen.add(id(item))
            todo += [((*path, name), inner) for name, inner in reversed(_items(item))]


def _items(thing: object) -> list[tuple[str, object]]:
    if isinstance(thing, Mapping):
        return [(str(key), value) for key, value in thing.items()]
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return list(zip(thing._fields, thing, strict=False))
    if isinstance(thing, list | tuple):
        return [(str(index), value) for index, value in enumerate(thing)]
    if type(thing).__name__ == "NestedTensor" and isinstance(parts := vars(thing).get("tensors"), list):
        return [(str(index), value) for index, value in enumerate(parts)]  # ComfyUI's: a video, and its sound
    if is_dataclass(thing) and not isinstance(thing, type):
        return [(member.name, getattr(thing, member.name)) for member in fields(thing)]
    return []


def as_tensor(thing: object) -> Tensor | None:
    """A tensor as it is, an array as a tensor, None for anything else."""
    if isinstance(thing, np.ndarray):
        return _tensor_of_array(thing)
    return thing if isinstance(thing, Tensor) else None


def _tensor_of_array(array: NDArray[Any]) -> Tensor | None:
    """The same memory, or a copy where PyTorch does not take it over as it lies; None for other things than numbers."""
    try:
        if array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0:
            return torch.from_numpy(array)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError:
        return None


def plain_values(thing: object) -> dict[str, Any]:
    """The named scalars of a conditioning: strength, area, start and end of its schedule, guidance and so on."""
    if not isinstance(thing, Mapping):
        return {}
    return {str(name): value for name, value in thing.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | bool | int | float)


def why_unreadable(tensor: Tensor) -> str | None:
    """Why the values of a tensor cannot be looked at; None if they can."""
    try:
        if is_at_hand(tensor):
            return None
        why = _why_out_of_reach(tensor)
        if why is not None:
            return why
        if tensor.is_quantized:
            return "the values are quantised"
        if type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__"):
            return f"the values are inside a {type(tensor).__name__}"
        if tensor.untyped_storage().nbytes() == 0 < tensor.numel():
            return "the values were freed or moved"
    except PROBE_ERRORS as error:
        return describe(error)
    return None


def is_at_hand(tensor: Tensor) -> bool:
    """Whether it is the usual case, which is told in a third of the time: a plain tensor on the CPU."""
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu or torch.compiler.is_compiling():
        return False
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and tensor.storage_offset() == 0 != tensor.data_ptr()
