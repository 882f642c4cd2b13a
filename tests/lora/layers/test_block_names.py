import pytest

from sigmascope.lora.layers import block_of_module, block_position


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "down_blocks.1"),
        ("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q", "down_blocks.1"),
        ("unet.up_blocks.0.resnets.1.conv1", "up_blocks.0"),
        ("diffusion_model.input_blocks.4.1.proj_in", "input_blocks.4"),
        ("lora_unet_output_blocks_11_1_proj_out", "output_blocks.11"),
        ("denoiser.mid_block.attentions.0.proj_in", "mid_block"),
        ("lora_unet_mid_block_attentions_0_proj_out", "mid_block"),
        ("denoiser.conv_in", "conv_in"),
        ("conv_out", "conv_out"),
        ("lora_unet_time_embedding_linear_1", "time_embedding"),
        ("lora_te_text_model_encoder_layers_3_mlp_fc1", "text_encoder.3"),
        ("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", "text_encoder.0"),
        ("lora_te2_text_model_encoder_layers_11_self_attn_q_proj", "text_encoder_2.11"),
        ("text_encoder_2.text_model.encoder.layers.7.mlp.fc1", "text_encoder_2.7"),
        ("transformer.transformer_blocks.12.attn.to_q", "transformer_blocks.12"),
        ("transformer.single_transformer_blocks.3.proj_mlp", "single_transformer_blocks.3"),
        ("lora_unet_double_blocks_5_img_attn_qkv", "double_blocks.5"),
        ("diffusion_model.blocks.20.self_attn.q", "blocks.20"),
        ("text_encoder_3.encoder.block.4.layer.1.DenseReluDense.wo", "text_encoder_3.4"),
        ("encoder.block.4.layer.1.DenseReluDense.wo", "block.4"),
        ("vae.vae_model.encoder.down_blocks.1.resnets.0.conv1", "vae.encoder.down_blocks.1"),
        ("first_stage_model.decoder.conv_out", "vae.decoder.conv_out"),
        ("vae.quant_conv", "vae.quant"),
        ("layers.3.fc", "layers.3"),
        ("my_layer", "my"),
    ],
)
def test_the_block_is_the_same_in_every_format(name: str, block: str) -> None:
    assert block_of_module(name) == block


def test_blocks_are_ordered_as_a_latent_passes_them() -> None:
    blocks = ["conv_out", "up_blocks.0", "strange", "down_blocks.10", "down_blocks.2", "mid_block", "conv_in"]
    assert sorted(blocks, key=block_position) == [
        "conv_in",
        "down_blocks.2",
        "down_blocks.10",
        "mid_block",
        "up_blocks.0",
        "conv_out",
        "strange",
    ]
