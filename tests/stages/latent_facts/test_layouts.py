"""Which axis is what, of pictures and of latents."""

import pytest
import torch

from sigmascope.stages.image_facts import Sizes, picture_layout, sizes_of, without_mask
from sigmascope.stages.latent_facts import latent_layout


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 3, 64, 48), "BCHW"),
        ((2, 64, 48, 3), "BHWC"),
        ((2, 64, 48, 4), "BHWC"),
        ((16, 1, 64, 48), "BCHW"),
        ((3, 16, 64, 48), "CFHW"),
        ((3, 3, 64, 48), "BCHW"),
        ((3, 64, 48, 3), "BHWC"),
        ((1, 3, 81, 64, 48), "BCFHW"),
        ((1, 81, 3, 64, 48), "BFCHW"),
        ((1, 81, 64, 48, 3), "BFHWC"),
        ((1, 3, 3, 64, 48), "BCFHW"),
        ((1, 3, 64, 48, 3), "BFHWC"),
        ((1, 64, 64, 4), "BHWC"),
        ((3, 64, 64, 4), "BHWC"),
        ((1, 64, 64, 1), "BHWC"),
        ((1, 1, 64, 48, 4), "BFHWC"),
        ((1, 3, 64, 48, 4), "BFHWC"),
        ((64, 48, 4), "HWC"),
        ((3, 16, 4, 4), "CFHW"),
        ((1, 4, 64, 48), "BCHW"),
        ((3, 64, 48), "CHW"),
        ((64, 48, 3), "HWC"),
        ((3, 64, 3), "CHW"),
    ],
)
def test_pictures_are_known_by_their_colours(shape: tuple[int, ...], layout: str) -> None:
    assert picture_layout(shape) == layout


@pytest.mark.parametrize("batch", [1, 3])
def test_colours_and_alpha_are_told_from_frames_where_the_vae_takes_three(batch: int) -> None:
    assert picture_layout((batch, 64, 64, 4), 3) == "BHWC"
    assert picture_layout((batch, 64, 64, 4), 3, is_video=True) == "FHWC"


def test_a_mask_is_no_picture() -> None:
    assert picture_layout((1, 64, 64)) is None
    assert picture_layout((1, 64, 64), 3) is None
    assert picture_layout((1, 64, 64), 1) == "CHW"
    assert picture_layout((1, 9, 64, 64), 3) is None
    assert picture_layout((1, 9, 64, 64), 1) == "CFHW"


@pytest.mark.parametrize("image", [(1, 64, 48, 3), (1, 64, 48, 4)])
@pytest.mark.parametrize(
    "mask", [(1, 64, 48), (1, 64, 64)]
)  # LoadImage's own is 64x64 where there is no alpha
def test_what_load_image_gives_is_its_pictures(image: tuple[int, ...], mask: tuple[int, ...]) -> None:
    outputs = (torch.zeros(image), torch.zeros(mask))
    assert without_mask(outputs) == outputs[:1]


@pytest.mark.parametrize(
    "shapes", [[(1, 64, 48, 3)], [(64, 48, 3)] * 2, [(1, 64, 48, 3)] * 2, [(1, 3, 64, 48), (3, 64, 48)]]
)
def test_other_lists_are_left_alone(shapes: list[tuple[int, ...]]) -> None:
    items = [torch.zeros(shape) for shape in shapes]
    assert without_mask(items) is items


@pytest.mark.parametrize(
    ("shape", "layout"), [((81, 64, 48, 3), "FHWC"), ((81, 3, 64, 48), "FCHW"), ((3, 81, 64, 48), "CFHW")]
)
def test_a_video_vae_takes_the_first_axis_for_frames(shape: tuple[int, ...], layout: str) -> None:
    assert picture_layout(shape, 3, is_video=True) == layout


def test_the_colours_that_a_vae_takes_come_first() -> None:
    assert picture_layout((1, 4, 3, 64, 48), 3) == "BFCHW"
    assert picture_layout((1, 4, 3, 64, 48), 4) == "BCFHW"


@pytest.mark.parametrize("shape", [(), (3,), (64, 48), (2, 7, 64, 48), (1, 1, 1, 3, 64, 48)])
def test_what_has_no_axis_for_colours_has_no_layout(shape: tuple[int, ...]) -> None:
    assert picture_layout(shape) is None


def test_the_vaes_channels_tell_a_latents_axes() -> None:
    assert latent_layout((1, 16, 21, 60, 104), 16, None) == ("BCFHW", "the VAE's 16 latent channels")
    assert latent_layout((1, 21, 16, 60, 104), 16, None) == ("BFCHW", "the VAE's 16 latent channels")
    assert latent_layout((1, 60, 104, 16), 16, None) == ("BHWC", "the VAE's 16 latent channels")


def test_the_expected_frames_tell_where_channels_do_not() -> None:
    vace_frames = latent_layout((1, 32, 21, 60, 104), 16, 21)
    assert vace_frames == ("BCFHW", "21 latent frames, as many as expected")
    assert latent_layout((1, 21, 32, 60, 104), None, 21) == ("BFCHW", "21 latent frames, as many as expected")


def test_the_caller_is_believed() -> None:
    assert latent_layout((1, 16, 21, 60, 104), 16, 21, "BFCHW") == ("BFCHW", "the caller")


def test_a_callers_layout_of_another_rank_is_not() -> None:
    found = latent_layout((1, 16, 60, 104), 16, None, "BFCHW")
    assert found is not None
    assert found.layout == "BCHW"


def test_frames_as_many_as_channels_leave_the_usual_layout() -> None:
    found = latent_layout((1, 16, 16, 60, 104), 16, 16)
    assert found is not None
    assert found.layout == "BCFHW"
    assert "latent channels match" in found.evidence


def test_other_ranks_have_no_layout() -> None:
    assert latent_layout((4, 64), 4, None) is None
    assert latent_layout((1, 1, 1, 4, 8, 8), 4, None) is None


def test_sizes_by_axis() -> None:
    assert sizes_of((1, 21, 16, 60, 104), "BFCHW") == Sizes(1, 21, 16, 60, 104)
    assert sizes_of((2, 64, 48, 3), "BHWC") == Sizes(2, None, 3, 64, 48)


def test_sizes_of_another_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        sizes_of((2, 64, 48), "BCHW")
