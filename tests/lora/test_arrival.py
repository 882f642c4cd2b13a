"""How much of a LoRA arrives in a coarsely stored base, beside the quantisation of the packages themselves."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError
from sigmascope.lora.arrival import Arrival, Arrivals, arrivals
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.inspect import relative_strengths
from sigmascope.lora.intruders import intruder_dimensions

KEY = "transformer_blocks.0.attn.to_q"
RANK = 16
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""Numbers to what a file holds of them, and what that is read as."""


def weight_with_outliers(size: int = 512) -> Tensor:
    """A few columns are much larger than the others, as in real models."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator) * 0.02
    weight[:, torch.randperm(size, generator=generator)[:6]] *= 5.0
    return weight


def change_of(weight: Tensor, relative: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(weight.shape[0], RANK, generator=generator)
    down = torch.randn(RANK, weight.shape[1], generator=generator)
    return up * (relative * weight.norm() / (up @ down).norm()), down


def by_kitchen(layout: str, config: Mapping[str, Any], **how: Any) -> Quantise:
    def quantise(numbers: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensor = pytest.importorskip("comfy_kitchen.tensor", reason="comfy-kitchen is not installed")
        made = getattr(tensor, layout)
        codes, facts = made.quantize(numbers.clone(), **how)
        state = {f"{KEY}.weight{end}": part for end, part in made.state_dict_tensors(codes, facts).items()}
        text = torch.tensor(list(json.dumps(dict(config)).encode()), dtype=torch.uint8)
        return {**state, f"{KEY}.comfy_quant": text}, made.dequantize(codes, facts).float()

    return quantise


INT8 = {"is_weight": True, "per_channel": True}
CONVROT = {"convrot": True, "convrot_groupsize": 256}
KITCHEN: dict[str, Quantise] = {
    "fp8": by_kitchen("TensorCoreFP8Layout", {"format": "float8_e4m3fn"}, scale="recalculate"),
    "nvfp4": by_kitchen("TensorCoreNVFP4Layout", {"format": "nvfp4"}),
    "mxfp8": by_kitchen("TensorCoreMXFP8Layout", {"format": "mxfp8"}),
    "int8": by_kitchen("TensorWiseINT8Layout", {"format": "int8_tensorwise"}, is_weight=True),
    "int8 rows": by_kitchen("TensorWiseINT8Layout", {"format": "int8_tensorwise"}, **INT8),
    "convrot": by_kitchen(
        "TensorWiseINT8Layout", {"format": "int8_tensorwise", **CONVROT}, **INT8, **CONVROT
    ),
}


def figures(real: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The definitions, in float64."""
    real, wanted = real.double(), wanted.double()
    share = float((real * wanted).sum() / (wanted * wanted).sum())
    return share, float((real - share * wanted).norm() / wanted.norm())


def arriving(
    folder: Path, base: Path, factors: tuple[Tensor, Tensor], strength: float = 1.0, nearest: bool = True
) -> Arrivals:
    up, down = factors
    state = {f"transformer.{KEY}.lora_A.weight": down, f"transformer.{KEY}.lora_B.weight": up}
    save_file(state, folder / "lora.safetensors")
    with open_checkpoint(base) as checkpoint:
        return arrivals(folder / "lora.safetensors", checkpoint, strength=strength, nearest=nearest)


@pytest.mark.parametrize("relative", [0.01, 0.03])
@pytest.mark.parametrize("name", KITCHEN)
def test_share_and_noise_are_those_of_comfyui_s_kernels(tmp_path: Path, name: str, relative: float) -> None:
    quantise = KITCHEN[name]
    state, numbers = quantise(weight_with_outliers())
    save_file(state, tmp_path / "base.safetensors")
    up, down = change_of(numbers, relative)
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down))
    share, noise = figures(quantise(numbers + up @ down)[1] - numbers, up @ down)
    assert found.overall.share == pytest.approx(share, rel=0.01, abs=1e-4)
    assert found.overall.noise == pytest.approx(noise, rel=0.01, abs=1e-4)


