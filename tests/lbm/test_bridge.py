import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lbm.bridge import (
    add_bridge_noise,
    bridge_interpolate,
    bridge_noise_std,
    bridge_sigmas,
    bridge_velocity_target,
    euler_step,
    predict_target,
    sample_bridge,
)


def latent(*values: float) -> Tensor:
    """A batch of one-element latents, float64."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1, 1)


def diffusers_scheduler(steps: int) -> FlowMatchEulerDiscreteScheduler:
    """Set up as diffusers' flow-matching pipelines do."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    return scheduler


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [1.0]), (2, [1.0, 0.5]), (4, [1.0, 0.75, 0.5, 0.25]), (5, [1, 0.8, 0.6, 0.4, 0.2])],
)
def test_sigmas_fall_evenly_to_one_nth(steps: int, expected: list[float]) -> None:
    assert bridge_sigmas(steps).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 50])
def test_sigmas_are_the_flow_matching_euler_schedulers(steps: int) -> None:
    theirs = diffusers_scheduler(steps)
    assert theirs.sigmas[:-1].tolist() == pytest.approx(bridge_sigmas(steps).tolist(), abs=1e-6)
    assert theirs.sigmas[-1] == 0


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_is_an_error(steps: int) -> None:
    with pytest.raises(ConfigError, match="num_inference_steps: expected 1 or more"):
        bridge_sigmas(steps)


def test_interpolation_matches_numbers_worked_by_hand() -> None:
    # 0.25·4 + 0.75·(−2) + 0.1·√(0.25·0.75)·3 = −0.5 + 0.3·0.4330127018922193
    x = bridge_interpolate(latent(4.0), latent(-2.0), latent(0.25).flatten(), latent(3.0), 0.1)
    assert x.item() == pytest.approx(-0.5 + 0.3 * 0.4330127018922193, abs=1e-15)


def test_each_sample_has_its_own_sigma() -> None:
    source, target = latent(1.0, 1.0, 1.0), latent(0.0, 0.0, 0.0)
    x = bridge_interpolate(source, target, torch.tensor([0.0, 0.5, 1.0]), torch.zeros_like(source), 0.1)
    assert x.flatten().tolist() == [0.0, 0.5, 1.0]


def test_bridge_is_pinned_at_both_ends() -> None:
    source, target, noise = torch.randn(3, 2, 4, 8, 8, dtype=torch.float64).unbind(0)
    at_source = bridge_interpolate(source, target, torch.tensor(1.0), noise, 0.5)
    at_target = bridge_interpolate(source, target, torch.tensor(0.0), noise, 0.5)
    assert torch.equal(at_source, source)
    assert torch.equal(at_target, target)


def test_noise_of_the_bridge_has_the_stated_spread() -> None:
    zeros = torch.zeros(1, 1, 200, 200, dtype=torch.float64)
    noise = torch.randn(zeros.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = bridge_interpolate(zeros, zeros, torch.tensor(0.2), noise, 0.5)
    assert x.std().item() == pytest.approx(0.5 * math.sqrt(0.16), rel=0.02)
    assert bridge_noise_std(torch.tensor(0.2), 0.5).item() == pytest.approx(0.2)


def test_target_follows_from_a_perfect_prediction() -> None:
    source, target = torch.randn(2, 2, 4, 8, 8, dtype=torch.float64).unbind(0)
    sigma = torch.tensor([0.3, 1.0], dtype=torch.float64)
    x = bridge_interpolate(source, target, sigma, torch.zeros_like(source), 0.0)
    velocity = bridge_velocity_target(source, target)
    torch.testing.assert_close(predict_target(x, velocity, sigma), target, rtol=0, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_perfect_velocity_reaches_the_target_in_any_number_of_steps(steps: int) -> None:
    source, target = torch.randn(2, 2, 4, 8, 8, dtype=torch.float64).unbind(0)
    reached = sample_bridge(lambda x_t, sigma: source - target, source, steps, noise_scale=0.0)
    torch.testing.assert_close(reached, target, rtol=0, atol=1e-14)


def test_euler_steps_are_the_flow_matching_schedulers() -> None:
    steps = 4
    theirs = diffusers_scheduler(steps)
    x_theirs = start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    for timestep in theirs.timesteps:
        velocity = torch.sin(x_theirs) * timestep / 1000
        x_theirs = theirs.step(velocity, timestep, x_theirs, return_dict=False)[0]
    ours = sample_bridge(lambda x_t, sigma: torch.sin(x_t) * sigma.item(), start, steps, noise_scale=0.0)
    torch.testing.assert_close(ours, x_theirs, rtol=1e-5, atol=1e-6)


def test_denoiser_is_asked_at_source_first_and_once_a_step() -> None:
    asked: list[tuple[float, Tensor]] = []

    def denoise(x_t: Tensor, sigma: Tensor) -> Tensor:
        assert sigma.shape == (2,)
        asked.append((sigma[0].item(), x_t))
        return torch.zeros_like(x_t)

    source = torch.randn(2, 4, 8, 8)
    sample_bridge(denoise, source, 4, noise_scale=0.1, generator=torch.Generator().manual_seed(0))
    assert [sigma for sigma, _ in asked] == [1.0, 0.75, 0.5, 0.25]
    assert torch.equal(asked[0][1], source)


def test_noise_comes_between_steps_and_not_after_the_last() -> None:
    still = torch.zeros(1, 1, 100, 100)
    noise_scale = 0.5
    seen: list[float] = []
    sample_bridge(
        lambda x_t, sigma: torch.zeros_like(x_t),
        still,
        2,
        noise_scale,
        torch.Generator().manual_seed(0),
        on_step=lambda done, total, x_t: seen.append(x_t.std().item()),
    )
    # After the first step σ = 0.5: 0.5·√0.25 = 0.25; the second adds nothing.
    assert seen == pytest.approx([0.25, 0.25], rel=0.02)
    assert seen[0] == seen[1]


def test_same_seed_same_walk() -> None:
    def walk(seed: int) -> Tensor:
        source = torch.ones(1, 4, 8, 8)
        return sample_bridge(lambda x, s: x, source, 3, 0.1, torch.Generator().manual_seed(seed))

    assert torch.equal(walk(7), walk(7))
    assert not torch.equal(walk(7), walk(8))


def test_steps_are_reported() -> None:
    seen: list[tuple[int, int]] = []
    sample_bridge(
        lambda x, s: x,
        torch.ones(1, 1, 2, 2),
        3,
        0.0,
        None,
        lambda done, total, x: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_single_steps_match_numbers_worked_by_hand() -> None:
    assert euler_step(latent(2.0), latent(3.0), 0.75, 0.5).item() == pytest.approx(2.0 - 0.25 * 3.0)
    assert add_bridge_noise(latent(2.0), 0.5, latent(4.0), 0.1).item() == pytest.approx(2.0 + 0.1 * 0.5 * 4.0)


def test_low_precision_latents_keep_sigma_exact() -> None:
    sigmas: list[Tensor] = []

    def denoise(x_t: Tensor, sigma: Tensor) -> Tensor:
        sigmas.append(sigma)
        return x_t

    result = sample_bridge(denoise, torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), 3, 0.0)
    assert result.dtype == torch.bfloat16
    assert [sigma.item() for sigma in sigmas] == pytest.approx([1.0, 2 / 3, 1 / 3], abs=1e-6)
