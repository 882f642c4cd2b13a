import io
from dataclasses import replace
from pathlib import Path

from tests.analysis.run_sets import run

from sigmascope.analysis.run_figures import summarise
from sigmascope.cli.bench import print_bench
from sigmascope.cli.console import Console
from sigmascope.pipeline.bench import CaseResult
from sigmascope.records.performance import BenchCase, Made
from sigmascope.records.run import AcceleratorFacts, HostFacts

H100 = HostFacts(accelerators=(AcceleratorFacts("cuda:0", "NVIDIA H100", total_bytes=80 * 2**30),))


def result(case: BenchCase, *, made: Made | None = None, count: int = 3, on_gpu: bool = False) -> CaseResult:
    one = run([0.1, 0.2, 0.3], device_bytes=3 * 2**30 if on_gpu else None)
    device = "cuda" if on_gpu else "cpu"
    noted = {"benchmark": {"work": case.label, "device": device, "threads": 8}}
    runs = (replace(one, facts=noted, host=H100 if on_gpu else HostFacts(cpu_model="EPYC")),) * count
    return CaseResult(case, made or Made(1, 64, 64), runs, summary=summarise(runs))


def printed(*results: CaseResult, target: float | None = None) -> str:
    stream = io.StringIO()
    print_bench(Console(file=stream, width=80), "a [b]pipeline", 1.5, results, Path("runs"), target=target)
    return stream.getvalue()


def test_a_row_fits_80_columns_with_a_device_and_large_figures() -> None:
    shown = printed(result(BenchCase(1024, 1024, 16, 50), on_gpu=True))
    row = next(line for line in shown.splitlines() if line.strip().startswith("1024x1024-b16-s50"))
    assert row.split()[-2:] == ["953.7", "3,072.0"]
    assert len(row) <= 80


def test_the_device_is_named() -> None:
    assert "cuda: NVIDIA H100, 81,920.0 MB" in printed(result(BenchCase(), on_gpu=True))


def test_a_name_is_no_markup() -> None:
    assert "a [b]pipeline" in printed(result(BenchCase()))


def test_the_size_that_came_out_is_shown_where_none_was_asked_for() -> None:
    assert " 64x64-b1 " in printed(result(BenchCase()))


def test_another_size_than_was_asked_for_is_told() -> None:
    assert "33x33-b1: the pictures are 32x32." in printed(result(BenchCase(33, 33), made=Made(1, 32, 32)))


def test_what_is_true_of_all_cases_is_told_once() -> None:
    shown = printed(result(BenchCase(batch=1)), result(BenchCase(batch=2)))
    assert shown.count("of 3 repeats are the slowest") == 1


def test_a_case_that_failed_stands_beside_those_that_did_not() -> None:
    failed = CaseResult(BenchCase(batch=8), failure="out of memory (CUDA out of memory.)")
    shown = printed(result(BenchCase(batch=1)), failed)
    assert "b8: ✗ out of memory" in shown
    assert "64x64-b1" in shown


def test_nothing_measured_is_no_table() -> None:
    shown = printed(CaseResult(BenchCase(), failure="ValueError: no"))
    assert "p50" not in shown
    assert "b1: ✗ ValueError: no" in shown
