"""The steps of a live stage, one growing array a column."""

from array import array
from collections.abc import Mapping, Sequence

from sigmascope.monitor import peaks
from sigmascope.monitor.gpu_timing import NOT_FINISHED, StepTimings
from sigmascope.monitor.peaks import UNKNOWN
from sigmascope.records.steps import Steps


class StepColumns:
    """Appended to by every step: 32 bytes and about 0.2 µs each.

    Args:
        timings: Takes the accelerator's part; None without an accelerator.
    """

    __slots__ = ("allocated", "ended_ns", "rss", "started_ns", "timings")

    def __init__(self, timings: StepTimings | None) -> None:
        self.started_ns = array("q")
        self.ended_ns = array("q")
        self.rss = array("q")
        self.allocated = array("q")
        self.timings = timings

    def __len__(self) -> int:
        return len(self.started_ns)

    def append(self, started_ns: int, ended_ns: int, rss: int, allocated: int) -> None:
        """Add a step. Bytes may be UNKNOWN."""
        self.started_ns.append(started_ns)
        self.ended_ns.append(ended_ns)
        self.rss.append(rss)
        self.allocated.append(allocated)

    def freeze(self, stage_started_ns: int, reasons: Mapping[str, str]) -> Steps:
        """Return the record, with `started` in seconds since the stage began.

        Args:
            stage_started_ns: When that was.
            reasons: For each column of `Steps` that may be missing altogether, why it is.
        """
        with peaks.LOCK:  # a whole row or none of it; the host's steps wait for no more than a copy
            started_ns, ended_ns = self.started_ns[:], self.ended_ns[:]
            rss, allocated = self.rss[:], self.allocated[:]
            gpu_seconds, unfinished = _gpu_seconds(self.timings)
        bytes_columns = {"rss_bytes": _known(rss), "allocated_bytes": _known(allocated)}
        unavailable = {"gpu_seconds": f"{unfinished} steps: {NOT_FINISHED}"} if unfinished else {}
        for name, column in {"gpu_seconds": gpu_seconds, **bytes_columns}.items():
            if not column and started_ns:
                unavailable.setdefault(name, reasons.get(name, "every reading failed"))
        return Steps(
            started=tuple((start - stage_started_ns) / 1e9 for start in started_ns),
            seconds=tuple((end - start) / 1e9 for start, end in zip(started_ns, ended_ns, strict=True)),
            gpu_seconds=gpu_seconds,
            unavailable=unavailable,
            **bytes_columns,
        )


def _gpu_seconds(timings: StepTimings | None) -> tuple[tuple[float | None, ...], int]:
    """The column (empty when nothing is known) and how many steps are not finished."""
    if timings is None:
        return (), 0
    seconds = tuple(timings.seconds)
    return (seconds if any(value is not None for value in seconds) else ()), timings.unfinished


def _known(column: Sequence[int]) -> tuple[int | None, ...]:
    """The column with None for what is not known; empty when nothing is."""
    if all(value == UNKNOWN for value in column):
        return ()
    return tuple(None if value == UNKNOWN else value for value in column)