def by_hand(type_: torch.dtype, *, per_row: bool) -> Quantise:
    """Codes times a scale, that of the largest magnitude."""

    def quantise(numbers: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        limit = 127.0 if type_ == torch.int8 else torch.finfo(type_).max
        magnitudes = numbers.double().abs()
        scale = (magnitudes.amax(1, keepdim=True) if per_row else magnitudes.max()).float() / limit
        codes = (numbers / scale).clamp(-limit, limit)
        codes = (codes.round() if type_ == torch.int8 else codes).to(type_)
        return {f"{KEY}.weight": codes, f"{KEY}.weight_scale": scale}, codes.float() * scale

    return quantise


BY_HAND: dict[str, Quantise] = {
    "int8 by hand": by_hand(torch.int8, per_row=False),
    "int8 rows by hand": by_hand(torch.int8, per_row=True),
    "fp8 by hand": by_hand(torch.float8_e4m3fn, per_row=False),
    "e5m2 by hand": by_hand(torch.float8_e5m2, per_row=False),
    "plain fp8": lambda numbers: (
        {f"{KEY}.weight": (plain := numbers.to(torch.float8_e4m3fn))},
        plain.float(),
    ),
}


@pytest.mark.parametrize(
    ("relative", "rank", "dtype"),
    [(0.003, 1, torch.bfloat16), (0.01, 33, torch.float16), (0.03, 4, torch.bfloat16)],
)
@pytest.mark.parametrize("name", [*KITCHEN, *BY_HAND])
def test_blocks_of_odd_sizes_are_those_of_the_format(
    tmp_path: Path, name: str, relative: float, rank: int, dtype: torch.dtype
) -> None:
    """Rows are no multiple of 16 or 32, up to which NVFP4 and MXFP8 are filled up; factors are halves, with an alpha."""
    quantise = (KITCHEN | BY_HAND)[name]
    base: dict[str, Tensor] = {}
    lora: dict[str, Tensor] = {}
    sums = torch.zeros(2, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(rank)
    for block, (rows, columns) in enumerate([(100, 256), (257, 512)]):
        key = KEY.replace(".0.", f".{block}.")
        state, numbers = quantise(torch.randn(rows, columns, generator=generator) * 0.02)
        numbers = numbers[:rows]
        base |= {end.replace(KEY, key): part for end, part in state.items()} | {
            f"{key}.bias": torch.zeros(rows)
        }
        up, down = (
            torch.randn(rows, rank, generator=generator),
            torch.randn(rank, columns, generator=generator),
        )
        up, down = (up * (relative * numbers.norm() / (up @ down).norm())).to(dtype), down.to(dtype)
        ends = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(2.0 * rank)}
        lora |= {f"transformer.{key}.{end}": part for end, part in ends.items()}
        wanted = 2.0 * up.double() @ down.double()
        real = (quantise((numbers + wanted).float())[1][:rows] - numbers).double()
        sums[block] = torch.stack([(wanted * wanted).sum(), (real * wanted).sum(), (real * real).sum()])
    save_file(base, tmp_path / "base.safetensors")
    save_file(lora, tmp_path / "lora.safetensors")
    with open_checkpoint(tmp_path / "base.safetensors") as checkpoint:
        found = arrivals(tmp_path / "lora.safetensors", checkpoint, nearest=True)
    told = [(block.share, block.noise) for block in found.blocks]
    told.append((found.overall.share, found.overall.noise))
    for (share, noise), of in zip(told, [*sums.tolist(), sums.sum(0).tolist()], strict=True):
        assert share == pytest.approx(of[1] / of[0], rel=0.01, abs=1e-4)
        assert noise == pytest.approx((of[2] / of[0] - (of[1] / of[0]) ** 2) ** 0.5, rel=0.01, abs=1e-4)


@pytest.mark.parametrize(
    ("relative", "shares"),
    [
        (0.01, {"fp8": 0.39, "nvfp4": 0.00, "int8": 0.00, "convrot": 0.85}),
        (0.03, {"fp8": 0.83, "nvfp4": 0.14, "int8": 0.13, "convrot": 1.00}),
    ],
)
def test_a_small_change_is_lost_in_coarse_formats(
    tmp_path: Path, relative: float, shares: dict[str, float]
) -> None:
    """The shares were measured on another weight with outlier columns, by ComfyUI's kernels."""
    for name, share in shares.items():
        state, numbers = KITCHEN[name](weight_with_outliers())
        save_file(state, tmp_path / f"{name}.safetensors")
        found = arriving(tmp_path, tmp_path / f"{name}.safetensors", change_of(numbers, relative))
        assert found.overall.share == pytest.approx(share, abs=0.07), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0"])
def test_share_and_noise_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    codes = gguf.quants.quantize(weight_with_outliers(256).numpy(), type_)
    writer = gguf.GGUFWriter(tmp_path / "base.gguf", "flux")
    writer.add_tensor(f"{KEY}.weight", codes, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    numbers = torch.from_numpy(gguf.quants.dequantize(codes, type_))
    up, down = change_of(numbers, 0.03)
    found = arriving(tmp_path, tmp_path / "base.gguf", (up, down)).overall
    merged = np.asarray(gguf.quants.quantize((numbers + up @ down).numpy(), type_))
    share, noise = figures(torch.from_numpy(gguf.quants.dequantize(merged, type_)) - numbers, up @ down)
    assert (found.share, found.noise) == pytest.approx((share, noise), rel=0.01)


def by_bitsandbytes(numbers: Tensor, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """4 bits as in QLoRA: the largest magnitude of 64 numbers, those of 256 blocks less their mean in 8 bits (section 3)."""
    values = torch.linspace(-1, 1, 16).pow(3)
    blocks = numbers.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    places = (blocks[..., None] / largest[:, None, None] - values).abs().argmin(-1)
    facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [*numbers.shape]}
    state = {"absmax": largest}
    if nested:
        coarse_values, mean = torch.linspace(-1, 1, 256), largest.mean()
        rest = (largest - mean).reshape(-1, 256)
        peaks = rest.abs().amax(1, keepdim=True)
        coarse = (rest[..., None] / peaks[..., None] - coarse_values).abs().argmin(-1)
        largest = (coarse_values[coarse] * peaks).flatten() + mean
        state = {
            "absmax": coarse.flatten().to(torch.uint8),
            "nested_absmax": peaks.flatten(),
            "nested_quant_map": coarse_values,
        }
        facts |= {"nested_blocksize": 256, "nested_offset": float(mean)}
    codes = places.to(torch.uint8).reshape(-1, 2)
    state |= {
        "quant_map": values,
        "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8),
    }
    stored = {f"{KEY}.weight.{end}": part for end, part in state.items()}
    packed = (codes[:, 0] << 4 | codes[:, 1])[:, None]
    return {f"{KEY}.weight": packed, **stored}, (values[places] * largest[:, None]).reshape(numbers.shape)


@pytest.mark.parametrize("relative", [0.01, 0.05])
@pytest.mark.parametrize("nested", [False, True])
def test_share_and_noise_are_those_of_bitsandbytes_arithmetic(
    tmp_path: Path, nested: bool, relative: float
) -> None:
    """Magnitudes in 8 bits lose a change below half a step once more: the noise seemed twice as large as it is."""
    state, numbers = by_bitsandbytes(weight_with_outliers(256), nested=nested)
    save_file(state, tmp_path / "base.safetensors")
    up, down = change_of(numbers, relative)
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down)).overall
    share, noise = figures(by_bitsandbytes(numbers + up @ down, nested=nested)[1] - numbers, up @ down)
    assert found.share == pytest.approx(share, rel=0.01, abs=1e-4)
    assert found.noise == pytest.approx(noise, rel=0.01)


