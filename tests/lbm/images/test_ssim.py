"""Structural similarity against scikit-image's."""

import numpy as np
import pytest

from sigmascope.lbm.images import ssim


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
