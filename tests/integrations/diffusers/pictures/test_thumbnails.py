"""A small picture where it was asked for, of whatever a pipeline gives, and a reason where there is none."""

import io
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.families import generate
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.integrations.diffusers.pictures import thumbnail_of

RED = np.zeros((200, 400, 3), np.float32) + np.array([1.0, 0.0, 0.0], np.float32)
RED_TENSOR = torch.from_numpy(RED).movedim(-1, 0)
RESULTS: dict[str, Any] = {
    "pictures": SimpleNamespace(images=[Image.fromarray((RED * 255).astype(np.uint8))] * 2),
    "grey": ([Image.new("L", (400, 200), 76)],),
    "with an alpha": ([Image.new("RGBA", (400, 200), (255, 0, 0, 9))],),
    "an array": (RED[None],),
    "a video's frames": ([[RED, RED]],),
    "a tensor": (RED_TENSOR[None],),
    "a video as a tensor": (RED_TENSOR[None, None].repeat(1, 5, 1, 1, 1),),
    "a video, channels first": (RED_TENSOR[None, :, None].repeat(1, 1, 5, 1, 1),),
}


def drawn(fact: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(bytes.fromhex(fact["jpeg"])))


@pytest.mark.parametrize("kind", RESULTS)
def test_the_first_picture_is_made_small(kind: str) -> None:
    result = RESULTS[kind]
    small = thumbnail_of((result.images,) if kind == "pictures" else result).value
    assert small is not None
    image = drawn(small)
    assert image.format == "JPEG"
    assert image.size == (small["width"], small["height"]) == (96, 48)
    colour = image.resize((1, 1)).getpixel((0, 0))
    assert isinstance(colour, tuple)
    expected = (76, 76, 76) if kind == "grey" else (255, 0, 0)
    assert max(abs(band - right) for band, right in zip(colour, expected, strict=True)) < 4
    assert len(small["jpeg"]) < 16_000


@pytest.mark.parametrize("result", [(torch.zeros(1, 4, 8, 8),), (None,), ("text",), ([],), (torch.ones(2),)])
def test_what_is_no_picture_has_a_reason(result: Any) -> None:
    assert thumbnail_of(result).reason == "the call gave no picture"


def test_values_that_are_not_finite_are_black() -> None:
    small = thumbnail_of((torch.full((1, 3, 8, 8), torch.nan),)).value
    assert small is not None
    assert drawn(small).getextrema() == ((0, 0), (0, 0), (0, 0))


def test_without_pillow_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "Pillow" in (thumbnail_of((RED[None],)).reason or "")


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_a_watch_keeps_one_of_each_generation(pipeline: Any, unwatched: Tensor, output_type: str) -> None:
    with sigmascope.watch(pipeline, thumbnails=True) as run:
        image = generate(pipeline, "sd15", output_type=output_type)
        generate(pipeline, "sd15", output_type=output_type, seed=1)
    if output_type == "pt":
        assert torch.equal(image, unwatched)
    first, second = (stage.facts["thumbnail"] for stage in run.stages)
    assert first != second
    assert drawn(first).size == (first["width"], first["height"])
    assert left_behind() == []


def test_none_is_kept_unless_it_is_asked_for(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", output_type="pil")
    assert "thumbnail" not in run.stages[0].facts


def test_latents_have_a_reason_in_the_record(pipeline: Any) -> None:
    with sigmascope.watch(pipeline, thumbnails=True) as run:
        generate(pipeline, "sd15", output_type="latent")
    assert run.stages[0].unavailable["thumbnail"] == "the call gave no picture"
