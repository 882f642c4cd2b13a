from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import nn

from sigmascope.errors import ModelMismatchError
from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import LbmModel, build_lbm

# Written by hand from the layout that SPEC section 7 describes, with the shapes of an SDXL-shaped denoiser.
KEYS = {
    "num_iterations": (),
    "denoiser.conv_in.weight": (320, 4, 3, 3),
    "denoiser.time_embedding.linear_1.weight": (1280, 320),
    "denoiser.time_embedding.linear_2.bias": (1280,),
    "denoiser.down_blocks.0.resnets.0.conv1.weight": (320, 320, 3, 3),
    "denoiser.down_blocks.0.downsamplers.0.conv.weight": (320, 320, 3, 3),
    "denoiser.down_blocks.1.resnets.0.conv_shortcut.weight": (640, 320, 1, 1),
    "denoiser.down_blocks.1.attentions.0.proj_in.weight": (640, 640),
    "denoiser.down_blocks.1.attentions.1.transformer_blocks.1.attn2.to_k.weight": (640, 640),
    "denoiser.down_blocks.2.attentions.1.transformer_blocks.9.attn2.to_v.weight": (1280, 1280),
    "denoiser.down_blocks.2.attentions.0.transformer_blocks.0.ff.net.0.proj.weight": (10240, 1280),
    "denoiser.down_blocks.2.attentions.0.transformer_blocks.0.ff.net.2.weight": (1280, 5120),
    "denoiser.mid_block.attentions.0.transformer_blocks.9.attn1.to_out.0.weight": (1280, 1280),
    "denoiser.mid_block.resnets.1.time_emb_proj.weight": (1280, 1280),
    "denoiser.up_blocks.0.resnets.2.conv1.weight": (1280, 1920, 3, 3),
    "denoiser.up_blocks.0.attentions.2.transformer_blocks.9.norm3.weight": (1280,),
    "denoiser.up_blocks.1.attentions.2.transformer_blocks.1.attn1.to_q.weight": (640, 640),
    "denoiser.up_blocks.1.upsamplers.0.conv.weight": (640, 640, 3, 3),
    "denoiser.up_blocks.2.resnets.2.conv_shortcut.weight": (320, 640, 1, 1),
    "denoiser.conv_norm_out.weight": (320,),
    "denoiser.conv_out.weight": (4, 320, 3, 3),
    "vae.vae_model.encoder.conv_in.weight": (128, 3, 3, 3),
    "vae.vae_model.encoder.down_blocks.2.resnets.0.conv_shortcut.weight": (512, 256, 1, 1),
    "vae.vae_model.encoder.mid_block.attentions.0.to_q.weight": (512, 512),
    "vae.vae_model.encoder.conv_out.weight": (8, 512, 3, 3),
    "vae.vae_model.decoder.conv_in.weight": (512, 4, 3, 3),
    "vae.vae_model.decoder.up_blocks.3.resnets.2.conv2.weight": (128, 128, 3, 3),
    "vae.vae_model.quant_conv.weight": (8, 8, 1, 1),
    "vae.vae_model.post_quant_conv.weight": (4, 4, 1, 1),
}
SDXL_VAE_PARAMETERS = 83_653_863


@pytest.fixture(scope="module")
def full_size() -> LbmModel:
    return build_lbm(device="meta", dtype=torch.bfloat16)


def test_full_size_denoiser_has_the_stated_parameters(full_size: LbmModel) -> None:
    assert sum(parameter.numel() for parameter in full_size.denoiser.parameters()) == 2_426_231_044


def test_full_size_denoiser_has_792_layers(full_size: LbmModel) -> None:
    layers = [type(module) for module in full_size.denoiser.modules()]
    assert layers.count(nn.Linear) == 741
    assert layers.count(nn.Conv2d) == 51


def test_full_size_vae_is_sdxls(full_size: LbmModel) -> None:
    assert sum(parameter.numel() for parameter in full_size.vae.parameters()) == SDXL_VAE_PARAMETERS


def test_keys_and_shapes_are_lbms(full_size: LbmModel) -> None:
    state = full_size.state_dict()
    assert {key: tuple(state[key].shape) for key in KEYS if key in state} == KEYS
    assert {key.partition(".")[0] for key in state} == {"denoiser", "vae", "num_iterations"}
    assert all(key.startswith("vae.vae_model.") for key in state if key.startswith("vae"))
    assert not any("add_embedding" in key for key in state)


def test_iterations_stay_float32(full_size: LbmModel) -> None:
    assert full_size.num_iterations.dtype == torch.float32
    assert full_size.denoiser.dtype == torch.bfloat16
    assert full_size.vae.dtype == torch.bfloat16


def test_cross_attention_attends_to_the_hidden_states(tiny_model: LbmModel) -> None:
    """Independent path: the same block called with its own normed states as text gives the same."""
    block = next(
        module for module in tiny_model.denoiser.modules() if isinstance(module, BasicTransformerBlock)
    )
    seen: list[torch.Tensor] = []
    hidden = torch.randn(1, 6, 64)
    hook = block.attn2.to_q.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    keys = block.attn2.to_k.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    try:
        block(hidden)
    finally:
        hook.remove()
        keys.remove()
    assert torch.equal(seen[0], seen[1])


def test_denoiser_sees_sigma_as_timestep(tiny_model: LbmModel) -> None:
    x_t = torch.randn(2, 4, 8, 8)
    sigma = torch.tensor([0.25, 1.0])
    direct = tiny_model.denoiser(x_t, torch.tensor([250.0, 1000.0]), encoder_hidden_states=None).sample
    assert torch.equal(tiny_model(x_t, sigma), direct)


def test_prediction_has_the_dtype_of_the_latent(tiny_config: LbmConfig) -> None:
    model = build_lbm(tiny_config, dtype=torch.bfloat16)
    assert model(torch.randn(1, 4, 8, 8), torch.ones(1)).dtype == torch.float32


def test_conditioning_joins_on_channels(tiny_yaml: dict[str, Any]) -> None:
    tiny_yaml |= {
        "conditioning_images_keys": ["depth"],
        "conditioning_masks_keys": ["region"],
        "unet_input_channels": 9,
    }
    model = build_lbm(parse_config(tiny_yaml))
    x_t, extra = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 8, 8)
    assert model(x_t, torch.ones(1), extra).shape == (1, 4, 8, 8)
    with pytest.raises(ModelMismatchError, match="takes 9 channels, got 4"):
        model(x_t, torch.ones(1))


def test_any_depth_builds(tiny_yaml: dict[str, Any]) -> None:
    tiny_yaml["denoiser"] |= {
        "block_out_channels": [32],
        "down_block_types": ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"],
        "mid_block_type": None,
        "attention_head_dim": 2,
    }
    model = build_lbm(parse_config(tiny_yaml))
    assert model(torch.randn(1, 4, 5, 7), torch.ones(1)).shape == (1, 4, 5, 7)
