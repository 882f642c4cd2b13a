"""How much of a LoRA arrives when it is merged into a base that is stored coarsely, and how much noise comes with it.

A host that merges adds the wanted change Δ to the base weight W, and stores the sum the way that W was stored. What the
layer then computes with has changed by `real` = Q(W + Δ) − W, and real = share·Δ + noise with the noise orthogonal to Δ:

    share = <real, Δ> / ‖Δ‖²        noise = ‖real − share·Δ‖ / ‖Δ‖

The share is 1 and the noise 0 where nothing is lost. Small changes lie below half a step of a coarse format: rounding to
the nearest then gives W again, and the share is 0. ComfyUI rounds its own formats stochastically, which keeps the share
near 1 and makes noise instead. A LoRA beside the weight, as PEFT and ComfyUI-GGUF run it, arrives whole.

`arrivals` computes both for a file and a base without running either, with two of the largest weights in memory at a time. Under
stochastic rounding they are what is to be expected: in closed form for 8-bit floats and integers (the expected ‖real‖²
is ‖E real‖² and the sum of the variances), by a seeded draw for NVFP4 and int8 ConvRot.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from math import fsum, hypot, inf, isfinite, prod, sqrt
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, Rounding, Spread, numbers_of, plain_rounding
from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.adapters import form_delta
from sigmascope.lora.alignment import weights_of
from sigmascope.lora.compatibility import place, shapes_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import WEIGHT, block_of_module, block_position
from sigmascope.lora.linalg import at_least_float32
from sigmascope.lora.parallel import run_layers_in_order
from sigmascope.lora.reader import open_lora
from sigmascope.lora.verdict import verdict_finding
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted, with_noise

__all__ = [
    "SAMPLED_ROWS",
    "WAYS",
    "Arrival",
    "Arrivals",
    "BlockArrival",
    "arrival_findings",
    "arrival_of",
    "arrival_sentence",
    "arrivals",
    "other_ways",
]

WEAK_SHARE: Final = 0.8
"""Below it, `lora_arrives_weak`."""
NOISY: Final = 0.5
"""Above it, `lora_arrives_noisy`."""
WAYS: Final = {
    "comfyui": "merge it as ComfyUI does, with stochastic rounding",
    "nearest": "merge it with rounding to the nearest",
    "bf16": "merge it into a base in bf16",
}
"""Ways of merging, by the names that the figures have."""
_CLEARLY: Final = 0.8  # of the error, at most, of a way that is called better
_MANY: Final = 10.0  # from here on noise is said in times, not in per cent
SAMPLED_ROWS: Final = 128
"""Of each weight, for the ways that are only compared."""
_PIECE_ELEMENTS: Final = 1 << 20
_SQUARES_HELD: Final = 1e-12, 1e15
"""Of the largest magnitude of a change, between which float32 holds the squares that count."""
_BF16: Final = plain_rounding(torch.bfloat16)
_PLAIN: Final = frozenset({"bfloat16", "float16", "float32", "float64"})

Change = Callable[[slice], Tensor]
"""Some rows of the wanted change, at its strength."""
Store = Callable[[Tensor, Tensor], Spread]
"""The largest magnitude of a whole weight, and some rows of numbers, to what is read once those are stored."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What arrives of a wanted change, as sums that add up over weights.

    Attributes:
        wanted: ‖Δ‖².
        inner: <real, Δ>.
        real: ‖real‖².
        stored: How the weight is stored.
        unavailable: Why nothing is known of it, and what to do; None if it is.
        way: How the host merges, a name of `WAYS`; None if it was measured, or differs between weights.
        others: The same for other ways of merging, from some rows of each weight.
    """

    wanted: float
    inner: float
    real: float
    stored: str = ""
    unavailable: str | None = None
    way: str | None = None
    others: "Mapping[str, Arrival]" = field(default_factory=dict)

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

    @property
    def error(self) -> float:
        """‖real − Δ‖ / ‖Δ‖, which is 1 if nothing arrives; infinite where nothing is known."""
        share, noise = self.share, self.noise
        return inf if share is None or noise is None else hypot(1.0 - share, noise)

    @property
    def better(self) -> "dict[str, Arrival]":
        """Other ways that are clearly closer to the change and not weak, the best first."""
        clearly = {
            name: one
            for name, one in self.others.items()
            if one.error < _CLEARLY * self.error and (one.share or 0.0) >= WEAK_SHARE
        }
        return dict(sorted(clearly.items(), key=lambda item: item[1].error))

    def as_dict(self) -> dict[str, Any]:
        """Share and noise as JSON values."""
        figures = {"share": self.share, "noise": self.noise, "stored": self.stored, "way": self.way}
        others = {name: {"share": one.share, "noise": one.noise} for name, one in self.others.items()}
        norm = sqrt(self.wanted) if self.unavailable is None else None
        return {**figures, "wanted_norm": norm, "unavailable": self.unavailable, "other_ways": others}


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
            "way": overall.way,
            "other_ways": overall.as_dict()["other_ways"],
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [{**asdict(block), "stored": list(block.stored)} for block in self.blocks],
            "weights": {key: arrival.as_dict() for key, arrival in self.weights.items()},
        }


def arrivals(
    lora: str | PathLike[str],
    base: Checkpoint,
    *,
    strength: float = 1.0,
    nearest: bool = False,
    progress: Progress = no_progress,
) -> Arrivals:
    """What arrives of a LoRA file if a host merges it into a base and stores the sum as the base is stored.

    Formats in which ComfyUI stores such sums are rounded as it rounds them, stochastically, the others to the nearest;
    `others` of each arrival has the other ways.

    Args:
        lora: A file of any format.
        base: The open checkpoint; only the weights that the LoRA changes are read, a few at a time.
        strength: Of the LoRA.
        nearest: Whether the host rounds every format to the nearest.
        progress: Told after each weight.

    Returns:
        The arrivals. A weight that cannot be read, or whose format numbers cannot be stored in here, has its reason.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: It follows no known format.
    """
    found: dict[str, Arrival] = {}
    with open_lora(Path(lora), allow_broken=True) as file:
        changed = changed_matrices(file, base)

        def arrival(name: str) -> Arrival:
            return _arrival(changed.lora, name, base, changed.keys[name], strength, nearest)

        for name, one in run_layers_in_order(changed.sizes, arrival):
            found[changed.keys[name]] = one
            progress(len(found), len(changed.keys), changed.keys[name])
    return Arrivals(strength, found)


class ChangedMatrices(NamedTuple):
    """The weights of a model that a LoRA changes, without biases and norms.

    Attributes:
        lora: The LoRA, with fused matrices divided or joined as the model has them.
        keys: The weight's key, by the name in `lora`.
        sizes: How many numbers it has.
    """

    lora: LoraFile
    keys: Mapping[str, str]
    sizes: Mapping[str, int]


def changed_matrices(lora: LoraFile, base: Checkpoint) -> ChangedMatrices:
    """Find the weights that a LoRA changes in a model, by names and shapes."""
    shapes = shapes_of(base)
    placing = place(lora, shapes, weights_of(base), base.path)
    own = lora if placing.lora is None else placing.lora
    keys = {name: key for name in own.names if (key := _key_of(name, shapes)) is not None}
    landed = {key for keys_of_module in placing.keys.values() for key in keys_of_module}
    wanted = {name: key for name, key in keys.items() if key in landed and len(shapes[key]) > 1}
    return ChangedMatrices(own, wanted, {name: prod(shapes[key]) for name, key in wanted.items()})


def _key_of(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    return next((key for key in (f"{name}{WEIGHT}", name) if key in shapes), None)


def _arrival(
    lora: LoraFile, name: str, base: Checkpoint, key: str, strength: float, nearest: bool
) -> Arrival:
    try:
        rounding = base.rounding(key)
        rounding = replace(rounding, merged=None) if nearest else rounding
        weight = base.tensor(key)
        rows = weight.shape[0]
        weight = numbers_of(weight.reshape(rows, -1))
        change = lora.change(name)
        if isinstance(change, LoraFactors):
            dtype = at_least_float32(change.up.dtype, change.down.dtype)
            up, down = change.up.to(dtype) * (change.scale * strength), change.down.to(dtype)
            wanted = lambda some: up[some] @ down  # noqa: E731 - two ways to the same rows
        else:
            whole = (
                form_delta(name, change, weight.reshape(base.info(key).shape))
                .reshape(rows, -1)
                .mul_(strength)
            )
            wanted = lambda some: whole[some]  # noqa: E731
        return arrival_of(weight, wanted, rounding)
    except (SigmascopeError, ImportError) as error:
        return Arrival(0.0, 0.0, 0.0, base.dequantised.get(key, ""), str(error).rstrip("."))


def arrival_of(weight: Tensor, wanted: Change, rounding: Rounding) -> Arrival:
    """What arrives of a change of one weight.

    Args:
        weight: The base's numbers as a float32 matrix (out, in).
        wanted: The change.
        rounding: How the weight's format rounds.

    Raises:
        NonFiniteError: A number is NaN or infinite.
    """
    pieces = _pieces(weight)
    peak = _peak(weight, wanted, pieces)
    way, store = _of_host(rounding)
    wanted_square, inner, real = _sums(weight, wanted, store, peak, pieces)
    others = other_ways(weight, wanted, rounding, wanted_square, peak)
    return Arrival(wanted_square, inner, real, rounding.stored, None, way, others)


def other_ways(
    weight: Tensor, wanted: Change, rounding: Rounding, wanted_square: float, peak: Tensor | None = None
) -> dict[str, Arrival]:
    """What would arrive of a change of one weight by the ways that its host does not go, from some of its rows.

    Args:
        weight: As in `arrival_of`.
        wanted: The change.
        rounding: How the weight's format rounds.
        wanted_square: ‖Δ‖² of the whole weight, which the sums are scaled to.
        peak: The largest magnitude of the sum, if it is known.
    """
    if rounding.stored in _PLAIN:
        return {}
    if peak is None:
        peak = _peak(weight, wanted, _pieces(weight))
    start = weight.shape[0] // 2 // SAMPLED_ROWS * SAMPLED_ROWS
    rows = slice(start, min(start + SAMPLED_ROWS, weight.shape[0]))
    some = _BF16.again(peak, weight[rows])
    here = slice(0, some.shape[0])
    found = {"bf16": _sums(some, lambda _: wanted(rows), _nearest(_BF16), peak, [here])}
    if rounding.merged is not None:
        found["nearest"] = _sums(weight, wanted, _nearest(rounding), peak, [rows])
    return {name: _scaled_to(wanted_square, sums) for name, sums in found.items() if sums[0] > 0.0}


def _scaled_to(wanted_square: float, sums: tuple[float, float, float]) -> Arrival:
    scale = wanted_square / sums[0]
    return Arrival(wanted_square, sums[1] * scale, sums[2] * scale)


def _of_host(rounding: Rounding) -> tuple[str, Store]:
    return ("nearest", _nearest(rounding)) if rounding.merged is None else ("comfyui", rounding.merged)


def _nearest(rounding: Rounding) -> Store:
    return lambda peak, numbers: Spread(rounding.again(peak, numbers))


def _pieces(weight: Tensor) -> list[slice]:
    rows, columns = weight.shape[0], prod(weight.shape[1:])
    step = max(SAMPLED_ROWS, _PIECE_ELEMENTS // max(columns, 1) // SAMPLED_ROWS * SAMPLED_ROWS)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _peak(weight: Tensor, wanted: Change, pieces: Sequence[slice]) -> Tensor:
    """The largest magnitude of the sum."""
    peaks = [
        (weight[some] + wanted(some)).to(weight.dtype).abs().amax() for some in pieces if weight[some].numel()
    ]
    return torch.stack(peaks).amax() if peaks else weight.new_zeros(())


def _sums(
    weight: Tensor, wanted: Change, store: Store, peak: Tensor, pieces: Sequence[slice]
) -> tuple[float, float, float]:
    """‖Δ‖², <real, Δ> and ‖real‖² of some rows, as expected where chance decides."""
    sums: list[tuple[float, float, float]] = []
    for some in pieces:
        before, change = weight[some], wanted(some)
        stored = store(peak, (before + change).to(before.dtype))
        real = stored.mean.sub_(before)
        least, most = _SQUARES_HELD
        if change.numel() and not least < float(change.abs().amax()) < most:
            change, real = change.double(), real.double()
        products = (change * change, change * real, real.square_())
        parts = [float(product.sum(dtype=torch.float64)) for product in products]
        variance = 0.0 if stored.variance is None else float(stored.variance.sum(dtype=torch.float64))
        sums.append((parts[0], parts[1], parts[2] + variance))
    total = [fsum(part) for part in zip(*sums, strict=True)] if sums else [0.0, 0.0, 0.0]
    if not all(map(isfinite, total)):
        raise NonFiniteError("the weight or its change holds NaN, Inf or numbers too large for float32.")
    return total[0], total[1], total[2]


def together(arrivals: Iterable[Arrival]) -> Arrival:
    """Arrivals of several weights as that of one, without those of which nothing is known."""
    members = [one for one in arrivals if one.unavailable is None]
    stored = dict.fromkeys(one.stored for one in members if one.stored)
    ways = {one.way for one in members}
    names = [name for name in WAYS if any(name in one.others for one in members)]
    return Arrival(
        fsum(one.wanted for one in members),
        fsum(one.inner for one in members),
        fsum(one.real for one in members),
        " and ".join(stored),
        way=ways.pop() if len(ways) == 1 else None,
        others={name: together(_by_way(one, name) for one in members) for name in names},
    )


def _by_way(arrival: Arrival, name: str) -> Arrival:
    """What arrives by another way; as it does anyway, where the weight has none of that name."""
    return arrival.others.get(name, replace(arrival, others={}))


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
    for name, other in whole.others.items():
        evidence |= {f"share_{name}": other.share, f"noise_{name}": other.noise}
    figures = {
        "share": _percent(share),
        "noise": with_noise(noise, _times(noise)),
        "weights": counted(weights, "weight") + (model and f" of the {model}"),
        "stored": whole.stored or "a coarse type",
    }
    figures["ways"] = "".join(f", or {WAYS[name]} ({_in_words(one)})" for name, one in whole.better.items())
    if share < WEAK_SHARE:
        yield verdict_finding("lora_arrives_weak", evidence, **figures)
    if noise > NOISY:
        yield verdict_finding("lora_arrives_noisy", evidence, **figures)


def arrival_sentence(arrives: Arrivals) -> tuple[str, bool] | None:
    """How much of a LoRA arrives and how noisy, or why that is not known, and whether it is well; None if it changes nothing."""
    whole, unknown = arrives.overall, len(arrives.unavailable)
    if 0 < unknown == len(arrives.weights):
        why = next(iter(arrives.unavailable.values()))
        return f"How much of the LoRA arrives is unknown, because {why}.", False
    if whole.share is None or whole.noise is None:
        return None
    more = f" Of {counted(unknown, 'weight')} this is unknown." if unknown else ""
    sentence = (
        f"Merged at strength {arrives.strength:g}, {_percent(whole.share)} of the LoRA arrives, "
        f"{with_noise(whole.noise, _times(whole.noise))}.{more}"
    )
    return sentence, whole.share >= WEAK_SHARE and whole.noise <= NOISY


def _in_words(arrival: Arrival) -> str:
    noise = arrival.noise or 0.0
    return f"{_percent(arrival.share or 0.0)} arrives, {with_noise(noise, _times(noise))}"


def _times(fraction: float) -> str:
    return f"{_percent(fraction)} of" if fraction < _MANY else f"{fraction:.0f} times"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
