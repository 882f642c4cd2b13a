"""Findings that analyses of stages put on record."""

from typing import Any

import pytest

from sigmascope.analysis.diagnostics import find_stage_findings
from sigmascope.monitor import Recorder
from sigmascope.records.run import Run

FOUND = {"id": "lora_drift", "severity": "info", "message": "m", "evidence": {"keys": 3}, "advice": "a"}


def run_with(fact: Any, name: str = "lora_application") -> Run:
    recorder = Recorder(sample_hz=None)
    with recorder.stage("lora_application") as stage:
        stage.fact(name, fact)
    return recorder.run()


def test_an_analysis_findings_are_found() -> None:
    (found,) = find_stage_findings(run_with({"findings": [FOUND]}))
    assert (found.id, found.severity, found.message, found.advice) == ("lora_drift", "info", "m", "a")
    assert (found.evidence, found.stage) == ({"keys": 3}, "lora_application")


@pytest.mark.parametrize("fact", [None, 3, {"findings": 3}, {"findings": [3, {"severity": "loud"}]}])
def test_what_is_no_list_of_findings_is_none(fact: Any) -> None:
    assert find_stage_findings(run_with(fact)) == []


def test_facts_of_other_names_are_not_looked_at() -> None:
    assert find_stage_findings(run_with({"findings": [FOUND]}, "other")) == []
