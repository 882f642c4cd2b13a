"""Checkpoints appear whole or not at all."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.lbm.training.checkpoints import (
    CheckpointFolder,
    TrainingState,
    find_checkpoints,
    pack,
    random_state,
    read_state,
    restore_random_state,
    unpack,
    write_state,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def state_of(step: int, value: float = 1.0) -> TrainingState:
    return TrainingState(
        step=step,
        epoch=0,
        identity={"seed": 0},
        weights={"b": torch.full((3,), value), "a": torch.zeros(2)},
        average=None,
        progress={"optimizer": {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}}}},
        processes=({"position": None},),
    )


@settings(max_examples=25, deadline=None)
@given(NESTS)
def test_nested_state_comes_back_as_it_was(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    packed = json.loads(json.dumps(pack(value, tensors, "x")))
    assert unpack(packed, tensors, "f") == value
    assert not tensors


def test_an_optimizer_s_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1 + 0.2)
    weight.grad = torch.randn(5, 3)
    optimizer.step()
    state = TrainingState(1, 0, {}, {"w": weight}, None, {"optimizer": optimizer.state_dict()}, ())
    write_state(tmp_path / "checkpoint-000001", state)
    found = read_state(tmp_path / "checkpoint-000001").progress["optimizer"]
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]
    for name, expected in optimizer.state_dict()["state"][0].items():
        assert torch.equal(found["state"][0][name], expected)


def test_state_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"x\.optimizer\.1 is a object"):
        pack({"optimizer": [1, object()]}, {}, "x")


def test_weights_keep_their_order(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-000001", state_of(1))
    assert list(read_state(tmp_path / "checkpoint-000001").weights) == ["b", "a"]


@pytest.mark.parametrize("at", range(3))
def test_a_full_disk_leaves_the_checkpoints_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = CheckpointFolder(tmp_path / "out", keep=1)
    with folder.locked():
        folder.save(state_of(1))
        calls = iter(range(100))
        fsync = os.fsync

        def full(descriptor: int) -> None:
            if next(calls) >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match=r"checkpoint-000002: the checkpoint cannot be written.*space"):
            folder.save(state_of(2))
        monkeypatch.undo()
        assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["checkpoint-000001"]
        newest = folder.newest()
        assert newest is not None
        assert newest[1].step == 1


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        folder.save(state_of(step))
    assert [path.name for path in find_checkpoints(folder.path)] == ["checkpoint-000010", "checkpoint-000003"]


def test_damaged_ones_of_later_steps_do_not_count_among_those_to_keep(tmp_path: Path) -> None:
    """Training went on from step 2, since 4 and 6 are damaged; what it writes must outlive its own sweep."""
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (6, 4, 2):
        write_state(tmp_path / f"checkpoint-{step:06d}", state_of(step))
    for step in (6, 4):
        (tmp_path / f"checkpoint-{step:06d}" / "state.json").unlink()
    folder.save(state_of(3))
    newest = folder.newest()
    assert newest is not None
    assert newest[1].step == 3
    assert not (tmp_path / "checkpoint-000002").exists()


def test_a_folder_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1, value=1.0))
    folder.save(state_of(1, value=2.0))
    assert read_state(tmp_path / "checkpoint-000001").weights["b"].tolist() == [2.0] * 3
    assert len(list(tmp_path.iterdir())) == 1


def test_half_a_checkpoint_of_a_killed_run_goes_and_is_never_read(tmp_path: Path) -> None:
    half = tmp_path / ".checkpoint-000007.aaaaaa-1-00000000.tmp"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    with folder.locked():
        assert not half.exists()


def test_two_runs_cannot_train_into_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first, second = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    with first.locked(), pytest.raises(ConfigError, match="another run is training"), second.locked():
        pass
    with second.locked():
        pass


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "state.json"])
def test_a_file_cut_short_is_named(tmp_path: Path, name: str) -> None:
    write_state(tmp_path / "checkpoint-000001", state_of(1))
    file = tmp_path / "checkpoint-000001" / name
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=name):
        read_state(tmp_path / "checkpoint-000001")


def test_all_generators_go_on_as_they_were() -> None:
    device = torch.device("cpu")
    state = random_state(device)
    tensors: dict[str, Tensor] = {}
    packed = pack(state, tensors, "random")

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002

    first = draw()
    restore_random_state(unpack(packed, tensors, "f"), device)
    assert draw() == first


def test_a_lock_file_that_cannot_be_removed_does_not_fail_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "planted")

    store = CheckpointFolder(tmp_path)
    with store.locked():
        monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.undo()
    with store.locked():  # nobody holds it, though it is there
        pass
    assert list(tmp_path.iterdir()) == []
