"""Whatever has a run may be shown, saved, compared and merged: a watch, a recorder, a monitor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.bench.pipelines import TinyPipeline

import sigmascope
from sigmascope.errors import ConfigError
from sigmascope.records.recorded import run_of, runs_of
from sigmascope.records.run import Run


def watched() -> Any:
    pipeline = TinyPipeline()
    with sigmascope.watch(pipeline, sample_hz=None, name="mine") as watch:
        pipeline("a song")
    return watch


def recorder() -> Any:
    with sigmascope.Recorder("mine", sample_hz=None) as made, made.stage("denoising"):
        pass
    return made


def monitor() -> Any:
    made = sigmascope.WorkflowMonitor("mine", sample_hz=None, verbose=False)
    made.start_monitoring("denoising")
    made.end_monitoring("denoising")
    return made


def shown(recorded: Any, folder: Path) -> list[str]:
    """What each function that takes a run makes of it, alone and in a list."""
    texts = []
    for number, given in enumerate((recorded, [recorded])):
        paths = [folder / f"{name}{number}" for name in ("html", "trace")]
        sigmascope.write_html(given, paths[0])
        sigmascope.write_trace(given, paths[1])
        texts += [path.read_text(encoding="utf-8") for path in paths]
        texts += [sigmascope.to_html(given), sigmascope.to_markdown(given)]
    sigmascope.save_run(recorded, folder / "run.json")
    sigmascope.print_run(recorded)
    sigmascope.diagnose(recorded)
    return [*texts, (folder / "run.json").read_text(encoding="utf-8"), sigmascope.merge_runs([recorded]).name]


@pytest.mark.parametrize("make", [watched, recorder, monitor])
def test_what_has_a_run_may_be_given(
    make: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (*shown(make(), tmp_path), capsys.readouterr().out):
        assert "mine" in text


def test_two_watches_are_compared(tmp_path: Path) -> None:
    assert "2 runs" in sigmascope.to_markdown([watched(), watched()])
    check = sigmascope.check_regression(watched(), [watched(), watched()])
    assert not check.regressed


def test_a_run_is_itself_and_several_are_several() -> None:
    run = Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0)
    assert run_of(run) is run
    assert runs_of(run) == runs_of((run,)) == runs_of(iter([run])) == [run]


@pytest.mark.parametrize("given", ["run.json", 3, None, Path("run.json"), TinyPipeline()])
def test_what_has_none_is_refused_with_the_next_step(given: Any) -> None:
    with pytest.raises(ConfigError, match="is not a run") as caught:
        runs_of(given)
    assert "load_run" in str(caught.value)


def test_a_watch_that_was_not_entered_has_none() -> None:
    watch = sigmascope.watch(TinyPipeline())
    with pytest.raises(ConfigError, match=r"with sigmascope\.watch"):
        sigmascope.to_markdown(watch)
    with watch:
        pass
