from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.lbm.training.tiny_run import tiny_settings

from sigmascope.lbm.training.objective import draw_bridge, draw_offset, generators_for

SAMPLES = 2000
SIGNIFICANCE = 0.01


def sigmas(**keys: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of an epoch's samples, each from its own generator."""
    generators = generators_for(11, 0, range(SAMPLES), "bridge")
    drawn, _ = draw_bridge(generators, (1, 1, 1), tiny_settings(**keys).lbm)
    return drawn.double().numpy()


def test_uniform_takes_every_timestep_alike() -> None:
    timesteps = np.rint(sigmas(timestep_sampling="uniform") * 1000)
    assert timesteps.min() >= 1
    assert timesteps.max() <= 1000
    counts, _ = np.histogram(timesteps, bins=np.arange(0.5, 1001, 50))
    assert stats.chisquare(counts).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5)])
def test_log_normal_has_normal_logits(mean: float, std: float) -> None:
    drawn = 1 - sigmas(timestep_sampling="log_normal", logit_mean=mean, logit_std=std)
    edges = np.arange(0.05, 1.0, 0.05)
    cumulative = stats.norm.cdf((np.log(edges / (1 - edges)) - mean) / std)
    expected = np.diff([0.0, *cumulative, 1.0]) * SAMPLES
    # 1 - σ is on the grid of 1/1000, rounded down: it is below an edge exactly where the value before was.
    counts = np.diff([0, *(np.sum(drawn < edge - 1e-6) for edge in edges), SAMPLES])
    often = expected > 20
    often[0] = often[-1] = True
    starts = np.flatnonzero(often)  # rare values count with the frequent ones before them
    result = stats.chisquare(np.add.reduceat(counts, starts), np.add.reduceat(expected, starts))
    assert result.pvalue > SIGNIFICANCE


def test_custom_timesteps_come_with_their_probabilities() -> None:
    drawn = sigmas(selected_timesteps=[250, 500, 750, 1000], prob=[0.1, 0.2, 0.3, 0.4])
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert stats.chisquare(counts, np.array([0.1, 0.2, 0.3, 0.4]) * SAMPLES).pvalue > SIGNIFICANCE


def test_noise_is_standard_normal_and_each_samples_own() -> None:
    _, noise = draw_bridge(generators_for(0, 0, range(400), "bridge"), (4, 4, 4), tiny_settings().lbm)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > SIGNIFICANCE
    across = np.corrcoef(noise.flatten(1).numpy())
    off_diagonal = across[~np.eye(len(across), dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.7
    assert off_diagonal.std() == pytest.approx(1 / np.sqrt(64), rel=0.05)


def test_streams_differ_by_seed_epoch_number_and_purpose() -> None:
    streams = [
        *generators_for(0, 0, [0], "bridge"),
        *generators_for(1, 0, [0], "bridge"),
        *generators_for(0, 1, [0], "bridge"),
        *generators_for(0, 0, [1], "bridge"),
        *generators_for(0, 0, [0], "crop"),
    ]
    assert len({float(torch.rand((), generator=one)) for one in streams}) == len(streams)


def test_a_crop_begins_anywhere_alike() -> None:
    offsets = [draw_offset(one, 20, 11) for one in generators_for(0, 0, range(3000), "crop")]
    counts = np.bincount(offsets, minlength=10)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > SIGNIFICANCE
    (generator,) = generators_for(0, 0, [0], "crop")
    assert draw_offset(generator, 8, 8) == 0
