"""In which order runs ran: for what drifts from one to the next, and for whether two sides took turns.

The store knows the order in which its runs were kept, and no clock turns that over (`Run.place`). Of files there is the clock
alone, and a clock may jump: a machine wakes in 2099, another is put right in the middle of a series. A jump looks like a long
gap. So nothing is taken from the clock across one: which of two runs came first is not known there.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from sigmascope.records.run import Run, is_duration

_LONGEST_GAP: Final = 3600.0
"""Seconds between the end of a run and the beginning of the next: sides that take turns are not apart for so long."""


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Runs in the order in which they ran; those of which that is not known as they are given.

    Names of files need not tell it, so what is given decides only between runs that began at once, or beyond a long gap.
    """
    given = list(runs)
    moments = _moments(given)
    return [given[number] for number in sorted(range(len(given)), key=moments.__getitem__)]


def share_apart(new: Sequence[Run], baseline: Sequence[Run]) -> float:
    """How far two sides lie apart in time: 1 if all of one ran after all of the other, near 0 if they took turns.

    Of all pairs, the share in which one side's run came later less that in which the other's did. Where a machine drifts
    evenly, the difference that it makes between the sides is in proportion to this. Pairs of which nobody knows the order lie
    apart.
    """
    moments = _moments([*baseline, *new])
    theirs, ours = moments[: len(baseline)], moments[len(baseline) :]
    known = [(now, before) for now in ours for before in theirs if now[0] == before[0] and now != before]
    later = sum(now > before for now, before in known)
    pairs = len(ours) * len(theirs)
    return (abs(2 * later - len(known)) + pairs - len(known)) / pairs if pairs else 1.0


def _moments(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Of each run the stretch that it lies in, and when in there. Stretches are numbered by the first run given of each."""
    places = sorted({run.place for run in runs if run.place is not None})
    if all(run.place is not None for run in runs):
        return [(0, float(places.index(run.place))) for run in runs if run.place is not None]
    began = [_began(run) for run in runs]
    stretches: list[list[int]] = []
    ended = -math.inf
    for number in sorted(range(len(runs)), key=began.__getitem__):
        if not began[number] - ended <= _LONGEST_GAP:
            stretches.append([])
        stretches[-1].append(number)
        ended = max(
            ended, began[number] + (runs[number].seconds if is_duration(runs[number].seconds) else 0.0)
        )
    of_stretch = {number: min(stretch) for stretch in stretches for number in stretch}
    return [(of_stretch[number], moment) for number, moment in enumerate(began)]


def _began(run: Run) -> float:
    """Seconds since 1970 by the clock; infinite where the record holds no moment."""
    try:
        moment = datetime.fromisoformat(run.started_at)
    except ValueError:
        return math.inf
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
