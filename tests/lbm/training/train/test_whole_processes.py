"""Trainings as processes of their own: killed, stopped, short of disk, several at once."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.lbm.training.small_run import SmallRun, same, weights_at
from tests.lbm.training.two_processes import start, wait_for_checkpoint

from sigmascope.cli import main
from sigmascope.lbm.training.checkpoints import find_checkpoints, read_state
from sigmascope.lbm.training.train import train

pytestmark = pytest.mark.slow

TIMEOUT = 240


def command(run: SmallRun, name: str = "out", **keys: Any) -> list[str]:
    """The command line of a training into the folder `name`."""
    path = run.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run.keys(save_ckpt_path=str(run.folder / name), **keys)), encoding="utf-8")
    return ["lbm", "train", "--path_config", str(path)]


def as_command(arguments: list[str]) -> Callable[[int], None]:
    """The command line as a fork's work: all of the program but Python's start."""

    def work(number: int) -> None:
        sys.argv = ["sigmascope", *arguments]
        main()

    return work


def test_kill_9_in_the_middle_and_resuming_equals_the_uninterrupted_run(small_run: SmallRun) -> None:
    keys = {"max_steps": 28, "save_interval": 4, "ema_decay": 0.9, "batch_size": 1}
    told = small_run.folder / "told.txt"

    def finish(name: str) -> str:
        process = start(as_command([*command(small_run, name, **keys), "--json"]), told)
        process.join(TIMEOUT)
        output = told.read_text()
        assert process.exitcode == 0, output
        return output

    finish("whole")
    for step in (4, 12):
        process = start(as_command(command(small_run, "out", **keys)), told)
        wait_for_checkpoint(small_run.out, step, [process])
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    resumed = re.search(r'"resumed_from": (\d+)', finish("out"))
    assert resumed is not None
    assert int(resumed[1]) >= 12
    whole = small_run.folder / "whole"
    assert same(weights_at(whole, 28), weights_at(small_run.out, 28))
    assert same(load_file(whole / "lora.safetensors"), load_file(small_run.out / "lora.safetensors"))
    first, second = (read_state(folder / "checkpoint-000028") for folder in (whole, small_run.out))
    for name in ("state.safetensors", "average.safetensors"):
        paths = [folder / "checkpoint-000028" / name for folder in (whole, small_run.out)]
        assert same(load_file(paths[0]), load_file(paths[1]))
    assert first.processes[0]["position"] == second.processes[0]["position"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_the_shells_code(small_run: SmallRun, number: int, code: int) -> None:
    told = small_run.folder / "told.txt"
    process = start(as_command(command(small_run, max_steps=100_000, save_interval=2)), told)
    wait_for_checkpoint(small_run.out, 2, [process])
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(TIMEOUT)
    assert process.exitcode == code, told.read_text()
    output = told.read_text()
    assert "Stopped by" in output
    newest = find_checkpoints(small_run.out)[0]
    assert str(newest) in output
    assert read_state(newest).step == int(newest.name[-6:])
    assert not list(small_run.out.glob(".*"))


def test_a_limit_on_file_size_stands_for_a_full_disk(small_run: SmallRun) -> None:
    """The system refuses to write on, in the middle of the second checkpoint's files."""
    train(small_run.settings(max_steps=1, save_interval=1))
    before = weights_at(small_run.out, 1)
    arguments, told = command(small_run, max_steps=2, save_interval=1), small_run.folder / "told.txt"

    def work(number: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        as_command(arguments)(number)

    process = start(work, told)
    process.join(TIMEOUT)
    assert process.exitcode == 1
    assert "checkpoint-000002: the checkpoint cannot be written" in told.read_text().replace("\n", " ")
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]
    assert same(before, weights_at(small_run.out, 1))


def test_two_processes_give_the_gradient_of_the_doubled_batch(small_run: SmallRun) -> None:
    """Plain SGD at rate 1 subtracts the gradient, so that equal weights after it are equal gradients.

    Ten samples: the third step has one sample in each process, and the epoch ends for both. By torchrun, as users
    start it.
    """
    plain = {"optimizer": "SGD", "learning_rate": 1.0, "max_grad_norm": None, "max_steps": 5}
    one, two = (small_run.folder / name for name in ("one", "two"))
    train(small_run.settings(**plain, batch_size=4, save_ckpt_path=str(one)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch += ["-m", "sigmascope", *command(small_run, "two", batch_size=2, **plain)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    both = subprocess.run(
        launch, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert both.returncode == 0, both.stderr
    for name, expected in weights_at(one, 5).items():
        torch.testing.assert_close(weights_at(two, 5)[name], expected, rtol=1e-4, atol=1e-6)
    assert len(read_state(two / "checkpoint-000005").processes) == 2
