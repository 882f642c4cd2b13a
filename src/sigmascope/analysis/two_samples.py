"""Two samples: the test whether one is higher, and the interval of the ratio of their medians.

The test is that of Mann and Whitney (Annals of Mathematical Statistics 18, 1947), one-sided. The interval is the
percentile bootstrap's (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, ch. 13). Both give SciPy's
values, without SciPy.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_FOR_EXACT: Final = 8
"""Where both samples have more values, the normal distribution is close enough."""
_RESAMPLES: Final = 4_999


def p_of_higher(new: Sequence[float], baseline: Sequence[float]) -> float:
    """The p of Mann and Whitney's test that the new values are not higher; exact for small samples without ties."""
    occurrences = Counter([*new, *baseline])
    if len(occurrences) == 1:
        return 1.0
    others = sorted(baseline)
    # Pairs whose new value is the higher one; a tie is half a pair.
    twice_u = sum(bisect_left(others, value) + bisect_right(others, value) for value in new)
    fewer, more = sorted((len(new), len(baseline)))
    values = fewer + more
    if fewer <= _MOST_FOR_EXACT and len(occurrences) == values:
        return _share_up_to(fewer * more - twice_u // 2, fewer, more)
    ties = sum(count**3 - count for count in occurrences.values())
    deviation = math.sqrt(fewer * more / 12 * (values + 1 - ties / (values * (values - 1))))
    # Half a pair less: U takes whole numbers, and the normal distribution all between them.
    return math.erfc((twice_u / 2 - fewer * more / 2 - 0.5) / deviation / math.sqrt(2)) / 2


def _share_up_to(most: int, fewer: int, more: int) -> float:
    """The share of all orders of two samples in which U is at most so high.

    Orders by U are the coefficients of the Gaussian binomial, the product of (1 - q^(more + i)) / (1 - q^i).
    """
    orders = [1] + [0] * most
    for i in range(1, fewer + 1):
        for u in range(most, more + i - 1, -1):
            orders[u] -= orders[u - more - i]
        for first in range(min(i, most + 1)):
            orders[first::i] = accumulate(orders[first::i])
    return sum(orders) / math.comb(fewer + more, fewer)


def ratio_interval(
    new: Sequence[float], baseline: Sequence[float], *, confidence: float, seed: int
) -> tuple[float, float]:
    """Bounds of the ratio of medians, new by baseline: the percentile bootstrap's."""
    import numpy as np

    rng = np.random.default_rng(seed)
    ratios = _resampled_medians(new, rng) / _resampled_medians(baseline, rng)
    outside = 50 * (1 - confidence)
    lower, upper = np.percentile(ratios, (outside, 100 - outside))
    return float(lower), float(upper)


def _resampled_medians(values: Sequence[float], rng: "np.random.Generator") -> "NDArray[np.float64]":
    import numpy as np

    drawn = rng.integers(0, len(values), (_RESAMPLES, len(values)))
    return np.asarray(np.median(np.asarray(values, dtype=np.float64)[drawn], axis=1))
