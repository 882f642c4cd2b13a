"""All rules on a run (SPEC section 6)."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

from sigmascope.analysis.diagnostics.attention_rules import ATTENTION_RULES
from sigmascope.analysis.diagnostics.case import Case, cases, whole
from sigmascope.analysis.diagnostics.memory_rules import MEMORY_RULES, MEMORY_RUN_RULES
from sigmascope.analysis.diagnostics.model_rules import MODEL_RULES
from sigmascope.analysis.diagnostics.picture_rules import PICTURE_RULES
from sigmascope.analysis.diagnostics.placement_rules import PLACEMENT_RULES, PLACEMENT_RUN_RULES
from sigmascope.analysis.diagnostics.precision_rules import PRECISION_RULES
from sigmascope.analysis.diagnostics.rank_rules import about_rank, slow_ranks
from sigmascope.analysis.diagnostics.step_rules import STEP_RULES
from sigmascope.analysis.diagnostics.text_rules import TEXT_RULES
from sigmascope.analysis.diagnostics.time_rules import TIME_RULES
from sigmascope.analysis.diagnostics.utilization_rules import UTILIZATION_RULES
from sigmascope.analysis.leaks import find_leaks
from sigmascope.printable import printable
from sigmascope.records.finding import Finding
from sigmascope.records.merge import ranks_of
from sigmascope.records.run import Run

_log = logging.getLogger(__name__)
T = TypeVar("T")
Rule = Callable[[Case], Iterator[Finding]]

RULES: Final[tuple[Rule, ...]] = (
    *MEMORY_RULES,
    *ATTENTION_RULES,
    *MODEL_RULES,
    *PLACEMENT_RULES,
    *PRECISION_RULES,
    *TEXT_RULES,
    *PICTURE_RULES,
    *TIME_RULES,
    *STEP_RULES,
    *UTILIZATION_RULES,
)
RUN_RULES: Final[tuple[Rule, ...]] = (*MEMORY_RUN_RULES, *PLACEMENT_RUN_RULES)
"""Rules on the whole run: what they look for may lie between its generations."""
_ABOUT: Final = ("component", "device", "class", "prompt")
"""Evidence that tells findings of one rule apart."""
_SEVERITIES: Final = ("critical", "error", "warning", "info")


def diagnose(run: Run) -> tuple[Finding, ...]:
    """What the record says is wrong or slow, what to do, and what that would gain. The gravest come first.

    Where a run holds several generations, the same finding of several of them is given once, with `generations` in
    its evidence. A rule that fails on an odd record is left out, with a line in the log.

    Args:
        run: With `PipelineFacts` and `CallFacts` among its facts or its stages' (`pipeline`, `call`), for the rules
            that need them; without, those rules are silent. Of merged ranks each is looked at by itself, named in the
            evidence, and then they are compared with each other.
    """
    findings = _of_ranks(run) or _of_process(run)
    return tuple(sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _of_ranks(run: Run) -> list[Finding]:
    ranks = _or_nothing(lambda: list(ranks_of(run).items()), "Reading the ranks")
    findings = [about_rank(finding, name) for name, own in ranks for finding in _of_process(own)]
    return findings + _or_nothing(lambda: list(slow_ranks(dict(ranks))), "slow_ranks")


def _of_process(run: Run) -> list[Finding]:
    found: dict[tuple[str, str | None, str], list[tuple[Finding, int | None]]] = {}
    for case, rules in _readable_cases(run):
        for rule in rules:
            for finding in _of_rule(rule, case):
                about = next((finding.evidence[name] for name in _ABOUT if name in finding.evidence), None)
                same = found.setdefault((finding.id, finding.stage, str(about)), [])
                same.append((finding, case.number))
    leaks = _or_nothing(lambda: list(find_leaks(run)), "find_leaks")
    return [_as_one(same) for same in found.values()] + leaks


def _readable_cases(run: Run) -> Iterator[tuple[Case, tuple[Rule, ...]]]:
    """What there is to look at, and by which rules."""
    try:
        for case in cases(run):
            yield case, RULES
        yield whole(run), RUN_RULES
    except ValueError as failure:
        _log.warning(
            "The facts of run %s about its pipeline cannot be read: %s", printable(run.id), printable(failure)
        )


def _of_rule(rule: Rule, case: Case) -> list[Finding]:
    return _or_nothing(lambda: list(rule(case)), rule.__name__)


def _or_nothing(read: Callable[[], list[T]], what: str) -> list[T]:
    try:
        return read()
    except Exception as failure:  # noqa: BLE001 - a record may come from anywhere; the other rules still say theirs
        _log.warning("%s failed: %s: %s", what, type(failure).__name__, printable(failure))
        return []


def _as_one(same: list[tuple[Finding, int | None]]) -> Finding:
    """The first, which says how many generations it is true of."""
    first = same[0][0]
    generations = {number for _, number in same if number is not None}
    if len(generations) < 2:
        return first
    return replace(first, evidence={**first.evidence, "generations": len(generations)})
