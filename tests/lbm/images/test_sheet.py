import pytest
from PIL import Image

from sigmascope.lbm.images import CAPTION_HEIGHT, LARGEST_SIDE, MARGIN, SMALLEST_SIDE, contact_sheet

RED, BLUE = (255, 0, 0), (0, 0, 255)


def test_pictures_stand_side_by_side_below_their_captions() -> None:
    sheet = contact_sheet(
        [("a", Image.new("RGB", (256, 256), RED)), ("b", Image.new("RGB", (256, 256), BLUE))]
    )
    middle = MARGIN + CAPTION_HEIGHT + 128
    assert sheet.getpixel((MARGIN + 128, middle)) == RED
    assert sheet.getpixel((MARGIN + 256 + MARGIN + 128, middle)) == BLUE


def test_rows_wrap_at_the_columns_asked_for() -> None:
    pictures = [(str(n), Image.new("RGB", (200, 200))) for n in range(5)]
    assert contact_sheet(pictures, columns=2).size == (
        2 * (200 + MARGIN) + MARGIN,
        3 * (200 + CAPTION_HEIGHT + MARGIN) + MARGIN,
    )


@pytest.mark.parametrize(
    ("side", "shown"), [(1, SMALLEST_SIDE), (128, SMALLEST_SIDE), (300, 300), (800, LARGEST_SIDE)]
)
def test_small_pictures_are_enlarged_and_large_ones_reduced(side: int, shown: int) -> None:
    sheet = contact_sheet([("", Image.new("RGB", (side, side)))])
    assert sheet.width == shown + 2 * MARGIN


def test_a_wide_picture_keeps_its_shape() -> None:
    sheet = contact_sheet([("", Image.new("RGB", (400, 100)))])
    assert sheet.size == (384 + 2 * MARGIN, 96 + CAPTION_HEIGHT + 2 * MARGIN)


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet([])
