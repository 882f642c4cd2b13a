"""What a model does with each layer's weight: second moments of what its output feels of a change.

The least change of the weights is not the least change of the picture. To first order a change E of a layer's weight
changes a random projection of the model's output by ⟨D, E⟩, with D the projection's gradient at the weight. The mean of
its square over projections is what the change does to the output, and the nearest that one product of two small
matrices comes to it is, after one step of the power iteration (Morwani et al., arXiv 2406.17748),

    ‖E‖²_{G,C} = tr(G E C Eᵀ),    C = mean of DᵀD,    G = mean of DDᵀ over its trace.

D sums over the positions of a picture, so that changes that agree from position to position, such as one of colour,
count as much as they show: products of moments of single positions (K-FAC, arXiv 1503.05671) miss that. With any roots
G = S Sᵀ and C = R Rᵀ the metric is the plain ‖SᵀER‖², so the best factors of a rank are the truncated SVD of SᵀΔW·R,
mapped back (`LayerMetric`).

A matrix of moments is kept whole where it is small. A large one is kept as its diagonal and the leading part of a
Nyström sketch (Tropp, Yurtsever, Udell and Cevher, arXiv 1706.05736), which costs memory by the width and not by its
square. `MomentSum` sums up either; `ModelStatistics` is the file.

The pipeline calls the model as it always does. Each call is made a second time, with gradients, and a random
projection is taken back through it: of the call's own output; or, where the calls of a sampling are given as a whole
(`collect_statistics`), of what the sampling made. An error of an early step then counts as it arrives at the end.

The second call takes the memory of a training's activations, one call at a time; `enable_gradient_checkpointing` of a
diffusers model makes it small. A weight's gradient lives until it is summed up; those of a whole sampling are added up
first where all together they are small.
"""

import inspect
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError, ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora.linalg import as_float64, matrix_shape, symmetric_eigen
from sigmascope.progress import Progress, no_progress

__all__ = [
    "LayerMetric",
    "LayerStatistics",
    "ModelStatistics",
    "MomentSum",
    "Moments",
    "collect_statistics",
    "load_statistics",
]


RIDGE: Final = 1e-3
"""Added to each matrix of moments, as a share of its mean diagonal: directions never met have some weight."""
FULL_UP_TO: Final = 1024
"""Width up to which a matrix of moments is kept whole: 4 MiB in float32."""
RANK: Final = 128
"""Directions that are kept of a wider one, beside the diagonal."""
_OVERSAMPLED: Final = 2  # columns of the sketch for each direction that is kept
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
            NonFiniteError: The moments are all zero: nothing was met.
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
            return MomentRoot(lower.to(dtype))
        assert self.low_rank is not None
        diagonal = (as_float64(self.diagonal.to(device)).clamp_min(0.0) + floor).sqrt()
        # diag(d)·(1 + W·Wᵀ)·diag(d) with W = Q·s·Vᵀ, and √(1 + W·Wᵀ) = 1 + Q·(√(1 + s²) − 1)·Qᵀ
        scaled = as_float64(self.low_rank.to(device)) / diagonal[:, None]
        energies, turn = symmetric_eigen(scaled.mT @ scaled)
        kept = energies > 1e-12 * energies[0].clamp_min(torch.finfo(torch.float64).tiny)
        directions = scaled @ (turn[:, kept] * energies[kept].rsqrt())
        gain = (1.0 + energies[kept]).sqrt()
        return MomentRoot(directions.to(dtype), diagonal.to(dtype), gain.to(dtype))


