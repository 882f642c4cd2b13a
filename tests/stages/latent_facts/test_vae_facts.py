"""What a VAE is said to give, held against what it gives."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope.stages.latent_facts import vae_facts

if TYPE_CHECKING:
    from tests.stages.vaes import ComfyVae, MakeVae

Encode = Callable[[nn.Module, Tensor], Tensor]
PICTURE_VAES = ["kl", "vq", "tiny", "flux2"]
VIDEO_VAES = ["wan", "wan22", "qwen", "cogvideox", "hunyuan", "ltx", "mochi", "magvit"]


@pytest.mark.parametrize("kind", PICTURE_VAES)
def test_a_picture_becomes_a_latent_as_said(make_vae: "MakeVae", encode_pixels: Encode, kind: str) -> None:
    vae = make_vae(kind)
    facts = vae_facts(vae)
    assert facts.latent_channels is not None
    assert facts.spatial_factor is not None
    side = 32 // facts.spatial_factor
    assert tuple(encode_pixels(vae, torch.zeros(1, 3, 32, 32)).shape) == (
        1,
        facts.latent_channels,
        side,
        side,
    )
    assert facts.is_video is False


@pytest.mark.parametrize("kind", VIDEO_VAES)
@pytest.mark.parametrize("latent_frames", [1, 2])
def test_a_video_becomes_a_latent_as_said(
    make_vae: "MakeVae", encode_pixels: Encode, kind: str, latent_frames: int
) -> None:
    vae = make_vae(kind)
    facts = vae_facts(vae)
    assert facts.temporal_factor is not None
    assert facts.spatial_factor is not None
    frames = 1 + (latent_frames - 1) * facts.temporal_factor
    latent = encode_pixels(vae, torch.zeros(1, 3, frames, 32, 32))
    assert facts.latent_frames(frames) == latent.shape[2] == latent_frames
    assert (facts.latent_channels, 32 // facts.spatial_factor) == tuple(latent.shape[1:4:2])
    assert facts.image_channels == 3


@pytest.mark.parametrize("kind", [*PICTURE_VAES, *VIDEO_VAES])
def test_nothing_known_lacks_a_source_or_a_reason(make_vae: "MakeVae", kind: str) -> None:
    facts = vae_facts(make_vae(kind))
    assert (facts.source, facts.dtype, facts.device, dict(facts.unavailable)) == (
        "config",
        "float32",
        "cpu",
        {},
    )


def test_wan_makes_21_latent_frames_of_81(make_vae: "MakeVae") -> None:
    assert vae_facts(make_vae("wan")).latent_frames(81) == 21


def test_comfyui_is_asked_for_its_frames(make_comfy_vae: "type[ComfyVae]") -> None:
    facts = vae_facts(make_comfy_vae())
    assert (facts.temporal_factor, facts.first_frame_apart) == (4, True)
    assert (facts.latent_channels, facts.spatial_factor, facts.is_video) == (16, 8, True)
    assert [facts.latent_frames(frames) for frames in (1, 5, 81)] == [1, 2, 21]


def test_comfyui_vaes_of_pictures_have_no_factor_of_time(make_comfy_vae: "type[ComfyVae]") -> None:
    facts = vae_facts(make_comfy_vae(video=False))
    assert (facts.spatial_factor, facts.temporal_factor, facts.is_video) == (8, 1, False)


@pytest.mark.parametrize("factor", [1, 6, 8])
def test_any_causal_factor_is_found(make_comfy_vae: "type[ComfyVae]", factor: int) -> None:
    vae = make_comfy_vae()
    vae.downscale_ratio = (lambda frames: (frames + factor - 1) // factor, 8, 8)
    assert vae_facts(vae).latent_frames(1 + 3 * factor) == 4


def test_a_factor_that_divides_all_frames_is_found(make_comfy_vae: "type[ComfyVae]") -> None:
    vae = make_comfy_vae()
    vae.downscale_ratio = (lambda frames: frames // 4, 8, 8)
    facts = vae_facts(vae)
    assert (facts.temporal_factor, facts.first_frame_apart) == (4, False)


@pytest.mark.parametrize("wrap", [lambda vae: SimpleNamespace(vae=vae), lambda vae: {"vae": vae}])
def test_the_vae_of_a_pipeline_is_found(make_vae: "MakeVae", wrap: Callable[[Any], Any]) -> None:
    assert vae_facts(wrap(make_vae("kl"))).class_name == "AutoencoderKL"


def test_an_unknown_vae_has_weights_and_reasons() -> None:
    facts = vae_facts(nn.Linear(2, 2))
    assert facts.nbytes == 24
    assert facts.latent_channels is None
    assert facts.unavailable["latent_channels"] == "Linear has no known config"


def test_a_vae_that_cannot_be_read_raises_nothing() -> None:
    class Broken:
        @property
        def config(self) -> object:
            raise RuntimeError("gone")

    assert vae_facts(Broken()).unavailable["spatial_factor"] == "RuntimeError: gone"


def test_no_vae_is_a_reason() -> None:
    assert vae_facts(None).unavailable["is_video"] == "no VAE was given"
