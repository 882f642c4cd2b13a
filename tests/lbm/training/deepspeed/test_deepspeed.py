"""Trainings by DeepSpeed's engine in two processes, against those of one process without it."""

import os
import sys
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lbm.training import deepspeed_on_cpus
from tests.lbm.training.small_run import SmallRun, near
from tests.lbm.training.two_processes import free_port
from tests.lbm.training.two_trainings import FULL, WATCHED, Spreading, check_bf16, check_logs
from torch import Tensor, nn

from sigmascope.lbm.training import session
from sigmascope.lbm.training.accelerate import Prepared, prepare_step
from sigmascope.lbm.training.checkpoints import find_checkpoints, read_state
from sigmascope.lbm.training.distributed import EngineOptimizer
from sigmascope.lbm.training.train import train

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
]


def count_state(prepared: Prepared) -> tuple[int, int]:
    """The trained values for which the optimizer keeps its state."""
    pieces = [each.numel() for each in prepared.optimizer.param_groups[0]["params"]]
    trained = [each.numel() for each in prepared.synchronised.parameters() if each.requires_grad]
    return sum(pieces), sum(trained)


DEEPSPEED = Spreading(
    Path(deepspeed_on_cpus.__file__),
    deepspeed_on_cpus.ENVIRONMENT,
    deepspeed_on_cpus.allow_deepspeed_on_cpus,
    count_state,
)


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_two_engines_train_as_one_process_without(small_run: SmallRun, stage: str) -> None:
    keys = {**WATCHED, "validation_shards": str(small_run.folder / "val-0.tar")}
    one, two = (small_run.folder / name for name in ("one", "two"))
    alone = train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(one)))
    environment = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    main, other = DEEPSPEED.train(small_run, "two", environment, **keys, batch_size=2)
    for name in ("weights", "average", "lora"):
        near(one / f"checkpoint-000004/{name}.safetensors", two / f"checkpoint-000004/{name}.safetensors")
    near(one / "lora.safetensors", two / "lora.safetensors")
    optimizers = [read_state(folder / "checkpoint-000004").progress["optimizer"] for folder in (one, two)]
    assert optimizers[1]["param_groups"] == optimizers[0]["param_groups"]
    for number, expected in optimizers[0]["state"].items():
        assert optimizers[1]["state"][number].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(optimizers[1]["state"][number][name], value, rtol=1e-3, atol=1e-7)
    check_logs(main, other, list(alone.logs))
    for told in (main, other):  # pieces are of one length, which need not divide all
        assert (told.held == told.all) if stage == "0" else (told.all / 2 <= told.held < 0.6 * told.all)
    assert [found.psnr[2] for found in main.validations] == pytest.approx(
        [found.psnr[2] for found in alone.validations], abs=0.01
    )


def test_kill_9_of_both_and_resuming_equals_the_uninterrupted_run(small_run: SmallRun) -> None:
    DEEPSPEED.check_kill_9(small_run)


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
    DEEPSPEED.train(small_run, "there", environment, **keys, batch_size=pair, max_steps=2)
    train(small_run.settings(**keys, batch_size=alone, max_steps=4, save_ckpt_path=str(there)))
    train(small_run.settings(**keys, batch_size=alone, max_steps=2, save_ckpt_path=str(back)))
    DEEPSPEED.train(small_run, "back", environment, **keys, batch_size=pair, max_steps=4)
    for folder in (there, back):
        near(whole / f"{name}.safetensors", folder / f"{name}.safetensors")


def test_bf16_trains_float32_weights_by_autocast(small_run: SmallRun) -> None:
    check_bf16(DEEPSPEED, small_run)


def test_an_optimizer_kept_on_the_cpu_trains_the_same(small_run: SmallRun) -> None:
    keys: dict[str, Any] = {"max_steps": 3, "optimizer": "RMSprop"}
    train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    environment = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    DEEPSPEED.train(small_run, "two", environment, **keys, batch_size=2)
    near(small_run.folder / "one" / "lora.safetensors", small_run.folder / "two" / "lora.safetensors")


@pytest.mark.parametrize("stage", ["0", "2"])
def test_nan_stops_both_engines_and_names_the_layer(small_run: SmallRun, stage: str) -> None:
    settings = small_run.settings(learning_rate=1e30, max_steps=4, save_interval=1)

    environment = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    for ended in DEEPSPEED.run(lambda number: train(settings), small_run.folder, environment):
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
        settings = small_run.settings(**keys, save_ckpt_path=str(small_run.folder / f"with-{number}"))
        train(settings)
        train(settings)

    for number, ended in enumerate(DEEPSPEED.run(work, small_run.folder)):
        assert "ConfigError: accelerate: this process has trained under DeepSpeed before" in ended.errors
        result = small_run.folder / f"with-{number}" / "lora.safetensors"
        near(small_run.folder / "without" / "lora.safetensors", result)


def test_an_infinite_gradient_of_one_process_stops_both_before_the_weights_take_it_up(
    small_run: SmallRun,
) -> None:
    settings = small_run.settings(max_steps=4, save_interval=1)

    def work(number: int) -> None:
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

    for ended in DEEPSPEED.run(work, small_run.folder):
        assert ended.code == 1
        assert "NonFiniteError: step 2: the gradient is not finite" in ended.errors
        assert "AssertionError" not in ended.errors
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]
