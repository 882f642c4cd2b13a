from pathlib import Path

import pytest

from sigmascope.errors import WriteError
from sigmascope.lora.layer_names import block_of_module, in_coverage, layer_order, write_layer_names

TRANSFORMER = "denoiser.up_blocks.0.attentions.1"


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("denoiser.down_blocks.0.resnets.0.conv1", "down_blocks.0"),
        ("denoiser.up_blocks.1.upsamplers.0.conv", "up_blocks.1"),
        ("denoiser.mid_block.attentions.0.proj_in", "mid_block"),
        ("denoiser.time_embedding.linear_1", "time_embedding"),
        ("denoiser.conv_in", "conv_in"),
        ("transformer.single_transformer_blocks.3.proj_mlp", "single_transformer_blocks.3"),
        ("model.diffusion_model.output_blocks.3.1.proj_in", "up_blocks.1"),
        ("vae.vae_model.decoder.up_blocks.2.resnets.0.conv1", "vae.decoder.up_blocks.2"),
        ("text_encoder_2.encoder.block.5.layer.0.SelfAttention.q", "text_encoder_3.5"),
    ],
)
def test_the_block_of_a_layer(module: str, block: str) -> None:
    assert block_of_module(module) == block


@pytest.mark.parametrize(
    ("module", "attention", "extended"),
    [
        (f"{TRANSFORMER}.transformer_blocks.0.attn1.to_q", True, True),
        (f"{TRANSFORMER}.transformer_blocks.9.attn2.to_out.0", True, True),
        (f"{TRANSFORMER}.transformer_blocks.0.ff.net.0.proj", False, True),
        (f"{TRANSFORMER}.proj_in", False, True),
        (f"{TRANSFORMER}.proj_out", False, True),
        ("denoiser.up_blocks.0.resnets.0.time_emb_proj", False, False),
        ("denoiser.conv_out", False, False),
        ("transformer.transformer_blocks.0.attn.add_q_proj", True, True),
        ("transformer.transformer_blocks.0.ff_context.net.2", False, True),
        ("transformer.transformer_blocks.0.norm1.linear", False, False),
        ("transformer.single_transformer_blocks.3.attn.to_q", True, True),
        ("transformer.single_transformer_blocks.3.proj_mlp", False, True),
        ("transformer.single_transformer_blocks.3.proj_out", False, True),
        ("transformer.proj_out", False, False),
        ("double_blocks.5.img_attn.qkv", True, True),
        ("double_blocks.5.txt_mlp.0", False, True),
        ("double_blocks.5.img_mod.lin", False, False),
        ("single_blocks.7.linear1", True, True),
        ("single_blocks.7.linear2", False, True),
        ("joint_blocks.2.x_block.attn.qkv", True, True),
        ("joint_blocks.2.context_block.mlp.fc1", False, True),
        ("model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k", True, True),
        ("model.diffusion_model.input_blocks.1.1.proj_in", False, True),
        ("model.diffusion_model.out.2", False, False),
        ("blocks.3.cross_attn.k", True, True),
        ("blocks.3.ffn.0", False, True),
        ("transformer.blocks.3.attn2.add_k_proj", True, True),
        ("text_encoder.text_model.encoder.layers.0.self_attn.out_proj", True, True),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1", False, True),
        ("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q", True, True),
        ("text_encoder_2.encoder.block.0.layer.1.DenseReluDense.wi_0", False, True),
        ("vae.decoder.mid_block.attentions.0.to_q", True, True),
        ("vae.decoder.mid_block.resnets.0.conv1", False, False),
    ],
)
def test_coverage_by_name(module: str, attention: bool, extended: bool) -> None:
    assert in_coverage(module, "attention") is attention
    assert in_coverage(module, "extended") is extended
    assert in_coverage(module, "full")


def test_layers_are_ordered_as_the_latent_passes_them_and_by_number() -> None:
    ordered = [
        "denoiser.conv_in",
        "denoiser.time_embedding.linear_1",
        "denoiser.down_blocks.0.resnets.0.conv1",
        "denoiser.down_blocks.2.attentions.0.transformer_blocks.2.attn1.to_q",
        "denoiser.down_blocks.2.attentions.0.transformer_blocks.10.attn1.to_q",
        "denoiser.mid_block.resnets.0.conv1",
        "denoiser.up_blocks.0.resnets.0.conv1",
        "denoiser.conv_out",
        "denoiser.something_else",
    ]
    shuffled = ordered[5:] + ordered[:5]
    assert sorted(shuffled, key=layer_order) == ordered


def test_layer_names_are_written_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lora_layer_names.txt"
    write_layer_names(path, ["denoiser.conv_out", "denoiser.mid_block.proj", "denoiser.conv_in"])
    assert (
        path.read_text(encoding="utf-8") == "denoiser.conv_in\ndenoiser.mid_block.proj\ndenoiser.conv_out\n"
    )


def test_layer_names_cannot_go_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError, match="taken"):
        write_layer_names(tmp_path / "taken" / "names.txt", ["denoiser.conv_in"])
