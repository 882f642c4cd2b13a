"""Trainings whose denoiser FSDP spreads over two processes, against those of one process."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from tests.lbm.training import fsdp_on_cpus
from tests.lbm.training.small_run import SmallRun, near, same, weights_at
from tests.lbm.training.two_processes import run_two

from sigmascope.errors import ConfigError
from sigmascope.lbm.train import StepLog, train
from sigmascope.lbm.training import session
from sigmascope.lbm.training.accelerating import check_spreading
from sigmascope.lbm.training.checkpoint_files import read_state
from sigmascope.lbm.training.checkpointing import find_checkpoints
from sigmascope.lbm.training.preparing import Prepared, prepare_step
from sigmascope.lbm.training.sharding import here
from sigmascope.lbm.training.validation import Validation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")

SCRIPT = Path(fsdp_on_cpus.__file__)
TIMEOUT = 240
FULL: dict[str, Any] = {
    "rank": ...,
    "trainable_lora_modules": ...,
    "full_finetune": True,
    "learning_rate": 1e-3,
}


class Told(NamedTuple):
    """What one process's report says, and how many of the denoiser's values it held."""

    logs: list[StepLog]
    validations: list[Validation]
    held: int
    all: int


def spread(
    run: SmallRun, name: str, environment: Mapping[str, str] = MappingProxyType({}), **keys: Any
) -> list[Told]:
    """Train in two processes, each with a part of the denoiser; what both tell."""
    settings = run.settings(save_ckpt_path=str(run.folder / name), **keys)

    def work(number: int) -> None:
        fsdp_on_cpus.allow_fsdp_on_cpus()
        counts = counting_what_is_held()
        report = train(settings)
        told = (list(report.logs), list(report.validations), *counts)
        (run.folder / f"{name}-{number}.pickle").write_bytes(pickle.dumps(told))

    for ended in run_two(work, run.folder, {**fsdp_on_cpus.ENVIRONMENT, **environment}):
        assert ended.code == 0, ended.errors
    return [Told(*pickle.loads((run.folder / f"{name}-{number}.pickle").read_bytes())) for number in range(2)]


def counting_what_is_held() -> list[int]:
    """Filled when this process's denoiser has been prepared: its values here, and in all processes."""
    counts: list[int] = []

    def prepare(*arguments: Any) -> Prepared:
        prepared = prepare_step(*arguments)
        parameters = list(prepared.synchronised.parameters())
        counts.extend([sum(here(each).numel() for each in parameters), sum(map(torch.numel, parameters))])
        return prepared

    pytest.MonkeyPatch().setattr(session, "prepare_step", prepare)  # in a fork, which ends with it
    return counts


def launch(run: SmallRun, name: str, **keys: Any) -> list[str]:
    """The command line of such a training, by torchrun."""
    path = run.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run.keys(save_ckpt_path=str(run.folder / name), **keys)), encoding="utf-8")
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return [*runner, str(SCRIPT), "lbm", "train", "--path_config", str(path)]


def test_two_processes_with_parts_of_the_model_train_as_one_with_all_of_it(small_run: SmallRun) -> None:
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
    main, other = spread(small_run, "two", **keys, batch_size=2)
    for name in ("weights", "average", "lora"):
        near(one / f"checkpoint-000004/{name}.safetensors", two / f"checkpoint-000004/{name}.safetensors")
    near(one / "lora.safetensors", two / "lora.safetensors")
    moments = [
        read_state(folder / "checkpoint-000004").progress["optimizer"]["state"] for folder in (one, two)
    ]
    for number, expected in moments[0].items():
        for name, value in expected.items():
            torch.testing.assert_close(moments[1][number][name], value, rtol=1e-3, atol=1e-7)
    for logs in (main.logs, other.logs):
        assert [log.loss for log in logs] == pytest.approx([log.loss for log in alone.logs], rel=1e-4)
        norms = [log.gradient_norm for log in logs]
        assert norms == pytest.approx([log.gradient_norm for log in alone.logs], rel=1e-3)
    assert max(log.gradient_norm or 0 for log in alone.logs) > 0.01  # so that clipping did something
    assert [found.psnr[2] for found in main.validations] == pytest.approx(
        [found.psnr[2] for found in alone.validations], abs=0.01
    )
    assert other.validations == []
    assert main.held + other.held == main.all == other.all
    assert max(main.held, other.held) < 0.6 * main.all


