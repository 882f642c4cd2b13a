from pathlib import Path

import pytest

from sigmascope import Recorder, load_run, save_run, to_html, to_markdown
from sigmascope.errors import ConfigError
from sigmascope.records.run import MOST_LEVELS, Run, Stage
from sigmascope.records.serialization import loads


def test_what_is_nested_too_deeply_to_be_written_again_is_refused() -> None:
    assert loads("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="nested too deeply"):
        loads("[" * 300 + "]" * 300)


def test_a_record_has_no_more_levels_than_can_be_read_again(tmp_path: Path) -> None:
    recorder = Recorder("deep")

    def work(level: int) -> None:
        with recorder.stage(f"level {level}"):
            if level < 450:
                work(level + 1)

    with recorder:
        work(1)
    run = recorder.run()
    save_run(run, tmp_path / "deep.json")
    assert load_run(tmp_path / "deep.json") == run
    *_, innermost = run.walk()
    assert innermost.name == f"level {MOST_LEVELS}"
    assert (
        innermost.unavailable["children"] == f"no more than {MOST_LEVELS} stages inside each other are kept"
    )
    assert innermost.name in to_html(run)
    assert innermost.name in to_markdown(run)


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 450])
def test_a_run_of_more_levels_is_refused_with_their_number(tmp_path: Path, levels: int) -> None:
    stage = Stage("innermost", 0.0, 1.0)
    for level in range(1, levels):
        stage = Stage(f"level {level}", 0.0, 1.0, children=(stage,))
    run = Run("1", "deep", "2026-01-01T00:00:00+00:00", 1.0, stages=(stage,))
    for leave in (to_html, to_markdown, lambda run: save_run(run, tmp_path / "deep.json")):
        with pytest.raises(ConfigError, match=f"{levels} stages inside each other"):
            leave(run)
