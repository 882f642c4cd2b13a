"""Norms, factorisations of Gram matrices, the matrix behind a convolution's weight, leading singular subspaces, spectra.

Norms are summed in float64: a float32 sum over 13 million squares is 0.1 % low, which flatters errors.

Gram matrices of a few hundred columns stand for tall matrices. Their eigenvectors and Cholesky factors are computed
on the CPU: a GPU is slower at them than at the products that make them.

A convolution (out, in, kh, kw) acts as the matrix (out, in·kh·kw).

Leading singular subspaces come from randomised block Krylov iteration (`leading_subspace`). With V₀ random,
the subspace span(V₀, (AᵀA)V₀, (AᵀA)²V₀, …) holds approximations of the leading right singular
vectors whose error falls exponentially in the number of steps times the square root of the gap (Musco and
Musco, arXiv 1504.05477); it needs fewer products with A than subspace iteration does. Within its basis K the best
vectors come from the Rayleigh-Ritz principle, from the Gram matrices KᵀK and (AK)ᵀ(AK) alone.

Iterations may run in bfloat16, with products summed in float32: they only have to find a subspace, and perturbing it by
ε costs ε² in energy. If almost everything is captured, that ε² would show in what is left. Then the part that was found
is subtracted from the matrix, and the search continues in the rest.

A `Spectrum` holds what is known about a change's singular values: the largest, the energy of all, stable and effective
rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import LoraFormatError, NonFiniteError
from sigmascope.lora.parallel import require_wanted
from sigmascope.probes.accelerators import has_float64
from sigmascope.probes.accelerators.cuda import capability_of
from sigmascope.probes.matmul_precision import multiplies_bfloat16

_WIDENED_ELEMENTS: Final = 1 << 20  # elements widened at a time: 8 MiB, whatever the layer's size
_CACHED_ELEMENTS: Final = 1 << 18  # elements that `blocked_norm` sums at a time
_UP_TO_FLOAT32: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FLOAT32_RUN: Final = 256  # elements that `blocked_energy` sums in float32
_LEAST_MEAN_SQUARE: Final = 1e-30  # below, single squares leave the range of float32


_PACKED: Final = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers an element: PyTorch cannot widen them


ALL_VALUES_FROM_ONE_IN: Final = 5
"""If more than one singular value in this many is wanted, computing all of them costs no more."""

FULL_RANK = 9999
"""The rank that users give for "all of it"."""


_GRAM_ROUNDING: Final = 8.0
"""Eigenvalues of a Gram matrix of k vectors below 8·√k·eps of the largest are rounding."""


def frobenius_norm(tensor: Float[Tensor, "..."]) -> float:
    """‖tensor‖ with the squares summed in float64, without a float64 copy of the whole.

    Returns:
        The norm; NaN or Inf when the tensor holds any.
    """
    flat = where_float64_is(tensor.detach()).reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _WIDENED_ELEMENTS):
        wide = flat[start : start + _WIDENED_ELEMENTS].to(torch.float64)
        total += torch.dot(wide, wide)
    return math.sqrt(total.item())


def blocked_norm(tensor: Float[Tensor, "..."]) -> float:
    """‖tensor‖ in one pass that stays in the cache (`blocked_energy`), for dtypes up to float32; otherwise
    `frobenius_norm`.

    Returns:
        The norm, with a relative error below 10⁻⁷; NaN or Inf if the tensor holds any.
    """
    if tensor.dtype not in _UP_TO_FLOAT32:
        return frobenius_norm(tensor)
    flat = where_float64_is(tensor.detach()).reshape(-1)
    energies = [
        blocked_energy(flat[start : start + _CACHED_ELEMENTS].to(torch.float32))
        for start in range(0, flat.numel(), _CACHED_ELEMENTS)
    ]
    return math.sqrt(float(torch.stack(energies).sum())) if energies else 0.0


def blocked_norms(tensors: Sequence[Tensor]) -> list[float]:
    """`blocked_norm` of many tensors, with one read of each device."""
    pieces: list[tuple[int, Tensor]] = []
    small: dict[object, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        flat = where_float64_is(tensor.detach()).reshape(-1)
        if 0 < flat.numel() <= _FLOAT32_RUN**2:
            small.setdefault((flat.numel(), flat.dtype, flat.device), []).append((index, flat))
            continue
        starts = range(0, flat.numel(), _CACHED_ELEMENTS)
        pieces += [(index, flat[start : start + _CACHED_ELEMENTS]) for start in starts]
    with torch.no_grad():
        sums = [_energy(piece).view(1) for _, piece in pieces]
        for alike in small.values():
            step = max(1, _CACHED_ELEMENTS // alike[0][1].numel())
            for some in (alike[start : start + step] for start in range(0, len(alike), step)):
                pieces += some
                sums.append(torch.stack([flat for _, flat in some]).to(torch.float64).square().sum(1))
        read = read_numbers(sums)
    energies = [0.0] * len(tensors)
    for (index, piece), energy in zip(pieces, read, strict=True):
        is_told = _LEAST_MEAN_SQUARE * piece.numel() <= energy < math.inf
        energies[index] += energy if is_told else frobenius_norm(piece) ** 2
    return [math.sqrt(energy) for energy in energies]


def _energy(piece: Float[Tensor, " n"]) -> Tensor:
    """Float64, in one step for what is small or wide; for the rest as `blocked_energy`, which says when it is right."""
    if piece.dtype in _UP_TO_FLOAT32 and piece.numel() > _FLOAT32_RUN**2:
        return _energy_in_runs(piece.to(torch.float32))
    wide = piece.to(torch.float64)
    return torch.dot(wide, wide)


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The elements of flat floating tensors one after the other, with one read of each device."""
    parts: list[list[float]] = [[] for _ in tensors]
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        own = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        numbers = torch.cat([tensors[index] for index in own]).cpu().tolist()
        start = 0
        for index in own:
            parts[index] = numbers[start : start + tensors[index].numel()]
            start += tensors[index].numel()
    return [number for part in parts for number in part]


