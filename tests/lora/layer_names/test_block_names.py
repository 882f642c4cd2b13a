import pytest

from sigmascope.lora.layer_names import block_of_module, block_position


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "down_blocks.1"),
        ("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q", "down_blocks.1"),
        ("unet.up_blocks.0.resnets.1.conv1", "up_blocks.0"),
        ("diffusion_model.input_blocks.4.1.proj_in", "down_blocks.1"),
        ("lora_unet_output_blocks_11_1_proj_out", "up_blocks.3"),
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
        ("lora_unet_double_blocks_5_img_attn_qkv", "transformer_blocks.5"),
        ("diffusion_model.blocks.20.self_attn.q", "blocks.20"),
        ("text_encoder_3.encoder.block.4.layer.1.DenseReluDense.wo", "text_encoder_3.4"),
        ("encoder.block.4.layer.1.DenseReluDense.wo", "block.4"),
        ("vae.vae_model.encoder.down_blocks.1.resnets.0.conv1", "vae.encoder.down_blocks.1"),
        ("first_stage_model.decoder.conv_out", "vae.decoder.conv_out"),
        ("vae.quant_conv", "vae.quant"),
        # ComfyUI's CLIP under its own names, and OpenCLIP's layers in the single files of SD 2 and SDXL
        ("clip_l.transformer.text_model.encoder.layers.3.self_attn.q_proj", "text_encoder.3"),
        ("clip_g.transformer.text_model.encoder.layers.3.self_attn.q_proj", "text_encoder_2.3"),
        ("t5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q", "text_encoder_3.3"),
        ("umt5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q", "text_encoder.3"),
        ("qwen25_7b.transformer.model.layers.3.self_attn.q_proj", "text_encoder.3"),
        ("llama.transformer.model.layers.3.mlp.up_proj", "text_encoder_4.3"),
        ("conditioner.embedders.0.transformer.text_model.encoder.layers.4.mlp.fc1", "text_encoder.4"),
        ("conditioner.embedders.1.model.transformer.resblocks.5.attn.out_proj", "text_encoder_2.5"),
        ("cond_stage_model.model.transformer.resblocks.7.mlp.c_fc", "text_encoder.7"),
        ("diffusion_model.audio_injector.injector.0.q", "audio_injector"),
        ("lora_unet_casual_audio_encoder_encoder_final_linear", "casual_audio_encoder"),
        ("transformer.scale_shift_table", "proj_out"),
        # Several families call their list `blocks`: WAN's is its own name, others' is `transformer_blocks` in diffusers
        ("lora_unet_blocks_4_self_attn_q_proj", "transformer_blocks.4"),
        ("diffusion_model.blocks.4.mlp_x.w1", "transformer_blocks.4"),
        ("lora_unet_blocks_4_ffn_0", "blocks.4"),
        ("diffusion_model.blocks.block12.blocks.2.block.layer1", "transformer_blocks.12"),
        # LTX-2, as in bghira/SimpleTuner 2349
        ("diffusion_model.connectors.audio_connector.transformer_blocks.0.attn1.to_k", "txt_in"),
        ("transformer.transformer_blocks.3.audio_to_video_attn.to_q", "transformer_blocks.3"),
        ("diffusion_model.head.modulation", "proj_out"),
        ("layers.3.fc", "layers.3"),
        ("my_layer", "my"),
    ],
)
def test_a_block_is_named(name: str, block: str) -> None:
    assert block_of_module(name) == block


