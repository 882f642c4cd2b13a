from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from sigmascope.analysis.run_comparison import check_regression
from sigmascope.errors import ConfigError, WriteError
from sigmascope.monitor import stage
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.pipeline.bench import BenchOptions, CaseResult, run_benchmark
from sigmascope.records.performance import BenchCase, Made
from sigmascope.records.serialization import load_run


@dataclass
class Clock:
    ns: int = 0

    def __call__(self) -> int:
        return self.ns


@dataclass
class Subject:
    """Takes the time that it is told to, by a clock that stands still otherwise."""

    seconds: Callable[[BenchCase, int], float]
    clock: Clock = field(default_factory=Clock)
    name: str = "subject"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model: object = field(default_factory=lambda: nn.Linear(1, 1))
    calls: list[tuple[str, int]] = field(default_factory=list)

    def check(self, case: BenchCase) -> None:
        if case.batch > 8:
            raise ConfigError("--batch: too many.", hint="Give fewer.")

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        self.calls.append((case.label, seed))
        with stage("denoising"):
            self.clock.ns += round(1e9 * self.seconds(case, len(self.calls)))
        return Made(case.batch, 64, 32)


def measured(
    subject: Subject, *cases: BenchCase, repeat: int = 3, warm_up: int = 1, output: Path | None = None
) -> tuple[CaseResult, ...]:
    options = BenchOptions(repeat, warm_up, seed=5)
    return run_benchmark(subject, cases or (BenchCase(),), options, output=output, clock=subject.clock)


def test_the_warm_up_is_not_counted_but_told() -> None:
    (result,) = measured(Subject(lambda case, call: 9.0 if call == 1 else 2.0))
    assert result.summary is not None
    assert (result.summary.generation.most, result.summary.first_seconds) == (2.0, 9.0)


def test_every_generation_is_the_same_work() -> None:
    subject = Subject(lambda case, call: 1.0)
    measured(subject, BenchCase(batch=2), repeat=3, warm_up=2)
    assert subject.calls == [("b2", 5)] * 5


def test_each_case_has_its_own_warm_up_and_throughput() -> None:
    results = measured(Subject(lambda case, call: 1.0 + case.batch), BenchCase(batch=1), BenchCase(batch=4))
    speeds = [result.summary.samples_per_second for result in results if result.summary is not None]
    assert speeds == pytest.approx([1 / 2, 4 / 5])
    assert [len(result.warm_up) for result in results] == [1, 1]


def out_of_memory_at(batch: int) -> Callable[[BenchCase, int], float]:
    def seconds(case: BenchCase, call: int) -> float:
        if case.batch == batch:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 1.0

    return seconds


def test_a_case_that_runs_out_of_memory_is_told_and_the_others_go_on() -> None:
    cases = [BenchCase(batch=batch) for batch in (1, 2, 4)]
    results = measured(Subject(out_of_memory_at(2)), *cases)
    assert [result.failure is None for result in results] == [True, False, True]
    assert results[1].failure is not None
    assert results[1].failure.startswith("out of memory")
    assert results[1].summary is None


def test_a_case_that_fails_on_the_way_keeps_what_it_has(tmp_path: Path) -> None:
    def seconds(case: BenchCase, call: int) -> float:
        if call == 4:
            raise ValueError("bad luck")
        return 1.0

    (result,) = measured(Subject(seconds), output=tmp_path)
    assert (len(result.runs), len(result.files), result.failure) == (2, 2, "ValueError: bad luck")
    assert result.summary is not None


def test_ctrl_c_stops_all_and_leaves_what_was_saved(tmp_path: Path) -> None:
    def seconds(case: BenchCase, call: int) -> float:
        if call == 4:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        measured(Subject(seconds), output=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_runs_are_saved_with_what_they_are(tmp_path: Path) -> None:
    (result,) = measured(Subject(lambda case, call: 2.0), BenchCase(64, 32, 1, 4), output=tmp_path)
    saved = load_run(result.files[1])
    noted = saved.facts["benchmark"]
    assert (noted["work"], noted["repeat"], noted["seed"], noted["subject"]) == (
        "64x32-b1-s4",
        1,
        5,
        "subject",
    )
    assert saved.stage("generation").seconds == 2.0


def test_each_run_says_how_busy_others_kept_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.pipeline.bench.others_share", lambda before, after: 0.4)
    (result,) = measured(Subject(lambda case, call: 1.0))
    assert result.runs[0].facts["benchmark"]["others_cpu_share"] == 0.4
    assert result.summary is not None
    assert "Other programs used 40 % of the processor" in result.summary.notes[-1]


def test_a_run_that_cannot_be_saved_ends_the_benchmark(tmp_path: Path) -> None:
    def seconds(case: BenchCase, call: int) -> float:
        (tmp_path / "b1-001.json").mkdir(exist_ok=True)
        return 1.0

    with pytest.raises(WriteError, match="is a folder"):
        measured(Subject(seconds), output=tmp_path)


def test_the_size_that_comes_out_is_in_the_record_where_none_was_asked_for() -> None:
    (result,) = measured(Subject(lambda case, call: 1.0))
    assert result.runs[0].stage("generation").facts["call"]["width"] == 64


def test_what_a_benchmark_saves_can_be_checked(tmp_path: Path) -> None:
    def factor(by: float) -> Subject:
        return Subject(lambda case, call: by * (1 + call / 1000))

    old = measured(factor(1.0), repeat=8, output=tmp_path / "old")[0].runs
    new = measured(factor(1.1), repeat=8, output=tmp_path / "new")[0].runs
    regressed = {figure.comparison.name for figure in check_regression(new, old).regressed}
    assert {"generation", "denoising"} <= regressed


@pytest.mark.parametrize(
    ("cases", "words"),
    [((), "no case"), ((BenchCase(), BenchCase()), "given twice"), ((BenchCase(batch=9),), "too many")],
)
def test_cases_that_make_no_sense_are_refused_before_anything_runs(
    cases: tuple[BenchCase, ...], words: str, tmp_path: Path
) -> None:
    subject = Subject(lambda case, call: 1.0)
    with pytest.raises(ConfigError, match=words):
        run_benchmark(subject, cases, output=tmp_path / "new")
    assert not subject.calls
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: BenchOptions(repeat=0), "--repeat"),
        (lambda: BenchOptions(warm_up=-1), "--warmup"),
        (lambda: BenchOptions(seed=-1), "--seed"),
    ],
)
def test_numbers_out_of_range_name_their_flag(make: Callable[[], BenchOptions], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        make()


def test_a_result_is_plain_json() -> None:
    plain = measured(Subject(lambda case, call: 1.0))[0].as_dict()
    assert plain["case"]["work"] == "b1"
    assert plain["made"] == {"samples": 1, "width": 64, "height": 32, "frames": None}
    assert plain["summary"]["generation"]["p50"] == 1.0
