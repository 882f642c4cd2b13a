"""What memory an encoding or a decoding will take at its highest, told before it is begun.

The layers that a VAE's config describes are run without weights or values, and the bytes that are alive are
counted; past runs, where there are some, correct the count.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from sigmascope.pipeline.prediction_learning import Experience, Kind
from sigmascope.pipeline.prediction_twin import DryRun, NoTwinError, dry_run
from sigmascope.pipeline.tiling import TilePlan
from sigmascope.probes.reading import attempt
from sigmascope.records.arithmetic import MIB
from sigmascope.records.latents import Basis
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.records.strategies import Direction, Strategy
from sigmascope.stages.latents.vae_facts import inner_vae

MARGIN_ON_ACCELERATOR = 0.1
MARGIN_IN_RAM = 0.25
"""Shares of a prediction that shall be free beside it, for what allocators waste."""

_FEWEST_AXES = 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """Peak memory beyond what is in use when an attempt begins.

    Attributes:
        bytes: The peak; None if it could not be foretold, with the reason in `unavailable`.
        basis: "config" if counted from the VAE's layers, "learned" if past runs had a say.
        tensor_bytes: Of these, those of tensors; the rest is workspace of convolutions, and weights.
        weights_bytes: Weights that the attempt is to move.
        unavailable: Reasons.
    """

    bytes: int | None = None
    basis: Basis | None = None
    tensor_bytes: int | None = None
    weights_bytes: int = 0
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """An attempt that is to be made.

    Attributes:
        shape: Of the whole input: (batch, channels, [frames,] height, width), pixels or latents.
        direction: Whether it encodes or decodes.
        strategy: By which strategy.
        tile: The tiles; None: at once.
        dtype: Of the weights and the computation; None: the VAE's own.
        device_type: Where it runs, such as "cuda".
        batch_at_once: Parts of the batch put through the VAE together; None: one if in tiles, else all.
        moved_weights_bytes: Weights that are copied to where it runs.
    """

    shape: tuple[int, ...]
    direction: Direction = "encoding"
    strategy: Strategy = "direct"
    tile: TilePlan | None = None
    dtype: torch.dtype | None = None
    device_type: str = "cpu"
    batch_at_once: int | None = None
    moved_weights_bytes: int = 0

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what the VAE is given at once."""
        batch, *middle = self.shape[:-2]
        at_once = self.batch_at_once or (batch if self.tile is None else 1)
        sides = self.shape[-2:] if self.tile is None else self._tile_sides(self.tile)
        return (min(at_once, batch), *middle, *sides)

    def _tile_sides(self, tile: TilePlan) -> tuple[int, int]:
        if self.direction == "encoding":
            return tile.largest_input
        rows, columns = tile.rows, tile.columns
        return min(rows.tile, rows.length), min(columns.tile, columns.length)


def predict_peak(vae: object, wanted: Planned, experience: Experience | None = None) -> Prediction:
    """Foretell the peak memory of an attempt. The VAE is neither called nor changed; nothing is raised.

    A copy of what is put through the VAE at once is part of the peak, since the caller's may be elsewhere or
    of another dtype. So are the output, in tiles its sums in float32, and the weights that are to be moved.

    Args:
        vae: A diffusers VAE, any module with `encode` and `decode`, or ComfyUI's VAE.
        wanted: What is to be done.
        experience: From `learn`.
    """
    counted = _counted(vae, wanted)
    learned = (
        None
        if experience is None or len(wanted.shape) < _FEWEST_AXES
        else _learned(vae, wanted, counted.bytes, experience)
    )
    return counted if learned is None else replace(counted, bytes=learned, basis="learned")


