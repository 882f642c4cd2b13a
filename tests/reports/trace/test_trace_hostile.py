"""Whatever a run holds, its trace is one that viewers open."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.reports.trace.test_trace import check_format
from tests.reports.tracing_runs import arguments_of, events_of, run_of

from sigmascope.errors import ConfigError
from sigmascope.monitor import Recorder
from sigmascope.records.performance import UTILIZATION
from sigmascope.records.run import Finding, Run, Stage, Steps
from sigmascope.reports.trace import trace_of, write_trace

NAMES = ['a"b\\c', "\x00\x1f", "\u2028</script>", "😀", "\ud800 half a pair", "", "$float"]


def as_written(run: Run, folder: Path) -> dict[str, Any]:
    """The trace as a strict reader has it: UTF-8 without halves of surrogate pairs, and no NaN."""
    write_trace([run], folder / "trace.json")
    text = (folder / "trace.json").read_bytes().decode("utf-8", "strict")
    document: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    json.dumps(document, ensure_ascii=False).encode("utf-8", "strict")
    check_format(document)
    return document


@pytest.mark.parametrize("name", NAMES)
def test_any_text_may_be_a_name_a_fact_or_an_error(name: str, tmp_path: Path) -> None:
    finding = Finding(name, "info", name, {name: name}, name)
    stage = Stage(name, 0.0, 1.0, success=False, error=name, facts={name: name}, findings=(finding,))
    document = as_written(run_of(stage, name=name, facts={name: [name]}, findings=(finding,)), tmp_path)
    drawn = [event["name"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert drawn == [{"": "unnamed", NAMES[4]: "\ufffd half a pair"}.get(name, name)]


def test_numbers_that_json_lacks_are_told_as_facts_and_drawn_nowhere(tmp_path: Path) -> None:
    gauge = {"mean": 50.0, "highest": 60.0, "highest_at_seconds": 0.5}
    busy = {
        "device": "cuda:0",
        "busy_percent": gauge,
        "at_seconds": [0.1, 0.2, 0.3],
        "busy_series": [math.nan, 50.0, math.inf],
    }
    facts = {"loss": math.nan, "sizes": [math.inf], UTILIZATION: {"cuda:0": busy}}
    document = as_written(run_of(Stage("denoising", 0.0, 1.0, facts=facts)), tmp_path)
    points = [event["args"] for event in document["traceEvents"] if event["ph"] == "C"]
    assert points == [{"%": 50.0}]


def test_a_caller_s_own_fact_about_utilization_is_told_as_it_is(tmp_path: Path) -> None:
    recorder = Recorder("own")
    with recorder, recorder.stage("denoising") as stage:
        stage.fact(UTILIZATION, 0.5)
    as_written(recorder.run(), tmp_path)
    assert arguments_of(Stage("denoising", 0.0, 1.0, facts={UTILIZATION: 0.5}))[UTILIZATION] == 0.5


def test_what_ends_before_it_begins_is_refused_with_its_place() -> None:
    steps = Steps(started=(0.5,), seconds=(-0.1,))
    run = run_of(Stage("denoising", 1.0, 1.0, steps=steps), Stage("latent_decoding", 2.0, 0.5))
    with pytest.raises(ConfigError, match=r"run\.stages\[0\]\.steps\.seconds\[0\] is -0\.1"):
        trace_of([run])


def test_stages_and_steps_of_no_length_are_drawn() -> None:
    steps = Steps(started=(0.0, 0.0), seconds=(0.0, 0.0))
    inner = Stage("inner", 1.0, 0.0, children=(Stage("innermost", 1.0, 0.0),))
    at_end = Stage("at its end", 2.0, 0.0)
    run = run_of(
        Stage("empty", 1.0, 0.0, steps=steps, children=(inner,)), Stage("outer", 1.0, 1.0, children=(at_end,))
    )
    check_format(trace_of([run]))
    assert len(events_of(run, phase="X")) == 7


def random_stage(source: random.Random, begins: float, ends: float, depth: int = 0) -> Stage:
    """A stage with steps and stages inside that overlap and outlast it, as those of threads do."""
    started = source.uniform(begins, ends)
    ended = source.uniform(started, ends + 0.3 * (source.random() < 0.3))
    inside = range(source.randint(0, 3)) if depth < 3 else ()
    steps = sorted(source.uniform(0.0, ended - started) for _ in range(source.randint(0, 4)))
    return Stage(
        f"depth {depth}",
        started,
        ended - started,
        children=tuple(random_stage(source, started, ended, depth + 1) for _ in inside),
        steps=Steps(started=tuple(steps), seconds=tuple(source.uniform(0.0, 0.3) for _ in steps)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 4)) for seed in range(20)]
)
def test_slices_nest_on_every_track_however_stages_and_steps_overlap(seed: int) -> None:
    source = random.Random(seed)
    run = run_of(*(random_stage(source, 0.0, 3.0) for _ in range(4)))
    check_format(trace_of([run, run]))
    drawn = [event for event in events_of(run, phase="X") if event["cat"] == "stage"]
    assert len(drawn) == len(list(run.walk()))


def test_a_long_loop_keeps_every_step_and_its_counters_go_forward() -> None:
    count = 5_000
    steps = Steps(
        started=tuple(0.01 * step for step in range(count)),
        seconds=(0.009,) * count,
        rss_bytes=tuple(range(count)),
    )
    run = run_of(Stage("denoising", 0.0, 0.01 * count, steps=steps))
    assert len(events_of(run, phase="X")) == count + 1
    times = [event["ts"] for event in events_of(run, phase="C")]
    assert len(times) == count
    assert all(before < after for before, after in pairwise(times))


def test_a_run_that_is_read_while_it_goes_on_has_its_open_stages() -> None:
    recorder = Recorder("open")
    with recorder, recorder.stage("denoising"):
        with recorder.step():
            run = recorder.run()
        check_format(trace_of([run]))
        assert [event["name"] for event in events_of(run, phase="X")] == ["denoising"]
