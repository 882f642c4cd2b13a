"""How a change of each layer's weight affects the model's output, as second moments.

The smallest change of the weights is not the smallest change of the picture. To first order a change E of a layer's
weight changes a random projection of the model's output by ⟨D, E⟩, with D the projection's gradient at the weight. The
mean of its square over projections is what the change does to the output, and the nearest that one product of two small
matrices comes to it is, after one step of the power iteration (Morwani et al., arXiv 2406.17748),

    ‖E‖²_{G,C} = tr(G E C Eᵀ),    C = mean of DᵀD,    G = mean of DDᵀ over its trace.

D sums over the positions of a picture, so that changes that agree from position to position, such as one of colour,
count as much as they show: products of moments of single positions (K-FAC, arXiv 1503.05671) miss that. With any roots
G = S Sᵀ and C = R Rᵀ the metric is the plain ‖SᵀER‖², so the best factors of a rank are the truncated SVD of SᵀΔW·R,
mapped back (`LayerMetric`).

A matrix of moments is kept whole where it is small. A large one is kept as its diagonal and the leading part of a
Nyström sketch (Tropp, Yurtsever, Udell and Cevher, arXiv 1706.05736), which costs memory by the width and not by its
square. `MomentSum` sums up either; `ModelStatistics` is the file.
"""

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError, ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora.linalg import as_float64, matrix_shape, symmetric_eigen

__all__ = [
    "LayerMetric",
    "LayerStatistics",
    "ModelStatistics",
    "MomentSum",
    "Moments",
    "load_statistics",
]

RIDGE: Final = 1e-3
"""Added to each matrix of moments, as a share of its mean diagonal, so that directions that never occurred have a
weight."""
FULL_UP_TO: Final = 256
"""Width up to which a matrix of moments is kept whole."""
RANK: Final = 32
"""Directions that are kept of a wider one, beside the diagonal. Of the pocket LBM 16 of any width lose nothing that its
pictures show, and 8 lose up to 0.6 dB."""
_SKETCH_COLUMNS_PER_DIRECTION: Final = 2  # columns of the sketch for each direction that is kept
_PIECE: Final = 1 << 17  # elements that are weighed at a time: half a MiB in float32
_KIND: Final = "sigmascope_statistics"
_VERSION: Final = "1"


@dataclass(frozen=True, eq=False)
class Moments:
    """A matrix of second moments, n×n: whole, or diag(d) + U·Uᵀ.

    Attributes:
        diagonal: (n,), d ≥ 0; of a whole matrix its own diagonal.
        full: (n, n), where it is kept whole.
        low_rank: (n, k), U, where it is not.
    """

    diagonal: Float[Tensor, " n"]
    full: Float[Tensor, "n n"] | None = None
    low_rank: Float[Tensor, "n k"] | None = None

    @property
    def size(self) -> int:
        """Its width, n."""
        return int(self.diagonal.shape[0])

    @property
    def trace(self) -> float:
        """The sum of the diagonal, float64."""
        total = float(as_float64(self.diagonal).sum())
        return total if self.low_rank is None else total + float(as_float64(self.low_rank).square().sum())

    @property
    def captured(self) -> float:
        """Share of the trace that is kept with its directions, 0 to 1; the rest is kept as a diagonal."""
        if self.low_rank is None:
            return 1.0
        whole = self.trace
        return float(as_float64(self.low_rank).square().sum()) / whole if whole > 0 else 1.0

    def root(self, ridge: float, device: torch.device, dtype: torch.dtype) -> "MomentRoot":
        """R with R·Rᵀ = the matrix + ridge · its mean diagonal.

        Raises:
            NonFiniteError: The moments are all zero or not finite.
        """
        mean = self.trace / self.size
        if not (math.isfinite(mean) and mean > 0):
            raise NonFiniteError("its second moments are zero or not finite.")
        floor = ridge * mean
        if self.full is not None:
            matrix = as_float64(self.full.to(device))
            matrix.diagonal().add_(floor)
            lower, failed = torch.linalg.cholesky_ex(matrix)
            if int(failed):  # rounding made a matrix of low rank negative by more than the ridge
                values, vectors = symmetric_eigen(matrix)
                lower = torch.linalg.qr((vectors * values.clamp_min(floor).sqrt()).mT)[1].mT
            return MomentRoot(lower.to(device, dtype), None, lower.new_empty(0))
        assert self.low_rank is not None
        diagonal = (as_float64(self.diagonal.to(device)).clamp_min(0.0) + floor).sqrt()
        # diag(d)·(1 + W·Wᵀ)·diag(d) with W = Q·s·Vᵀ, and √(1 + W·Wᵀ) = 1 + Q·(√(1 + s²) − 1)·Qᵀ
        scaled = as_float64(self.low_rank.to(device)) / diagonal[:, None]
        energies, turn = symmetric_eigen(scaled.mT @ scaled)
        kept = energies > 1e-12 * energies[0].clamp_min(torch.finfo(torch.float64).tiny)
        directions = scaled @ (turn[:, kept] * energies[kept].rsqrt())
        excess = (1.0 + energies[kept]).sqrt() - 1.0
        return MomentRoot(*(part.to(device, dtype) for part in (directions, diagonal, excess)))


