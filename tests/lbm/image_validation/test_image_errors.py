import json
import math
from urllib.error import URLError

import numpy as np
import pytest

from sigmascope.lbm import image_validation
from sigmascope.lbm.image_validation import ImageErrors, ImageReport, Output, OutputError, output_error
from sigmascope.lbm.images import UnreadableImage
from sigmascope.lbm.training.objective import PixelLoss


def output(value: int, latent: float) -> Output:
    return Output(np.full((4, 6, 3), value, np.uint8), np.full((1, 4, 2, 3), latent, np.float32))


def test_psnr_and_relative_l2_are_as_defined() -> None:
    found = output_error(output(120, 1.5), output(100, 1.0))
    assert found.psnr == pytest.approx(10 * math.log10(255**2 / 20**2))
    assert found.image_error == pytest.approx(0.2)
    assert found.latent_error == pytest.approx(0.5)


def test_bytes_do_not_wrap_round() -> None:
    assert output_error(output(0, 0.0), output(255, 1.0)).image_error == pytest.approx(1.0)


def test_equal_results_have_infinite_psnr_which_is_null_in_json() -> None:
    found = output_error(output(9, 1.0), output(9, 1.0))
    assert found.psnr == math.inf
    assert found.as_dict() == {
        "psnr": None,
        "image_error": 0.0,
        "latent_error": 0.0,
        "ssim": 1.0,
        "lpips": None,
    }


def test_nothing_is_relative_to_a_black_picture_and_a_zero_latent() -> None:
    found = output_error(output(9, 1.0), output(0, 0.0))
    assert (found.image_error, found.latent_error) == (None, None)


def test_all_pictures_together_weigh_by_their_size() -> None:
    def errors(name: str, base: float, with_lora: float, norm: float) -> ImageErrors:
        return ImageErrors(
            name,
            OutputError(20.0, base, norm, base, norm, 0.5, 0.3),
            OutputError(30.0, with_lora, norm, with_lora, norm, 0.9),
        )

    pictures = (errors("a", 3.0, 0.3, 10.0), errors("b", 4.0, 0.4, 20.0))
    report = ImageReport(pictures, (UnreadableImage("c", "damaged"),), (), 1, 0, 1.0)
    overall = report.overall
    assert overall.base.latent_error == pytest.approx(5 / math.hypot(10, 20))
    assert overall.with_lora.image_difference == pytest.approx(0.5)
    assert overall.remaining == pytest.approx(0.1)
    assert (overall.base.psnr, overall.with_lora.psnr) == (20.0, 30.0)
    assert (overall.base.ssim, overall.with_lora.ssim) == (0.5, 0.9)
    assert overall.base.lpips == pytest.approx(0.3)
    assert overall.with_lora.lpips is None
    loaded = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert loaded["unreadable"] == [{"file": "c", "reason": "damaged"}]
    assert [picture["picture"] for picture in loaded["pictures"]] == ["a", "b"]


def test_a_perceptual_distance_sees_pictures_from_minus_one_to_one() -> None:
    found = output_error(output(255, 0.0), output(0, 0.0), PixelLoss("l1"))
    assert found.lpips == pytest.approx(2.0)
    assert output_error(output(255, 0.0), output(0, 0.0)).lpips is None


def test_lpips_that_cannot_load_its_network_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_kind: str) -> PixelLoss:
        raise URLError("no route to host")

    monkeypatch.setattr("sigmascope.lbm.image_validation.find_spec", lambda _name: object())
    monkeypatch.setattr("sigmascope.lbm.training.objective.PixelLoss", fails)
    assert image_validation._perceptual() is None
    assert "no route to host" in caplog.text
