"""Ways to merge the changes of one weight (weighted sum, TIES, DARE), and the record of the LoRAs merged.

TIES and DARE take away most of each change, so that the changes of several LoRAs meet less often. Their results are
not of low rank.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.checkpoints import file_sha256
from sigmascope.errors import ConfigError
from sigmascope.lora.file import LoraFile, as_text

MethodName = Literal["linear", "ties", "ties_mergekit", "dare"]

_SEED_BITS: Final = 63  # that a generator takes

# For `kth_largest`.
_SMALL: Final = 1 << 16  # values up to which all are looked at
_SAMPLE: Final = 1 << 14  # values of the sample


@dataclass(frozen=True, slots=True)
class MergeMethod:
    """One way to merge.

    Attributes:
        name: `linear`: the weighted sum. `ties` and `dare`: see the functions of that name; DARE's results are
            summed. `ties_mergekit`: TIES whose signs are elected by the weighted changes, as mergekit does it.
        density: For all but `linear`: the share of values to keep.
        seed: For `dare`: what the random choice starts from.

    Raises:
        ConfigError: The density is no share.
    """

    name: MethodName = "linear"
    density: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_density(self.density)

    @property
    def is_linear(self) -> bool:
        """Whether the result is a plain sum, and so has no more rank than its parts together."""
        return self.name == "linear"

    def combine(
        self,
        module: str,
        deltas: Mapping[int, Float[Tensor, "*shape"]],
        weights: Mapping[int, float] | None = None,
    ) -> Float[Tensor, "*shape"]:
        """Make one change of several.

        Args:
            module: Its name, which is part of DARE's seed.
            deltas: The change that each LoRA makes at strength 1, by the LoRA's position among all.
            weights: What each is multiplied with, by the same positions; None: 1.

        Returns:
            In the changes' dtype.
        """
        if self.name == "ties":
            strengths = None if weights is None else [weights[position] for position in deltas]
            return ties(list(deltas.values()), self.density, strengths)
        if weights is not None:
            deltas = {position: delta * weights[position] for position, delta in deltas.items()}
        if self.name == "ties_mergekit":
            return ties(list(deltas.values()), self.density)
        if self.name == "dare":
            kept = [
                dare(delta, self.density, self._generator(module, position))
                for position, delta in deltas.items()
            ]
            return reduce(torch.add, kept)
        return reduce(torch.add, deltas.values())

    def describe(self) -> str:
        """Canonical text, for reports and headers."""
        if self.is_linear:
            return self.name
        seed = f", seed {self.seed}" if self.name == "dare" else ""
        return f"{self.name}, density {self.density:g}{seed}"

    def _generator(self, module: str, position: int) -> torch.Generator:
        """One stream a module and LoRA: the order of the work does not matter, nor what else is merged."""
        digest = hashlib.sha256(f"{self.seed}\n{position}\n{module}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS))


def ties(
    changes: Sequence[Float[Tensor, "*shape"]], density: float, weights: Sequence[float] | None = None
) -> Float[Tensor, "*shape"]:
    """Trim, elect sign, disjoint merge (Yadav et al., arXiv 2306.01708, algorithm 1), for one weight.

    Each change is trimmed to its largest values. Where the signs disagree, that of the sum wins, and the mean
    is taken over those changes that have this sign, each times its weight. The weights have no say in the
    election, as in PEFT. The paper trims whole models, this does each weight by itself, so that no more than
    one weight's changes are in memory.

    Args:
        changes: Of one weight, at strength 1.
        density: The share k of values to keep.
        weights: What each change is multiplied with after the election; None: 1.

    Returns:
        In the changes' dtype. A value that only one change kept is that change's own, times its weight.
    """
    kept = [trimmed(change, density) for change in changes]
    elected = reduce(torch.add, kept).sign()
    merged, voters = torch.zeros_like(elected), torch.zeros_like(elected)
    for change, weight in zip(kept, weights or (1.0,) * len(kept), strict=True):
        agrees = change * elected > 0.0
        merged += torch.where(agrees, change * weight, 0.0)
        voters += agrees
    return merged / voters.clamp_min_(1.0)


def dare(
    change: Float[Tensor, "*shape"], density: float, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Drop values at random and rescale the rest (Yu et al., arXiv 2311.03099): the mean stays the same.

    Args:
        change: One weight's change.
        density: 1 − p for the paper's drop rate p: the chance of each value to stay. It is then divided by it.
        generator: On the CPU; its state alone decides what is dropped.
    """
    if density >= 1.0:
        return change
    drawn = torch.rand(change.shape, generator=generator, dtype=torch.float32).to(change.device)
    return torch.where(drawn < density, change / density, 0.0)


