"""Resizing and merging by what the model's output feels, held against LAPACK in float64."""

import json
import math
from pathlib import Path

import pytest
import torch
from tests.conftest import LAYER_SHAPES, MakePair, ModelPair
from tests.lora.extract.test_extract_statistics import moments, path_of, statistics_of
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.budget import Budget
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.merge import CombineOptions, MergeMethod, merge_lora_files
from sigmascope.lora.ranks import FixedRank, MethodRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.resize import RankPlan, resize_lora
from sigmascope.lora.statistics import RIDGE, ModelStatistics, load_statistics
from sigmascope.lora.writer import save_lora

RANK_2 = RankPlan(RankRules(FixedRank(2, 2)))


@pytest.fixture
def pair(make_model_pair: MakePair) -> ModelPair:
    return make_model_pair()


@pytest.fixture
def lora(pair: ModelPair) -> Path:
    """Rank 6 of each layer."""
    target = pair.base.with_name("lora.safetensors")
    extract_lora(pair.base, pair.tuned, target, ExtractOptions(rank=6, conv_rank=6, save_precision="float"))
    return target


def roots(layer: str) -> tuple[Tensor, Tensor]:
    """S and R of a layer's statistics, by Cholesky in float64."""
    number = list(LAYER_SHAPES).index(layer)
    rows, columns = matrix_shape(LAYER_SHAPES[layer])
    made = []
    for size, seed in ((rows, 2 * number + 1), (columns, 2 * number)):
        full = moments(size, seed).full
        assert full is not None
        wide = full.double()
        ridge = RIDGE * float(wide.diagonal().mean())
        made.append(torch.linalg.cholesky(wide + ridge * torch.eye(size, dtype=torch.float64)))
    return made[0], made[1]


def weighed(layer: str, change: Tensor) -> Tensor:
    left, right = roots(layer)
    return left.mT @ change.double().flatten(1) @ right


def deltas(path: Path) -> dict[str, Tensor]:
    return {name: factors.delta().double() for name, factors in load_lora(path).modules.items()}


def errors(change: dict[str, Tensor], stored: dict[str, Tensor]) -> tuple[float, float]:
    """The weighted error of what is stored, and the least that rank 2 allows."""
    lost = least = whole = 0.0
    for layer, delta in change.items():
        wide = weighed(layer, delta)
        lost += float((wide - weighed(layer, stored[layer])).square().sum())
        squares = torch.linalg.svdvals(wide).square()
        least, whole = least + float(squares[2:].sum()), whole + float(squares.sum())
    return math.sqrt(lost / whole), math.sqrt(least / whole)


def test_a_resize_has_the_least_error_that_the_rank_allows(pair: ModelPair, lora: Path) -> None:
    target, plain = pair.base.with_name("small.safetensors"), pair.base.with_name("plain.safetensors")
    report = resize_lora(lora, target, RANK_2, save_precision="float", statistics=statistics_of(pair))
    found, least = errors(deltas(lora), deltas(target))
    assert found <= 1.001 * least
    assert report.weighted_error == pytest.approx(found, rel=1e-4)
    unweighed = resize_lora(lora, plain, RANK_2, save_precision="float")
    assert errors(deltas(lora), deltas(plain))[0] > 1.1 * found
    assert report.relative_error is not None
    assert unweighed.relative_error is not None
    assert report.relative_error > unweighed.relative_error
    assert unweighed.weighted_error is None
    facts = json.loads(load_lora(target).metadata["sigmascope_statistics"])
    assert (facts["calls"], facts["ridge"]) == (1, RIDGE)


def test_a_merge_has_the_least_error_that_the_rank_allows(pair: ModelPair, lora: Path) -> None:
    other = pair.base.with_name("other.safetensors")
    extract_lora(pair.base, pair.tuned, other, ExtractOptions(rank=1, conv_rank=1, save_precision="float"))
    target = pair.base.with_name("merged.safetensors")
    options = CombineOptions(
        weights=(0.7, -0.5), plan=RANK_2, save_precision="float", statistics=statistics_of(pair)
    )
    report = merge_lora_files([lora, other], target, options)
    one, two = deltas(lora), deltas(other)
    found, least = errors({layer: 0.7 * one[layer] - 0.5 * two[layer] for layer in one}, deltas(target))
    assert found <= 1.001 * least
    assert report.weighted_error == pytest.approx(found, rel=1e-4)