@dataclass(frozen=True, eq=False)
class MomentRoot:
    """R and its inverse, as products: lower triangular, or diag(d)·(1 + Q·(γ − 1)·Qᵀ).

    Attributes:
        matrix: (n, n), R itself, or (n, k), Q.
        diagonal: (n,), d; None where R is triangular.
        gain: (k,), γ; None where R is triangular.
    """

    matrix: Float[Tensor, "n k"]
    diagonal: Float[Tensor, " n"] | None = None
    gain: Float[Tensor, " k"] | None = None

    def weigh(self, rows: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Give rows · R."""
        if self.diagonal is None or self.gain is None:
            return rows @ self.matrix
        scaled = rows * self.diagonal
        return scaled + ((scaled @ self.matrix) * (self.gain - 1.0)) @ self.matrix.mT

    def unweigh(self, rows: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Give rows · R⁻¹."""
        if self.diagonal is None or self.gain is None:
            solved: Tensor = torch.linalg.solve_triangular(self.matrix, rows, upper=False, left=False)
            return solved
        turned = (rows @ self.matrix) * (1.0 / self.gain - 1.0)
        return (rows + turned @ self.matrix.mT) / self.diagonal


@dataclass(frozen=True, eq=False)
class LayerMetric:
    """How much a change of one layer's weight matters: ‖SᵀER‖.

    Attributes:
        inputs: R, of the inputs' moments.
        outputs: S, of the gradients'.
        scale: Both times this: √ of the weight that the layer's squared error has beside them.
    """

    inputs: MomentRoot | None = None
    outputs: MomentRoot | None = None
    scale: float = 1.0

    def weigh(self, change: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """SᵀER."""
        return self.weigh_down(self.weigh_up(change))

    def weigh_up(self, up: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """Sᵀ·up, with the scale."""
        weighed = up if self.outputs is None else self.outputs.weigh(up.mT).mT
        return weighed * self.scale

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
        return float((self._sum.diagonal() if self._diagonal is None else self._diagonal).double().sum())

    def result(self, divisor: int | float) -> Moments:
        """The moments, on the CPU.

        Args:
            divisor: What the sum is divided by.

        Raises:
            NonFiniteError: NaN or Inf was among the rows.
        """
        total = as_float64(self._sum.cpu()) / divisor
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError("NaN or Inf went through it.")
        if self._columns is None or self._diagonal is None:
            full = (total + total.mT) / 2
            return Moments(full.diagonal().float().clone(), full=full.float())
        diagonal = as_float64(self._diagonal.cpu()) / divisor
        kept = max(1, self._columns.shape[1] // _OVERSAMPLED)
        low_rank = _leading_part(total, as_float64(self._columns.cpu()), kept)
        rest = (diagonal - low_rank.square().sum(dim=1)).clamp_min(0.0)
        return Moments(rest.float(), low_rank=low_rank.to(torch.bfloat16))


def sketch_columns(size: int, rank: int, seed: int) -> Float[Tensor, "n k"]:
    """Random orthonormal columns, twice the rank; all layers of a width can share them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(size, min(_OVERSAMPLED * rank, size), generator=generator)
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
    """What the output feels of a change of one layer's weight: tr(G E C Eᵀ).

    Attributes:
        inputs: C, the mean of DᵀD over projections.
        outputs: G, the mean of DDᵀ over its trace.
        rows: How many positions were met in a call.
    """

    inputs: Moments
    outputs: Moments
    rows: int

    @property
    def weight(self) -> float:
        """What a squared error of 1, spread evenly over the layer's weight, changes in the output, squared."""
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
        fingerprint: Of the denoiser's weights (`denoiser_fingerprint`); empty where it is not known.
        facts: What they were made from: calls, probes, seed.
        unmet: Layers of the model that no call went through, or that its output did not feel.
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
        """The least share of a trace that was kept with its directions, 0 to 1."""
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
        """The metric of a layer; where its statistics are not known, its weight is that of most layers.

        Args:
            path: Of the module below the denoiser; None where it is of another part of the model.
            layer: What the user calls it.
            shape: Of its weight.
            ridge: Weight of directions that were never met, as a share of the mean.
            device: Where to compute.
            dtype: Of the change.

        Raises:
            ConfigError: The statistics are of a layer of another shape.
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
                Path(path), f"it is no complete file of statistics: {error}", hint="Make it again."
            ) from error
    return ModelStatistics(layers, metadata.get("fingerprint", ""), facts, unmet)


def _read_moments(checkpoint: Checkpoint, name: str) -> Moments:
    if f"{name}.full" in checkpoint:
        full = checkpoint.tensor(f"{name}.full").float()
        if full.dim() != 2 or full.shape[0] != full.shape[1]:
            raise ValueError(f"{name}.full is {tuple(full.shape)}, which is not square")
        return Moments(full.diagonal().clone(), full=full)
    diagonal, low_rank = (checkpoint.tensor(f"{name}.{part}").float() for part in ("diagonal", "low_rank"))
    if diagonal.dim() != 1 or low_rank.dim() != 2 or len(diagonal) != len(low_rank):
        raise ValueError(f"{name} has {tuple(diagonal.shape)} and {tuple(low_rank.shape)}, which do not fit")
    return Moments(diagonal, low_rank=low_rank)


def require_ridge(ridge: float) -> None:
    """Refuse, by a ConfigError, a ridge that is no share."""
    if not (math.isfinite(ridge) and ridge > 0):
        raise ConfigError(f"--ridge {ridge:g} is no share.", hint="Use more than 0, such as 0.001.")


def load_statistics_of(
    path: str | PathLike[str], fingerprints: Container[str] | None, layers: Iterable[str | None]
) -> ModelStatistics:
    """Read statistics, and refuse those of another model.

    Args:
        path: Of the file.
        fingerprints: Of the models that they may be of; None where nobody knows. Not all statistics have one either.
        layers: Paths below the denoiser; None for a layer of another part, which statistics do not know.

    Raises:
        CheckpointError: The file cannot be read.
        ModelMismatchError: They are of another model, or know none of the layers.
    """
    statistics, asked = load_statistics(path), list(layers)
    is_known = any(layer in statistics for layer in asked if layer is not None)
    own = statistics.fingerprint
    is_of_another = bool(own) and fingerprints is not None and own not in fingerprints
    if is_of_another or not is_known:
        what = "its weights are others." if is_known else f"they know none of the {len(asked)} layers."
        raise ModelMismatchError(
            f"{path}: these statistics were made with another model: {what}",
            hint="Make them with the base or the tuned model: sigmascope lora statistics MODEL …",
        )
    return statistics


_LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PIECE: Final = 1 << 24  # elements of patches at a time: 64 MiB in float32
_MOST_ADDED_UP: Final = 4 << 30
"""Bytes of all weights' gradients: of a larger model those of each call count by themselves."""
_WRAPPED: Final = ("base_layer", "_orig_mod")
"""What PEFT's adapters and `torch.compile` call the module that they stand around."""


def collect_statistics(
    model: nn.Module,
    run: Callable[[], object],
    *,
    probes: int = 1,
    calls: int | None = None,
    full_up_to: int = FULL_UP_TO,
    rank: int = RANK,
    seed: int = 0,
    fingerprint: str = "",
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Sum up second moments for every Linear and convolution layer of a model while a pipeline runs.

    Args:
        model: The denoiser: a module whose calls give a tensor, or a tuple, dict or object with one first. Its
            weights are not changed, and it is as it was afterwards.
        run: Calls the model, directly or through a pipeline, any number of times. If it is a generator, each tensor
            that it yields is what its calls since the last one made, with gradients allowed: projections are then of
            that tensor, such as the latents after the last step. A tensor that does not hang together with the
            calls by its gradients leaves each call's own output.
        probes: Random projections of each output.
        calls: How many calls `run` makes, for the progress; None where it is not known.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of the projections.
        fingerprint: Of the model's weights, for the file.
        progress: Told after each call.

    Returns:
        The statistics, by the path of the layer in the model.

    Raises:
        ConfigError: The model was not called, has no layers, or gives no tensor; or no gradient came back from what
            the calls made.
        NonFiniteError: NaN or Inf went through a layer; the message names the first.
        Exception: Whatever `run` raises.
    """
    if probes < 1:
        raise ConfigError(f"--probes {probes} looks at nothing.", hint="Use 1 or more.")
    if rank < 1 or full_up_to < 1:
        raise ConfigError(f"--rank {rank} and --full_up_to {full_up_to}: both are 1 or more.")
    if getattr(model, "is_cache_enabled", False):
        raise ConfigError(
            f"{type(model).__name__} skips layers by its cache.", hint="Call disable_cache() on it first."
        )
    new_sum = _sums(full_up_to, rank, seed)
    known = _layers_of(model)
    of_module = {module: LayerSums(module, new_sum) for module in known.values() if _is_plain(module)}
    sums = {name: of_module.get(module) for name, module in known.items()}
    if not of_module:
        raise ConfigError(
            f"{type(model).__name__} has no Linear or convolution layer.", hint="Pass the denoiser itself."
        )
    watched = _Watched(model, list(of_module.values()), probes, seed, calls, progress)
    with ExitStack() as hooks:
        if inspect.isgeneratorfunction(run):
            hooks.enter_context(frozen(model))
            hooks.enter_context(watched.linked_calls())
            with torch.enable_grad():
                for made in run():
                    watched.take_back_from(made)
        else:
            hooks.enter_context(watched.single_calls())
            run()
    if watched.calls == 0:
        raise ConfigError(
            f"the model ({type(model).__name__}) was not called.",
            hint="Pass the module that the pipeline calls at each step, such as pipe.unet or pipe.transformer.",
        )
    facts = {"calls": watched.calls, "probes": probes, "seed": seed, "full_up_to": full_up_to, "rank": rank}
    return _finished(sums, watched.calls, facts | {"samplings": watched.samplings}, fingerprint)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolution layers by the names that a checkpoint has for them; a shared one by each of its names."""
    layers: dict[str, nn.Module] = {}
    adapted: list[str] = []  # prefixes of what PEFT has put its adapters around
    for name, module in model.named_modules(remove_duplicate=False):
        inside = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            adapted.append(f"{name}.")
        elif isinstance(module, _LAYERS) and (inside is None or name == f"{inside}base_layer"):
            layers[".".join(part for part in name.split(".") if part not in _WRAPPED)] = module
    return layers


def _is_plain(module: nn.Module) -> bool:
    """Whether it multiplies its weight with what PyTorch's own layer does: a causal convolution pads by itself."""
    if isinstance(module, nn.Linear):
        return module.weight.shape == (module.out_features, module.in_features)  # packed weights are not
    own = next(kind for kind in _LAYERS if isinstance(module, kind))
    is_own = all(getattr(type(module), name) is getattr(own, name) for name in ("forward", "_conv_forward"))
    return is_own and getattr(module, "groups", 1) == 1


def _finished(
    sums: "Mapping[str, LayerSums | None]", calls: int, facts: Mapping[str, Any], fingerprint: str
) -> ModelStatistics:
    layers: dict[str, LayerStatistics] = {}
    finished: dict[LayerSums, LayerStatistics] = {}  # a shared layer has several names
    unmet: list[str] = []
    for name, layer in sums.items():
        if layer is None or not (layer in finished or layer.is_met):
            unmet.append(name)
            continue
        try:
            statistics = finished[layer] = finished.get(layer) or layer.result(calls)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{name}: {error.message}",
                hint="Use float32 or bfloat16 for the model, and check that its pictures are right.",
            ) from error
        if statistics.weight > 0.0:
            layers[name] = statistics
        else:  # as before a projection of zeros
            unmet.append(name)
    if not layers:
        raise ConfigError(
            "no layer was met while the model was called.",
            hint="Its forward may forbid gradients, or call none of the layers themselves.",
        )
    return ModelStatistics(layers, fingerprint, facts, tuple(unmet))


NewSum = Callable[[int, torch.device], MomentSum]
"""Gives an empty sum over rows of a width."""


def _sums(full_up_to: int, rank: int, seed: int) -> NewSum:
    """Whole sums up to a width, and sketches of wider ones; layers of one width share the sketch's columns."""

    @cache
    def columns(size: int, device: torch.device) -> Tensor:
        return sketch_columns(size, rank, seed + size).to(device)

    def new_sum(size: int, device: torch.device) -> MomentSum:
        return MomentSum(size, device, None if size <= full_up_to else columns(size, device))

    return new_sum


class LayerSums:
    """Sums up DᵀD and DDᵀ of one layer while it listens, D the gradients of its weight.

    Args:
        module: The layer.
        new_sum: Makes its sums.

    Attributes:
        adds_up: Whether gradients are added up until `settle`, and are one D together.
    """

    def __init__(self, module: nn.Module, new_sum: NewSum) -> None:
        self.adds_up = False
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._sizes = matrix_shape(tuple(weight.shape))
        self._module = module
        self._new_sum = new_sum
        self._inputs: MomentSum | None = None
        self._outputs: MomentSum | None = None
        self._gradient: Tensor | None = None
        self._rows = 0
        self._handle: RemovableHandle | None = None

    @property
    def bytes(self) -> int:
        """Of its weight's gradient."""
        return 4 * math.prod(self._sizes)

    @property
    def is_met(self) -> bool:
        """Whether something went through it and came back."""
        return self._inputs is not None and self._outputs is not None

    def listen(self) -> None:
        """Take part in each call with gradients, until `remove`."""
        self._handle = self._module.register_forward_hook(self._called, with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def settle(self) -> None:
        """Take the gradients that were added up as one."""
        if self._gradient is not None:
            self._sum_up(self._gradient)
            self._gradient = None

    def result(self, calls: int) -> LayerStatistics:
        """The moments; the sums are let go.

        Raises:
            NonFiniteError: NaN or Inf was among them.
        """
        inputs, outputs = self._inputs, self._outputs
        assert inputs is not None
        assert outputs is not None
        self._inputs = self._outputs = None  # those of all layers take more memory than the results
        return LayerStatistics(
            inputs.result(calls), outputs.result(outputs.trace or 1.0), self._rows // calls
        )

    def _called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        given = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if not (isinstance(given, Tensor) and torch.is_grad_enabled()):
            return output  # where the model itself forbids gradients, none can come back
        if not output.requires_grad:  # nothing before it needs a gradient, as in a time embedding
            output = output.detach().requires_grad_()
        felt: Tensor = _Felt.apply(output, given.detach(), self)  # type: ignore[no-untyped-call]
        return felt

    def add(self, given: Tensor, gradient: Tensor) -> None:
        """Add what one call's projection feels of the weight.

        Args:
            given: The layer's input.
            gradient: At its output.
        """
        out = _rows_out(self._module, gradient).float()
        total = torch.zeros(self._sizes, device=out.device) if self._gradient is None else self._gradient
        done = 0
        with torch.autocast(out.device.type, enabled=False):  # the host's would round what is summed up
            for rows in _rows_in(self._module, given):
                total.addmm_(out[done : done + rows.shape[0]].mT, rows.float())
                done += rows.shape[0]
        self._rows += done
        if self.adds_up:
            self._gradient = total
        else:
            self._sum_up(total)

    def _sum_up(self, gradient: Tensor) -> None:
        if self._inputs is None or self._outputs is None:
            self._inputs = self._new_sum(self._sizes[1], gradient.device)
            self._outputs = self._new_sum(self._sizes[0], gradient.device)
        self._inputs.add(gradient)
        self._outputs.add(gradient.mT)


class _Felt(torch.autograd.Function):
    """Gives a layer's output on, and the layer its gradient on the way back.

    The input is kept as autograd keeps what it needs, so that a checkpointed block makes it again.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: Tensor, layer: LayerSums) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(given)
        return output.clone()  # the model may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (given,) = ctx.saved_tensors
        ctx.layer.add(given, gradients[0])
        return gradients[0], None, None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Watched:
    """A model whose calls are made a second time, with gradients, and what its layers sum up then.

    Attributes:
        calls: How many were taken back.
        samplings: How many outcomes of several calls were.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[LayerSums],
        probes: int,
        seed: int,
        calls: int | None,
        progress: Progress,
    ) -> None:
        self.calls = self.samplings = 0
        self._model, self._layers = model, layers
        self._probes, self._seed = probes, seed
        self._expected, self._progress = calls, progress
        self._given: list[Arguments] = []

    @contextmanager
    def single_calls(self) -> Iterator[None]:
        """Take back each call's own output, when the host's call is over."""

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._given.append((_copied(args), _copied(kwargs)))  # before the model can change them in place

        def after(_module: nn.Module, _args: object, _kwargs: object, _output: object) -> None:
            self._take_back_alone(self._given.pop())

        with self._hooked(before, after):
            yield

    @contextmanager
    def linked_calls(self) -> Iterator[None]:
        """Let gradients pass through each call, which keeps nothing for them but its arguments."""
        linked: list[Arguments] = []

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            linked.append((args, kwargs))
            self._given.append((_copied(args), _copied(kwargs)))
            return _copied(args), _copied(kwargs)

        def after(_module: nn.Module, _args: object, _kwargs: object, output: object) -> object:
            made = _first_tensor(output)
            if made is None:
                return output
            back = partial(self._take_back, self._given[-1])
            anchor = torch.zeros((), requires_grad=True)
            through = _Call.apply(back, made, anchor, *_floating(linked.pop()))  # type: ignore[no-untyped-call]
            return _with_first(output, through)

        with self._hooked(before, after):
            yield

    def take_back_from(self, outcome: object) -> None:
        """Take projections of what the calls since the last time made back through all of them.

        Raises:
            ConfigError: They do not come through.
        """
        made, given = _first_tensor(outcome), self._given
        self._given = []
        if made is None or not made.requires_grad:
            for arguments in given:
                self._take_back_alone(arguments)
            return
        weights = sum(layer.bytes for layer in self._layers)
        for layer in self._layers:
            layer.adds_up = weights <= _MOST_ADDED_UP
        try:
            for number, probe in enumerate(self._projections(made)):
                made.backward(probe, retain_graph=number + 1 < self._probes)  # type: ignore[no-untyped-call]
                for layer in self._layers:
                    layer.settle()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"no gradient comes back through the sampling: {error}",
                hint='Use --through calls (in Python through="calls").',
            ) from error
        self.samplings += 1

    def _take_back_alone(self, arguments: Arguments) -> None:
        self._take_back(arguments, None)

    def _take_back(self, arguments: Arguments, gradient: Tensor | None) -> list[Tensor | None]:
        """Call the model again, and take a gradient of its output back, or without one random projections.

        Returns:
            The gradients of its floating-point arguments.
        """
        model = self._model
        devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
        # Dropout of a model in training must not move the host's random numbers.
        fork = torch.random.fork_rng(devices=list(devices))
        with fork, torch.inference_mode(False), torch.enable_grad(), frozen(model), ExitStack() as hooks:
            leaves: list[Tensor] = []
            args, kwargs = (_tracked(_copied(part), leaves) for part in arguments)
            for layer in self._layers:
                layer.listen()
                hooks.callback(layer.remove)
            inner = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped, without its graphs
            output = _first_tensor(inner.forward(*args, **kwargs))
            if output is None:
                raise ConfigError(
                    f"{type(model).__name__} gives no tensor.",
                    hint="Pass the denoiser itself, not the pipeline.",
                )
            if output.requires_grad:  # a layer was met, and under gradients
                if gradient is not None:
                    output.backward(gradient)  # type: ignore[no-untyped-call]
                else:
                    for number, probe in enumerate(self._projections(output)):
                        output.backward(probe, retain_graph=number + 1 < self._probes)  # type: ignore[no-untyped-call]
        self.calls += 1
        self._progress(self.calls, self._expected or self.calls, "call")
        return [leaf.grad for leaf in leaves]

    def _projections(self, output: Tensor) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed + 7919 * self.calls)
        for _ in range(self._probes):
            yield torch.randn(output.shape, generator=generator).to(output)

    @contextmanager
    def _hooked(self, before: Any, after: Any) -> Iterator[None]:
        handles = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Call(torch.autograd.Function):
    """A call of the model as one step of autograd, which makes the call again on the way back."""

    @staticmethod
    def forward(
        ctx: Any, back: Callable[[Tensor], list[Tensor | None]], made: Tensor, *_given: Tensor
    ) -> Tensor:
        ctx.back = back
        return made.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(gradients[0])


def _floating(value: Any) -> Iterator[Tensor]:
    """The tensors of `_tracked`'s leaves, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif type(value) in (dict, list, tuple):
        for item in value.values() if type(value) is dict else value:
            yield from _floating(item)


def _with_first(output: Any, tensor: Tensor) -> Any:
    """The same output with another first tensor."""
    if isinstance(output, Tensor):
        return tensor
    if type(output) in (list, tuple):
        index = next(index for index, item in enumerate(output) if _first_tensor(item) is not None)
        return type(output)([*output[:index], _with_first(output[index], tensor), *output[index + 1 :]])
    items = output if isinstance(output, dict) else vars(output)
    name = next(name for name, item in items.items() if _first_tensor(item) is not None)
    changed = _with_first(items[name], tensor)
    if isinstance(
        output, dict
    ):  # outputs of diffusers and transformers are dicts that know their items as attributes
        output[name] = changed
    else:
        setattr(output, name, changed)
    return output


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No weight takes a gradient, which would cost as much memory as the model; no buffer stays changed."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # A batch norm in training counts what goes through it.
    buffers = [
        (buffer, buffer.clone())
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
    ]
    try:
        for name in trained:
            model.get_parameter(name).requires_grad_(False)
        yield
    finally:
        for name in trained:  # by name: offloading puts other objects in their places
            model.get_parameter(name).requires_grad_(True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _copied(value: Any) -> Any:
    """The same arguments with tensors of their own, made outside inference mode: autograd may see them."""
    if isinstance(value, Tensor):
        with torch.inference_mode(False), torch.no_grad():
            return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _tracked(value: Any, leaves: list[Tensor]) -> Any:
    """The same with gradients, which go to `leaves`. What is given is none of them: a leaf cannot be changed in place."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        leaves.append(value.requires_grad_())
        return value + 0
    if type(value) is dict:
        return {key: _tracked(item, leaves) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tracked(item, leaves) for item in value)
    return value


def _first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    elif not isinstance(output, list | tuple):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    return next((found for item in output if (found := _first_tensor(item)) is not None), None)


def _rows_in(module: nn.Module, given: Tensor) -> Iterator[Tensor]:
    """What the weight is multiplied with, (positions, columns of the weight's matrix), a piece at a time."""
    given = given.detach()
    if isinstance(module, nn.Linear):
        yield given.reshape(-1, given.shape[-1])
        return
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    dimensions = len(module.kernel_size)
    batched = given if given.dim() == dimensions + 2 else given[None]
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = nn.functional.pad(batched, padding, mode=mode)
    patches = padded
    for axis, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        reach = dilation * (kernel - 1) + 1
        patches = patches.unfold(axis + 2, reach, stride)[..., ::dilation]
    # (batch, channels, positions…, kernel…) to (batch, positions…, channels, kernel…)
    order = [0, *range(2, 2 + dimensions), 1, *range(2 + dimensions, 2 + 2 * dimensions)]
    patches = patches.permute(order)
    columns = math.prod(patches.shape[1 + dimensions :])
    step = max(1, _PIECE // max(1, columns * math.prod(patches.shape[2 : 1 + dimensions])))
    for picture in patches:
        for start in range(0, picture.shape[0], step):
            yield picture[start : start + step].reshape(-1, columns)


def _rows_out(module: nn.Module, gradient: Tensor) -> Tensor:
    """(positions, rows of the weight's matrix)."""
    if isinstance(module, nn.Linear):
        return gradient.reshape(-1, gradient.shape[-1])
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    batched = gradient if gradient.dim() == len(module.kernel_size) + 2 else gradient[None]
    return batched.movedim(1, -1).reshape(-1, batched.shape[1])
