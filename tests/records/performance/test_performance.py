import pytest

from sigmascope.records.performance import BENCHMARK, BenchCase, work_of


@pytest.mark.parametrize(
    ("case", "label"),
    [
        (BenchCase(), "b1"),
        (BenchCase(1024, 768, 4, 20), "1024x768-b4-s20"),
        (BenchCase(832, 480, 1, 4, frames=81), "832x480-b1-f81-s4"),
        (BenchCase(steps=2), "b1-s2"),
    ],
)
def test_a_case_is_called_by_what_was_asked_for(case: BenchCase, label: str) -> None:
    assert case.label == label


def test_the_work_of_a_run_is_what_its_benchmark_noted() -> None:
    assert work_of({BENCHMARK: BenchCase(64, 64).as_dict()}) == "64x64-b1"


@pytest.mark.parametrize("facts", [{}, {BENCHMARK: None}, {BENCHMARK: {"work": 3}}])
def test_other_runs_are_work_without_a_name(facts: dict[str, object]) -> None:
    assert work_of(facts) == ""