def fits(
    prediction: Prediction, memory: MemorySnapshot, device: str | None = None, *, margin: float | None = None
) -> tuple[bool, str]:
    """Whether a predicted peak has room, and the numbers behind it as a sentence.

    What is unknown is no reason to skip anything: then it fits as far as is known, and the sentence says so.

    Args:
        prediction: From `predict_peak`.
        memory: Read just before.
        device: An accelerator such as "cuda:0"; None or "cpu" is the machine's RAM.
        margin: Share of the prediction to be free beside it; None is a quarter in RAM, a tenth elsewhere.
    """
    if prediction.bytes is None:
        why = prediction.unavailable.get("bytes", "no reason is known")
        return True, f"Its peak could not be predicted: {why}."
    free = _free(memory, device)
    in_ram = device in (None, "cpu")
    where = "RAM" if in_ram else device
    if margin is None:
        margin = MARGIN_IN_RAM if in_ram else MARGIN_ON_ACCELERATOR
    if free is None:
        return True, f"How much of {where} is free could not be read."
    needed = int(prediction.bytes * (1 + margin))
    room = needed <= free
    said = f"{prediction.bytes / MIB:,.0f} MB are expected at the peak ({prediction.basis})"
    return room, f"{said}, {'' if room else 'only '}{free / MIB:,.0f} MB of {where} are free."


def _counted(vae: object, wanted: Planned) -> Prediction:
    weights = wanted.moved_weights_bytes
    if len(wanted.shape) < _FEWEST_AXES:
        reason = f"a shape of {len(wanted.shape)} axes has no batch, channels, height and width"
        return Prediction(None, None, None, weights, dict.fromkeys(("bytes", "tensor_bytes"), reason))
    try:
        found = dry_run(vae, wanted.part, wanted.direction, wanted.dtype)
    except NoTwinError as error:
        own = _own_estimate(vae, wanted)
        gaps = dict.fromkeys(("bytes", "tensor_bytes") if own is None else ("tensor_bytes",), str(error))
        return Prediction(own, None if own is None else "config", None, weights, gaps)
    total = _with_what_is_around(found, wanted)
    tensors = total - weights - found.peak_bytes + found.tensor_bytes
    return Prediction(total, "config", tensors, weights)


def _with_what_is_around(found: DryRun, wanted: Planned) -> int:
    """The dry run of a part, the copy of its input, and the output that all parts are put together in."""
    itemsize = found.output_itemsize
    total = found.peak_bytes + math.prod(wanted.part) * itemsize
    parts = -(-wanted.shape[0] // wanted.part[0])
    whole = math.prod(found.output_shape)
    if wanted.tile is not None:
        size = wanted.tile.size(latents=wanted.direction == "encoding")
        whole = math.prod(found.output_shape[:-2]) * math.prod(size)
        total += whole * max(itemsize, 4) if wanted.tile.count > 1 else 0
    if parts > 1:
        total += whole * itemsize * parts
    return total + wanted.moved_weights_bytes


def _own_estimate(vae: object, wanted: Planned) -> int | None:
    """What ComfyUI's VAE reckons with when it makes room for itself."""
    reckon = getattr(
        vae, "memory_used_encode" if wanted.direction == "encoding" else "memory_used_decode", None
    )
    dtype = wanted.dtype or getattr(inner_vae(vae), "vae_dtype", None)
    if not callable(reckon) or dtype is None:
        return None
    reckoned = attempt(lambda: int(reckon(wanted.part, dtype))).value
    return None if reckoned is None else reckoned + wanted.moved_weights_bytes


def _learned(vae: object, wanted: Planned, counted_bytes: int | None, experience: Experience) -> int | None:
    name = type(inner_vae(vae)).__name__
    kind = Kind(name, wanted.direction, wanted.strategy, wanted.device_type)
    return experience.peak(kind, math.prod(wanted.part), counted_bytes)


def _numbered(device: str, memory: MemorySnapshot) -> str:
    """A device without a number is the current one of its kind."""
    current = memory.current_device or ""
    return current if ":" not in device and current.startswith(f"{device}:") else device


def _free(memory: MemorySnapshot, device: str | None) -> int | None:
    if device in (None, "cpu"):
        return memory.ram_available_bytes
    there = memory.accelerator(_numbered(str(device), memory))
    if there.free_bytes is None:
        return None
    return there.free_bytes + (there.reserved_bytes or 0) - (there.allocated_bytes or 0)
