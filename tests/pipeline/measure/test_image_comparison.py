"""Distances of images, against numbers worked by hand and scikit-image."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigmascope.pipeline.measure import compare_images, image_of


@dataclass
class Output:
    images: Any


def _picture(seed: int = 0) -> Tensor:
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_an_error_of_a_tenth_everywhere_is_20_db() -> None:
    assert compare_images(
        torch.full((4, 4), 0.6).double(), torch.full((4, 4), 0.5).double()
    ).psnr_db == pytest.approx(20)


def test_relative_l2_is_the_ratio_of_norms() -> None:
    old, new = torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 4.5]).double()
    assert compare_images(new, old).relative_l2 == pytest.approx(0.1)


def test_psnr_is_that_of_scikit_image() -> None:
    from skimage.metrics import peak_signal_noise_ratio

    old, new = _picture(), _picture(1)
    expected = peak_signal_noise_ratio(old.numpy(), new.numpy(), data_range=1)
    assert compare_images(new, old).psnr_db == pytest.approx(expected)


def test_latents_are_measured_by_their_own_range() -> None:
    old = torch.tensor([-2.0, 2.0]).double()
    found = compare_images(old + 0.4, old)
    assert found.value_range == 4.0
    assert found.psnr_db == pytest.approx(20 * math.log10(4 / 0.4))


def test_identical_images_have_no_psnr() -> None:
    found = compare_images(_picture(), _picture())
    assert (found.identical, found.psnr_db, found.relative_l2) == (True, None, 0.0)


def test_nan_is_counted_and_left_out() -> None:
    new = _picture()
    new[0, 0, 0, 0] = math.nan
    found = compare_images(new, _picture())
    assert (found.non_finite, found.identical) == (1, False)


def test_images_of_other_sizes_are_not_compared() -> None:
    found = compare_images(torch.zeros(2).double(), torch.zeros(3).double())
    assert found.psnr_db is None
    assert "shapes differ" in found.unavailable["psnr_db"]


def test_pil_images_become_values_from_0_to_1() -> None:
    held = image_of(Output([Image.new("RGB", (4, 2), (255, 0, 51))]))
    assert held is not None
    assert held.shape == (1, 2, 4, 3)
    assert held[0, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])


@pytest.mark.parametrize(
    "held", [np.zeros((1, 2, 2, 3), np.float32), torch.zeros(1, 2, 2, 3), [torch.zeros(2, 2, 3)]]
)
def test_arrays_tensors_and_lists_are_taken(held: Any) -> None:
    for output in (Output(held), (held, None), held):
        found = image_of(output)
        assert found is not None
        assert tuple(found.shape) == (1, 2, 2, 3)


@pytest.mark.parametrize("held", ["text", None, 3, [torch.zeros(2), torch.zeros(3)]])
def test_what_is_no_image_is_none(held: Any) -> None:
    assert image_of(held) is None


def test_bytes_become_values_from_0_to_1() -> None:
    held = image_of(np.full((1, 2, 2, 3), 51, np.uint8))
    assert held is not None
    assert held[0, 0, 0].tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_a_dict_of_images_is_taken() -> None:
    held = image_of({"images": torch.ones(1, 2, 2, 3)})
    assert held is not None
    assert tuple(held.shape) == (1, 2, 2, 3)


def test_one_blank_picture_of_a_batch_is_found() -> None:
    old = torch.cat([_picture(), _picture(1)])
    new = old.clone()
    new[1] = 0
    assert compare_images(new, old).blank is True
    assert compare_images(old + 0.1, old).blank is False
    assert compare_images(new + 0.1, new).blank is False  # it was blank before
