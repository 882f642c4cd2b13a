"""Percentiles of latencies as MLPerf Inference defines them."""

from collections.abc import Sequence


def percentile(values: Sequence[float], share: int | float) -> float:
    """sorted[int(n · share / 100)], the value that MLPerf's SDXL benchmark reports; the largest for 100.

    It is one of the values, never between two of them.

    Args:
        values: At least one, in any order.
        share: 0 to 100.

    Raises:
        ValueError: No values, or a share out of range.
    """
    if not values or not 0 <= share <= 100:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    return sorted(values)[min(int(len(values) * share / 100), len(values) - 1)]
