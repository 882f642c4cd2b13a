"""Runs sorted by the work that they did: a run of 512×512 says nothing about one of 1024×1024."""

from collections.abc import Sequence
from pathlib import Path

from sigmascope.errors import RecordError
from sigmascope.records.benchmark import work_of
from sigmascope.records.run import Run


def by_work(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by the case of the benchmark that made them, in the order of the first of each; "" for all others.

    Args:
        runs: Any number, in order.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(work_of(run.facts), []).append(run)
    return found


def pairs_by_work(
    new: Sequence[Run], baseline: Sequence[Run]
) -> tuple[dict[str, tuple[list[Run], list[Run]]], dict[str, str]]:
    """New runs beside the baseline's runs of the same work.

    Runs that broke off are left out: what they did not do would count as time saved.

    Args:
        new: In order.
        baseline: In order.

    Returns:
        By work, the runs of both sides (new first); and by name the work that one side lacks, with the reason, and how
        many runs were left out.
    """
    ours, theirs = by_work(_whole(new)), by_work(_whole(baseline))
    pairs = {work: (ours[work], runs) for work, runs in theirs.items() if work in ours}
    missing = {work: "not in the new runs" for work in theirs if work not in ours}
    missing |= {work: "not in the baseline" for work in ours if work not in theirs}
    return pairs, missing | _left_out("new runs", new) | _left_out("baseline runs", baseline)


def require_pairs(
    new: Sequence[Run], baseline: Sequence[Run], *, named: Path
) -> tuple[dict[str, tuple[list[Run], list[Run]]], dict[str, str]]:
    """`pairs_by_work` where there must be something to compare.

    Args:
        new: In order.
        baseline: In order.
        named: What the user called the new runs, for the error.

    Raises:
        RecordError: The two sides have no work in common.
    """
    pairs, missing = pairs_by_work(new, baseline)
    if not pairs:
        reasons = "; ".join(f"{work or 'runs of no benchmark'}: {why}" for work, why in missing.items())
        raise RecordError(
            named,
            f"has nothing in common with the baseline ({reasons}).",
            hint="Compare whole runs of the same cases.",
        )
    return pairs, missing


def _whole(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.complete]


def _left_out(name: str, runs: Sequence[Run]) -> dict[str, str]:
    count = len(runs) - len(_whole(runs))
    return {name: f"{count} of {len(runs)} broke off, and count for nothing"} if count else {}
