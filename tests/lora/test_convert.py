"""Conversions: every pair of formats, names by themselves or by the model, and what cannot be carried over."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.families import make_pipeline
from tests.families.loras import lora_state, modules_of, write
from torch import Tensor

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora import loadable
from sigmascope.lora.adapters import DiffChange, LohaChange
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.file import LoraFile
from sigmascope.lora.hosts import HostReading
from sigmascope.lora.loadable import loads_in_words
from sigmascope.lora.module_names import parse_names
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import save_lora

MakeFactors = Callable[..., LoraFactors]

FORMATS = ["native", "kohya", "peft", "comfyui"]
LAYERS = [
    "denoiser.conv_in",
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0",
    "denoiser.mid_block.resnets.1.time_emb_proj",
    "denoiser.up_blocks.0.upsamplers.0.conv",
    "denoiser.time_embedding.linear_2",
]


@pytest.fixture
def source(make_factors: MakeFactors, tmp_path: Path) -> Path:
    """An LBM's LoRA in native format."""
    modules = {
        layer: make_factors((6, 4, 3, 3) if "conv" in layer else (6, 5), 2, seed=seed)
        for seed, layer in enumerate(LAYERS)
    }
    path = tmp_path / "source.safetensors"
    save_lora(path, LoraFile(modules), {"sigmascope_base": "base.safetensors", "ss_tag": "cat"})
    return path


def bytes_of(path: Path) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in load_file(path).items() if not key.endswith(".alpha")}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMATS, FORMATS)))
def test_every_pair_of_formats_there_and_back_is_the_same_file(
    first: str, second: str, source: Path, tmp_path: Path
) -> None:
    there, on, back = (tmp_path / f"{name}.safetensors" for name in ("there", "on", "back"))
    convert_lora(source, there, first)
    report = convert_lora(there, on, second)
    convert_lora(on, back, "native")
    assert (report.source_format, report.format, report.modules) == (first, second, len(LAYERS))
    assert bytes_of(back).keys() == bytes_of(source).keys()
    for key, tensor in bytes_of(source).items():
        assert torch.equal(bytes_of(back)[key], tensor)
    assert load_lora(on).format == second


def test_a_conversion_back_and_forth_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        convert_lora(source, tmp_path / f"{name}.safetensors", "kohya")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_the_header_keeps_where_the_lora_comes_from_and_no_stale_field(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    convert_lora(source, target, "peft")
    with safe_open(target, "pt") as file:
        header = file.metadata()
    expected = {"sigmascope_base": "base.safetensors", "ss_tag": "cat", "modelspec.architecture": "lbm/lora"}
    assert expected.items() <= header.items()
    assert "lbm_native_naming" not in header


def halvable(*shape: int) -> Tensor:
    """Random numbers far from 0: what is near the least that float8 can hold has no exact half there."""
    return (0.25 + torch.rand(shape)) * (2 * torch.randint(2, shape) - 1)


@settings(deadline=None, max_examples=25)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]),
    rank=st.integers(1, 7),
    alpha=st.sampled_from([None, 1.0, 3.0, 16.0]),
    kernel=st.sampled_from([(), (1, 1), (3, 3)]),
    format=st.sampled_from(["peft", "comfyui", "native"]),
)
def test_nothing_of_a_kohya_lora_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    rank: int,
    alpha: float | None,
    kernel: tuple[int, ...],
    format: str,
) -> None:
    folder = tmp_path_factory.mktemp("convert")
    layers = {(): "time_embedding_linear_1", (1, 1): "up_blocks_0_resnets_0_conv_shortcut"}
    name = f"lora_unet_{layers.get(kernel, 'mid_block_resnets_0_conv1')}"
    tensors = {
        f"{name}.lora_up.weight": halvable(5, rank, *(1 for _ in kernel)).to(dtype),
        f"{name}.lora_down.weight": halvable(rank, 4, *kernel).to(dtype),
    }
    if alpha is not None:
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, folder / "kohya.safetensors")
    convert_lora(folder / "kohya.safetensors", folder / "out.safetensors", format)
    before = load_lora(folder / "kohya.safetensors").modules[name]
    (after,) = load_lora(folder / "out.safetensors").modules.values()
    stored = load_file(folder / "out.safetensors")
    change = before.delta(torch.float64)
    assert float((after.delta(torch.float64) - change).norm()) <= 1e-6 * float(change.norm())
    if alpha is None or alpha / rank in (1.0, 0.5, 0.25):
        assert {tensor.dtype for key, tensor in stored.items() if not key.endswith("alpha")} == {dtype}