def blocked_energy(tensor: Float[Tensor, " n"]) -> Tensor:
    """‖tensor‖² of float32 values in one pass: float32 within runs of 256, float64 across them (`where_float64_is`).

    Sums over such short runs are off by about 10⁻⁸, and by at most 10⁻⁶ whatever the values; a single float32 sum over
    millions is off by 10⁻³. Values whose squares leave float32's range are summed in float64.

    Args:
        tensor: Contiguous, any length.

    Returns:
        A float64 scalar; NaN or Inf when the tensor holds any.
    """
    tensor = where_float64_is(tensor)
    total = _energy_in_runs(tensor)
    if _LEAST_MEAN_SQUARE * tensor.numel() <= float(total) < math.inf:
        return total
    return torch.full_like(total, frobenius_norm(tensor) ** 2)


def _energy_in_runs(tensor: Tensor) -> Tensor:
    whole = tensor.numel() - tensor.numel() % _FLOAT32_RUN
    runs = torch.linalg.vector_norm(tensor[:whole].view(-1, _FLOAT32_RUN), dim=1)
    rest = tensor[whole:].to(torch.float64)
    total: Tensor = runs.to(torch.float64).square().sum() + torch.dot(rest, rest)
    return total


def root_sum_square(norms: list[float]) -> float:
    """The norm of several blocks together from the norm of each: √Σ nᵢ²."""
    return math.hypot(*norms)


