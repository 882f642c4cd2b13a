"""Factorisations of the small symmetric matrices that stand for tall ones: Gram matrices of a few hundred columns.

They run on the CPU: a GPU is slower at them than at the products that make them.
"""

import math
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_ROUNDING: Final = 8.0
"""Eigenvalues of a Gram matrix of k vectors below 8·√k·eps of the largest are rounding."""


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
