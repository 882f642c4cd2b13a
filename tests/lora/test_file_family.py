import pytest
import torch

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.file_family import file_family
from sigmascope.lora.layer_names import NearestNames


def lora_of(*names: str, width: int = 4, header: dict[str, str] | None = None) -> LoraFile:
    factors = LoraFactors(torch.zeros(8, 1), torch.zeros(1, width), 1.0, (8, width))
    return LoraFile(dict.fromkeys(names, factors), header or {}, format="kohya")


UNET = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"


@pytest.mark.parametrize(("width", "family"), [(768, "sd15"), (1024, "sd2"), (2048, "sdxl"), (36, None)])
def test_unets_are_told_by_what_their_cross_attention_reads(width: int, family: str | None) -> None:
    found = file_family(lora_of(UNET, width=width))
    assert (found.family, found.is_unet) == (family, True)


def test_text_that_is_as_wide_as_a_small_unets_layers_makes_no_lbm() -> None:
    assert file_family(lora_of(UNET, width=8)).family is None  # its layers are 8 wide


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("transformer.single_transformer_blocks.0.attn.to_q", "flux"),
        ("lora_unet_double_blocks_0_img_attn_qkv", "flux"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv", "sd3"),
        ("blocks.3.self_attn.q", "wan"),
        ("transformer.vace_blocks.3.attn1.to_q", "wan"),
        ("transformer.transformer_blocks.0.img_mlp.net.2", "qwen_image"),
        ("denoiser.conv_in", "lbm"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", None),
    ],
)
def test_others_are_told_by_their_names(name: str, family: str | None) -> None:
    assert file_family(lora_of(name)).family == family


def test_the_header_counts_where_names_leave_it_open() -> None:
    header = {"ss_base_model_version": "sdxl_base_v1-0"}
    assert file_family(lora_of("lora_unet_conv_in", header=header)).family == "sdxl"


def test_a_header_does_not_outvote_the_names() -> None:
    header = {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}
    assert file_family(lora_of("lora_unet_double_blocks_0_img_attn_qkv", header=header)).family == "flux"


def test_a_header_that_was_copied_from_another_file_does_not_name_the_family() -> None:
    header = {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}
    found = file_family(lora_of("transformer.transformer_blocks.0.attn.to_q", header=header))
    assert (found.family, found.is_unet) == (None, False)
    assert "SDXL" in found.evidence


def test_some_renamed_blocks_do_not_hide_a_family() -> None:
    names = [f"transformer.blocks.{number}.attn1.to_q" for number in range(3)]
    assert file_family(lora_of(*names, "transformer.added_blocks.0.attn1.to_q")).family == "wan"


def test_a_file_of_a_wan_variant_is_told_by_the_variants_own_layers() -> None:
    """Names of ComfyUI's models: WAN-VACE with whole changes of weights and biases, WAN-S2V's audio layers."""
    vace = [
        f"diffusion_model.vace_blocks.{number}.{layer}{end}"
        for number in range(2)
        for layer in ("self_attn.q", "ffn.0", "before_proj", "after_proj")
        for end in ("", ".bias")
    ]
    sound = [
        f"diffusion_model.audio_injector.injector.{number}.{name}" for number in range(2) for name in "qkvo"
    ]
    flat = ["lora_unet_vace_blocks_0_self_attn_q", "lora_unet_vace_blocks_0_before_proj"]
    for names in (vace, sound, [*sound, "diffusion_model.casual_audio_encoder.encoder.final_linear"], flat):
        assert file_family(lora_of(*names)).family == "wan"


def test_the_nearest_names_share_the_rarest_words() -> None:
    names = NearestNames(["blocks.0.attn1.to_q", "blocks.0.attn1.to_k", "blocks.1.ff.net.2", "conv_in"])
    assert names.nearest("solo_0_attn1_to_q")[:2] == ("blocks.0.attn1.to_q", "blocks.0.attn1.to_k")
    assert names.nearest("nothing.alike") == ()
