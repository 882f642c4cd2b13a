"""What a watch says of the finished pictures, and what it makes of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.families import generate, make_pipeline

import sigmascope
from sigmascope.integrations.diffusers.pictures import pictures_of


def _watched(pipeline: Any, family: str = "sd15", **call: Any) -> tuple[Any, dict[str, Any]]:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, family, **{"num_inference_steps": 1, **call})
    return run.stage("generation").facts.get("pictures"), {one.id: one for one in run.findings}


def _about_pictures(findings: dict[str, Any]) -> set[str]:
    return {name for name in findings if name.startswith("picture.")}


@pytest.mark.parametrize("output_type", ["pil", "np"])
def test_sound_pictures_are_counted_and_nothing_is_said(pipeline: Any, output_type: str) -> None:
    seen, findings = _watched(pipeline, output_type=output_type, num_images_per_prompt=2)
    assert (seen["pictures"], seen["looked_at"], seen["one_colour"], seen["not_finite"]) == (2, 2, 0, 0)
    assert not _about_pictures(findings)


def test_a_vae_that_makes_one_colour_is_told(pipeline: Any) -> None:
    with torch.no_grad():
        pipeline.vae.decoder.conv_out.weight.zero_()
        pipeline.vae.decoder.conv_out.bias.fill_(-1.0)
    seen, findings = _watched(pipeline, output_type="pil")
    assert (seen["one_colour"], seen["colour"]) == (1, [0, 0, 0])
    finding = findings["picture.is_one_colour"]
    assert (finding.stage, finding.evidence["colour"]) == ("generation", "0, 0, 0")


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("output_type", ["pil", "np"])
def test_nan_is_seen_in_what_the_host_is_given(pipeline: Any, output_type: str) -> None:
    with torch.no_grad():
        pipeline.vae.decoder.conv_out.bias.fill_(float("nan"))
    seen, findings = _watched(pipeline, output_type=output_type)
    if output_type == "np":
        assert (seen["not_finite"], seen["one_colour"]) == (1, 0)
        assert _about_pictures(findings) == {"picture.not_finite"}
    else:
        assert seen["one_colour"] == 1
        assert _about_pictures(findings) == {"picture.is_one_colour"}


def test_videos_are_looked_at_in_a_few_frames() -> None:
    made, findings = _watched(make_pipeline("wan"), "wan", output_type="np")
    assert (made["pictures"], made["is_video"], made["looked_at"]) == (5, True, 5)
    assert not _about_pictures(findings)
    frames = [[Image.new("RGB", (4, 4))] * 100]
    seen = pictures_of((frames,))
    assert seen is not None
    assert (seen["pictures"], seen["is_video"], seen["looked_at"], seen["one_colour"]) == (100, True, 8, 8)


def _flat(*colours: Any, mode: str = "RGB") -> list[Image.Image]:
    return [Image.new(mode, (4, 4), colour) for colour in colours]


def _noise(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ((_flat((1, 2, 3)),), (1, False, 1, [1, 2, 3], 0, None)),
        (_flat(7, 7, mode="L"), (2, False, 2, [7], 0, None)),
        ((_flat((0, 0, 0), (9, 9, 9)), [True, False]), (2, False, 2, [0, 0, 0], 0, 1)),
        ((_noise(2, 4, 4, 3), [False, False]), (2, False, 0, None, 0, 0)),
        ((np.zeros((1, 3, 4, 4, 3), np.float32),), (3, True, 3, [0.0, 0.0, 0.0], 0, None)),
        ((np.full((2, 4, 4, 3), np.inf, np.float32), None), (2, False, 0, None, 2, None)),
        (SimpleNamespace(values={"latents": 1, "images": _flat((1, 1, 1))}), (1, False, 1, [1, 1, 1], 0, None)),
        ({"images": _flat((5, 5, 5))}, (1, False, 1, [5, 5, 5], 0, None)),
    ],
)  # fmt: skip
def test_pictures_are_found_in_every_kind_of_result(result: object, expected: tuple[Any, ...]) -> None:
    seen = pictures_of(result)
    assert seen is not None
    names = ("pictures", "is_video", "one_colour", "colour", "not_finite", "replaced")
    assert tuple(seen[name] for name in names) == expected


@pytest.mark.parametrize(
    "result",
    [None, (), [], (None,), torch.zeros(1, 3, 4, 4), (torch.zeros(1),), "text", {}, np.zeros((2, 2))],
)
def test_other_results_have_none(result: object) -> None:
    assert pictures_of(result) is None


def test_pictures_of_a_safety_checker_are_told_as_such(pipeline: Any) -> None:
    def checked(images: Any, **_: Any) -> tuple[Any, list[bool]]:
        return np.zeros_like(images) if isinstance(images, np.ndarray) else torch.zeros_like(images), [True]

    pipeline.run_safety_checker = lambda image, *_: checked(image)
    seen, findings = _watched(pipeline, output_type="pil")
    assert seen["replaced"] == 1
    assert _about_pictures(findings) == {"picture.replaced_by_safety_checker"}
