"""Pictures and videos in every form that they are handed over in."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sigmascope.records.latents import VaeFacts
from sigmascope.stages.image_facts import Pictures, read_pictures

WAN = VaeFacts("AutoencoderKLWan", 16, 3, 8, 4, first_frame_apart=True, is_video=True)


def outline(read: Pictures) -> tuple[Any, ...]:
    facts = read.facts
    assert facts is not None
    return facts.layout, facts.batch, read.length, facts.channels, facts.height, facts.width


def pil(width: int = 48, height: int = 64, mode: str = "RGB") -> Any:
    from PIL import Image

    return Image.new(mode, (width, height))


def test_a_tensor_of_pictures() -> None:
    assert outline(read_pictures(torch.zeros(5, 3, 64, 48))) == ("BCHW", 5, 5, 3, 64, 48)


def test_comfyuis_images_are_frames_to_a_video_vae() -> None:
    assert outline(read_pictures(torch.zeros(81, 64, 48, 3), WAN)) == ("FHWC", 1, 81, 3, 64, 48)


def test_a_video_as_diffusers_encodes_it() -> None:
    assert outline(read_pictures(torch.zeros(2, 3, 17, 64, 48), WAN)) == ("BCFHW", 2, 17, 3, 64, 48)


@pytest.mark.parametrize("batch", [1, 3])
def test_comfyuis_images_with_alpha_are_pictures_of_four_channels(batch: int) -> None:
    vae = VaeFacts("VAE", 4, 3, 8, 1, is_video=False)
    assert outline(read_pictures(torch.zeros(batch, 64, 48, 4), vae)) == ("BHWC", batch, batch, 4, 64, 48)


def test_of_load_images_outputs_the_mask_is_no_frame() -> None:
    outputs = (torch.zeros(1, 64, 48, 3), torch.zeros(1, 64, 64))
    for order in (outputs, outputs[::-1]):
        assert outline(read_pictures(order)) == ("BHWC", 1, 1, 3, 64, 48)


def test_a_mask_has_no_layout() -> None:
    facts = read_pictures(torch.zeros(1, 64, 64), VaeFacts("VAE", 4, 3, 8, 1)).facts
    assert facts is not None
    assert facts.layout is None
    assert facts.unavailable["layout"] == "no axis of (1, 64, 64) can be colours"


def test_an_array_of_bytes() -> None:
    read = read_pictures(np.full((16, 64, 48, 3), 200, np.uint8))
    assert outline(read) == ("BHWC", 16, 16, 3, 64, 48)
    assert read.facts is not None
    assert (read.facts.form, read.facts.tensor.dtype, read.facts.tensor.max) == ("array", "uint8", 200.0)
    assert read.facts.tensor.nbytes == 16 * 64 * 48 * 3


def test_pil_images_have_the_size_of_their_pixels() -> None:
    read = read_pictures([pil(), pil()])
    assert outline(read) == (None, 1, 2, 3, 64, 48)
    assert read.facts is not None
    assert (read.facts.form, read.facts.tensor.nbytes) == ("PIL images", 2 * 64 * 48 * 3)


@pytest.mark.parametrize(
    ("mode", "channels", "dtype"), [("L", 1, "uint8"), ("RGBA", 4, "uint8"), ("F", 1, "float32")]
)
def test_the_mode_of_a_pil_image_tells_its_type(mode: str, channels: int, dtype: str) -> None:
    read = read_pictures(pil(mode=mode))
    assert read.facts is not None
    assert (read.facts.channels, read.facts.tensor.dtype) == (channels, dtype)


def test_lists_of_arrays_and_tensors_are_frames() -> None:
    assert outline(read_pictures([np.zeros((64, 48, 3), np.uint8)] * 3))[1:] == (1, 3, 3, 64, 48)
    assert outline(read_pictures([torch.zeros(3, 64, 48)] * 3))[1:] == (1, 3, 3, 64, 48)
    assert outline(read_pictures([torch.zeros(1, 3, 64, 48)] * 3))[1:] == (1, 3, 3, 64, 48)


def test_a_list_of_lists_is_a_batch_of_videos() -> None:
    assert outline(read_pictures([[pil()] * 5, [pil()] * 5]))[1:] == (2, 5, 3, 64, 48)


def test_a_list_of_one_video_is_that_video() -> None:
    assert outline(read_pictures([torch.zeros(1, 3, 5, 64, 48)])) == ("BCFHW", 1, 5, 3, 64, 48)


@pytest.mark.parametrize("name", ["frames", "images", "video", "image"])
def test_the_pictures_of_a_mapping_or_an_output(name: str) -> None:
    tensor = torch.zeros(5, 3, 64, 48)
    for holder in ({name: tensor}, SimpleNamespace(**{name: tensor})):
        assert outline(read_pictures(holder)) == ("BCHW", 5, 5, 3, 64, 48)


def test_the_output_of_a_decoder(make_vae: Any) -> None:
    with torch.no_grad():
        output = make_vae("kl").decode(torch.zeros(1, 4, 16, 12))
    assert outline(read_pictures(output)) == ("BCHW", 1, 1, 3, 32, 24)


def test_mixed_sizes_are_all_told() -> None:
    assert read_pictures([pil(), pil(32, 32), pil()]).sizes == ((64, 48), (32, 32))


@pytest.mark.parametrize("nothing", [[], (), torch.zeros(0, 3, 64, 48), np.zeros((0, 64, 48, 3))])
def test_no_frames_are_none(nothing: Any) -> None:
    assert read_pictures(nothing).length == 0


def test_values_of_a_list_are_those_of_all() -> None:
    read = read_pictures(
        [torch.zeros(3, 8, 8), torch.full((3, 8, 8), 2.0), torch.full((3, 8, 8), float("nan"))]
    )
    assert read.facts is not None
    assert read.facts.tensor.nan_count == 3 * 8 * 8
    two = read_pictures([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 2.0)]).facts
    assert two is not None
    assert (two.tensor.min, two.tensor.max) == (0.0, 2.0)


def test_values_are_left_alone_unless_wanted() -> None:
    read = read_pictures(torch.zeros(1, 3, 8, 8), statistics=False)
    assert read.facts is not None
    assert read.facts.tensor.max is None


def test_nothing_given_is_a_reason() -> None:
    assert read_pictures(None).reason == "no pictures were given"


@pytest.mark.parametrize("thing", ["video.mp4", 3, object(), [object()]])
def test_what_holds_no_pictures_is_a_reason(thing: Any) -> None:
    read = read_pictures(thing)
    assert read.facts is None
    assert "has no pictures in a known place" in (read.reason or "")


def test_what_raises_when_read_is_a_reason() -> None:
    class Broken:
        @property
        def frames(self) -> object:
            raise OSError("file is gone")

    assert read_pictures(Broken()).reason == "OSError: file is gone"


def test_axes_that_cannot_be_colours_are_a_reason() -> None:
    read = read_pictures(torch.zeros(2, 7, 64, 48))
    assert read.facts is not None
    assert "can be colours" in read.facts.unavailable["layout"]
    assert read.length is None
