"""Fingerprints of what tensors contain, and samples of it.

A fingerprint is the XXH3 hash of the values' bytes in row-major order, taken in pieces of 256 KiB whose hashes are
hashed again. The CPU hashes with the `xxhash` package, at the speed of memory. An accelerator hashes where the weights
are (`block_sums`, `digests`), and sends back some numbers a piece and what is left over behind the last whole piece.
Both give the same fingerprint. XXH3 reads a piece in blocks of 1 KiB, 16 stripes of eight 64-bit words each. Within a
block it only adds, so that all blocks of all pieces are summed side by side; only their eight sums a block are then
scrambled one after another.

`samples` takes a thousand elements of a tensor, the same ones each time: they tell how much a weight changed when its
old content is gone. For two contents of one weight they give ‖ΔW‖ to some per cent, as changes by LoRAs and by
rounding are spread over the whole weight.

Each has a form that does not wait for an accelerator (`begin_fingerprints`, `begin_samples`): whatever the number of
tensors, one copy of a device comes to the host.

Y. Collet, xxHash fast digest algorithm, XXH3 for inputs longer than 240 bytes:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash
from jaxtyping import Int64, Shaped, UInt8, UInt64
from torch import Tensor

from sigmascope.probes.copies import HostCopy, Pending, copy_to_device, copy_to_host
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt
from sigmascope.probes.tensors import PLAIN_TENSORS, is_at_hand, place_of, why_unreadable

_GROUP_BYTES: Final = 1 << 30
"""Tensors of an accelerator that are hashed together: the steps within a piece are one after another."""
_WORTH_THREADS: Final = 1 << 25
_MOST_THREADS: Final = 8
_SMALL_BYTES: Final = 1 << 14
_NO_PIECES: Final = np.empty(0, np.uint64)
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


def fingerprints(
    tensors: Mapping[str, Tensor], *, threads: int | None = None, joined: "Joined | None" = None
) -> Readings:
    """Fingerprints by name, or why there are none. Never raises, changes nothing, keeps nothing alive.

    Tensors that are the same elements in memory are read once, unless they are small: these are joined. What is not
    contiguous is copied, one tensor at a time. An accelerator's tensors are waited for.

    Args:
        tensors: Of any dtype, layout and device.
        threads: How many hash on the CPU at once; None: as many as torch calculates with, at most eight.
        joined: What `join_small` gave of the same tensors just now.
    """
    told = attempt(begin_fingerprints(tensors, threads=threads, joined=joined).result)
    return told.value or dict.fromkeys(tensors, Reading(None, told.reason))


def begin_fingerprints(
    tensors: Mapping[str, Tensor], *, threads: int | None = None, joined: "Joined | None" = None
) -> Pending[Readings]:
    """The same without waiting for an accelerator's tensors, which may change from now on."""
    known = {} if joined is None else joined.fingerprints()
    left = {name: tensor for name, tensor in tensors.items() if name not in known}
    reasons = {name: why for name, tensor in left.items() if (why := why_unreadable(tensor))}
    readings: Readings = known | {name: Reading(None, why) for name, why in reasons.items()}
    on_cpu = {name: tensor for name, tensor in left.items() if name not in reasons and _on_cpu(tensor)}
    elsewhere = {n: tensor for n, tensor in left.items() if n not in reasons and n not in on_cpu}
    with torch.no_grad():
        readings |= _all_on_cpu(on_cpu, threads)
        groups = [([*group], attempt(partial(_hash_where_it_is, group))) for group in _groups(elsewhere)]
    names = [*tensors]  # alone: nothing that is still on its way keeps the weights alive

    def finished() -> Readings:
        for group, begun in groups:
            hashed = Reading(None, begun.reason) if begun.value is None else attempt(begun.value.finish)
            readings.update(hashed.value or dict.fromkeys(group, Reading(None, hashed.reason)))
        return {name: readings[name] for name in names}

    return Pending(finished, [begun.value.copy for _, begun in groups if begun.value is not None])


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _all_on_cpu(tensors: Mapping[str, Tensor], threads: int | None) -> Readings:
    small = attempt(partial(_hash_small, tensors)).value or {}
    seen: dict[object, str] = {}
    others = ((name, tensor) for name, tensor in tensors.items() if name not in small)
    first_of = {name: seen.setdefault(place_of(tensor), name) for name, tensor in others}
    distinct = {name: tensors[name] for name in dict.fromkeys(first_of.values())}
    nbytes = sum(tensor.nbytes for tensor in distinct.values())
    workers = min(threads or torch.get_num_threads(), _MOST_THREADS)
    if workers > 1 and nbytes > _WORTH_THREADS:
        with ThreadPoolExecutor(workers, "fingerprints") as pool:
            read = dict(zip(distinct, pool.map(_read_on_cpu, distinct.values()), strict=True))
    else:
        read = {name: _read_on_cpu(tensor) for name, tensor in distinct.items()}
    return small | {name: read[first] for name, first in first_of.items()}


