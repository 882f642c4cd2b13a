"""Structural similarity against scikit-image's."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from sigmascope.lbm.images import _blurred, ssim


@pytest.mark.parametrize("size", [(40, 56), (11, 64)])
def test_it_is_that_of_wang_and_others(size: tuple[int, int]) -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
    noise = generator.integers(-40, 40, truth.shape)
    pixels = np.clip(truth.astype(np.int64) + noise, 0, 255).astype(np.uint8)
    expected = metrics.structural_similarity(
        pixels, truth, channel_axis=2, gaussian_weights=True, use_sample_covariance=False, data_range=255
    )
    assert ssim(pixels, truth) == pytest.approx(expected, abs=1e-6)


def test_a_picture_is_like_itself_however_small() -> None:
    for side in (4, 30):
        same = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
        assert ssim(same, same) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [(1, 1), (3, 40), (7, 4), (64, 48)])
def test_the_gaussian_is_scipys_at_every_edge(size: tuple[int, int]) -> None:
    values = np.random.default_rng(2).uniform(0, 255**2, (*size, 3))
    expected = gaussian_filter(values, sigma=(1.5, 1.5, 0), truncate=3.5)
    np.testing.assert_allclose(_blurred(values), expected, rtol=1e-12)
