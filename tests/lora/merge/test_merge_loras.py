import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.utils import merge_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.budget import Budget
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.merge import CombineOptions, MergeMethod, RankPlan, merge_lora_files
from sigmascope.lora.ranks import FixedRank, RankRules

Tensors = dict[str, torch.Tensor]
IN, CONV, MID = (
    "denoiser.conv_in",
    "denoiser.down_blocks.1.resnets.0.conv1",
    "denoiser.mid_block.attentions.0.proj_in",
)
SHAPES = {IN: (8, 3, 3, 3), CONV: (8, 6, 3, 3), MID: (12, 10)}


def module(name: str, shape: tuple[int, ...], rank: int, seed: int, alpha: float | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(shape[0], rank, *(1 for _ in shape[2:]), generator=generator).mul(0.3)
    down = torch.randn(rank, *shape[1:], generator=generator).mul(0.3)
    chosen = torch.tensor(float(rank) if alpha is None else alpha)
    return {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down, f"{name}.alpha": chosen}


def lora(seed: int, *names: str, rank: int = 3, alpha: float | None = None) -> Tensors:
    tensors: Tensors = {}
    for offset, name in enumerate(names):
        tensors |= module(name, SHAPES[name], rank, 10 * seed + offset, alpha)
    return tensors


def delta(tensors: Tensors, name: str) -> torch.Tensor:
    """ΔW as a matrix by its definition, in float64; zero where there is none."""
    up, down = (tensors.get(f"{name}.lora_{end}.weight") for end in ("up", "down"))
    if up is None or down is None:
        shape = SHAPES[name]
        return torch.zeros(shape[0], int(torch.Size(shape[1:]).numel()), dtype=torch.float64)
    scale = float(tensors[f"{name}.alpha"]) / down.shape[0]
    return scale * up.flatten(1).double() @ down.flatten(1).double()


def fixed(rank: int) -> RankPlan:
    return RankPlan(RankRules(FixedRank(rank, rank)))


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two LoRAs that share two of three layers."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file(lora(1, IN, MID, alpha=1.5), paths[0], {"ss_training_comment": "same", "ss_seed": "1"})
    save_file(lora(2, MID, CONV, rank=2), paths[1], {"ss_training_comment": "same", "ss_seed": "2"})
    return paths


@pytest.mark.parametrize("weights", [None, (0.7, 0.3), (1.0, -2.0)])
def test_the_sum_is_exact(two: list[Path], tmp_path: Path, weights: tuple[float, float] | None) -> None:
    report = merge_lora_files(two, tmp_path / "sum.safetensors", CombineOptions(weights))
    after = load_file(tmp_path / "sum.safetensors")
    one, other = (load_file(path) for path in two)
    first, second = weights or (1.0, 1.0)
    for name in SHAPES:
        expected = first * delta(one, name) + second * delta(other, name)
        torch.testing.assert_close(delta(after, name), expected, rtol=1e-5, atol=1e-6)
        assert float(after[f"{name}.alpha"]) == after[f"{name}.lora_down.weight"].shape[0]
    assert {entry.name: (entry.old_rank, entry.rank) for entry in report.modules} == {
        IN: (3, 3),
        MID: (5, 5),
        CONV: (2, 2),
    }
    assert report.relative_error == pytest.approx(0.0, abs=1e-6)


def test_factors_stand_side_by_side_bit_for_bit_where_nothing_rounds(two: list[Path], tmp_path: Path) -> None:
    save_file(lora(1, IN, MID), two[0])
    merge_lora_files(two, tmp_path / "sum.safetensors", CombineOptions((0.5, 2.0)))
    after, one, other = (load_file(path) for path in (tmp_path / "sum.safetensors", *two))
    up = torch.cat([0.5 * one[f"{MID}.lora_up.weight"], 2.0 * other[f"{MID}.lora_up.weight"]], dim=1)
    down = torch.cat([one[f"{MID}.lora_down.weight"], other[f"{MID}.lora_down.weight"]])
    assert torch.equal(after[f"{MID}.lora_up.weight"], up)
    assert torch.equal(after[f"{MID}.lora_down.weight"], down)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_recompression_is_as_near_as_any_matrix_of_that_rank(
    two: list[Path], tmp_path: Path, rank: int
) -> None:
    options = CombineOptions((0.7, 0.3), plan=fixed(rank))
    report = merge_lora_files(two, tmp_path / "small.safetensors", options)
    after, one, other = (load_file(path) for path in (tmp_path / "small.safetensors", *two))
    for entry in report.modules:
        dense = 0.7 * delta(one, entry.name) + 0.3 * delta(other, entry.name)
        best = float(torch.linalg.svdvals(dense)[rank:].square().sum().sqrt())
        assert float((delta(after, entry.name) - dense).norm()) == pytest.approx(best, rel=1e-4, abs=1e-6)
        assert entry.error_norm == pytest.approx(best, rel=1e-4, abs=1e-6)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    rank=st.integers(1, 8),
    seed=st.integers(0, 999),
)
def test_any_ranks_and_shapes(
    tmp_path: Path, ranks: list[int], shape: tuple[int, int], rank: int, seed: int
) -> None:
    paths, dense = [], torch.zeros(shape, dtype=torch.float64)
    for index, own in enumerate(ranks):
        tensors = module("denoiser.conv_in", shape, own, seed + index, alpha=2.0)
        dense = dense + delta(tensors, "denoiser.conv_in")
        paths.append(tmp_path / f"{index}.safetensors")
        save_file(tensors, paths[-1])
    merge_lora_files(paths, tmp_path / "out.safetensors", CombineOptions(plan=fixed(rank)))
    after = load_file(tmp_path / "out.safetensors")
    best = float(torch.linalg.svdvals(dense)[rank:].square().sum().sqrt())
    assert float((delta(after, "denoiser.conv_in") - dense).norm()) == pytest.approx(best, abs=1e-5)
    assert after["denoiser.conv_in.lora_down.weight"].shape[0] <= min(rank, *shape)


