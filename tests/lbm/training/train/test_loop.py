"""What a training does to the weights, and what it tells of itself."""

import itertools
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.lbm.training.small_run import SmallRun, weights_at, write_tar

from sigmascope import load_run
from sigmascope.analysis.processor_waits import WAITED  # of the machine that this runs on
from sigmascope.errors import ConfigError, DataError, NonFiniteError
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.training import distributed, metrics
from sigmascope.lbm.training.lora_layers import inject_lora
from sigmascope.lbm.training.metrics import Listeners, TimeSpent, time_findings
from sigmascope.lbm.training.objective import Objective
from sigmascope.lbm.training.session import open_data
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.train import dry_run, train
from sigmascope.lora.reader import load_lora
from sigmascope.monitor import Recorder

SGD: dict[str, Any] = {"optimizer": "SGD", "learning_rate": 1.0, "max_grad_norm": None, "shuffle_buffer": 1}


def first_gradient(run: SmallRun, samples: int) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss of the epoch's first samples, by autograd and nothing of the loop."""
    settings = run.settings(**SGD, batch_size=samples)
    model = load_lbm(run.base, settings.lbm)
    trainable = inject_lora(model, settings)
    batch, _ = next(iter(open_data(settings).batches(0)))
    Objective(settings).loss(model, batch).total.backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in trainable.parameters()
    }


def first_step(run: SmallRun, **keys: Any) -> dict[str, torch.Tensor]:
    """What one step of plain SGD at rate 1 subtracts: the gradient."""
    settings = run.settings(**SGD, **keys, max_steps=1)
    start = {
        name: weight.detach().clone()
        for name, weight in inject_lora(load_lbm(run.base, settings.lbm), settings).parameters()
    }
    train(settings)
    return {name: start[name] - weight for name, weight in weights_at(run.out, 1).items()}


@pytest.mark.parametrize(
    ("keys", "samples"),
    [
        pytest.param({"batch_size": 4}, 4, marks=pytest.mark.slow),
        ({"batch_size": 2, "gradient_accumulation_steps": 2}, 4),
    ],
)
def test_a_step_is_along_the_gradient_of_the_mean_over_all_its_samples(
    small_run: SmallRun, keys: dict[str, Any], samples: int
) -> None:
    expected = first_gradient(small_run, samples)
    found = first_step(small_run, **keys)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-6)


@pytest.mark.slow
def test_a_group_that_an_epoch_cuts_short_is_a_mean_as_well(small_run: SmallRun) -> None:
    """Ten samples in batches of 4, 4 and 2: the only step of an epoch of three accumulated batches."""
    expected = first_gradient(small_run, 10)
    found = first_step(small_run, batch_size=4, gradient_accumulation_steps=5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-6)


@pytest.mark.slow
def test_clipping_bounds_the_step(small_run: SmallRun) -> None:
    gradient = torch.cat([one.flatten() for one in first_gradient(small_run, 2).values()]).norm()
    limit = float(gradient) / 10
    settings = small_run.settings(**{**SGD, "max_grad_norm": limit}, batch_size=2, max_steps=1)
    model = load_lbm(small_run.base, settings.lbm)
    start = {name: weight.detach() for name, weight in inject_lora(model, settings).parameters()}
    report = train(settings)
    moved = torch.cat([(weights_at(small_run.out, 1)[name] - start[name]).flatten() for name in start])
    assert float(moved.norm()) == pytest.approx(limit, rel=1e-3)
    assert report.logs[0].gradient_norm == pytest.approx(float(gradient), rel=1e-3)


