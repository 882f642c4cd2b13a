"""Steps planned are steps made, and these see all data once: for any number of processes, sizes and remainders."""

import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lbm.shard_files import pair, plain, write_tar
from tests.lbm.training.meeting import meet
from tests.lbm.training.small_run import SmallRun, near, weights_at
from tests.lbm.training.tiny_run import tiny_settings
from tests.lbm.training.two_processes import run_team

from sigmascope.errors import DataError
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.distributed import Processes, StepBatches, step_batches
from sigmascope.lbm.training.session import make_schedule, open_data, planned_steps, sizes_if_needed
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.train import dry_run, train

SHAPES = [(8, 8), (8, 32), (32, 8), (10, 24), (24, 10), (6, 10), (10, 6)]
"""Of seven buckets."""


def write_pairs(path: Path, counts: Sequence[int], broken: int = 0) -> list[str]:
    """So many pairs of each shape, mixed, of which the first few cannot be decoded; the keys of the others."""
    members: dict[str, list[tuple[str, bytes]]] = {}
    for shape, count in zip(SHAPES, counts, strict=False):
        for number in range(count):
            picture = plain(7, *shape)
            key = f"{number:03d}x{shape[0]}x{shape[1]}"
            members[key] = pair(key, 7, **{"source.png": picture, "target.png": picture})
    keys = sorted(members)
    for key in keys[:broken]:
        width, height = (int(side) for side in key.split("x")[1:])
        cut = plain(7, width, height)
        members[key] = pair(key, 7, **{"source.png": cut, "target.png": cut[:50]})
    write_tar(path, [item for key in keys for item in members[key]])
    return keys[broken:]


def made_steps(run: TrainSettings, processes: int, epoch: int) -> list[list[StepBatches[Any]]]:
    """The steps of an epoch, by process."""

    def steps(process: int, team: Processes) -> list[StepBatches[Any]]:
        stream = open_data(run, process, processes).batches(epoch)
        return list(step_batches(stream, run.gradient_accumulation_steps, team))

    return meet(processes, steps)