def test_an_asked_precision_is_stored(source: Path, tmp_path: Path) -> None:
    convert_lora(source, tmp_path / "out.safetensors", "peft", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out.safetensors").values()} == {torch.bfloat16}


def test_modules_that_had_to_be_widened_are_told(make_factors: MakeFactors, tmp_path: Path) -> None:
    name = "lora_unet_time_embedding_linear_1"
    tensors = {
        f"{name}.lora_up.weight": torch.randn(6, 3).bfloat16(),
        f"{name}.lora_down.weight": torch.randn(3, 5).bfloat16(),
        f"{name}.alpha": torch.tensor(1.0),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    report = convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "peft")
    assert report.widened == ("denoiser.time_embedding.linear_1",)


@pytest.mark.parametrize(
    ("names", "shape", "family"),
    [
        (["denoiser.conv_in"], (6, 5), "lbm"),
        (["unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"], (320, 768), "sd15"),
        (["lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"], (640, 1024), "sd2"),
        (["diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k"], (640, 2048), "sdxl"),
        (["unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"], (640, 640), "lbm"),
        (["lora_unet_up_blocks_3_resnets_0_conv1"], (6, 5), "sd15"),
        (["lora_unet_conv_in"], (6, 5), "sdxl"),
        (["lora_unet_double_blocks_0_img_attn_qkv"], (12, 4), "flux"),
        (["transformer.single_transformer_blocks.0.proj_mlp"], (24, 6), "flux"),
        (["lora_unet_joint_blocks_0_x_block_attn_qkv"], (12, 4), "sd3"),
        (["diffusion_model.blocks.0.self_attn.q"], (6, 5), "wan"),
        (["transformer.transformer_blocks.0.img_mlp.net.2"], (6, 5), "qwen_image"),
        (["transformer.transformer_blocks.0.attn.to_q"], (6, 5), "unknown"),
        (["diffusion_model.layers.0.gate"], (6, 5), "unknown"),
    ],
)
def test_the_family_is_told_by_names_and_shapes(
    names: list[str], shape: tuple[int, int], family: str
) -> None:
    factors = LoraFactors(torch.zeros(shape[0], 1), torch.zeros(1, shape[1]), 1.0, shape)
    assert parse_names(LoraFile(dict.fromkeys(names, factors))).layout.family == family


@pytest.mark.parametrize(
    ("metadata", "family"),
    [
        ({"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "sdxl"),
        ({"modelspec.architecture": "flux-1-dev/lora"}, "flux"),
        ({"ss_base_model_version": "sd_v1"}, "sd15"),
        ({"ss_base_model_version": "sdxl_base_v1-0"}, "sdxl"),
        ({"ss_base_model_version": "qwen_image"}, "qwen_image"),
    ],
)
def test_the_family_in_the_header_goes_first(
    metadata: dict[str, str], family: str, make_factors: MakeFactors
) -> None:
    lora = LoraFile({"unet.conv_in": make_factors((6, 5), 1)}, metadata)
    assert parse_names(lora).layout.family == family


@pytest.mark.parametrize(
    ("given", "format", "expected"),
    [
        ("unet.down_blocks.0.downsamplers.0.conv", "comfyui", "diffusion_model.input_blocks.3.0.op"),
        (
            "diffusion_model.output_blocks.2.0.emb_layers.1",
            "peft",
            "unet.up_blocks.0.resnets.2.time_emb_proj",
        ),
        ("diffusion_model.input_blocks.4.0.in_layers.2", "native", "denoiser.down_blocks.1.resnets.0.conv1"),
        ("diffusion_model.blocks.3.ffn.0", "peft", "transformer.blocks.3.ffn.net.0.proj"),
        ("diffusion_model.blocks.3.ffn.0", "kohya", "lora_unet_blocks_3_ffn_0"),
        ("diffusion_model.blocks.3.ffn.0", "native", "diffusion_model.blocks.3.ffn.0"),
        ("lora_unet_blocks_3_cross_attn_k_img", "comfyui", "diffusion_model.blocks.3.cross_attn.k_img"),
        ("lora_unet_blocks_3_cross_attn_k_img", "peft", "transformer.blocks.3.attn2.add_k_proj"),
        (
            "transformer.transformer_blocks.3.img_mod.1",
            "kohya",
            "lora_unet_transformer_blocks_3_img_mod_1",
        ),
        ("lora_unet_img_in", "peft", "transformer.x_embedder"),
        (
            "lora_te2_text_model_encoder_layers_3_self_attn_q_proj",
            "peft",
            "text_encoder_2.text_model.encoder.layers.3.self_attn.q_proj",
        ),
    ],
)
def test_names_are_carried_over(
    given: str, format: str, expected: str, make_factors: MakeFactors, tmp_path: Path
) -> None:
    family = "flux" if given == "lora_unet_img_in" else None
    flat = make_factors((6, 5), 1)
    ends = ("lora_up.weight", "lora_down.weight")
    save_file({f"{given}.{ends[0]}": flat.up, f"{given}.{ends[1]}": flat.down}, tmp_path / "in.safetensors")
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", format, family=family)
    assert list(load_lora(tmp_path / "out.safetensors").modules) == [expected]


@pytest.mark.parametrize(
    ("format", "prefix", "expected"),
    [
        ("peft", "denoiser", "denoiser.conv_in"),
        ("peft", "", "conv_in"),
        ("native", "unet", "unet.conv_in"),
        ("native", "", "conv_in"),
    ],
)
def test_the_prefix_can_be_chosen(
    format: str, prefix: str, expected: str, make_factors: MakeFactors, tmp_path: Path
) -> None:
    save_lora(tmp_path / "in.safetensors", LoraFile({"denoiser.conv_in": make_factors((6, 5), 1)}))
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", format, prefix=prefix)
    assert list(load_lora(tmp_path / "out.safetensors").modules) == [expected]


def model_file(path: Path, names: list[str]) -> Path:
    save_file({f"{name}.weight": torch.zeros(6, 5) for name in names}, path)
    return path


def test_a_models_layers_tell_what_flat_names_mean(make_factors: MakeFactors, tmp_path: Path) -> None:
    lora = LoraFile({"a.b": make_factors((6, 5), 1)})
    unknown = ModelLayout("unknown", "unknown", {"denoiser": ""})
    save_lora(tmp_path / "in.safetensors", lora, format="kohya", layout=unknown)
    with pytest.raises(
        LoraFormatError, match=r"1 of 1 names .*lora_unet_a_b \(could be several paths\).*--model"
    ):
        convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "native")
    model = model_file(tmp_path / "model.safetensors", ["a.b", "a.c"])
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "comfyui", model=model)
    assert list(load_lora(tmp_path / "out.safetensors").modules) == ["diffusion_model.a.b"]


def test_native_names_are_the_models_own(source: Path, tmp_path: Path) -> None:
    names = [
        "model.diffusion_model.input_blocks.0.0",
        "model.diffusion_model.out.2",
        "model.diffusion_model.time_embed.0",
    ]
    model = model_file(tmp_path / "model.safetensors", names)
    convert_lora(source, tmp_path / "out.safetensors", "native", model=model, drop_unsupported=True)
    assert list(load_lora(tmp_path / "out.safetensors").modules) == names[:1]


def test_layers_that_the_model_lacks_are_named(source: Path, tmp_path: Path) -> None:
    model = model_file(tmp_path / "model.safetensors", ["denoiser.conv_in", "denoiser.conv_out"])
    target = tmp_path / "out.safetensors"
    with pytest.raises(LoraFormatError, match=r"4 of 5 names .*model\.safetensors has no such layer.*--drop"):
        convert_lora(source, target, "kohya", model=model)
    assert not target.exists()
    report = convert_lora(source, target, "kohya", model=model, drop_unsupported=True)
    assert [one.name for one in report.left_out] == LAYERS[1:]


@pytest.mark.parametrize("format", ["comfyui", "kohya"])
def test_a_family_that_cannot_be_told_is_asked_for(
    format: str, make_factors: MakeFactors, tmp_path: Path
) -> None:
    names = [f"transformer.transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    layout = ModelLayout("unknown", "diffusers", {"denoiser": "transformer."})
    modules = {name: make_factors((4, 4), 1) for name in names}
    save_lora(tmp_path / "in.safetensors", LoraFile(modules), format="peft", layout=layout)
    target = tmp_path / "out.safetensors"
    with pytest.raises(ConfigError, match=r"model family cannot be recognised.*--family"):
        convert_lora(tmp_path / "in.safetensors", target, format)
    assert convert_lora(tmp_path / "in.safetensors", target, format, family="sd3").modules == 1


def test_a_family_that_is_not_known_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--family pony is not known.*sdxl"):
        convert_lora(source, tmp_path / "out.safetensors", "kohya", family="pony")


def test_what_a_format_cannot_hold_is_refused_or_left_out_by_name(
    make_factors: MakeFactors, tmp_path: Path
) -> None:
    loha = LohaChange({f"hada_w{side}_{end}": torch.randn(3, 3) for side in (1, 2) for end in "ab"})
    lora = LoraFile(
        {"denoiser.conv_in": make_factors((6, 5), 1)},
        changes={"denoiser.conv_out": loha, "denoiser.conv_in.bias": DiffChange({"diff_b": torch.ones(6)})},
    )
    target = tmp_path / "out.safetensors"
    save_lora(tmp_path / "in.safetensors", lora)
    with pytest.raises(LoraFormatError, match="peft files cannot hold such a change"):
        convert_lora(tmp_path / "in.safetensors", target, "peft")
    assert not target.exists()
    report = convert_lora(tmp_path / "in.safetensors", target, "peft", drop_unsupported=True)
    assert [one.name for one in report.left_out] == ["denoiser.conv_out"]
    assert load_file(target)["unet.conv_in.lora_B.bias"].tolist() == [1.0] * 6
    assert list(load_lora(target).modules) == ["unet.conv_in"]
    report = convert_lora(tmp_path / "in.safetensors", target, "kohya")
    assert (report.modules, report.changes, report.left_out) == (1, 2, ())
    assert set(load_lora(target).changes) == {"lora_unet_conv_out", "lora_unet_conv_in.bias"}


def loha(*shape: int, rank: int = 2, seed: int = 0) -> LohaChange:
    generator = torch.Generator().manual_seed(seed)
    sides = {"a": (shape[0], rank), "b": (rank, math.prod(shape[1:]))}
    parts = {
        f"hada_w{side}_{end}": torch.randn(sides[end], generator=generator) for side in (1, 2) for end in "ab"
    }
    return LohaChange(parts)


def hadamard(change: LohaChange) -> Tensor:
    one, two = (change.parts[f"hada_w{n}_a"].double() @ change.parts[f"hada_w{n}_b"].double() for n in (1, 2))
    return one * two


def loha_file(path: Path, names_and_shapes: dict[str, tuple[int, ...]]) -> dict[str, LohaChange]:
    changes = {name: loha(*shape, seed=seed) for seed, (name, shape) in enumerate(names_and_shapes.items())}
    parts = {f"{name}.{end}": part for name, change in changes.items() for end, part in change.parts.items()}
    save_file(parts | {f"{name}.alpha": torch.tensor(2.0) for name in changes}, path)
    return changes


@pytest.mark.parametrize("rank", [9999, 2])
def test_what_a_format_cannot_hold_becomes_the_nearest_plain_factors(rank: int, tmp_path: Path) -> None:
    name, source, target = (
        "lora_unet_time_embedding_linear_1",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
    )
    change = hadamard(loha_file(source, {name: (6, 5)})[name])
    report = convert_lora(source, target, "peft", family="sdxl", rank=rank)
    factors = load_lora(target).modules["unet.time_embedding.linear_1"]
    lost = float((factors.delta().double() - change).norm())
    least = math.sqrt(float(torch.linalg.svdvals(change)[rank:].square().sum()))
    assert lost == pytest.approx(least, rel=1e-4, abs=1e-5)
    (told,) = report.factored
    assert (told.name, told.rank, report.left_out) == (name, min(rank, 4), ())
    assert told.error_norm == pytest.approx(lost, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("tells", ["model", "name"])
def test_factors_of_a_convolution_have_its_kernel(tells: str, tmp_path: Path) -> None:
    name, layer = "lora_unet_mid_block_resnets_0_conv1", "mid_block.resnets.0.conv1"
    source, target, model = (tmp_path / f"{end}.safetensors" for end in ("in", "out", "model"))
    change = hadamard(loha_file(source, {name: (6, 5, 3, 3)})[name])
    save_file({f"denoiser.{one}.weight": torch.zeros(6, 5, 3, 3) for one in (layer, "conv_in")}, model)
    told: dict[str, Any] = {"model": model} if tells == "model" else {"family": "sdxl"}
    convert_lora(source, target, "peft", rank=9999, **told)
    factors = load_lora(target).modules[f"unet.{layer}"]
    assert load_file(target)[f"unet.{layer}.lora_A.weight"].shape[1:] == (5, 3, 3)
    torch.testing.assert_close(factors.delta().double().flatten(1), change, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["peft", "kohya", "comfyui"])
def test_matrices_for_convolutions_get_their_kernel_and_kernels_of_1_for_matrices_go(
    format: str, tmp_path: Path
) -> None:
    """As diffusers wants them: PEFT makes its own factors with the layer's kernel, and refuses others."""
    state = lora_state(make_pipeline("sd15"), ["unet"])
    kinds = {key: tensor.dim() for key, tensor in state.items()}
    assert {*kinds.values()} == {2, 4}
    other = {
        key: tensor.flatten(1) if tensor.dim() == 4 else tensor[:, :, None, None]
        for key, tensor in state.items()
        if tensor.dim() == 4 or "proj_out" not in key
    }
    save_file(other, tmp_path / "other.safetensors")
    report = convert_lora(
        tmp_path / "other.safetensors", tmp_path / "new.safetensors", format="peft", family="sd15"
    )
    assert not report.left_out
    if format != "peft":
        convert_lora(
            tmp_path / "new.safetensors", tmp_path / "there.safetensors", format=format, family="sd15"
        )
        convert_lora(
            tmp_path / "there.safetensors",
            tmp_path / "new.safetensors",
            format="peft",
            family="sd15",
        )
    pipeline = make_pipeline("sd15")
    pipeline.load_lora_weights(tmp_path / "new.safetensors")
    written = load_file(tmp_path / "new.safetensors")
    assert written.keys() == other.keys()
    assert all(torch.equal(written[key], state[key]) for key in other)


def test_a_convolution_of_another_kernel_asks_for_the_model(tmp_path: Path) -> None:
    name, source, target = (
        "lora_unet_mid_block_resnets_0_conv1",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
    )
    loha_file(source, {name: (6, 44)})
    with pytest.raises(ConfigError, match=f"{name}: 44 inputs do not fit a 3×3 convolution") as refusal:
        convert_lora(source, target, "peft", family="sdxl", rank=9999)
    assert "--model" in str(refusal.value)
    assert not target.exists()


def test_a_change_of_zeros_is_left_out_and_stops_nothing(tmp_path: Path) -> None:
    """As layers have that a training did not reach."""
    names = [f"lora_unet_time_embedding_linear_{number}" for number in (1, 2)]
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    loha_file(source, dict.fromkeys(names, (6, 5)))
    save_file(load_file(source) | {f"{names[1]}.hada_w1_a": torch.zeros(6, 2)}, source)
    report = convert_lora(source, target, "peft", family="sdxl", rank=2)
    assert [one.name for one in report.factored] == names[:1]
    assert [(one.name, one.reason) for one in report.left_out] == [(names[1], "it changes nothing")]
    assert load_lora(target).modules.keys() == {"unet.time_embedding.linear_1"}


def test_a_fused_layer_is_divided_as_plain_factors_are(tmp_path: Path) -> None:
    name, source, target = (
        "lora_unet_double_blocks_0_img_attn_qkv",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
    )
    change = hadamard(loha_file(source, {name: (24, 8)})[name])
    convert_lora(source, target, "peft", family="flux", rank=9999)
    parts = load_lora(target).modules
    start = "transformer.transformer_blocks.0.attn.to_"
    assert parts.keys() == {start + end for end in "qkv"}
    found = torch.cat([parts[start + end].delta().double() for end in "qkv"])
    torch.testing.assert_close(found, change, rtol=1e-4, atol=1e-4)


def test_the_way_to_plain_factors_is_told_and_means_nothing_elsewhere(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    loha_file(source, {"lora_unet_time_embedding_linear_1": (6, 5)})
    with pytest.raises(LoraFormatError, match="peft files cannot hold such a change") as refusal:
        convert_lora(source, target, "peft", family="sdxl")
    assert "--rank 32" in str(refusal.value)
    with pytest.raises(ConfigError, match="--rank has no effect: kohya"):
        convert_lora(source, target, "kohya", rank=4)
    with pytest.raises(ConfigError, match="nothing is cut"):
        convert_lora(source, target, "peft", statistics=tmp_path / "stats.safetensors")
    loha_file(source, {"lora_unet_foo_bar": (6, 5)})
    with pytest.raises(LoraFormatError) as other:
        convert_lora(source, target, "peft", family="sdxl", rank=4)
    assert "--rank" not in str(other.value)
    plain = LoraFactors(torch.ones(6, 2), torch.ones(2, 5), 2.0, (6, 5))
    save_lora(source, LoraFile({"denoiser.time_embedding.linear_1": plain}))
    with pytest.raises(ConfigError, match="--rank has no effect: the file holds no LoHa"):
        convert_lora(source, target, "peft", rank=1)
    with pytest.raises(ConfigError, match="--rank 0 keeps nothing"):
        convert_lora(source, target, "peft", rank=0)
    assert not target.exists()


def test_names_of_both_namings_come_out_in_one(make_factors: MakeFactors, tmp_path: Path) -> None:
    names = ["lora_unet_input_blocks_1_0_emb_layers_1", "lora_unet_mid_block_resnets_0_time_emb_proj"]
    factors = make_factors((6, 5), 1)
    tensors = {
        f"{name}.lora_{end}.weight": getattr(factors, end).clone() for name in names for end in ("up", "down")
    }
    save_file(tensors, tmp_path / "in.safetensors")
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "peft")
    expected = ["unet.down_blocks.0.resnets.0.time_emb_proj", "unet.mid_block.resnets.0.time_emb_proj"]
    assert list(load_lora(tmp_path / "out.safetensors").modules) == expected


@pytest.mark.parametrize("name", ["out.ckpt", ""])
def test_a_target_that_is_no_safetensors_file_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    target = tmp_path / (name or "folder.safetensors")
    with pytest.raises(ConfigError, match=r"written as safetensors|is a folder"):
        convert_lora(source, target, "peft")


def test_the_source_is_not_written_over(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="part of the input"):
        convert_lora(source, source, "peft")
    assert source.read_bytes() == before


def test_progress_is_told_module_by_module(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    convert_lora(source, tmp_path / "out.safetensors", "peft", progress=lambda *facts: told.append(facts))
    assert told == [(number, 5, layer) for number, layer in enumerate(LAYERS, start=1)]


def test_a_small_unet_counts_its_blocks_by_its_own_modules(make_factors: MakeFactors, tmp_path: Path) -> None:
    names = {
        "denoiser.down_blocks.0.resnets.0.conv1": "diffusion_model.input_blocks.1.0.in_layers.2",
        "denoiser.down_blocks.0.downsamplers.0.conv": "diffusion_model.input_blocks.2.0.op",
        "denoiser.down_blocks.1.downsamplers.0.conv": "diffusion_model.input_blocks.4.0.op",
        "denoiser.up_blocks.0.resnets.1.conv1": "diffusion_model.output_blocks.1.0.in_layers.2",
        "denoiser.up_blocks.0.attentions.1.proj_in": "diffusion_model.output_blocks.1.1.proj_in",
        "denoiser.up_blocks.1.upsamplers.0.conv": "diffusion_model.output_blocks.3.1.conv",
    }
    save_lora(tmp_path / "in.safetensors", LoraFile({name: make_factors((6, 5), 1) for name in names}))
    convert_lora(tmp_path / "in.safetensors", tmp_path / "on.safetensors", "comfyui")
    assert list(load_lora(tmp_path / "on.safetensors").modules) == list(names.values())
    convert_lora(tmp_path / "on.safetensors", tmp_path / "back.safetensors", "native")
    assert set(load_lora(tmp_path / "back.safetensors").modules) == set(names)


def test_a_sgm_name_is_what_diffusers_reads_from_original_files() -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    from sigmascope.lora.layer_names import to_sgm

    paths = [
        *(f"down_blocks.{block}.resnets.{layer}.conv1" for block in range(3) for layer in range(2)),
        *(f"down_blocks.{block}.attentions.{layer}.proj_in" for block in (1, 2) for layer in range(2)),
        *(f"down_blocks.{block}.downsamplers.0.conv" for block in range(2)),
        *(f"up_blocks.{block}.resnets.{layer}.time_emb_proj" for block in range(3) for layer in range(3)),
        *(f"up_blocks.{block}.attentions.{layer}.proj_out" for block in range(2) for layer in range(3)),
        *(f"up_blocks.{block}.upsamplers.0.conv" for block in range(2)),
        *("mid_block.resnets.0.conv2", "mid_block.attentions.0.proj_in", "mid_block.resnets.1.conv1"),
        *("conv_in", "conv_norm_out", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"),
        *("add_embedding.linear_1", "add_embedding.linear_2"),
    ]
    marked: dict[str, Any] = {
        f"model.diffusion_model.{to_sgm(path)}.{kind}": torch.tensor([float(number)])
        for number, path in enumerate(paths)
        for kind in ("weight", "bias")
    }
    config = {
        "layers_per_block": 2,
        "class_embed_type": None,
        "addition_embed_type": "text_time",
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    }
    read = convert_ldm_unet_checkpoint(marked, config)
    assert {
        key.removesuffix(".weight"): paths[int(value)] for key, value in read.items() if "weight" in key
    } == {path: path for path in paths}


def test_no_file_of_a_folder_or_sharded_model_is_written_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    inside = source.rename(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "unet").mkdir()
    shard = model_file(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", ["conv_in"])
    for target, model in ((inside, None), (shard, tmp_path / "unet")):
        before = target.read_bytes()
        with pytest.raises(ConfigError, match="part of the input"):
            convert_lora(tmp_path / "adapter", target, "kohya", model=model)
        assert target.read_bytes() == before


def test_keys_of_no_module_are_reported_as_left_out(source: Path, tmp_path: Path) -> None:
    save_file(load_file(source) | {"optimizer.step": torch.ones(1)}, source)
    report = convert_lora(source, tmp_path / "out.safetensors", "kohya")
    assert [(one.name, one.reason) for one in report.left_out] == [("optimizer.step", "belongs to no module")]


@pytest.mark.parametrize(
    ("format", "options", "flag"),
    [
        ("kohya", {"prefix": "unet"}, "--prefix"),
        ("comfyui", {"prefix": ""}, "--prefix"),
        ("native", {"prefix": "unet", "model": True}, "--prefix"),
    ],
)
def test_options_without_effect_are_refused(
    format: str, options: dict[str, Any], flag: str, source: Path, tmp_path: Path
) -> None:
    if "model" in options:
        options = options | {"model": model_file(tmp_path / "model.safetensors", LAYERS)}
    with pytest.raises(ConfigError, match=f"{flag} has no effect"):
        convert_lora(source, tmp_path / "out.safetensors", format, **options)


def flux2_lora(path: Path) -> Path:
    """kohya names and shapes of a FLUX.2 [klein] LoRA, as one is trained: half as wide, which no family is told by."""
    width = 64
    shapes = {
        "double_blocks_0_img_attn_qkv": (3 * width, width),
        "double_blocks_0_img_attn_proj": (width, width),
        "double_blocks_0_img_mlp_0": (6 * width, width),
        "double_blocks_0_img_mlp_2": (width, 3 * width),
        "single_blocks_0_linear1": (9 * width, width),
        "single_blocks_0_linear2": (width, 4 * width),
    }
    tensors = {}
    for name, (out, inner) in shapes.items():
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.ones(out, 2)
        tensors[f"lora_unet_{name}.lora_down.weight"] = torch.ones(2, inner)
    save_file(tensors, path)
    return path


def test_a_flux2_lora_is_not_written_under_names_of_flux(tmp_path: Path) -> None:
    source, target = flux2_lora(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    with pytest.raises(ConfigError, match=r"is not for the family flux: .*img_mlp\.0 is 384 × 64"):
        convert_lora(source, target, "peft", family="flux")
    assert not target.exists()
    save_file(load_file(source), source, {"modelspec.architecture": "flux-1-dev/lora"})
    assert convert_lora(source, target, "peft").family == "flux2"
    assert "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_B.weight" in load_file(target)


def test_peft_is_refused_for_a_model_whose_names_may_not_be_diffusers(tmp_path: Path) -> None:
    source, target = flux2_lora(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    shapes = {
        name.removeprefix("lora_unet_").replace("_0_", ".0.").replace(".img_", ".img_"): factors.weight_shape
        for name, factors in load_lora(source).modules.items()
    }
    dotted = {name.replace("attn_", "attn.").replace("mlp_", "mlp."): shape for name, shape in shapes.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(
        {f"{name}.weight": torch.zeros(shape) for name, shape in dotted.items()}, folder / "model.safetensors"
    )
    # All of its layers tell the LoRA's family, with the model as without it; attention is that of several.
    assert convert_lora(source, target, "peft", model=folder / "model.safetensors").family == "flux2"
    attention = {key: tensor for key, tensor in load_file(source).items() if "img_attn" in key}
    save_file(attention, source)
    with pytest.raises(ConfigError, match=r"model\.safetensors: its model family .* nearest is FLUX, but"):
        convert_lora(source, target, "peft", model=folder / "model.safetensors")
    (folder / "config.json").write_text(
        '{"_class_name": "Flux2Transformer2DModel", "_diffusers_version": "0.37"}'
    )
    report = convert_lora(source, target, "peft", model=folder / "model.safetensors")
    assert report.modules == len(load_lora(source).names)


WRAPPERS = [
    "pipe.dit.",
    "module.",
    "_orig_mod.",
    "dit.",
    "net.",
    "module._orig_mod.",
    "transformer._orig_mod.",
]


def saved(path: Path, names: list[str]) -> Path:
    """A file of PEFT's endings with 64 × 64 layers under these names."""
    ends = {"lora_A": (4, 64), "lora_B": (64, 4)}
    save_file({f"{name}.{end}.weight": torch.ones(ends[end]) for name in names for end in ends}, path)
    return path


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "base_model.model.net.", "my.own.wrapper."])
def test_what_wraps_the_denoisers_names_is_peeled_and_diffusers_has_the_rest(
    wrapper: str, with_model: bool, tmp_path: Path
) -> None:
    """Of layers outside of blocks too, whose names alone would tell nothing; and whether or not the model is given."""
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=1, attention_head_dim=64, num_layers=1, ffn_dim=64, freq_dim=8, text_dim=8
        )
    own = ["blocks.0.self_attn.q", "blocks.0.cross_attn.k", "blocks.0.ffn.0", "time_embedding.2"]
    path = saved(tmp_path / "in.safetensors", [wrapper + name for name in own])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"_diffusers_version": "0.42.1"}')
    save_file(
        {key: torch.zeros(value.shape) for key, value in model.state_dict().items()},
        folder / "diffusion_pytorch_model.safetensors",
    )
    convert_lora(path, tmp_path / "out.safetensors", "peft", model=folder if with_model else None)
    written = {key.rpartition(".lora_")[0] for key in load_file(tmp_path / "out.safetensors")}
    layers = {
        f"transformer.{name}" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    assert len(written) == len(own)
    assert written <= layers


def test_a_wrapper_before_the_layers_of_a_model_of_no_known_family_is_peeled(tmp_path: Path) -> None:
    layers = ["my_blocks.0.attn.q", "my_blocks.1.attn.q", "tail.proj"]
    save_file({f"{name}.weight": torch.zeros(64, 64) for name in layers}, tmp_path / "model.safetensors")
    path = saved(tmp_path / "in.safetensors", [f"net.module.{name}" for name in layers])
    convert_lora(path, tmp_path / "out.safetensors", "native", model=tmp_path / "model.safetensors")
    assert set(load_lora(tmp_path / "out.safetensors").names) == set(layers)


@pytest.mark.parametrize(
    "name", ["lora_unet_single_transformer_blocks_0_attn_to_q", "transformer_blocks.3.my_blocks.0.attn.q"]
)
def test_a_block_is_no_wrapper(name: str, tmp_path: Path) -> None:
    """A model that has what follows, but not this block, gets nothing under another block's name."""
    layers = ["transformer_blocks.0.attn.to_q", "my_blocks.0.attn.q"]
    save_file({f"{layer}.weight": torch.zeros(64, 64) for layer in layers}, tmp_path / "model.safetensors")
    path = saved(tmp_path / "in.safetensors", [name])
    with pytest.raises(LoraFormatError, match="1 of 1 names cannot be carried over"):
        convert_lora(path, tmp_path / "out.safetensors", "native", model=tmp_path / "model.safetensors")


@pytest.mark.parametrize("start", ["", "base_model.model.", *WRAPPERS[:-1]])
def test_names_of_an_unknown_family_are_not_copied_into_a_pipelines_file(start: str, tmp_path: Path) -> None:
    path, target = (
        saved(tmp_path / "in.safetensors", [f"{start}my_blocks.0.attn.to_q"]),
        tmp_path / "out.safetensors",
    )
    target.write_bytes(b"as it was")
    with pytest.raises(ConfigError, match="model family cannot be recognised"):
        convert_lora(path, target, "peft")
    assert target.read_bytes() == b"as it was"


def test_names_of_an_unknown_family_that_a_pipelines_component_owns_stay(tmp_path: Path) -> None:
    path = saved(tmp_path / "in.safetensors", ["transformer.my_blocks.0.attn.to_q"])
    convert_lora(path, tmp_path / "out.safetensors", "peft")
    assert load_file(tmp_path / "out.safetensors").keys() == load_file(path).keys()


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_family_beside_the_model_says_its_names(prefix: str, tmp_path: Path) -> None:
    """Both are too small to tell: the names are the family's, and the model has these layers."""
    source, target = flux2_lora(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    shapes = {name: load_lora(source).shape_of(name) for name in load_lora(source).names}
    dots = re.compile(r"lora_unet_(\w+?_blocks)_0_((?:img_attn|img_mlp)(?=_))?_?(\w+)")
    layers = {
        ".".join(filter(None, [m[1], "0", m[2], m[3]])): shape
        for name, shape in shapes.items()
        if (m := dots.fullmatch(name))
    }
    save_file(
        {f"{prefix}{layer}.weight": torch.zeros(shape) for layer, shape in layers.items()},
        tmp_path / "model.safetensors",
    )
    report = convert_lora(source, target, "peft", model=tmp_path / "model.safetensors", family="flux2")
    alone = convert_lora(source, tmp_path / "alone.safetensors", "peft", family="flux2")
    assert (report.family, report.left_out) == ("flux2", ())
    assert load_file(target).keys() == load_file(alone.target).keys()
    with pytest.raises(ConfigError, match="the model is not one of LTX-Video: none of its layers"):
        convert_lora(source, target, "peft", model=tmp_path / "model.safetensors", family="ltx_video")


def test_what_its_host_would_not_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that stood there stays, and nothing is left beside it."""
    source, target = flux2_lora(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    target.write_bytes(b"what was there")
    none = HostReading("diffusers", 6, 0, {})
    monkeypatch.setattr(loadable, "loads_of", lambda path: {"diffusers": none, "comfyui": none})
    with pytest.raises(
        LoraFormatError, match="diffusers would take none of its 6 modules in the peft format"
    ):
        convert_lora(source, target, "peft", family="flux2")
    assert target.read_bytes() == b"what was there"
    assert {path.name for path in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors"}


def test_what_each_host_takes_is_said_with_its_strength(tmp_path: Path) -> None:
    source, target = flux2_lora(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    convert_lora(source, target, "peft", family="flux2")
    said = loads_in_words(target)
    assert re.fullmatch(r"diffusers (\d+) of \1 × 1, ComfyUI (\d+) of \2 × 1", said), said
    own = tmp_path / "lbm.safetensors"
    factors = {"lora_down": torch.ones(2, 4), "lora_up": torch.ones(4, 2)}
    name = "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file(
        {f"{name}.{end}.weight": factor for end, factor in factors.items()},
        own,
        {"lbm_native_naming": "true"},
    )
    assert loads_in_words(own) == "into an LBM here, 1 of 1 module"
    odd = tmp_path / "odd.safetensors"
    save_file({f"my.{end}.weight": torch.ones(4, 4) for end in ("lora_A", "lora_B")}, odd)
    assert loads_in_words(odd).startswith("diffusers unverified (the file does not tell its model family)")


@pytest.mark.parametrize("format", ["peft", "kohya", "comfyui"])
@pytest.mark.parametrize("with_model", [False, True])
def test_modules_that_have_only_numbers_are_refused_without_asking_for_a_model(
    format: str, with_model: bool, tmp_path: Path
) -> None:
    """As Stable Cascade's own trainer saves a list of them, beside the words that it trained (ComfyUI's issue 3021)."""
    source, target, model = (tmp_path / f"{name}.safetensors" for name in ("in", "out", "model"))
    ends = {"lora_down": torch.ones(2, 4), "lora_up": torch.ones(4, 2)}
    state = {f"weights.{number}.{end}": factor.clone() for number in range(3) for end, factor in ends.items()}
    save_file(state | {"embeddings.weight": torch.ones(1, 4)}, source)
    save_file({"down_blocks.0.1.channelwise.0.weight": torch.ones(4, 4)}, model)
    with pytest.raises(
        LoraFormatError, match=r"only numbers \(weights\.0, weights\.1, weights\.2\)"
    ) as caught:
        convert_lora(source, target, format, model=model if with_model else None)
    assert caught.value.hint is not None
    assert "--model" not in caught.value.hint
    assert "--family" not in caught.value.hint
    assert not target.exists()


def test_modules_that_have_only_numbers_are_converted_where_the_model_has_them(tmp_path: Path) -> None:
    source, target, model = (tmp_path / f"{name}.safetensors" for name in ("in", "out", "model"))
    ends = {"lora_down": torch.ones(2, 4), "lora_up": torch.ones(4, 2)}
    save_file(
        {f"net.{number}.{end}.weight": factor.clone() for number in (0, 2) for end, factor in ends.items()},
        source,
    )
    save_file({f"net.{number}.weight": torch.ones(4, 4) for number in (0, 2)}, model)
    convert_lora(source, target, "kohya", model=model)
    assert {key.partition(".")[0] for key in load_file(target)} == {"lora_unet_net_0", "lora_unet_net_2"}


@pytest.mark.parametrize(("family", "only"), [("sd15", ""), ("sd15", "resnets"), ("sdxl", "resnets")])
def test_kohya_names_of_a_unet_whose_family_is_a_guess_are_read_by_all_pipelines(
    family: str, only: str, tmp_path: Path
) -> None:
    """No width tells these small U-Nets, nor convolutions of real ones, apart."""
    pipeline: Any = make_pipeline(family)
    state = lora_state(pipeline, ["unet"], only=only)
    report = convert_lora(
        write(state, tmp_path / "in.safetensors"), tmp_path / "out.safetensors", format="kohya"
    )
    assert report.family_doubt is not None
    with safe_open(report.target, "pt") as file:
        assert not {"modelspec.architecture", "ss_base_model_version"} & {*file.metadata()}
    pipeline.load_lora_weights(str(report.target))
    layers = [name for name, module in pipeline.unet.named_modules() if getattr(module, "lora_A", None)]
    assert {f"unet.{name}" for name in layers} == modules_of(state)


def test_a_second_text_encoder_tells_that_a_unet_is_of_sdxl(tmp_path: Path) -> None:
    pipeline = make_pipeline("sdxl")
    state = lora_state(pipeline, ["unet"], only="resnets")
    state |= lora_state(pipeline, ["text_encoder_2"], only="q_proj")
    report = convert_lora(
        write(state, tmp_path / "in.safetensors"), tmp_path / "out.safetensors", format="kohya"
    )
    assert (report.family, report.family_doubt) == ("sdxl", None)
