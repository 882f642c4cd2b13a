"""Extraction under a budget or by a method: sizes and errors that hold, ranks that whole spectra give."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lbm import pocket
from sigmascope.lora import budget as budgets
from sigmascope.lora import layer_extraction
from sigmascope.lora.budget import Budget
from sigmascope.lora.decompose import decompose
from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora
from sigmascope.lora.ranks import METHODS, FixedRank, MethodRank, RankRules

POCKET = Path(pocket.__file__).parent / "weights"

LAYERS: dict[str, tuple[tuple[int, ...], float, float]] = {
    # shape, power of the spectrum, size of the change
    "denoiser.conv_in": ((48, 4, 3, 3), 0.5, 1.0),
    "denoiser.down_blocks.0.attn1.to_q": ((64, 64), 0.9, 3.0),
    "denoiser.down_blocks.0.attn1.to_k": ((64, 64), 0.3, 0.2),
    "denoiser.down_blocks.0.ff.net.2": ((48, 120), 0.7, 2.0),
    "denoiser.mid_block.resnets.0.conv1": ((56, 12, 3, 3), 1.2, 1.0),
    "denoiser.mid_block.attn1.to_q": ((72, 50), 2.0, 4.0),
    "denoiser.up_blocks.0.proj_out": ((40, 64, 1, 1), 0.6, 0.5),
    "denoiser.up_blocks.0.to_out": ((200, 180), 0.8, 2.0),
    "denoiser.conv_out": ((4, 32, 3, 3), 0.1, 1.0),
}


def change(shape: tuple[int, ...], power: float, size: float, seed: int) -> Tensor:
    """Singular values that fall by a power law; `size` is the norm."""
    rows, columns = shape[0], math.prod(shape[1:])
    generator = torch.Generator().manual_seed(seed)
    count = min(rows, columns)
    left, right = (
        torch.linalg.qr(torch.randn(length, count, generator=generator, dtype=torch.float64)).Q
        for length in (rows, columns)
    )
    values = torch.arange(1, count + 1, dtype=torch.float64) ** -power
    made: Tensor = ((left * values * (size / values.norm())) @ right.T).reshape(shape)
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    generator = torch.Generator().manual_seed(0)
    base, tuned = {}, {}
    for seed, (layer, (shape, power, size)) in enumerate(LAYERS.items()):
        base[f"{layer}.weight"] = torch.randn(shape, generator=generator)
        tuned[f"{layer}.weight"] = (
            base[f"{layer}.weight"].double() + change(shape, power, size, seed)
        ).float()
    return save_models(tmp_path_factory.mktemp("models"), base, tuned)


def save_models(folder: Path, base: dict[str, Tensor], tuned: dict[str, Tensor]) -> tuple[Path, Path]:
    paths = folder / "base.safetensors", folder / "tuned.safetensors"
    save_file(base, paths[0])
    save_file(tuned, paths[1])
    return paths


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time of an extraction of small layers is waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def models(written: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The two files in a folder of the test's own."""
    links = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    for link, file in zip(links, written, strict=True):
        link.hardlink_to(file)
    return links


Models = tuple[Path, Path]


def extract(models: Models, name: str = "lora", **options: Any) -> ExtractionReport:
    """With errors that count as they are: the optimum is then that of all layers' singular values together."""
    target = models[0].with_name(f"{name}.safetensors")
    weights = {"budget_weights": "plain"} if "budget" in options else {}
    return extract_lora(*models, target, ExtractOptions(**weights | options))


def deltas(models: Models) -> dict[str, Tensor]:
    base, tuned = map(load_file, models)
    return {
        key.removesuffix(".weight"): (tuned[key].double() - base[key].double()).flatten(1) for key in base
    }


def ranks(report: ExtractionReport) -> dict[str, int]:
    return {module.name: module.rank for module in report.modules}


