import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sigmascope.errors import CheckpointError, LoraFormatError
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.inspect import LoraInspection, inspect_lora
from sigmascope.lora.merge import merge_lora_files
from sigmascope.lora.module_strength import ModuleStrength, measured_modules
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.resize import RankPlan, resize_lora

Tensors = dict[str, torch.Tensor]


def factors(
    name: str, out: int, inner: int, rank: int, *, seed: int = 0, alpha: float | None = None
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.lora_up.weight": torch.randn(out, rank, generator=generator),
        f"{name}.lora_down.weight": torch.randn(rank, inner, generator=generator),
        f"{name}.alpha": torch.tensor(float(rank) if alpha is None else alpha),
    }


def inspected(tmp_path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> LoraInspection:
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, metadata)
    return inspect_lora(path)


def test_norms_and_spectra_are_those_of_the_formed_changes(tmp_path: Path) -> None:
    tensors = factors("denoiser.mid_block.attentions.0.proj_in", 12, 9, 4, alpha=2.0)
    (module,) = inspected(tmp_path, tensors).modules
    up, down, _ = (tensor.double() for tensor in tensors.values())
    values = torch.linalg.svdvals(0.5 * up @ down)
    assert module.norm == pytest.approx(float(values.norm()))
    assert module.singular_values == pytest.approx(values[:4].tolist())
    assert module.largest == pytest.approx(float(values[0]))
    assert module.stable_rank == pytest.approx(float(values.square().sum() / values[0] ** 2))
    assert module.size == pytest.approx(float(values.norm()) / (12 * 9) ** 0.5)
    assert (module.rank, module.alpha, module.scale, module.dtype) == (4, 2.0, 0.5, "float32")


def test_spectra_found_together_are_those_of_numpy(tmp_path: Path) -> None:
    """Also of ranks that differ, of a negative scale, of columns that are zero or nearly depend on each other."""
    start, sizes = "denoiser.mid_block.attentions", ((40, 9, 4), (9, 40, 4), (30, 20, 8), (5, 7, 6))
    tensors: Tensors = {}
    for number, (out, inner, rank) in enumerate((*sizes, *sizes)):
        tensors |= factors(f"{start}.{number}.proj_in", out, inner, rank, seed=number, alpha=-1.5)
    tensors[f"{start}.4.proj_in.lora_up.weight"][:, 1] = 0.0
    near = tensors[f"{start}.5.proj_in.lora_up.weight"]
    near[:, 1] = near[:, 0] + 1e-4 * near[:, 1]
    for module in inspected(tmp_path, tensors).modules:
        up, down = (tensors[f"{module.name}.lora_{end}.weight"].double().numpy() for end in ("up", "down"))
        values = np.linalg.svd(-1.5 / up.shape[1] * up @ down, compute_uv=False)
        assert module.singular_values == pytest.approx(
            values[: len(module.singular_values)].tolist(), rel=1e-6, abs=1e-12
        )
        assert module.norm == pytest.approx(float(np.linalg.norm(values)), rel=1e-6)


def test_ranks_scales_dtypes_and_parameters_are_counted(tmp_path: Path) -> None:
    tensors = (
        factors("denoiser.conv_in", 8, 6, 2)
        | factors("denoiser.conv_out", 8, 6, 3)
        | factors("denoiser.mid_block.attentions.0.proj_in", 8, 6, 3, alpha=1.5)
    )
    report = inspected(tmp_path, {key: tensor.half() for key, tensor in tensors.items()})
    assert report.format == "native"
    assert report.ranks == {2: 1, 3: 2}
    assert report.scales == {1.0: 2, 0.5: 1}
    assert report.dtypes == {"float16": 3}
    assert report.kinds == {"lora": 3}
    assert report.parameters == 14 * (2 + 3 + 3)
    assert report.file_bytes == (tmp_path / "lora.safetensors").stat().st_size


