"""The records of families against the models themselves: diffusers' classes, and its conversion of single files."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.lora.families.real_shapes import MODELS, published
from torch import Tensor, nn

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import FAMILIES, family_misfit, layout_of, row_of_diffusers
from sigmascope.lora.families.known import FLOW
from sigmascope.lora.file import LoraFile, lora_header
from sigmascope.lora.layer_names import block_of_module, in_coverage, to_sgm, usual_blocks
from sigmascope.lora.module_names import file_family

Z_IMAGE: dict[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6],
    "axes_lens": [64, 32, 32],
}
FLUX2: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": [4, 4, 4, 4],
}


class Made(NamedTuple):
    """A small model, and diffusers' conversion of its family's single files."""

    model: nn.Module
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(params=["z_image", "flux2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(family: str) -> Made:
    import diffusers
    from diffusers.loaders import single_file_utils as conversions

    with torch.device("meta"):
        if family == "z_image":
            convert = conversions.convert_z_image_transformer_checkpoint_to_diffusers
            return Made(diffusers.ZImageTransformer2DModel(**Z_IMAGE), convert)
        convert = conversions.convert_flux2_transformer_checkpoint_to_diffusers
        return Made(diffusers.Flux2Transformer2DModel(**FLUX2), convert)


def original_file(family: str, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint under the original names, by the record, and diffusers' weights that are in it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {key: value.shape for key, value in model.state_dict().items() if key.endswith(".weight")}
    original: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for key in shapes:
        row = row_of_diffusers(family, key.removesuffix(".weight"))
        if row is None or f"{row.original}.weight" in original:
            continue
        parts = [torch.randn(shapes[f"{part}.weight"], generator=generator) for part in row.parts]
        weights |= {f"{part}.weight": value for part, value in zip(row.parts, parts, strict=True)}
        whole = torch.cat(parts)
        original[f"{row.original}.weight"] = whole.roll(len(whole) // 2, 0) if row.swapped else whole
    return original, weights


def test_every_linear_layer_has_a_row(family: str, made: Made) -> None:
    linears = [name for name, module in made.model.named_modules() if isinstance(module, nn.Linear)]
    assert [name for name in linears if row_of_diffusers(family, name) is None] == []


def test_diffusers_makes_of_an_original_file_what_the_rows_say(family: str, made: Made) -> None:
    original, weights = original_file(family, made.model)
    converted = made.convert(original)
    for key, value in weights.items():
        torch.testing.assert_close(converted[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_an_original_file_is_told(family: str, made: Made, prefix: str) -> None:
    original, _ = original_file(family, made.model)
    layout = layout_of({prefix + key: tuple(value.shape) for key, value in original.items()})
    assert (layout.family, layout.naming, layout.prefixes["denoiser"]) == (family, "original", prefix)


def test_a_model_of_diffusers_is_told(family: str, made: Made) -> None:
    layout = layout_of({key: tuple(value.shape) for key, value in made.model.state_dict().items()})
    assert (layout.family, layout.naming) == (family, "diffusers")


def test_every_layer_has_one_block_in_both_namings(family: str, made: Made) -> None:
    for name, module in made.model.named_modules():
        row = row_of_diffusers(family, name) if isinstance(module, nn.Linear) else None
        if row is not None:
            blocks = {
                block_of_module(path)
                for path in (name, row.original, f"lora_unet_{row.original}".replace(".", "_"))
            }
            assert len(blocks) == 1, (name, blocks)
            assert next(iter(blocks)).partition(".")[0] in FLOW


def test_attention_is_covered(family: str, made: Made) -> None:
    for name, module in made.model.named_modules():
        if isinstance(module, nn.Linear) and ".to_" in name:
            assert in_coverage(name, "attention"), name


def test_flux_1_and_flux_2_are_told_by_shapes() -> None:
    feed_forward = {"double_blocks.0.img_mlp.0": (6 * 64, 64)}
    assert family_misfit("flux2", feed_forward) is None
    assert "not 4 times" in str(family_misfit("flux", feed_forward))
    assert "not 6 times" in str(family_misfit("flux2", {"double_blocks.0.img_mlp.0": (4 * 64, 64)}))


def test_no_two_families_have_a_name_in_headers() -> None:
    for field in ("architecture", "base_version"):
        names = [getattr(family, field) for family in FAMILIES.values()]
        assert len(set(names)) == len(names)


def lora_of(name: str, naming: str, only: Callable[[str], object]) -> LoraFile:
    """A LoRA of some layers of a published model, in the names of diffusers or of the original."""
    family, real = published(name)
    is_unet = FAMILIES[family].is_unet
    shapes: dict[str, tuple[int, ...]] = {}
    for path, shape in real.items():
        row = row_of_diffusers(family, path)
        if len(shape) < 2 or not only(path) or (row is None and not is_unet):
            continue
        if naming == "diffusers":
            shapes[f"{FAMILIES[family].component}.{path}"] = shape
        elif is_unet:
            shapes[f"diffusion_model.{to_sgm(path, usual_blocks(family))}"] = shape
        elif row is not None:
            outputs = sum(real[part][0] for part in row.parts)
            shapes[f"diffusion_model.{row.original}"] = (outputs, *shape[1:])
    factors = {
        name: LoraFactors(torch.zeros(shape[0], 1), torch.zeros(1, math.prod(shape[1:])), 1.0, shape)
        for name, shape in shapes.items()
    }
    return LoraFile(factors, format="peft" if naming == "diffusers" else "comfyui")


NAMINGS = ("diffusers", "original")
LAYERS: dict[str, Callable[[str], object]] = {
    "whole": lambda path: True,
    "blocks": re.compile(r"(?:^|_)blocks\.|^layers|refiner").search,
    "attention": re.compile(r"attn|attention|to_[qkv]").search,
    "double": re.compile(r"^(?!single).*(?:attn|attention)").search,
    "feed-forward": re.compile(r"\.ff|feed_forward|mlp").search,
}
# Files whose names, widths and blocks are those of several models, and what is assumed of them.
# Qwen-Image has the attention of FLUX.1's double blocks, in diffusers' names, and more blocks.
OPEN: dict[tuple[str, str], dict[str, str | None]] = {
    **{
        ("chroma", layers): dict.fromkeys(NAMINGS, "flux")
        for layers in ("blocks", "attention", "feed-forward")
    },
    **{
        (name, "double"): {"diffusers": None, "original": "flux"}
        for name in ("flux1", "chroma", "flux2-klein-4b")
    },
    ("lbm", "feed-forward"): dict.fromkeys(NAMINGS, "sdxl"),
    ("sd15", "feed-forward"): dict.fromkeys(NAMINGS),
    ("sd21", "feed-forward"): dict.fromkeys(NAMINGS),
}


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own use of it
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_no_family_is_taken_for_another(name: str, layers: str, naming: str) -> None:
    lora = lora_of(name, naming, LAYERS[layers])
    assert lora.modules
    expected = OPEN.get((name, layers), {}).get(naming, MODELS[name].family)
    assert file_family(lora).family == expected
    told = file_family(replace(lora, metadata=lora_header("kohya", MODELS[name].family, 1, None)))
    assert told.family == MODELS[name].family


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own use of it
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_told_and_has_a_width_that_its_family_knows(name: str) -> None:
    family, shapes = published(name)
    assert layout_of({f"{path}.weight": shape for path, shape in shapes.items()}).family == family
    inner = [shape for path, shape in shapes.items() if path.endswith(("to_q", "to_qkv_mlp_proj"))]
    assert FAMILIES[family].is_unet or {shape[1] for shape in inner} <= set(FAMILIES[family].widths)
