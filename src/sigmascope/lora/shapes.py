"""The matrix behind a weight: a convolution (out, in, kh, kw) acts as the matrix (out, in·kh·kw)."""

from collections.abc import Sequence
from math import prod

from sigmascope.errors import LoraFormatError

FULL_RANK = 9999
"""The rank that users give for "all of it" (SPEC section 7)."""


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
