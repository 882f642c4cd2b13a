import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmascope.errors import ConfigError
from sigmascope.lbm.images import BUCKETS, nearest_bucket, parse_size, scaled_buckets, working_size

SIDES = st.integers(min_value=1, max_value=20_000)


def test_buckets_are_those_of_the_specification_and_their_transposes() -> None:
    named = {(512, 2048), (1024, 1024), (896, 1152), (768, 1280), (640, 1536), (512, 1920)}
    assert set(BUCKETS) == named | {(height, width) for width, height in named}
    assert len(BUCKETS) == 11


@pytest.mark.parametrize(
    ("image", "bucket"),
    [
        ((512, 512), (1024, 1024)),
        ((4000, 3000), (1152, 896)),
        ((3000, 4000), (896, 1152)),
        ((1920, 1080), (1280, 768)),
        ((1080, 2400), (640, 1536)),
        ((3, 5000), (512, 2048)),
        ((5000, 3), (2048, 512)),
        ((1, 1), (1024, 1024)),
    ],
)
def test_nearest_bucket_is_as_wide_and_as_high(image: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert nearest_bucket(*image) == bucket


@settings(deadline=None)
@given(SIDES, SIDES)
def test_turning_the_image_turns_the_bucket(width: int, height: int) -> None:
    first, second = nearest_bucket(width, height), nearest_bucket(height, width)
    distance = abs(math.log(first[0] / first[1]) - math.log(width / height))
    turned = abs(math.log(second[1] / second[0]) - math.log(width / height))
    assert distance == pytest.approx(turned)


def test_small_models_get_small_buckets_of_the_same_shape() -> None:
    assert scaled_buckets(128, factor=8)[:3] == ((64, 256), (64, 240), (80, 192))
    assert nearest_bucket(640, 480, resolution=128, factor=16) == (144, 112)


@settings(deadline=None)
@given(st.integers(32, 2048), st.sampled_from([1, 4, 8, 32]))
def test_scaled_sides_are_multiples(resolution: int, factor: int) -> None:
    assert all(
        side % factor == 0 and side >= factor for size in scaled_buckets(resolution, factor) for side in size
    )


def test_resolution_below_the_factor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="resolution: expected at least 32"):
        scaled_buckets(16, factor=32)


@settings(deadline=None)
@given(SIDES, SIDES)
def test_keeping_the_size_only_rounds_up(width: int, height: int) -> None:
    working = working_size(width, height, "keep", factor=32)
    assert 0 <= working[0] - width < 32
    assert 0 <= working[1] - height < 32
    assert working[0] % 32 == working[1] % 32 == 0


def test_named_size_is_rounded_up() -> None:
    assert working_size(7, 9, (100, 64), factor=32) == (128, 64)


@pytest.mark.parametrize("size", ["large", (0, 10), (10, -1)])
def test_other_sizes_are_errors(size: str | tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="size: expected bucket, keep"):
        working_size(10, 10, size)


@pytest.mark.parametrize(
    ("text", "size"), [("bucket", "bucket"), ("keep", "keep"), ("768x512", (768, 512)), (" 64X32 ", (64, 32))]
)
def test_size_option_is_read(text: str, size: str | tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["768", "0x10", "10x00", "-3x4", "axb", "", "10x10x10"])
def test_other_size_options_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--size: expected bucket, keep, or WIDTHxHEIGHT"):
        parse_size(text)


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("way", ["bucket", "keep"])
def test_empty_picture_has_no_size_to_work_at(size: tuple[int, int], way: str) -> None:
    with pytest.raises(ConfigError, match="the picture is empty"):
        working_size(*size, way)
    with pytest.raises(ConfigError, match="the picture is empty"):
        nearest_bucket(*size)
