"""Trainings as processes of their own: killed, stopped, short of disk, several at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.lbm.training.small_run import SmallRun, same, weights_at
from tests.lbm.training.two_processes import run_two

from sigmascope.lbm.training.checkpoints import find_checkpoints, read_state
from sigmascope.lbm.training.train import train

pytestmark = pytest.mark.slow

TIMEOUT = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SIGMASCOPE = [sys.executable, "-m", "sigmascope"]


def command(run: SmallRun, name: str = "out", **keys: Any) -> list[str]:
    """The command line of a training into the folder `name`."""
    path = run.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run.keys(save_ckpt_path=str(run.folder / name), **keys)), encoding="utf-8")
    return ["lbm", "train", "--path_config", str(path)]


def finished(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def started(arguments: list[str], out: Path, step: int) -> subprocess.Popen[str]:
    """Start a training and wait until it has a checkpoint of that step or a later one."""
    process = subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + TIMEOUT
    while not any(int(path.name[-6:]) >= step for path in find_checkpoints(out)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)
    return process


def test_kill_9_in_the_middle_and_resuming_equals_the_uninterrupted_run(small_run: SmallRun) -> None:
    keys = {"max_steps": 40, "save_interval": 4, "ema_decay": 0.9, "batch_size": 1}
    assert finished([*SIGMASCOPE, *command(small_run, "whole", **keys)]).returncode == 0
    train = [*SIGMASCOPE, *command(small_run, "out", **keys)]
    for step in (4, 16):
        process = started(train, small_run.out, step)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
    done = finished([*train, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_from"] >= 16
    whole = small_run.folder / "whole"
    assert same(weights_at(whole, 40), weights_at(small_run.out, 40))
    assert same(load_file(whole / "lora.safetensors"), load_file(small_run.out / "lora.safetensors"))
    first, second = (read_state(folder / "checkpoint-000040") for folder in (whole, small_run.out))
    for name in ("state.safetensors", "average.safetensors"):
        paths = [folder / "checkpoint-000040" / name for folder in (whole, small_run.out)]
        assert same(load_file(paths[0]), load_file(paths[1]))
    assert first.processes[0]["random"]["python"] == second.processes[0]["random"]["python"]
    assert first.processes[0]["position"] == second.processes[0]["position"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_the_shells_code(small_run: SmallRun, number: int, code: int) -> None:
    train = [*SIGMASCOPE, *command(small_run, max_steps=100_000, save_interval=2)]
    process = started(train, small_run.out, 2)
    process.send_signal(number)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, errors
    assert "Stopped by" in output
    newest = find_checkpoints(small_run.out)[0]
    assert str(newest) in output
    assert read_state(newest).step == int(newest.name[-6:])
    assert not list(small_run.out.glob(".*"))


def test_a_limit_on_file_size_stands_for_a_full_disk(small_run: SmallRun) -> None:
    """The system refuses to write on, in the middle of the second checkpoint's files."""
    keys = command(small_run, max_steps=1, save_interval=1)
    assert finished([*SIGMASCOPE, *keys]).returncode == 0
    before = weights_at(small_run.out, 1)
    train = " ".join([*SIGMASCOPE, *command(small_run, max_steps=2, save_interval=1)])
    done = finished(["bash", "-c", f"ulimit -f 4; exec {train}"])
    assert done.returncode == 1
    assert "checkpoint-000002: the checkpoint cannot be written" in done.stderr.replace("\n", " ")
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000001"]
    assert same(before, weights_at(small_run.out, 1))


def test_two_processes_give_the_gradient_of_the_doubled_batch(small_run: SmallRun) -> None:
    """Plain SGD at rate 1 subtracts the gradient, so that equal weights after it are equal gradients."""
    plain = {"optimizer": "SGD", "learning_rate": 1.0, "max_grad_norm": None, "max_steps": 3}
    one, two = (small_run.folder / name for name in ("one", "two"))
    train(small_run.settings(**plain, batch_size=4, save_ckpt_path=str(one)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch += ["-m", "sigmascope"]
    both = finished([*launch, *command(small_run, "two", batch_size=2, **plain)])
    assert both.returncode == 0, both.stderr
    for name, expected in weights_at(one, 3).items():
        torch.testing.assert_close(weights_at(two, 3)[name], expected, rtol=1e-4, atol=1e-6)
    assert len(read_state(two / "checkpoint-000003").processes) == 2
    # 10 samples: the third group has 1 sample in each process, and the epoch ends for both
    longer = {**plain, "max_steps": 5}
    train(small_run.settings(**longer, batch_size=4, save_ckpt_path=str(one)))
    settings = small_run.settings(**longer, batch_size=2, save_ckpt_path=str(two))
    for ended in run_two(lambda number: train(settings), small_run.folder):
        assert ended.code == 0, ended.errors
    for name, expected in weights_at(one, 5).items():
        torch.testing.assert_close(weights_at(two, 5)[name], expected, rtol=1e-4, atol=1e-6)