@pytest.mark.slow
def test_kill_9_of_both_and_resuming_equals_the_uninterrupted_run(small_run: SmallRun) -> None:
    keys: dict[str, Any] = {"max_steps": 30, "save_interval": 3, "ema_decay": 0.9, "batch_size": 1}
    spread(small_run, "whole", **keys)
    process = subprocess.Popen(
        launch(small_run, "out", **keys),
        env={**os.environ, **fsdp_on_cpus.ENVIRONMENT},
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
        env={**os.environ, **fsdp_on_cpus.ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 6 <= json.loads(done.stdout)["resumed_from"] < 30
    whole = small_run.folder / "whole"
    for name in ("weights", "average", "lora"):
        files = [
            load_file(place / f"checkpoint-000030/{name}.safetensors") for place in (whole, small_run.out)
        ]
        assert same(*files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"optimizer": "NAdam", "ema_decay": 0.5}, id="average"),
        pytest.param({"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, id="accumulation"),
        pytest.param(FULL, id="full"),
        pytest.param({"pixel_loss_weight": 1.0, "pixel_loss_type": "l1", "pixel_crop": 16}, id="pixel"),
    ],
)
def test_what_two_processes_began_one_goes_on_with_and_the_other_way_round(
    small_run: SmallRun, keys: dict[str, Any]
) -> None:
    """Ten samples in steps of four: the third is cut short by the epoch's end, which the second session sees."""
    keys = {"max_grad_norm": None, **keys}
    accumulated = keys.get("gradient_accumulation_steps", 1)
    alone, pair = 4 // accumulated, 2 // accumulated
    whole, there, back = (small_run.folder / name for name in ("whole", "there", "back"))
    train(small_run.settings(**keys, batch_size=alone, max_steps=2, save_ckpt_path=str(whole)))
    name = "model" if "full_finetune" in keys else "lora"
    spread(small_run, "there", **keys, batch_size=pair, max_steps=1)
    train(small_run.settings(**keys, batch_size=alone, max_steps=2, save_ckpt_path=str(there)))
    train(small_run.settings(**keys, batch_size=alone, max_steps=1, save_ckpt_path=str(back)))
    spread(small_run, "back", **keys, batch_size=pair, max_steps=2)
    for folder in (there, back):
        near(whole / f"{name}.safetensors", folder / f"{name}.safetensors")


@pytest.mark.slow
def test_bf16_over_a_base_in_parts(small_run: SmallRun) -> None:
    sgd = {"optimizer": "SGD", "learning_rate": 1.0, "max_grad_norm": None}
    keys: dict[str, Any] = {"mixed_precision": "bf16", "max_steps": 2, **sgd}
    train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    spread(small_run, "two", **keys, batch_size=2)
    one, two = (weights_at(small_run.folder / name, 2) for name in ("one", "two"))
    assert {weight.dtype for weight in two.values()} == {torch.float32}
    for name in one:
        if name.endswith("lora_up.weight"):  # zero at the start, so that all of it is gradient
            assert (two[name] - one[name]).norm() < 0.02 * one[name].norm()
            assert one[name].norm() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"},
        {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BasicTransformerBlock"},
        {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
        {"FSDP_RESHARD_AFTER_FORWARD": "false"},
    ],
    ids=lambda environment: "".join(environment),
)
def test_other_configurations_of_the_launcher_train_the_same(
    small_run: SmallRun, environment: dict[str, str]
) -> None:
    shards = {"validation_shards": str(small_run.folder / "val-0.tar"), "validation_interval": 1}
    keys: dict[str, Any] = {"max_steps": 3, "ema_decay": 0.3, "max_grad_norm": None, **shards}
    train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    spread(small_run, "two", environment, **keys, batch_size=2)
    near(small_run.folder / "one" / "lora.safetensors", small_run.folder / "two" / "lora.safetensors")


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_the_denoiser_is_an_error(small_run: SmallRun) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: accelerate: FSDP does not take .*Nothing"):
        spread(small_run, "two", {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Nothing"}, max_steps=1)


@pytest.mark.slow
def test_nan_stops_all_parts_and_names_the_layer(small_run: SmallRun) -> None:
    settings = small_run.settings(learning_rate=1e30, max_steps=4, save_interval=1)

    def work(number: int) -> None:
        fsdp_on_cpus.allow_fsdp_on_cpus()
        train(settings)

    for ended in run_two(work, small_run.folder, fsdp_on_cpus.ENVIRONMENT):
        assert ended.code == 1
        assert "NonFiniteError: step 2: the loss is nan, first in" in ended.errors
        assert "checkpoint-000001 is intact" in ended.errors
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]


@pytest.mark.parametrize(
    ("version", "keys", "message"),
    [
        (1, {}, r"FSDP of version 1 .* --fsdp_version 2"),
        (2, {"device": "auto", "mixed_precision": "fp16"}, "fp16 does not go with FSDP"),
        (2, {"optimizer": "adafactor"}, r"optimizer: .* FSDP spreads .* AdamW"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    small_run: SmallRun, version: int, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_spreading(DistributedType.FSDP, small_run.settings(**keys), fsdp2=version == 2)
