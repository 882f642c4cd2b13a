"""What records of encodings show in a run that nobody has analysed."""

from typing import Any

import pytest

from sigmascope.analysis.diagnostics import find_vae_findings
from sigmascope.records.latents import RECORD_FACT, EncodingRecord, StrategyAttempt
from sigmascope.records.run import Run, Stage

FALLBACK = EncodingRecord(
    success=True,
    strategy="tiled",
    attempts=(
        StrategyAttempt("direct", "failed", 1.0, "CUDA out of memory", "OutOfMemoryError"),
        StrategyAttempt("tiled", "succeeded", 2.0),
    ),
)


def run_of(*stages: Stage) -> Run:
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=stages)


def stage(facts: dict[str, Any], *children: Stage, name: str = "latent_encoding") -> Stage:
    return Stage(name, 0.0, 1.0, facts=facts, children=children)


RECORD = {RECORD_FACT: FALLBACK.as_dict()}


def ids(*stages: Stage) -> list[str]:
    return [finding.id for finding in find_vae_findings(run_of(*stages))]


def test_a_fallback_is_found_at_any_depth() -> None:
    assert ids(stage(RECORD)) == ["vae_fallback"]
    assert ids(stage({}, stage(RECORD), name="outer")) == ["vae_fallback"]


def test_every_record_counts() -> None:
    assert ids(stage(RECORD), stage(RECORD, name="latent_decoding")) == ["vae_fallback"] * 2


def test_where_an_analysis_is_nothing_is_told_twice() -> None:
    assert ids(stage({"latent_encoding": {"findings": []}}, stage(RECORD))) == []


@pytest.mark.parametrize("fact", [None, 3, "record", []])
def test_what_is_no_record_is_left_out(fact: Any) -> None:
    assert ids(stage({RECORD_FACT: fact})) == []


def test_a_run_without_stages_has_none() -> None:
    assert ids() == []