SAME_MODULES = {
    # Stable Diffusion: diffusers', kohya's and CompVis' names, as ComfyUI's own tables pair them
    "conv_in": ["unet.conv_in", "lora_unet_conv_in", "diffusion_model.input_blocks.0.0", "lora_unet_input_blocks_0_0"],
    "conv_out": ["unet.conv_out", "lora_unet_conv_out", "diffusion_model.out.2", "lora_unet_out_2"],
    "time_embedding": [
        "unet.time_embedding.linear_1",
        "lora_unet_time_embed_0",
        "diffusion_model.time_embed.0",
        # WAN
        "diffusion_model.time_embedding.0",
        "transformer.condition_embedder.time_embedder.linear_1",
        "lora_unet_condition_embedder_time_embedder_linear_1",
    ],
    "add_embedding": ["unet.add_embedding.linear_1", "diffusion_model.label_emb.0.0", "lora_unet_label_emb_0_0"],
    "down_blocks.0": ["unet.down_blocks.0.downsamplers.0.conv", "diffusion_model.input_blocks.3.0.op"],
    "down_blocks.2": ["unet.down_blocks.2.resnets.1.conv1", "lora_unet_input_blocks_8_0_in_layers_2"],
    "mid_block": ["unet.mid_block.attentions.0.proj_in", "lora_unet_middle_block_1_proj_in"],
    "up_blocks.0": ["unet.up_blocks.0.upsamplers.0.conv", "diffusion_model.output_blocks.2.2.conv"],
    # FLUX and SD 3
    "img_in": ["transformer.x_embedder", "lora_unet_img_in", "diffusion_model.x_embedder.proj", "transformer.pos_embed.proj"],
    "time_text_embed": [
        "transformer.time_text_embed.text_embedder.linear_1",
        "lora_unet_vector_in_in_layer",
        "diffusion_model.y_embedder.mlp.0",
    ],
    "transformer_blocks.7": [
        "transformer.transformer_blocks.7.attn.to_q",
        "lora_unet_double_blocks_7_img_attn_qkv",
        "diffusion_model.joint_blocks.7.x_block.attn.qkv",
    ],
    "single_transformer_blocks.7": [
        "transformer.single_transformer_blocks.7.proj_mlp",
        "lora_unet_single_blocks_7_linear1",
    ],
    "norm_out": ["transformer.norm_out.linear", "lora_unet_final_layer_adaLN_modulation_1"],
    "proj_out": ["transformer.proj_out", "diffusion_model.final_layer.linear", "diffusion_model.head.head"],
    # WAN
    "text_embedding": [
        "diffusion_model.text_embedding.0",
        "lora_unet_text_embedding_0",
        "transformer.condition_embedder.text_embedder.linear_1",
    ],
    "time_projection": ["diffusion_model.time_projection.1", "transformer.condition_embedder.time_proj"],
    "img_emb": ["diffusion_model.img_emb.proj.1", "transformer.condition_embedder.image_embedder.ff.net.0.proj"],
    "vace_blocks.0": ["diffusion_model.vace_blocks.0.self_attn.q", "lora_unet_vace_blocks_0_before_proj"],
    "blocks.0": ["diffusion_model.blocks.0.self_attn.q", "transformer.blocks.0.attn1.to_q"],
    # Text encoders: PEFT's, kohya's and ComfyUI's names
    "text_encoder.3": [
        "text_encoder.text_model.encoder.layers.3.mlp.fc1",
        "text_encoder.encoder.layers.3.mlp.fc1",
        "lora_te1_text_model_encoder_layers_3_mlp_fc1",
        "text_encoders.clip_l.transformer.text_model.encoder.layers.3.mlp.fc1",
        "text_encoders.qwen25_7b.transformer.model.layers.3.self_attn.q_proj",
        "text_encoders.umt5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q",
    ],
    "text_encoder_2.3": [
        "text_encoder_2.text_model.encoder.layers.3.mlp.fc1",
        "lora_te2_text_model_encoder_layers_3_mlp_fc1",
        "text_encoders.clip_g.transformer.text_model.encoder.layers.3.mlp.fc1",
    ],
    "text_encoder_3.3": [
        "text_encoder_3.encoder.block.3.layer.0.SelfAttention.q",
        "text_encoder_2.encoder.block.3.layer.0.SelfAttention.q",  # FLUX has two
        "lora_te3_encoder_block_3_layer_0_SelfAttention_q",
        "text_encoders.t5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q",
    ],
}  # fmt: skip


@pytest.mark.parametrize("block", SAME_MODULES)
def test_a_module_has_one_block_name_in_every_format(block: str) -> None:
    assert {name: block_of_module(name) for name in SAME_MODULES[block]} == dict.fromkeys(
        SAME_MODULES[block], block
    )


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
