"""Trainings whose denoiser FSDP spreads over two processes, against those of one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from tests.lbm.training import fsdp_on_cpus
from tests.lbm.training.distributed.test_planned_steps import write_pairs
from tests.lbm.training.small_run import SmallRun, near
from tests.lbm.training.two_trainings import FULL, WATCHED, Spreading, check_bf16, check_logs

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.accelerate import Prepared, check_spreading
from sigmascope.lbm.training.checkpoints import find_checkpoints, read_state
from sigmascope.lbm.training.distributed import local_tensor
from sigmascope.lbm.training.train import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")


def count_weights(prepared: Prepared) -> tuple[int, int]:
    """The denoiser's."""
    parameters = list(prepared.synchronised.parameters())
    return sum(local_tensor(each).numel() for each in parameters), sum(map(torch.numel, parameters))


FSDP = Spreading(
    Path(fsdp_on_cpus.__file__), fsdp_on_cpus.ENVIRONMENT, fsdp_on_cpus.allow_fsdp_on_cpus, count_weights
)


@pytest.mark.slow
def test_two_processes_with_parts_of_the_model_train_as_one_with_all_of_it(small_run: SmallRun) -> None:
    keys = {**WATCHED, "validation_shards": str(small_run.folder / "val-0.tar")}
    one, two = (small_run.folder / name for name in ("one", "two"))
    alone = train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(one)))
    main, other = FSDP.train(small_run, "two", **keys, batch_size=2)
    for name in ("weights", "average", "lora"):
        near(one / f"checkpoint-000004/{name}.safetensors", two / f"checkpoint-000004/{name}.safetensors")
    near(one / "lora.safetensors", two / "lora.safetensors")
    moments = [
        read_state(folder / "checkpoint-000004").progress["optimizer"]["state"] for folder in (one, two)
    ]
    for number, expected in moments[0].items():
        for name, value in expected.items():
            torch.testing.assert_close(moments[1][number][name], value, rtol=1e-3, atol=1e-7)
    check_logs(main, other, list(alone.logs))
    assert [found.psnr[2] for found in main.validations] == pytest.approx(
        [found.psnr[2] for found in alone.validations], abs=0.01
    )
    assert other.validations == []
    assert main.held + other.held == main.all == other.all
    assert max(main.held, other.held) < 0.6 * main.all


@pytest.mark.slow
def test_kill_9_of_both_and_resuming_equals_the_uninterrupted_run(small_run: SmallRun) -> None:
    FSDP.check_kill_9(small_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(
            {
                "optimizer": "NAdam",
                "ema_decay": 0.5,
                "gradient_accumulation_steps": 2,
                "gradient_checkpointing": True,
            },
            id="lora",
        ),
        pytest.param(
            {**FULL, "pixel_loss_weight": 1.0, "pixel_loss_type": "l1", "pixel_crop": 16}, id="full"
        ),
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
    FSDP.train(small_run, "there", **keys, batch_size=pair, max_steps=1)
    train(small_run.settings(**keys, batch_size=alone, max_steps=2, save_ckpt_path=str(there)))
    train(small_run.settings(**keys, batch_size=alone, max_steps=1, save_ckpt_path=str(back)))
    FSDP.train(small_run, "back", **keys, batch_size=pair, max_steps=2)
    for folder in (there, back):
        near(whole / f"{name}.safetensors", folder / f"{name}.safetensors")


@pytest.mark.slow
def test_a_process_without_a_sample_keeps_step_with_the_other(small_run: SmallRun) -> None:
    """9 and 6 pairs of two aspects, in batches of 4: with one that cannot be decoded, some have a single sample."""
    shard = small_run.folder / "aspects.tar"
    write_pairs(shard, [9, 6], broken=1)
    keys: dict[str, Any] = {
        "train_shards": str(shard),
        "image_size": ...,
        "max_epochs": 1,
        "max_grad_norm": None,
        "gradient_accumulation_steps": 2,
        "pixel_loss_weight": 1.0,
        "pixel_loss_type": "l1",
        "pixel_crop": 16,
    }
    alone = train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    main, _ = FSDP.train(small_run, "two", **keys, batch_size=2)
    assert alone.step == main.logs[-1].step == 3
    for name in ("loss", "latent", "pixel"):
        expected = [getattr(log, name) for log in alone.logs]
        assert [getattr(log, name) for log in main.logs] == pytest.approx(expected, rel=1e-4)
    near(small_run.folder / "one" / "lora.safetensors", small_run.folder / "two" / "lora.safetensors")


@pytest.mark.slow
def test_bf16_over_a_base_in_parts(small_run: SmallRun) -> None:
    check_bf16(FSDP, small_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "false"},
        {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BasicTransformerBlock", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
    ],
    ids=["whole", "wrapped"],
)
def test_other_configurations_of_the_launcher_train_the_same(
    small_run: SmallRun, environment: dict[str, str]
) -> None:
    shards = {"validation_shards": str(small_run.folder / "val-0.tar"), "validation_interval": 1}
    keys: dict[str, Any] = {"max_steps": 3, "ema_decay": 0.3, "max_grad_norm": None, **shards}
    train(small_run.settings(**keys, batch_size=4, save_ckpt_path=str(small_run.folder / "one")))
    FSDP.train(small_run, "two", environment, **keys, batch_size=2)
    near(small_run.folder / "one" / "lora.safetensors", small_run.folder / "two" / "lora.safetensors")


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_the_denoiser_is_an_error(small_run: SmallRun) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: accelerate: FSDP cannot wrap .*Nothing"):
        FSDP.train(small_run, "two", {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Nothing"}, max_steps=1)


@pytest.mark.slow
def test_nan_stops_all_parts_and_names_the_layer(small_run: SmallRun) -> None:
    settings = small_run.settings(learning_rate=1e30, max_steps=4, save_interval=1)

    for ended in FSDP.run(lambda number: train(settings), small_run.folder):
        assert ended.code == 1
        assert "NonFiniteError: step 2: the loss is nan, first in" in ended.errors
        assert "checkpoint-000001 is intact" in ended.errors
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]


@pytest.mark.parametrize(
    ("version", "keys", "message"),
    [
        (1, {}, r"FSDP 1 .* --fsdp_version 2"),
        (2, {"device": "auto", "mixed_precision": "fp16"}, "fp16 does not work with FSDP"),
        (2, {"optimizer": "adafactor"}, r"optimizer: .* FSDP shards.* AdamW"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    small_run: SmallRun, version: int, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_spreading(DistributedType.FSDP, small_run.settings(**keys), fsdp2=version == 2)
