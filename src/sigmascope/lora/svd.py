"""Truncated singular value decompositions: matrix and rank in, factors and kept energy out.

By Eckart and Young (1936), of all matrices of rank r the one nearest to A in Frobenius norm is
A_r = Σ_{i≤r} σᵢ uᵢ vᵢᵀ, and its error is ‖A − A_r‖² = Σ_{i>r} σᵢ²: the energy that is discarded.

No files and no choice of device here: the work is done where the matrix lies.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError, NonFiniteError, SigmascopeError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.shapes import matrix_shape

_NotConverged: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined] # not in its __all__


@dataclass(frozen=True, eq=False)
class TruncatedSvd:
    """A ≈ up · down, with the singular values and what was kept of ‖A‖².

    The square root of each singular value goes to either side. Rounding to bfloat16 or float16 is relative,
    so it costs the same however the values are split, until float16 runs out of exponent: below 6·10⁻⁵ it
    loses bits. Real differences of fine-tunes have σ far below 1, and √σ in both factors keeps their
    smallest values farthest from that edge.

    Attributes:
        up: (m, r), U·√Σ.
        singular_values: (r,), falling.
        down: (r, n), √Σ·Vᵀ.
        total_energy: ‖A‖², summed in float64.
        kept_energy: Σ_{i≤r} σᵢ².
    """

    up: Float[Tensor, "m r"]
    singular_values: Float[Tensor, " r"]
    down: Float[Tensor, "r n"]
    total_energy: float
    kept_energy: float

    @property
    def rank(self) -> int:
        """The number of singular values kept."""
        return self.up.shape[1]

    @property
    def discarded_energy(self) -> float:
        """‖A − up·down‖², never below 0."""
        return max(self.total_energy - self.kept_energy, 0.0)

    @property
    def relative_error(self) -> float:
        """‖A − up·down‖ / ‖A‖, as a fraction; 0 for a zero matrix."""
        return math.sqrt(self.discarded_energy / self.total_energy) if self.total_energy > 0.0 else 0.0

    def factors(self, weight_shape: tuple[int, ...], dtype: torch.dtype | None = None) -> LoraFactors:
        """Give the pair as LoRA factors with alpha = rank.

        Args:
            weight_shape: (out, in) or (out, in, kh, kw), whose matrix was decomposed.
            dtype: Storage dtype; that of the decomposition when left out.

        Raises:
            LoraFormatError: The factors do not fit `weight_shape`.
        """
        pair = LoraFactors(self.up, self.down, float(self.rank), weight_shape)
        return pair if dtype is None else pair.to(dtype=dtype)


def truncated_svd(matrix: Float[Tensor, "m n"], rank: int) -> TruncatedSvd:
    """Decompose exactly (LAPACK or cuSOLVER, all singular values) and keep the largest `rank`.

    Works in float64 for a float64 matrix, else in float32. A Gram matrix of the smaller side would be
    faster but squares the condition number, which loses the singular values below 3·10⁻⁴ of the largest.

    Args:
        matrix: Finite, on any device.
        rank: At least 1; above min(m, n) it is taken as min(m, n).

    Raises:
        ConfigError: `rank` is below 1.
        NonFiniteError: The matrix holds NaN or Inf.
    """
    if rank < 1:
        raise ConfigError(f"a rank of {rank} keeps nothing.", hint="Give a rank of 1 or more.")
    work = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    _require_finite(work)
    u, sigma, vh = _full_svd(work)
    kept = min(rank, sigma.shape[0])
    root = sigma[:kept].sqrt()
    energies = sigma.double().square()
    kept_energy = float(energies[:kept].sum())
    return TruncatedSvd(
        up=u[:, :kept] * root,
        singular_values=sigma[:kept].clone(),
        down=root[:, None] * vh[:kept],
        total_energy=kept_energy + float(energies[kept:].sum()),
        kept_energy=kept_energy,
    )


def factors_full_rank(delta: Tensor) -> LoraFactors:
    """Write ΔW as factors without loss and without an SVD: ΔW·c times identity/c on the smaller side.

    c is a power of two, so that no bit is lost in any binary format. It brings the largest value near its own
    square root, which keeps a ΔW of 10⁻⁵ out of the range where float16 loses bits.

    Args:
        delta: The change of a weight, (out, in) or (out, in, kh, kw), floating point.

    Returns:
        Factors of rank min(out, in·kh·kw) with alpha = rank, in delta's dtype.

    Raises:
        LoraFormatError: `delta` is no matrix or convolution.
        NonFiniteError: `delta` holds NaN or Inf.
    """
    _require_finite(delta)
    shape = tuple(delta.shape)
    out_features, in_features = matrix_shape(shape)
    matrix = delta.detach().reshape(out_features, in_features)
    gain = _balancing_power(float(matrix.abs().max()))
    size = min(out_features, in_features)
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device) / gain
    up, down = (matrix * gain, identity) if in_features <= out_features else (identity, matrix * gain)
    return LoraFactors(up, down, float(size), shape)


def _balancing_power(largest: float) -> float:
    """The power of two nearest to 1/√largest, between 1 and 2¹⁰."""
    if largest <= 0.0:
        return 1.0
    return float(2.0 ** min(max(round(-math.log2(largest) / 2), 0), 10))


def _require_finite(matrix: Tensor) -> None:
    if not bool(torch.isfinite(matrix).all()):
        bad = int((~torch.isfinite(matrix)).sum())
        raise NonFiniteError(
            f"{bad} of {matrix.numel()} values of the matrix are NaN or Inf.",
            hint="Check the two checkpoints; a diverged training leaves such weights.",
        )


def _full_svd(work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All of U, Σ, Vᵀ; where the quick driver does not converge, the robust one does it."""
    try:
        u, sigma, vh = torch.linalg.svd(work, full_matrices=False)
    except _NotConverged:
        u, sigma, vh = _robust_svd(work)
    return u, sigma, vh


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