@pytest.mark.parametrize("strength", [1.0, -2.0])
def test_plain_fp8_is_rounded_to_the_nearest(tmp_path: Path, strength: float) -> None:
    numbers = weight_with_outliers(256).to(torch.float8_e4m3fn)
    save_file({f"{KEY}.weight": numbers}, tmp_path / "base.safetensors")
    up, down = change_of(numbers.float(), 0.02)
    wanted = strength * (up @ down)
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down), strength)
    real = (numbers.float() + wanted).to(torch.float8_e4m3fn).float() - numbers.float()
    assert (found.overall.share, found.overall.noise) == pytest.approx(figures(real, wanted), rel=1e-4)


@pytest.mark.parametrize("scale", [(), (300, 1), (3, 2)], ids=["tensor", "row", "blocks"])
def test_a_scale_is_taken_anew_for_what_it_was_for(tmp_path: Path, scale: tuple[int, ...]) -> None:
    """Rows and columns here are no multiple of a block's 128."""
    codes = torch.randn(300, 200, generator=torch.Generator().manual_seed(2)).mul(100).to(torch.float8_e4m3fn)
    state = {f"{KEY}.weight": codes, f"{KEY}.weight_scale": torch.full(scale, 0.001)}
    save_file(state, tmp_path / "base.safetensors")
    numbers = codes.float() * 0.001
    up, down = change_of(numbers, 0.02)
    moved, areas = numbers + up @ down, []
    sizes = {(): (300, 200), (300, 1): (1, 200), (3, 2): (128, 128)}[scale]
    for rows in torch.split(moved, sizes[0], 0):
        steps = [part.abs().max() / 448 for part in torch.split(rows, sizes[1], 1)]
        parts = zip(torch.split(rows, sizes[1], 1), steps, strict=True)
        areas.append(
            torch.cat([(part / step).to(torch.float8_e4m3fn).float() * step for part, step in parts], 1)
        )
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down)).overall
    assert (found.share, found.noise) == pytest.approx(
        figures(torch.cat(areas) - numbers, up @ down), rel=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.complex64])
