from collections.abc import Callable

import pytest
import torch

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.alignment import align_all
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile

MakeFactors = Callable[..., LoraFactors]


@pytest.fixture
def lora(make_factors: MakeFactors) -> Callable[..., LoraFile]:
    """A LoRA of the given names, all for weights (6, 4)."""

    def make(*names: str, format: str = "native", out: int = 6) -> LoraFile:
        return LoraFile({name: make_factors((out, 4), 2, seed=len(name)) for name in names}, format=format)

    return make


def test_one_layer_has_one_name_in_all_formats(lora: Callable[..., LoraFile]) -> None:
    united = align_all(
        [
            lora("denoiser.down_blocks.1.attentions.0.proj_in"),
            lora("lora_unet_down_blocks_1_attentions_0_proj_in", format="kohya"),
            lora("unet.down_blocks.1.attentions.0.proj_in", format="peft"),
            lora("diffusion_model.input_blocks.4.1.proj_in", format="comfyui"),
            lora("lora_unet_input_blocks_4_1_proj_in", format="kohya"),
        ]
    )
    assert united.names == ("denoiser.down_blocks.1.attentions.0.proj_in",)
    assert united.positions(united.names[0]) == (0, 1, 2, 3, 4)


def test_names_come_in_the_first_order_and_then_what_only_later_ones_have(
    lora: Callable[..., LoraFile],
) -> None:
    united = align_all(
        [
            lora("denoiser.conv_out", "denoiser.conv_in"),
            lora("lora_unet_mid_block_attentions_0_proj_in", "lora_unet_conv_in"),
        ]
    )
    assert united.names == (
        "denoiser.conv_out",
        "denoiser.conv_in",
        "denoiser.mid_block.attentions.0.proj_in",
    )
    assert [united.positions(name) for name in united.names] == [(0,), (0, 1), (1,)]


def test_original_names_stay_where_no_lora_has_diffusers(lora: Callable[..., LoraFile]) -> None:
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    united = align_all([lora(name, format="kohya", out=18), lora(name, format="kohya", out=18)])
    assert united.names == ("denoiser.double_blocks.0.img_attn.qkv",)
    assert united.layout.naming == "original"


def test_a_fused_matrix_is_divided_where_another_lora_has_its_parts(lora: Callable[..., LoraFile]) -> None:
    fused = lora("lora_unet_double_blocks_0_img_attn_qkv", format="kohya", out=18)
    one = lora("transformer.transformer_blocks.0.attn.to_k", format="peft")
    united = align_all([one, fused])
    start = "denoiser.transformer_blocks.0.attn.to_"
    assert united.names == (f"{start}k", f"{start}q", f"{start}v")
    whole = fused.modules["lora_unet_double_blocks_0_img_attn_qkv"].delta()
    for index, part in enumerate("qkv"):
        change = united.change(1, f"{start}{part}")
        assert torch.equal(change.delta(), whole[6 * index : 6 * index + 6])
        assert united.loras[1].shape_of(f"{start}{part}") == (6, 4)


def test_a_whole_change_of_a_fused_matrix_keeps_its_name() -> None:
    whole = LoraFile(
        {},
        changes={"lora_unet_double_blocks_0_img_attn_qkv": DiffChange({"diff": torch.zeros(18, 4)})},
        format="kohya",
    )
    other = LoraFile(
        {}, changes={"transformer.x_embedder": DiffChange({"diff": torch.zeros(6, 4)})}, format="peft"
    )
    assert align_all([whole, other]).names == ("denoiser.double_blocks.0.img_attn.qkv", "denoiser.x_embedder")


def test_names_of_no_known_model_are_matched_as_they_are(lora: Callable[..., LoraFile]) -> None:
    united = align_all([lora("lora_unet_my_own_layer", format="kohya"), lora("my.own.layer")])
    assert len(united.names) == 1
    assert united.positions(united.names[0]) == (0, 1)
    alone = align_all([lora("lora_unet_my_own_layer", format="kohya")])
    assert alone.names == ("lora_unet_my_own_layer",)


def test_text_encoders_are_kept_apart(lora: Callable[..., LoraFile]) -> None:
    end = "text_model_encoder_layers_0_mlp_fc1"
    united = align_all([lora(f"lora_te1_{end}", f"lora_te2_{end}", format="kohya")])
    assert len(united.names) == 2
    peft = lora("text_encoder_2.text_model.encoder.layers.0.mlp.fc1", format="peft")
    both = align_all([lora(f"lora_te1_{end}", f"lora_te2_{end}", format="kohya"), peft])
    assert [both.positions(name) for name in both.names] == [(0,), (0, 1)]


def test_changes_of_biases_are_their_own(lora: Callable[..., LoraFile]) -> None:
    change = DiffChange({"diff": torch.zeros(6)})
    one = LoraFile(
        dict(lora("lora_unet_conv_in").modules), changes={"lora_unet_conv_in.bias": change}, format="kohya"
    )
    two = LoraFile({}, changes={"denoiser.conv_in.bias": change})
    united = align_all([one, two])
    assert united.names == ("denoiser.conv_in", "denoiser.conv_in.bias")
    assert united.positions("denoiser.conv_in.bias") == (0, 1)


def test_one_layer_under_two_names_is_refused(lora: Callable[..., LoraFile]) -> None:
    twice = lora("lora_unet_conv_in", "lora_unet_input_blocks_0_0", format="kohya")
    with pytest.raises(LoraFormatError, match=r"both for denoiser\.conv_in"):
        align_all([twice])


def test_a_small_unet_counts_its_blocks_by_its_own_modules(lora: Callable[..., LoraFile]) -> None:
    sgm = ("input_blocks.2.0.op", "input_blocks.4.0.op", "input_blocks.3.1.proj_in")
    ours = (
        "down_blocks.0.downsamplers.0.conv",
        "down_blocks.1.downsamplers.0.conv",
        "down_blocks.1.attentions.0.proj_in",
    )
    united = align_all(
        [
            lora(*(f"denoiser.{name}" for name in ours)),
            lora(*(f"diffusion_model.{name}" for name in sgm), format="comfyui"),
        ]
    )
    assert united.names == tuple(f"denoiser.{name}" for name in ours)
    assert [united.positions(name) for name in united.names] == [(0, 1)] * 3
