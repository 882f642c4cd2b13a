"""Fused matrices divided and joined as diffusers' own conversions of models and LoRAs do it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.alignment import align
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.families.known import row_of_diffusers
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import open_lora

diffusers: Any = pytest.importorskip("diffusers")

FLUX = ModelLayout("flux", "diffusers", {"denoiser": "transformer."})
SD3 = {
    "diffusers": ModelLayout("sd3", "diffusers", {"denoiser": "transformer."}),
    "original": ModelLayout("sd3", "original", {"denoiser": "model.diffusion_model."}),
}


def random_factors(shape: tuple[int, ...], rank: int, seed: int, alpha: float | None = None) -> LoraFactors:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(shape[0], rank, generator=generator)
    down = torch.randn(rank, int(torch.Size(shape[1:]).numel()), generator=generator)
    return LoraFactors(up, down, float(rank) if alpha is None else alpha, shape)


def sd3_layers() -> dict[str, tuple[int, ...]]:
    """Layers of a small SD 3.5: one block with a second attention, and the last block, which has no context output."""
    with torch.device("meta"):
        model = diffusers.SD3Transformer2DModel(
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=2,
            joint_attention_dim=6,
            caption_projection_dim=8,
            pooled_projection_dim=10,
            dual_attention_layers=(0,),
        )
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    return {
        name: tuple(layer.weight.shape) for name, layer in model.named_modules() if isinstance(layer, kinds)
    }


def sd3_lora() -> LoraFile:
    shapes = sd3_layers()
    return LoraFile(
        {
            f"transformer.{name}": random_factors(shape, rank=1 + index % 3, seed=index, alpha=2.0)
            for index, (name, shape) in enumerate(shapes.items())
        },
        format="peft",
    )


def original_layers() -> list[str]:
    rows = (row_of_diffusers("sd3", name) for name in sd3_layers())
    names = dict.fromkeys(row.original for row in rows if row is not None)
    return [f"model.diffusion_model.{name}" for name in names]


def test_a_lora_joined_for_an_original_sd3_is_what_diffusers_makes_its_own_of() -> None:
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    lora = sd3_lora()
    aligned = align(lora, original_layers(), SD3["original"])
    assert aligned.unmatched == ()
    assert set(aligned.lora.modules) == set(original_layers())
    original: dict[str, Tensor] = {"pos_embed": torch.zeros(1)}
    for layer, factors in aligned.lora.modules.items():
        name = layer.removeprefix("model.diffusion_model.")
        original |= {f"{name}.weight": factors.delta(), f"{name}.bias": torch.zeros(factors.weight_shape[0])}
    converted = convert_sd3_transformer_checkpoint_to_diffusers(original)
    for name, factors in lora.modules.items():
        torch.testing.assert_close(converted[name.removeprefix("transformer.") + ".weight"], factors.delta())


def test_what_was_joined_is_divided_again() -> None:
    lora = sd3_lora()
    joined = align(lora, original_layers(), SD3["original"]).lora
    divided = align(joined, list(lora.modules), SD3["diffusers"])
    assert divided.unmatched == ()
    for name, factors in lora.modules.items():
        torch.testing.assert_close(divided.lora.modules[name].delta(), factors.delta())


def test_shapes_and_ranks_are_known_before_anything_is_made() -> None:
    for layers, layout in (
        (original_layers(), SD3["original"]),
        (list(sd3_lora().modules), SD3["diffusers"]),
    ):
        joined = align(sd3_lora(), original_layers(), SD3["original"]).lora
        aligned = align(joined, layers, layout).lora
        for layer, factors in aligned.modules.items():
            facts = aligned.facts_of(layer)
            assert (facts.weight_shape, facts.rank) == (factors.weight_shape, factors.rank)
            assert facts.parameters == factors.parameters


def test_a_part_that_is_not_there_changes_nothing() -> None:
    name = "transformer.transformer_blocks.0.attn.to_k"
    lora = LoraFile({name: random_factors((8, 8), rank=2, seed=0)})
    fused = "model.diffusion_model.joint_blocks.0.x_block.attn.qkv"
    aligned = align(lora, original_layers(), SD3["original"])
    delta = aligned.lora.modules[fused].delta()
    assert aligned.sources == {fused: (name,)}
    torch.testing.assert_close(delta[8:16], lora.modules[name].delta())
    assert not delta[:8].any()
    assert not delta[16:].any()


def flux_file(path: Path) -> dict[str, Tensor]:
    """A kohya LoRA of every layer of one double and one single block, at FLUX' own width, and the rest."""
    shapes = {
        "double_blocks_0_img_attn_qkv": (9216, 3072),
        "double_blocks_0_txt_attn_qkv": (9216, 3072),
        "double_blocks_0_img_attn_proj": (3072, 3072),
        "double_blocks_0_txt_mlp_2": (3072, 12288),
        "double_blocks_0_img_mod_lin": (18432, 3072),
        "single_blocks_0_linear1": (21504, 3072),
        "single_blocks_0_linear2": (3072, 15360),
        "single_blocks_0_modulation_lin": (9216, 3072),
        "final_layer_adaLN_modulation_1": (6144, 3072),
        "final_layer_linear": (64, 3072),
        "txt_in": (3072, 4096),
    }
    tensors: dict[str, Tensor] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        factors = random_factors(shape, 2, seed)
        tensors[f"lora_unet_{name}.lora_up.weight"] = factors.up
        tensors[f"lora_unet_{name}.lora_down.weight"] = factors.down
        # diffusers 0.42 reads no alpha of the final layer
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(2.0 if "final" in name else 4.0)
    save_file(tensors, path)
    return tensors