@pytest.mark.parametrize("format", ["kohya", "peft", "comfyui"])
def test_formats_may_differ_and_the_first_decides(two: list[Path], tmp_path: Path, format: str) -> None:
    merge_lora_files(two, tmp_path / "expected.safetensors")
    convert_lora(two[1], tmp_path / "other.safetensors", format)
    report = merge_lora_files([two[0], tmp_path / "other.safetensors"], tmp_path / "sum.safetensors")
    assert report.format == "native"
    expected, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("expected", "sum"))
    assert after.keys() == expected.keys()
    for name in SHAPES:
        torch.testing.assert_close(delta(after, name), delta(expected, name), rtol=1e-5, atol=1e-6)


def test_another_format_when_asked_for(two: list[Path], tmp_path: Path) -> None:
    report = merge_lora_files(two, tmp_path / "sum.safetensors", CombineOptions(format="peft"))
    after = load_file(tmp_path / "sum.safetensors")
    assert report.format == "peft"
    assert f"unet.{MID.removeprefix('denoiser.')}.lora_A.weight" in after


def test_files_of_one_format_keep_their_names(tmp_path: Path) -> None:
    for index in range(2):
        save_file(module("lora_unet_my_layer", (6, 4), 2, index), tmp_path / f"{index}.safetensors")
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    merge_lora_files(paths, tmp_path / "sum.safetensors")
    assert "lora_unet_my_layer.lora_up.weight" in load_file(tmp_path / "sum.safetensors")


@pytest.mark.parametrize("method", [MergeMethod("ties_mergekit", 0.4), MergeMethod("dare", 0.4, 5)])
def test_sparse_methods_act_on_the_weighted_changes(
    two: list[Path], tmp_path: Path, method: MergeMethod
) -> None:
    options = CombineOptions((0.7, 0.3), method, fixed(9999), "float")
    report = merge_lora_files(two, tmp_path / "merged.safetensors", options)
    after, one, other = (load_file(path) for path in (tmp_path / "merged.safetensors", *two))
    shape = SHAPES[MID]
    parts = {0: 0.7 * delta(one, MID), 1: 0.3 * delta(other, MID)}
    expected = method.combine(
        MID, {position: part.float().reshape(shape) for position, part in parts.items()}
    )
    torch.testing.assert_close(delta(after, MID).float(), expected.flatten(1), rtol=1e-4, atol=1e-5)
    assert report.method == method.describe()
    assert set(report.formed) == set(SHAPES)


