import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmascope.errors import ConfigError
from sigmascope.lora.budget import Allocation, Budget, StorageCost
from sigmascope.lora.linalg import Spectrum

FREE = StorageCost(2)
LAYERS: dict[str, tuple[int, ...]] = {
    "down.attn": (24, 40),
    "mid.conv": (16, 8, 3, 3),
    "up.attn": (40, 24),
    "up.conv_out": (4, 16, 3, 3),
}


def values_of(index: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Falling values whose size and fall differ from layer to layer."""
    count = min(shape[0], math.prod(shape[1:]))
    return (0.3**index) * torch.arange(1, count + 1, dtype=torch.float64) ** -(0.4 + 0.3 * index)


def spectra(known: int | Mapping[str, int] = 10_000) -> dict[str, Spectrum]:
    built = {}
    for index, (layer, shape) in enumerate(LAYERS.items()):
        values = values_of(index, shape)
        count = known if isinstance(known, int) else known[layer]
        built[layer] = Spectrum(values[:count], float(values.square().sum()), shape)
    return built


def grow(budget: Budget, known: int = 2, pinned: Mapping[str, int] | None = None) -> tuple[Allocation, int]:
    """Compute what is wanted until nothing is; also how many values that were in all."""
    counts = {layer: min(known, spectrum.largest_rank) for layer, spectrum in spectra().items()}
    for _ in range(20):
        allocation = budget.allocate(spectra(counts), FREE, pinned)
        if not allocation.wanted:
            return allocation, sum(counts.values())
        assert all(counts[layer] < more for layer, more in allocation.wanted.items())
        counts |= allocation.wanted
    raise AssertionError("it does not end")


def discarded(ranks: Mapping[str, int], weights: Mapping[str, float] | None = None) -> float:
    """Σw‖ΔW − A‖² from the whole spectra."""
    return sum(
        (weights or {}).get(layer, 1.0) * float(spectrum.values[ranks[layer] :].square().sum())
        for layer, spectrum in spectra().items()
    )


TOTAL = discarded(dict.fromkeys(LAYERS, 0))


@pytest.mark.parametrize("size", [3_000, 5_000, 9_000])
def test_a_size_is_kept_and_used(size: int) -> None:
    allocation = Budget(max_bytes=size).allocate(spectra(), FREE)
    assert allocation.bytes == FREE.within(size).file_bytes(allocation.ranks, LAYERS)
    largest = max(
        FREE.rank_bytes(layer, shape) + FREE.module_bytes(layer, shape) for layer, shape in LAYERS.items()
    )
    assert size - largest < allocation.bytes <= size


@pytest.mark.parametrize("error", [0.5, 0.2, 0.05, 0.003])
def test_an_error_is_kept_and_used(error: float) -> None:
    allocation = Budget(max_error=error).allocate(spectra(), FREE)
    assert allocation.error == pytest.approx(math.sqrt(discarded(allocation.ranks) / TOTAL), rel=1e-9)
    assert allocation.error <= error
    for layer, rank in allocation.ranks.items():  # one value fewer anywhere would be too few
        if rank:
            assert discarded(allocation.ranks | {layer: rank - 1}) > error**2 * TOTAL


def test_more_room_gives_less_error() -> None:
    errors = [Budget(max_bytes=size).allocate(spectra(), FREE).error for size in range(2_500, 12_000, 500)]
    assert errors == sorted(errors, reverse=True)


def test_room_for_everything_leaves_nothing_out() -> None:
    allocation = Budget(max_bytes=10**7).allocate(spectra(), FREE)
    assert allocation.ranks == {layer: spectrum.largest_rank for layer, spectrum in spectra().items()}
    assert allocation.error == 0.0


@pytest.mark.parametrize(
    "budget",
    [
        Budget(max_bytes=3_000),
        Budget(max_bytes=6_000),
        Budget(max_bytes=10**7),
        Budget(max_error=0.5),
        Budget(max_error=0.1),
        Budget(max_error=0.01),
        Budget(max_bytes=6_000, weights=(("conv", 50.0),)),
        Budget(max_bytes=6_000, max_rank=9, max_conv_rank=3),
        Budget(max_error=0.3, min_rank=2),
    ],
)
def test_growing_spectra_end_with_the_ranks_of_whole_ones(budget: Budget) -> None:
    assert grow(budget)[0] == budget.allocate(spectra(), FREE)


@given(size=st.integers(2_500, 14_000), known=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_growing_spectra_end_with_the_error_of_whole_ones(size: int, known: int) -> None:
    budget = Budget(max_bytes=size)
    assert grow(budget, known)[0].error == pytest.approx(budget.allocate(spectra(), FREE).error, rel=1e-12)


@given(error=st.floats(0.01, 0.9), known=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_growing_spectra_end_with_the_bytes_of_whole_ones(error: float, known: int) -> None:
    budget = Budget(max_error=error)
    assert grow(budget, known)[0].bytes == budget.allocate(spectra(), FREE).bytes


def test_of_layers_with_a_known_value_to_spare_no_more_are_asked_for() -> None:
    budget = Budget(max_bytes=3_000)
    first = budget.allocate(spectra(8), FREE)
    taken_whole = {
        layer for layer, rank in first.ranks.items() if rank == min(8, spectra()[layer].largest_rank)
    }
    assert 0 < len(first.wanted) < len(LAYERS)
    assert first.wanted.keys() <= taken_whole


def test_room_that_is_left_is_not_filled_with_rounded_zeros() -> None:
    planted = torch.randn(40, 3) @ torch.randn(3, 60)  # float32: the values beyond the third are about 1e-7
    sigma = torch.linalg.svdvals(planted)
    energy = float(planted.double().square().sum())
    for known in (8, 40):
        spectrum = Spectrum(sigma[:known], energy, (40, 60))
        allocation = Budget(max_bytes=10**6).allocate({"layer": spectrum}, FREE)
        assert allocation.ranks == {"layer": 3}
        assert allocation.wanted == {}


def test_a_weighted_layer_gets_more() -> None:
    plain = Budget(max_bytes=6_000).allocate(spectra(), FREE)
    weighted = Budget(max_bytes=6_000, weights=(("conv", 50.0), ("^mid", 200.0))).allocate(spectra(), FREE)
    assert weighted.ranks["mid.conv"] > plain.ranks["mid.conv"]
    weights = {"mid.conv": 200.0, "up.conv_out": 50.0}  # of two that match the last wins
    none = dict.fromkeys(LAYERS, 0)
    assert weighted.error == pytest.approx(
        math.sqrt(discarded(weighted.ranks, weights) / discarded(none, weights)), rel=1e-9
    )


def test_a_layer_of_weight_0_gets_nothing() -> None:
    ranks = Budget(max_error=0.1, weights=(("conv", 0.0),)).allocate(spectra(), FREE).ranks
    assert ranks["mid.conv"] == ranks["up.conv_out"] == 0


def test_ranks_stay_within_their_limits() -> None:
    allocation = Budget(max_bytes=10**6, max_rank=9, max_conv_rank=3).allocate(spectra(), FREE)
    assert allocation.ranks == {"down.attn": 9, "mid.conv": 3, "up.attn": 9, "up.conv_out": 3}
    least = Budget(max_bytes=5_000, min_rank=2).allocate(spectra(), FREE)
    assert min(least.ranks.values()) == 2


def test_pinned_ranks_count_and_stay() -> None:
    allocation = Budget(max_bytes=6_000).allocate(spectra(), FREE, {"up.attn": 5, "mid.conv": 0})
    assert allocation.ranks["up.attn"] == 5
    assert allocation.ranks["mid.conv"] == 0
    assert allocation.bytes == FREE.within(6_000).file_bytes(allocation.ranks, LAYERS) <= 6_000
    assert allocation.error == pytest.approx(math.sqrt(discarded(allocation.ranks) / TOTAL), rel=1e-9)


def test_pinned_ranks_above_what_is_known_are_asked_for() -> None:
    final, _ = grow(Budget(max_bytes=6_000), pinned={"up.attn": 12})
    assert final == Budget(max_bytes=6_000).allocate(spectra(), FREE, {"up.attn": 12})


def test_a_layer_pinned_at_full_rank_needs_no_values() -> None:
    known = spectra() | {
        "up.conv_out": Spectrum(torch.zeros(0), spectra()["up.conv_out"].total_energy, (4, 16, 3, 3))
    }
    pinned = {"up.conv_out": 4}
    assert Budget(max_bytes=6_000).allocate(known, FREE, pinned) == Budget(max_bytes=6_000).allocate(
        spectra(), FREE, pinned
    )


def test_rounding_to_storage_precision_counts_towards_the_error() -> None:
    rough = StorageCost(2, rounding=0.04)
    allocation = Budget(max_error=0.05).allocate(spectra(), rough)
    lost = discarded(allocation.ranks)
    assert allocation.error == pytest.approx(math.sqrt((lost + 0.04**2 * (TOTAL - lost)) / TOTAL), rel=1e-9)
    assert allocation.error <= 0.05
    assert allocation.bytes > Budget(max_error=0.05).allocate(spectra(), FREE).bytes


def test_layers_that_did_not_change_get_nothing() -> None:
    still = {"still": Spectrum(torch.zeros(4, dtype=torch.float64), 0.0, (4, 4))}
    assert Budget(max_bytes=6_000, min_rank=1).allocate(still, FREE).ranks == {"still": 0}
    assert Budget(max_error=0.05).allocate(still, FREE).error == 0.0
    assert Budget(max_error=0.05).allocate({}, FREE).ranks == {}


@pytest.mark.parametrize(("has_statistics", "times"), [(False, 2), (True, 1)])
def test_the_first_guess_for_a_size_goes_by_the_uniform_rank(has_statistics: bool, times: int) -> None:
    shapes = {f"l{i}": (1280, 1280) for i in range(500)}
    guess = Budget(max_bytes=100 * 2**20).first_guess(shapes, FREE, has_statistics=has_statistics)
    uniform = 100 * 2**20 / (500 * 2560 * 2)
    assert len(set(guess.values())) == 1
    assert math.floor(0.98 * times * uniform) <= guess["l0"] <= times * uniform  # headers take up to 2 %


def test_the_first_guess_is_within_the_limits() -> None:
    assert Budget(max_error=0.05, max_conv_rank=8).first_guess(LAYERS, FREE) == {
        "down.attn": 24,
        "mid.conv": 8,
        "up.attn": 24,
        "up.conv_out": 4,
    }


def test_all_layers_of_a_full_size_model_fill_their_budget() -> None:
    values = torch.logspace(0, -2, 128, dtype=torch.float64)
    many = {
        f"denoiser.blocks.{i}.to_q": Spectrum((1 + i % 7) * values, 1e3, (1280, 1280 + i)) for i in range(792)
    }
    storage = StorageCost.of(torch.float16)
    ranks = Budget(max_bytes=100 * 2**20).allocate(many, storage).ranks
    factors = sum(rank * (1280 + 1280 + index) * 2 for index, rank in enumerate(ranks.values()))
    assert 0.98 * 100 * 2**20 < factors < 100 * 2**20


def uniform(rank: float, size: int) -> int:
    """The bytes of a file in which each layer has that rank, or all that it can have."""
    cost = FREE.within(size)
    modules = sum(cost.module_bytes(layer, shape) for layer, shape in LAYERS.items())
    values = sum(
        min(rank, spectra()[layer].largest_rank) * cost.rank_bytes(layer, shape)
        for layer, shape in LAYERS.items()
    )
    return cost.empty_bytes + modules + math.floor(values)


@pytest.mark.parametrize(("rank", "least"), [(4.5, 4), (8.5, 8), (10.0, 9), (12.0, 11)])
def test_spread_ranks_begin_with_eight_or_seven_eighths_of_the_one_rank_of_these_bytes(
    rank: float, least: int
) -> None:
    size = uniform(rank, 9_999)
    spread = Budget(max_bytes=size).allocate(spectra(), FREE, spread=True).ranks
    capped = {layer: min(least, spectrum.largest_rank) for layer, spectrum in spectra().items()}
    assert spread == Budget(max_bytes=size, min_rank=least).allocate(spectra(), FREE).ranks
    assert all(spread[layer] >= capped[layer] for layer in LAYERS)
    assert spread != Budget(max_bytes=size).allocate(spectra(), FREE).ranks


def test_spread_ranks_that_do_not_fit_differ_by_one() -> None:
    size = uniform(1.97, 1_999)  # seven eighths of it are more than 1, and 2 of all are more than it holds
    ranks = Budget(max_bytes=size).allocate(spectra(), FREE, spread=True).ranks
    assert set(ranks.values()) == {1, 2}
    spare = size - FREE.within(size).file_bytes(ranks, LAYERS)
    assert spare < min(FREE.rank_bytes(layer, LAYERS[layer]) for layer, rank in ranks.items() if rank == 1)


@pytest.mark.parametrize("error", [0.05, 0.2, 0.6])
def test_spread_ranks_meet_an_error_with_the_share_of_the_bytes_that_it_takes(error: float) -> None:
    allocation = Budget(max_error=error).allocate(spectra(), FREE, spread=True)
    assert math.sqrt(discarded(allocation.ranks) / TOTAL) <= error
    least = min(rank for layer, rank in allocation.ranks.items() if rank < spectra()[layer].largest_rank)
    assert allocation.bytes <= uniform((least + 1) / 0.875, allocation.bytes)
    assert uniform(least / 0.875, allocation.bytes) >= allocation.bytes


@pytest.mark.parametrize("limit", [{"max_bytes": 5_000}, {"max_error": 0.2}])
def test_spread_ranks_ask_for_values_until_they_are_those_of_whole_spectra(limit: dict[str, float]) -> None:
    budget = Budget(**limit)  # type: ignore[arg-type] # one is an int
    counts = dict.fromkeys(LAYERS, 2)
    for _ in range(20):
        allocation = budget.allocate(spectra(counts), FREE, spread=True)
        if not allocation.wanted:
            break
        assert all(counts[layer] < more for layer, more in allocation.wanted.items())
        counts |= allocation.wanted
    assert allocation.ranks == budget.allocate(spectra(), FREE, spread=True).ranks


def test_spread_ranks_are_for_budgets_without_a_least_rank_and_keep_limits_and_pins() -> None:
    free = Budget(max_bytes=5_000, min_rank=0).allocate(spectra(), FREE, spread=True)
    assert free.ranks == Budget(max_bytes=5_000).allocate(spectra(), FREE).ranks
    limited = (
        Budget(max_bytes=9_000, max_rank=6, max_conv_rank=2).allocate(spectra(), FREE, spread=True).ranks
    )
    assert limited == {"down.attn": 6, "mid.conv": 2, "up.attn": 6, "up.conv_out": 2}
    pinned = Budget(max_bytes=4_000).allocate(spectra(), FREE, {"down.attn": 20}, spread=True).ranks
    assert pinned["down.attn"] == 20
    assert FREE.within(4_000).file_bytes(pinned, LAYERS) <= 4_000
    with pytest.raises(ConfigError, match="--max_size"):
        Budget(max_bytes=300).allocate(spectra(), FREE, spread=True)
    with pytest.raises(ConfigError, match="--max_error"):
        Budget(max_error=0.05, max_rank=1).allocate(spectra(), FREE, spread=True)


def test_room_that_the_header_does_not_take_is_used_where_the_file_can_be_measured() -> None:
    def real(ranks: Mapping[str, int]) -> int:
        return FREE.within(5_000).file_bytes(ranks, LAYERS) - 700

    budget, measured = Budget(max_bytes=5_000), replace(FREE, measure=real)
    loose, full = budget.allocate(spectra(), FREE).ranks, budget.allocate(spectra(), measured).ranks
    assert full == Budget(max_bytes=5_700).allocate(spectra(), FREE).ranks
    assert real(loose) < real(full) <= 5_000


def test_a_file_that_is_larger_than_was_reckoned_with_loses_values_until_it_fits() -> None:
    def real(ranks: Mapping[str, int]) -> int:
        return FREE.within(5_000).file_bytes(ranks, LAYERS) + 400

    full = Budget(max_bytes=5_000).allocate(spectra(), replace(FREE, measure=real)).ranks
    assert 4_500 < real(full) <= 5_000


def test_a_layer_that_most_of_the_bytes_are_for_gets_them_though_few_of_its_values_are_known_at_first() -> (
    None
):
    """Of 16 known values all seem to fit; one layer, once it is known, takes most of the bytes."""
    count = torch.arange(1, 257, dtype=torch.float64)
    whole = {f"small.{index}": count**-0.7 for index in range(20)} | {"large": 30.0 * count**-0.05}

    def known(values: Mapping[str, int]) -> dict[str, Spectrum]:
        return {
            layer: Spectrum(every[: values[layer]], float(every.square().sum()), (256, 256))
            for layer, every in whole.items()
        }

    storage, budget = StorageCost.of(torch.float16), Budget(max_bytes=350_000)
    best = budget.allocate(known(dict.fromkeys(whole, 256)), storage)
    assert best.ranks["large"] > 200
    assert all(0 < best.ranks[layer] < 16 for layer in whole if layer != "large")
    counts = dict.fromkeys(whole, 16)
    while (allocation := budget.allocate(known(counts), storage)).wanted:
        counts |= allocation.wanted
    assert allocation == best


def test_layers_that_hold_little_of_the_change_are_hardly_decomposed_for_an_error() -> None:
    """What 16 values of each leave is above the error, though one layer alone has nearly all of it."""
    count = torch.arange(1, 257, dtype=torch.float64)
    whole = {f"small.{index}": 1e-3 * count**-0.5 for index in range(20)} | {"large": count**-0.5}
    counts = dict.fromkeys(whole, 16)
    budget = Budget(max_error=0.3)
    while (
        allocation := budget.allocate(
            {
                layer: Spectrum(every[: counts[layer]], float(every.square().sum()), (256, 256))
                for layer, every in whole.items()
            },
            FREE,
        )
    ).wanted:
        counts |= allocation.wanted
    assert allocation.error <= 0.3
    assert {layer for layer, computed in counts.items() if computed > 16} == {"large"}