@dataclass(frozen=True, eq=False)
class MomentRoot:
    """R and its inverse, as products: lower triangular, or diag(d)·(1 + Q·Γ·Qᵀ).

    Attributes:
        matrix: (n, n), R itself, or (n, k), Q.
        diagonal: (n,), d; None where R is triangular.
        excess: (j,), the diagonal of Γ, one for each column of Q; empty where R is triangular.
    """

    matrix: Float[Tensor, "n k"]
    diagonal: Float[Tensor, " n"] | None
    excess: Float[Tensor, " j"]

    def weigh(self, rows: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Give rows · R."""
        if self.diagonal is None:
            return rows @ self.matrix
        scaled = rows * self.diagonal
        return scaled.addmm_((scaled @ self.matrix) * self.excess, self.matrix.mT)

    def unweigh(self, rows: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Give rows · R⁻¹."""
        if self.diagonal is None:
            solved: Tensor = torch.linalg.solve_triangular(self.matrix, rows, upper=False, left=False)
            return solved
        turned = (rows @ self.matrix) * (1.0 / (1.0 + self.excess) - 1.0)
        return (rows + turned @ self.matrix.mT) / self.diagonal


@dataclass(frozen=True, eq=False)
class LayerMetric:
    """How much a change of one layer's weight matters: ‖SᵀER‖.

    Attributes:
        inputs: R, of the inputs' moments.
        outputs: S, of the gradients'.
        scale: Factor of the result: the root of the weight of the layer's squared error.
    """

    inputs: MomentRoot | None = None
    outputs: MomentRoot | None = None
    scale: float = 1.0

    def weigh(
        self, change: Float[Tensor, "m n"], out: Float[Tensor, "m n"] | None = None
    ) -> Float[Tensor, "m n"]:
        """SᵀER.

        Args:
            change: E.
            out: A contiguous buffer for the result: fresh memory for a large layer costs as much as the products.
        """
        made = torch.empty_like(change, memory_format=torch.contiguous_format) if out is None else out
        left, right = self.outputs, self.inputs
        if left is None or left.diagonal is None or right is None or right.diagonal is None:
            return made.copy_(self.weigh_down(self.weigh_up(change)))
        # (1 + QΓQᵀ)·D·E·D'·(1 + Q'Γ'Q'ᵀ) = D·E·D' + [Q T]·[P; Q'ᵀ], with P = Γ·QᵀDED' and T = (DED' + Q·P)·Q'Γ'
        rows = (left.diagonal * self.scale)[:, None]
        turned_up = change.new_zeros(left.matrix.shape[1], change.shape[1])
        turned_down = change.new_empty(change.shape[0], right.matrix.shape[1])
        # On a CPU in pieces that stay in its cache.
        step = max(1, _PIECE // change.shape[1]) if change.device.type == "cpu" else change.shape[0]
        for start in range(0, change.shape[0], step):
            some = slice(start, start + step)
            piece = torch.mul(change[some], right.diagonal, out=made[some]).mul_(rows[some])
            turned_up.addmm_(left.matrix[some].mT, piece)
            torch.mm(piece, right.matrix, out=turned_down[some])
        turned_up *= left.excess[:, None]
        turned_down.addmm_(left.matrix, turned_up @ right.matrix).mul_(right.excess)
        return made.addmm_(
            torch.cat([left.matrix, turned_down], dim=1), torch.cat([turned_up, right.matrix.mT])
        )

    def weigh_up(self, up: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """Sᵀ·up, with the scale."""
        weighed = up if self.outputs is None else self.outputs.weigh(up.mT).mT
        return weighed if self.scale == 1.0 else weighed * self.scale

    def weigh_down(self, down: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """down·R."""
        return down if self.inputs is None else self.inputs.weigh(down)

    def unweigh_up(self, up: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """The up whose `weigh_up` this is."""
        scaled = up / self.scale
        return scaled if self.outputs is None else self.outputs.unweigh(scaled.mT).mT

    def unweigh_down(self, down: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """The down whose `weigh_down` this is."""
        return down if self.inputs is None else self.inputs.unweigh(down)


class MomentSum:
    """Sums x·xᵀ over rows x, whole or as a sketch, in float32 on one device.

    Args:
        size: n, the width of the rows.
        device: Where the rows are.
        columns: Of the sketch, as `sketch_columns` gives them; the sum is kept whole without.
    """

    def __init__(self, size: int, device: torch.device, columns: Float[Tensor, "n k"] | None = None) -> None:
        self._columns = columns
        self._diagonal = None if columns is None else torch.zeros(size, device=device)
        self._sum = torch.zeros(size, size if columns is None else columns.shape[1], device=device)

    def add(self, rows: Float[Tensor, "t n"]) -> None:
        """Add the rows of one piece."""
        rows = rows.detach().float()
        with torch.autocast(rows.device.type, enabled=False):  # the host's would round what is summed up
            if self._columns is None or self._diagonal is None:
                self._sum.addmm_(rows.mT, rows)
            else:
                self._sum.addmm_(rows.mT, rows @ self._columns)
                self._diagonal += rows.square().sum(dim=0)

    @property
    def trace(self) -> float:
        """Of the sum."""
        return float(as_float64(self._sum.diagonal() if self._diagonal is None else self._diagonal).sum())

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The sums so far; another `MomentSum` of the same size continues from them when they are copied into it."""
        return (self._sum,) if self._diagonal is None else (self._sum, self._diagonal)

    def result(self, divisor: int | float) -> Moments:
        """The moments, on the CPU.

        Args:
            divisor: What the sum is divided by.

        Raises:
            NonFiniteError: NaN or Inf was among the rows.
        """
        total = as_float64(self._sum.cpu()) / divisor
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError("its inputs or gradients hold NaN or Inf.")
        if self._columns is None or self._diagonal is None:
            full = (total + total.mT) / 2
            return Moments(full.diagonal().float().clone(), full=full.float())
        diagonal = as_float64(self._diagonal.cpu()) / divisor
        kept = max(1, self._columns.shape[1] // _SKETCH_COLUMNS_PER_DIRECTION)
        low_rank = _leading_part(total, as_float64(self._columns.cpu()), kept)
        rest = (diagonal - low_rank.square().sum(dim=1)).clamp_min(0.0)
        return Moments(rest.float(), low_rank=low_rank.to(torch.bfloat16))


def sketch_columns(size: int, rank: int, seed: int) -> Float[Tensor, "n k"]:
    """Random orthonormal columns, twice the rank; all layers of a width can share them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(size, min(_SKETCH_COLUMNS_PER_DIRECTION * rank, size), generator=generator)
    columns: Tensor = torch.linalg.qr(made)[0].contiguous()
    return columns


def _leading_part(sketch: Tensor, columns: Tensor, rank: int) -> Tensor:
    """U (n, k) with U·Uᵀ the best part of a rank of the Nyström approximation Y(ΩᵀY)⁻¹Yᵀ, Y = CΩ.

    Shifted as in algorithm 3 of arXiv 1706.05736, so that rounding leaves ΩᵀY positive.
    """
    shift = torch.finfo(torch.float32).eps * float(torch.linalg.vector_norm(sketch))
    if shift == 0.0:
        return sketch.new_zeros(sketch.shape[0], 1)
    shifted = sketch + shift * columns
    core = columns.mT @ shifted
    values, vectors = symmetric_eigen((core + core.mT) / 2)
    kept = values > torch.finfo(torch.float32).eps * values[0]
    half = shifted @ (vectors[:, kept] * values[kept].rsqrt())
    energies, turn = symmetric_eigen(half.mT @ half)
    leading = half @ turn[:, :rank]
    # Each column has the length √λ; the shift is taken off again.
    return leading * ((energies[:rank] - shift).clamp_min(0.0) / energies[:rank].clamp_min(shift)).sqrt()


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """How a change E of one layer's weight affects the output: tr(G E C Eᵀ).

    Attributes:
        inputs: C, the mean of DᵀD over projections.
        outputs: G, the mean of DDᵀ over its trace.
        rows: How many positions a call had.
    """

    inputs: Moments
    outputs: Moments
    rows: int

    @property
    def weight(self) -> float:
        """The squared change of the output by a squared error of 1, spread evenly over the layer's weight."""
        return self.inputs.trace / self.inputs.size * self.outputs.trace / self.outputs.size

    def metric(
        self, ridge: float = RIDGE, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> LayerMetric:
        """The layer's metric, on a device."""
        where = device or torch.device("cpu")
        return LayerMetric(self.inputs.root(ridge, where, dtype), self.outputs.root(ridge, where, dtype))


@dataclass(frozen=True, eq=False)
class ModelStatistics(Mapping[str, LayerStatistics]):
    """The statistics of a model's layers, by the path of the module below the denoiser.

    Attributes:
        layers: By path.
        fingerprint: Fingerprint of the denoiser (`denoiser_fingerprint`); empty if it is not known.
        facts: What they were made from: calls, probes, seed.
        unmet: Layers of the model that no call went through, or that did not affect its output.
    """

    layers: dict[str, LayerStatistics]
    fingerprint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()

    def __getitem__(self, layer: str) -> LayerStatistics:
        return self.layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def typical_weight(self) -> float:
        """The median of the layers' weights, for layers without statistics."""
        weights = sorted(layer.weight for layer in self.layers.values())
        return weights[len(weights) // 2] if weights else 1.0

    @property
    def captured(self) -> float:
        """The smallest share of a trace that was kept with its directions, 0 to 1."""
        return min(
            (side.captured for layer in self.layers.values() for side in (layer.inputs, layer.outputs)),
            default=1.0,
        )

    def metric_of(
        self,
        path: str | None,
        layer: str,
        shape: tuple[int, ...],
        ridge: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "LayerMetric":
        """The metric of a layer; if it has no statistics, its error gets the typical weight of the others.

        Args:
            path: Path of the module below the denoiser; None if it is in another part of the model.
            layer: The layer's name, for messages.
            shape: Shape of its weight.
            ridge: Weight of directions that never occurred, as a share of the mean.
            device: Where to compute.
            dtype: Dtype of the change.

        Raises:
            ConfigError: The statistics are for a layer of another shape.
            NonFiniteError: They hold NaN or Inf.
        """
        known = None if path is None else self.get(path)
        if known is None:
            return LayerMetric(scale=math.sqrt(self.typical_weight))
        rows, columns = matrix_shape(shape)
        if (known.outputs.size, known.inputs.size) != (rows, columns):
            raise ConfigError(
                f"--statistics: {layer} has a weight of {rows}×{columns}, the statistics are of "
                f"{known.outputs.size}×{known.inputs.size}.",
                hint="Make the statistics with this model.",
            )
        try:
            return known.metric(ridge, device, dtype)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"--statistics: {layer}: {error.message}", hint="Make the statistics again, with more inputs."
            ) from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            WriteError: It cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            for side, moments in (("inputs", layer.inputs), ("outputs", layer.outputs)):
                if moments.full is not None:
                    tensors[f"{name}.{side}.full"] = moments.full
                elif moments.low_rank is not None:
                    tensors[f"{name}.{side}.diagonal"] = moments.diagonal
                    tensors[f"{name}.{side}.low_rank"] = moments.low_rank
        metadata = {
            _KIND: _VERSION,
            "sigmascope_version": __version__,
            "fingerprint": self.fingerprint,
            "facts": json.dumps(dict(self.facts)),
            "unmet": json.dumps(self.unmet),
            "rows": json.dumps({name: layer.rows for name, layer in self.layers.items()}),
        }
        save_safetensors(Path(path), tensors, metadata)


def load_statistics(path: str | PathLike[str]) -> ModelStatistics:
    """Read a file of statistics.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    with open_checkpoint(path) as checkpoint:
        metadata = checkpoint.metadata
        if metadata.get(_KIND) != _VERSION:
            raise CheckpointError(
                Path(path),
                "it holds no statistics of a model's layers.",
                hint="Make them with: sigmascope lora statistics MODEL --images FOLDER --save_to FILE",
            )
        try:
            rows = json.loads(metadata["rows"])
            facts, unmet = json.loads(metadata["facts"]), tuple(json.loads(metadata["unmet"]))
            layers = {
                name: LayerStatistics(
                    _read_moments(checkpoint, f"{name}.inputs"),
                    _read_moments(checkpoint, f"{name}.outputs"),
                    int(count),
                )
                for name, count in rows.items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                Path(path), f"it is not a complete statistics file: {error}", hint="Make it again."
            ) from error
    return ModelStatistics(layers, metadata.get("fingerprint", ""), facts, unmet)


def _read_moments(checkpoint: Checkpoint, name: str) -> Moments:
    if f"{name}.full" in checkpoint:
        full = checkpoint.tensor(f"{name}.full").float()
        if full.dim() != 2 or full.shape[0] != full.shape[1]:
            raise ValueError(f"{name}.full is {tuple(full.shape)}, which is not square")
        return Moments(full.diagonal().clone(), full=full)
    diagonal, low_rank = checkpoint.tensor(f"{name}.diagonal").float(), checkpoint.tensor(f"{name}.low_rank")
    if diagonal.dim() != 1 or low_rank.dim() != 2 or len(diagonal) != len(low_rank):
        raise ValueError(f"{name} has {tuple(diagonal.shape)} and {tuple(low_rank.shape)}, which do not fit")
    return Moments(diagonal, low_rank=low_rank)


def require_ridge(ridge: float) -> None:
    """Raise a ConfigError if a ridge is out of range."""
    if not (math.isfinite(ridge) and ridge > 0):
        raise ConfigError(f"--ridge {ridge:g} is out of range.", hint="Use more than 0, such as 0.001.")


def load_statistics_of(
    path: str | PathLike[str], fingerprints: Container[str] | None, layers: Iterable[str | None]
) -> ModelStatistics:
    """Read statistics, and refuse those of another model.

    Args:
        path: The file.
        fingerprints: Fingerprints of the accepted models; None for one that is not known. Some statistics have none.
        layers: Paths below the denoiser; None for a layer of another part, which has no statistics.

    Raises:
        CheckpointError: The file cannot be read.
        ModelMismatchError: They are of another model, or cover none of the layers.
    """
    statistics, asked = load_statistics(path), list(layers)
    is_known = any(layer in statistics for layer in asked if layer is not None)
    own = statistics.fingerprint
    is_of_another = bool(own) and fingerprints is not None and own not in fingerprints
    if is_of_another or not is_known:
        what = "its weights differ." if is_known else f"they cover none of the {len(asked)} layers."
        raise ModelMismatchError(
            f"{path}: these statistics were made with another model: {what}",
            hint="Make them with the base or the tuned model: sigmascope lora statistics MODEL …",
        )
    return statistics