@pytest.mark.slow
def test_a_kohya_lora_of_flux_is_divided_as_diffusers_does(tmp_path: Path) -> None:
    tensors = flux_file(tmp_path / "flux.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = diffusers.FluxPipeline.lora_state_dict(dict(tensors))
    ups = {key.removesuffix(".lora_B.weight"): key for key in expected if key.endswith(".lora_B.weight")}
    model = {f"transformer.{name.removeprefix('transformer.')}": name for name in ups}
    with open_lora(tmp_path / "flux.safetensors") as lora:
        aligned = align(lora, list(model), FLUX)
        assert aligned.unmatched == ()
        assert set(aligned.lora.modules) == set(model)
        for layer, name in model.items():
            factors = aligned.lora.modules[layer]
            x = torch.randn(factors.weight_shape[1])
            through = expected[f"{name}.lora_B.weight"] @ (expected[f"{name}.lora_A.weight"] @ x)
            delta = factors.delta()
            # ‖ΔW‖ is what ‖ΔW·x‖ is in the mean: an x that the layer nearly drops leaves little but rounding
            assert torch.dist(delta @ x, through) < 1e-5 * delta.norm()


def test_projections_of_a_text_encoder_are_joined_for_open_clips_own_keys() -> None:
    lora = LoraFile(
        {
            f"lora_te2_text_model_encoder_layers_3_self_attn_{name}_proj": random_factors((4, 4), 1, seed)
            for seed, name in enumerate("kvq")
        }
    )
    layout = ModelLayout("sdxl", "sgm", {"denoiser": "model.diffusion_model.", "text_encoder_2": "clip_g."})
    fused = "clip_g.transformer.resblocks.3.attn.in_proj_weight"
    aligned = align(lora, [fused, "clip_g.transformer.resblocks.3.attn.out_proj"], layout)
    assert (list(aligned.lora.modules), aligned.unmatched) == ([fused], ())
    key, value, query = (factors.delta() for factors in lora.modules.values())
    torch.testing.assert_close(aligned.lora.modules[fused].delta(), torch.cat([query, key, value]))


def test_changes_keep_their_names_and_what_is_of_no_layer_is_told() -> None:
    lora = LoraFile(
        {"lora_unet_conv_in": random_factors((4, 3), 1, 0), "lora_unet_gate": random_factors((4, 3), 1, 1)},
        changes={"lora_unet_conv_in.bias": DiffChange({"diff_b": torch.ones(4)})},
    )
    aligned = align(lora, ["denoiser.conv_in"], ModelLayout("lbm", "lbm", {"denoiser": "denoiser."}))
    assert aligned.unmatched == ("lora_unet_gate",)
    assert list(aligned.lora.modules) == ["denoiser.conv_in"]
    assert list(aligned.lora.changes) == ["denoiser.conv_in.bias"]
    assert aligned.lora.kind_of("denoiser.conv_in.bias") == "diff"


def test_a_layer_named_whole_and_in_parts_is_refused() -> None:
    lora = LoraFile(
        {
            "lora_unet_double_blocks_0_img_attn_qkv": random_factors((12, 4), 1, 0),
            "transformer.transformer_blocks.0.attn.to_q": random_factors((4, 4), 1, 1),
        }
    )
    layers = [f"transformer.transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    with pytest.raises(LoraFormatError, match=r"to_q, lora_unet_double_blocks_0_img_attn_qkv are all for"):
        align(lora, layers, FLUX)


def test_a_fused_matrix_of_another_width_is_refused_by_name() -> None:
    lora = LoraFile({"lora_unet_double_blocks_0_img_attn_qkv": random_factors((13, 4), 1, 0)})
    layers = [f"transformer.transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    with pytest.raises(LoraFormatError, match=r"double_blocks\.0\.img_attn\.qkv of shape \(13, 4\)"):
        align(lora, layers, FLUX)


def test_a_lora_of_another_format_is_attached_to_a_live_model() -> None:
    from sigmascope.lora.apply import attach_lora

    model = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        norm_num_groups=2,
        attention_head_dim=2,
        cross_attention_dim=6,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    kohya = {
        "lora_unet_input_blocks_2_0_op": (4, 4, 3, 3),
        "lora_unet_mid_block_attentions_0_proj_in": (8, 8, 1, 1),
    }
    lora = LoraFile({name: random_factors(shape, 1, 0) for name, shape in kohya.items()}, format="kohya")
    with attach_lora(model, lora) as attached:
        assert attached.applied == ("down_blocks.0.downsamplers.0.conv", "mid_block.attentions.0.proj_in")


def test_the_change_of_a_bias_is_attached() -> None:
    from sigmascope.lora.apply import attach_lora

    model, image = torch.nn.Sequential(torch.nn.Linear(3, 4)), torch.randn(2, 3)
    before = model(image)
    lora = LoraFile({}, changes={"0.bias": DiffChange({"diff_b": torch.tensor([1.0, 2.0, 3.0, 4.0])})})
    with attach_lora(model, lora), torch.no_grad():
        torch.testing.assert_close(model(image) - before, torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2))
    assert torch.equal(model(image), before)


def test_the_change_of_a_bias_that_the_layer_lacks_is_refused() -> None:
    from sigmascope.lora.apply import attach_lora

    lora = LoraFile(
        {"0": random_factors((4, 3), 1, 0)}, changes={"0.bias": DiffChange({"diff_b": torch.ones(4)})}
    )
    with pytest.raises(ModelMismatchError, match=r"0\.bias"):
        attach_lora(torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False)), lora)
