"""Facts about tensors: shape, statistics, where they are in memory, and fingerprints of what they contain.

`tensor_facts` describes one tensor, `leaves_of` finds the tensors in a nesting of the host's.

A fingerprint is the XXH3 hash of the values' bytes in row-major order, taken in pieces of 256 KiB whose hashes are
hashed again. The CPU hashes with the `xxhash` package, at the speed of memory. An accelerator hashes where the weights
are (`block_sums`, `digests`), and sends back some numbers a piece and what is left over behind the last whole piece.
Both give the same fingerprint. XXH3 reads a piece in blocks of 1 KiB, 16 stripes of eight 64-bit words each. Within a
block it only adds, so that all blocks of all pieces are summed side by side; only their eight sums a block are then
scrambled one after another.

`samples` takes a thousand elements of a tensor, the same ones each time: they tell how much a weight changed when its
old content is gone. For two contents of one weight they give ‖ΔW‖ to some per cent, as changes by LoRAs and by
rounding are spread over the whole weight.

Y. Collet, xxHash fast digest algorithm, XXH3 for inputs longer than 240 bytes:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import xxhash
from jaxtyping import Int64, Shaped, UInt64
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.probes.accelerators import has_float64, is_capturing
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt, describe
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
_GROUP_BYTES: Final = 1 << 30
"""Tensors of an accelerator that are hashed together: the steps within a piece are one after another."""
_WORTH_THREADS: Final = 1 << 25
_MOST_THREADS: Final = 8

# Where samples are taken.
SAMPLE_SIZE: Final = 1024
_GOLDEN: Final = 0.6180339887498949
PIECE_BYTES: Final = 1 << 18
"""Long enough for the CPU's hash to run at the speed of memory, short enough for many to a layer."""

# XXH3's secret, primes and sizes, for hashing on an accelerator.
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_AVALANCHE: Final = 0x165667919E3779F9
_START: Final = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_LOW: Final = 0xFFFFFFFF
_WORDS, _STRIPES, _BLOCK_WORDS = 8, 16, 128
_BLOCKS: Final = PIECE_BYTES // (8 * _BLOCK_WORDS)
_LAST_STRIPE: Final = 192 - 64 - 7
_PIECES_AT_ONCE: Final = 64  # 16 MiB of weights, and a few times that for what is computed of them


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


def _why_out_of_reach(tensor: Tensor) -> str | None:
    """Why the values are nowhere, or not where they can be looked at; None if they are there."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, so there are no values"
    if tensor.is_meta or tensor.device.type == "meta":
        return "a meta tensor has no values"
    if hasattr(tensor, "placements"):
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
        turned = tensor.is_conj(), tensor.is_neg()
    except PROBE_ERRORS:
        return id(tensor)
    if address == 0 or tensor.numel() == 0:  # meta, empty or freed: the object itself is all there is
        return id(tensor)
    return (str(tensor.device), address, tuple(tensor.shape), tensor.stride(), tensor.dtype, *turned)


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


Readings = dict[str, Reading["Fingerprint"]]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a tensor contained at one moment. Equal: the same shape, dtype and bits.

    Attributes:
        shape: Its sizes.
        dtype: Such as `bfloat16`.
        digest: 64 bits of the values alone, the same on every device and in every memory layout.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: int


def fingerprint(tensor: Tensor) -> Reading[Fingerprint]:
    """The fingerprint of one tensor, or why there is none. Never raises; waits for an accelerator's tensor."""
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor], *, threads: int | None = None) -> Readings:
    """Fingerprints by name, or why there are none. Never raises, changes nothing, keeps nothing alive.

    Tensors that are the same elements in memory are read once. What is not contiguous is copied, one tensor at
    a time. An accelerator's tensors are waited for.

    Args:
        tensors: Of any dtype, layout and device.
        threads: How many hash on the CPU at once; None: as many as torch calculates with, at most eight.
    """
    reasons = {name: why for name, tensor in tensors.items() if (why := why_unreadable(tensor))}
    readings: Readings = {name: Reading(None, why) for name, why in reasons.items()}
    on_cpu = {name: tensor for name, tensor in tensors.items() if name not in reasons and _on_cpu(tensor)}
    elsewhere = {n: tensor for n, tensor in tensors.items() if n not in reasons and n not in on_cpu}
    with torch.no_grad():
        readings |= _all_on_cpu(on_cpu, threads)
        for group in _groups(elsewhere):
            hashed = attempt(lambda group=group: _hash_where_it_is(group))  # type: ignore[misc]
            readings |= hashed.value or dict.fromkeys(group, Reading(None, hashed.reason))
    return {name: readings[name] for name in tensors}


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _all_on_cpu(tensors: Mapping[str, Tensor], threads: int | None) -> Readings:
    seen: dict[object, str] = {}
    first_of = {name: seen.setdefault(place_of(tensor), name) for name, tensor in tensors.items()}
    distinct = {name: tensors[name] for name in dict.fromkeys(first_of.values())}
    nbytes = sum(tensor.nbytes for tensor in distinct.values())
    workers = min(threads or torch.get_num_threads(), _MOST_THREADS)
    if workers > 1 and nbytes > _WORTH_THREADS:
        with ThreadPoolExecutor(workers, "fingerprints") as pool:
            read = dict(zip(distinct, pool.map(_read_on_cpu, distinct.values()), strict=True))
    else:
        read = {name: _read_on_cpu(tensor) for name, tensor in distinct.items()}
    return {name: read[first] for name, first in first_of.items()}