def _hash_small(tensors: Mapping[str, Tensor]) -> Readings:
    """Of those that are so small that reading each by itself would take longer than hashing it."""
    small = {name: tensor for name, tensor in tensors.items() if tensor.nbytes <= _SMALL_BYTES}
    shapes = {name: (*map(int, tensor.shape),) for name, tensor in small.items()}
    return Joined(shapes, [*_joined_by_dtype(small.items())]).fingerprints()


@dataclass(frozen=True, slots=True)
class Joined:
    """The bytes of small tensors on the CPU, joined once for their fingerprints and for samples of them."""

    shapes: Mapping[str, tuple[int, ...]]
    groups: "Sequence[tuple[_Lengths, Tensor]]"

    def fingerprints(self) -> Readings:
        """Of each."""
        readings: Readings = {}
        for parts, joined in self.groups:
            raw = joined.numpy().data
            start = 0
            for name, nbytes, dtype in parts:
                rest = raw[start : start + nbytes]
                readings[name] = Reading(_fingerprint(self.shapes[name], dtype, _NO_PIECES, rest))
                start += nbytes
        return readings

    def parts_of(self, wanted: Collection[str]) -> "dict[str, _Part]":
        """Where the bytes of these are."""
        parts: dict[str, _Part] = {}
        for lengths, joined in self.groups:
            end = 0
            for name, nbytes, dtype in lengths:
                start, end = end, end + nbytes
                if name in wanted:
                    parts[name] = _Part(joined, start, end, dtype)
        return parts


def join_small(tensors: Mapping[str, Tensor]) -> Joined:
    """Join those that samples take whole, and that lie as plain tensors do. Never raises."""
    small = {
        name: tensor
        for name, tensor in tensors.items()
        if is_at_hand(tensor) and 0 < tensor.numel() <= SAMPLE_SIZE
    }
    with torch.no_grad():
        groups = attempt(lambda: [*_joined_by_dtype(small.items())]).value or []
    return Joined({name: (*map(int, tensor.shape),) for name, tensor in small.items()}, groups)


_Lengths = list[tuple[str, int, torch.dtype]]
"""Names with the number of bytes and the type."""


