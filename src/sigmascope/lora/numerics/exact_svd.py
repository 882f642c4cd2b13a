"""The exact leading singular subspace, for matrices that are small or of which much is wanted."""

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import SigmascopeError
from sigmascope.lora.precision import in_double

_NotConverged: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined] # not in its __all__

LAPACK_UP_TO = 256
"""min(m, n) up to which LAPACK's SVD takes no longer than a Gram matrix and its eigenvectors."""


def full_svd(work: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor, Tensor]:
    """All of U, Σ, Vᵀ; where the quick driver does not converge, the robust one does it.

    Raises:
        SigmascopeError: Neither converges.
    """
    try:
        u, sigma, vh = torch.linalg.svd(work, full_matrices=False)
    except _NotConverged:
        u, sigma, vh = _robust_svd(work)
    return u, sigma, vh


def exact_right_subspace(matrix: Float[Tensor, "m n"], rank: int) -> Float[Tensor, "n r"]:
    """The `rank` leading right singular vectors, orthonormal columns in the matrix's dtype.

    A large float32 matrix goes through the Gram matrix of its smaller side in float64: squaring the condition
    number there costs the singular values below 10⁻⁸ of the largest, which float32 does not hold either.

    Raises:
        SigmascopeError: The decomposition does not converge.
    """
    if matrix.dtype == torch.float64 or min(matrix.shape) <= LAPACK_UP_TO:
        _, _, vh = full_svd(matrix)
        exact: Tensor = vh[:rank].mT
        return exact
    wide = in_double(matrix)
    rows, columns = wide.shape
    if rows < columns:
        _, vectors = torch.linalg.eigh(wide @ wide.mT)
        right, _ = torch.linalg.qr(wide.mT @ vectors[:, -rank:].flip(1))
    else:
        _, vectors = torch.linalg.eigh(wide.mT @ wide)
        right = vectors[:, -rank:].flip(1)
    narrowed: Tensor = right.to(matrix)
    return narrowed


def _robust_svd(work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """QR iteration on CUDA, float64 on the CPU: slower, and converging where divide and conquer does not."""
    try:
        if work.is_cuda:
            u, sigma, vh = torch.linalg.svd(work, full_matrices=False, driver="gesvd")
        else:
            u, sigma, vh = torch.linalg.svd(work.cpu().double(), full_matrices=False)
    except _NotConverged as error:
        raise SigmascopeError(
            f"the SVD of a {work.shape[0]}×{work.shape[1]} matrix did not converge: {error}",
            hint="Run the extraction on another device, or at rank 9999, which needs no SVD.",
        ) from error
    return u.to(work), sigma.to(work), vh.to(work)