def test_only_what_is_trained_changes(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_file(small_run.base)
    seen: list[dict[str, torch.Tensor]] = []

    def loaded(*args: Any, **keys: Any) -> LbmModel:
        model = load_lbm(*args, **keys)
        seen.append(dict(model.state_dict()))  # the very tensors that training works with
        return model

    monkeypatch.setattr("sigmascope.lbm.training.train.load_lbm", loaded)
    train(small_run.settings(max_steps=3))
    assert all(torch.equal(seen[0][key], before[key]) for key in before)
    lora = load_lora(small_run.out / "lora.safetensors")
    assert all(".attn" in name or name.endswith("conv_out") for name in lora.modules)
    assert all(factors.up.abs().max() > 0 for factors in lora.modules.values())


@pytest.mark.slow
def test_the_rate_warms_up_and_falls_as_the_schedule_says(small_run: SmallRun) -> None:
    settings = small_run.settings(lr_scheduler="linear", warmup_steps=2, max_steps=6, learning_rate=0.08)
    rates = [log.learning_rate for log in train(settings).logs]
    # the rate shown after step n is that of step n + 1: 0.08·(n/2) while warming up, then 0.08·(6 − n)/4
    assert rates == pytest.approx([0.04, 0.08, 0.06, 0.04, 0.02, 0.0])


@pytest.mark.slow
def test_epochs_and_steps_bound_a_training(small_run: SmallRun) -> None:
    assert train(small_run.settings(max_epochs=2)).step == 10
    once = small_run.folder / "once"
    assert train(small_run.settings(max_epochs=1, max_steps=99, save_ckpt_path=str(once))).step == 5
    alone = small_run.folder / "alone"
    report = train(small_run.settings(max_steps=7, save_ckpt_path=str(alone)))
    assert (report.step, [log.epoch for log in report.logs]) == (7, [0] * 5 + [1] * 2)


@pytest.mark.slow
def test_the_average_follows_the_weights(small_run: SmallRun) -> None:
    keys = {"save_interval": 1, "keep_checkpoints": 9, "ema_decay": 0.15}
    train(small_run.settings(max_steps=3, **keys))
    decays = [0.0, 2 / 11, 3 / 12]  # (1 + n)/(10 + n), at most 0.15, and 0 at first
    average = weights_at(small_run.out, 1)
    for step, decay in enumerate(decays[1:], start=2):
        kept = min(decay, 0.15)
        now = weights_at(small_run.out, step)
        average = {name: kept * average[name] + (1 - kept) * now[name] for name in now}
    stored = load_file(small_run.out / "checkpoint-000003" / "average.safetensors")
    for name, expected in average.items():
        torch.testing.assert_close(stored[name], expected)
    lora = load_lora(small_run.out / "lora.safetensors")
    name = "denoiser.conv_out"
    expected = average[f"{name}.lora_up.weight"].flatten(1) @ average[f"{name}.lora_down.weight"].flatten(1)
    torch.testing.assert_close(lora.modules[name].up.float() @ lora.modules[name].down.float(), expected)


def test_nan_stops_training_and_names_step_samples_and_layers(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=1, learning_rate=1e30))
    with pytest.raises(NonFiniteError, match=r"step 2: .*(conv_out|attn).*samples \d{4}") as caught:
        train(small_run.settings(max_steps=4, learning_rate=1e30))
    assert "checkpoint-000001 is intact" in str(caught.value.hint)
    assert [path.name for path in small_run.out.glob("checkpoint-*")] == ["checkpoint-000001"]
    run = load_run(small_run.out / "run.json")
    assert [finding.id for finding in run.findings if finding.id != WAITED] == ["training.nonfinite"]
    assert run.stage("training").error is not None


@pytest.mark.slow
def test_the_record_says_where_the_time_went(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both clocks tell the thread's own work, so that no other program comes between them.
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=time.thread_time))
    monkeypatch.setattr(metrics, "Recorder", partial(Recorder, clock=time.thread_time_ns))
    shards = {"validation_shards": str(small_run.folder / "val-0.tar"), "validation_interval": 2}
    report = train(small_run.settings(max_steps=4, save_interval=2, **shards))
    run = load_run(small_run.out / "run.json")
    training = run.stage("training")
    assert len(training.steps) == 4
    assert [child.name for child in training.children] == [
        "validation",
        "validation",
        "checkpoint_saving",
        "validation",
        "checkpoint_saving",
    ]
    spent = [training.facts[f"{what}_seconds"] for what in ("data_wait", "compute", "validation", "saving")]
    assert all(seconds > 0 for seconds in spent)
    assert sum(spent) <= training.seconds
    assert training.facts["compute_seconds"] == pytest.approx(sum(training.steps.seconds), rel=0.05)
    assert run.peak().rss_bytes is not None
    assert (small_run.out / "validation" / "step-000004.png").is_file()
    assert report.run.stage("model_loading").facts["file"] == str(small_run.base)


def test_the_last_step_is_validated_once(small_run: SmallRun) -> None:
    """Ten samples in batches of 4, 4 and 2, so that only the end of the data tells which step is the last."""
    shards = {"validation_shards": str(small_run.folder / "val-0.tar"), "validation_samples": 1}
    settings = small_run.settings(**shards, batch_size=4, max_epochs=1, validation_interval=2)
    report = train(settings)
    assert [found.step for found in report.validations] == [0, 2, 3]
    pictures = small_run.out / "validation"
    assert sorted(path.name for path in pictures.iterdir()) == [
        "step-000000.png",
        "step-000002.png",
        "step-000003.png",
    ]
    names = [child.name for child in report.run.stage("training").children]
    assert names[-2:] == ["checkpoint_saving", "validation"]


