from dataclasses import replace
from pathlib import Path

import pytest
from tests.analysis.run_sets import run

from sigmascope.analysis.run_comparison import by_work, pairs_by_work, require_pairs
from sigmascope.errors import RecordError
from sigmascope.records.run import Run


def of(work: str) -> Run:
    return replace(run([1.0]), facts={"benchmark": {"work": work}} if work else {})


def test_runs_are_sorted_by_their_case_in_order() -> None:
    assert {work: len(runs) for work, runs in by_work([of("b"), of(""), of("b"), of("a")]).items()} == {
        "b": 2,
        "": 1,
        "a": 1,
    }


def test_only_the_same_work_is_paired() -> None:
    pairs, missing = pairs_by_work([of("a"), of("a"), of("c")], [of("a"), of("b")])
    assert {work: (len(new), len(old)) for work, (new, old) in pairs.items()} == {"a": (2, 1)}
    assert missing == {"b": "not in the new runs", "c": "not in the baseline"}


def test_nothing_in_common_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(RecordError, match=r"new\.json: has nothing in common .*b: not in the new runs"):
        require_pairs([of("")], [of("b")], named=Path("new.json"))


def test_runs_that_broke_off_count_for_nothing() -> None:
    broken = replace(of("a"), complete=False)
    pairs, missing = pairs_by_work([of("a"), broken, broken], [of("a")])
    assert {work: (len(new), len(old)) for work, (new, old) in pairs.items()} == {"a": (1, 1)}
    assert missing == {"new runs": "2 of 3 broke off and were left out"}


def test_where_all_broke_off_nothing_is_compared() -> None:
    with pytest.raises(RecordError, match="baseline runs: 1 of 1 broke off"):
        require_pairs([of("a")], [replace(of("a"), complete=False)], named=Path("new.json"))
