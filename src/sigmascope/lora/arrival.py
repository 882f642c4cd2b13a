"""How much of a LoRA arrives when it is merged into a base that is stored coarsely, and how much noise comes with it.

A host that merges adds the wanted change Δ to the base weight W, and stores the sum the way that W was stored. What the
layer then computes with has changed by `real` = Q(W + Δ) − W, and real = share·Δ + noise with the noise orthogonal to Δ:

    share = <real, Δ> / ‖Δ‖²        noise = ‖real − share·Δ‖ / ‖Δ‖

The share is 1 and the noise 0 where nothing is lost. Small changes lie below half a step of a coarse format: rounding to
the nearest then gives W again, and the share is 0. Stochastic rounding (ComfyUI's, for most formats) keeps the share near
1 and makes noise instead. A LoRA beside the weight, as PEFT and ComfyUI-GGUF run it, arrives whole.

`arrivals` computes both for a file and a base without running either, with one weight in memory at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import fsum, prod, sqrt
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.adapters import form_delta
from sigmascope.lora.compatibility import place, shapes_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import WEIGHT, block_of_module, block_position
from sigmascope.lora.reader import open_any_kind
from sigmascope.lora.verdict import verdict_finding
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted

__all__ = ["Arrival", "Arrivals", "BlockArrival", "arrival_findings", "arrival_of", "arrivals"]

WEAK_SHARE: Final = 0.8
"""Below it, `lora_arrives_weak`."""
NOISY: Final = 0.5
"""Above it, `lora_arrives_noisy`."""
_PIECE_ELEMENTS: Final = 1 << 20
_TILE_ROWS: Final = 128


@dataclass(frozen=True, slots=True)
class Arrival:
    """What arrives of a wanted change, as sums that add up over weights.

    Attributes:
        wanted: ‖Δ‖².
        inner: <real, Δ>.
        real: ‖real‖².
        stored: How the weight is stored.
        unavailable: Why nothing is known of it; None if it is.
    """

    wanted: float
    inner: float
    real: float
    stored: str = ""
    unavailable: str | None = None

    @property
    def share(self) -> float | None:
        """<real, Δ> / ‖Δ‖²; None if nothing is wanted, or nothing is known."""
        return self.inner / self.wanted if self.wanted > 0.0 else None

    @property
    def noise(self) -> float | None:
        """‖real − share·Δ‖ / ‖Δ‖; None where the share is."""
        if self.wanted <= 0.0:
            return None
        return sqrt(max(self.real / self.wanted - (self.inner / self.wanted) ** 2, 0.0))

    def as_dict(self) -> dict[str, Any]:
        """Share and noise as JSON values."""
        figures = {"share": self.share, "noise": self.noise, "stored": self.stored}
        return {**figures, "wanted_norm": sqrt(self.wanted), "unavailable": self.unavailable}


@dataclass(frozen=True, slots=True)
class BlockArrival:
    """What arrives in the weights of one block.

    Attributes:
        name: Such as `up_blocks.1`.
        weights: How many of its weights the LoRA changes.
        known: Of how many the arrival is known.
        share: See `Arrival.share`.
        noise: See `Arrival.noise`.
        stored: How its weights are stored.
    """

    name: str
    weights: int
    known: int
    share: float | None
    noise: float | None
    stored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What arrives of a LoRA in each weight that it changes.

    Attributes:
        strength: Of the LoRA.
        weights: By the base's key.
    """

    strength: float
    weights: Mapping[str, Arrival] = field(default_factory=dict)

    @property
    def overall(self) -> Arrival:
        """All weights whose arrival is known, together."""
        return together(self.weights.values())

    @property
    def blocks(self) -> tuple[BlockArrival, ...]:
        """The same by block, in the order in which a latent passes them."""
        placed = sorted(
            ((block_of_module(key), arrival) for key, arrival in self.weights.items()),
            key=lambda item: block_position(item[0]),
        )
        return tuple(
            _block(name, [arrival for _, arrival in members])
            for name, members in groupby(placed, key=lambda item: item[0])
        )

    @property
    def unavailable(self) -> dict[str, str]:
        """Why nothing is known of a weight, by its key."""
        return {key: one.unavailable for key, one in self.weights.items() if one.unavailable is not None}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is lost, with what helps."""
        return tuple(arrival_findings(self.overall, len(self.weights) - len(self.unavailable)))

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values, totals first."""
        overall = self.overall
        return {
            "strength": self.strength,
            "share": overall.share,
            "noise": overall.noise,
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [{**asdict(block), "stored": list(block.stored)} for block in self.blocks],
            "weights": {key: arrival.as_dict() for key, arrival in self.weights.items()},
        }


