import io

import pytest
from rich.console import Console

from sigmascope.records.run import Run, Stage
from sigmascope.reports import print_run

RUN = Run("1", "demo", "2026-01-02T03:04:05+00:00", 4.0, stages=(Stage("denoising", 0.0, 1.0),))


def test_a_run_prints_what_the_report_prints() -> None:
    ours, report = io.StringIO(), io.StringIO()
    RUN.print(Console(file=ours, width=80))
    print_run(RUN, Console(file=report, width=80))
    assert ours.getvalue() == report.getvalue() != ""


def test_a_run_prints_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    RUN.print()
    out, err = capsys.readouterr()
    assert "denoising" in out
    assert err == ""
