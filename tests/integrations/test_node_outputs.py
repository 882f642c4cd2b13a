"""What ComfyUI's nodes give is understood in each form that they give it in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from tests.comfy_shapes.nodes import NodeOutput, in_dict

import sigmascope
from sigmascope.errors import ConfigError
from sigmascope.records.latents import VaeFacts
from sigmascope.stages.latent_encoding import _analyze_latent_output

WAN = VaeFacts("AutoencoderKLWan", 16, 3, 8, 4, first_frame_apart=True, is_video=True)
Wrap = Callable[..., Any]


@pytest.fixture(params=[NodeOutput, in_dict], ids=["V3", "with ui"])
def wrap(request: pytest.FixtureRequest) -> Wrap:
    wrap: Wrap = request.param
    return wrap


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4,
                         down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2).eval()  # fmt: skip


def test_a_latent_is_found(wrap: Wrap) -> None:
    latent = torch.randn(1, 16, 21, 8, 12)
    found = _analyze_latent_output(wrap({"samples": latent}), 81, 64, 96, vae=WAN)
    assert (found["status"], found["shape"]) == ("success", [1, 16, 21, 8, 12])


def test_what_vace_gives_is_read(wrap: Wrap) -> None:
    options = {"vace_frames": [torch.randn(1, 32, 22, 8, 12)], "vace_mask": [torch.ones(1, 64, 22, 8, 12)]}
    conditioning = [[torch.zeros(1, 512, 4096), options]]
    output = wrap(conditioning, conditioning, {"samples": torch.zeros(1, 16, 22, 8, 12)}, 1)
    baseline = sigmascope.capture_latent_generation_baseline(None, torch.rand(81, 64, 96, 3))
    found = sigmascope.analyze_latent_generation_results(baseline, output, 1.0, 1)
    assert found["vace_conditioning"]["trim_latent"] == 1
    assert found["vace_conditioning"]["vace_mask"]["shape"] == [1, 64, 22, 8, 12]


def test_a_conditioning_is_found(wrap: Wrap) -> None:
    conditioning = [[torch.randn(1, 77, 768), {"pooled_output": torch.randn(1, 768)}]]
    found = sigmascope.analyze_text_encoding_results(None, wrap(conditioning), None, "a cat", "", 1.0)
    told = found["positive_conditioning"]
    assert (told["structure"], told["shape"]) == ("comfyui", [1, 77, 768])


def test_decoded_pictures_are_found(wrap: Wrap, vae: AutoencoderKL) -> None:
    baseline = sigmascope.capture_latent_decoding_baseline(vae, wrap({"samples": torch.randn(1, 4, 8, 8)}))
    assert baseline["latent"] is not None
    assert baseline["latent"]["shape"] == [1, 4, 8, 8]
    found = sigmascope.analyze_latent_decoding_results(baseline, wrap(torch.rand(1, 16, 16, 3)), 1.0, 1)
    assert (found["pictures"]["height"], found["success"]) == (16, True)


def test_models_are_counted(wrap: Wrap) -> None:
    found = sigmascope.analyze_lora_application_results(None, None, None, wrap("model", "clip"))
    assert (found["models_returned"], found["lora_application_success"]) == (2, True)


def test_a_node_that_gave_nothing_applied_nothing() -> None:
    found = sigmascope.analyze_lora_application_results(None, None, None, NodeOutput())
    assert (found["models_returned"], found["lora_application_success"]) == (0, False)


def test_pictures_are_encoded_and_latents_decoded(wrap: Wrap, vae: AutoencoderKL) -> None:
    pictures = torch.rand(2, 16, 16, 3)
    latent, _ = sigmascope.encode_latents(vae, wrap(pictures))
    with torch.no_grad():
        expected = vae.encode(2 * pictures.movedim(-1, 1) - 1).latent_dist.mode()
        decoded = vae.decode(expected).sample
    torch.testing.assert_close(latent, expected)
    for given in ({"samples": latent}, wrap({"samples": latent}), latent.numpy()):
        frames, _ = sigmascope.decode_latents(vae, given)
        torch.testing.assert_close(frames, decoded)


@pytest.mark.parametrize("given", [None, {"noise_mask": 1}, "latent"])
def test_what_holds_no_latent_is_refused(vae: AutoencoderKL, given: object) -> None:
    with pytest.raises(ConfigError, match="latents"):
        sigmascope.decode_latents(vae, given)


@pytest.mark.parametrize("statistics", [None, False])
def test_the_empty_latent_of_a_video_with_a_reference_is_no_failure(statistics: bool | None) -> None:
    latent = {"samples": torch.zeros(1, 16, 22, 8, 12)}
    baseline = capture_wan(statistics)
    found = sigmascope.analyze_latent_generation_results(baseline, latent, 1.0, 1, statistics=statistics)
    assert found["success"] is True
    assert found["latent_analysis"]["temporal_compression"] == pytest.approx(81 / 21)


@pytest.mark.parametrize("frames", [20, 22, 23])
def test_other_frames_than_the_videos_are_a_failure(frames: int) -> None:
    latent = {"samples": torch.randn(1, 16, frames, 8, 12)}
    found = sigmascope.analyze_latent_generation_results(capture_wan(None), latent, 1.0, 1)
    assert [finding["id"] for finding in found["findings"]] == ["latent_shape_unexpected"]


def capture_wan(statistics: bool | None) -> Any:
    from diffusers import AutoencoderKLWan

    sizes: Any = {"base_dim": 3, "dim_mult": [1] * 4, "num_res_blocks": 1}
    vae = AutoencoderKLWan(z_dim=16, temperal_downsample=[False, True, True], **sizes)
    pictures = torch.rand(81, 64, 96, 3)
    return sigmascope.capture_latent_generation_baseline(vae, pictures, statistics=statistics)
