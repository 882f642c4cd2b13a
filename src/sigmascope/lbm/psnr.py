"""How close a picture is to the truth."""

import math

import numpy as np
from PIL import Image


def psnr(image: Image.Image, truth: Image.Image) -> float:
    """Peak signal-to-noise ratio in dB: 10 log10(255² / mean squared error), over all pixels and channels.

    Returns:
        Infinity for equal pictures.
    """
    difference = np.asarray(image.convert("RGB"), np.float64) - np.asarray(truth.convert("RGB"), np.float64)
    error = float(np.mean(difference**2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