def test_ties_of_loras_is_that_of_peft(two: list[Path], tmp_path: Path) -> None:
    options = CombineOptions((0.7, 0.3), MergeMethod("ties", 0.5), fixed(9999), "float")
    merge_lora_files(two, tmp_path / "merged.safetensors", options)
    after, one, other = (load_file(path) for path in (tmp_path / "merged.safetensors", *two))
    changes = [delta(one, MID).float(), delta(other, MID).float()]
    expected = merge_utils.ties(changes, torch.tensor([0.7, 0.3]), 0.5)
    torch.testing.assert_close(delta(after, MID).float(), expected, rtol=1e-4, atol=1e-5)


def test_dare_repeats_itself_and_depends_on_the_seed(two: list[Path], tmp_path: Path) -> None:
    def merged(seed: int) -> torch.Tensor:
        options = CombineOptions(method=MergeMethod("dare", 0.5, seed), plan=fixed(9999))
        merge_lora_files(two, tmp_path / "dare.safetensors", options)
        return delta(load_file(tmp_path / "dare.safetensors"), MID)

    assert torch.equal(merged(1), merged(1))
    assert not torch.equal(merged(1), merged(2))


def test_sparse_methods_need_a_rank(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--method ties gives changes of full rank") as refusal:
        merge_lora_files(two, tmp_path / "out.safetensors", CombineOptions(method=MergeMethod("ties")))
    assert "--rank" in str(refusal.value)


def test_a_budget_of_bytes_is_kept(two: list[Path], tmp_path: Path) -> None:
    plan = RankPlan(RankRules(FixedRank(9999, 9999)), Budget(max_bytes=2700))
    report = merge_lora_files(two, tmp_path / "small.safetensors", CombineOptions(plan=plan))
    assert 2400 < (tmp_path / "small.safetensors").stat().st_size <= 2700
    assert report.relative_error is not None
    assert 0.0 < report.relative_error < 1.0


@pytest.mark.parametrize("format", ["kohya", "peft"])
def test_a_budget_is_kept_in_another_format_too(two: list[Path], tmp_path: Path, format: str) -> None:
    plan = RankPlan(RankRules(FixedRank(9999, 9999)), Budget(max_bytes=6200))
    merge_lora_files(two, tmp_path / "small.safetensors", CombineOptions(plan=plan, format=format))
    assert (tmp_path / "small.safetensors").stat().st_size <= 6200


def test_other_kinds_of_change_join_at_a_rank(tmp_path: Path) -> None:
    plain = module("lora_unet_conv_in", (6, 5), 2, 0)
    whole = torch.randn(6, 5)
    save_file(plain, tmp_path / "a.safetensors")
    save_file({"lora_unet_conv_in.diff": whole}, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(ConfigError, match="more than up and down factors: denoiser"):
        merge_lora_files(paths, tmp_path / "out.safetensors")
    report = merge_lora_files(
        paths, tmp_path / "out.safetensors", CombineOptions((1.0, 0.5), plan=fixed(9999))
    )
    after = load_file(tmp_path / "out.safetensors")
    expected = delta(plain, "lora_unet_conv_in") + 0.5 * whole.double()
    torch.testing.assert_close(delta(after, "lora_unet_conv_in"), expected, rtol=1e-5, atol=1e-5)
    assert report.formed == ("denoiser.conv_in",)


def test_differences_of_biases_add_up(tmp_path: Path) -> None:
    biases = [torch.randn(6), torch.randn(6)]
    for index, bias in enumerate(biases):
        tensors = module("lora_unet_conv_in", (6, 5), 2, index) | {"lora_unet_conv_in.diff_b": bias}
        save_file(tensors, tmp_path / f"{index}.safetensors")
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    report = merge_lora_files(paths, tmp_path / "out.safetensors", CombineOptions((0.5, -1.0)))
    after = load_file(tmp_path / "out.safetensors")
    torch.testing.assert_close(after["lora_unet_conv_in.diff_b"], 0.5 * biases[0] - biases[1])
    assert report.carried == ("denoiser.conv_in.bias",)


def test_dora_joins_with_its_base_and_is_refused_without(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    plain = module("lora_unet_mid_block_proj_in", (6, 5), 2, 0)
    magnitude = torch.rand(6, 1) + 0.5
    save_file(plain | {"lora_unet_mid_block_proj_in.dora_scale": magnitude}, tmp_path / "dora.safetensors")
    save_file({"denoiser.mid_block.proj_in.weight": base}, tmp_path / "base.safetensors")
    with pytest.raises(LoraFormatError, match="mid_block_proj_in") as refusal:
        merge_lora_files(
            [tmp_path / "dora.safetensors"], tmp_path / "out.safetensors", CombineOptions(plan=fixed(2))
        )
    assert "--base_model_path" in str(refusal.value)
    options = CombineOptions((2.0,), plan=fixed(9999), base=tmp_path / "base.safetensors")
    merge_lora_files([tmp_path / "dora.safetensors"], tmp_path / "out.safetensors", options)
    changed = base.double() + delta(plain, "lora_unet_mid_block_proj_in")
    expected = 2.0 * (magnitude.double() * changed / changed.norm(dim=1, keepdim=True) - base.double())
    after = load_file(tmp_path / "out.safetensors")
    torch.testing.assert_close(delta(after, "lora_unet_mid_block_proj_in"), expected, rtol=1e-4, atol=1e-5)


def test_the_header_keeps_what_all_agree_in_and_names_the_files(two: list[Path], tmp_path: Path) -> None:
    merge_lora_files(two, tmp_path / "sum.safetensors", CombineOptions((0.7, 0.3)))
    with safe_open(tmp_path / "sum.safetensors", "pt") as file:
        header = file.metadata()
    assert header["ss_training_comment"] == "same"
    assert "ss_seed" not in header
    merged = json.loads(header["sigmascope_merged_loras"])
    assert [(one["file"], one["weight"]) for one in merged] == [
        ("a.safetensors", 0.7),
        ("b.safetensors", 0.3),
    ]
    assert header["sigmascope_merge_method"] == "linear"


def test_layers_of_different_shape_are_refused(two: list[Path], tmp_path: Path) -> None:
    save_file(module(MID, (12, 14), 2, 0), two[1])
    with pytest.raises(ModelMismatchError, match=r"\(12, 10\).*\(12, 14\)"):
        merge_lora_files(two, tmp_path / "out.safetensors")


def test_a_pointwise_convolution_and_a_linear_layer_are_one(two: list[Path], tmp_path: Path) -> None:
    save_file(module(MID, (12, 10, 1, 1), 2, 0), two[1])
    merge_lora_files(two, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")[f"{MID}.lora_down.weight"].shape == (5, 10, 1, 1)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        (
            [{"modelspec.architecture": "flux-1/lora"}, {"modelspec.architecture": "lbm/lora"}],
            "lora.merge.families",
        ),
        ([{"ss_sd_model_hash": "a"}, {"ss_sd_model_hash": "b"}], "lora.merge.bases"),
    ],
)
def test_reasons_to_doubt_are_given(
    two: list[Path], tmp_path: Path, headers: list[dict[str, Any]], found: str
) -> None:
    for path, header in zip(two, headers, strict=True):
        save_file(load_file(path), path, header)
    report = merge_lora_files(two, tmp_path / "out.safetensors")
    assert [finding.id for finding in report.findings] == [found]


def test_loras_that_share_no_layer_are_doubted(two: list[Path], tmp_path: Path) -> None:
    save_file(lora(2, CONV), two[1])
    report = merge_lora_files(two, tmp_path / "out.safetensors")
    assert [finding.id for finding in report.findings] == ["lora.merge.apart"]


def test_loras_for_different_families_are_refused(tmp_path: Path) -> None:
    flux, sd15 = tmp_path / "flux.safetensors", tmp_path / "sd15.safetensors"
    save_file(module("lora_unet_double_blocks_0_img_attn_qkv", (12, 4), 2, 0), flux)
    save_file(
        module("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k", (12, 768), 2, 0), sd15
    )
    with pytest.raises(ModelMismatchError, match=r"sd15.*Stable Diffusion 1\.5.*flux.*FLUX"):
        merge_lora_files([sd15, flux], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_loras_of_kin_that_share_no_layer_are_merged(tmp_path: Path) -> None:
    # LTX-2 has LTX-Video's layers for the picture, and layers for the sound beside them.
    paths = [tmp_path / "picture.safetensors", tmp_path / "sound.safetensors"]
    save_file(module("diffusion_model.transformer_blocks.0.attn1.to_q", (12, 12), 2, 0), paths[0])
    save_file(module("diffusion_model.transformer_blocks.0.audio_attn1.to_q", (12, 12), 2, 0), paths[1])
    report = merge_lora_files(paths, tmp_path / "out.safetensors")
    assert [finding.id for finding in report.findings] == ["lora.merge.apart"]


def test_a_unet_whose_width_no_module_shows_is_called_no_certain_family(tmp_path: Path) -> None:
    """SD 1.5, SD 2 and SDXL share the names of convolutions."""
    unet, sd3 = tmp_path / "unet.safetensors", tmp_path / "sd3.safetensors"
    save_file(module("unet.down_blocks.1.resnets.0.conv1", (8, 6, 3, 3), 2, 0), unet)
    save_file(module("lora_unet_joint_blocks_0_x_block_attn_qkv", (12, 4), 2, 0), sd3)
    with pytest.raises(
        ModelMismatchError, match=r"unet\.safetensors is for a U-Net, .* is for Stable Diffusion 3"
    ):
        merge_lora_files([unet, sd3], tmp_path / "out.safetensors")
    doubt = convert_lora(unet, tmp_path / "out.safetensors", "kohya").family_doubt
    assert doubt == "the file has the names of a U-Net, whose width is not known"
    assert convert_lora(unet, tmp_path / "out.safetensors", "kohya", family="sd15").family_doubt is None


def test_weights_must_be_one_for_each(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 number for 2 LoRAs"):
        merge_lora_files(two, tmp_path / "out.safetensors", CombineOptions((1.0,)))


def test_weights_of_zero_leave_nothing(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.safetensors and .*b\.safetensors: all 3 changes are zero"):
        merge_lora_files(two, tmp_path / "out.safetensors", CombineOptions((0.0, 0.0)))
    assert not (tmp_path / "out.safetensors").exists()


def test_nan_is_refused_by_name_and_inputs_are_never_the_target(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the input"):
        merge_lora_files(two, two[1])
    tensors = load_file(two[1])
    tensors[f"{MID}.lora_up.weight"][0, 0] = float("inf")
    save_file(tensors, two[1])
    with pytest.raises(NonFiniteError, match=r"mid_block\.attentions\.0\.proj_in"):
        merge_lora_files(two, tmp_path / "out.safetensors")
    assert sorted(tmp_path.iterdir()) == two


@pytest.mark.parametrize("plan", [None, fixed(2)])
def test_a_lora_less_itself_leaves_nothing(two: list[Path], tmp_path: Path, plan: RankPlan | None) -> None:
    with pytest.raises(ConfigError, match="all 2 changes are zero"):
        merge_lora_files(
            [two[0], two[0]], tmp_path / "out.safetensors", CombineOptions((0.7, -0.7), plan=plan)
        )


def test_a_lora_of_weight_zero_leaves_no_columns_and_needs_no_base(two: list[Path], tmp_path: Path) -> None:
    save_file(load_file(two[1]) | {f"{MID}.dora_scale": torch.ones(12, 1)}, two[1])
    report = merge_lora_files(two, tmp_path / "out.safetensors", CombineOptions((1.0, 0.0)))
    assert {entry.name: entry.rank for entry in report.modules} == {IN: 3, MID: 3, CONV: 0}
    after, before = load_file(tmp_path / "out.safetensors"), load_file(two[0])
    torch.testing.assert_close(delta(after, MID), delta(before, MID))


def test_single_numbers_add_up(tmp_path: Path) -> None:
    for index in range(2):
        tensors = module("denoiser.conv_in", (6, 5), 2, index) | {"denoiser.gain.diff": torch.tensor(1.5)}
        save_file(tensors, tmp_path / f"{index}.safetensors")
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    merge_lora_files(paths, tmp_path / "out.safetensors", CombineOptions((1.0, 2.0)))
    assert float(load_file(tmp_path / "out.safetensors")["denoiser.gain.diff"]) == 4.5


def test_a_kernel_that_does_not_show_is_that_of_the_other_lora(two: list[Path], tmp_path: Path) -> None:
    flattened = module(CONV, (8, 54), 2, 5)
    save_file(flattened, two[0])
    merge_lora_files(two, tmp_path / "out.safetensors")
    after = load_file(tmp_path / "out.safetensors")
    assert after[f"{CONV}.lora_down.weight"].shape == (4, 6, 3, 3)
    expected = delta(flattened, CONV) + delta(load_file(two[1]), CONV)
    torch.testing.assert_close(delta(after, CONV), expected)


def test_the_base_is_never_the_target(two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    base = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({"conv_in.weight": torch.zeros(8, 3, 3, 3)}, base)
    with pytest.raises(ConfigError, match="part of the input"):
        merge_lora_files(two, base, CombineOptions(base=tmp_path / "unet"))
