"""Each family's names against the models: diffusers' classes, and what diffusers makes of original checkpoints.

Original names whose conversion diffusers does not ship are held to ComfyUI's models in `test_names_comfyui`.
"""

import re
from functools import cache, partial
from typing import Any

import pytest
import torch
from diffusers.loaders import lora_conversion_utils as lora_conversions
from diffusers.loaders import single_file_utils as conversions
from tests.lora.families.small_models import MAKERS, family_of, small
from torch import Tensor, nn

from sigmascope.lora.families import FAMILIES, Row, is_layer_of, layout_of, row_of_diffusers, row_of_original
from sigmascope.lora.families.known import FLOW
from sigmascope.lora.layer_names import block_of_module, in_coverage

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
# Rows of variants that the small models are not: WAN's and Stable Diffusion 3's are, as far as they go.
OF_OTHERS = {
    "hidream": r"caption_projection\.\d+\.linear",  # one for each block
    "mochi": r"transformer_blocks\.47\..*",  # the last block, see below
    "wan": r"vace_.*|face_.*|pose_.*",
    "sana": r"time_embed\.(?:timestep|guidance)_embedder\..*|.*\.norm_[qk]",
    "sana-sprint": r"time_embed\.emb\..*",
}
# Lumina 2's last layer is called as a part of Cosmos' last modulation is.
TWO_BLOCKS = {("lumina2", "norm_out.linear_2")}


def keys_of(name: str) -> set[str]:
    """Of tensors, and of modules with a weight by their path."""
    return set(shapes_of(name))


@cache
def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    return {
        key.removesuffix(".weight"): tuple(value.shape) for key, value in small(name).state_dict().items()
    }


def parts_of(name: str) -> set[str]:
    return {part.replace("#", "0") for row in FAMILIES[family_of(name)].rows for part in row.parts}


@pytest.mark.parametrize("name", MAKERS)
def test_every_row_is_a_layer_of_the_model(name: str) -> None:
    others = re.compile(OF_OTHERS.get(name, "$"))
    assert sorted(part for part in parts_of(name) - keys_of(name) if not others.fullmatch(part)) == []


@pytest.mark.parametrize("name", MAKERS)
def test_every_linear_layer_and_convolution_has_a_row(name: str) -> None:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [path for path, module in small(name).named_modules() if isinstance(module, kinds)]
    assert layers
    last = "transformer_blocks.1.norm1_context.linear_1"  # of a small Mochi: the published one's is number 47
    rows = {path: row_of_diffusers(family_of(name), path) for path in layers if path != last}
    assert [
        path for path, row in rows.items() if row is None and not is_layer_of(family_of(name), path)
    ] == []


@pytest.mark.parametrize("name", MAKERS)
def test_a_layer_is_found_by_both_names(name: str) -> None:
    family = family_of(name)
    for path in keys_of(name):
        row = row_of_diffusers(family, path)
        if row is not None:
            back = [row_of_original(family, original) for original in row.originals]
            named = {part for one in back if one is not None for part in one.parts}
            assert path in named or name == "sana-sprint", path


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_of_diffusers_is_told(name: str) -> None:
    layout = layout_of({key: tuple(value.shape) for key, value in small(name).state_dict().items()})
    assert (layout.family, layout.naming) == (family_of(name), "diffusers")


@pytest.mark.parametrize("name", MAKERS)
def test_every_layer_has_one_block_in_both_namings(name: str) -> None:
    for path in keys_of(name):
        row = row_of_diffusers(family_of(name), path)
        if row is None or path.endswith("scale_shift_table") or (name, path) in TWO_BLOCKS:
            continue
        names = (
            path,
            *row.originals,
            *(f"lora_unet_{one}".replace(".", "_") for one in (path, *row.originals)),
        )
        blocks = {block_of_module(one) for one in names}
        assert len(blocks) == 1, (path, blocks)
        assert next(iter(blocks)).partition(".")[0] in FLOW, path


