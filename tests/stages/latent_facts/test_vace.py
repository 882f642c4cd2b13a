"""WAN-VACE: the content is in the conditioning, as PEERS' reading of WanVaceToVideo has it."""

from typing import Any

import pytest
import torch

from sigmascope.stages.latent_encoding import (
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
)

WAN = {"class_name": "WAN", "latent_channels": 16, "image_channels": 3, "spatial_factor": 8}
WAN |= {"temporal_factor": 4, "first_frame_apart": True, "is_video": True, "source": "config"}


def node_output(length: int = 81, *, reference: bool = False, height: int = 32, width: int = 48) -> Any:
    """(positive, negative, latent, trim_latent), with the shapes that ComfyUI's node makes."""
    trim = int(reference)
    grid = ((length - 1) // 4 + 1 + trim, height // 8, width // 8)
    options = {
        "vace_frames": [torch.rand(1, 32, *grid)],
        "vace_mask": [torch.ones(1, 64, *grid)],
        "vace_strength": [1.0],
    }
    conditioning = [[torch.zeros(1, 512, 4096), options]]
    return conditioning, conditioning, {"samples": torch.zeros(1, 16, *grid)}, trim


def analyse(output: Any, length: int = 81) -> dict[str, Any]:
    video = torch.zeros(length, 32, 48, 3)
    baseline = {**capture_latent_generation_baseline(None, video), "vae": WAN}
    return dict(analyze_latent_generation_results(baseline, output, 1.0, 1, None, length, 32, 48))


def test_81_frames_are_21_in_all_parts() -> None:
    found = analyse(node_output())
    assert found["latent_analysis"]["shape"] == [1, 16, 21, 4, 6]
    assert found["vace_conditioning"]["vace_frames"]["shape"] == [1, 32, 21, 4, 6]
    assert found["vace_conditioning"]["vace_mask"]["shape"] == [1, 64, 21, 4, 6]
    assert found["findings"] == []


def test_one_frame_is_one() -> None:
    found = analyse(node_output(1), 1)
    assert found["latent_analysis"]["frames"] == 1
    assert found["findings"] == []


def test_a_reference_is_one_latent_frame_more() -> None:
    found = analyse(node_output(reference=True))
    assert found["latent_analysis"]["frames"] == 22
    assert found["vace_conditioning"]["trim_latent"] == 1
    assert found["latent_analysis"]["temporal_compression"] == pytest.approx(81 / 21)
    assert found["findings"] == []


def test_a_frame_more_without_a_reference_is_garbage() -> None:
    positive, negative, latent, _ = node_output(reference=True)
    ids = {one["id"] for one in analyse((positive, negative, latent, 0))["findings"]}
    assert ids == {"latent_shape_unexpected"}


@pytest.mark.parametrize(
    ("name", "shape"), [("vace_frames", (1, 16, 21, 4, 6)), ("vace_mask", (1, 64, 20, 4, 6))]
)
def test_parts_that_do_not_fit_are_an_error(name: str, shape: tuple[int, ...]) -> None:
    output = node_output()
    output[0][0][1][name] = [torch.rand(shape)]
    (finding,) = analyse(output)["findings"]
    assert (finding["id"], finding["severity"]) == ("vace_shape_unexpected", "error")
    assert name in finding["message"]


def test_nan_in_the_content_is_an_error() -> None:
    output = node_output()
    output[0][0][1]["vace_frames"][0][0, 0, 0, 0, 0] = float("nan")
    found = analyse(output)
    assert [one["id"] for one in found["findings"]] == ["vace_not_finite"]
    assert found["encoding_success"] is False


def test_other_latents_have_none() -> None:
    assert analyse(torch.rand(1, 16, 21, 4, 6))["vace_conditioning"] == {}
