"""Factorisations of the small symmetric matrices that stand for tall ones: Gram matrices of a few hundred columns.

They run on the CPU: a GPU is slower at them than at the products that make them.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_DEPENDENT: Final = 1e-7
"""Eigenvalues of a float32 Gram matrix below this share of the largest are rounding."""


def symmetric_eigen(gram: Float[Tensor, "k k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Eigenvalues, falling, and their vectors as columns, where the matrix lies."""
    values, vectors = torch.linalg.eigh(gram.cpu())
    return values.flip(0).to(gram.device), vectors.flip(1).to(gram.device)


def orthonormal(columns: Float[Tensor, "n k"]) -> Float[Tensor, "n j"]:
    """An orthonormal basis of the columns' span, without those that depend on the others.

    By the Gram matrix, which is several times as fast as Householder QR for tall matrices and good for a
    condition number up to 3·10³; columns beyond that are dropped. The first basis vectors lie along the
    largest directions.
    """
    values, vectors = symmetric_eigen(columns.mT @ columns)
    kept = values > _DEPENDENT * values[0]
    basis: Tensor = columns @ (vectors[:, kept] * values[kept].rsqrt())
    return basis


def whitening(gram: Float[Tensor, "k k"]) -> Float[Tensor, "k j"]:
    """T with Tᵀ·gram·T = 1, leaving out what is linearly dependent."""
    factor, failed = torch.linalg.cholesky_ex(gram.cpu())
    if int(failed) == 0 and bool(factor.diagonal().min() > _DEPENDENT**0.5 * factor.diagonal().max()):
        identity = torch.eye(gram.shape[0], dtype=gram.dtype)
        inverse: Tensor = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        return inverse.to(gram.device)
    values, vectors = symmetric_eigen(gram)
    kept = values > _DEPENDENT * values[0]
    return vectors[:, kept] * values[kept].rsqrt()
