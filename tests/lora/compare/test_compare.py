import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lora.compare import LoraComparison, compare_loras
from sigmascope.lora.convert import convert_lora

Tensors = dict[str, torch.Tensor]
LAYERS = {
    "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k": (12, 12),
    "down_blocks.1.resnets.0.conv1": (8, 4, 3, 3),
    "mid_block.attentions.0.proj_in": (10, 12),
}


def module(name: str, shape: tuple[int, ...], rank: int, seed: int, alpha: float | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(shape[0], rank, *(1 for _ in shape[2:]), generator=generator)
    down = torch.randn(rank, *shape[1:], generator=generator)
    chosen = float(rank) if alpha is None else alpha
    return {
        f"{name}.lora_up.weight": up,
        f"{name}.lora_down.weight": down,
        f"{name}.alpha": torch.tensor(chosen),
    }


def native(seed: int = 0, alpha: float | None = None) -> Tensors:
    tensors: Tensors = {}
    for offset, (layer, shape) in enumerate(LAYERS.items()):
        tensors |= module(f"denoiser.{layer}", shape, 4, seed + offset, alpha)
    return tensors


def compared(
    tmp_path: Path, a: Tensors, b: Tensors, *, tolerance: float = 0.01, header: dict[str, str] | None = None
) -> LoraComparison:
    save_file(a, tmp_path / "a.safetensors", header)
    save_file(b, tmp_path / "b.safetensors")
    return compare_loras(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tolerance=tolerance)


def total(tensors: Tensors) -> torch.Tensor:
    """All changes one after the other, in float64."""
    parts = []
    for layer in LAYERS:
        up = tensors[f"denoiser.{layer}.lora_up.weight"].double().flatten(1)
        down = tensors[f"denoiser.{layer}.lora_down.weight"].double().flatten(1)
        scale = float(tensors[f"denoiser.{layer}.alpha"]) / down.shape[0]
        parts.append((scale * up @ down).flatten())
    return torch.cat(parts)


def test_a_lora_is_the_same_as_itself(tmp_path: Path) -> None:
    report = compared(tmp_path, native(), native())
    assert report.verdict == "same"
    assert report.relative_difference == pytest.approx(0.0, abs=1e-12)
    assert report.factor == pytest.approx(1.0)
    assert [entry.column_overlap for entry in report.modules] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("format", ["kohya", "peft", "comfyui"])
def test_formats_do_not_matter(tmp_path: Path, format: str) -> None:
    save_file(native(alpha=2.0), tmp_path / "a.safetensors")
    convert_lora(tmp_path / "a.safetensors", tmp_path / "b.safetensors", format)
    report = compare_loras(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.verdict == "same"
    assert (report.a.format, report.b.format) == ("native", format)
    assert report.only_a == report.only_b == ()
    assert len(report.modules) == len(LAYERS)


def test_precision_rank_and_alpha_do_not_matter_within_the_tolerance(tmp_path: Path) -> None:
    rounded = {
        key: tensor if key.endswith("alpha") else tensor.bfloat16() for key, tensor in native().items()
    }
    report = compared(tmp_path, native(), rounded)
    assert report.verdict == "same"
    assert report.b.dtypes == {"bfloat16": 3}
    assert compared(tmp_path, native(), rounded, tolerance=1e-5).verdict == "different"


def test_a_scaled_version_is_found_with_its_factor(tmp_path: Path) -> None:
    report = compared(tmp_path, native(alpha=4.0), native(alpha=-2.0))
    assert report.verdict == "scaled"
    assert report.factor == pytest.approx(-0.5)
    assert report.cosine == pytest.approx(-1.0)
    assert report.relative_difference == pytest.approx(1.5)


def test_measures_are_those_of_the_formed_changes(tmp_path: Path) -> None:
    a, b = native(seed=0), native(seed=10)
    report = compared(tmp_path, a, b)
    first, second = total(a), total(b)
    assert report.verdict == "different"
    assert report.cosine == pytest.approx(float(first @ second / first.norm() / second.norm()))
    assert report.relative_difference == pytest.approx(float((first - second).norm() / first.norm()))
    assert report.a.norm == pytest.approx(float(first.norm()))


def test_one_module_that_differs_makes_the_loras_different(tmp_path: Path) -> None:
    other = native()
    other["denoiser.mid_block.attentions.0.proj_in.lora_up.weight"] *= 1.05
    report = compared(tmp_path, native(), other)
    assert report.verdict == "different"
    assert report.most_different[0].name.endswith("mid_block.attentions.0.proj_in")
    assert report.most_different[0].relative_difference == pytest.approx(0.05, rel=1e-3)


def test_modules_of_one_side_count_unless_they_are_zero(tmp_path: Path) -> None:
    extra = module("denoiser.conv_in", (8, 4, 3, 3), 2, seed=5)
    report = compared(tmp_path, native(), native() | extra)
    assert report.verdict == "different"
    assert report.only_b == ("denoiser.conv_in",)
    nothing = extra | {"denoiser.conv_in.lora_up.weight": torch.zeros(8, 2, 1, 1)}
    assert compared(tmp_path, native(), native() | nothing).verdict == "same"


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    other = native() | module("denoiser.mid_block.attentions.0.proj_in", (10, 14), 4, seed=2)
    report = compared(tmp_path, native(), other)
    assert report.verdict == "different"
    assert [entry.name for entry in report.modules if entry.presence == "other_shape"] == [
        "denoiser.mid_block.attentions.0.proj_in"
    ]


def test_other_kinds_of_change_are_compared_as_a_whole(tmp_path: Path) -> None:
    name = "lora_unet_mid_block_attentions_0_proj_in"
    up, down = torch.randn(10, 3), torch.randn(3, 12)
    plain = {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down}
    whole = {f"{name}.diff": up @ down}
    report = compared(tmp_path, plain, whole)
    assert report.verdict == "same"
    (entry,) = report.modules
    assert entry.b is not None
    assert entry.b.kind == "diff"
    assert entry.column_overlap is None


@pytest.mark.parametrize("part", ["dora_scale", "lora_up.weight", "alpha"])
def test_what_depends_on_a_base_is_the_same_only_if_its_tensors_are(tmp_path: Path, part: str) -> None:
    dora = module("lora_unet_conv_in", (8, 6), 2, seed=0) | {"lora_unet_conv_in.dora_scale": torch.ones(8, 1)}
    same = compared(tmp_path, dora, dora)
    assert (same.verdict, same.not_measured) == ("same", ())
    key = f"lora_unet_conv_in.{part}"
    report = compared(tmp_path, dora, dora | {key: dora[key] * 1.5})
    assert (report.verdict, report.not_measured) == ("different", ("denoiser.conv_in",))


def test_header_fields_that_differ_are_listed(tmp_path: Path) -> None:
    report = compared(tmp_path, native(), native(), header={"ss_seed": "1"})
    assert [(field.name, field.a, field.b) for field in report.metadata] == [("ss_seed", "1", None)]
    json.dumps(report.as_dict(), allow_nan=False)


def test_fused_and_separate_matrices_are_the_same_change(tmp_path: Path) -> None:
    """FLUX: one matrix for query, key and value in the original's names, three in diffusers'."""
    down = torch.randn(4, 6)
    parts = {name: torch.randn(6, 4) for name in ("q", "k", "v")}
    separate: Tensors = {}
    for name, up in parts.items():
        start = f"transformer.transformer_blocks.0.attn.to_{name}"
        separate |= {f"{start}.lora_A.weight": down.clone(), f"{start}.lora_B.weight": up}
    fused = {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": down,
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": torch.cat(list(parts.values())),
    }
    for a, b in ((separate, fused), (fused, separate)):
        report = compared(tmp_path, a, b)
        assert report.verdict == "same"
        assert len(report.modules) == 3


def test_nan_is_refused_by_name(tmp_path: Path) -> None:
    broken = native()
    broken["denoiser.mid_block.attentions.0.proj_in.lora_up.weight"][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"mid_block\.attentions\.0\.proj_in"):
        compared(tmp_path, native(), broken)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_is_no_share_is_refused(tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(ConfigError, match="--tolerance"):
        compared(tmp_path, native(), native(), tolerance=tolerance)