def test_strength_by_block_adds_up(tmp_path: Path) -> None:
    names = ["lora_unet_down_blocks_1_attentions_0_proj_in", "lora_unet_down_blocks_1_attentions_1_proj_in"]
    names += ["lora_unet_mid_block_attentions_0_proj_in"]
    tensors: Tensors = {}
    for seed, name in enumerate(names):
        tensors |= factors(name, 8, 8, 2, seed=seed)
    report = inspected(tmp_path, tensors)
    down, mid = report.blocks
    norms = [module.norm or 0.0 for module in report.modules]
    assert (down.name, down.modules, mid.name) == ("down_blocks.1", 2, "mid_block")
    assert down.norm == pytest.approx((norms[0] ** 2 + norms[1] ** 2) ** 0.5)
    assert [down.share, mid.share] == pytest.approx(
        [block**2 / (report.norm or 0.0) ** 2 for block in (down.norm or 0.0, mid.norm or 0.0)]
    )
    assert report.norm == pytest.approx(sum(norm**2 for norm in norms) ** 0.5)


def test_modules_with_nan_or_inf_are_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    tensors = factors("denoiser.conv_in", 8, 6, 2) | factors("denoiser.conv_out", 8, 6, 2)
    tensors["denoiser.conv_in.lora_up.weight"][3, 1] = float("nan")
    report = inspected(tmp_path, tensors)
    assert report.not_finite == ("denoiser.conv_in",)
    assert report.modules[0].norm is None
    assert report.norm == report.modules[1].norm
    json.dumps(report.as_dict(spectra=True), allow_nan=False)


@pytest.mark.parametrize(("part", "id"), [("lora_up.weight", "lora_is_zero"), ("alpha", "lora_alpha_zero")])
def test_a_file_that_changes_nothing_says_so_first(tmp_path: Path, part: str, id: str) -> None:
    tensors: Tensors = {}
    for index in range(3):
        name = f"lora_unet_down_blocks_1_attentions_{index}_proj_in"
        tensors |= factors(name, 8, 8, 2, seed=index) | {f"{name}.alpha": torch.tensor(2.0)}
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"] * 0.0
    findings = inspected(tmp_path, tensors).findings
    assert (findings[0].id, findings[0].evidence["modules"]) == (id, 3)


def test_dead_columns_and_modules_near_zero(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for index in range(5):
        tensors |= factors(f"denoiser.mid_block.attentions.{index}.proj_in", 8, 6, 3, seed=index)
    tensors["denoiser.mid_block.attentions.0.proj_in.lora_up.weight"][:, 1] = 0.0
    tensors["denoiser.mid_block.attentions.0.proj_in.lora_down.weight"][2] = 0.0
    tensors["denoiser.mid_block.attentions.1.proj_in.lora_up.weight"] *= 1e-5
    tensors["denoiser.mid_block.attentions.2.proj_in.lora_up.weight"] *= 0.0
    report = inspected(tmp_path, tensors)
    assert report.dead_columns == {
        "denoiser.mid_block.attentions.0.proj_in": 2,
        "denoiser.mid_block.attentions.2.proj_in": 3,
    }
    assert report.near_zero == (
        "denoiser.mid_block.attentions.1.proj_in",
        "denoiser.mid_block.attentions.2.proj_in",
    )


def test_other_changes_are_measured_by_forming_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = {"w1_a": (6, 2), "w1_b": (2, 5), "w2_a": (6, 2), "w2_b": (2, 5)}
    hada = {
        f"lora_unet_conv_in.hada_{name}": torch.randn(shape, generator=generator)
        for name, shape in sides.items()
    }
    a1, b1, a2, b2 = (tensor.double() for tensor in hada.values())
    report = inspected(tmp_path, hada | {"lora_unet_conv_in.alpha": torch.tensor(1.0)})
    (module,) = report.modules
    assert module.kind == "loha"
    assert module.norm == pytest.approx(float((0.5 * (a1 @ b1) * (a2 @ b2)).norm()), rel=1e-5)
    assert module.singular_values == ()


def test_a_change_that_depends_on_its_base_is_said_to(tmp_path: Path) -> None:
    tensors = factors("lora_unet_conv_in", 8, 6, 2)
    tensors["lora_unet_conv_in.dora_scale"] = torch.ones(8, 1)
    (module,) = inspected(tmp_path, tensors).modules
    assert (module.kind, module.problem, module.norm) == ("dora", "needs_base", None)


def test_keys_that_belong_to_no_module_are_listed(tmp_path: Path) -> None:
    tensors = factors("denoiser.conv_in", 8, 6, 2) | {"something.else": torch.zeros(2)}
    assert inspected(tmp_path, tensors).unused_keys == ("something.else",)


def test_spectra_of_very_high_rank_are_left_out_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.lora.module_strength._MAX_SPECTRUM_RANK", 3)
    tensors = factors("denoiser.conv_in", 8, 6, 4) | factors("denoiser.conv_out", 8, 6, 3)
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)
    quick, full = inspect_lora(path), inspect_lora(path, full_spectrum=True)
    assert [len(module.singular_values) for module in quick.modules] == [0, 3]
    assert [len(module.singular_values) for module in full.modules] == [4, 3]
    assert quick.modules[0].norm == pytest.approx(full.modules[0].norm)
    assert quick.modules[0].effective_rank is None


