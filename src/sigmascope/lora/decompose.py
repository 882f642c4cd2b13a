"""One layer's change as factors in storage precision, with the error of what is really stored."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.shapes import matrix_shape, max_rank
from sigmascope.lora.svd import factors_full_rank, truncated_svd


@dataclass(frozen=True, slots=True)
class StoredChange:
    """Factors as they go into the file, on the device where they were made.

    Attributes:
        factors: In storage dtype, alpha = rank.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1, before rounding.
        error_norm: ‖ΔW − up·down‖ of the rounded factors.
    """

    factors: LoraFactors
    kept_energy: float
    error_norm: float


def decompose(delta: Float[Tensor, "*shape"], rank: int, dtype: torch.dtype) -> StoredChange:
    """Factorise ΔW at a rank and round the factors to their storage dtype.

    At full rank there is nothing to choose, so ΔW itself is stored beside a scaled identity: exact up to the
    storage dtype, and without the rounding that the singular vectors on either side would add.

    Args:
        delta: Change of a weight, (out, in) or (out, in, kh, kw), float32 or float64, finite.
        rank: How many singular values to keep; the layer's own limit when it is larger.
        dtype: Storage dtype.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
    """
    shape = tuple(delta.shape)
    if rank >= max_rank(shape):
        factors, kept = factors_full_rank(delta).to(dtype=dtype), 1.0
    else:
        svd = truncated_svd(delta.reshape(matrix_shape(shape)), rank)
        factors = svd.factors(shape, dtype)
        kept = svd.kept_energy / svd.total_energy if svd.total_energy > 0 else 0.0
    if not bool(torch.isfinite(factors.up).all() and torch.isfinite(factors.down).all()):
        raise NonFiniteError(
            f"the factors of a change of size {float(delta.abs().max()):.3g} do not fit {dtype}.",
            hint="Use --save_precision float or bf16.",
        )
    return StoredChange(factors, kept, reconstruction_error(delta, factors))


def reconstruction_error(delta: Float[Tensor, "*shape"], factors: LoraFactors) -> float:
    """‖ΔW − scale·up·down‖ of factors as stored, in float64 where rounding of the product could show.

    Args:
        delta: The true change, of the factors' weight shape and on their device.
        factors: In any dtype.
    """
    # A float32 product is off by about 1e-7 of its size: nothing beside bfloat16, all there is at float32.
    dtypes = (delta.dtype, factors.up.dtype, factors.down.dtype)
    precise = torch.float64 in dtypes or torch.float32 in dtypes[1:]
    compute = torch.float64 if precise else torch.float32
    return frobenius_norm(delta.to(compute) - factors.delta(compute))
