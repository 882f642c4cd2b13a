import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.reports.tracing_runs import Event, events_of, only, run_of

from sigmascope.errors import WriteError
from sigmascope.monitor import Recorder
from sigmascope.records.run import ExceptionDetails, Finding, Folded, FoldedStages, Run, Stage, Steps
from sigmascope.reports.trace import trace_of, write_trace

# The rules of Chrome's trace event format: what each phase must and may have.
_PLACED = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": {"type": "string", "minLength": 1}}
_TIMED = {**_PLACED, "ts": {"type": "number", "minimum": 0}, "cat": {"type": "string"}}
PHASES: dict[str, dict[str, Any]] = {
    "X": {**_TIMED, "dur": {"type": "number", "minimum": 0}, "args": {"type": "object"}},
    "C": {
        **_TIMED,
        "args": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}},
    },
    "i": {**_TIMED, "s": {"enum": ["g", "p", "t"]}, "args": {"type": "object"}},
    "M": {**_PLACED, "args": {"type": "object"}},
}


def check_format(document: dict[str, Any]) -> None:
    """Hold a document to the format, and its slices to nesting on each track."""
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        rules = {**PHASES[event["ph"]], "ph": {"type": "string"}}
        schema = {"properties": rules, "required": list(rules), "additionalProperties": False}
        jsonschema.validate(event, schema)
    check_nesting([event for event in document["traceEvents"] if event["ph"] == "X"])


def check_nesting(slices: list[Event]) -> None:
    for track in {(event["pid"], event["tid"]) for event in slices}:
        open_until: list[int] = []
        for event in (event for event in slices if (event["pid"], event["tid"]) == track):
            begins, ends = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            while open_until and open_until[-1] <= begins:
                open_until.pop()
            assert not open_until or ends <= open_until[-1]
            open_until.append(ends)


def recorded() -> Run:
    recorder = Recorder("recorded")
    with recorder, recorder.stage("denoising") as stage:
        for _ in range(50):
            with recorder.step(), recorder.stage("inner"):
                pass
        stage.fact("shape", [1, 4, math.nan])
    return recorder.run()


@pytest.mark.slow
def test_a_recorded_run_keeps_the_rules_of_the_format() -> None:
    check_format(trace_of([recorded(), recorded()]))


def test_a_run_without_anything_keeps_the_rules_of_the_format() -> None:
    check_format(trace_of([run_of()]))


def test_a_stage_is_a_slice_in_microseconds() -> None:
    event = only(events_of(run_of(Stage("denoising", 0.25, 1.5)), phase="X"))
    assert (event["name"], event["cat"], event["ts"], event["dur"]) == (
        "denoising",
        "stage",
        250_000.0,
        1.5e6,
    )


def test_a_step_lies_in_its_stage() -> None:
    stage = Stage("denoising", 1.0, 2.0, steps=Steps(started=(0.5, 1.0), seconds=(0.5, 0.25)))
    stage_slice, first, second = events_of(run_of(stage), phase="X")
    assert [first["name"], second["name"]] == ["step 1", "step 2"]
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (1.5e6, 5e5, 2e6, 2.5e5)
    assert first["tid"] == second["tid"] == stage_slice["tid"]


def test_steps_that_met_to_the_nanosecond_still_meet() -> None:
    seconds = (0.010000001, 0.020000002, 0.030000003)
    steps = Steps(started=(0.0, 0.010000001, 0.030000003), seconds=seconds)
    slices = events_of(run_of(Stage("denoising", 0.123456789, 0.1, steps=steps)), phase="X")[1:]
    assert all(round((a["ts"] + a["dur"]) * 1e3) == round(b["ts"] * 1e3) for a, b in pairwise(slices))


def test_stages_of_two_threads_get_a_track_each() -> None:
    run = run_of(Stage("denoising", 0.0, 2.0), Stage("latent_decoding", 1.0, 2.0))
    first, second = events_of(run, phase="X")
    assert first["tid"] != second["tid"]
    check_format(trace_of([run]))


def test_a_stage_that_only_lies_inside_another_in_time_gets_a_track_of_its_own() -> None:
    first, second = events_of(run_of(Stage("a", 0.0, 3.0), Stage("b", 1.0, 1.0)), phase="X")
    assert first["tid"] != second["tid"]


def test_a_stage_inside_a_step_is_drawn_in_it() -> None:
    steps = Steps(started=(0.0,), seconds=(1.0,))
    run = run_of(Stage("denoising", 0.0, 2.0, steps=steps, children=(Stage("attention", 0.25, 0.5),)))
    assert {event["tid"] for event in events_of(run, phase="X")} == {0}


