import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError
from sigmascope.lbm.config import load_config
from sigmascope.lbm.data import DataOptions, TrainingData
from sigmascope.lbm.pocket import CONFIG_PATH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pairs, one of them damaged, one of two shapes, and a picture without a partner."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name, level in (("a", 10), ("b", 20), ("cut", 30), ("odd", 40)):
        for key in ("source", "target"):
            size = (40, 64) if (name, key) == ("odd", "target") else (64, 64)
            Image.new("RGB", size, (level,) * 3).save(folder / f"{name}_{key}.png")
    whole = (folder / "cut_target.png").read_bytes()
    (folder / "cut_target.png").write_bytes(whole[: len(whole) // 2])
    Image.new("RGB", (8, 8)).save(folder / "alone_source.png")
    return folder


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(
        app, ["lbm", "make-shards", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "200"}
    )


def made(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    outcome: dict[str, Any] = json.loads(result.stdout)
    return outcome


def test_training_reads_what_was_made(folder: Path, tmp_path: Path) -> None:
    outcome = made(folder, tmp_path / "out")
    assert outcome["samples"] == 2
    stream = TrainingData(load_config(CONFIG_PATH), DataOptions((outcome["train_shards"],), 4))
    ((batch, _),) = stream.batches(0)
    assert sorted(batch.keys) == ["a", "b"]
    assert stream.skipped.count == 0


def test_whatever_was_left_out_is_named(folder: Path, tmp_path: Path) -> None:
    left = {item["name"]: item["reason"] for item in made(folder, tmp_path / "out")["left_out"]}
    assert set(left) == {"alone_source.png", "cut", "odd"}
    assert "cut_target.png cannot be decoded" in left["cut"]
    assert "another shape (40×64)" in left["odd"]
    shown = run(folder, tmp_path / "again")
    assert "Left out: alone_source.png has no target beside it" in shown.stderr
    assert f"train_shards: {tmp_path}/again/train-000000.tar" in shown.stdout


def test_files_go_in_as_they_are(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "out")
    import tarfile

    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        assert tar.getnames() == ["a.source.png", "a.target.png", "b.source.png", "b.target.png"]
        stored = tar.extractfile("a.source.png")
        assert stored is not None
        assert stored.read() == (folder / "a_source.png").read_bytes()


def test_a_mask_is_taken_where_it_is_and_required_when_named(folder: Path, tmp_path: Path) -> None:
    Image.new("L", (64, 64), 255).save(folder / "a_mask.png")
    assert made(folder, tmp_path / "any")["samples"] == 2
    assert made(folder, tmp_path / "all", "--keys", "source,target,mask")["samples"] == 1


def test_the_shard_size_splits(folder: Path, tmp_path: Path) -> None:
    outcome = made(folder, tmp_path / "out", "--shard-size", "1", "--prefix", "valid")
    assert [Path(shard["path"]).name for shard in outcome["shards"]] == [
        "valid-000000.tar",
        "valid-000001.tar",
    ]


def test_pocket_scenes_are_rendered(tmp_path: Path) -> None:
    outcome = made(tmp_path / "out", "--pocket-scenes", "1000-1001", "--light", "warm")
    assert outcome["samples"] == 2
    stream = TrainingData(load_config(CONFIG_PATH), DataOptions((str(tmp_path / "out"),), 2))
    assert next(stream.batches(0))[0].source.shape == (2, 3, 128, 128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one"], "expected FOLDER and OUT"),
        (["one", "two", "three"], "expected FOLDER and OUT"),
        (["one", "two", "--light", "cool"], "no effect without --pocket_scenes"),
        (["one", "two", "--keys", "source"], "at least two"),
        (["one", "two", "--pocket_scenes", "1-2"], "expected OUT alone"),
        (["one", "--pocket_scenes", "9-2"], "expected FIRST-LAST"),
        (["one", "--pocket_scenes", "all"], "expected FIRST-LAST"),
        (["one", "--pocket_scenes", "1-2", "--light", "green"], "expected cool or warm"),
        (["one", "--pocket_scenes", "1-2", "--keys", "a,b"], "no effect with"),
        (["one", "--pocket_scenes", "1-2", "--shard_size", "0"], "--shard_size"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*arguments)


def test_only_unusable_pairs_are_an_error(tmp_path: Path) -> None:
    for key in ("source", "target"):
        (tmp_path / f"a_{key}.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match="no pair can be used, of 1"):
        run(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_ctrl_c_leaves_no_shard_and_says_nothing_more(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from sigmascope.cli import main; main()", "lbm", "make-shards"]
    with subprocess.Popen(
        [*command, str(out), "--pocket_scenes", "1000-9999", "--shard_size", "4"],
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            while not (out.is_dir() and len(list(out.iterdir())) > 2):
                assert process.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()  # leaving the block waits for it without end
    assert process.returncode == 130
    assert list(out.iterdir()) == []
    assert b"Traceback" not in stderr