def true_error(models: Models, report: ExtractionReport) -> float:
    """The overall error of the file, with a layer that it lacks as lost."""
    tensors = load_file(report.lora)
    lost = total = 0.0
    for layer, delta in deltas(models).items():
        total += float(delta.square().sum())
        if f"{layer}.alpha" in tensors:
            up, down = (tensors[f"{layer}.lora_{side}.weight"].double().flatten(1) for side in ("up", "down"))
            delta = delta - up @ down * tensors[f"{layer}.alpha"].double() / down.shape[0]
        lost += float(delta.square().sum())
    return math.sqrt(lost / total)


# Sizes


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "conv_rank", "share"), [(4, 4, 0.91), (32, 16, 0.43)])
def test_at_equal_bytes_the_pocket_model_loses_less_than_with_fixed_ranks(
    tmp_path: Path, rank: int, conv_rank: int, share: float
) -> None:
    models = POCKET / "base.safetensors", POCKET / "tuned.safetensors"
    options = ExtractOptions(rank=rank, conv_rank=conv_rank)
    fixed = extract_lora(*models, tmp_path / "fixed.safetensors", options)
    size = fixed.file_bytes
    plain = ExtractOptions(budget=Budget(max_bytes=size), budget_weights="plain")
    best = extract_lora(*models, tmp_path / "best.safetensors", plain)
    assert best.lora.stat().st_size == best.file_bytes <= size
    assert best.relative_error is not None
    assert fixed.relative_error is not None
    assert best.relative_error**2 < share * fixed.relative_error**2


@pytest.mark.parametrize(
    ("size", "precision"), [(12_000, "fp16"), (33_333, "float"), (70_000, "fp16"), (10_000_000, "float")]
)
def test_a_size_is_kept(models: Models, size: int, precision: str) -> None:
    report = extract(models, save_precision=precision, budget=Budget(max_bytes=size))
    assert report.lora.stat().st_size <= size
    if size == 10_000_000:
        assert ranks(report) == {layer: min(delta.shape) for layer, delta in deltas(models).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    ["native", pytest.param("kohya", marks=pytest.mark.slow), pytest.param("peft", marks=pytest.mark.slow)],
)
def test_a_size_is_used(tmp_path: Path, format: str) -> None:
    size = 400 * 1024
    models = POCKET / "base.safetensors", POCKET / "tuned.safetensors"  # 133 layers
    options = ExtractOptions(format=format, budget=Budget(max_bytes=size))
    report = extract_lora(*models, tmp_path / "lora.safetensors", options)
    assert 0.99 * size < report.lora.stat().st_size <= size


def test_more_bytes_never_lose_more(models: Models) -> None:
    errors = [
        extract(models, budget=Budget(max_bytes=size)).relative_error or 0.0
        for size in range(12_000, 60_000, 12_000)
    ]
    assert errors == sorted(errors, reverse=True)


def test_a_size_that_holds_nothing_is_refused_and_nothing_is_left(models: Models) -> None:
    with pytest.raises(ConfigError, match="--max_size 1000 bytes is too small"):
        extract(models, budget=Budget(max_bytes=1000))
    assert {path.name for path in models[0].parent.iterdir()} == {"base.safetensors", "tuned.safetensors"}


def test_room_for_names_that_are_not_there_is_no_part_of_the_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {f"denoiser.{'x' * 180}.{number}.weight": torch.zeros(2, 2) for number in range(40)}
    base["denoiser.large.weight"] = torch.zeros(400, 400)
    tuned = {key: torch.randn(value.shape, generator=generator) for key, value in base.items()}
    models = save_models(tmp_path, base, tuned)
    rules = RankRules(FixedRank(1, 1), excluded=("xxx",))
    size = 1_000_000
    report = extract(models, save_precision="float", rules=rules, budget=Budget(max_bytes=size))
    assert list(ranks(report)) == ["denoiser.large"]
    assert size * 0.95 < report.lora.stat().st_size <= size


def test_biases_and_norms_count_in_the_size(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"denoiser.a.weight": (64, 64), "denoiser.a.bias": (9000,), "denoiser.norm.weight": (5000,)}
    base = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    tuned = {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in base.items()}
    models = save_models(tmp_path, base, tuned)
    report = extract(models, biases_and_norms=True, budget=Budget(max_bytes=40_000))
    assert set(report.diffs) == {"denoiser.a.bias", "denoiser.norm.weight"}
    assert 0 < report.modules[0].rank < 64
    assert report.lora.stat().st_size <= 40_000


