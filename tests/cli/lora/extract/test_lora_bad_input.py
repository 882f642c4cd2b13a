"""Every bad input of an extraction: exit code, file, key and next step named, the target untouched."""

import errno
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest
import torch

from sigmascope.checkpoints import safetensors
from sigmascope.cli.root import run
from sigmascope.lora.extract import extract_lora

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State

CONV_IN = "denoiser.conv_in.weight"
Damage = Callable[["ModelPair"], Path]


def truncated(files: "ModelPair") -> Path:
    files.tuned.write_bytes(files.tuned.read_bytes()[:-100])
    return files.tuned


def pickle_with_a_payload(files: "ModelPair") -> Path:
    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return os.mkdir, (str(files.tuned.with_name("ran")),)

    path = files.tuned.with_suffix(".ckpt")
    path.write_bytes(pickle.dumps({"state_dict": Payload()}, protocol=2))
    return path


def not_there(files: "ModelPair") -> Path:
    return files.tuned.with_name("other.safetensors")


@pytest.mark.parametrize("damage", [truncated, pickle_with_a_payload, not_there])
def test_a_file_that_cannot_be_read(
    make_model_pair: "MakePair", refused: Callable[["ModelPair", Path], str], damage: Damage
) -> None:
    files = make_model_pair()
    extract_lora(files.base, files.tuned, files.base.with_name("lora.safetensors"))
    tuned = damage(files)
    assert tuned.name in refused(files, tuned)
    assert not files.tuned.with_name("ran").exists()


def other_shape(base: "State", tuned: "State") -> None:
    tuned[CONV_IN] = torch.zeros(8, 8, 3, 3)


def missing_key(base: "State", tuned: "State") -> None:
    del tuned[CONV_IN]


def nan_weight(base: "State", tuned: "State") -> None:
    tuned[CONV_IN][0, 0, 0, 0] = float("nan")


def inf_weight(base: "State", tuned: "State") -> None:
    tuned[CONV_IN][0, 0, 0, 0] = float("-inf")


@pytest.mark.parametrize("edit", [other_shape, missing_key, nan_weight, inf_weight])
def test_weights_that_do_not_fit(
    make_model_pair: "MakePair",
    refused: Callable[["ModelPair", Path], str],
    edit: Callable[["State", "State"], None],
) -> None:
    good = make_model_pair()
    extract_lora(good.base, good.tuned, good.base.with_name("lora.safetensors"))
    files = make_model_pair(edit=edit)
    message = refused(files, files.tuned)
    assert CONV_IN in message
    assert "tuned.safetensors" in message


def test_a_full_disk(
    make_model_pair: "MakePair", refused: Callable[["ModelPair", Path], str], full_disk: list[int]
) -> None:
    """The second tensor meets a disk without room; `refused` sees that no file was changed or left."""
    files = make_model_pair()
    extract_lora(files.base, files.tuned, files.base.with_name("lora.safetensors"))
    full_disk.append(1)
    message = refused(files, files.tuned)
    assert "lora.safetensors" in message
    assert "the disk is full" in message
    assert "Next:  Free some space or choose another disk." in message


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Once it holds a number, that many writes of weights succeed and then the disk is full."""
    room: list[int] = []

    def write(stream: BinaryIO, data: memoryview) -> None:
        if room and room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if room:
            room[0] -= 1
        write_all(stream, data)

    write_all = safetensors.write_all
    monkeypatch.setattr(safetensors, "write_all", write)
    return room


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[["ModelPair", Path], str]:
    """Extract, see that it fails and changes no file, and give the message."""

    def call(files: "ModelPair", tuned: Path) -> str:
        folder = files.base.parent
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        arguments = ["--base_model_path", files.base, "--tuned_model_path", tuned]
        command = ["sigmascope", "lora", "extract", *arguments, "--save_to", folder / "lora.safetensors"]
        monkeypatch.setattr(sys, "argv", [*map(str, command)])
        with pytest.raises(SystemExit) as stopped:
            run()
        out, err = capsys.readouterr()
        assert stopped.value.code not in (0, None)
        assert out == ""
        assert err.startswith("Error: ")
        assert "\nNext:  " in err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        return err

    return call


@pytest.mark.parametrize(
    "target", ["base.safetensors/lora.safetensors", "folder.safetensors", "lora.ckpt", "base.safetensors"]
)
def test_a_target_that_cannot_be_written(
    make_model_pair: "MakePair",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
) -> None:
    files = make_model_pair()
    files.base.with_name("folder.safetensors").mkdir()
    before = sorted(path.name for path in files.base.parent.iterdir())
    arguments = ["--base_model_path", files.base, "--tuned_model_path", files.tuned]
    command = [
        "sigmascope",
        "lora",
        "extract",
        *arguments,
        "--save_to",
        files.base.parent / target,
    ]
    monkeypatch.setattr(sys, "argv", [*map(str, command)])
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code not in (0, None)
    assert target in capsys.readouterr().err
    assert sorted(path.name for path in files.base.parent.iterdir()) == before
