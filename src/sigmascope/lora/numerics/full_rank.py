"""A weight change as factors without loss and without an SVD."""

import math

import torch
from torch import Tensor

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.numerics.subspace import require_finite
from sigmascope.lora.shapes import matrix_shape


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
    require_finite(delta)
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
