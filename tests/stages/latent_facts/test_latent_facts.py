"""`latent_analysis` of real VAEs and of latents by themselves."""

from typing import Any

import pytest
import torch

from sigmascope.records.latents import VaeFacts
from sigmascope.stages.latent_encoding import _analyze_latent_output
from sigmascope.stages.latent_facts import vae_facts

WAN = VaeFacts("AutoencoderKLWan", 16, 3, 8, 4, first_frame_apart=True, is_video=True)


def test_81_frames_of_wan_are_21() -> None:
    found = _analyze_latent_output(torch.zeros(1, 16, 21, 60, 104), 81, 480, 832, vae=WAN)
    assert (found["frames"], found["channels"], found["height"], found["width"]) == (21, 16, 60, 104)
    assert found["temporal_compression"] == pytest.approx(81 / 21)
    assert found["nominal_temporal_compression"] == 4.0
    assert (found["spatial_compression"], found["nominal_spatial_compression"]) == (64.0, 64.0)
    assert (found["latent_layout"], found["latent_type"]) == ("BCFHW", "Video Latent")
    assert found["expected_shape"] == [16, 21, 60, 104]


def test_the_seeds_layout_is_told_by_the_vaes_channels() -> None:
    found = _analyze_latent_output(torch.zeros(1, 21, 16, 60, 104), 81, 480, 832, vae=WAN)
    assert (found["latent_layout"], found["frames"], found["channels"]) == ("BFCHW", 21, 16)


@pytest.mark.parametrize(("frames", "latent_frames"), [(1, 1), (5, 2), (81, 21)])
def test_real_wan_frames(make_vae: Any, encode_pixels: Any, frames: int, latent_frames: int) -> None:
    vae = make_vae("wan")
    latent = encode_pixels(vae, torch.zeros(1, 3, frames, 16, 16))
    found = _analyze_latent_output(latent, frames, 16, 16, vae=vae_facts(vae))
    assert found["frames"] == latent_frames
    assert found["expected_shape"] == list(latent.shape[1:])
    assert found["temporal_compression"] == pytest.approx(frames / latent_frames)


def test_pictures_encoded_one_by_one_are_not_compressed_in_time(make_vae: Any, encode_pixels: Any) -> None:
    latent = encode_pixels(make_vae("kl"), torch.zeros(16, 3, 32, 48))
    found = _analyze_latent_output(latent, 16, 32, 48, vae=vae_facts(make_vae("kl")))
    assert (found["latent_type"], found["batch_size"], found["frames"]) == ("Image Latent", 16, None)
    assert (found["temporal_compression"], found["spatial_compression"]) == (1.0, 4.0)
    assert found["unavailable"]["frames"] == "BCHW has none"


def test_packed_latents_are_judged_unpacked() -> None:
    flux = VaeFacts("AutoencoderKL", 16, 3, 8, 1, is_video=False)
    found = _analyze_latent_output(torch.zeros(1, 4096, 64), 1, 1024, 1024, vae=flux)
    assert (found["shape"], found["unpacked_shape"]) == ([1, 4096, 64], [1, 16, 128, 128])
    assert (found["latent_type"], found["latent_layout"]) == ("Image Latent", "packed")
    assert (found["spatial_compression"], found["channels"]) == (64.0, 16)


def test_statistics_are_torchs() -> None:
    latent = torch.randn(1, 4, 8, 8)
    values = _analyze_latent_output(latent, 1, 64, 64)["statistics"]
    assert values is not None
    assert values["std"] == pytest.approx(latent.std().item())
    assert values["max"] == pytest.approx(latent.max().item())


@pytest.mark.parametrize("shape", [(4, 64), (7,), (), (1, 1, 4, 4, 8, 8)])
def test_other_ranks_are_unknown_latents(shape: tuple[int, ...]) -> None:
    found = _analyze_latent_output(torch.zeros(shape), 16, 512, 512)
    assert (found["status"], found["latent_type"]) == ("success", "Unknown Latent")
    assert found["spatial_compression"] is None


@pytest.mark.parametrize("size", [None, "512", 0, -8, float("nan"), float("inf"), True, 512.5])
def test_sizes_that_make_no_sense_give_no_compression(size: Any) -> None:
    found = _analyze_latent_output(torch.zeros(1, 4, 8, 8), 1, size, 64)
    assert found["spatial_compression"] is None
    assert found["unavailable"]["spatial_compression"] == "the size of the pictures is unknown"


def test_types_and_sizes_in_mib() -> None:
    found = _analyze_latent_output(torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16), 1, 512, 512)
    assert (found["dtype"], found["device"], found["size_mb"]) == ("bfloat16", "cpu", 4 * 64 * 64 * 2 / 2**20)


def test_comfyuis_latent() -> None:
    found = _analyze_latent_output({"samples": torch.zeros(1, 4, 8, 8)}, 1, 64, 64)
    assert (found["structure"], found["shape"]) == ("ComfyUI latent", [1, 4, 8, 8])


@pytest.mark.parametrize(("thing", "status"), [(None, "missing"), ("latent", "no_tensor")])
def test_no_latent_has_a_status_and_reasons(thing: Any, status: str) -> None:
    found = _analyze_latent_output(thing, 1, 64, 64)
    assert found["status"] == status
    unknown = {name for name, value in found.items() if value is None}
    assert unknown == set(found["unavailable"])


@pytest.mark.parametrize(
    "latent",
    [torch.zeros(1, 4, 8, 8), torch.zeros(3, 3), torch.zeros(0), torch.empty(1, 4, 8, 8, device="meta")],
)
def test_nothing_unknown_lacks_its_reason(latent: torch.Tensor) -> None:
    found = _analyze_latent_output(latent, None, None, None)
    unknown = {name for name, value in found.items() if value is None}
    assert unknown <= set(found["unavailable"])
