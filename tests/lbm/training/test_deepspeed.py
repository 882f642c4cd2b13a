"""Trainings by DeepSpeed's engine in two processes, against those of one process without it."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.lbm.training import deepspeed_on_cpus
from tests.lbm.training.small_run import SmallRun, near, same, weights_at
from tests.lbm.training.two_processes import free_port, run_two
from torch import Tensor, nn

from sigmascope.lbm.train import StepLog, train
from sigmascope.lbm.training import session
from sigmascope.lbm.training.checkpoint_files import read_state
from sigmascope.lbm.training.checkpointing import find_checkpoints
from sigmascope.lbm.training.deepspeed_engine import EngineOptimizer
from sigmascope.lbm.training.preparing import Prepared, prepare_step
from sigmascope.lbm.training.validation import Validation

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
]

SCRIPT = Path(deepspeed_on_cpus.__file__)
TIMEOUT = 240
FULL: dict[str, Any] = {
    "rank": ...,
    "trainable_lora_modules": ...,
    "full_finetune": True,
    "learning_rate": 1e-3,
}


class Told(NamedTuple):
    """What one process's report says, and for how many of the trained values it held the optimizer's state."""

    logs: list[StepLog]
    validations: list[Validation]
    held: int
    all: int


def by_engines(
    run: SmallRun, name: str, environment: Mapping[str, str] = MappingProxyType({}), **keys: Any
) -> list[Told]:
    """Train in two processes, each with an engine; what both tell."""
    settings = run.settings(save_ckpt_path=str(run.folder / name), **keys)

    def work(number: int) -> None:
        deepspeed_on_cpus.allow_deepspeed_on_cpus()
        counts = counting_what_is_held()
        report = train(settings)
        told = (list(report.logs), list(report.validations), *counts)
        (run.folder / f"{name}-{number}.pickle").write_bytes(pickle.dumps(told))

    for ended in run_two(work, run.folder, {**deepspeed_on_cpus.ENVIRONMENT, **environment}):
        assert ended.code == 0, ended.errors
    return [Told(*pickle.loads((run.folder / f"{name}-{number}.pickle").read_bytes())) for number in range(2)]


def counting_what_is_held() -> list[int]:
    """Filled when this process's engine has been made: values that its optimizer changes here, and in all processes."""
    counts: list[int] = []

    def prepare(*arguments: Any) -> Prepared:
        prepared = prepare_step(*arguments)
        pieces = [each.numel() for each in prepared.optimizer.param_groups[0]["params"]]
        trained = [each.numel() for each in prepared.synchronised.parameters() if each.requires_grad]
        counts.extend([sum(pieces), sum(trained)])
        return prepared

    pytest.MonkeyPatch().setattr(session, "prepare_step", prepare)  # in a fork, which ends with it
    return counts


def launch(run: SmallRun, name: str, **keys: Any) -> list[str]:
    """The command line of such a training, by torchrun."""
    path = run.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run.keys(save_ckpt_path=str(run.folder / name), **keys)), encoding="utf-8")
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return [*runner, str(SCRIPT), "lbm", "train", "--path_config", str(path)]


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_two_engines_train_as_one_process_without(small_run: SmallRun, stage: str) -> None:
    """AdamW, a schedule, clipping, an average, and pictures of it after each step, which must not disturb the next."""
    keys: dict[str, Any] = {
        "ema_decay": 0.5,
        "lr_scheduler": "linear",
        "warmup_steps": 1,
        "max_steps": 4,
        "max_grad_norm": 0.01,
        "validation_shards": str(small_run.folder / "val-0.tar"),
        "validation_interval": 1,
        "num_steps": [2],
    }
    one, two = (small_run.folder / name for name in ("one", "two"))
    alone = train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(one)))
    environment = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    main, other = by_engines(small_run, "two", environment, **keys, batch_size=2)
    for name in ("weights", "average", "lora"):
        near(one / f"checkpoint-000004/{name}.safetensors", two / f"checkpoint-000004/{name}.safetensors")
    near(one / "lora.safetensors", two / "lora.safetensors")
    optimizers = [read_state(folder / "checkpoint-000004").progress["optimizer"] for folder in (one, two)]
    assert optimizers[1]["param_groups"] == optimizers[0]["param_groups"]
    for number, expected in optimizers[0]["state"].items():
        assert optimizers[1]["state"][number].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(optimizers[1]["state"][number][name], value, rtol=1e-3, atol=1e-7)
    for logs in (main.logs, other.logs):
        assert [log.loss for log in logs] == pytest.approx([log.loss for log in alone.logs], rel=1e-4)
        norms = [log.gradient_norm for log in logs]
        assert norms == pytest.approx([log.gradient_norm for log in alone.logs], rel=1e-3)
        assert [log.learning_rate for log in logs] == [log.learning_rate for log in alone.logs]
    for told in (main, other):  # pieces are of one length, which need not divide all
        assert (told.held == told.all) if stage == "0" else (told.all / 2 <= told.held < 0.6 * told.all)
    assert max(log.gradient_norm or 0 for log in alone.logs) > 0.01  # so that clipping did something
    assert [found.psnr[2] for found in main.validations] == pytest.approx(
        [found.psnr[2] for found in alone.validations], abs=0.01
    )