def arrivals(
    lora: str | PathLike[str],
    base: Checkpoint,
    *,
    strength: float = 1.0,
    progress: Progress = no_progress,
) -> Arrivals:
    """What arrives of a LoRA file if a host merges it into a base and stores the sum as the base is stored.

    Rounding is to the nearest.

    Args:
        lora: A file of any format.
        base: The open checkpoint; only the weights that the LoRA changes are read, one at a time.
        strength: Of the LoRA.
        progress: Told after each weight.

    Returns:
        The arrivals. A weight that cannot be read, or whose format numbers cannot be stored in here, has its reason.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: It follows no known format.
    """
    found: dict[str, Arrival] = {}
    with open_any_kind(Path(lora)) as file:
        shapes = shapes_of(base)
        placing = place(file, shapes)
        own = file if placing.lora is None else placing.lora
        keys = {name: key for name in own.names if (key := _key_of(name, shapes)) is not None}
        landed = {key for keys_of_module in placing.keys.values() for key in keys_of_module}
        wanted = {name: key for name, key in keys.items() if key in landed and len(shapes[key]) > 1}
        for name, key in wanted.items():
            found[key] = _arrival(own, name, base, key, strength)
            progress(len(found), len(wanted), key)
    return Arrivals(strength, found)


def _key_of(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    return next((key for key in (f"{name}{WEIGHT}", name) if key in shapes), None)


def _arrival(lora: LoraFile, name: str, base: Checkpoint, key: str, strength: float) -> Arrival:
    try:
        rounding = base.rounding(key)
        weight = base.tensor(key)
        rows = weight.shape[0]
        weight = weight.reshape(rows, -1).to(torch.float32)
        change = lora.change(name)
        if isinstance(change, LoraFactors):
            up, down = change.up.to(torch.float32) * (change.scale * strength), change.down.to(torch.float32)
            wanted = lambda some: up[some] @ down  # noqa: E731 - two ways to the same rows
        else:
            whole = (
                form_delta(name, change, weight.reshape(base.info(key).shape))
                .reshape(rows, -1)
                .mul_(strength)
            )
            wanted = lambda some: whole[some]  # noqa: E731
        return arrival_of(weight, wanted, rounding.again, rounding.stored)
    except (SigmascopeError, ImportError) as error:
        why = error.message if isinstance(error, SigmascopeError) else str(error)
        return Arrival(0.0, 0.0, 0.0, base.dequantised.get(key, ""), why.rstrip("."))


def arrival_of(
    weight: Tensor,
    wanted: Callable[[slice], Tensor],
    again: Callable[[Tensor, Tensor], Tensor],
    stored: str = "",
) -> Arrival:
    """What arrives of a change of one weight.

    Args:
        weight: The base's numbers as a float32 matrix (out, in).
        wanted: Some rows of the change, at its strength.
        again: See `sigmascope.checkpoints.checkpoint.Rounding`.
        stored: How the weight is stored, in words.

    Raises:
        NonFiniteError: A number is NaN or infinite.
    """
    rows, columns = weight.shape[0], prod(weight.shape[1:])
    step = max(_TILE_ROWS, _PIECE_ELEMENTS // max(columns, 1) // _TILE_ROWS * _TILE_ROWS)
    pieces = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    peaks = [(weight[some] + wanted(some)).abs().amax() for some in pieces if weight[some].numel()]
    peak = torch.stack(peaks).amax() if peaks else weight.new_zeros(())
    sums: list[tuple[float, float, float]] = []
    for some in pieces:
        before, change = weight[some], wanted(some)
        real = again(peak, before + change).sub_(before)
        products = (change * change, change * real, real * real)
        sums.append(tuple(float(product.sum(dtype=torch.float64)) for product in products))  # type: ignore[arg-type]  # three of them
    total = [fsum(part) for part in zip(*sums, strict=True)] if sums else [0.0, 0.0, 0.0]
    if not all(map(torch.isfinite, torch.tensor(total, dtype=torch.float64))):
        raise NonFiniteError("the weight or its change holds NaN or Inf.")
    wanted_square, inner, real_square = total
    return Arrival(wanted_square, inner, real_square, stored)


def together(arrivals: Iterable[Arrival]) -> Arrival:
    """Arrivals of several weights as that of one, without those of which nothing is known."""
    members = [one for one in arrivals if one.unavailable is None]
    stored = dict.fromkeys(one.stored for one in members if one.stored)
    return Arrival(
        fsum(one.wanted for one in members),
        fsum(one.inner for one in members),
        fsum(one.real for one in members),
        " and ".join(stored),
    )


def _block(name: str, members: list[Arrival]) -> BlockArrival:
    known = [one for one in members if one.unavailable is None]
    whole = together(known)
    stored = tuple(dict.fromkeys(one.stored for one in members if one.stored))
    return BlockArrival(name, len(members), len(known), whole.share, whole.noise, stored)


def arrival_findings(whole: Arrival, weights: int, model: str = "") -> Iterator[Finding]:
    """The findings where the share is small or the noise large, with what helps.

    Args:
        whole: All weights together.
        weights: How many they are.
        model: Its name, for the message.
    """
    share, noise = whole.share, whole.noise
    if share is None or noise is None:
        return
    evidence: dict[str, JsonScalar] = {
        "share": share,
        "noise": noise,
        "stored": whole.stored,
        "weights": weights,
    }
    figures = {
        "share": f"{100 * share:.0f} %",
        "noise": f"{100 * noise:.0f} %",
        "weights": counted(weights, "weight") + (model and f" of the {model}"),
        "stored": whole.stored or "a coarse type",
    }
    if share < WEAK_SHARE:
        yield verdict_finding("lora_arrives_weak", evidence, **figures)
    if noise > NOISY:
        yield verdict_finding("lora_arrives_noisy", evidence, **figures)
