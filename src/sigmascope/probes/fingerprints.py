"""Fingerprints of what tensors contain: whether a weight is still the same, wherever it lies now.

A fingerprint is the XXH3 hash of the values' bytes in row-major order, taken in pieces of 256 KiB whose hashes are
hashed again. The CPU hashes at the speed of memory; an accelerator hashes where the weights are, and sends back some
numbers a piece and what is left over behind the last whole piece (`probes.xxh3`). Both give the same fingerprint.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash
from torch import Tensor

from sigmascope.probes.places import place_of
from sigmascope.probes.reading import PROBE_ERRORS, Reading, describe
from sigmascope.probes.xxh3 import PIECE_BYTES, block_sums, digests

_GROUP_BYTES: Final = 1 << 30
"""Tensors of an accelerator that are hashed together: the steps within a piece are one after another."""
_WORTH_THREADS: Final = 1 << 25
_MOST_THREADS: Final = 8
_ERRORS: Final[tuple[type[Exception], ...]] = (*PROBE_ERRORS, MemoryError)

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
    found: Readings = {name: Reading(None, why) for name, why in reasons.items()}
    on_cpu = {name: tensor for name, tensor in tensors.items() if name not in reasons and _on_cpu(tensor)}
    elsewhere = {n: tensor for n, tensor in tensors.items() if n not in reasons and n not in on_cpu}
    with torch.no_grad():
        found |= _all_on_cpu(on_cpu, threads)
        for group in _groups(elsewhere):
            found |= _group_elsewhere(group)
    return {name: found[name] for name in tensors}


def why_unreadable(tensor: Tensor) -> str | None:
    """Why the values of a tensor cannot be looked at; None if they can."""
    try:
        if torch.compiler.is_compiling():
            return "the values are not there while torch.compile traces"
        if tensor.is_meta or tensor.device.type == "meta":
            return "a meta tensor has no values"
        if hasattr(tensor, "placements"):
            return "the values are spread over several processes"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return f"the layout is {str(tensor.layout).removeprefix('torch.')}"
        if hasattr(tensor, "__tensor_flatten__"):
            return f"the values are inside a {type(tensor).__name__}"
        if tensor.untyped_storage().nbytes() == 0 < tensor.numel():
            return "the values were moved away"
    except PROBE_ERRORS as error:
        return describe(error)
    return None


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _all_on_cpu(tensors: Mapping[str, Tensor], threads: int | None) -> Readings:
    first_of = _same_memory(tensors)
    distinct = {name: tensors[name] for name in dict.fromkeys(first_of.values())}
    nbytes = sum(tensor.nbytes for tensor in distinct.values())
    workers = min(threads or torch.get_num_threads(), _MOST_THREADS)
    if workers > 1 and nbytes > _WORTH_THREADS:
        with ThreadPoolExecutor(workers, "fingerprints") as pool:
            read = dict(zip(distinct, pool.map(_read_on_cpu, distinct.values()), strict=True))
    else:
        read = {name: _read_on_cpu(tensor) for name, tensor in distinct.items()}
    return {name: read[first] for name, first in first_of.items()}


def _same_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first name of the same elements in memory."""
    seen: dict[object, str] = {}
    return {name: seen.setdefault(place_of(tensor), name) for name, tensor in tensors.items()}


def _read_on_cpu(tensor: Tensor) -> Reading[Fingerprint]:
    try:
        with torch.no_grad():
            raw = _bytes_of(tensor).numpy().data
        pieces = np.array(
            [xxhash.xxh3_64_intdigest(raw[start:end]) for start, end in _pieces(len(raw))], np.uint64
        )
        return Reading(_fingerprint(tensor, pieces, raw[len(pieces) * PIECE_BYTES :]))
    except _ERRORS as error:
        return Reading(None, describe(error))


def _bytes_of(tensor: Tensor) -> Tensor:
    """(n,) uint8: the values in row-major order; a view of the tensor where it is contiguous."""
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Beginning and end of each whole piece."""
    for start in range(0, nbytes - PIECE_BYTES + 1, PIECE_BYTES):
        yield start, start + PIECE_BYTES


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


def _group_elsewhere(group: Mapping[str, Tensor]) -> Readings:
    try:
        return _hash_where_it_is(list(group), list(group.values()))
    except _ERRORS as error:
        return dict.fromkeys(group, Reading(None, describe(error)))


def _hash_where_it_is(names: Sequence[str], tensors: Sequence[Tensor]) -> Readings:
    """Hash whole pieces on their device; what is left of each tensor comes to the CPU in one transfer."""
    sums, rests, counts = [], [], []
    for tensor in tensors:
        raw = _bytes_of(tensor)
        whole = raw.numel() - raw.numel() % PIECE_BYTES
        counts.append(whole // PIECE_BYTES)
        rests.append(raw[whole:])
        if whole:
            sums.append(block_sums(_words(raw[:whole])))
    pieces = digests(torch.cat(sums)) if sums else np.empty(0, np.uint64)
    left = torch.cat(rests).cpu().numpy().data
    found: Readings = {}
    for name, tensor, count, rest in zip(names, tensors, counts, rests, strict=True):
        found[name] = Reading(_fingerprint(tensor, pieces[:count], left[: rest.numel()]))
        pieces, left = pieces[count:], left[rest.numel() :]
    return found


def _words(raw: Tensor) -> Tensor:
    aligned = raw if raw.storage_offset() % 8 == 0 else raw.clone()
    return aligned.view(torch.int64).view(-1, PIECE_BYTES // 8)