def trimmed(change: Float[Tensor, "*shape"], density: float) -> Float[Tensor, "*shape"]:
    """Keep the largest values by magnitude and set the rest to zero: the first step of TIES.

    Args:
        change: One weight's change.
        density: Share of the values to keep; at least one stays. Values equal to the smallest that is kept
            stay too.
    """
    size = change.numel()
    kept = max(1, round(density * size))
    if kept >= size:
        return change
    magnitudes = change.abs()
    return torch.where(magnitudes >= kth_largest(magnitudes.flatten(), kept), change, 0.0)


def kth_largest(values: Float[Tensor, " n"], k: int) -> Float[Tensor, ""]:
    """The k-th largest of many values, exactly.

    A sample brackets it, and only what lies between is sorted out; where the sample misleads, all is.

    Args:
        values: Finite.
        k: From 1 to n.
    """
    size = len(values)
    if size <= _SMALL:
        return values.kthvalue(size - k + 1).values
    sample = values[:: size // _SAMPLE].sort(descending=True).values
    share, last = k / size, len(sample) - 1
    margin = 4.0 * (len(sample) * share * (1.0 - share)) ** 0.5 + 4.0
    high = sample[max(int(share * len(sample) - margin), 0)]
    low = sample[min(int(share * len(sample) + margin), last)]
    above = int((values > high).sum())
    between = values[(values >= low) & (values <= high)]
    if above < k <= above + len(between):
        return between.kthvalue(above + len(between) - k + 1).values
    return values.kthvalue(size - k + 1).values


def require_density(density: float) -> float:
    """Give the density back.

    Raises:
        ConfigError: It is not above 0 and at most 1.
    """
    if not 0.0 < density <= 1.0:
        raise ConfigError(
            f"--density {density} is no share of values to keep.", hint="Use a number above 0, up to 1."
        )
    return density


def require_weights(weights: tuple[float, ...] | None, count: int) -> tuple[float, ...]:
    """Give the weight of each LoRA, 1 where none are asked for.

    Raises:
        ConfigError: Their number is not that of the LoRAs, or one is NaN or infinite.
    """
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise ConfigError(
            f"--weights has {len(weights)} numbers for {count} LoRAs.",
            hint="Give one for each, such as 0.7,0.3.",
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise ConfigError(f"--weights {weight} is no number.", hint="Give numbers such as 0.7,0.3.")
    return weights


@dataclass(frozen=True, slots=True)
class InputLora:
    """One LoRA that went in.

    Attributes:
        path: As given.
        weight: What its change was multiplied with.
        format: `native`, `kohya`, `peft` or `comfyui`.
        modules: How many it has.
        file_bytes: Size of its file.
    """

    path: Path
    weight: float
    format: str
    modules: int
    file_bytes: int

    @classmethod
    def of(cls, lora: LoraFile, path: Path, weight: float = 1.0) -> "InputLora":
        """Describe an open LoRA; `path` is the one given, which may be a folder."""
        return cls(path, weight, lora.format, len(lora.names), (lora.path or path).stat().st_size)


def merged_from(files: Sequence[Path], weights: Sequence[float]) -> str:
    """What was merged, as JSON for a header: names, weights, and hashes by which the files can be found again."""
    return json.dumps(
        [
            {"file": as_text(file.name), "weight": weight, "sha256": file_sha256(file)}
            for file, weight in zip(files, weights, strict=True)
        ]
    )
