"""Against a real ComfyUI: what its nodes and VAEs give is read as what it is."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from tests.comfy_shapes.checkout import Checkout

from sigmascope.stages.latent_encoding import (
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
)
from sigmascope.stages.latent_facts import vae_facts

pytestmark = pytest.mark.comfyui
LENGTH, HEIGHT, WIDTH = 81, 64, 96


class WanVae:
    """A real WAN VAE of diffusers behind the call that ComfyUI's nodes make."""

    def __init__(self) -> None:
        sizes = {"base_dim": 3, "dim_mult": [1] * 4, "num_res_blocks": 1}
        self.vae = AutoencoderKLWan(z_dim=16, temperal_downsample=[False, True, True], **sizes).eval()

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        video = (2 * images[..., :3] - 1).movedim(-1, 0)[None]
        with torch.no_grad():
            latent: torch.Tensor = self.vae.encode(video).latent_dist.mean
        return latent


@pytest.mark.parametrize("has_reference", [False, True])
def test_wan_vace_to_video(comfy: Checkout, has_reference: bool) -> None:
    if not (comfy.folder / "comfy_extras" / "nodes_wan.py").is_file():
        pytest.skip("this version is older than WAN")
    node, vae = comfy.module("comfy_extras.nodes_wan").WanVaceToVideo, WanVae()
    conditioning: Any = [[torch.zeros(1, 512, 4096), {}]]
    control = torch.rand(LENGTH, HEIGHT, WIDTH, 3)
    reference = torch.rand(1, HEIGHT, WIDTH, 3) if has_reference else None
    call = getattr(node, "execute", None) or node().encode
    output = call(
        conditioning,
        conditioning,
        vae,
        WIDTH,
        HEIGHT,
        LENGTH,
        1,
        1.0,
        control_video=control,
        reference_image=reference,
    )
    baseline = capture_latent_generation_baseline(vae.vae, control)
    found = analyze_latent_generation_results(baseline, output, 1.0, 1, None, LENGTH, HEIGHT, WIDTH)
    assert found["findings"] == []
    assert found["latent_analysis"]["shape"] == [1, 16, 21 + has_reference, 8, 12]
    assert found["latent_analysis"]["temporal_compression"] == pytest.approx(81 / 21)
    assert found["vace_conditioning"]["vace_mask"]["shape"] == [1, 64, 21 + has_reference, 8, 12]
    latent = getattr(output, "result", output)[2]
    alone = analyze_latent_generation_results(baseline, latent, 1.0, 1, None, LENGTH, HEIGHT, WIDTH)
    assert [finding["id"] for finding in alone["findings"]] == ["latent_constant"]  # a warning
    assert alone["success"] is True
    assert alone["latent_analysis"]["temporal_compression"] == pytest.approx(81 / 21)


def test_a_vae_of_comfyui(comfy: Checkout) -> None:
    taesd = comfy.module("comfy.taesd.taesd").TAESD()
    state = {name: torch.randn_like(value) / 16 for name, value in taesd.state_dict().items()}
    vae = comfy.module("comfy.sd").VAE(sd=state)
    facts = vae_facts(vae)
    assert (facts.class_name, facts.latent_channels, facts.spatial_factor, facts.is_video) == (
        "TAESD",
        4,
        8,
        False,
    )
    assert facts.nbytes
    pictures = torch.rand(2, HEIGHT, WIDTH, 3)
    baseline = capture_latent_generation_baseline(vae, pictures)
    found = analyze_latent_generation_results(baseline, {"samples": vae.encode(pictures)}, 1.0, 1)
    assert found["findings"] == []
    assert found["latent_analysis"]["shape"] == [2, 4, 8, 12]
