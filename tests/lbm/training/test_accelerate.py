"""What the launcher asks for is what trains, or it is an error: never another way, and never each process alone."""

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from tests.lbm.training import fsdp_on_cpus
from tests.lbm.training.small_run import SmallRun
from tests.lbm.training.two_processes import run_two

from sigmascope.errors import ConfigError
from sigmascope.lbm.training import accelerate
from sigmascope.lbm.training.accelerate import accelerated, check_spreading
from sigmascope.lbm.training.checkpoints import read_state
from sigmascope.lbm.training.session import make_session
from sigmascope.lbm.training.train import load_base, train
from sigmascope.progress import no_progress

FORKED = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")
NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=NO_GPU)])
@FORKED
def test_two_processes_that_fsdp_cannot_spread_over_are_refused(small_run: SmallRun, device: str) -> None:
    settings = small_run.settings(device=device, max_steps=1)
    for ended in run_two(lambda number: train(settings), small_run.folder, fsdp_on_cpus.ENVIRONMENT):
        assert ended.code == 1
        assert "ConfigError: device: Accelerate has no FSDP on cpu" in ended.errors
        assert "launch without --use_fsdp" in ended.errors
    assert not list(small_run.folder.glob("out/checkpoint-*"))


@pytest.mark.slow
@NO_GPU
@FORKED
def test_auto_without_a_gpu_is_the_cpu_of_all_processes(small_run: SmallRun) -> None:
    settings = small_run.settings(device="auto", max_steps=1)
    for ended in run_two(lambda number: train(settings), small_run.folder):
        assert ended.code == 0, ended.errors
    assert len(read_state(small_run.out / "checkpoint-000001").processes) == 2


@FORKED
def test_the_process_group_dies_after_what_could_not_wait_for_its_threads(small_run: SmallRun) -> None:
    """The reducer of DDP holds Python's lock while it waits for gloo's threads, which may want it."""

    def work(number: int) -> None:
        settings = small_run.settings(device="cpu", max_steps=1)
        with accelerated(settings) as accelerator:
            model = load_base(settings, accelerator, no_progress)
            session = make_session(settings, accelerator, model)
            ddp: Any = session.stepper.prepared.module
            died: list[str] = []
            watched = [
                weakref.ref(ddp.process_group, lambda _: died.append("group")),
                weakref.ref(ddp.reducer, lambda _: died.append("reducer")),
            ]
            accelerator.end_training()
        del session, ddp, accelerator
        gc.collect()
        assert died == ["reducer", "group"], (died, watched)

    for ended in run_two(work, small_run.folder):
        assert ended.code == 0, ended.errors


def test_processes_that_would_train_alone_are_refused(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Accelerate leaves them on Apple's GPU, over which it has no connection: each is the only one it knows."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "resolve_device", lambda name, flag: torch.device("mps"))
    with (
        pytest.raises(ConfigError, match=r"device: .* would not connect the 2 processes .*torchrun"),
        accelerated(small_run.settings(device="auto")),
    ):
        pass


def test_megatron_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(ConfigError, match=r"Megatron-LM .* --use_fsdp --fsdp_version 2"):
        check_spreading(DistributedType.MEGATRON_LM, small_run.settings(), fsdp2=False)
