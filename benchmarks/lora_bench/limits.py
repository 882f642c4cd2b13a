"""What no extraction can be faster than on this machine: reading both files, and the products with every change."""

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from lora_bench.pairs import Shapes, shape_classes

PRODUCTS = 6
"""Products of Δ with a block of vectors: a sketch, two power steps of two each, and the projection."""
_ROUNDS = 3
_PIECE_BYTES = 4 * 2**20
_SPOTS = 256


@dataclass(frozen=True)
class Limits:
    """Times for all layers of a pair, with as many threads as PyTorch takes.

    Attributes:
        read_bytes: Of both files together.
        read_seconds: To read them once, from memory where the system still holds them.
        subtract_seconds: To form every Δ in float32.
        product_flop: Of one product of every Δ with as many vectors as its rank.
        product_seconds: Of these, by `float32` and `bfloat16`, measured on each shape.
    """

    read_bytes: int
    read_seconds: float
    subtract_seconds: float
    product_flop: float
    product_seconds: dict[str, float]

    def lower_limit(self, dtype: str) -> float:
        """Seconds to read, subtract and make `PRODUCTS` products."""
        return self.read_seconds + self.subtract_seconds + PRODUCTS * self.product_seconds[dtype]


def measure_limits(
    files: tuple[Path, ...], shapes: Shapes, rank: int, conv_rank: int, device: str = "cpu"
) -> Limits:
    """Time each part once on every shape and multiply by how often the shape occurs.

    Args:
        files: Of both models.
        shapes: By key.
        rank: Width of the block for Linear layers.
        conv_rank: Width of the block for convolutions.
        device: Where Δ is formed and multiplied; bringing the weights there is not counted.
    """
    subtract, flop = 0.0, 0.0
    products = {"float32": 0.0, "bfloat16": 0.0}
    for shape, names in shape_classes(shapes).items():
        rows, columns = shape[0], math.prod(shape[1:])
        width = min(rank if len(shape) == 2 else conv_rank, rows, columns)
        matrix = torch.randn(rows, columns, device=device)
        stored = matrix.bfloat16()
        subtract += len(names) * seconds(_difference, stored, stored, torch.empty_like(matrix))
        flop += len(names) * 2.0 * rows * columns * width
        for dtype in (torch.float32, torch.bfloat16):
            block = torch.randn(columns, width, device=device).to(dtype)
            taken = seconds(torch.matmul, matrix.to(dtype), block)
            products[str(dtype).removeprefix("torch.")] += len(names) * taken
    return Limits(sum(file.stat().st_size for file in files), read_all(files), subtract, flop, products)


def _difference(tuned: Tensor, base: Tensor, out: Tensor) -> Tensor:
    return out.copy_(tuned).sub_(base)


def seconds(work: Callable[..., object], *args: object) -> float:
    """Median of a few rounds after one to warm up; waits for a GPU to be done."""
    work(*args)
    _wait()
    times = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        work(*args)
        _wait()
        times.append(time.perf_counter() - begun)
    return median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_all(files: Iterable[Path]) -> float:
    """Read every byte of the files into one small buffer; seconds."""
    buffer = bytearray(_PIECE_BYTES)
    begun = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - begun


def drop_from_cache(files: Iterable[Path]) -> None:
    """Ask the system to forget its copies in memory, where it can be asked (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Iterable[Path]) -> float | None:
    """Share of a few hundred spots in the files that can be read without the disk; None where nobody tells."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    found = asked = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb", buffering=0) as stream:
            # Else the asking itself would make the system read ahead.
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for spot in range(_SPOTS):
                asked += 1
                try:
                    found += os.preadv(stream.fileno(), [bytearray(1)], spot * size // _SPOTS, os.RWF_NOWAIT)
                except BlockingIOError:
                    continue
                except OSError:  # a file system that cannot say
                    return None
    return found / asked if asked else None