def test_codes_without_scales_are_unknown(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = weight_with_outliers(32)
    save_file({f"{KEY}.weight": (50 * weight).to(dtype)}, tmp_path / "base.safetensors")
    found = arriving(tmp_path, tmp_path / "base.safetensors", change_of(weight, 0.1))
    assert (found.overall.share, found.findings) == (None, ())
    assert f"{dtype}".removeprefix("torch.") in found.unavailable[f"{KEY}.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plain_base_takes_the_whole_change(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = weight_with_outliers(128)
    save_file({f"{KEY}.weight": weight.to(dtype)}, tmp_path / "base.safetensors")
    found = arriving(tmp_path, tmp_path / "base.safetensors", change_of(weight, 0.01))
    assert found.overall.share == pytest.approx(1.0, abs=1e-5)
    assert found.overall.noise == pytest.approx(0.0, abs=1e-4)
    assert found.findings == ()


def test_findings_have_both_figures() -> None:
    """Half of the change, and noise as large as it: ‖real‖² = 0.5² + 1² of what is wanted."""
    found = Arrivals(1.0, {"a.weight": Arrival(4.0, 2.0, 5.0, "NVFP4")})
    weak, noisy = found.findings
    assert (weak.id, noisy.id) == ("lora_arrives_weak", "lora_arrives_noisy")
    assert weak.evidence == {"share": 0.5, "noise": 1.0, "stored": "NVFP4", "weights": 1}
    assert "Only 50 %" in weak.message
    assert "noise of 100 % of its size" in noisy.message


def test_a_weight_that_cannot_be_stored_again_has_its_reason(tmp_path: Path) -> None:
    state = {f"{KEY}.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}
    text = torch.tensor(list(b'{"format": "fp2"}'), dtype=torch.uint8)
    save_file({**state, f"{KEY}.comfy_quant": text}, tmp_path / "base.safetensors")
    up, down = torch.ones(64, 2), torch.ones(2, 64)
    save_file(
        {f"transformer.{KEY}.lora_A.weight": down, f"transformer.{KEY}.lora_B.weight": up},
        tmp_path / "lora.safetensors",
    )
    with open_checkpoint(tmp_path / "base.safetensors", keep_unread=True) as base:
        found = arrivals(tmp_path / "lora.safetensors", base)
    assert found.overall.share is None
    assert "'fp2', which has no reader here" in found.unavailable[f"{KEY}.weight"]


def test_what_to_do_follows_why_nothing_is_known(tmp_path: Path) -> None:
    text = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    state = {f"{KEY}.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), f"{KEY}.comfy_quant": text}
    save_file(state, tmp_path / "base.safetensors")
    factors = {"lora_A.weight": torch.ones(2, 64), "lora_B.weight": torch.ones(64, 2)}
    save_file({f"transformer.{KEY}.{end}": part for end, part in factors.items()}, tmp_path / "l.safetensors")
    with open_checkpoint(tmp_path / "base.safetensors", keep_unread=True) as base:
        reasons = [
            *arrivals(tmp_path / "l.safetensors", base).unavailable.values(),
            *(one.unavailable for one in intruder_dimensions(tmp_path / "l.safetensors", base).values()),
        ]
        verdict = judge_lora(tmp_path / "l.safetensors", base)
        effects = relative_strengths(tmp_path / "l.safetensors", verdict, base)
    reasons += [effect.unavailable["relative_change"] for effect in effects.values()]
    assert len(reasons) == 3
    for why in reasons:
        assert f"{KEY}.weight_scale, the scale of {KEY}.weight, is missing. Download the" in (why or "")


def test_a_base_whose_reader_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "comfy_kitchen.tensor", None)
    text = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    state = {
        f"{KEY}.weight": torch.zeros(128, 32, dtype=torch.uint8),
        f"{KEY}.weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
        f"{KEY}.weight_scale_2": torch.tensor(1.0),
        f"{KEY}.comfy_quant": text,
    }
    save_file(state, tmp_path / "base.safetensors")
    with open_checkpoint(tmp_path / "base.safetensors", keep_unread=True) as base:
        assert base.info(f"{KEY}.weight").shape == (128, 64)
        with pytest.raises(CheckpointError, match=r"comfy-kitchen, .* is not installed: .*\[comfyui\]"):
            base.tensor(f"{KEY}.weight")


def test_a_finding_has_the_figures_of_what_helps_here(tmp_path: Path) -> None:
    """Of W + Δ in bfloat16 and to the nearest, in float64; a way that brings less is not named."""
    numbers = weight_with_outliers().to(torch.float8_e4m3fn)
    save_file({f"{KEY}.weight": numbers}, tmp_path / "base.safetensors")
    up, down = change_of(numbers.float(), 0.03)
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down), nearest=False)
    (noisy,) = found.findings
    for way, dtype in (("bf16", torch.bfloat16), ("nearest", torch.float8_e4m3fn)):
        before, moved = numbers.float().to(dtype).float(), (numbers.float() + up @ down).to(dtype).float()
        share, noise = figures(moved - before, up @ down)
        assert noisy.evidence[f"share_{way}"] == pytest.approx(share, abs=0.02)
        assert noisy.evidence[f"noise_{way}"] == pytest.approx(noise, abs=0.02)
    assert noisy.advice is not None
    assert (
        "unmerged (all of it arrives, without noise), or merge it into a base in bf16 (100 % " in noisy.advice
    )
    assert "nearest" not in noisy.advice


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("relative", [0.002, 0.01, 0.1])
def test_stochastic_rounding_gives_the_mean_of_many_draws(
    tmp_path: Path, kind: torch.dtype, relative: float
) -> None:
    """A draw takes the upper neighbour as often as the number, in float16, lies near it."""
    numbers = weight_with_outliers(256).to(kind)
    save_file({f"{KEY}.weight": numbers}, tmp_path / "base.safetensors")
    up, down = change_of(numbers.float(), relative)
    moved = (numbers.float() + up @ down).half().float()
    grid = torch.arange(256, dtype=torch.uint8).view(kind).float()
    grid = torch.unique(grid[grid.isfinite()])
    upper = grid[torch.bucketize(moved, grid).clamp(max=len(grid) - 1)]
    lower = grid[(torch.bucketize(moved, grid) - 1).clamp(min=0)]
    generator = torch.Generator().manual_seed(3)
    reals = []
    for _ in range(20):
        goes_up = torch.rand(moved.shape, generator=generator) < (moved - lower) / (upper - lower)
        reals.append(torch.where(goes_up, upper, lower) - numbers.float())
    drawn = torch.tensor([figures(real, up @ down) for real in reals], dtype=torch.float64).mean(0)
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down), nearest=False).overall
    assert found.way == "comfyui"
    assert found.share == pytest.approx(float(drawn[0]), abs=0.01 * max(1.0, float(drawn[1])))
    assert found.noise == pytest.approx(float(drawn[1]), rel=0.01)


@pytest.mark.parametrize("size", [1e-12, 1e-30, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_squares_of_tiny_and_huge_changes_are_summed_in_float64(
    tmp_path: Path, size: float, dtype: torch.dtype
) -> None:
    weight = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
    up, down = (part.to(dtype) * size for part in change_of(weight, 1.0))
    if size < 1e-20:
        down = down / size  # the change itself stays in float32's range, its square does not
    save_file({f"{KEY}.weight": weight}, tmp_path / "base.safetensors")
    found = arriving(tmp_path, tmp_path / "base.safetensors", (up, down)).overall
    wanted = up.double() @ down.double()
    real = (weight.double() + wanted).float().double() - weight.double()
    share, noise = figures(real, wanted)
    assert found.unavailable is None
    assert found.as_dict()["wanted_norm"] == pytest.approx(float(wanted.norm()), rel=1e-5)
    assert found.share == pytest.approx(share, abs=1e-6)
    assert found.noise == pytest.approx(noise, abs=1e-3)
