import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from sigmascope.errors import RecordError
from sigmascope.records import Run, load_run, serialization
from sigmascope.records.serialization import CURRENT_SCHEMA, MIGRATIONS, migrate

SCHEMA_2 = Path(__file__).parents[1] / "data" / "run_schema_2.json"


@pytest.fixture
def run() -> Run:
    return load_run(SCHEMA_2)


def test_there_is_a_step_from_every_older_schema() -> None:
    assert sorted(MIGRATIONS) == list(range(min(MIGRATIONS), CURRENT_SCHEMA))


def test_a_run_of_schema_2_is_read_whole(run: Run) -> None:
    assert run.name == "relight the café 🌅"
    assert run.folded is None
    steps = run.stage("denoising").steps
    assert (steps.started, steps.seconds, steps.gpu_seconds) == ((0.0, 0.5), (0.5, 1.5), (None, 1.25))
    assert steps.rss_bytes == (1048576, None)
    assert steps.unavailable == {"gpu_seconds": "the first event was not passed"}
    assert run.stage("latent_decoding").seconds == 0.25
    nested = run.stages[0].children[0].steps.seconds
    assert nested[0] == 0.25
    assert math.isnan(nested[1])


def test_a_run_without_folded_stages_is_saved_in_schema_2(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 2
    assert repr(load_run(tmp_path / "run.json")) == repr(run)


def titled(run: dict[str, Any]) -> dict[str, Any]:
    """From a schema 1 that never was: `title` became `name`."""
    return {"name" if key == "title" else key: value for key, value in run.items()}


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of that schema, and the step from it."""
    monkeypatch.setattr(serialization, "MIGRATIONS", {1: titled, **MIGRATIONS})
    plain = json.loads(SCHEMA_2.read_text())["run"]
    plain["title"] = plain.pop("name")
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 1, "run": plain}))
    return path


def test_an_older_run_passes_through_every_step(older: Path, run: Run) -> None:
    assert repr(load_run(older)) == repr(run)


def test_migrating_leaves_its_input_alone(older: Path) -> None:
    plain = serialization.loads(older.read_text())["run"]
    before = copy.deepcopy(plain)
    assert migrate(plain, 1)["name"] == before["title"]
    assert repr(plain) == repr(before)


@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError, ValueError])
def test_an_older_run_that_a_step_cannot_read_is_a_record_error(
    older: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def stumbles(run: dict[str, Any]) -> dict[str, Any]:
        raise error("no stages")

    monkeypatch.setattr(serialization, "MIGRATIONS", {1: stumbles, **MIGRATIONS})
    with pytest.raises(RecordError, match=r"old\.json: is damaged: .*no stages"):
        load_run(older)