def last_rates(run: TrainSettings, planned: int, made: int) -> tuple[float, float]:
    """The learning rate of the last step, and of one beyond it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(run, optimizer, planned)
    rates = [1.0]
    for _ in range(made):
        optimizer.step()
        schedule.step()
        rates.append(float(schedule.get_last_lr()[0]))
    return rates[-2], rates[-1]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=3).filter(any),
    processes=st.integers(1, 4),
    batch_size=st.integers(1, 3),
    accumulated=st.integers(1, 3),
    epochs=st.integers(1, 2),
    broken=st.integers(0, 2),
)
def test_planned_are_made_and_see_all_data_once(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    processes: int,
    batch_size: int,
    accumulated: int,
    epochs: int,
    broken: int,
) -> None:
    shard = tmp_path_factory.mktemp("shards") / "0.tar"
    keys = write_pairs(shard, counts, min(broken, sum(counts) - 1))
    run = tiny_settings(
        train_shards=str(shard),
        batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        max_epochs=epochs,
        lr_scheduler="linear",
    )
    batches = sum(math.ceil(count / (processes * batch_size)) for count in counts)
    expected = epochs * math.ceil(batches / accumulated)
    planned = planned_steps(run, sizes_if_needed(run, open_data(run)), processes)
    assert planned == expected
    made = 0
    for epoch in range(epochs):
        by_process = made_steps(run, processes, epoch)
        made += len(by_process[0])
        for row in zip(*by_process, strict=True):
            assert len({step.position for step in row}) == 1
            assert {step.samples for step in row} == {sum(sum(map(len, step.batches)) for step in row)}
            for slices in zip(*(step.batches for step in row), strict=True):
                check_slices(slices, batch_size)
        seen = [key for steps in by_process for step in steps for batch in step.batches for key in batch.keys]
        assert sorted(seen) == keys
    assert made == expected
    last, beyond = last_rates(run, planned, made)
    assert last == pytest.approx(1 / expected)
    assert beyond == 0.0


def check_slices(slices: Sequence[Batch], batch_size: int) -> None:
    """Of one size in all processes, and none larger than it was asked for."""
    assert len({batch.source.shape[-2:] for batch in slices}) == 1
    assert all(len(batch) <= batch_size for batch in slices)


@pytest.mark.parametrize(
    ("counts", "batch_size", "processes", "planned"),
    [
        pytest.param([8, 8], 2, 2, 4, id="two aspects"),
        pytest.param([2, 3, 22, 17, 5, 9, 2], 4, 1, 1 + 1 + 6 + 5 + 2 + 3 + 1, id="kohya_ss-2965"),
        pytest.param([1, 1, 9, 1, 2, 2, 2], 18, 1, 7, id="musubi-tuner-446"),
        pytest.param([7], 1, 2, 4, id="SimpleTuner-1391"),
        pytest.param([4, 4, 8, 4], 1, 4, 1 + 1 + 2 + 1, id="DeepSpeed-2223"),
        pytest.param([3], 1, 4, 1, id="webdataset-188"),
    ],
)
def test_what_others_users_reported(
    tmp_path: Path, counts: list[int], batch_size: int, processes: int, planned: int
) -> None:
    """Steps that were planned too few, or not alike in all processes, which then waited for each other."""
    keys = write_pairs(tmp_path / "0.tar", counts)
    run = tiny_settings(train_shards=str(tmp_path / "0.tar"), batch_size=batch_size, max_epochs=1)
    assert planned_steps(run, sizes_if_needed(run, open_data(run)), processes) == planned
    by_process = made_steps(run, processes, 0)
    assert [len(steps) for steps in by_process] == [planned] * processes
    assert (
        sorted(key for steps in by_process for step in steps for batch in step.batches for key in batch.keys)
        == keys
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")
@pytest.mark.parametrize(("processes", "batch_size"), [(2, 2), (4, 1)])
def test_several_processes_train_on_two_aspects_as_one_does(
    small_run: SmallRun, processes: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9 and 6 pairs in batches of 4: the last ones leave a process without a sample. One pair cannot be decoded."""
    shard = small_run.folder / "aspects.tar"
    write_pairs(shard, [9, 6], broken=1)
    keys: dict[str, Any] = {
        "train_shards": str(shard),
        "image_size": ...,
        "max_epochs": 2,
        "lr_scheduler": "linear",
        "max_grad_norm": None,
        "optimizer": "SGD",
    }
    planned = 2 * (3 + 2)
    one, several = (small_run.folder / name for name in ("one", "several"))
    alone = train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(one)))
    settings = small_run.settings(**keys, batch_size=batch_size, save_ckpt_path=str(several))

    def work(number: int) -> None:
        report = train(settings)
        (small_run.folder / f"told-{number}.pickle").write_bytes(pickle.dumps((report.step, report.logs)))

    for ended in run_team(work, processes, small_run.folder):
        assert ended.code == 0, ended.errors
    assert alone.step == planned
    for number in range(processes):
        step, logs = pickle.loads((small_run.folder / f"told-{number}.pickle").read_bytes())
        assert step == planned
        assert [log.loss for log in logs] == pytest.approx([log.loss for log in alone.logs], rel=1e-4)
        assert [log.learning_rate for log in logs] == pytest.approx(
            [0.01 * (1 - step / planned) for step in range(1, planned + 1)], abs=1e-9
        )
    near(one / "lora.safetensors", several / "lora.safetensors")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert dry_run(settings).total_steps == planned


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")
def test_an_epoch_that_stops_in_the_middle_goes_on_with_other_processes_to_the_same_weights(
    small_run: SmallRun,
) -> None:
    """Two processes make two of five steps, four the next, and one the rest."""
    shard = small_run.folder / "aspects.tar"
    write_pairs(shard, [9, 6])
    keys: dict[str, Any] = {
        "train_shards": str(shard),
        "image_size": ...,
        "max_epochs": 1,
        "optimizer": "SGD",
    }
    whole = small_run.folder / "whole"
    assert train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(whole))).step == 5
    for processes, steps in ((2, 2), (4, 3)):
        settings = small_run.settings(**keys, batch_size=4 // processes, max_steps=steps)
        for ended in run_team(lambda number, run=settings: train(run), processes, small_run.folder):  # type: ignore[misc]
            assert ended.code == 0, ended.errors
    rest = train(small_run.settings(**keys, batch_size=4))
    assert (rest.resumed_from, rest.step) == (3, 5)
    near(whole / "lora.safetensors", small_run.out / "lora.safetensors")


def test_a_step_whose_pictures_are_all_damaged_counts_and_changes_nothing(small_run: SmallRun) -> None:
    """A LoRA begins with zeros in its upper factors, and the first of the three steps has nothing to learn from."""
    shard = small_run.folder / "damaged.tar"
    write_pairs(shard, [3], broken=1)
    settings = small_run.settings(
        train_shards=str(shard),
        shuffle_buffer=1,
        batch_size=1,
        max_epochs=1,
        save_interval=1,
        keep_checkpoints=3,
        lr_scheduler="linear",
    )
    report = train(settings)
    assert report.step == dry_run(settings).total_steps == 3
    assert [log.loss is None for log in report.logs] == [True, False, False]
    assert report.logs[-1].learning_rate == 0.0
    moved = [
        any(weight.any() for name, weight in weights_at(small_run.out, step).items() if "lora_up" in name)
        for step in (1, 2, 3)
    ]
    assert moved == [False, True, True]
    assert report.skipped.count == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")
def test_an_epoch_of_damaged_pictures_ends_all_processes(small_run: SmallRun) -> None:
    shard = small_run.folder / "damaged.tar"
    write_pairs(shard, [5], broken=5)
    settings = small_run.settings(train_shards=str(shard))
    with pytest.raises(DataError, match="none of 5 samples can be used"):
        train(settings)
    for ended in run_team(lambda number: train(settings), 2, small_run.folder):
        assert ended.code == 1
        assert "DataError: train_shards hold no picture that can be decoded" in ended.errors
