"""How far two tensors may lie apart because numbers are rounded, by their dtypes.

u is the unit roundoff of a dtype, eps / 2. With the larger errors of the two dtypes in mind:

* **Stored.** A value kept in a dtype lies within u·|value| of the true one, below the normal range within half the
  smallest subnormal (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 2.2). Two copies of one
  value therefore differ by at most u_a·|a| + u_b·|b|.
* **Computed.** Independent rounding errors add up like √n and not like n (Higham and Mary 2019, SIAM J. Sci. Comput.
  41(5)). Text encoders of 12 and 24 layers (CLIP and T5, random weights) computed in a dtype lie from the same in float64
  by a relative L2 error of 2.8 to 5.9 u in bfloat16 and float16, which sum in float32, and 9 to 18 u in float32, whose
  sums round too. `docs/compare-tensors.md` has the table. Allowed are 8 u and 32 u. Errors of two computations add as
  squares.
* Rounding leaves the scale alone (measured: 0.1 u in the 16-bit types, 0.2 u in float32, for a token 0.3 u and 2.4 u) and
  spreads over all tokens (measured: the worst token 1.6 times the whole). A sixteenth of the computed error is allowed
  as scale, 4 times the whole for a token.
"""

from dataclasses import dataclass

import torch

from sigmascope.errors import ConfigError

_HALF_FACTOR = 8.0
_SINGLE_FACTOR = 32.0
_EIGHT_BIT_FACTOR = 1.0  # nothing sums in 8 bits: these are stored only
_SCALE_SHARE = 16.0
TOKEN_FACTOR = 4.0
"""How much more than the whole one token may err when rounding is the cause."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is allowed between two tensors of given dtypes.

    Attributes:
        narrower: The dtype that rounds more, as `bfloat16`.
        roundoff_a: u of the first tensor's dtype; 0 for integers.
        roundoff_b: u of the second's.
        smallest: Half the smallest subnormal number of the narrower dtype.
        computed: Relative L2 error that computing in these dtypes explains.
        close: Relative L2 error up to which they are close: what the next narrower precision inside would explain.
        scale: Deviation from 1 of the factor between the two that computing explains.
        close_scale: The same for `close`.
        rtol: The user's element tolerance, relative to the larger of |a| and |b|; None for the default.
        atol: The user's absolute element tolerance; None for the default.
    """

    narrower: str
    roundoff_a: float
    roundoff_b: float
    smallest: float
    computed: float
    close: float
    scale: float
    close_scale: float
    rtol: float | None = None
    atol: float | None = None

    @property
    def by_user(self) -> bool:
        """Whether the user said what an element may differ by."""
        return self.rtol is not None or self.atol is not None

    def element(self, root_mean_square: float) -> tuple[float, float]:
        """Relative and absolute tolerance of one element in a tensor of that root mean square.

        The default is the computed error, of the element and of the tensor's root mean square: an element near zero
        carries the rounding of the larger ones that it was computed from.
        """
        if self.by_user:
            return self.rtol or 0.0, self.atol or 0.0
        return self.computed, self.computed * root_mean_square


def tolerance_for(
    a: torch.dtype, b: torch.dtype, *, rtol: float | None = None, atol: float | None = None
) -> Tolerance:
    """The tolerance between two dtypes.

    Args:
        a: The dtype of one tensor.
        b: That of the other.
        rtol: The user's relative tolerance of an element.
        atol: The user's absolute tolerance of an element. If one of the two is given, the other is 0.

    Raises:
        ConfigError: A tolerance is negative or not a number.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ConfigError(f"{name}={value} allows nothing.", hint="Give 0 or a positive number.")
    roundoffs = (unit_roundoff(a), unit_roundoff(b))
    narrower = a if roundoffs[0] >= roundoffs[1] else b
    computed = (_computed(a) ** 2 + _computed(b) ** 2) ** 0.5
    close = _close(narrower, computed)
    return Tolerance(
        narrower=str(narrower).removeprefix("torch."),
        roundoff_a=roundoffs[0],
        roundoff_b=roundoffs[1],
        smallest=_half_smallest(narrower),
        computed=computed,
        close=close,
        scale=computed / _SCALE_SHARE,
        close_scale=close / _SCALE_SHARE,
        rtol=rtol,
        atol=atol,
    )


def unit_roundoff(dtype: torch.dtype) -> float:
    """U = eps / 2 of a floating-point dtype (of the parts of a complex one), 0 for integers and bool."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    try:
        return torch.finfo(dtype).eps / 2
    except NotImplementedError:  # float4, which is compared by its codes
        return 0.0


def _computed(dtype: torch.dtype) -> float:
    roundoff = unit_roundoff(dtype)
    if dtype.itemsize == 1:
        return _EIGHT_BIT_FACTOR * roundoff
    return (_HALF_FACTOR if dtype.itemsize == 2 else _SINGLE_FACTOR) * roundoff


def _close(narrower: torch.dtype, computed: float) -> float:
    """float32 pipelines have TF32 or float16 inside, float64 ones float32; below that there is nothing to step down to."""
    if unit_roundoff(narrower) == 0.0:
        return 0.0
    if narrower in (torch.float64, torch.complex128):
        return _computed(torch.float32)
    if narrower in (torch.float32, torch.complex64):
        return _computed(torch.float16)
    return 2.0 * computed


def _half_smallest(dtype: torch.dtype) -> float:
    if unit_roundoff(dtype) == 0.0:
        return 0.0
    limits = torch.finfo(dtype)
    return float(limits.smallest_normal) * float(limits.eps) / 2
