"""The loop that trained the pocket model: stopping and going on must not change the result."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

LOOP = Path(__file__).parents[2] / "scripts" / "pocket" / "loop.py"


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pocket_loop", LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pocket_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def trained(loop: ModuleType, path: Path, *, stop_at: int | None = None) -> dict[str, Tensor]:
    """Train a small model for ten steps; with `stop_at`, fail there once and go on with a new model."""

    def run(fail: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

        def loss_at(step: int, generator: torch.Generator) -> Tensor:
            if fail and step == stop_at:
                raise KeyboardInterrupt
            x = torch.randn(8, 3, generator=generator)
            loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
            return loss

        plan = loop.Plan("test", steps=10, learning_rate=0.05, seed=1, warmup_steps=2, save_every=3)
        loop.train(plan, model, loss_at, path)
        return model

    if stop_at is not None:
        with pytest.raises(KeyboardInterrupt):
            run(fail=True)
    return dict(run(fail=False).state_dict())


@pytest.mark.parametrize("stop_at", [1, 4, 9])
def test_a_stopped_training_goes_on_to_the_same_weights(
    loop: ModuleType, tmp_path: Path, stop_at: int
) -> None:
    whole = trained(loop, tmp_path / "whole.pt")
    resumed = trained(loop, tmp_path / "resumed.pt", stop_at=stop_at)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_the_learning_rate_rises_then_falls_along_a_cosine_to_zero(loop: ModuleType) -> None:
    plan = loop.Plan("test", steps=110, learning_rate=1.0, seed=0, warmup_steps=10)
    assert [plan.learning_rate_at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    # Half-way between step 10 and step 110 the cosine is at one half, and at the end at zero.
    assert [plan.learning_rate_at(step) for step in (10, 60, 110)] == pytest.approx([1.0, 0.5, 0.0])


def test_a_loss_that_is_no_number_stops_with_the_step(loop: ModuleType, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    plan = loop.Plan("test", steps=3, learning_rate=0.1, seed=0)
    with pytest.raises(FloatingPointError, match="step 0 is nan"):
        loop.train(plan, model, lambda step, generator: model.weight.sum() * torch.nan, tmp_path / "x.pt")


def test_a_state_of_another_plan_is_not_gone_on_with(loop: ModuleType, tmp_path: Path) -> None:
    trained(loop, tmp_path / "x.pt")
    other = loop.Plan("test", steps=20, learning_rate=0.05, seed=1)
    with pytest.raises(SystemExit, match="another plan"):
        loop.train(other, nn.Linear(1, 1), lambda step, generator: torch.zeros(()), tmp_path / "x.pt")