# Errors


@pytest.mark.parametrize(
    ("error", "precision"), [(0.9, "bf16"), (0.2, "fp16"), (0.01, "float"), (0.01, "bf16")]
)
def test_the_true_error_of_the_file_is_at_most_the_one_asked_for(
    models: Models, error: float, precision: str
) -> None:
    report = extract(models, save_precision=precision, budget=Budget(max_error=error))
    assert report.relative_error is not None
    assert report.relative_error <= error
    assert true_error(models, report) == pytest.approx(report.relative_error, rel=1e-4)
    assert report.relative_error > 0.85 * error  # and no more is spent than that takes


def test_an_error_below_the_storage_s_rounding_is_refused(models: Models) -> None:
    with pytest.raises(ConfigError, match=r"--max_error 0\.1% is not above what rounding"):
        extract(models, save_precision="bf16", budget=Budget(max_error=0.001))


@pytest.mark.parametrize("error", [0.003, 0.004])
def test_where_rounding_costs_more_than_was_reckoned_with_more_is_kept(
    models: Models, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    monkeypatch.setattr(budgets, "_FACTOR_ROUNDING_EPS", 0.16)  # half of what it is
    report = extract(models, save_precision="bf16", budget=Budget(max_error=error))
    assert report.relative_error is not None
    assert report.relative_error <= error


def test_an_error_that_even_all_singular_values_leave_by_rounding_is_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_FACTOR_ROUNDING_EPS", 0.16)
    with pytest.raises(ConfigError, match=re.escape("--max_error 0.14% cannot be met")):
        extract(models, save_precision="bf16", budget=Budget(max_error=0.0014))


def test_layers_that_are_left_out_count_as_lost(models: Models) -> None:
    squares = {layer: float(delta.square().sum()) for layer, delta in deltas(models).items()}
    lost = math.sqrt(squares["denoiser.conv_in"] / sum(squares.values()))
    rules = RankRules(FixedRank(1, 1), excluded=("conv_in",))
    report = extract(models, rules=rules, budget=Budget(max_error=1.2 * lost))
    assert "denoiser.conv_in" not in ranks(report)
    assert report.relative_error is not None
    assert lost < report.relative_error <= 1.2 * lost
    with pytest.raises(ConfigError, match=r"--max_error .* cannot be met: .* leave"):
        extract(models, rules=rules, budget=Budget(max_error=0.9 * lost))


# Weights, overrides, limits


def error_of(report: ExtractionReport, layer: str) -> float:
    (found,) = [error.relative_error for error in report.errors if error.name == layer]
    assert found is not None
    return found


def test_a_layer_that_counts_more_loses_less(models: Models) -> None:
    plain = extract(models, budget=Budget(max_bytes=30_000))
    weighted = extract(models, budget=Budget(max_bytes=30_000, weights=((r"attn1\.to_k", 400.0),)))
    layer = "denoiser.down_blocks.0.attn1.to_k"
    assert error_of(weighted, layer) < 0.7 * error_of(plain, layer)
    assert weighted.file_bytes <= 30_000


def test_overrides_are_pinned_and_exclusions_take_nothing(models: Models) -> None:
    rules = RankRules(
        FixedRank(1, 1),
        overrides=(
            ("conv_in", FixedRank(7, 7)),
            ("to_out", FixedRank(9999, 9999)),
            ("proj_out", FixedRank(3, 3)),
        ),
        excluded=("mid_block",),
    )
    report = extract(models, rules=rules, budget=Budget(max_bytes=190_000))
    found = ranks(report)
    assert (found["denoiser.conv_in"], found["denoiser.up_blocks.0.to_out"]) == (7, 180)
    assert found["denoiser.up_blocks.0.proj_out"] == 3
    assert not any("mid_block" in layer for layer in found)
    assert report.file_bytes <= 190_000
    assert {layer.name: layer.reason for layer in report.left_out}[
        "denoiser.mid_block.attn1.to_q"
    ] == "excluded"


def test_a_policy_may_be_pinned_too(models: Models) -> None:
    rules = RankRules(FixedRank(1, 1), overrides=(("net", MethodRank("energy", 0.7)),))
    report = extract(models, rules=rules, budget=Budget(max_error=0.3))
    sigma = torch.linalg.svdvals(deltas(models)["denoiser.down_blocks.0.ff.net.2"]).square()
    expected = int((sigma.cumsum(0) / sigma.sum() < 0.7).sum()) + 1
    assert ranks(report)["denoiser.down_blocks.0.ff.net.2"] == expected


def test_pinned_ranks_that_do_not_fit_are_refused(models: Models) -> None:
    rules = RankRules(FixedRank(1, 1), overrides=(("to_out", FixedRank(9999, 9999)),))
    with pytest.raises(ConfigError, match=r"--max_size .* is too small"):
        extract(models, rules=rules, budget=Budget(max_bytes=50_000))


def test_no_layer_gets_more_than_its_limit_nor_less_than_the_least(models: Models) -> None:
    budget = Budget(max_bytes=60_000, max_rank=20, max_conv_rank=6, min_rank=2)
    found = ranks(extract(models, budget=budget))
    assert len(found) == len(LAYERS)
    for layer, rank in found.items():
        assert 2 <= rank <= (6 if len(LAYERS[layer][0]) > 2 else 20)


# Rounds


Budgets = list[Budget]
BUDGETS = [
    Budget(max_bytes=25_000),
    Budget(max_bytes=90_000),
    Budget(max_error=0.05),
    Budget(max_error=0.3, weights=(("attn1", 10.0),)),
]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Lets a budget begin with so many singular values; the list counts the decompositions."""

    def begin_with(values: int) -> list[int]:
        calls = []

        def counted(delta: Tensor, rank: int, *rest: Any, **more: Any) -> Any:
            calls.append(rank)
            return decompose(delta, rank, *rest, **more)

        guess = staticmethod(
            lambda self, shapes, storage, *, has_statistics: {
                layer: min(values, self._cap(shape)) for layer, shape in shapes.items()
            }
        )
        monkeypatch.setattr(Budget, "first_guess", guess.__func__)
        monkeypatch.setattr(layer_extraction, "decompose", counted)
        return calls

    return begin_with


@pytest.mark.parametrize("budget", BUDGETS)
def test_several_rounds_end_with_the_ranks_of_whole_spectra(
    models: Models, budget: Budget, rounds: Callable[[int], list[int]]
) -> None:
    rounds(9999)
    whole = extract(models, "whole", save_precision="float", budget=budget)
    calls = rounds(2)
    part = extract(models, "part", save_precision="float", budget=budget)
    assert len(calls) > len(LAYERS)  # more than one round
    assert ranks(part) == ranks(whole)
    assert part.relative_error == pytest.approx(whole.relative_error, rel=1e-4)


def best_first(models: Models, count: int) -> dict[str, int]:
    """Ranks of the `count` values of the largest σ² per number stored, over all layers, from float64 spectra."""
    values: list[tuple[float, str]] = []
    for layer, delta in deltas(models).items():
        squares = torch.linalg.svdvals(delta).square().tolist()
        values += [(square / sum(delta.shape), layer) for square in squares]
    chosen = [layer for _, layer in sorted(values, reverse=True)[:count]]
    return {layer: chosen.count(layer) for layer in LAYERS if layer in chosen}


@pytest.mark.parametrize("error", [0.5, 0.2, 0.1])
def test_the_ranks_are_the_best_singular_values_of_all_layers(models: Models, error: float) -> None:
    report = extract(models, save_precision="float", budget=Budget(max_error=error))
    found = ranks(report)
    expected = best_first(models, sum(found.values()))
    # A module's header entries, and the last value in order, which may be replaced by a cheaper one.
    assert sum(abs(found.get(layer, 0) - expected.get(layer, 0)) for layer in LAYERS) <= 6


# Methods


def by_definition(name: str, parameter: float, sigma: "np.ndarray[Any, Any]") -> int:
    """The tools' definitions on all singular values, in their own words."""
    energy, nuclear = np.cumsum(sigma**2) / np.sum(sigma**2), np.cumsum(sigma) / np.sum(sigma)
    if name in {"energy", "adaptive_energy"}:
        return int(np.sum(energy < parameter)) + 1
    if name in {"sv_fro", "adaptive_fro"}:
        return int(np.sum(np.sqrt(energy) < parameter)) + 1
    if name == "error":
        return int(np.sum(np.sqrt(np.maximum(1.0 - energy, 0.0)) > parameter)) + 1
    if name in {"sv_cumulative", "quantile", "adaptive_quantile"}:
        return int(np.sum(nuclear < parameter)) + 1
    if name == "threshold":
        return max(int(np.sum(sigma > parameter)), 1)
    ratio = 1 / parameter if name == "sv_ratio" else parameter
    return max(int(np.sum(sigma > ratio * sigma[0])), 1)


PARAMETERS = {
    "sv_ratio": 8.1,  # at 8 the power laws have a singular value on the threshold itself
    "threshold": 0.05,
    "error": 0.3,
    "ratio": 0.15,
    "adaptive_ratio": 0.3,
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_rank_of_the_whole_float64_spectrum(models: Models, name: str) -> None:
    value = PARAMETERS.get(name, 0.85)
    report = extract(models, save_precision="float", rules=RankRules(MethodRank(name, value)))
    expected = {
        layer: by_definition(name, value, torch.linalg.svdvals(delta).numpy())
        for layer, delta in deltas(models).items()
    }
    assert ranks(report) == expected


@pytest.mark.parametrize(
    ("name", "precision"), [("energy", "fp16"), ("sv_ratio", "bf16"), ("quantile", "fp16")]
)
def test_storage_precision_changes_no_method_s_choice(models: Models, name: str, precision: str) -> None:
    value = PARAMETERS.get(name, 0.6)
    rules = RankRules(MethodRank(name, value))
    assert ranks(extract(models, "a", save_precision=precision, rules=rules)) == ranks(
        extract(models, "b", save_precision="float", rules=rules)
    )


def test_methods_obey_their_limits_and_may_leave_layers_out(models: Models) -> None:
    rules = RankRules(MethodRank("threshold", 0.5, max_rank=2, max_conv_rank=1, min_rank=0))
    report = extract(models, rules=rules)
    for layer, delta in deltas(models).items():
        above = int((torch.linalg.svdvals(delta) > 0.5).sum())
        limit = 1 if len(LAYERS[layer][0]) > 2 else 2
        assert ranks(report).get(layer, 0) == min(above, limit)
    assert {layer.reason for layer in report.left_out} == {"rank_0"}


def test_a_share_of_all_is_every_layer_whole(models: Models) -> None:
    report = extract(models, rules=RankRules(MethodRank("energy", 1.0)))
    assert ranks(report) == {layer: min(delta.shape) for layer, delta in deltas(models).items()}


@pytest.mark.parametrize("name", ["energy", "quantile", "threshold", "error", "ratio"])
def test_what_fades_below_float16_ends_every_method(tmp_path: Path, name: str) -> None:
    shape = (40, 50)
    left, right = (torch.linalg.qr(change((40, 40), 0.5, 1.0, seed)).Q for seed in (0, 1))
    delta = torch.zeros(shape, dtype=torch.float64)
    delta[:, :40] = left * torch.logspace(-4, -18, 40, dtype=torch.float64) @ right.T
    models = save_models(
        tmp_path, {"denoiser.a.weight": torch.zeros(shape)}, {"denoiser.a.weight": delta.float()}
    )
    value = 1.0 if name in {"energy", "quantile"} else 0.0
    report = extract(models, rules=RankRules(MethodRank(name, value)))
    assert 0 < report.modules[0].rank < 40
    assert report.relative_error == pytest.approx(true_error(models, report), rel=1e-4)


def test_a_change_that_float16_cannot_hold_within_the_error_is_refused(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    change = 1e-11 * torch.randn(80, 80, generator=generator)  # whose factors leave float16's normal numbers
    save_file({"denoiser.a.weight": torch.zeros(80, 80)}, tmp_path / "base.safetensors")
    save_file({"denoiser.a.weight": change}, tmp_path / "tuned.safetensors")
    budget = Budget(max_error=0.01)
    with pytest.raises(ConfigError, match="--max_error 1% cannot be met") as refused:
        extract_lora(
            tmp_path / "base.safetensors",
            tmp_path / "tuned.safetensors",
            tmp_path / "lora.safetensors",
            ExtractOptions(budget=budget, rules=RankRules(FixedRank(9999, 9999))),
        )
    assert "--save_precision float" in str(refused.value.hint)
    assert not (tmp_path / "lora.safetensors").exists()


def sd3_named(models: Models, folder: Path) -> Models:
    """The same weights, kernels as matrices, as those of a model that samples in many steps: its blocks have linear layers alone."""
    named = {f"transformer_blocks.{index}.attn.to_q": layer for index, layer in enumerate(LAYERS)}
    marks = {
        "pos_embed.proj.weight": torch.ones(4, 4, 2, 2),
        "context_embedder.weight": torch.ones(4, 4),
        "transformer_blocks.0.norm1_context.linear.weight": torch.ones(4, 4),
    }
    files = [load_file(path) for path in models]
    renamed = [
        {f"{new}.weight": file[f"{old}.weight"].flatten(1) for new, old in named.items()} | marks
        for file in files
    ]
    folder.mkdir()
    return save_models(folder, *renamed)


@pytest.mark.slow
def test_by_default_a_model_of_many_steps_gets_spread_ranks_and_one_of_a_single_step_does_not(
    models: Models, tmp_path: Path
) -> None:
    for_steps = sd3_named(models, tmp_path / "steps")

    def least(of: Models, min_rank: int | None = None, **options: Any) -> int:
        layers = extract(of, "fixed", rank=4, conv_rank=4)
        within = Budget(max_bytes=layers.file_bytes + 200, min_rank=min_rank)  # the header says a little more
        asked: dict[str, Any] = {"budget_weights": "relative", "budget": within}
        found = ranks(extract(of, **asked | options))
        return min(found.get(layer, 0) for layer in ranks(layers))

    assert least(for_steps) >= 3
    assert max(least(for_steps, 0), least(for_steps, budget_weights="plain"), least(models)) < 3
    to_an_error = Budget(max_error=0.3)
    assert least(for_steps, budget=replace(to_an_error, min_rank=0)) < least(for_steps, budget=to_an_error)


@pytest.mark.parametrize("rank", [2, 4, 8])
def test_by_default_the_bytes_of_one_rank_give_all_layers_of_a_model_of_many_steps_that_rank(
    models: Models, tmp_path: Path, rank: int
) -> None:
    for_steps = sd3_named(models, tmp_path / "steps")
    fixed = extract(for_steps, "fixed", rank=rank, conv_rank=rank)
    report = extract(for_steps, budget_weights="relative", budget=Budget(max_bytes=fixed.file_bytes))
    assert ranks(report) == ranks(fixed)
    assert report.file_bytes <= fixed.file_bytes


def test_by_default_an_error_counts_by_the_size_of_its_layer_s_weight(models: Models) -> None:
    base, changes = load_file(models[0]), deltas(models)
    report = extract(models, budget_weights="relative", budget=Budget(max_bytes=60_000, min_rank=0))
    assert report.weighted_error is not None
    found = ranks(report)
    values = sorted(
        (
            (float(value) ** 2 / float(base[f"{layer}.weight"].double().norm()) ** 2 / cost, layer)
            for layer, matrix in changes.items()
            for value, cost in zip(
                torch.linalg.svdvals(matrix), [sum(matrix.shape)] * min(matrix.shape), strict=True
            )
        ),
        reverse=True,
    )
    taken = [layer for _, layer in values[: sum(found.values())]]
    assert sum(abs(found.get(layer, 0) - taken.count(layer)) for layer in changes) <= 6
