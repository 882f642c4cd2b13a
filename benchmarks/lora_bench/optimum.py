"""The smallest error that any LoRA of a given rank can have, layer by layer, reckoned in float64.

By Eckart and Young (1936) the best matrix of rank r leaves ‖Δ − A_r‖² = Σ_{i>r} σᵢ². This is worked out with
other means than the extraction uses: the safetensors library reads, a Gram matrix in float64 gives all σᵢ².
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from lora_bench.pairs import is_layer, pair_files
from sigmascope.checkpoints import atomic_path, read_header
from sigmascope.progress import Progress, no_progress

RANKS = 64
"""Up to which rank the optimum is kept, unless more is asked for."""
_SAFE_SHARE = 1e-8
_SPOT_BYTES = 4096


@dataclass(frozen=True)
class LayerOptimum:
    """What the best LoRA of each rank leaves of one layer's change.

    Attributes:
        shape: Of the weight.
        tail_energy: At index r the least possible ‖Δ − A_r‖²; index 0 is ‖Δ‖².
    """

    shape: tuple[int, ...]
    tail_energy: tuple[float, ...]

    def error(self, rank: int) -> float:
        """The least ‖Δ − A_r‖ at a rank."""
        return math.sqrt(self.tail_energy[rank])


@dataclass(frozen=True)
class Optimum:
    """The optimum of every layer of a pair.

    Attributes:
        fingerprint: Of the pair's files.
        ranks: The highest rank that is known.
        uncertainty: Largest relative disagreement of two ways to sum a tail: from the total downwards, and from
            the smallest value upwards. It shows the rounding in what is called the optimum.
        layers: By path, without `.weight`.
    """

    fingerprint: str
    ranks: int
    uncertainty: float
    layers: dict[str, LayerOptimum]


def tail_energies(matrix: Float[Tensor, "m n"], ranks: int) -> tuple[Float[Tensor, " ranks_1"], float]:
    """Σ_{i>r} σᵢ² for r = 0 … `ranks`, and by how much two ways to sum them disagree at most.

    The Gram matrix of the smaller side has the eigenvalues σᵢ². Rounding moves each by about 10⁻¹⁶ of ‖A‖², so a
    tail that holds 10⁻⁸ of ‖A‖² or more is right to about 10⁻⁷. Any smaller one is summed from singular values
    that never were squared, right down to 10⁻³² of ‖A‖².

    Args:
        matrix: Finite, float64.
        ranks: The highest rank.

    Returns:
        The tails, exactly 0 from min(m, n) on, and their disagreement relative to them.
    """
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    total = matrix.square().sum()
    energies = torch.linalg.eigvalsh(short @ short.T).flip(0).clamp_min(0.0)
    known = min(ranks, short.shape[0] - 1)
    down = total - torch.cat([total.new_zeros(1), energies.cumsum(0)])[: known + 1]
    if float(down.min()) < _SAFE_SHARE * float(total):
        energies = torch.linalg.svdvals(short).square()
        down = _sums_upwards(energies)[: known + 1]
    up = _sums_upwards(energies)[: known + 1]
    gap = ((down - up).abs() / down.clamp_min(torch.finfo(torch.float64).tiny)).max()
    tails = total.new_zeros(ranks + 1)
    tails[: known + 1] = down
    return tails, float(gap)


def _sums_upwards(energies: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Sum from the end, where the values are smallest."""
    return energies.flip(0).cumsum(0).flip(0)


def optimum_file(folder: Path) -> Path:
    """Where the optimum of the pair in a folder is kept."""
    return folder / "optimum.json"


def ensure_optimum(folder: Path, ranks: int = RANKS, progress: Progress = no_progress) -> Optimum:
    """Read the optimum kept beside a pair, or reckon it (minutes at full size) and keep it.

    Args:
        folder: With `base.safetensors` and `tuned.safetensors`.
        ranks: The highest rank that is needed.
        progress: Told after each layer.
    """
    file = optimum_file(folder)
    fingerprint = pair_fingerprint(folder)
    if file.exists():
        kept = _from_json(json.loads(file.read_text(encoding="utf-8")))
        if kept.fingerprint == fingerprint and kept.ranks >= ranks:
            return kept
    layers: dict[str, LayerOptimum] = {}
    uncertainty = 0.0
    for layer, change in changes(folder, progress):
        tails, gap = tail_energies(change.flatten(1), max(ranks, RANKS))
        layers[layer] = LayerOptimum(tuple(change.shape), tuple(tails.tolist()))
        uncertainty = max(uncertainty, gap)
    result = Optimum(fingerprint, max(ranks, RANKS), uncertainty, layers)
    with atomic_path(file) as temporary:
        temporary.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _from_json(content: dict[str, Any]) -> Optimum:
    layers = {
        name: LayerOptimum(tuple(layer["shape"]), tuple(layer["tail_energy"]))
        for name, layer in content["layers"].items()
    }
    return Optimum(content["fingerprint"], content["ranks"], content["uncertainty"], layers)


def changes(folder: Path, progress: Progress = no_progress) -> Iterator[tuple[str, Float[Tensor, "*shape"]]]:
    """Yield each layer's path and Δ = tuned − base in float64, where the difference of two stored values is exact."""
    with ExitStack() as files:
        base, tuned = (files.enter_context(safe_open(file, "pt")) for file in pair_files(folder))
        names = [name for name in base.keys() if is_layer(name, base.get_slice(name).get_shape())]  # noqa: SIM118 - not a dict
        for done, name in enumerate(names, start=1):
            yield (
                name.removesuffix(".weight"),
                tuned.get_tensor(name).double() - base.get_tensor(name).double(),
            )
            progress(done, len(names), name)


def pair_fingerprint(folder: Path) -> str:
    """Identify a pair by both headers, both sizes and the first 4 KiB of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for file in pair_files(folder):
        header = read_header(file)
        with file.open("rb", buffering=0) as stream:
            digest.update(os.fstat(stream.fileno()).st_size.to_bytes(8, "little"))
            digest.update(stream.read(header.data_start))
            for entry in header.tensors.values():
                stream.seek(header.data_start + entry.begin)
                digest.update(stream.read(min(_SPOT_BYTES, entry.nbytes)))
    return digest.hexdigest()
