"""The steps of a live stage, one growing array a column."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from sigmascope.monitor import peaks
from sigmascope.monitor.gpu_timing import NOT_FINISHED, StepTimings
from sigmascope.monitor.peaks import UNKNOWN
from sigmascope.records.steps import Steps

_FIGURES_AT_ONCE: Final = 1024


class StepColumns:
    """Appended to by every step, about 0.15 µs each; a step that was read takes 32 bytes.

    Steps come in as rows, for which no lock is needed, and are laid into the columns some hundreds at a time.

    Args:
        timings: Takes the accelerator's part; None without an accelerator.
    """

    __slots__ = ("_allocated", "_ended_ns", "_late", "_rss", "_started_ns", "timings")

    def __init__(self, timings: StepTimings | None) -> None:
        self._started_ns = array("q")
        self._ended_ns = array("q")
        self._rss = array("q")
        self._allocated = array("q")
        self._late: list[int] = []  # row after row: tuples would be the garbage collector's work
        self.timings = timings

    def __len__(self) -> int:
        with peaks.LOCK:
            return len(self._started_ns) + len(self._late) // 4

    def append(self, started_ns: int, ended_ns: int, rss: int, allocated: int) -> None:
        """Add a step: the hot path. Bytes may be UNKNOWN."""
        late = self._late
        late += (started_ns, ended_ns, rss, allocated)
        if len(late) >= _FIGURES_AT_ONCE:
            self._settle()

    def edges(self) -> tuple[int, int] | None:
        """When the first step began and the last one ended; None without any."""
        with peaks.LOCK:
            self._settle()
            return (min(self._started_ns), max(self._ended_ns)) if self._started_ns else None

    def _settle(self) -> None:
        with peaks.LOCK:
            late = self._late
            rows = late[:]
            del late[: len(rows)]  # not those that other threads have added since
            self._started_ns.extend(rows[0::4])
            self._ended_ns.extend(rows[1::4])
            self._rss.extend(rows[2::4])
            self._allocated.extend(rows[3::4])

    def freeze(self, stage_started_ns: int, reasons: Mapping[str, str]) -> Steps:
        """Return the record, with `started` in seconds since the stage began.

        Args:
            stage_started_ns: When that was.
            reasons: For each column of `Steps` that may be missing altogether, why it is.
        """
        with peaks.LOCK:  # whole rows, each with its timing; the host's steps wait for no more than a copy
            self._settle()
            started_ns, ended_ns = self._started_ns[:], self._ended_ns[:]
            rss, allocated = self._rss[:], self._allocated[:]
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
