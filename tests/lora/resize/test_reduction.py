from collections.abc import Callable, Mapping

import pytest
import torch

from sigmascope.errors import ConfigError
from sigmascope.lora.budget import Budget, StorageCost
from sigmascope.lora.decompose import FormedChange, truncatable
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.ranks import FixedRank, MethodRank, RankRules
from sigmascope.lora.resize import RankPlan, ResizedModule, Resizer
from sigmascope.progress import no_progress

MakeFactors = Callable[..., LoraFactors]
Reduced = dict[str, tuple[ResizedModule, LoraFactors | None]]


@pytest.fixture
def modules(make_factors: MakeFactors) -> dict[str, LoraFactors]:
    return {
        "down.attn1": make_factors((12, 10), 6, seed=1),
        "down.conv": make_factors((8, 3, 3, 3), 4, seed=2),
        "up.attn1": make_factors((12, 10), 6, alpha=60.0, seed=3),
    }


def run(modules: Mapping[str, LoraFactors], plan: RankPlan) -> Reduced:
    reduction = Resizer(
        shapes={name: pair.weight_shape for name, pair in modules.items()},
        old_ranks={name: pair.rank for name, pair in modules.items()},
        load=lambda name, wanted: truncatable(modules[name], wanted, torch.float32),
        plan=plan,
        storage=StorageCost.of(torch.float32),
        family="lbm",  # whose singular values compete
    )
    results = list(reduction.run(no_progress))
    assert [result.name for result, _ in results] == list(modules)
    return {result.name: (result, factors) for result, factors in results}


def discarded(factors: LoraFactors, rank: int) -> float:
    values = torch.linalg.svdvals(factors.delta(torch.float64).flatten(1))
    return float(values[rank:].square().sum().sqrt())


def test_every_module_gets_the_rank_of_its_kind(modules: dict[str, LoraFactors]) -> None:
    found = run(modules, RankPlan(RankRules(FixedRank(3, 2))))
    assert {name: result.rank for name, (result, _) in found.items()} == {
        "down.attn1": 3,
        "down.conv": 2,
        "up.attn1": 3,
    }
    for name, (result, factors) in found.items():
        assert factors is not None
        assert result.error_norm == pytest.approx(discarded(modules[name], result.rank), rel=1e-4)
        values = torch.linalg.svdvals(modules[name].delta(torch.float64).flatten(1)).square()
        assert result.kept_energy == pytest.approx(
            float(values[: result.rank].sum() / values.sum()), rel=1e-5
        )


def test_a_method_chooses_by_the_singular_values(modules: dict[str, LoraFactors]) -> None:
    found = run(modules, RankPlan(RankRules(MethodRank("energy", 0.9))))
    for name, (result, _) in found.items():
        energies = torch.linalg.svdvals(modules[name].delta(torch.float64).flatten(1)).square()
        shares = energies.cumsum(0) / energies.sum()
        assert result.rank == int((shares < 0.9).sum()) + 1


def test_overrides_and_exclusions(modules: dict[str, LoraFactors]) -> None:
    rules = RankRules(FixedRank(3, 2), (("up", FixedRank(5, 5)),), ("conv",))
    found = run(modules, RankPlan(rules))
    assert found["up.attn1"][0].rank == 5
    left_out, factors = found["down.conv"]
    assert (left_out.rank, left_out.left_out, factors) == (0, "excluded", None)
    assert left_out.error_norm == pytest.approx(modules["down.conv"].frobenius_norm())


def test_a_pattern_that_matches_no_module_is_refused(modules: dict[str, LoraFactors]) -> None:
    with pytest.raises(ConfigError, match="mid"):
        run(modules, RankPlan(RankRules(FixedRank(3, 2), (), ("mid",))))


def test_under_an_error_budget_the_overall_error_is_below_it(modules: dict[str, LoraFactors]) -> None:
    rules = RankRules(FixedRank(9999, 9999))
    found = run(modules, RankPlan(rules, Budget(max_error=0.2)))
    error = sum(result.error_norm**2 for result, _ in found.values())
    change = sum(result.norm**2 for result, _ in found.values())
    assert 0.1 < (error / change) ** 0.5 <= 0.2
    assert found["up.attn1"][0].rank > found["down.attn1"][0].rank  # ten times as strong


def test_under_a_budget_overrides_stand_and_the_rest_may_go(modules: dict[str, LoraFactors]) -> None:
    rules = RankRules(FixedRank(9999, 9999), (("down.conv", FixedRank(4, 4)),))
    found = run(modules, RankPlan(rules, Budget(max_error=0.5)))
    assert found["down.conv"][0].rank == 4
    gone, factors = found["down.attn1"]
    assert (gone.rank, gone.left_out, factors) == (0, "rank_0", None)
    assert gone.error_norm == pytest.approx(gone.norm)


def test_a_change_of_zero_is_left_out(make_factors: MakeFactors) -> None:
    zero = LoraFactors(torch.zeros(4, 2), torch.zeros(2, 4), 2.0, (4, 4))
    result, factors = run({"layer": zero}, RankPlan(RankRules(FixedRank(1, 1))))["layer"]
    assert result.left_out == "no_change"
    assert result.relative_error is None
    assert factors is None


def test_few_values_of_factors_of_high_rank_are_found_in_the_formed_change(make_factors: MakeFactors) -> None:
    wide = make_factors((300, 300), 300)
    assert isinstance(truncatable(wide, 8, torch.float32), FormedChange)
    found = truncatable(wide, 8, torch.float32).cut(8)
    assert found.error_norm == pytest.approx(discarded(wide, 8), rel=2e-3)