def test_a_merge_that_is_formed_knows_the_metric_too(pair: ModelPair, lora: Path) -> None:
    statistics = statistics_of(pair)
    merged = {}
    for name, known in (("plain", None), ("weighed", statistics)):
        target = pair.base.with_name(f"{name}.safetensors")
        options = CombineOptions(
            method=MergeMethod("ties", 0.5), plan=RANK_2, save_precision="float", statistics=known
        )
        merge_lora_files([lora, lora], target, options)
        merged[name] = deltas(target)
    whole = pair.base.with_name("whole.safetensors")
    full = RankPlan(RankRules(FixedRank(9999, 9999)))
    merge_lora_files(
        [lora, lora],
        whole,
        CombineOptions(method=MergeMethod("ties", 0.5), plan=full, save_precision="float"),
    )
    found, least = errors(deltas(whole), merged["weighed"])
    assert found <= 1.002 * least
    assert errors(deltas(whole), merged["plain"])[0] > 1.05 * found


def test_a_conversion_that_has_to_cut_has_the_least_error_that_the_rank_allows(
    pair: ModelPair, lora: Path
) -> None:
    """PEFT's files hold no whole differences."""
    whole, changes = pair.base.with_name("whole.safetensors"), deltas(lora)
    save_lora(
        whole,
        LoraFile({}, changes={name: DiffChange({"diff": one.float()}) for name, one in changes.items()}),
    )
    target, plain = pair.base.with_name("peft.safetensors"), pair.base.with_name("plain.safetensors")
    report = convert_lora(whole, target, "peft", rank=2, statistics=statistics_of(pair))
    convert_lora(whole, plain, "peft", rank=2)

    def stored(path: Path) -> dict[str, Tensor]:
        return {name.replace("unet.", "denoiser.", 1): delta for name, delta in deltas(path).items()}

    found, least = errors(changes, stored(target))
    assert found <= 1.001 * least
    assert errors(changes, stored(plain))[0] > 1.1 * found
    assert report.weighted_error == pytest.approx(found, rel=1e-4)
    assert json.loads(load_lora(target).metadata["sigmascope_statistics"])["ridge"] == RIDGE


def test_a_budget_spends_its_bytes_where_the_output_feels_them(pair: ModelPair, lora: Path) -> None:
    plan = RankPlan(RankRules(FixedRank(9999, 9999)), Budget(max_bytes=lora.stat().st_size // 2))
    target = pair.base.with_name("small.safetensors")
    with_statistics = resize_lora(lora, target, plan, statistics=statistics_of(pair))
    assert target.stat().st_size <= lora.stat().st_size // 2
    whole = deltas(lora)

    def lost_by(path: Path) -> float:
        kept = deltas(path)
        return math.fsum(
            float(weighed(layer, delta - kept[layer] if layer in kept else delta).square().sum())
            for layer, delta in whole.items()
        )

    change = math.fsum(float(weighed(layer, delta).square().sum()) for layer, delta in whole.items())
    assert with_statistics.weighted_error == pytest.approx(math.sqrt(lost_by(target) / change), rel=1e-2)
    plain = pair.base.with_name("plain.safetensors")
    resize_lora(lora, plain, plan)
    assert lost_by(target) < lost_by(plain)


def test_nothing_is_changed_where_nothing_is_cut(pair: ModelPair, lora: Path) -> None:
    target = pair.base.with_name("same.safetensors")
    keep = RankPlan(RankRules(FixedRank(9999, 9999)))
    report = resize_lora(lora, target, keep, statistics=statistics_of(pair))
    before, after = load_lora(lora).modules, load_lora(target).modules
    assert all(torch.equal(before[name].up, after[name].up) for name in before)
    assert report.weighted_error == pytest.approx(0.0, abs=1e-12)


def test_what_does_not_belong_together_is_refused(pair: ModelPair, lora: Path) -> None:
    target, path = pair.base.with_name("never.safetensors"), statistics_of(pair)
    known = load_statistics(path)
    ModelStatistics(dict(known), "another", {}).save(path)
    with pytest.raises(ModelMismatchError, match="another model: its weights differ"):
        resize_lora(lora, target, RANK_2, statistics=path)
    ModelStatistics({"elsewhere": known[path_of("denoiser.conv_in")]}, known.fingerprint, {}).save(path)
    with pytest.raises(ModelMismatchError, match="none of the 10 layers"):
        resize_lora(lora, target, RANK_2, statistics=path)
    statistics_of(pair)
    threshold = RankPlan(RankRules(MethodRank("threshold", 0.1)))
    with pytest.raises(ConfigError, match="threshold compares singular values"):
        resize_lora(lora, target, threshold, statistics=path)
    with pytest.raises(ConfigError, match="--ridge 0 is out of range"):
        resize_lora(lora, target, RANK_2, statistics=path, ridge=0.0)
    with pytest.raises(ConfigError, match="nothing is cut"):
        merge_lora_files([lora, lora], target, CombineOptions(statistics=path))
    with pytest.raises(ConfigError, match=r"stats\.safetensors"):
        resize_lora(lora, path, RANK_2, statistics=path)
    assert not target.exists()