def test_stages_one_after_another_share_a_track() -> None:
    run = run_of(Stage("a", 0.0, 1.0), Stage("b", 1.0, 1.0))
    assert {event["tid"] for event in events_of(run, phase="X")} == {0}


def test_every_track_has_a_name() -> None:
    run = run_of(Stage("a", 0.0, 3.0), Stage("b", 1.0, 3.0))
    named = {event["tid"] for event in events_of(run, phase="M", name="thread_name")}
    assert named == {event["tid"] for event in events_of(run, phase="X")}


def test_a_run_is_a_process_with_its_name() -> None:
    event = only(events_of(run_of(name="portrait"), phase="M", name="process_name"))
    assert event["args"] == {"name": "portrait"}


def test_a_run_that_broke_off_says_so() -> None:
    event = only(events_of(run_of(complete=False), phase="M", name="process_labels"))
    assert "not complete" in event["args"]["labels"]


def test_two_runs_lie_as_far_apart_as_they_began() -> None:
    early = run_of(Stage("a", 0.0, 1.0))
    late = run_of(Stage("b", 0.5, 1.0), started_at="2026-01-02T03:04:15.250000+00:00")
    a, b = events_of(late, early, phase="X")
    assert (a["name"], a["ts"], b["name"], b["ts"]) == ("b", 10.75e6, "a", 0.0)
    assert a["pid"] != b["pid"]


def test_a_failure_is_marked_where_the_stage_ended() -> None:
    run = run_of(Stage("denoising", 1.0, 2.0, success=False, error="ValueError: NaN"))
    event = only(events_of(run, phase="i"))
    assert (event["name"], event["ts"]) == ("denoising failed", 3e6)
    assert event["args"] == {"error": "ValueError"}
    assert events_of(run, phase="i", prompts="full")[0]["args"] == {"error": "ValueError: NaN"}


def test_no_word_of_what_was_raised_leaves_with_a_trace() -> None:
    trace = 'Traceback (most recent call last):\n  File "app.py", line 3, in main\n    pipe("fox")\nValueError: fox\n'
    raised = ExceptionDetails("ValueError", "fox", trace)
    analysis = {"error": "ValueError: fox", "exception_details": asdict(raised), "seconds": 0.5}
    inner = Stage("inner", 0.1, 0.2, success=False, error="ValueError: fox", exception_details=raised)
    stage = Stage(
        "outer", 0.0, 1.0, False, "ValueError: fox", raised, children=(inner,), facts={"text": analysis}
    )
    told = json.dumps(trace_of([run_of(stage)]))
    assert "fox" not in told
    assert told.count("ValueError (app.py:3 in main)") == 4  # an instant and an argument for each stage
    assert '"text.seconds": 0.5' in told


def test_a_finding_tells_its_evidence_and_advice() -> None:
    finding = Finding("nan", "error", "The latent holds NaN.", {"nan_count": 3}, "Use bf16.")
    event = only(events_of(run_of(Stage("denoising", 0.0, 1.0, findings=(finding,))), phase="i", name="nan"))
    assert event["args"] == {
        "severity": "error",
        "message": "The latent holds NaN.",
        "what_to_do": "Use bf16.",
        "evidence.nan_count": 3,
    }


def test_a_finding_of_the_whole_run_belongs_to_the_process() -> None:
    run = run_of(findings=(Finding("slow", "info", "It is slow."),))
    assert only(events_of(run, phase="i"))["s"] == "p"


def test_what_is_no_json_number_is_still_json(tmp_path: Path) -> None:
    write_trace([run_of(Stage("denoising", 0.0, 1.0, facts={"loss": math.nan}))], tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [event["name"] for event in written["traceEvents"] if event["ph"] == "X"] == ["denoising"]


def test_a_run_writes_its_trace(tmp_path: Path) -> None:
    run = recorded()
    run.to_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(
        json.dumps(trace_of([run]), allow_nan=False)
    )


def test_a_trace_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError, match=r"taken.*trace\.json"):
        run_of().to_trace(tmp_path / "taken" / "trace.json")


def test_folded_generations_are_marked_where_the_last_of_them_ended() -> None:
    sums = {"generation": FoldedStages(1900, 3800.0, 9.0, failures=3)}
    run = replace(run_of(Stage("generation", 5.0, 1.0)), folded=Folded(100, 1900, 0.0, 3.0, sums))
    [mark] = [event for event in trace_of([run])["traceEvents"] if event.get("cat") == "folded"]
    assert (mark["name"], mark["ts"]) == ("1,900 earlier generations, folded", 3e6)
    assert mark["args"]["stages.generation.failures"] == 3
    check_format(trace_of([run]))
