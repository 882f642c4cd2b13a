"""What a way of storing a weight is: the scales beside its codes, and how codes become numbers and numbers codes again."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo, shortened
from sigmascope.checkpoints.rounding import Spread, Sums
from sigmascope.errors import CheckpointError

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Scales = Mapping[str, Tensor]

FP8: Final = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
E4M3, BYTE, INT8 = torch.float8_e4m3fn, torch.uint8, torch.int8
E8M0: Final = getattr(torch, "float8_e8m0fnu", BYTE)
REAL: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
DAMAGED: Final = "Download the checkpoint again, or quantise it again: a weight cannot be read without its scales and their description."
_MAX_TEXT_BYTES: Final = 1 << 16
BLOCK_SCALE_TYPES: Final = frozenset({E4M3, E8M0, BYTE})


class Scale(NamedTuple):
    """A tensor beside a weight that its codes are read with.

    Attributes:
        endings: Of its key, in place of the weight's `.weight`; the first that is there counts.
        dtypes: That it can have.
        fits: Whether it can have a shape, for a weight of a shape.
        optional: Whether it may be missing.
    """

    endings: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    fits: Callable[[Shape, Shape], bool]
    optional: bool = False


def parsed(checkpoint: Checkpoint, key: str, text: bytes) -> dict[str, Any]:
    """What a JSON text says.

    Raises:
        CheckpointError: It is none.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise CheckpointError(
            checkpoint.path, f"{shortened(key)} is no JSON text that describes a quantisation.", hint=DAMAGED
        )
    return parsed


@dataclass(frozen=True, slots=True)
class Layer:
    """What a file has of one layer, by the end of the key in place of the weight's `.weight`."""

    checkpoint: Checkpoint
    name: str

    def key(self, endings: tuple[str, ...]) -> str | None:
        """The first key with one of these endings that is there."""
        return next((self.name + end for end in endings if self.name + end in self.checkpoint), None)

    def info(self, ending: str) -> TensorInfo | None:
        """The facts of a tensor; None if there is none."""
        key = self.name + ending
        return self.checkpoint.info(key) if key in self.checkpoint else None

    def text(self, ending: str) -> Config:
        """A JSON text that is stored as a tensor of bytes."""
        return parsed(self.checkpoint, self.name + ending, bytes(self._few(ending).flatten().tolist()))

    def number(self, ending: str) -> int:
        """A whole number that is stored as a tensor."""
        return int(self._few(ending).sum())

    def _few(self, ending: str) -> Tensor:
        key = self.name + ending
        if self.checkpoint.info(key).nbytes > _MAX_TEXT_BYTES:
            raise CheckpointError(
                self.checkpoint.path, f"{shortened(key)} is too long for a text.", hint=DAMAGED
            )
        return self.checkpoint.tensor(key)


class Kind(NamedTuple):
    """A way of storing a weight.

    Attributes:
        title: Its name.
        codes: The types that codes can have.
        packed: How many numbers are in a code.
        scales: By the name that the functions know them by.
        named: ComfyUI's `format`, and what else its text says, to what the functions need to know; None if it is not
            the text of this kind.
        told: The weight and what lies beside it to the same, where no text names the kind.
        numbers: Codes of some rows, and their scales, to float32. None: there is no reader.
        again: The largest magnitude of a whole weight, and some rows of numbers, to what is read once those are stored
            with rounding to the nearest.
        merged: The same as ComfyUI stores a sum with a LoRA, on average. None: ComfyUI stores none this way.
        store: The numbers to store (`rounding.Sums`), the scales, what is known, and the shape as a matrix to new codes
            and scales; None: no way to store numbers.
        unusable: Why what is known of a weight of a shape does not do to read it; None if it does.
        by_row: Whether the codes of some rows are some rows of the codes.
        served: Endings of keys that only describe the storing.
        filled_up: Rows and columns are filled up with zeros to a multiple of this.
    """

    title: str
    codes: frozenset[torch.dtype]
    packed: int = 1
    scales: Mapping[str, Scale] = {}
    named: Callable[[str, Config], Config | None] = lambda name, config: None
    told: Callable[[TensorInfo, Layer], Config | None] = lambda info, beside: None
    numbers: Callable[[Tensor, Scales, Config], Tensor] | None = None
    again: Callable[[Tensor, Tensor, Scales, Config], Tensor] | None = None
    merged: Callable[[Tensor, Tensor, Scales, Config], Spread] | None = None
    store: Callable[[Sums, Scales, Config, tuple[int, int]], tuple[Tensor, Scales]] | None = None
    unusable: Callable[[Config, Shape], str | None] = lambda config, shape: None
    by_row: bool = True
    served: tuple[str, ...] = ()
    filled_up: int = 1


def named(*formats: str) -> Callable[[str, Config], Config | None]:
    """Whether ComfyUI's `format` is one of these."""
    return lambda name, config: {} if name in formats else None


def is_one(weight: Shape, scale: Shape) -> bool:
    """Whether a scale is a single number."""
    return set(scale) <= {1}


def per_row(weight: Shape, scale: Shape) -> bool:
    """Whether a scale has a number for each row."""
    return scale in {(weight[0],), (weight[0], 1)}


def is_vector(weight: Shape, scale: Shape) -> bool:
    """Whether a scale is a list of numbers, whose length the functions know."""
    return len(scale) == 1


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def in_tiles(block: int) -> Callable[[Shape, Shape], bool]:
    """Whether scales of blocks along the rows lie in the 128×4 tiles that cuBLAS wants."""

    def fits(weight: Shape, scale: Shape) -> bool:
        tiles = (rounded_up(weight[0], 128), rounded_up(weight[-1] // block, 4))
        return len(weight) == 2 and math.prod(scale) == math.prod(tiles)

    return fits