def at_least_float32(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if it is among the dtypes, otherwise float32. Unlike torch.promote_types, it accepts float8 too."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def is_real(dtype: torch.dtype) -> bool:
    """Whether PyTorch can turn tensors of this dtype into float32: floating point, but not packed float4."""
    return dtype.is_floating_point and dtype != _PACKED


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds no NaN or Inf. The ends of its range tell it, for a tenth of what looking at each number costs."""
    if tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()
    return isfinite(float(low)) and isfinite(float(high))


def where_float64_is(tensor: Tensor) -> Tensor:
    """The tensor itself, or its copy on the CPU if the device has no float64, like Apple's.

    Such a device cannot convert on the way to the CPU either: `tensor.to("cpu", torch.float64)` fails there.
    """
    return tensor if has_float64(tensor.device) else tensor.cpu()


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; float64 where the device has it, else on the CPU."""
    if dtype != torch.float64:
        return tensor.to(dtype)
    held = where_float64_is(tensor)
    if held.dtype == torch.float16 and held.device.type == "cpu":
        held = held.to(torch.float32)  # in two steps, both of which the processor has, it takes half the time
    return held.to(torch.float64)


def as_float64(tensor: Tensor) -> Tensor:
    """A detached tensor in float64; on the CPU if the device has no float64."""
    return in_dtype(tensor.detach(), torch.float64)


def gram_in_double(columns: Tensor) -> Tensor:
    """XᵀX in float64: in float32 it would lose whatever is below 10⁻³·⁵ of the largest column."""
    wide = as_float64(columns)
    return wide.mT @ wide


def symmetric_eigen(gram: Float[Tensor, "k k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Eigenvalues, falling, and their vectors as columns, where the matrix lies."""
    values, vectors = torch.linalg.eigh(gram.cpu())
    return values.flip(0).to(gram.device), vectors.flip(1).to(gram.device)


def orthonormal_rows(rows: Float[Tensor, "k n"]) -> Float[Tensor, "j n"]:
    """An orthonormal basis of the rows' span, without those that depend on the others.

    It uses the Gram matrix, which for long rows is several times as fast as Householder QR and accurate up to a
    condition number of some hundreds; rows beyond that are dropped. The first basis vectors lie along the largest
    directions.
    """
    gram = rows @ rows.mT
    values, vectors = symmetric_eigen(gram)
    kept = values > _rounding(gram) * values[:1]  # of no rows there is no largest
    basis: Tensor = (vectors[:, kept] * values[kept].rsqrt()).mT @ rows
    return basis


def whitening(gram: Float[Tensor, "k k"]) -> Float[Tensor, "k j"]:
    """T with Tᵀ·gram·T = 1, leaving out what is linearly dependent."""
    factor, failed = torch.linalg.cholesky_ex(gram.cpu())
    diagonal = factor.diagonal()
    if int(failed) == 0 and bool(diagonal.min() > math.sqrt(_rounding(gram)) * diagonal.max()):
        identity = torch.eye(gram.shape[0], dtype=gram.dtype)
        inverse: Tensor = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        return inverse.to(gram.device)
    values, vectors = symmetric_eigen(gram)
    kept = values > _rounding(gram) * values[0]
    return vectors[:, kept] * values[kept].rsqrt()


def _rounding(gram: Tensor) -> float:
    return _GRAM_ROUNDING * math.sqrt(gram.shape[0]) * torch.finfo(gram.dtype).eps


def matrix_shape(weight_shape: Sequence[int]) -> tuple[int, int]:
    """Give (out, in·kh·kw) for the shape of a Linear or convolution weight.

    Raises:
        LoraFormatError: The shape has fewer than two axes (a bias, a norm) or an empty axis.
    """
    if len(weight_shape) < 2 or min(weight_shape) < 1:
        raise LoraFormatError(
            f"a weight of shape {tuple(weight_shape)} is not a matrix, so it has no low-rank factors.",
            hint="Use weights of Linear (out, in) or convolution (out, in, kh, kw) layers.",
        )
    return weight_shape[0], prod(weight_shape[1:])


def max_rank(weight_shape: Sequence[int]) -> int:
    """Give the largest rank that a change of this weight can have: min(out, in·kh·kw)."""
    return min(matrix_shape(weight_shape))


def is_convolution(weight_shape: Sequence[int]) -> bool:
    """Tell a convolution from a Linear by its axes: a 1×1 convolution (out, in, 1, 1) is a convolution."""
    return len(weight_shape) > 2


def same_matrix(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether changes of weights of these shapes are the same matrix.

    Those of a 1×1 convolution and a Linear layer are. So are those of a convolution (out, in, kh, kw) and of factors
    that do not show its kernel (out, in·kh·kw), such as LoHa and LoKr without a core.
    """
    if without_pointwise_kernel(first) == without_pointwise_kernel(second):
        return True
    return 2 in {len(first), len(second)} and first[:1] == second[:1] and prod(first) == prod(second)


def without_pointwise_kernel(shape: Sequence[int]) -> tuple[int, ...]:
    """(out, in) of a linear layer too whose factors have kernels of 1×1."""
    return tuple(shape[:2]) if prod(shape[2:]) == 1 else tuple(shape)


_MOST_BLOCKS: Final = 9  # in a basis; more for large ranks
_WIDEST_BLOCK: Final = 64  # vectors in a block
_RESTARTS: Final = 6  # at most, from the best vectors of a basis that is full
_TOLERANCE_SHARE: Final = 0.8  # of the tolerance, since what is still missing is an estimate
_RESOLVED_SHARE: Final = {torch.bfloat16: 0.02, torch.float32: 1e-3}
"""Share of the energy that must be left so that iterations in a dtype can resolve it beside the captured part."""
_ROUNDING_ENERGY_SHARE: Final = 1e-12  # share of the energy that is the rounding of a float32 matrix
_MAX_OVERLAP: Final = 0.02
"""A new block that overlaps the old ones by more than this is orthogonalised again."""


@dataclass(frozen=True, eq=False)
class Subspace:
    """An approximate leading right singular subspace.

    Attributes:
        vectors: (n, k), orthonormal up to the rounding of the iterations, by falling singular value.
        images: (m, k), A·vectors, for A as rounded to the dtype of the iterations.
        captured: Estimate of the energy ‖A·vectors‖².
        converged: Whether the tolerance is met, estimated from what more steps would add.
    """

    vectors: Float[Tensor, "n k"]
    images: Float[Tensor, "m k"]
    captured: float
    converged: bool


def leading_subspace(
    matrix: Float[Tensor, "m n"],
    rank: int,
    *,
    total_energy: float,
    tolerance: float,
    rounded: Float[Tensor, "m n"] | None = None,
    steep: bool = False,
) -> Subspace:
    """Find a subspace that holds the energy of the `rank` leading right singular vectors.

    It stops when further steps would add so little energy (extrapolated from the last two) that the error is within
    `tolerance` of the optimum.

    Args:
        matrix: float32, finite, of ordinary scale: the squares of its entries are not subnormal.
        rank: At least 1 and well below min(m, n).
        total_energy: ‖matrix‖², summed in float64.
        tolerance: Largest relative excess of the error ‖A − A_r‖ over its optimum, such as 1e-3.
        rounded: The matrix in the device's `fast_dtype`, if the caller has it.
        steep: Whether the singular values are likely to fall so fast that the part found first has to be subtracted.

    Returns:
        `rank` vectors; fewer if the matrix has no more.
    """
    goal = _Goal(rank, total_energy, tolerance, _ROUNDING_ENERGY_SHARE * total_energy)
    dtype = (fast_dtype(matrix.device) if matrix.dtype == torch.float32 else None) or matrix.dtype
    start = random = _random_start(matrix, rank)
    if steep:
        start = _sharpened(matrix, random)
        images = _images(matrix, start)
        if goal.left(blocked_norm(images) ** 2) <= goal.resolved(dtype):
            return _deflated(matrix, start, images, goal, dtype, random)
    coarse = rounded if rounded is not None and rounded.dtype == dtype else matrix.to(dtype)
    return _search(coarse, lambda: matrix, start, goal, random)


def _search(
    coarse: Float[Tensor, "m n"],
    matrix: Callable[[], Float[Tensor, "m n"]],
    start: Float[Tensor, "k n"],
    goal: "_Goal",
    random: Float[Tensor, "r n"],
) -> Subspace:
    """Iterate in the dtype of `coarse`, from `random` rows; if little is left, continue with `matrix`, its float32
    form.
    """
    resolved = goal.resolved(coarse.dtype)
    subspace = _with_restarts(coarse, start, goal, stop_below=resolved)
    if goal.left(subspace.captured) > resolved:
        return subspace
    fine = matrix()
    strong = _sharpened(fine, subspace.vectors.mT)
    return _deflated(fine, strong, _images(fine, strong), goal, coarse.dtype, random)


@dataclass(frozen=True, slots=True)
class _Goal:
    """When to stop: `rank` vectors, within `tolerance` of the best error that they can have, or `nothing` left."""

    rank: int
    total_energy: float
    tolerance: float
    nothing: float

    def left(self, captured: float) -> float:
        return max(self.total_energy - captured, 0.0)

    def resolved(self, dtype: torch.dtype) -> float:
        """What must be left for iterations in a dtype to see it."""
        return _RESOLVED_SHARE[dtype] * self.total_energy

    def is_met(self, captured: list[float]) -> bool:
        """Extrapolate the gains of the last steps as a geometric series."""
        if len(captured) < 3:
            return False
        before, last = captured[-2] - captured[-3], captured[-1] - captured[-2]
        # Energies go by the square of the error, so they may exceed by twice the tolerance.
        allowed = 2.0 * _TOLERANCE_SHARE * self.tolerance * self.left(captured[-1])
        if not 0.0 < last < before:
            return last == 0.0
        ratio = math.sqrt(last / before)  # later gains fall more slowly than those before them
        return last * ratio / (1.0 - ratio) <= allowed


def _with_restarts(matrix: Tensor, start: Tensor, goal: _Goal, stop_below: float) -> Subspace:
    """Iterate, and begin again from the best vectors when the basis has grown large."""
    subspace = _iterate(matrix, start, goal, stop_below)
    for _ in range(_RESTARTS):
        if subspace.converged or goal.left(subspace.captured) <= stop_below:
            break
        subspace = _iterate(matrix, orthonormal_rows(subspace.vectors.mT), goal, stop_below)
    return subspace


def _iterate(matrix: Tensor, start: Tensor, goal: _Goal, stop_below: float) -> Subspace:
    """Grow one basis until the goal is met, so little is left that another dtype is wanted, or it is full."""
    width = _block_width(goal.rank)
    most = max(_MOST_BLOCKS * width, 2 * goal.rank + _MOST_BLOCKS // 2 * width)
    basis = KrylovBasis(matrix, min(most, *matrix.shape))
    captured: list[float] = []
    block = start
    converged = False
    while block.shape[0] > 0 and not converged:
        image = basis.add(block)
        if basis.size >= min(goal.rank + width, basis.size + basis.room):
            captured.append(basis.captured(goal.rank))
            converged = goal.is_met(captured)
            if goal.left(captured[-1]) <= stop_below:
                break
        block = basis.next_block(image)[:width] if basis.room > 0 and not converged else block[:0]
    vectors, images = basis.best(goal.rank)
    exhausted = block.shape[0] == 0 and basis.room > 0
    return Subspace(vectors, images, basis.captured(goal.rank), converged or exhausted)


def _block_width(rank: int) -> int:
    """A multiple of 16, as matrix units like it."""
    return min(-(-rank // 16) * 16, _WIDEST_BLOCK)


def _random_start(matrix: Tensor, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # the same bits in each run
    random = torch.randn(min(_block_width(rank), *matrix.shape), matrix.shape[1], generator=generator)
    return orthonormal_rows(random.to(matrix))


def _sharpened(matrix: Float[Tensor, "m n"], rows: Float[Tensor, "k n"]) -> Float[Tensor, "j n"]:
    """A step of subspace iteration: rows·AᵀA, orthonormal."""
    # Uᵀ·A and not Aᵀ·U: twice as fast on a CPU, where A lies row by row.
    return orthonormal_rows(orthonormal_rows(orthonormal_rows(_images(matrix, rows).mT) @ matrix))


def _images(matrix: Float[Tensor, "m n"], rows: Float[Tensor, "k n"]) -> Float[Tensor, "m k"]:
    """A·rowsᵀ. In float32 on a CPU (rows·Aᵀ)ᵀ takes half the time if the number of rows is not a multiple of 16."""
    return (rows @ matrix.mT).mT


def _deflated(
    matrix: Float[Tensor, "m n"],
    strong: Float[Tensor, "k n"],
    images: Float[Tensor, "m k"],
    goal: _Goal,
    dtype: torch.dtype,
    random: Float[Tensor, "r n"],
) -> Subspace:
    """Subtract the part found from the matrix, search the rest on its own scale, and choose from both.

    Beside singular values a hundred times as large, the others would be rounding.

    Args:
        matrix: A, in float32.
        strong: What was found, orthonormal rows.
        images: A·strongᵀ.
        goal: Of the whole matrix.
        dtype: Of the search.
        random: Its start.
    """
    rest, energy = _without(matrix, images, strong, dtype)
    if energy <= goal.nothing:
        return Subspace(strong.mT, images, goal.total_energy - energy, converged=True)
    weak = _search(
        rest,
        lambda: rest if rest.dtype == matrix.dtype else torch.addmm(matrix, images, strong, alpha=-1.0),
        random,
        replace(goal, total_energy=energy),
        random,
    )
    del rest
    held = weak.vectors - strong.mT @ (strong @ weak.vectors)
    both, images = torch.cat([strong.mT, held], dim=1), torch.cat([images, _images(matrix, held.mT)], dim=1)
    white = whitening(gram_in_double(both))
    energies, turn = symmetric_eigen(white.mT @ gram_in_double(images) @ white)
    best = (white @ turn[:, : goal.rank]).to(both)
    return Subspace(both @ best, images @ best, float(energies[: goal.rank].sum()), weak.converged)


def _without(
    matrix: Float[Tensor, "m n"], images: Float[Tensor, "m k"], rows: Float[Tensor, "k n"], dtype: torch.dtype
) -> tuple[Float[Tensor, "m n"], float]:
    """A − images·rows in a dtype, with its energy; on a CPU in pieces that stay in its cache."""
    made = torch.empty_like(matrix, dtype=dtype)
    step = max(1, _CACHED_ELEMENTS // matrix.shape[1]) if matrix.device.type == "cpu" else matrix.shape[0]
    energies = []
    for start in range(0, matrix.shape[0], step):
        some = slice(start, start + step)
        piece = torch.addmm(matrix[some], images[some], rows, alpha=-1.0)
        energies.append(blocked_energy(piece.reshape(-1)))
        made[some] = piece
    return made, float(torch.stack(energies).sum())


class KrylovBasis:
    """Blocks of orthonormal vectors, their images under A, and the Gram matrices of both in float32.

    The blocks are rounded to A's dtype before A is applied, and these rounded blocks are the basis. So whatever is
    computed from the basis holds exactly for it, even where rounding has spoiled orthogonality. Vectors are kept as
    rows, which are contiguous in memory.

    Args:
        matrix: A, (m, n), in the dtype of the iterations.
        most: The largest number of vectors that will be added.
    """

    def __init__(self, matrix: Tensor, most: int) -> None:
        rows, columns = matrix.shape
        self._matrix = matrix
        wide = torch.promote_types(matrix.dtype, torch.float32)
        self._vectors = torch.empty(most, columns, dtype=wide, device=matrix.device)
        self._images = torch.empty(most, rows, dtype=wide, device=matrix.device)
        self._gram = torch.zeros(most, most, dtype=wide, device=matrix.device)
        self._image_gram = torch.zeros_like(self._gram)
        self.size = 0
        self._found: tuple[int, Tensor, Tensor] | None = None

    @property
    def room(self) -> int:
        """How many more vectors fit."""
        return self._vectors.shape[0] - self.size

    def add(self, block: Tensor) -> Tensor:
        """Add orthonormal rows (b, n), and return their images under A as rows (b, m)."""
        require_wanted()
        new = slice(self.size, self.size + block.shape[0])
        rounded = block.to(self._matrix.dtype)
        self._vectors[new] = rounded
        self._images[new] = (self._matrix @ rounded.mT).mT
        self.size = new.stop
        for gram, rows in ((self._gram, self._vectors), (self._image_gram, self._images)):
            products = rows[new] @ rows[: self.size].mT
            gram[new, : self.size] = products
            gram[: self.size, new] = products.mT
        return self._images[new]

    def next_block(self, images: Tensor) -> Tensor:
        """Aᵀ·images without the part in the basis, as orthonormal rows; fewer if little is new."""
        left = orthonormal_rows(images).to(self._matrix.dtype)
        grown = (left @ self._matrix).to(self._vectors.dtype)
        held = self._vectors[: self.size]
        block = orthonormal_rows(torch.addmm(grown, grown @ held.mT, held, alpha=-1.0))
        overlap = block @ held.mT
        if bool((overlap.abs() > _MAX_OVERLAP).any()):
            block = orthonormal_rows(torch.addmm(block, overlap, held, alpha=-1.0))
        return block[: self.room]

    def captured(self, rank: int) -> float:
        """Σ of the `rank` largest squared singular values of A restricted to the basis."""
        values, _ = self._ritz()
        return float(as_float64(values[:rank]).sum())

    def best(self, rank: int) -> tuple[Tensor, Tensor]:
        """The `rank` vectors (n, r) of the basis with the largest images, orthonormal, and the images (m, r)."""
        _, coefficients = self._ritz()
        chosen = coefficients[:, :rank].mT
        return (chosen @ self._vectors[: self.size]).mT, (chosen @ self._images[: self.size]).mT

    def _ritz(self) -> tuple[Tensor, Tensor]:
        """Maximise ‖A·Kx‖² / ‖Kx‖²: the values, falling, and coefficients x as columns; once for each size."""
        if self._found is None or self._found[0] != self.size:
            used = slice(0, self.size)
            white = whitening(self._gram[used, used])
            projected = white.mT @ self._image_gram[used, used] @ white
            values, turn = symmetric_eigen((projected + projected.mT) / 2)
            self._found = self.size, values.clamp_min(0.0), white @ turn
        return self._found[1:]


def fast_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 if the device multiplies it much faster than float32, otherwise None."""
    if device.type == "cuda":
        fast = multiplies_bfloat16(capability_of(torch.cuda.get_device_properties(device)))
    else:
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        fast = device.type == "cpu" and supported is not None and bool(supported())
    return torch.bfloat16 if fast else None


_ENERGY_ROUNDING_SHARE: Final = 2.0**-23
"""Share of ‖ΔW‖² by which the energy of float32 singular values can be off."""
_ROUNDED_ZERO_SHARE: Final = 1e-6
"""Singular values below this share of ‖ΔW‖ are zeros, rounded by float32 arithmetic."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The leading singular values of ΔW, σ₁ ≥ σ₂ ≥ … ≥ σₖ, and ‖ΔW‖² = Σ σᵢ² over all of them.

    Computing k values is much cheaper than computing all, and the total energy follows from the matrix itself. So the
    energy of the unknown values is known too: Σ_{i>k} σᵢ² = ‖ΔW‖² − Σ_{i≤k} σᵢ², and none of them exceeds σₖ.

    Attributes:
        values: (k,), falling; float64 on the CPU, and converted when given otherwise.
        total_energy: ‖ΔW‖² in Frobenius norm.
        weight_shape: Of the layer, (out, in) or (out, in, kh, kw).

    Raises:
        NonFiniteError: A value or the energy is NaN or Inf.
        ValueError: The values are not in descending order, are negative, or are more than the shape allows.
    """

    values: Float[Tensor, " k"]
    total_energy: float
    weight_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        values = as_float64(self.values).cpu()
        object.__setattr__(self, "values", values)
        if not (bool(torch.isfinite(values).all()) and math.isfinite(self.total_energy)):
            raise NonFiniteError("a singular value or the energy of a change is NaN or Inf.")
        if len(values) > self.largest_rank:
            raise ValueError(
                f"{len(values)} singular values, but {self.weight_shape} has {self.largest_rank}."
            )
        if bool((values < 0).any()) or bool((values.diff() > 0).any()):
            raise ValueError("singular values must be positive and in descending order.")

    @classmethod
    def of_factors(cls, values: Float[Tensor, " r"], weight_shape: Sequence[int]) -> "Spectrum":
        """The spectrum of a change that has no other singular values than these, such as one of LoRA factors.

        Args:
            values: (r,), falling: all that are not zero.
            weight_shape: Of the layer.
        """
        shape = tuple(weight_shape)
        wide = as_float64(values).cpu()
        energy = float(wide.square().sum())
        missing = min(max_rank(shape) - len(wide), 1)  # one zero says that the rest is zero
        return cls(torch.cat([wide, wide.new_zeros(max(missing, 0))]), energy, shape)

    @cached_property
    def known(self) -> int:
        """k, the number of singular values that are known."""
        return int(self.values.shape[0])

    @cached_property
    def nonzero(self) -> int:
        """How many of the known singular values are above zero."""
        return int((self.values > 0).sum())

    @cached_property
    def significant(self) -> int:
        """How many of the known singular values are above 10⁻⁶·‖ΔW‖; those below are rounded zeros."""
        return int((self.values > _ROUNDED_ZERO_SHARE * math.sqrt(max(self.total_energy, 0.0))).sum())

    @cached_property
    def largest_rank(self) -> int:
        """min(out, in·kh·kw), the number of all singular values."""
        return max_rank(self.weight_shape)

    @cached_property
    def complete(self) -> bool:
        """Whether every singular value is known, except zeros and rounded zeros."""
        return self.known >= self.largest_rank or self.total_energy <= 0.0 or self.significant < self.known

    @cached_property
    def known_energy(self) -> float:
        """Σ σᵢ² of the known singular values."""
        return float(self.values.square().sum())

    @cached_property
    def tail_energy(self) -> float:
        """Σ σᵢ² of the unknown singular values."""
        missing = max(self.total_energy - self.known_energy, 0.0)
        if self.known == 0:
            return missing
        return min(missing, (self.largest_rank - self.known) * float(self.values[-1]) ** 2)

    @property
    def energy_rounding(self) -> float:
        """How far `tail_energy` can be off where the known values come from float32."""
        return _ENERGY_ROUNDING_SHARE * self.total_energy

    @cached_property
    def next_value_bound(self) -> float:
        """An upper bound of σₖ₊₁: the smaller of σₖ and the root of the energy that is left."""
        if self.complete:
            return 0.0
        left = math.sqrt(self.tail_energy + self.energy_rounding)
        return min(float(self.values[-1]), left) if self.known else left

    def discarded_energies(self) -> Float[Tensor, " ranks"]:
        """‖ΔW − A_r‖² for r = 0 … k, where A_r keeps the r largest singular values (Eckart and Young, 1936)."""
        tail = torch.tensor([self.tail_energy], dtype=torch.float64)
        # Summed from the smallest value up, which loses nothing of small tails.
        return torch.cat([tail, self.values.square().flip(0)]).cumsum(0).flip(0)


def stable_rank(values: Float[Tensor, " k"]) -> float:
    """‖ΔW‖² / σ₁² (Rudelson and Vershynin, arXiv math/0503442), from 1 to the rank; 0 for a zero change.

    Small singular values hardly count, so that noise does not raise it.

    Args:
        values: (k,), falling, all that are not zero.
    """
    if len(values) == 0 or float(values[0]) <= 0.0:
        return 0.0
    return float((values / values[0]).square().sum())


def effective_rank(values: Float[Tensor, " k"]) -> float:
    """exp(−Σ pᵢ ln pᵢ) with pᵢ = σᵢ / Σσ (Roy and Vetterli, EUSIPCO 2007); 0 for a zero change.

    It is r for r equal singular values, and lies between 1 and the rank.

    Args:
        values: (k,), falling, all that are not zero.
    """
    positive = [value for value in values.tolist() if value > 0.0]  # few: quicker than a dozen tensors
    total = math.fsum(positive)
    if total == 0.0:
        return 0.0
    return math.exp(
        -math.fsum(value / total * math.log(value / total) for value in positive if value / total)
    )