@pytest.mark.parametrize("name", MAKERS)
def test_attention_is_covered(name: str) -> None:
    layers = [
        path
        for path, module in small(name).named_modules()
        if isinstance(module, nn.Linear) and re.search(r"\.\d+\..*\.to_[qkv]", path)
    ]
    assert layers
    for path in layers:
        row = row_of_diffusers(family_of(name), path)
        assert row is not None
        for one in (path, *row.originals):
            assert in_coverage(one, "attention"), one


class Lenient(dict[str, Tensor]):
    """A checkpoint that has whatever is taken out of it: conversions ask for norms, which most rows leave out."""

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(key, torch.zeros(12))


def by_rename(convert: Any, start: str, end: str, original: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one of diffusers' conversions of LoRAs makes of a checkpoint's names."""
    converted = convert({f"{start}{key}": value for key, value in original.items()})
    return {key.removeprefix(end): value for key, value in converted.items()}


def by_lora(convert: Any, end: str, original: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of a conversion that knows up and down factors of layers in blocks only, or of all."""
    pairs: dict[str, Tensor] = {}
    for key, value in original.items():
        name, _, kind = key.rpartition(".")
        if kind == "weight":
            pairs |= {f"{name}.lora_B.weight": value, f"{name}.lora_A.weight": torch.ones(1, 1)}
    converted = convert({f"diffusion_model.{key}": value for key, value in pairs.items()})
    return {
        key.removeprefix(end).replace(".lora_B", ""): value
        for key, value in converted.items()
        if ".lora_B" in key
    }


def of_ideogram4(original: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers outside of blocks have one name, and diffusers' conversion refuses them."""
    inside = {key: value for key, value in original.items() if key.startswith("layers.")}
    outside = {key: value for key, value in original.items() if key not in inside}
    convert = lora_conversions._convert_non_diffusers_ideogram4_lora_to_diffusers
    return outside | by_lora(convert, "transformer.", inside)


CONVERSIONS = {
    "auraflow": conversions.convert_auraflow_transformer_checkpoint_to_diffusers,
    "chroma": conversions.convert_chroma_transformer_checkpoint_to_diffusers,
    "cosmos": conversions.convert_cosmos_transformer_checkpoint_to_diffusers,
    "flux": conversions.convert_flux_transformer_checkpoint_to_diffusers,
    "flux2": conversions.convert_flux2_transformer_checkpoint_to_diffusers,
    "flux3": conversions.convert_flux3_transformer_checkpoint_to_diffusers,
    "hunyuan_video": conversions.convert_hunyuan_video_transformer_to_diffusers,
    "ideogram4": of_ideogram4,
    "krea2": partial(
        by_lora, lora_conversions._convert_non_diffusers_krea2_lora_to_diffusers, "transformer."
    ),
    "ltx_video": conversions.convert_ltx_transformer_checkpoint_to_diffusers,
    "ltx2": partial(
        by_rename,
        lora_conversions._convert_non_diffusers_ltx2_lora_to_diffusers,
        "diffusion_model.",
        "transformer.",
    ),
    "lumina2": conversions.convert_lumina2_to_diffusers,
    "mochi": conversions.convert_mochi_transformer_checkpoint_to_diffusers,
    "sana": conversions.convert_sana_transformer_to_diffusers,
    "sd3": conversions.convert_sd3_transformer_checkpoint_to_diffusers,
    "wan": conversions.convert_wan_transformer_to_diffusers,
    "z_image": conversions.convert_z_image_transformer_checkpoint_to_diffusers,
}


def rows_of(name: str) -> list[Row]:
    """The lines of a small model's weights and parameters."""
    found = (row_of_diffusers(family_of(name), path) for path in sorted(keys_of(name)))
    return list(dict.fromkeys(row for row in found if row is not None))


def original_shape(name: str, row: Row) -> tuple[int, ...]:
    shapes = [shapes_of(name)[part] for part in row.parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def original_file(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's matrices under the original names, by the rows, and diffusers' weights that are in it.

    Conversions only move rows, so each matrix has one column.
    """
    generator = torch.Generator().manual_seed(0)
    original: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for row in rows_of(name):
        shape = original_shape(name, row)
        if len(shape) < 2 or row.original.endswith(("table", "modulation", "register_tokens", "encoding")):
            continue
        parts = {part: torch.randn(shapes_of(name)[part][0], 1, generator=generator) for part in row.parts}
        weights |= {f"{part}.weight": value for part, value in parts.items()}
        whole = torch.cat(list(parts.values()))
        swaps = row.swaps(*shape[:2])
        original[f"{row.also or row.original}.weight"] = whole.roll(len(whole) // 2, 0) if swaps else whole
        original[f"{row.also or row.original}.bias"] = torch.zeros(len(whole))
    return original, weights


@pytest.mark.parametrize("name", CONVERSIONS)
def test_diffusers_makes_of_an_original_file_what_the_rows_say(name: str) -> None:
    original, weights = original_file(name)
    converted = CONVERSIONS[name](Lenient(original))
    for key, value in weights.items():
        torch.testing.assert_close(converted[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_an_original_file_is_told(name: str, prefix: str) -> None:
    own = small(name).state_dict()
    original = {
        prefix + (row.also or row.original) + ("" if row.parts[0] in own else ".weight"): original_shape(
            name, row
        )
        for row in rows_of(name)
    }
    layout = layout_of(original)
    assert (layout.family, layout.naming, layout.prefixes["denoiser"]) == (name, "original", prefix)


def test_the_last_block_of_mochi_has_another_modulation() -> None:
    row = row_of_original("mochi", "blocks.47.mod_y")
    assert row is not None
    converted = CONVERSIONS["mochi"](Lenient({"blocks.47.mod_y.weight": torch.ones(1)}))
    assert converted[f"{row.parts[0]}.weight"].tolist() == [1.0]
    assert row_of_diffusers("mochi", row.parts[0]) == row


def test_wan_s_vace_blocks_have_the_names_of_diffusers_and_of_the_original() -> None:
    import diffusers

    with torch.device("meta"):
        model = diffusers.WanVACETransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=20, freq_dim=8, ffn_dim=40,
            num_layers=2, vace_layers=[0, 1], vace_in_channels=8,
        )  # fmt: skip
    kinds = nn.Linear | nn.Conv3d
    rows = {
        path: row_of_diffusers("wan", path)
        for path, module in model.named_modules()
        if path.startswith("vace_") and isinstance(module, kinds)
    }
    assert len(rows) > 20
    assert [path for path, row in rows.items() if row is None] == []
    originals = {path: row.original for path, row in rows.items() if row is not None}
    assert originals["vace_blocks.0.proj_in"] == "vace_blocks.0.before_proj"
    assert originals["vace_blocks.1.proj_out"] == "vace_blocks.1.after_proj"
    assert originals["vace_blocks.1.attn2.to_k"] == "vace_blocks.1.cross_attn.k"


def test_wan_animate_s_own_layers_have_the_names_that_diffusers_converts() -> None:
    import diffusers

    with torch.device("meta"):
        model = diffusers.WanAnimateTransformer3DModel(
            num_attention_heads=4, attention_head_dim=12, in_channels=12, latent_channels=4, out_channels=4, text_dim=20,
            freq_dim=8, ffn_dim=40, num_layers=2, inject_face_latents_blocks=1, face_encoder_num_heads=2,
            motion_encoder_channel_sizes={"4": 8, "8": 8}, motion_encoder_size=8,
        )  # fmt: skip
    kinds = nn.Linear | nn.Conv1d | nn.Conv3d
    own = {
        path: module
        for path, module in model.named_modules()
        if path.startswith(("face_", "pose_")) and isinstance(module, kinds)
    }
    assert len(own) == 13
    original: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for row in dict.fromkeys(row_of_diffusers("wan", path) for path in own):
        assert row is not None
        parts = {part: torch.randn(len(own[part].weight), 1) for part in row.parts}
        original[f"{row.original}.weight"] = torch.cat(list(parts.values()))
        wanted |= {f"{part}.weight": tensor for part, tensor in parts.items()}
    converted = CONVERSIONS["wan"](dict(original))
    assert converted.keys() == wanted.keys()
    assert all(torch.equal(converted[key], tensor) for key, tensor in wanted.items())
