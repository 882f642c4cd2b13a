import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from scipy import stats
from tests.lbm.training.tiny_run import FOUR_TIMESTEPS

from sigmascope.lbm.config import parse_config
from sigmascope.lbm.training.objective import differences, latent_mask, sample_means, sample_sigmas

DRAWS = 20_000


def draw(data: dict[str, Any]) -> torch.Tensor:
    return sample_sigmas(DRAWS, parse_config(data), torch.Generator().manual_seed(0))


def test_uniform_covers_the_schedule() -> None:
    sigmas = draw({"timestep_sampling": "uniform"}).double()
    assert sigmas.min() == pytest.approx(0.001)
    assert sigmas.max() == 1.0
    assert stats.kstest(sigmas.numpy(), "uniform").statistic < 0.01


@pytest.mark.parametrize(("mean", "expected"), [(-1.0, 0.699), (0.0, 0.502), (1.0, 0.305)])
def test_log_normal_picks_from_a_descending_table(mean: float, expected: float) -> None:
    ours = draw({"timestep_sampling": "log_normal", "logit_mean": mean})
    assert ours.mean().item() == pytest.approx(expected, abs=0.005)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
    normal = torch.normal(mean, 1.0, (DRAWS,), generator=torch.Generator().manual_seed(0))
    theirs = scheduler.sigmas[(torch.sigmoid(normal) * 1000).long()]
    torch.testing.assert_close(ours, theirs)


def test_log_normal_has_the_stated_logits() -> None:
    sigmas = draw({"timestep_sampling": "log_normal", "logit_mean": 0.7, "logit_std": 1.3}).double()
    logits = torch.logit((1 - sigmas).clamp(1e-3, 0.9995))
    assert logits.median().item() == pytest.approx(0.7, abs=0.05)
    low, high = logits.quantile(torch.tensor([0.1587, 0.8413], dtype=torch.float64)).tolist()
    assert (high - low) / 2 == pytest.approx(1.3, rel=0.03)


def test_custom_timesteps_come_with_their_probabilities() -> None:
    config = {**FOUR_TIMESTEPS, "selected_timesteps": [250, 500, 1000], "prob": [0.2, 0.3, 0.5]}
    sigmas, counts = np.unique(draw(config).numpy(), return_counts=True)
    assert sigmas.tolist() == [0.25, 0.5, 1.0]
    assert (counts / DRAWS).tolist() == pytest.approx([0.2, 0.3, 0.5], abs=0.015)


@pytest.mark.parametrize("sampling", ["uniform", "log_normal", "custom_timesteps"])
def test_sigma_is_never_zero_and_repeats_with_the_seed(sampling: str) -> None:
    config = {**FOUR_TIMESTEPS, "timestep_sampling": sampling, "logit_std": 10.0}
    first = draw(config)
    assert first.shape == (DRAWS,)
    assert first.min() > 0
    assert first.max() <= 1
    assert torch.equal(first, draw(config))


def test_custom_timesteps_are_drawn_alone() -> None:
    config = parse_config(FOUR_TIMESTEPS)
    assert set(sample_sigmas(200, config).tolist()) == {0.25, 0.5, 0.75, 1.0}


def test_losses_are_the_means_worked_by_hand() -> None:
    prediction, target = torch.tensor([1.0, 2.0, 5.0, 0.0]).reshape(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    assert sample_means(differences(prediction, target, "l1")).item() == 2.0
    assert sample_means(differences(prediction, target, "l2")).item() == 7.5


def test_a_masked_loss_is_a_mean_of_all_or_of_the_valid_elements() -> None:
    prediction = torch.tensor([1.0, 2.0, 5.0, 0.0]).reshape(1, 1, 2, 2).repeat(1, 4, 1, 1)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 2, 2)
    target = torch.zeros_like(prediction)
    assert sample_means(differences(prediction, target, "l2"), mask).item() == 1.25  # (1 + 4 + 0 + 0) / 4
    assert sample_means(differences(prediction, target, "l1"), mask).item() == 0.75
    assert sample_means(differences(prediction, target, "l2"), mask, "valid").item() == 2.5  # (1 + 4) / 2
    assert sample_means(differences(prediction, target, "l1"), mask, "valid").item() == 1.5


def test_all_masked_gives_zero_and_not_nan() -> None:
    prediction = torch.ones(1, 4, 2, 2, requires_grad=True)
    loss = sample_means(differences(prediction, torch.zeros(1, 4, 2, 2), "l2"), torch.zeros(1, 1, 2, 2))
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert not math.isnan(prediction.grad.sum().item() if prediction.grad is not None else math.nan)


def test_latent_element_is_valid_only_if_all_its_pixels_are() -> None:
    mask = torch.ones(1, 1, 16, 16)
    mask[0, 0, 9, 3] = 0.0
    expected = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert torch.equal(latent_mask(mask, 2, 2)[0, 0], expected)