def _joined_by_dtype(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[_Lengths, Tensor]]:
    """The bytes of plain tensors that lie in row-major order, joined with few operations; the others are left out."""
    by_dtype: defaultdict[torch.dtype, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        if type(tensor) in PLAIN_TENSORS and tensor.is_contiguous() and not tensor.is_neg():
            by_dtype[tensor.dtype][name] = tensor
    for dtype, own in by_dtype.items():
        joined = attempt(partial(_joined, own.values()))
        if joined.value is not None:
            yield [(name, tensor.nbytes, dtype) for name, tensor in own.items()], joined.value


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    if any(tensor.is_conj() for tensor in tensors):
        raise TypeError("bits of conjugated numbers")
    return torch.cat([tensor.view(-1) for tensor in tensors]).view(torch.uint8)


def _read_on_cpu(tensor: Tensor) -> Reading[Fingerprint]:
    return attempt(lambda: _hash_on_cpu(tensor))


def _hash_on_cpu(tensor: Tensor) -> Fingerprint:
    return _fingerprint_of((*map(int, tensor.shape),), tensor.dtype, _bytes_of(tensor).numpy().data)


def _fingerprint_of(shape: tuple[int, ...], dtype: torch.dtype, raw: memoryview) -> Fingerprint:
    if len(raw) < PIECE_BYTES:
        return _fingerprint(shape, dtype, _NO_PIECES, raw)
    starts = range(0, len(raw) - PIECE_BYTES + 1, PIECE_BYTES)  # of whole pieces
    pieces = np.array([xxhash.xxh3_64_intdigest(raw[at : at + PIECE_BYTES]) for at in starts], np.uint64)
    return _fingerprint(shape, dtype, pieces, raw[len(pieces) * PIECE_BYTES :])


def _bytes_of(tensor: Tensor) -> Tensor:
    """(n,) uint8: the values in row-major order; a view of the tensor where it is contiguous."""
    plain = tensor.detach()
    if type(plain) is Tensor and plain.numel() > 1 and plain.is_contiguous() and not plain.is_complex():
        return (plain.resolve_neg() if plain.is_neg() else plain).view(-1).view(torch.uint8)
    plain = plain.as_subclass(Tensor).resolve_conj().resolve_neg()
    # A single element counts as contiguous whatever its stride, and a view as bytes wants a stride of 1.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _fingerprint(
    shape: tuple[int, ...], dtype: torch.dtype, pieces: np.ndarray, rest: memoryview
) -> Fingerprint:
    last = xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little")
    whole = pieces.astype("<u8").tobytes() if len(pieces) else b""
    return Fingerprint(shape, _name_of(dtype), xxhash.xxh3_64_intdigest(whole + last))


@lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


@dataclass(frozen=True, slots=True)
class _Hashing:
    """Tensors that are hashed on their device: the state of each whole piece, and what is left of each tensor."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    pieces: tuple[int, ...]
    rests: tuple[int, ...]
    copy: HostCopy
    unread: Readings

    def finish(self) -> Readings:
        """The fingerprints, of what has arrived."""
        arrived = self.copy.tensor.numpy()
        states, left = arrived[: 64 * sum(self.pieces)], arrived[64 * sum(self.pieces) :].data
        digested = _merged(states.view(np.uint64).reshape(-1, _WORDS))
        readings = dict(self.unread)
        for (name, (shape, dtype)), count, rest in zip(
            self.tensors.items(), self.pieces, self.rests, strict=True
        ):
            readings[name] = Reading(_fingerprint(shape, dtype, digested[:count], left[:rest]))
            digested, left = digested[count:], left[rest:]
        return readings


def _hash_where_it_is(tensors: Mapping[str, Tensor]) -> _Hashing:
    """Hash whole pieces on their device; they and what is left of each tensor come to the CPU in one transfer."""
    parts = {name: attempt(partial(_sums_and_rest, tensor)) for name, tensor in tensors.items()}
    read = {name: part.value for name, part in parts.items() if part.value is not None}
    sums, rests = [sums for sums, _ in read.values() if len(sums)], [rest for _, rest in read.values()]
    states = [piece_states(torch.cat(sums)).view(torch.uint8).view(-1)] if sums else []
    return _Hashing(
        {name: (tuple(map(int, tensors[name].shape)), tensors[name].dtype) for name in read},
        tuple(len(sums) for sums, _ in read.values()),
        tuple(rest.numel() for rest in rests),
        copy_to_host(torch.cat([*states, *rests]) if rests else torch.empty(0, dtype=torch.uint8)),
        {name: Reading(None, part.reason) for name, part in parts.items() if part.value is None},
    )


def _sums_and_rest(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The block sums of a tensor's whole pieces, and the bytes behind them."""
    raw = _bytes_of(tensor)
    whole = raw.numel() - raw.numel() % PIECE_BYTES
    return block_sums(_as_words(raw[:whole])) if whole else raw[:0], raw[whole:]


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
    return copy_to_device(torch.tensor([usual, [*usual[:-1], final]]), device)


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
    return _merged(piece_states(sums).cpu().numpy().view(np.uint64))


def piece_states(sums: Int64[Tensor, "pieces blocks 8"]) -> Int64[Tensor, "pieces 8"]:
    """The eight accumulators of each piece from its blocks' sums, where these are."""
    start, secret = copy_to_device(
        torch.tensor(
            [[_signed(word) for word in _START], [_signed(_secret_word(128 + 8 * i)) for i in range(_WORDS)]]
        ),
        sums.device,
    )
    state: Tensor = start.repeat(sums.shape[0], 1)
    for block in range(_BLOCKS - 1):
        state = state + sums[:, block]
        state = (state ^ ((state >> 47) & 0x1FFFF) ^ secret) * _PRIME32[0]
    return state + sums[:, -1]


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


