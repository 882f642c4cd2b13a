"""Plans for FLUX.1-dev at full size: its layers without memory behind them, on devices that people have."""

from typing import Any

import pytest
import torch
from tests.families.tokenizers import clip_tokenizer, t5_tokenizer
from tests.pipeline.optimized import H100, RTX_3060, RTX_4090, T4, automatic, chosen, reason

_CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
_VAE = {
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 1024,
}


@pytest.fixture(scope="module")
def flux_dev() -> Any:
    import diffusers
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            parts = {
                "transformer": diffusers.FluxTransformer2DModel(guidance_embeds=True),
                "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**_CLIP_L)),
                "text_encoder_2": transformers.T5EncoderModel(
                    transformers.T5Config(**_T5_XXL, feed_forward_proj="gated-gelu")
                ),
                "vae": diffusers.AutoencoderKL(**_VAE),
            }
    finally:
        torch.set_default_dtype(before)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    tokenizers = {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}
    return diffusers.FluxPipeline(scheduler=scheduler, **tokenizers, **parts)


def test_its_transformer_has_twelve_billion_parameters(flux_dev: Any) -> None:
    plan = automatic(H100).plan(flux_dev)
    assert plan.memory.weights_mb["transformer"] * 2**20 / 2 == pytest.approx(11.9e9, rel=0.01)


def test_on_80_gb_all_of_it_stays_on_the_device(flux_dev: Any) -> None:
    plan = automatic(H100).plan(flux_dev)
    assert [choice.kind for choice in plan.choices] == ["channels_last", "attention", "placement", "compile"]
    assert chosen(plan, "placement")[0].options["how"] == "device"


def test_on_24_gb_its_weights_are_stored_in_float8_and_models_take_turns(flux_dev: Any) -> None:
    plan = automatic(RTX_4090).plan(flux_dev)
    assert chosen(plan, "layerwise_casting")[0].necessary
    assert chosen(plan, "placement")[0].options["how"] == "model"


def test_on_24_gb_layers_take_turns_if_number_formats_must_stay(flux_dev: Any) -> None:
    plan = automatic(RTX_4090, image="rounding").plan(flux_dev)
    (choice,) = chosen(plan, "placement")
    assert (choice.options["how"], choice.options["use_stream"]) == ("group", True)


@pytest.mark.parametrize("hardware", [RTX_3060, T4], ids=str)
def test_below_16_gb_layers_take_turns_and_the_image_stays(flux_dev: Any, hardware: Any) -> None:
    plan = automatic(hardware).plan(flux_dev)
    assert chosen(plan, "placement")[0].options["how"] == "group"
    assert reason(plan, "layerwise_casting").startswith("it would not fit even so")


def test_where_layers_move_nothing_is_compiled(flux_dev: Any) -> None:
    assert "layers move in and out" in reason(automatic(RTX_3060).plan(flux_dev), "compile")


def test_a_device_that_emulates_bfloat16_is_told_of(flux_dev: Any) -> None:
    assert "bfloat16 is slow on this device" in reason(automatic(T4).plan(flux_dev), "precision")


def test_more_pixels_take_more_memory(flux_dev: Any) -> None:
    small, large = (automatic(H100, height=side, width=side).plan(flux_dev).memory for side in (512, 2048))
    assert small.denoiser_mb is not None
    assert large.denoiser_mb is not None
    assert large.denoiser_mb > 8 * small.denoiser_mb
