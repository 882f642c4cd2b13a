"""Arithmetic on figures that may be unknown: what is computed from an unknown is unknown."""

MIB = 1024 * 1024


def mib(nbytes: int | None) -> float | None:
    """Bytes in MiB (1024² bytes), which the structures of SPEC section 2 call MB."""
    return None if nbytes is None else nbytes / MIB


def change(before: int | None, after: int | None) -> int | None:
    """The difference after - before."""
    return None if before is None or after is None else after - before


def percent_change(before: int | None, after: int | None) -> float | None:
    """100 · (after - before) / before; None also when `before` is 0, since no percentage says that."""
    difference = change(before, after)
    return None if difference is None or not before else 100.0 * difference / before


def share_given_back(baseline: int | None, peak: int | None, current: int | None) -> float | None:
    """(peak - current) / (peak - baseline), limited to 0 to 1: cleanup effectiveness.

    1 means that everything taken on the way to the peak was given back, 0 that nothing was.
    None if a figure is unknown or nothing was taken.
    """
    if baseline is None or peak is None or current is None or peak <= baseline:
        return None
    return min(1.0, max(0.0, (peak - current) / (peak - baseline)))
