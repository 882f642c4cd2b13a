import copy
import json
import math
from pathlib import Path

import pytest

from sigmascope.errors import RecordError
from sigmascope.records import Run, load_run, serialization
from sigmascope.records.serialization import CURRENT_SCHEMA, MIGRATIONS, migrate

SCHEMA_1 = Path(__file__).parents[1] / "data" / "run_schema_1.json"


@pytest.fixture
def run() -> Run:
    return load_run(SCHEMA_1)


def test_there_is_a_step_from_every_older_schema() -> None:
    assert sorted(MIGRATIONS) == list(range(1, CURRENT_SCHEMA))


def test_step_columns_of_schema_1_become_seconds(run: Run) -> None:
    steps = run.stage("denoising").steps
    assert steps.started == (0.0, 0.5)
    assert steps.seconds == (0.5, 1.5)
    assert steps.gpu_seconds == (None, 1.25)


def test_the_reason_for_a_gap_moves_with_its_column(run: Run) -> None:
    assert run.stage("denoising").steps.unavailable == {"gpu_seconds": "the first event was not passed"}


def test_other_columns_and_fields_of_schema_1_stay(run: Run) -> None:
    assert run.name == "relight the café 🌅"
    assert run.stage("denoising").steps.rss_bytes == (1048576, None)
    assert run.stage("latent_decoding").seconds == 0.25


def test_steps_of_nested_stages_are_migrated(run: Run) -> None:
    seconds = run.stages[0].children[0].steps.seconds
    assert seconds[0] == 0.25
    assert math.isnan(seconds[1])


def test_a_migrated_run_is_saved_in_the_schema_of_runs_without_folded_stages(
    run: Run, tmp_path: Path
) -> None:
    run.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 2
    assert repr(load_run(tmp_path / "run.json")) == repr(run)


def test_migrating_leaves_its_input_alone() -> None:
    plain = serialization.loads(SCHEMA_1.read_text())["run"]
    before = copy.deepcopy(plain)
    migrate(plain, 1)
    assert repr(plain) == repr(before)


@pytest.mark.parametrize(
    "run",
    [
        {"stages": 3},
        {"stages": [None]},
        {"stages": [{"steps": []}]},
        {"stages": [{"steps": {"step_ms": ["fast"]}}]},
    ],
)
def test_a_damaged_run_of_schema_1_is_a_record_error(tmp_path: Path, run: object) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 1, "run": run}))
    with pytest.raises(RecordError, match=r"old\.json: is damaged"):
        load_run(path)
