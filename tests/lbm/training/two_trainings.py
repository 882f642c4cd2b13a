"""One training in two processes, in a way that Accelerate keeps for accelerators, and what both tell of it."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.lbm.training.small_run import SmallRun, same, weights_at
from tests.lbm.training.two_processes import Ended, run_two, start_two, wait_for_checkpoint

from sigmascope.lbm.training import session
from sigmascope.lbm.training.accelerate import Prepared, prepare_step
from sigmascope.lbm.training.metrics import StepLog, Validation
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.train import train

TIMEOUT = 240
FULL: Final[dict[str, Any]] = {
    "rank": ...,
    "trainable_lora_modules": ...,
    "full_finetune": True,
    "learning_rate": 1e-3,
}
"""Keys of a training of every weight."""
WATCHED: Final[dict[str, Any]] = {
    "ema_decay": 0.5,
    "lr_scheduler": "linear",
    "warmup_steps": 1,
    "max_steps": 4,
    "max_grad_norm": 0.01,
    "validation_interval": 1,
    "num_steps": [2],
}
"""A schedule, clipping, an average, and pictures of it after each step, which must not disturb the next."""


class Told(NamedTuple):
    """What one process's report says, and how many values it held of how many."""

    logs: list[StepLog]
    validations: list[Validation]
    held: int
    all: int


@dataclass(frozen=True)
class Spreading:
    """A way to spread a training over processes.

    Attributes:
        script: The command line, in which it is allowed on CPUs.
        environment: As the launcher sets it.
        allow: Allows it on CPUs in the process that calls.
        count: The values of what is spread that a prepared training holds here, and in all processes.
    """

    script: Path
    environment: Mapping[str, str]
    allow: Callable[[], None]
    count: Callable[[Prepared], tuple[int, int]]

    def run(
        self,
        work: Callable[[int], object],
        folder: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Ended]:
        """Call `work` in two processes that are allowed it; how they ended."""

        def allowed(number: int) -> None:
            self.allow()
            work(number)

        return run_two(allowed, folder, {**self.environment, **environment})

    def train(
        self, run: SmallRun, name: str, environment: Mapping[str, str] = MappingProxyType({}), **keys: Any
    ) -> list[Told]:
        """Train into the folder `name`; what both processes tell."""
        settings = run.settings(save_ckpt_path=str(run.folder / name), **keys)

        def work(number: int) -> None:
            (run.folder / f"{name}-{number}.pickle").write_bytes(pickle.dumps(self._told(settings)))

        for ended in self.run(work, run.folder, environment):
            assert ended.code == 0, ended.errors
        return [
            Told(*pickle.loads((run.folder / f"{name}-{number}.pickle").read_bytes())) for number in range(2)
        ]

    def check_kill_9(self, run: SmallRun) -> None:
        """Train without a stop, and anew with both processes killed in the middle; the files must be equal."""
        keys: dict[str, Any] = {"max_steps": 24, "save_interval": 3, "ema_decay": 0.9, "batch_size": 1}
        self.train(run, "whole", **keys)
        settings = run.settings(**keys)

        def work(number: int) -> None:
            self.allow()
            train(settings)

        processes, _ = start_two(work, run.folder, dict(self.environment))
        wait_for_checkpoint(run.out, 6, processes)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        done = subprocess.run(
            [*self._launch(run, "out", **keys), "--json"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert 6 <= json.loads(done.stdout)["resumed_from"] < 24
        for name in ("weights", "average", "lora"):
            file = f"checkpoint-000024/{name}.safetensors"
            assert same(load_file(run.folder / "whole" / file), load_file(run.out / file))

    def _told(self, settings: TrainSettings) -> tuple[object, ...]:
        counts: list[int] = []

        def prepare(*arguments: Any) -> Prepared:
            prepared = prepare_step(*arguments)
            counts.extend(self.count(prepared))
            return prepared

        pytest.MonkeyPatch().setattr(session, "prepare_step", prepare)  # in a fork, which ends with it
        report = train(settings)
        return (list(report.logs), list(report.validations), *counts)

    def _launch(self, run: SmallRun, name: str, **keys: Any) -> list[str]:
        """The command line of such a training, by torchrun."""
        path = run.folder / f"{name}.yaml"
        text = yaml.safe_dump(run.keys(save_ckpt_path=str(run.folder / name), **keys))
        path.write_text(text, encoding="utf-8")
        runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return [*runner, str(self.script), "lbm", "train", "--path_config", str(path)]


def check_logs(main: Told, other: Told, alone: list[StepLog]) -> None:
    """Check that both processes saw the losses and gradients of a training alone, which clipped some of them."""
    for logs in (main.logs, other.logs):
        assert [log.loss for log in logs] == pytest.approx([log.loss for log in alone], rel=1e-4)
        norms = [log.gradient_norm for log in logs]
        assert norms == pytest.approx([log.gradient_norm for log in alone], rel=1e-3)
        assert [log.learning_rate for log in logs] == [log.learning_rate for log in alone]
    assert max(log.gradient_norm or 0 for log in alone) > WATCHED["max_grad_norm"]


def check_bf16(spreading: Spreading, run: SmallRun) -> None:
    """In bfloat16 two processes train float32 weights as one does, but for rounding."""
    sgd = {"optimizer": "SGD", "learning_rate": 1.0, "max_grad_norm": None}
    keys: dict[str, Any] = {"mixed_precision": "bf16", "max_steps": 2, **sgd}
    train(run.settings(**keys, batch_size=4, save_ckpt_path=str(run.folder / "one")))
    spreading.train(run, "two", **keys, batch_size=2)
    one, two = (weights_at(run.folder / name, 2) for name in ("one", "two"))
    assert {weight.dtype for weight in two.values()} == {torch.float32}
    ups = [
        name for name in one if name.endswith("lora_up.weight")
    ]  # zero at the start: all of it is gradient
    assert ups
    for name in ups:
        assert (two[name] - one[name]).norm() < 0.02 * one[name].norm()
        assert one[name].norm() > 0
