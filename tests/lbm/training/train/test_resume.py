"""Stopping and going on must not change what is trained."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.lbm.training.small_run import SmallRun, same, weights_at

from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.training import session
from sigmascope.lbm.training.checkpoints import read_state, restore_random_state
from sigmascope.lbm.training.metrics import Listeners, StepLog, TrainingRecord
from sigmascope.lbm.training.session import require_same_settings
from sigmascope.lbm.training.train import train

PLAIN: dict[str, Any] = {}
ELABORATE: dict[str, Any] = {
    "ema_decay": 0.9,
    "gradient_accumulation_steps": 2,
    "lr_scheduler": "constant_with_warmup",
    "warmup_steps": 3,
    "shuffle_buffer": 4,
    "crop": "random",
    "batch_size": 1,
    "pixel_loss_weight": 1.0,
    "pixel_loss_type": "l1",
    "pixel_crop": 16,
}


def states_are_equal(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same in every file that training goes on from.

    Not of Python's generator: in these tests the checks of types draw from it.
    """
    names = {path.name for path in first.glob("*.safetensors")}
    assert names == {path.name for path in second.glob("*.safetensors")}
    one, two = read_state(first), read_state(second)
    return all(same(load_file(first / name), load_file(second / name)) for name in names) and (
        (one.step, one.epoch, one.processes[0]["position"])
        == (two.step, two.epoch, two.processes[0]["position"])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "stop_at"),
    [
        (PLAIN, 2),
        pytest.param(PLAIN, 5, marks=pytest.mark.slow),
        pytest.param(ELABORATE, 3, marks=pytest.mark.slow),
        pytest.param(ELABORATE, 6, marks=pytest.mark.slow),
    ],
)
def test_a_training_in_two_sessions_is_that_of_one_bit_for_bit(
    small_run: SmallRun, keys: dict[str, Any], stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []

    def restore(state: dict[str, Any], device: torch.device) -> None:
        restored.append(state["python"])
        restore_random_state(state, device)

    monkeypatch.setattr(session, "restore_random_state", restore)
    whole = small_run.folder / "whole"
    train(small_run.settings(**keys, max_steps=7, save_ckpt_path=str(whole)))
    train(small_run.settings(**keys, max_steps=stop_at))
    resumed = train(small_run.settings(**keys, max_steps=7))
    assert resumed.resumed_from == stop_at
    stopped = read_state(small_run.out / f"checkpoint-{stop_at:06d}")
    assert restored == [stopped.processes[0]["random"]["python"]]
    assert states_are_equal(whole / "checkpoint-000007", small_run.out / "checkpoint-000007")
    assert same(load_file(whole / "lora.safetensors"), load_file(small_run.out / "lora.safetensors"))


@pytest.mark.slow
def test_full_fine_tuning_resumes_to_the_same_weights(small_run: SmallRun) -> None:
    keys = {"rank": ..., "trainable_lora_modules": ..., "full_finetune": True, "learning_rate": 1e-4}
    whole = small_run.folder / "whole"
    train(small_run.settings(**keys, max_steps=4, save_ckpt_path=str(whole)))
    train(small_run.settings(**keys, max_steps=3))
    train(small_run.settings(**keys, max_steps=4))
    trained = load_file(small_run.out / "model.safetensors")
    assert same(trained, load_file(whole / "model.safetensors"))
    base = load_file(small_run.base)
    changed = {key for key in base if not torch.equal(base[key], trained[key])}
    assert changed <= {*(key for key in base if key.startswith("denoiser.")), "num_iterations"}
    assert {key for key in base if key.startswith("denoiser.") and base[key].ndim > 1} <= changed


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_ends_training_after_the_step_with_a_checkpoint(small_run: SmallRun, name: str) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def on_log(log: StepLog) -> None:
        if log.step == 2:
            os.kill(os.getpid(), signal.Signals[name])

    report = train(small_run.settings(max_steps=6), listeners=Listeners(on_log=on_log))
    assert (report.stopped_by, report.step, report.files) == (name, 2, [])
    assert report.checkpoint == small_run.out / "checkpoint-000002"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert train(small_run.settings(max_steps=6)).resumed_from == 2


def test_a_second_ctrl_c_interrupts_at_once(small_run: SmallRun) -> None:
    def on_log(log: StepLog) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small_run.settings(max_steps=6), listeners=Listeners(on_log=on_log))
    assert not list(small_run.out.glob("*checkpoint*"))


@pytest.mark.slow
def test_a_finished_training_is_not_trained_further(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=2))
    before = weights_at(small_run.out, 2)
    again = train(small_run.settings(max_steps=2))
    assert (again.step, again.logs) == (2, [])
    assert same(before, weights_at(small_run.out, 2))
    assert again.files == [small_run.out / "lora.safetensors"]


def test_a_checkpoint_that_a_killed_run_had_no_time_to_remove_goes(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=3, save_interval=1, keep_checkpoints=3))
    train(small_run.settings(max_steps=3, save_interval=1, keep_checkpoints=2))
    assert sorted(path.name for path in small_run.out.glob("checkpoint-*")) == [
        "checkpoint-000002",
        "checkpoint-000003",
    ]


