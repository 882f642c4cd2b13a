"""The steps of a live stage, row after row."""

from array import array
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final

from sigmascope.monitor import peaks
from sigmascope.monitor.gpu_timing import NOT_FINISHED, NOT_MARKED, StepTimings
from sigmascope.monitor.peaks import UNKNOWN
from sigmascope.records.steps import Steps

_ROW: Final = Struct("4q")
"""When a step began and ended, and the bytes at its end."""

row: Final = _ROW.pack
"""Packs a step for `StepColumns.add`: when it began and ended, in nanoseconds; what this process had resident and what
was allocated on the device at its end, in bytes, or UNKNOWN."""


class StepColumns:
    """Appended to by every step: 32 bytes and about 0.15 µs each.

    A row goes in whole, in one call that no other thread, handler of a signal or Ctrl-C can come between. It needs no
    lock.

    Attributes:
        add: Appends a `row`: the hot path.

    Args:
        timings: Takes the accelerator's part; None without an accelerator.
    """

    __slots__ = ("_rows", "add", "timings")

    def __init__(self, timings: StepTimings | None) -> None:
        self._rows = bytearray()
        self.add = self._rows.extend
        self.timings = timings

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def edges(self) -> tuple[int, int] | None:
        """When the first step began and the last one ended; None without any."""
        figures = self._figures()
        return (min(figures[0::4]), max(figures[1::4])) if figures else None

    def _figures(self) -> Sequence[int]:
        """Row after row, as they are now."""
        return array("q", bytes(self._rows))

    def freeze(self, stage_started_ns: int, reasons: Mapping[str, str]) -> Steps:
        """Return the record, with `started` in seconds since the stage began.

        Args:
            stage_started_ns: When that was.
            reasons: For each column of `Steps` that may be missing altogether, why it is.
        """
        with peaks.LOCK:  # each row with its timing; the host's steps wait for no more than a copy
            figures = self._figures()
            gpu_seconds, unfinished = _gpu_seconds(self.timings, len(figures) // 4)
        started_ns, ended_ns, rss, allocated = (figures[column::4] for column in range(4))
        bytes_columns = {"rss_bytes": _known(rss), "allocated_bytes": _known(allocated)}
        why = _why_not(gpu_seconds, unfinished)
        unavailable = {"gpu_seconds": why} if why else {}
        if gpu_seconds and None in gpu_seconds and "gpu_seconds" in reasons:
            unavailable["gpu_seconds"] = reasons["gpu_seconds"]
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


def _gpu_seconds(timings: StepTimings | None, steps: int) -> tuple[tuple[float | None, ...], int]:
    """The column (empty when nothing is known) and how many steps are not finished."""
    if timings is None:
        return (), 0
    seconds = timings.of_first(steps)
    return (seconds if any(value is not None for value in seconds) else ()), timings.unfinished


def _why_not(gpu_seconds: tuple[float | None, ...], unfinished: int) -> str:
    """Why steps are without a time on the accelerator, where some have one or may still get it; else nothing."""
    unmarked = max(0, gpu_seconds.count(None) - unfinished)
    reasons = ((unfinished, NOT_FINISHED), (unmarked, NOT_MARKED))
    return "; ".join(f"{count} steps: {reason}" for count, reason in reasons if count)


def _known(column: Sequence[int]) -> tuple[int | None, ...]:
    """The column with None for what is not known; empty when nothing is."""
    if all(value == UNKNOWN for value in column):
        return ()
    return tuple(None if value == UNKNOWN else value for value in column)
