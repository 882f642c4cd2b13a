"""Norms in float64, factorisations of Gram matrices, and the matrix behind a convolution's weight.

Norms are summed in float64: a float32 sum over 13 million squares is 0.1 % low, which flatters errors.

Gram matrices of a few hundred columns stand for tall matrices. Their eigenvectors and Cholesky factors are computed
on the CPU: a GPU is slower at them than at the products that make them.

A convolution (out, in, kh, kw) acts as the matrix (out, in·kh·kw).
"""

import math
from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import LoraFormatError

_CHUNK: Final = 1 << 20  # elements widened at a time: 8 MiB, whatever the layer's size
_IN_CACHE: Final = 1 << 18  # elements that `quick_norm` sums at a time
_UP_TO_FLOAT32: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_RUN: Final = 256  # elements that `quick_energy` sums in float32
_LEAST_MEAN_SQUARE: Final = 1e-30  # below, single squares leave the range of float32

_PACKED: Final = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers an element: PyTorch cannot widen them

FULL_RANK = 9999
"""The rank that users give for "all of it"."""

_ROUNDING: Final = 8.0
"""Eigenvalues of a Gram matrix of k vectors below 8·√k·eps of the largest are rounding."""


def frobenius_norm(tensor: Float[Tensor, "..."]) -> float:
    """‖tensor‖ with the squares summed in float64, without a float64 copy of the whole.

    Returns:
        The norm; NaN or Inf when the tensor holds any.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        wide = flat[start : start + _CHUNK].to(torch.float64)
        total += torch.dot(wide, wide)
    return math.sqrt(total.item())


def quick_norm(tensor: Float[Tensor, "..."]) -> float:
    """‖tensor‖ in one pass in the cache, of at most float32, by `quick_energy`; others as `frobenius_norm`.

    Returns:
        The norm, off by less than 10⁻⁷ of it; NaN or Inf when the tensor holds any.
    """
    if tensor.dtype not in _UP_TO_FLOAT32:
        return frobenius_norm(tensor)
    flat = tensor.detach().reshape(-1)
    energies = [
        quick_energy(flat[start : start + _IN_CACHE].to(torch.float32))
        for start in range(0, flat.numel(), _IN_CACHE)
    ]
    return math.sqrt(float(torch.stack(energies).sum())) if energies else 0.0


def quick_energy(tensor: Float[Tensor, " n"]) -> Tensor:
    """‖tensor‖² of float32 values in one pass: float32 within runs of 256, float64 across them.

    Runs that short are off by about 10⁻⁸ of the sum, and by no more than 10⁻⁶ whatever the values, where one
    float32 sum over millions is off by 10⁻³. Values whose squares leave float32's range are summed in float64.

    Args:
        tensor: Contiguous, any length.

    Returns:
        A float64 scalar; NaN or Inf when the tensor holds any.
    """
    whole = tensor.numel() - tensor.numel() % _RUN
    runs = torch.linalg.vector_norm(tensor[:whole].view(-1, _RUN), dim=1)
    rest = tensor[whole:].to(torch.float64)
    total: Tensor = runs.to(torch.float64).square().sum() + torch.dot(rest, rest)
    if _LEAST_MEAN_SQUARE * tensor.numel() <= float(total) < math.inf:
        return total
    return torch.full_like(total, frobenius_norm(tensor) ** 2)


def root_sum_square(norms: list[float]) -> float:
    """The norm of several blocks together from the norm of each: √Σ nᵢ²."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def at_least_float32(*dtypes: torch.dtype) -> torch.dtype:
    """float64 when it is among them, else float32. Unlike torch.promote_types it takes float8 too."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def is_real(dtype: torch.dtype) -> bool:
    """Whether PyTorch can turn tensors of this dtype into float32: floating point, but not packed float4."""
    return dtype.is_floating_point and dtype != _PACKED


def in_double(tensor: Tensor) -> Tensor:
    """A detached float64 copy; from Apple's GPUs, which have no float64, on the CPU."""
    source = tensor.detach()
    return (source.cpu() if source.device.type == "mps" else source).to(torch.float64)


def gram_in_double(columns: Tensor) -> Tensor:
    """XᵀX in float64: in float32, whatever is below 10⁻³·⁵ of the largest column would be lost in it."""
    wide = in_double(columns)
    return wide.mT @ wide


def symmetric_eigen(gram: Float[Tensor, "k k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Eigenvalues, falling, and their vectors as columns, where the matrix lies."""
    values, vectors = torch.linalg.eigh(gram.cpu())
    return values.flip(0).to(gram.device), vectors.flip(1).to(gram.device)


def orthonormal_rows(rows: Float[Tensor, "k n"]) -> Float[Tensor, "j n"]:
    """An orthonormal basis of the rows' span, without those that depend on the others.

    By the Gram matrix, which is several times as fast as Householder QR for long rows and good for a condition
    number of some hundreds; rows beyond that are dropped. The first basis vectors lie along the largest directions.
    """
    gram = rows @ rows.mT
    values, vectors = symmetric_eigen(gram)
    kept = values > _rounding(gram) * values[:1]  # of no rows there is no largest
    basis: Tensor = (vectors[:, kept] * values[kept].rsqrt()).mT @ rows
    return basis


def orthonormal(columns: Float[Tensor, "n k"]) -> Float[Tensor, "n j"]:
    """As `orthonormal_rows`, of columns."""
    return orthonormal_rows(columns.mT).mT


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
    return _ROUNDING * math.sqrt(gram.shape[0]) * torch.finfo(gram.dtype).eps


def matrix_shape(weight_shape: Sequence[int]) -> tuple[int, int]:
    """Give (out, in·kh·kw) for the shape of a Linear or convolution weight.

    Raises:
        LoraFormatError: The shape has fewer than two axes (a bias, a norm) or an empty axis.
    """
    if len(weight_shape) < 2 or min(weight_shape) < 1:
        raise LoraFormatError(
            f"a weight of shape {tuple(weight_shape)} is no matrix, so it has no low-rank factors.",
            hint="Use weights of Linear (out, in) or convolution (out, in, kh, kw) layers.",
        )
    return weight_shape[0], prod(weight_shape[1:])


def max_rank(weight_shape: Sequence[int]) -> int:
    """Give the largest rank that a change of this weight can have: min(out, in·kh·kw)."""
    return min(matrix_shape(weight_shape))


def is_convolution(weight_shape: Sequence[int]) -> bool:
    """Tell a convolution from a Linear by its axes: a 1×1 convolution (out, in, 1, 1) is a convolution."""
    return len(weight_shape) > 2


def same_matrix(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether changes of weights of these shapes are one matrix.

    A 1×1 convolution and a Linear layer are. So are a convolution (out, in, kh, kw) and factors whose kernel does
    not show (out, in·kh·kw), as those of LoHa and LoKr without a core.
    """
    if _without_pointwise_kernel(one) == _without_pointwise_kernel(other):
        return True
    return 2 in {len(one), len(other)} and one[0] == other[0] and prod(one) == prod(other)


def _without_pointwise_kernel(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[:2]) if prod(shape[2:]) == 1 else tuple(shape)
