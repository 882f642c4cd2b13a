import random

import numpy as np
import pytest
from PIL import Image
from tests.lbm.shard_files import encoded, noise

from sigmascope.errors import ConfigError, DataError
from sigmascope.lbm.samples import CropBox, apply_crop, choose_crop, decode_mask, decode_picture, same_shape

BICUBIC = Image.Resampling.BICUBIC


def any_draws() -> random.Random:
    return random.Random(0)


def test_pictures_come_upright_and_in_colour() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode_picture(encoded(noise(0, 6, 4), exif=exif)).size == (4, 6)
    deep = Image.fromarray(np.full((2, 2), 257 * 100, np.uint16))
    assert decode_picture(encoded(deep)).getpixel((0, 0)) == (100, 100, 100)
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert decode_picture(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)


def test_damaged_data_says_what_is_wrong() -> None:
    jpeg = encoded(noise(0, 64, 64), "JPEG")
    with pytest.raises(DataError, match="cannot be decoded"):
        decode_picture(jpeg[: len(jpeg) // 2])
    with pytest.raises(DataError, match="is empty"):
        decode_picture(b"")
    with pytest.raises(DataError, match="is not a picture"):
        decode_picture(b"<html>")


def test_formats_that_start_other_programs_are_not_opened() -> None:
    with pytest.raises(DataError, match="is not a picture"):
        decode_picture(encoded(noise(0), "EPS"))


@pytest.mark.parametrize("limit", [63, 40])
def test_decompression_bombs_are_refused_before_they_are_decoded(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(noise(0, 8, 8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64)
    assert decode_picture(data).size == (8, 8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match="too large"):
        decode_picture(data)


def test_a_larger_picture_is_decoded_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(noise(0, 8, 8))
    monkeypatch.setenv("SIGMASCOPE_MAX_PIXELS", "63")
    with pytest.raises(DataError, match="8×8; SIGMASCOPE_MAX_PIXELS allows 63 pixels"):
        decode_picture(data)
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 10
    )  # Pillow's own check would refuse what is more than twice this
    monkeypatch.setenv("SIGMASCOPE_MAX_PIXELS", "6.4e1")
    assert decode_picture(data).size == (8, 8)
    monkeypatch.setenv("SIGMASCOPE_MAX_PIXELS", "many")
    with pytest.raises(ConfigError, match="SIGMASCOPE_MAX_PIXELS many is not a number"):
        decode_picture(data)


def test_masks_are_grey_and_ones_count_as_white() -> None:
    ones = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8))
    assert np.asarray(decode_mask(encoded(ones))).tolist() == [[0, 255], [255, 0]]
    wide = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint16))
    assert np.asarray(decode_mask(encoded(wide))).tolist() == [[0, 255], [255, 0]]
    grey = Image.fromarray(np.array([[0, 1], [100, 255]], np.uint8))
    assert np.asarray(decode_mask(encoded(grey))).tolist() == [[0, 1], [100, 255]]
    assert np.asarray(decode_mask(encoded(Image.new("1", (1, 1), 1)))).tolist() == [[255]]


def test_a_picture_of_the_size_is_untouched() -> None:
    image = noise(1, 24, 16)
    cut = choose_crop((24, 16), (24, 16), "random", any_draws())
    assert cut == CropBox(0.0, 0.0, 1.0, 1.0, (24, 16))
    assert np.array_equal(apply_crop(image, cut, BICUBIC), np.asarray(image))


@pytest.mark.parametrize(("width", "left"), [(34, 5), (35, 5)])
def test_the_middle_is_copied_where_nothing_is_resized(width: int, left: int) -> None:
    image = noise(2, width, 24)
    cut = choose_crop((width, 24), (24, 24), "center", any_draws())
    assert np.array_equal(apply_crop(image, cut, BICUBIC), np.asarray(image)[:, left : left + 24])


def test_random_parts_are_copies_and_reach_both_edges() -> None:
    image = noise(3, 27, 24)
    draws, places = random.Random(0), set()
    for _ in range(60):
        cut = choose_crop((27, 24), (24, 24), "random", draws)
        left = round(cut.left * 27)
        places.add(left)
        assert np.array_equal(apply_crop(image, cut, BICUBIC), np.asarray(image)[:, left : left + 24])
    assert places == {0, 1, 2, 3}


def test_the_cut_covers_the_size_with_the_picture_s_own_aspect() -> None:
    cut = choose_crop((400, 100), (50, 50), "center", any_draws())
    assert (cut.left, cut.top, cut.right, cut.bottom) == (150 / 400, 0.0, 250 / 400, 1.0)
    gradient = Image.linear_gradient("L").resize((400, 100)).convert("RGB")
    resized = gradient.crop((150, 0, 250, 100)).resize((50, 50), BICUBIC)
    assert np.array_equal(apply_crop(gradient, cut, BICUBIC), np.asarray(resized))


def test_a_cut_falls_on_the_same_place_of_a_picture_of_another_size() -> None:
    small = Image.fromarray(np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[None], 12, axis=0))
    large = small.resize((48, 24), Image.Resampling.NEAREST)
    cut = choose_crop(small.size, (12, 12), "center", any_draws())
    nearest = Image.Resampling.NEAREST
    assert np.array_equal(apply_crop(small, cut, nearest), apply_crop(large, cut, nearest))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ((640, 480), (640, 480), True),
        ((640, 480), (320, 240), True),
        ((1000, 667), (333, 222), True),
        ((640, 480), (480, 640), False),
        ((640, 480), (640, 470), False),
        ((512, 512), (500, 512), False),
    ],
)
def test_same_shape_allows_a_pixel_of_rounding(
    first: tuple[int, int], second: tuple[int, int], same: bool
) -> None:
    assert same_shape(first, second) is same
    assert same_shape(second, first) is same
