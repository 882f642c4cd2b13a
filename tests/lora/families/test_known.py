"""LoRAs of published models: whose they are told to be, by names, shapes and header."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.lora.families.real_shapes import MODELS, published

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import FAMILIES, family_misfit, layout_of, row_of_diffusers
from sigmascope.lora.families.known import must_have
from sigmascope.lora.file import LoraFile, lora_header
from sigmascope.lora.file_family import file_family
from sigmascope.lora.layer_names import to_sgm, usual_blocks


def test_flux_1_and_flux_2_are_told_by_shapes() -> None:
    feed_forward = {"double_blocks.0.img_mlp.0": (6 * 64, 64)}
    assert family_misfit("flux2", feed_forward) is None
    assert "not 4 times" in str(family_misfit("flux", feed_forward))
    assert "not 6 times" in str(family_misfit("flux2", {"double_blocks.0.img_mlp.0": (4 * 64, 64)}))


def test_the_connectors_of_ltx_2_do_not_hide_its_family() -> None:
    """As SimpleTuner wrote them (its issue 2349): most of the file's names are of no layer of the transformer."""
    names = [f"diffusion_model.transformer_blocks.{number}.audio_attn1.to_q" for number in range(4)]
    names += [
        f"diffusion_model.connectors.audio_connector.transformer_blocks.{number}.attn1.to_q"
        for number in range(6)
    ]
    factors = LoraFactors(torch.zeros(2048, 1), torch.zeros(1, 2048), 1.0, (2048, 2048))
    assert file_family(LoraFile(dict.fromkeys(names, factors), format="comfyui")).family == "ltx2"


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
    # Cosmos has the feed-forward layers of LTX' models and their widths.
    **{
        (name, "feed-forward"): {"diffusers": None, "original": None if "ltx" in name else "cosmos"}
        for name in ("ltx-2b", "cosmos1-7b", "cosmos2-2b")
    },
    ("ltx2.3", "feed-forward"): dict.fromkeys(NAMINGS, "ltx_video"),  # only the picture's: LTX-Video's names
    # Sana descends from PixArt, and its smallest model is as wide.
    **{
        (name, layers): dict.fromkeys(NAMINGS)
        for name in ("pixart-sigma", "sana-0.6b")
        for layers in ("attention", "double")
    },
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
    asks = re.compile(r"\w+\.\d+\..*(?:attn1?|attention)\.(?:to_q|to_query|to_qkv_mlp_proj)")
    inner = [shape for path, shape in shapes.items() if asks.fullmatch(path) and "audio" not in path]
    assert inner
    assert FAMILIES[family].is_unet or {shape[1] for shape in inner} <= set(FAMILIES[family].widths)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own use of it
@pytest.mark.parametrize(
    "name", [name for name, model in MODELS.items() if not FAMILIES[model.family].is_unet]
)
def test_published_models_have_what_all_models_of_their_family_must_have(name: str) -> None:
    """So that a model without it is called incomplete, and never one that is whole."""
    family, shapes = published(name)
    lists = {path.partition(".0.")[0] for path in shapes if ".0." in path}
    parts = [part for row in FAMILIES[family].rows for part in row.parts if "#" in part]
    musts = [part for part in parts if must_have(family, part.replace("#", "0")) in lists]
    assert len(musts) > 5
    have = {path.removesuffix(".bias") for path in shapes}
    assert [part for part in musts if part.replace("#", "0") not in have and not _is_parameter(part)] == []


def _is_parameter(path: str) -> bool:
    """Not a layer but a tensor by itself, which the shapes here leave out."""
    return path.endswith("scale_shift_table")


def test_what_variants_lack_is_nothing_that_a_model_must_have() -> None:
    for family, path in (
        ("wan", "blocks.3.cross_attn.k_img"),
        ("wan", "blocks.3.attn2.add_k_proj"),
        ("wan", "condition_embedder.time_proj"),
        ("sd3", "transformer_blocks.3.attn2.to_q"),
        ("ltx2", "transformer_blocks.3.attn1.to_gate_logits"),
        ("sana", "transformer_blocks.3.attn1.norm_q"),
        ("flux", "blocks.3.attn1.to_q"),
    ):
        assert must_have(family, path) is None
    assert must_have("wan", "blocks.3.ffn.2") == "blocks"
    assert must_have("flux", "double_blocks.3.img_mlp.0") == "double_blocks"
