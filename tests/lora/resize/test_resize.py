import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lora.budget import Budget
from sigmascope.lora.ranks import FixedRank, MethodRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.resize import RankPlan, ReductionReport, resize_lora

Tensors = dict[str, torch.Tensor]


def module(
    name: str,
    shape: tuple[int, ...],
    rank: int,
    *,
    seed: int = 0,
    alpha: float | None = None,
    peft: bool = False,
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    up_shape = (shape[0], rank, *(1 for _ in shape[2:]))
    up, down = (torch.randn(size, generator=generator).mul(0.2) for size in (up_shape, (rank, *shape[1:])))
    if peft:
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    chosen = float(rank) if alpha is None else alpha
    return {
        f"{name}.lora_up.weight": up,
        f"{name}.lora_down.weight": down,
        f"{name}.alpha": torch.tensor(chosen),
    }


def fixed(rank: int, conv_rank: int | None = None) -> RankPlan:
    return RankPlan(RankRules(FixedRank(rank, rank if conv_rank is None else conv_rank)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Linear, 1×1 and 3×3 convolutions, four output channels, mixed ranks and a scale."""
    tensors = (
        module("denoiser.conv_in", (8, 3, 3, 3), 6, seed=1)
        | module("denoiser.mid_block.attentions.0.proj_in", (12, 12, 1, 1), 5, seed=2)
        | module(
            "denoiser.mid_block.attentions.0.transformer_blocks.0.attn1.to_q", (12, 10), 8, seed=3, alpha=4.0
        )
        | module("denoiser.conv_out", (4, 8, 3, 3), 4, seed=4)
    )
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, {"ss_training_comment": "mine"})
    return path


def delta(tensors: Tensors, name: str) -> torch.Tensor:
    """ΔW by its definition, in float64, from a file of any format that is written here."""
    up = tensors.get(f"{name}.lora_up.weight", tensors.get(f"{name}.lora_B.weight"))
    down = tensors.get(f"{name}.lora_down.weight", tensors.get(f"{name}.lora_A.weight"))
    assert up is not None
    assert down is not None
    alpha = float(tensors.get(f"{name}.alpha", torch.tensor(float(down.shape[0]))))
    return alpha / down.shape[0] * up.flatten(1).double() @ down.flatten(1).double()


def names(tensors: Tensors) -> list[str]:
    return sorted({key.removesuffix(".lora_up.weight") for key in tensors if key.endswith(".lora_up.weight")})


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_every_module_is_the_nearest_change_of_its_rank(source: Path, rank: int) -> None:
    target = source.with_name("small.safetensors")
    report = resize_lora(source, target, fixed(rank))
    before, after = load_file(source), load_file(target)
    assert names(after) == names(before)
    for name in names(before):
        dense = delta(before, name)
        best = float(torch.linalg.svdvals(dense)[rank:].square().sum().sqrt())
        error = float((delta(after, name) - dense).norm())
        assert error == pytest.approx(best, rel=1e-4, abs=1e-6)
        assert float(after[f"{name}.alpha"]) == after[f"{name}.lora_down.weight"].shape[0] == rank
    found = {entry.name: entry for entry in report.modules}
    for name, entry in found.items():
        assert entry.error_norm == pytest.approx(
            float((delta(after, name) - delta(before, name)).norm()), abs=1e-6
        )


def test_shapes_of_convolutions_stay(source: Path) -> None:
    target = source.with_name("small.safetensors")
    resize_lora(source, target, fixed(3, 2))
    after = load_file(target)
    assert after["denoiser.conv_out.lora_up.weight"].shape == (4, 2, 1, 1)
    assert after["denoiser.conv_out.lora_down.weight"].shape == (2, 8, 3, 3)
    assert after["denoiser.mid_block.attentions.0.proj_in.lora_down.weight"].shape == (2, 12, 1, 1)


def test_the_report_sums_up_what_was_lost(source: Path) -> None:
    report = resize_lora(source, source.with_name("small.safetensors"), fixed(3))
    before = load_file(source)
    values = [torch.linalg.svdvals(delta(before, name)) for name in names(before)]
    total = sum(float(sigma.square().sum()) for sigma in values)
    kept = sum(float(sigma[:3].square().sum()) for sigma in values)
    assert report.kept_energy == pytest.approx(kept / total)
    assert report.relative_error == pytest.approx((1 - kept / total) ** 0.5, rel=1e-5)
    assert report.bytes_before == source.stat().st_size
    assert report.file_bytes == source.with_name("small.safetensors").stat().st_size
    assert report.ranks == {3: 4}
    assert [block.name for block in report.blocks] == ["conv_in", "mid_block", "conv_out"]
    assert report.blocks[1].old_ranks == (5, 8)
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_rank_that_is_there_already_changes_no_bit(source: Path) -> None:
    target = source.with_name("same.safetensors")
    report = resize_lora(source, target, fixed(9999))
    before, after = load_file(source), load_file(target)
    assert report.relative_error == 0.0
    scaled = "denoiser.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    for key in before:
        if not key.startswith(scaled):
            assert torch.equal(before[key], after[key])
    assert torch.equal(after[f"{scaled}.lora_up.weight"], 0.5 * before[f"{scaled}.lora_up.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_precision_is_the_inputs_own(source: Path, dtype: torch.dtype) -> None:
    save_file({key: tensor.to(dtype) for key, tensor in load_file(source).items()}, source)
    report = resize_lora(source, source.with_name("small.safetensors"), fixed(3))
    after = load_file(source.with_name("small.safetensors"))
    assert {tensor.dtype for key, tensor in after.items() if not key.endswith("alpha")} == {dtype}
    assert f"torch.{report.dtype}" == str(dtype)


def test_another_precision_when_asked_for(source: Path) -> None:
    resize_lora(source, source.with_name("small.safetensors"), fixed(3), save_precision="bf16")
    assert (
        load_file(source.with_name("small.safetensors"))["denoiser.conv_in.lora_up.weight"].dtype
        == torch.bfloat16
    )


def test_a_module_that_gets_no_rank_is_left_out_by_name(source: Path) -> None:
    plan = RankPlan(RankRules(MethodRank("energy", 0.5), (), ("conv_in",)))
    report = resize_lora(source, source.with_name("small.safetensors"), plan)
    assert [(entry.name, entry.left_out) for entry in report.left_out] == [("denoiser.conv_in", "excluded")]
    assert "denoiser.conv_in" not in names(load_file(source.with_name("small.safetensors")))


def test_a_plan_that_leaves_nothing_is_refused_and_writes_nothing(source: Path) -> None:
    target = source.with_name("small.safetensors")
    with pytest.raises(ConfigError, match="leaves out all 4 modules"):
        resize_lora(source, target, RankPlan(RankRules(FixedRank(3, 3), (), (".",))))
    assert sorted(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("size", [1500, 2000, 3000])
def test_a_budget_of_bytes_is_kept(source: Path, size: int) -> None:
    """And used: no room is left for one more value of the largest convolution, a column of 8 and a row of 72 halves."""
    target = source.with_name("small.safetensors")
    budget = Budget(max_bytes=size)
    report = resize_lora(
        source, target, RankPlan(RankRules(FixedRank(9999, 9999)), budget), save_precision="fp16"
    )
    assert size - 2 * (8 + 8 * 9) < target.stat().st_size <= size
    fewer = resize_lora(source, source.with_name("fixed.safetensors"), fixed(1), save_precision="fp16")
    assert report.relative_error is not None
    assert fewer.relative_error is not None
    if report.file_bytes >= fewer.file_bytes:
        assert report.relative_error <= fewer.relative_error


@pytest.mark.parametrize("format", ["kohya", "peft"])
def test_a_size_is_kept_where_layers_are_divided_and_biases_carried(tmp_path: Path, format: str) -> None:
    """PEFT divides FLUX's fused layer into three, each with a `down` of its own."""
    tensors: Tensors = {}
    for block in range(3):
        name = f"lora_unet_double_blocks_{block}_img_attn"
        tensors |= module(f"{name}_qkv", (192, 64), 16, seed=block)
        if format == "kohya":
            tensors[f"{name}_qkv.diff_b"] = torch.randn(192, generator=torch.Generator().manual_seed(block))
    save_file(tensors, tmp_path / "flux.safetensors")
    one_rank, size = 4 * (192 + 64 * (3 if format == "peft" else 1)), 40_000
    plan = RankPlan(RankRules(FixedRank(9999, 9999)), Budget(max_bytes=size))
    report = resize_lora(tmp_path / "flux.safetensors", tmp_path / "small.safetensors", plan, format=format)
    assert (
        size - one_rank - 1000 * (format == "peft") < report.file_bytes <= size
    )  # PEFT tells each rank that differs
    assert len(report.carried) == (3 if format == "kohya" else 0)


def test_a_budget_of_error_is_kept(source: Path) -> None:
    plan = RankPlan(RankRules(FixedRank(9999, 9999)), Budget(max_error=0.3))
    report = resize_lora(source, source.with_name("small.safetensors"), plan)
    assert report.relative_error is not None
    assert 0.15 < report.relative_error <= 0.3


def test_kohya_and_peft_files_keep_their_format_and_names(tmp_path: Path) -> None:
    flat = "lora_unet_mid_block_attentions_0_proj_in"
    save_file(module(flat, (12, 10), 6, alpha=3.0), tmp_path / "kohya.safetensors", {"ss_network_dim": "6"})
    report = resize_lora(tmp_path / "kohya.safetensors", tmp_path / "k.safetensors", fixed(2))
    assert report.format == "kohya"
    assert sorted(load_file(tmp_path / "k.safetensors")) == [
        f"{flat}.{end}" for end in ("alpha", "lora_down.weight", "lora_up.weight")
    ]
    save_file(
        module("unet.mid_block.attentions.0.proj_in", (12, 10), 6, peft=True), tmp_path / "peft.safetensors"
    )
    report = resize_lora(tmp_path / "peft.safetensors", tmp_path / "p.safetensors", fixed(2))
    after = load_file(tmp_path / "p.safetensors")
    assert report.format == "peft"
    assert after["unet.mid_block.attentions.0.proj_in.lora_A.weight"].shape == (2, 10)
    assert len(after) == 2


@pytest.mark.parametrize("format", ["kohya", "peft", "comfyui"])
def test_another_format_when_asked_for(source: Path, format: str) -> None:
    resize_lora(source, source.with_name("native.safetensors"), fixed(3))
    report = resize_lora(source, source.with_name("other.safetensors"), fixed(3), format=format)
    assert report.format == format
    one, other = (
        load_file(source.with_name("native.safetensors")),
        load_lora(source.with_name("other.safetensors")),
    )
    assert other.format == format
    norms = sorted(float(delta(one, name).norm()) for name in names(one))
    assert sorted(pair.frobenius_norm() for pair in other.modules.values()) == pytest.approx(norms)


def test_patterns_are_those_of_the_models_layers_in_every_format(tmp_path: Path) -> None:
    flat = "lora_unet_mid_block_attentions_0_transformer_blocks_0_ff_net_2"
    save_file(module(flat, (12, 10), 6), tmp_path / "kohya.safetensors")
    plan = RankPlan(RankRules(FixedRank(3, 3), ((r"ff\.net\.2$", FixedRank(1, 1)),)))
    assert resize_lora(tmp_path / "kohya.safetensors", tmp_path / "small.safetensors", plan).ranks == {1: 1}


def test_modules_share_an_alpha_where_a_reader_would_take_one_for_another(tmp_path: Path) -> None:
    flat = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_"
    tensors: Tensors = {}
    for seed, part in enumerate(("q", "k", "v", "out_0")):
        tensors |= module(f"{flat}{part}", (12, 10), 6, seed=seed)
    save_file(tensors, tmp_path / "kohya.safetensors")
    plan = RankPlan(RankRules(FixedRank(3, 3), (("to_q", FixedRank(1, 1)),)))
    resize_lora(tmp_path / "kohya.safetensors", tmp_path / "small.safetensors", plan)
    before, after = load_file(tmp_path / "kohya.safetensors"), load_file(tmp_path / "small.safetensors")
    assert {float(after[f"{flat}{part}.alpha"]) for part in ("q", "k", "v", "out_0")} == {1.0}
    for part, rank in (("q", 1), ("v", 3)):
        up, down = (after[f"{flat}{part}.lora_{side}.weight"] for side in ("up", "down"))
        whole = before[f"{flat}{part}.lora_up.weight"] @ before[f"{flat}{part}.lora_down.weight"]
        u, sigma, vh = torch.linalg.svd(whole * float(before[f"{flat}{part}.alpha"]) / 6)
        assert len(down) == rank
        torch.testing.assert_close(up @ down / rank, (u[:, :rank] * sigma[:rank]) @ vh[:rank])


def test_the_header_keeps_what_is_true_and_says_what_happened(source: Path) -> None:
    resize_lora(source, source.with_name("small.safetensors"), fixed(3, 2))
    with safe_open(source.with_name("small.safetensors"), "pt") as file:
        header = file.metadata()
    assert header["ss_training_comment"] == "mine"
    assert header["ss_network_dim"] == "3"
    assert json.loads(header["ss_network_args"])["conv_dim"] == "2"
    assert header["sigmascope_resized_from"] == "lora.safetensors"
    assert header["sigmascope_rank"] == "fixed:3,conv=2"


def test_other_changes_become_plain_factors_and_biases_are_carried(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = {"w1_a": (6, 2), "w1_b": (2, 5), "w2_a": (6, 2), "w2_b": (2, 5)}
    hada = {f"hada_{name}": torch.randn(shape, generator=generator) for name, shape in sides.items()}
    tensors = {f"lora_unet_conv_in.{name}": tensor for name, tensor in hada.items()}
    tensors |= {"lora_unet_conv_in.alpha": torch.tensor(2.0)}
    tensors |= {"lora_unet_conv_out.diff_b": torch.randn(4, generator=generator)}
    save_file(tensors, tmp_path / "loha.safetensors")
    report = resize_lora(tmp_path / "loha.safetensors", tmp_path / "plain.safetensors", fixed(9999))
    a1, b1, a2, b2 = (tensor.double() for tensor in hada.values())
    after = load_file(tmp_path / "plain.safetensors")
    torch.testing.assert_close(delta(after, "lora_unet_conv_in"), (a1 @ b1) * (a2 @ b2), rtol=1e-5, atol=1e-5)
    assert torch.equal(after["lora_unet_conv_out.diff_b"], tensors["lora_unet_conv_out.diff_b"])
    assert report.formed == ("denoiser.conv_in",)
    assert report.carried == ("denoiser.conv_out.bias",)


def test_dora_is_carried_as_it_is(tmp_path: Path) -> None:
    tensors = module("lora_unet_conv_in", (6, 5), 2) | {"lora_unet_conv_in.dora_scale": torch.ones(6, 1)}
    tensors |= module("lora_unet_conv_out", (6, 5), 2, seed=1)
    save_file(tensors, tmp_path / "dora.safetensors")
    report = resize_lora(tmp_path / "dora.safetensors", tmp_path / "small.safetensors", fixed(1))
    after = load_file(tmp_path / "small.safetensors")
    for key in tensors:
        if key.startswith("lora_unet_conv_in"):
            assert torch.equal(after[key], tensors[key])
    assert report.carried == ("denoiser.conv_in",)


def test_nan_is_refused_by_name_and_nothing_is_left(source: Path) -> None:
    tensors = load_file(source)
    tensors["denoiser.conv_in.lora_up.weight"][0, 0] = float("nan")
    save_file(tensors, source)
    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_in"):
        resize_lora(source, source.with_name("small.safetensors"), fixed(1))
    assert sorted(source.parent.iterdir()) == [source]


def test_stopping_leaves_nothing_behind(source: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resize_lora(source, source.with_name("small.safetensors"), fixed(1), progress=stop)
    assert sorted(source.parent.iterdir()) == [source]


def test_the_input_is_never_the_target(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="part of the input"):
        resize_lora(source, source, fixed(1))
    assert source.read_bytes() == before


def test_the_same_call_gives_the_same_bytes(source: Path) -> None:
    first, again = source.with_name("a.safetensors"), source.with_name("b.safetensors")
    for target in (first, again):
        resize_lora(source, target, fixed(2))
    one, other = load_file(first), load_file(again)
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


def report_of(source: Path, plan: RankPlan) -> ReductionReport:
    return resize_lora(source, source.with_name("out.safetensors"), plan)


def test_no_more_rank_is_stored_than_there_is(tmp_path: Path) -> None:
    tensors = module("denoiser.conv_in", (12, 10), 2)
    twice = {
        key: torch.cat([tensor, tensor], dim=int("down" not in key))
        for key, tensor in tensors.items()
        if tensor.ndim
    }
    save_file(twice, tmp_path / "lora.safetensors")
    assert report_of(tmp_path / "lora.safetensors", fixed(3)).ranks == {2: 1}


def test_keys_of_no_module_are_a_finding(source: Path) -> None:
    save_file(load_file(source) | {"optimizer.step": torch.ones(1)}, source)
    (finding,) = report_of(source, fixed(2)).findings
    assert finding.id == "lora.unused_keys"
    assert "optimizer.step" in finding.message


def test_a_small_unet_counts_its_blocks_by_its_own_modules(tmp_path: Path) -> None:
    names = {
        "denoiser.down_blocks.0.downsamplers.0.conv": "diffusion_model.input_blocks.2.0.op",
        "denoiser.down_blocks.1.downsamplers.0.conv": "diffusion_model.input_blocks.4.0.op",
        "denoiser.down_blocks.0.resnets.0.conv1": "diffusion_model.input_blocks.1.0.in_layers.2",
        "denoiser.up_blocks.0.resnets.1.conv1": "diffusion_model.output_blocks.1.0.in_layers.2",
    }
    tensors: Tensors = {}
    for name in names:
        tensors |= module(name, (6, 5, 3, 3), 2)
    save_file(tensors, tmp_path / "lora.safetensors")
    resize_lora(tmp_path / "lora.safetensors", tmp_path / "sgm.safetensors", fixed(1), format="comfyui")
    assert set(load_lora(tmp_path / "sgm.safetensors").modules) == set(names.values())


def test_values_too_large_for_the_precision_are_named_by_layer(tmp_path: Path) -> None:
    name = "denoiser.conv_in"
    tensors = {key: tensor * 1e6 for key, tensor in module(name, (6, 5), 2).items() if tensor.ndim}
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_in: .*float16.*--save_precision"):
        resize_lora(
            tmp_path / "lora.safetensors", tmp_path / "small.safetensors", fixed(1), save_precision="fp16"
        )


def test_a_budget_says_its_patterns_too(source: Path) -> None:
    rules = RankRules(FixedRank(9999, 9999), overrides=(("conv_in", FixedRank(2, 2)),))
    report = report_of(source, RankPlan(rules, Budget(max_error=0.5)))
    assert json.loads(report.plan)["rank_for"][0][0] == "conv_in"
    assert json.loads(report.plan)["max_error"] == 0.5


def test_a_target_that_cannot_be_is_named_as_the_argument_that_it_is(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"^OUT .*small\.ckpt"):
        resize_lora(source, source.with_name("small.ckpt"), fixed(1))


def test_a_budget_alone_is_a_plan(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.safetensors"
    report = resize_lora(source, target, RankPlan(budget=Budget(max_bytes=3_000)))
    assert target.stat().st_size <= 3_000
    assert 0 < (report.relative_error or 0) < 1