def _read_on_cpu(tensor: Tensor) -> Reading[Fingerprint]:
    return attempt(lambda: _hash_on_cpu(tensor))


def _hash_on_cpu(tensor: Tensor) -> Fingerprint:
    with torch.no_grad():
        raw = _bytes_of(tensor).numpy().data
    starts = range(0, len(raw) - PIECE_BYTES + 1, PIECE_BYTES)  # of whole pieces
    pieces = np.array([xxhash.xxh3_64_intdigest(raw[at : at + PIECE_BYTES]) for at in starts], np.uint64)
    return _fingerprint(tensor, pieces, raw[len(pieces) * PIECE_BYTES :])


def _bytes_of(tensor: Tensor) -> Tensor:
    """(n,) uint8: the values in row-major order; a view of the tensor where it is contiguous."""
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _fingerprint(tensor: Tensor, pieces: np.ndarray, rest: memoryview) -> Fingerprint:
    last = xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little")
    digest = xxhash.xxh3_64_intdigest(pieces.astype("<u8").tobytes() + last)
    return Fingerprint(tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch."), digest)


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each device, some at a time."""
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        group: dict[str, Tensor] = {}
        nbytes = 0
        for name, tensor in tensors.items():
            if tensor.device != device:
                continue
            if group and nbytes + tensor.nbytes > _GROUP_BYTES:
                yield group
                group, nbytes = {}, 0
            group[name] = tensor
            nbytes += tensor.nbytes
        yield group


def _hash_where_it_is(tensors: Mapping[str, Tensor]) -> Readings:
    """Hash whole pieces on their device; what is left of each tensor comes to the CPU in one transfer."""
    sums, rests, counts = [], [], []
    for tensor in tensors.values():
        raw = _bytes_of(tensor)
        whole = raw.numel() - raw.numel() % PIECE_BYTES
        counts.append(whole // PIECE_BYTES)
        rests.append(raw[whole:])
        if whole:
            sums.append(block_sums(_as_words(raw[:whole])))
    pieces = digests(torch.cat(sums)) if sums else np.empty(0, np.uint64)
    left = torch.cat(rests).cpu().numpy().data
    readings: Readings = {}
    for (name, tensor), count, rest in zip(tensors.items(), counts, rests, strict=True):
        readings[name] = Reading(_fingerprint(tensor, pieces[:count], left[: rest.numel()]))
        pieces, left = pieces[count:], left[rest.numel() :]
    return readings


def block_sums(words: Int64[Tensor, "pieces words"]) -> Int64[Tensor, "pieces blocks 8"]:
    """What each block of each piece adds to the eight accumulators, modulo 2⁶⁴.

    Args:
        words: (pieces, PIECE_BYTES / 8), the little-endian words of each piece, on any device.
    """
    parts = range(0, words.shape[0], _PIECES_AT_ONCE)
    return torch.cat([_piece_sums(words[start : start + _PIECES_AT_ONCE]) for start in parts])


def _piece_sums(words: Tensor) -> Tensor:
    blocks = words.reshape(-1, _BLOCKS, _STRIPES, _WORDS)
    usual, final = _secret_keys(words.device)
    return torch.cat([_stripe_sums(blocks[:, :-1], usual), _stripe_sums(blocks[:, -1:], final)], dim=1)


def _secret_keys(device: torch.device) -> Tensor:
    """(2, 16, 8): the secret for any block of a piece, and for its last one, whose last stripe has its own."""
    usual = [[_signed(_secret_word(8 * stripe + 8 * i)) for i in range(_WORDS)] for stripe in range(_STRIPES)]
    final = [_signed(_secret_word(_LAST_STRIPE + 8 * i)) for i in range(_WORDS)]
    return torch.tensor([usual, [*usual[:-1], final]], device=device)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _secret_word(offset: int) -> int:
    return int.from_bytes(_SECRET[offset : offset + 8], "little")


def _stripe_sums(blocks: Tensor, keys: Tensor) -> Tensor:
    keyed = blocks ^ keys
    products = (keyed & _LOW) * ((keyed >> 32) & _LOW)
    plain = blocks.sum(2)
    neighbours = plain.view(*plain.shape[:2], _WORDS // 2, 2).flip(-1).view(plain.shape)
    return neighbours + products.sum(2)


def _as_words(raw: Tensor) -> Tensor:
    aligned = raw if raw.storage_offset() % 8 == 0 else raw.clone()
    return aligned.view(torch.int64).view(-1, PIECE_BYTES // 8)


def digests(sums: Int64[Tensor, "pieces blocks 8"]) -> UInt64[np.ndarray, " pieces"]:
    """The hash of each piece from its blocks' sums. Copies eight numbers a piece to the CPU."""
    device = sums.device
    state = torch.tensor([_signed(word) for word in _START], device=device).repeat(sums.shape[0], 1)
    secret = torch.tensor([_signed(_secret_word(128 + 8 * i)) for i in range(_WORDS)], device=device)
    for block in range(_BLOCKS - 1):
        state = state + sums[:, block]
        state = (state ^ ((state >> 47) & 0x1FFFF) ^ secret) * _PRIME32[0]
    state = state + sums[:, -1]
    return _merged(state.cpu().numpy().view(np.uint64))


def _merged(state: UInt64[np.ndarray, "pieces 8"]) -> UInt64[np.ndarray, " pieces"]:
    result = np.full(len(state), PIECE_BYTES * _PRIME64[0] & (1 << 64) - 1, np.uint64)
    for pair in range(4):
        one = state[:, 2 * pair] ^ np.uint64(_secret_word(11 + 16 * pair))
        other = state[:, 2 * pair + 1] ^ np.uint64(_secret_word(19 + 16 * pair))
        result += _folded_product(one, other)
    result ^= result >> np.uint64(37)
    result *= np.uint64(_AVALANCHE)
    mixed: UInt64[np.ndarray, " pieces"] = result ^ (result >> np.uint64(32))
    return mixed


def _folded_product(
    one: UInt64[np.ndarray, " pieces"], other: UInt64[np.ndarray, " pieces"]
) -> UInt64[np.ndarray, " pieces"]:
    """The two halves of the 128-bit product, combined by exclusive or."""
    low, shift = np.uint64(_LOW), np.uint64(32)
    a, b, c, d = one >> shift, one & low, other >> shift, other & low
    middle = (b * d >> shift) + (a * d & low) + b * c
    high = a * c + (a * d >> shift) + (middle >> shift)
    folded: UInt64[np.ndarray, " pieces"] = (one * other) ^ high
    return folded


def why_unreadable(tensor: Tensor) -> str | None:
    """Why the values of a tensor cannot be looked at; None if they can."""
    try:
        why = _why_out_of_reach(tensor)
        if why is not None:
            return why
        if tensor.is_quantized:
            return "the values are quantised"
        if hasattr(tensor, "__tensor_flatten__"):
            return f"the values are inside a {type(tensor).__name__}"
        if tensor.untyped_storage().nbytes() == 0 < tensor.numel():
            return "the values were freed or moved"
    except PROBE_ERRORS as error:
        return describe(error)
    return None


def samples(
    tensors: Mapping[str, Tensor], *, size: int = SAMPLE_SIZE, floating_only: bool = True
) -> dict[str, Shaped[Tensor, " n"]]:
    """Up to `size` elements of each tensor, on the CPU, in the tensor's own dtype. Never raises.

    Tensors without readable values are left out, and with `floating_only` those of other numbers. What lies on an
    accelerator is waited for.
    """
    sampled: dict[str, Tensor] = {}
    places: dict[tuple[int, torch.device], Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            try:
                if why_unreadable(tensor) is None and (tensor.is_floating_point() or not floating_only):
                    sampled |= {name: _sample_of(tensor, size, places)} if tensor.numel() else {}
            except PROBE_ERRORS:
                continue
        return {name: sample.cpu() for name, sample in sampled.items()}


def _sample_of(tensor: Tensor, size: int, places: dict[tuple[int, torch.device], Tensor]) -> Tensor:
    """The sampled elements; `places` keeps where they are in tensors of each number of elements and device."""
    plain = tensor.detach().as_subclass(Tensor)
    place = plain.numel(), plain.device
    if place not in places:
        places[place] = positions(plain.numel(), size).to(plain.device)
    where: Any = places[place]
    # Indexing does not know all kinds of float8.
    taken = plain.view(torch.uint8) if plain.dtype.itemsize == 1 and plain.dtype != torch.bool else plain
    if taken.is_contiguous():
        return taken.view(-1)[where].view(plain.dtype)
    return taken[torch.unravel_index(where, taken.shape)].view(plain.dtype)


def positions(elements: int, size: int = SAMPLE_SIZE) -> Int64[Tensor, " n"]:
    """Where the sampled elements are in row-major order: all of few, else spread by the golden ratio.

    Multiples of an irrational number, modulo 1, hit no column or row more often than another.
    """
    if elements <= size:
        return torch.arange(elements)
    spread = torch.arange(1, size + 1, dtype=torch.float64).mul(_GOLDEN).remainder(1.0)
    return spread.mul(elements).to(torch.int64).clamp(max=elements - 1)
