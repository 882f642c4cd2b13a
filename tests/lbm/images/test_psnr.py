import math

import numpy as np
import pytest
from PIL import Image

from sigmascope.lbm.images import psnr


def test_psnr_is_that_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, (20, 30, 3), np.uint8) for _ in range(2))
    expected = metrics.peak_signal_noise_ratio(first, second)
    assert psnr(Image.fromarray(first), Image.fromarray(second)) == pytest.approx(expected)


def test_equal_pictures_are_infinitely_close() -> None:
    picture = Image.new("RGB", (4, 4), (10, 20, 30))
    assert psnr(picture, picture) == math.inf