@pytest.mark.slow
def test_tensorboard_shows_what_was_logged(small_run: SmallRun) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shards = {"validation_shards": str(small_run.folder / "val-0.tar"), "validation_interval": 3}
    report = train(small_run.settings(max_steps=3, report_to="tensorboard", **shards))
    events = accumulator.EventAccumulator(str(small_run.out / "logs" / "lbm")).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx({log.step: log.loss for log in report.logs}, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/psnr_1")] == [0, 3]
    assert [event.step for event in events.Images("validation/pictures")] == [0, 3]


def test_a_tracker_whose_package_is_missing_is_an_error_at_once(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb needs the package wandb.*pip install .*wandb"):
        train(small_run.settings(report_to=None, wandb_project="mine"))
    assert not small_run.out.exists()


@pytest.mark.parametrize("begin", [train, dry_run])
def test_all_packages_that_are_missing_are_told_at_once(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch, begin: Callable[[TrainSettings], object]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "lpips", None)
    wanted: dict[str, Any] = {
        "report_to": None,
        "wandb_project": "mine",
        "pixel_loss_weight": 1.0,
        "pixel_loss_type": "lpips",
    }
    with pytest.raises(
        ConfigError, match=r"package wandb.*pixel_loss_type: lpips.*install .*wandb.*install .*lpips"
    ):
        begin(small_run.settings(**wanted, base_model_path="missing.safetensors"))
    assert not small_run.out.exists()


@pytest.mark.slow
def test_a_broken_sample_is_left_out_and_counted(small_run: SmallRun) -> None:
    shard = small_run.folder / "train-0.tar"
    content = bytearray(shard.read_bytes())
    content[content.find(b"\x89PNG") + 1 : content.find(b"\x89PNG") + 60] = b"x" * 59
    shard.write_bytes(content)
    report = train(small_run.settings(max_epochs=1))
    assert (report.skipped.count, report.step) == (1, 5)


def test_too_much_waiting_for_data_is_a_finding() -> None:
    assert [finding.id for finding in time_findings(TimeSpent(data=3.0, step=7.0, steps=9))] == [
        "training.waiting_on_data"
    ]
    assert not time_findings(TimeSpent(data=1.0, step=9.0, steps=9))
    assert not time_findings(TimeSpent(data=3.0, step=7.0, steps=2))


def test_progress_tells_loss_rate_and_speed(small_run: SmallRun) -> None:
    told: list[tuple[int, int, str]] = []
    train(
        small_run.settings(max_steps=2),
        listeners=Listeners(progress=lambda done, total, what: told.append((done, total, what))),
    )
    assert [(done, total) for done, total, _ in told] == [(1, 2), (2, 2)]
    assert all("loss" in what and "lr 0.01" in what and "s/step" in what for _, _, what in told)


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"device": "cuda:7"}, "^device: there is no cuda:7"), ({"mixed_precision": "fp16"}, "fp16")],
)
def test_a_device_that_cannot_do_it_is_an_error(
    small_run: SmallRun, keys: dict[str, Any], message: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(ConfigError, match=message):
        train(small_run.settings(**keys))


@pytest.mark.slow
def test_bf16_and_gradient_checkpointing_train(small_run: SmallRun) -> None:
    report = train(small_run.settings(max_steps=2, mixed_precision="bf16", gradient_checkpointing=True))
    assert all(log.loss is not None and math.isfinite(log.loss) for log in report.logs)
    assert weights_at(small_run.out, 2)["denoiser.conv_out.lora_up.weight"].dtype == torch.float32


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(small_run: SmallRun) -> None:
    train(small_run.settings(max_steps=2))
    other = small_run.folder / "other"
    train(small_run.settings(max_steps=2, gradient_checkpointing=True, save_ckpt_path=str(other)))
    for name, weight in weights_at(small_run.out, 2).items():
        assert torch.equal(weight, weights_at(other, 2)[name])


def test_shards_without_samples_are_an_error(small_run: SmallRun, tmp_path: Path) -> None:
    write_tar(tmp_path / "empty.tar", range(0))
    with pytest.raises(DataError, match="no samples"):
        train(small_run.settings(train_shards=str(tmp_path / "empty.tar")))


def test_threads_that_read_ahead_end_with_a_training_that_fails(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, calls = itertools.islice, itertools.count()

    def fail_later(*given: Any) -> Any:
        if next(calls):
            raise RuntimeError("planted")
        return take(*given)

    monkeypatch.setattr(distributed, "islice", fail_later)
    with pytest.raises(RuntimeError, match="planted") as caught:
        train(small_run.settings(batch_size=1, max_steps=3))
    assert caught.tb is not None  # which holds on to the frames of the training
    assert [thread.name for thread in threading.enumerate() if "sigmascope-data" in thread.name] == []