def test_kill_9_of_both_and_resuming_equals_the_uninterrupted_run(small_run: SmallRun) -> None:
    keys: dict[str, Any] = {"max_steps": 30, "save_interval": 3, "ema_decay": 0.9, "batch_size": 1}
    by_engines(small_run, "whole", **keys)
    process = subprocess.Popen(
        launch(small_run, "out", **keys),
        env={**os.environ, **deepspeed_on_cpus.ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + TIMEOUT
    while not any(int(path.name[-6:]) >= 6 for path in find_checkpoints(small_run.out)):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        each.kill()
    process.wait()
    done = subprocess.run(
        [*launch(small_run, "out", **keys), "--json"],
        env={**os.environ, **deepspeed_on_cpus.ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 6 <= json.loads(done.stdout[done.stdout.index("{") :])["resumed_from"] < 30
    whole = small_run.folder / "whole"
    for name in ("weights", "average", "lora"):
        files = [
            load_file(place / f"checkpoint-000030/{name}.safetensors") for place in (whole, small_run.out)
        ]
        assert same(*files)


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        pytest.param("2", {"optimizer": "NAdam", "ema_decay": 0.5}, id="average"),
        pytest.param(
            "2", {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, id="accumulation"
        ),
        pytest.param("1", {"gradient_accumulation_steps": 2}, id="accumulation-1"),
        pytest.param("0", {"gradient_accumulation_steps": 2}, id="accumulation-0"),
        pytest.param("2", FULL, id="full"),
        pytest.param("1", {"pixel_loss_weight": 1.0, "pixel_loss_type": "l1", "pixel_crop": 16}, id="pixel"),
    ],
)
def test_what_two_engines_began_one_process_goes_on_with_and_the_other_way_round(
    small_run: SmallRun, stage: str, keys: dict[str, Any]
) -> None:
    """Ten samples in steps of four: the third is cut short by the epoch's end, which the second session sees."""
    keys = {"max_grad_norm": None, **keys}
    accumulated = keys.get("gradient_accumulation_steps", 1)
    alone, pair = 4 // accumulated, 2 // accumulated
    environment = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    whole, there, back = (small_run.folder / name for name in ("whole", "there", "back"))
    train(small_run.settings(**keys, batch_size=alone, max_steps=4, save_ckpt_path=str(whole)))
    name = "model" if "full_finetune" in keys else "lora"
    by_engines(small_run, "there", environment, **keys, batch_size=pair, max_steps=2)
    train(small_run.settings(**keys, batch_size=alone, max_steps=4, save_ckpt_path=str(there)))
    train(small_run.settings(**keys, batch_size=alone, max_steps=2, save_ckpt_path=str(back)))
    by_engines(small_run, "back", environment, **keys, batch_size=pair, max_steps=4)
    for folder in (there, back):
        near(whole / f"{name}.safetensors", folder / f"{name}.safetensors")


def test_bf16_trains_float32_weights_by_autocast(small_run: SmallRun) -> None:
    sgd = {"optimizer": "SGD", "learning_rate": 1.0, "max_grad_norm": None}
    keys: dict[str, Any] = {"mixed_precision": "bf16", "max_steps": 2, **sgd}
    train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    by_engines(small_run, "two", **keys, batch_size=2)
    one, two = (weights_at(small_run.folder / name, 2) for name in ("one", "two"))
    assert {weight.dtype for weight in two.values()} == {torch.float32}
    for name in one:
        if name.endswith("lora_up.weight"):  # zero at the start, so that all of it is gradient
            assert (two[name] - one[name]).norm() < 0.02 * one[name].norm()
            assert one[name].norm() > 0


def test_an_optimizer_kept_on_the_cpu_trains_the_same(small_run: SmallRun) -> None:
    keys: dict[str, Any] = {"max_steps": 3, "optimizer": "RMSprop"}
    train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    environment = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    by_engines(small_run, "two", environment, **keys, batch_size=2)
    near(small_run.folder / "one" / "lora.safetensors", small_run.folder / "two" / "lora.safetensors")


@pytest.mark.parametrize("stage", ["0", "2"])
def test_nan_stops_both_engines_and_names_the_layer(small_run: SmallRun, stage: str) -> None:
    settings = small_run.settings(learning_rate=1e30, max_steps=4, save_interval=1)

    def work(number: int) -> None:
        deepspeed_on_cpus.allow_deepspeed_on_cpus()
        train(settings)

    environment = {**deepspeed_on_cpus.ENVIRONMENT, "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    for ended in run_two(work, small_run.folder, environment):
        assert ended.code == 1
        assert "NonFiniteError: step 2: the loss is nan, first in" in ended.errors
        assert "checkpoint-000001 is intact" in ended.errors
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]


def test_the_engine_of_a_single_process_trains_the_same_and_once(small_run: SmallRun) -> None:
    keys: dict[str, Any] = {"max_steps": 2, "batch_size": 4}
    train(small_run.settings(**keys, save_ckpt_path=str(small_run.folder / "without")))

    def work(number: int) -> None:
        """Each of the two is alone."""
        single = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        os.environ.update({**single, "MASTER_PORT": str(free_port())})
        deepspeed_on_cpus.allow_deepspeed_on_cpus()
        settings = small_run.settings(**keys, save_ckpt_path=str(small_run.folder / f"with-{number}"))
        train(settings)
        train(settings)

    for number, ended in enumerate(run_two(work, small_run.folder, dict(deepspeed_on_cpus.ENVIRONMENT))):
        assert "ConfigError: accelerate: this process has trained under DeepSpeed before" in ended.errors
        result = small_run.folder / f"with-{number}" / "lora.safetensors"
        near(small_run.folder / "without" / "lora.safetensors", result)


def test_an_infinite_gradient_of_one_process_stops_both_before_the_weights_take_it_up(
    small_run: SmallRun,
) -> None:
    settings = small_run.settings(max_steps=4, save_interval=1)

    def work(number: int) -> None:
        deepspeed_on_cpus.allow_deepspeed_on_cpus()
        trained: list[nn.Parameter] = []
        before: list[Tensor] = []

        def prepare(*arguments: Any) -> Prepared:
            prepared = prepare_step(*arguments)
            trained.extend(each for each in prepared.synchronised.parameters() if each.requires_grad)
            calls = count()
            if number == 1:  # from its second batch on
                trained[-1].register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: gradient / (0.0 if next(calls) else 1.0)
                )
            return prepared

        def step(optimizer: EngineOptimizer) -> None:
            make(optimizer)
            before.extend(each.detach().clone() for each in trained if len(before) < len(trained))

        make = EngineOptimizer.step
        patch = pytest.MonkeyPatch()  # in a fork, which ends with it
        patch.setattr(session, "prepare_step", prepare)
        patch.setattr(EngineOptimizer, "step", step)
        try:
            train(settings)
        finally:
            assert all(map(torch.equal, before, trained))
            assert len(before) == len(trained) > 0

    for ended in run_two(work, small_run.folder, dict(deepspeed_on_cpus.ENVIRONMENT)):
        assert ended.code == 1
        assert "NonFiniteError: step 2: the gradient is not finite" in ended.errors
        assert "AssertionError" not in ended.errors
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]
