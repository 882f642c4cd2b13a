import json
from pathlib import Path
from typing import Any

import pytest
from tests.families import make_pipeline
from typer.testing import CliRunner, Result

from sigmascope.cli.root import app
from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.history.store import open_store
from sigmascope.lbm.pocket.demo import PocketSubject
from sigmascope.records.serialization import load_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "tiny-sd"
    make_pipeline("sd15").save_pretrained(path)
    return path


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def quick(pipeline: object, output: Path, *arguments: object) -> Result:
    return bench(pipeline, "--output", output, "--repeat", 2, "--steps", 2, "--resolution", 32, *arguments)


def test_the_pocket_model_is_measured_and_its_runs_are_saved(tmp_path: Path) -> None:
    done = quick("pocket", tmp_path / "runs")
    assert done.exit_code == 0, done.output
    assert "32x32-b1-s2" in done.output
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == [
        "32x32-b1-s2-001.json",
        "32x32-b1-s2-002.json",
    ]


@pytest.mark.slow
def test_its_runs_are_kept_unless_that_is_not_wanted(tmp_path: Path, store_file: Path) -> None:
    quick("pocket", tmp_path / "first", "--no_keep", "--warmup", 0)
    assert not store_file.exists()
    done = quick("pocket", tmp_path / "runs", "--warmup", 0)
    with open_store() as store:
        runs = store.runs()
    assert {(run.source, run.row.work, run.row.width, run.row.steps) for run in runs} == {
        ("bench", "32x32-b1-s2", 32, 2)
    }
    assert {run.row.id for run in runs} == {load_run(path).id for path in (tmp_path / "runs").iterdir()}
    assert f"runs are kept in {store_file}" in done.stderr


@pytest.mark.slow
def test_a_saved_pipeline_gives_stages_and_facts(folder: Path, tmp_path: Path) -> None:
    done = quick(folder, tmp_path / "runs")
    assert done.exit_code == 0, done.output
    for words in ("tiny-sd", "text_encoding", "each step", "Samples"):
        assert words in done.output
    run = load_run(tmp_path / "runs" / "32x32-b1-s2-001.json")
    assert run.stage("generation").facts["pipeline"]["class_name"] == "StableDiffusionPipeline"


@pytest.mark.slow
def test_json_holds_every_case(folder: Path, tmp_path: Path) -> None:
    done = quick(folder, tmp_path / "runs", "--batch", "1,2", "--warmup", 0, "--json")
    found = json.loads(done.stdout)
    assert [case["case"]["batch"] for case in found["cases"]] == [1, 2]
    assert [case["made"]["samples"] for case in found["cases"]] == [1, 2]
    assert all(case["summary"]["generation"]["count"] == 2 for case in found["cases"])


@pytest.mark.slow
def test_other_arguments_reach_the_call(folder: Path, tmp_path: Path) -> None:
    done = quick(folder, tmp_path / "runs", "--call", "output_type=latent", "--json")
    made = json.loads(done.stdout)["cases"][0]["made"]
    assert (made["width"], made["height"]) == (16, 16)  # the latent's: this VAE halves


def test_a_case_that_the_pipeline_refuses_ends_with_1_and_its_reason(folder: Path, tmp_path: Path) -> None:
    done = bench(folder, "--output", tmp_path / "x", "--repeat", 1, "--steps", 1, "--resolution", "32,33")
    assert done.exit_code == 1
    assert "33x33-b1-s1: ✗ ValueError" in done.output
    assert len(list((tmp_path / "x").iterdir())) == 1


@pytest.mark.slow
def test_the_target_is_held_against_every_repeat(tmp_path: Path) -> None:
    assert "2 of 2 within 1,000 s" in quick("pocket", tmp_path / "a", "--target", 1000).output
    assert "0 of 2 within" in quick("pocket", tmp_path / "b", "--target", 0.000001).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pocket", "--prompt", "a fox"), "--prompt: the pocket model relights its own scene"),
        (("pocket", "--batch", "2"), "one picture at a time"),
        (("pocket", "--device", "tpu9"), "--device"),
        (("pocket", "--dtype", "int3"), "--dtype"),
        (("pocket", "--target", "-1"), "--target is -1"),
        (("pocket", "--target", "inf"), "--target is inf"),
        (("pocket", "--repeat", "0"), "--repeat"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = bench(*arguments, "--output", tmp_path / "new")
    assert isinstance(done.exception, ConfigError)
    assert words in done.exception.message
    assert not (tmp_path / "new").exists()


def test_what_is_no_pipeline_is_named(tmp_path: Path) -> None:
    done = bench(tmp_path, "--output", tmp_path / "new")
    assert isinstance(done.exception, CheckpointError)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_will_not_do_is_told_before_the_pipeline_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    done = bench(tmp_path / "no-pipeline", "--output", tmp_path / "runs")
    assert isinstance(done.exception, WriteError)


def test_where_nothing_could_be_measured_no_folder_stays(tmp_path: Path) -> None:
    done = bench("pocket", "--output", tmp_path / "new" / "runs", "--resolution", 99999999999, "--repeat", 1)
    assert done.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_says_where_the_runs_so_far_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = PocketSubject.generate
    made: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return generate(*arguments)

    monkeypatch.setattr(PocketSubject, "generate", interrupted)
    stopped = quick("pocket", tmp_path / "runs", "--warmup", 1)
    assert stopped.exit_code == 130
    assert f"Stopped by Ctrl-C. 1 run so far: {tmp_path / 'runs'}" in stopped.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1