def test_json_leaves_spectra_out_unless_asked_for(tmp_path: Path) -> None:
    report = inspected(tmp_path, factors("denoiser.conv_in", 8, 6, 2), {"ss_epoch": "3"})
    plain, full = report.as_dict(), report.as_dict(spectra=True)
    assert "singular_values" not in plain["modules"][0]
    assert len(full["modules"][0]["singular_values"]) == 2
    assert plain["training"]["training"] == {"epoch saved": "3"}


def test_progress_reaches_the_number_of_modules(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file(factors("denoiser.conv_in", 8, 6, 2) | factors("denoiser.conv_out", 8, 6, 2), path)
    seen: list[tuple[int, int]] = []
    inspect_lora(path, progress=lambda done, total, _: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_a_model_given_as_a_lora_is_called_one(tmp_path: Path) -> None:
    keys = [f"blocks.{block}.self_attn.{part}.weight" for block in range(2) for part in "qkvo"]
    model = tmp_path / "model.safetensors"
    save_file(
        {key: torch.zeros(8, 8) for key in keys}
        | {"patch_embedding.weight": torch.zeros(8, 4, 1, 2, 2), "head.modulation": torch.zeros(1, 2, 8)},
        model,
    )
    with pytest.raises(LoraFormatError, match=r"looks like a model \(WAN\).*lora extract"):
        inspect_lora(model)


def test_a_damaged_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    save_file(factors("denoiser.conv_in", 8, 6, 2), damaged)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        inspect_lora(damaged)
    foreign = tmp_path / "model.safetensors"
    save_file({"conv_in.weight": torch.zeros(2, 2)}, foreign)
    with pytest.raises(LoraFormatError, match="no known LoRA format"):
        inspect_lora(foreign)


def test_large_modules_are_measured_a_few_at_a_time_since_ctrl_c_waits_for_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(count: int, rank: int) -> Tensors:
        shapes = {"lora_down.weight": (rank, 2048), "lora_up.weight": (2048, rank)}
        return {
            f"blocks.{number}.{end}": torch.zeros(shape)
            for number in range(count)
            for end, shape in shapes.items()
        }

    runs: list[int] = []

    def measured(lora: LoraFile, names: Sequence[str], *, full_spectrum: bool) -> list[ModuleStrength]:
        runs.append(len(names))
        return measured_modules(lora, names, full_spectrum=full_spectrum)

    monkeypatch.setattr("sigmascope.lora.inspect.measured_modules", measured)
    inspected(tmp_path, layers(5, 256))  # a million numbers each
    assert sorted(runs) == [1, 2, 2]
    runs.clear()
    inspected(tmp_path, layers(40, 1))
    assert sorted(runs) == [8, 32]


K = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_k"
BROKEN: dict[str, tuple[Tensors, str]] = {
    "without its down": ({"lora_down.weight": torch.empty(0)}, "has lora_up.weight but no lora_down.weight"),
    "without its up": ({"lora_up.weight": torch.empty(0)}, "has lora_down.weight but no lora_up.weight"),
    "of two ranks": (
        {"lora_down.weight": torch.ones(3, 16)},
        "up is (16, 4) and down is (3, 16), of ranks 4 and 3",
    ),
    "of one axis": ({"lora_down.weight": torch.ones(64)}, "up is (16, 4) and down is (64,)"),
    "with two alphas": ({"alpha": torch.ones(2)}, "alpha has the shape (2,), and alpha is one number"),
    "of integers": (
        {"lora_up.weight": torch.ones(16, 4, dtype=torch.int8)},
        "lora_up.weight is int8, not floating-point numbers",
    ),
    "of rank 0": (
        {"lora_up.weight": torch.ones(16, 0), "lora_down.weight": torch.ones(0, 16)},
        "up is (16, 0) and down is (0, 16), of rank 0: they hold nothing",
    ),
    "with odd magnitudes": (
        {"dora_scale": torch.ones(5)},
        "DoRA: 5 magnitudes for a weight (16, 16), expected 16",
    ),
}


def with_broken_module(path: Path, change: Tensors) -> Tensors:
    """Two sound modules, and one whose tensors are exchanged; one of no numbers is left out."""
    sound = [
        factors(K.replace("to_k", end), 16, 16, 4, seed=seed) for seed, end in enumerate(("to_q", "to_v"))
    ]
    broken = factors(K, 16, 16, 4) | {f"{K}.{end}": tensor for end, tensor in change.items()}
    broken = {key: tensor for key, tensor in broken.items() if tensor.shape != (0,)}
    save_file(sound[0] | broken | sound[1], path)
    return sound[0] | sound[1]


@pytest.mark.parametrize("kind", BROKEN)
def test_of_a_file_with_a_broken_module_the_rest_is_measured(tmp_path: Path, kind: str) -> None:
    change, why = BROKEN[kind]
    sound = with_broken_module(tmp_path / "lora.safetensors", change)
    report = inspect_lora(tmp_path / "lora.safetensors")
    for module in report.modules:
        up, down = (sound[f"{module.name}.lora_{end}.weight"].double() for end in ("up", "down"))
        assert module.norm == pytest.approx(float((up @ down).norm()))
    assert [module.name for module in report.modules] == [K.replace("to_k", end) for end in ("to_q", "to_v")]
    assert report.broken == {K: why}
    assert report.unused_keys == ()
    assert [finding.id for finding in report.findings] == ["lora_broken"]
    assert f"1 of 3 modules cannot be read: {K} ({why})" in report.findings[0].message


@pytest.mark.parametrize("kind", BROKEN)
def test_what_makes_a_file_of_a_broken_one_refuses_it(tmp_path: Path, kind: str) -> None:
    source, made = tmp_path / "lora.safetensors", tmp_path / "made.safetensors"
    with_broken_module(source, BROKEN[kind][0])
    commands = (
        lambda: convert_lora(source, made, format="kohya"),
        lambda: merge_lora_files([source, source], made),
        lambda: resize_lora(source, made, RankPlan(RankRules(FixedRank(2, 2)))),
    )
    for command in commands:
        with pytest.raises(LoraFormatError, match=K):
            command()
        assert not made.exists()


def test_a_file_of_broken_modules_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({f"{K}.lora_up.weight": torch.ones(16, 4)}, path)
    with pytest.raises(LoraFormatError, match=r"has lora_up\.weight but no lora_down\.weight"):
        inspect_lora(path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("{not json", "lora_adapter_metadata is not valid JSON"),
        ("[1]", "lora_adapter_metadata is not a JSON object"),
        (
            json.dumps({"unet.r": 4, "unet.lora_alpha": "8"}),
            "lora_adapter_metadata: alpha is '8', not a number",
        ),
        (
            json.dumps({"unet.r": 4, "unet.alpha_pattern": {"to_q": "8"}}),
            "lora_adapter_metadata: alpha is '8', not a number",
        ),
        (
            json.dumps({"unet.r": 4, "unet.alpha_pattern": [8]}),
            "lora_adapter_metadata: alpha_pattern is not a table of patterns",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_leaves_alphas_to_the_tensors(
    tmp_path: Path, config: str, why: str
) -> None:
    start = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    own = factors(start, 16, 16, 4)
    up, down = (own[f"{start}.lora_{end}.weight"] for end in ("up", "down"))
    tensors = {f"{start}.lora_B.weight": up, f"{start}.lora_A.weight": down}
    report = inspected(tmp_path, tensors, {"lora_adapter_metadata": config})
    assert report.modules[0].norm == pytest.approx(float((up.double() @ down.double()).norm()))
    assert [finding.id for finding in report.findings] == ["lora_config_unread"]
    assert why in report.findings[0].message
    assert "refuses the file, since lora_adapter_metadata" in report.hosts[0].unavailable["refused"]
    with pytest.raises(LoraFormatError, match="lora_adapter_metadata"):
        convert_lora(tmp_path / "lora.safetensors", tmp_path / "made.safetensors", format="kohya")


def test_factors_of_two_ranks_on_a_square_weight_do_not_look_transposed(tmp_path: Path) -> None:
    with_broken_module(tmp_path / "lora.safetensors", {"lora_down.weight": torch.ones(3, 16)})
    assert "transposed" not in inspect_lora(tmp_path / "lora.safetensors").broken[K]