def test_resuming_under_other_settings_names_every_key_that_differs(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=1))
    record = (small_run.out / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.01 then, 0\.02 now; seed: 0 then, 5 now"):
        train(small_run.settings(max_steps=2, learning_rate=0.02, seed=5))
    assert (small_run.out / "run.json").read_bytes() == record


@pytest.mark.parametrize(
    ("now", "different"),
    [
        ({"batch_size": 4, "gradient_accumulation_steps": 1, "processes": 1}, None),
        ({"batch_size": 1, "gradient_accumulation_steps": 1, "processes": 4}, None),
        ({"batch_size": 2, "gradient_accumulation_steps": 1, "processes": 1}, "processes: 2 then, 1 now"),
        ({"batch_size": 1, "gradient_accumulation_steps": 2, "processes": 2}, "batch_size: 2 then, 1 now"),
    ],
)
def test_the_number_of_processes_may_change_where_a_step_has_as_many_samples(
    now: dict[str, int], different: str | None
) -> None:
    before = {"batch_size": 2, "gradient_accumulation_steps": 1, "processes": 2, "seed": 0}
    checkpoint = Path("checkpoint-000001")
    if different is None:
        require_same_settings(before, {**now, "seed": 0}, checkpoint)
        with pytest.raises(ConfigError, match=r"\(seed: 0 then, 1 now\)"):
            require_same_settings(before, {**now, "seed": 1}, checkpoint)
    else:
        with pytest.raises(ConfigError, match=different):
            require_same_settings(before, {**now, "seed": 0}, checkpoint)


@pytest.mark.parametrize(
    ("now", "is_refused"),
    [
        ({"batch_size": 4, "gradient_accumulation_steps": 1, "processes": 1}, False),
        ({"batch_size": 2, "gradient_accumulation_steps": 2, "processes": 1}, True),
    ],
)
def test_batches_stay_where_the_rate_follows_the_number_of_steps(
    now: dict[str, int], is_refused: bool
) -> None:
    """2 and 2 samples of two sizes are two batches of four, so one step of two accumulated ones, or two steps."""
    before = {"batch_size": 2, "gradient_accumulation_steps": 1, "processes": 2, "schedule_steps": 8}
    refused = pytest.raises(ConfigError, match="gradient_accumulation_steps: 1 then, 2 now")
    with refused if is_refused else nullcontext():
        require_same_settings(before, {**now, "schedule_steps": 8}, Path("checkpoint-000001"))


def test_no_record_of_an_earlier_session_is_lost(tmp_path: Path) -> None:
    def session(words: str, aside: Path | None = None) -> None:
        watch = TrainingRecord()
        watch.begin(tmp_path, 2, aside)
        watch.save_last(tmp_path)
        (tmp_path / "run.json").write_text(words, encoding="utf-8")

    for number in (1, 2, 3):
        session(str(number))
    aside = tmp_path / "before-1"
    aside.mkdir()
    session("4", aside)
    TrainingRecord().save_last(tmp_path)  # one that failed before it began
    names = ("run-until-000002.json", "run-until-000002-2.json", "before-1/run.json", "run.json")
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in names] == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_a_falling_schedule_cannot_be_made_longer_midway(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=2, lr_scheduler="linear"))
    with pytest.raises(ConfigError, match="schedule_steps: 2 then, 3 now"):
        train(small_run.settings(max_steps=3, lr_scheduler="linear"))


@pytest.mark.slow
def test_another_base_of_the_same_name_is_noticed(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=1))
    content = bytearray(small_run.base.read_bytes())
    content[-9] ^= 1
    small_run.base.write_bytes(content)
    with pytest.raises(ConfigError, match="base_model_path"):
        train(small_run.settings(max_steps=2))


@pytest.mark.slow
def test_what_does_not_matter_may_change(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=1))
    free = {"log_interval": 7, "save_interval": 9, "num_steps": [1, 3], "keep_checkpoints": 5}
    assert train(small_run.settings(max_steps=2, **free)).resumed_from == 1


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    small_run: SmallRun, caplog: pytest.LogCaptureFixture
) -> None:
    train(small_run.settings(max_steps=4, save_interval=2))
    weights = small_run.out / "checkpoint-000004" / "weights.safetensors"
    expected = weights_at(small_run.out, 4)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    resumed = train(small_run.settings(max_steps=4, save_interval=2))
    assert resumed.resumed_from == 2
    assert "checkpoint-000004" in caplog.text
    assert same(weights_at(small_run.out, 4), expected)


@pytest.mark.slow
def test_when_all_checkpoints_are_damaged_that_is_an_error(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=2))
    (small_run.out / "checkpoint-000002" / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"state\.safetensors.*--no_resume"):
        train(small_run.settings(max_steps=4))


@pytest.mark.slow
def test_beginning_anew_moves_old_checkpoints_aside(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=2))
    report = train(small_run.settings(max_steps=1, seed=1), resume=False)
    assert report.resumed_from is None
    assert report.set_aside == small_run.out / "before-1"
    assert (small_run.out / "before-1" / "checkpoint-000002" / "state.json").is_file()
    assert train(small_run.settings(max_steps=3, seed=1)).resumed_from == 1


def test_a_new_training_that_is_refused_moves_no_checkpoints(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=1))
    small_run.base.write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        train(small_run.settings(max_steps=1), resume=False)
    assert (small_run.out / "checkpoint-000001" / "state.json").is_file()
    assert not (small_run.out / "before-1").exists()


@pytest.mark.slow
def test_validation_leaves_training_as_it_is_bit_for_bit(small_run: SmallRun) -> None:
    keys = {"max_steps": 4, "ema_decay": 0.5}
    train(small_run.settings(**keys))
    watched = small_run.folder / "watched"
    shards = {"validation_shards": str(small_run.folder / "val-0.tar"), "num_steps": [1, 3]}
    report = train(small_run.settings(**keys, **shards, validation_interval=1, save_ckpt_path=str(watched)))
    assert [found.step for found in report.validations] == [0, 1, 2, 3, 4]
    assert [set(found.psnr) for found in report.validations] == [{1, 3}] * 5
    assert states_are_equal(small_run.out / "checkpoint-000004", watched / "checkpoint-000004")