class Samples(Mapping[str, Tensor]):
    """Elements of tensors by name, one after the other as bytes: each is cut out only when it is asked for."""

    __slots__ = ("_compared", "_parts")

    def __init__(self, parts: Mapping[str, "_Part"]) -> None:
        self._parts = parts
        self._compared: tuple[Samples, frozenset[str]] | None = None

    def __getitem__(self, name: str) -> Shaped[Tensor, " n"]:
        part = self._parts[name]
        # A copy, as the bytes of one need not lie where a number of its dtype may.
        return part.held[part.start : part.end].clone().view(part.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __or__(self, others: "Samples") -> "Samples":
        return Samples({**self._parts, **others._parts})

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Of the elements of each, as they lie."""
        held = {id(part.held): part.held for part in self._parts.values()}
        raw = {address: tensor.numpy().data for address, tensor in held.items()}
        return {
            name: _fingerprint_of(
                (part.nbytes // part.dtype.itemsize,), part.dtype, raw[id(part.held)][part.start : part.end]
            )
            for name, part in self._parts.items()
        }

    def dtype(self, name: str) -> torch.dtype:
        """Of one tensor."""
        return self._parts[name].dtype

    def others_than(self, before: "Samples") -> frozenset[str]:
        """The names of both whose elements are not the same bits, NaN included."""
        if self._compared is None or self._compared[0] is not before:
            self._compared = before, self._others_than(before)
        return self._compared[1]

    def _others_than(self, before: "Samples") -> frozenset[str]:
        old = before._parts
        both = [name for name in self._parts if name in old]
        alike = [name for name in both if self._parts[name].nbytes == old[name].nbytes]
        changed = set(both).difference(alike)
        # As they lie in the one, which is mostly how they lie in the other too.
        alike.sort(key=lambda name: (id(old[name].held), old[name].start))
        now, then = (_bytes_in_order([parts[name] for name in alike]) for parts in (self._parts, old))
        is_other = now != then
        if is_other.any():
            starts = [*accumulate((old[name].nbytes for name in alike), initial=0)][:-1]
            places = np.flatnonzero(np.logical_or.reduceat(is_other, starts))
            changed.update(alike[place] for place in places.tolist())
        return frozenset(changed)


class _Part(NamedTuple):
    """Where the bytes of one tensor's samples lie; there is at least one."""

    held: Tensor
    start: int
    end: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.end - self.start


def _bytes_in_order(parts: Sequence[_Part]) -> UInt8[np.ndarray, " n"]:
    """The bytes of all; those that lie one after the other are taken together."""
    if not parts:
        return np.empty(0, np.uint8)
    ends = [
        place
        for place, (one, other) in enumerate(pairwise(parts), 1)
        if one.end != other.start or other.held is not one.held
    ]
    runs = [
        parts[first].held.numpy()[parts[first].start : parts[last - 1].end]
        for first, last in pairwise([0, *ends, len(parts)])
    ]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


NO_SAMPLES: Final = Samples({})


def samples(tensors: Mapping[str, Tensor], *, size: int = SAMPLE_SIZE, floating_only: bool = True) -> Samples:
    """Up to `size` elements of each tensor, on the CPU, in the tensor's own dtype. Never raises.

    Tensors without readable values are left out, and with `floating_only` those of other numbers. What lies on an
    accelerator is waited for.
    """
    begun = attempt(begin_samples(tensors, size=size, floating_only=floating_only).result)
    return NO_SAMPLES if begun.value is None else begun.value


def begin_samples(
    tensors: Mapping[str, Tensor],
    *,
    size: int = SAMPLE_SIZE,
    floating_only: bool = True,
    joined: Joined | None = None,
) -> Pending[Samples]:
    """The same without waiting for an accelerator, whose tensors may change from now on.

    Args:
        tensors: By name.
        size: Elements of each.
        floating_only: Whether others are left out.
        joined: What `join_small` gave of these or more of them just now, for this `size` and all kinds of numbers.
    """
    at_hand = {} if joined is None else joined.parts_of(tensors)
    left = {name: tensor for name, tensor in tensors.items() if name not in at_hand}
    wanted: defaultdict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in left.items():
        try:
            is_wanted = tensor.is_floating_point() or not floating_only
            if is_wanted and why_unreadable(tensor) is None and tensor.numel():
                wanted[tensor.device][name] = tensor
        except PROBE_ERRORS:
            continue
    with torch.no_grad():
        begun = [attempt(partial(_gather, device, own, size)) for device, own in wanted.items()]
    # Their names alone: nothing that is still on its way keeps the weights alive.
    found = at_hand.keys() | {name for own in wanted.values() for name in own}
    names = [name for name in tensors if name in found]
    del wanted, left

    def finished() -> Samples:
        parts = dict(at_hand)
        for reading in begun:
            if reading.value is not None:
                parts |= reading.value.parts()
        return Samples({name: parts[name] for name in names if name in parts})

    return Pending(finished, [reading.value.copy for reading in begun if reading.value is not None])


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The samples of all tensors of a device, one after the other as bytes."""

    lengths: _Lengths
    copy: HostCopy

    def parts(self) -> dict[str, _Part]:
        """Where each one is."""
        ends = accumulate(nbytes for _, nbytes, _ in self.lengths)
        return {
            name: _Part(self.copy.tensor, end - nbytes, end, dtype)
            for (name, nbytes, dtype), end in zip(self.lengths, ends, strict=True)
        }


def _gather(device: torch.device, tensors: Mapping[str, Tensor], size: int) -> _Gathered:
    """Take the samples of one device's tensors, with one upload of where they are and one download of what they are."""
    small = ((name, tensor) for name, tensor in tensors.items() if tensor.numel() <= size)
    lengths: _Lengths = []
    taken: list[Tensor] = []
    for parts, joined in _joined_by_dtype(small):  # all elements of each
        lengths += parts
        taken.append(joined)
    known = {name for name, _, _ in lengths}
    own: dict[str, Tensor] = {}
    places: dict[object, Tensor] = {}  # of each form of a tensor
    for name, tensor in tensors.items():
        if name in known:
            continue
        try:
            plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
            if _form(plain) not in places:
                places[_form(plain)] = _offsets(plain, size)
        except PROBE_ERRORS:
            continue
        own[name] = plain
    counts = [where.numel() for where in places.values()]
    uploaded = torch.split(copy_to_device(torch.cat([*places.values()]), device), counts) if counts else ()
    where = dict(zip(places, uploaded, strict=True))
    for name, tensor in own.items():
        try:
            elements = _elements(tensor, where[_form(tensor)])
        except PROBE_ERRORS:
            continue
        lengths.append((name, elements.numel(), tensor.dtype))
        taken.append(elements)
    return _Gathered(lengths, copy_to_host(torch.cat(taken)))


def _form(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.numel(),) if tensor.is_contiguous() else (tuple(tensor.shape), tensor.stride())


def _offsets(tensor: Tensor, size: int) -> Int64[Tensor, " n"]:
    """Where the sampled elements lie in memory, counted from the first."""
    places = positions(tensor.numel(), size)
    if tensor.is_contiguous():
        return places
    strides = torch.tensor(tensor.stride())
    return (torch.stack(torch.unravel_index(places, tensor.shape), dim=1) * strides).sum(1)


def _elements(tensor: Tensor, where: Tensor) -> Tensor:
    """(n,) uint8: the bytes of the elements at these offsets."""
    reach = 1 + sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    # Indexing does not know all kinds of float8.
    known = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool else tensor
    return known.as_strided((reach,), (1,))[where].view(torch.uint8)


def positions(elements: int, size: int = SAMPLE_SIZE) -> Int64[Tensor, " n"]:
    """Where the sampled elements are in row-major order: all of few, else spread by the golden ratio.

    Multiples of an irrational number, modulo 1, hit no column or row more often than another.
    """
    if elements <= size:
        return torch.arange(elements)
    spread = torch.arange(1, size + 1, dtype=torch.float64).mul(_GOLDEN).remainder(1.0)
    return spread.mul(elements).to(torch.int64).clamp(max=elements - 1)
