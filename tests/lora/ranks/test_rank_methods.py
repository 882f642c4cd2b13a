import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lora.linalg import Spectrum
from sigmascope.lora.ranks import METHODS, MethodRank, RankPolicy

SIGMA = [8.0, 4.0, 2.0, 2.0, 1.0, 0.5]  # squares 64 16 4 4 1 0.25: 89.25; sum 17.5


def spectrum(sigma: Any, known: int | None = None, shape: tuple[int, ...] | None = None) -> Spectrum:
    values = torch.as_tensor(sigma, dtype=torch.float64)
    energy = float(values.square().sum())
    return Spectrum(values[:known], energy, shape or (len(values), len(values) + 3))


# What each tool's formula gives on SIGMA, worked out by hand.
@pytest.mark.parametrize(
    ("name", "parameter", "rank"),
    [
        ("energy", 0.9, 3),  # 80 < 80.325 ≤ 84
        ("energy", 80 / 89.25, 2),  # met exactly
        ("adaptive_energy", 0.9, 3),
        ("sv_fro", 0.9, 2),  # 0.81 · 89.25 = 72.3 ≤ 80
        ("adaptive_fro", 0.98, 4),  # 0.9604 · 89.25 = 85.7 ≤ 88
        ("error", 0.25, 3),  # 0.0625 · 89.25 = 5.58 ≥ 5.25 left
        ("error", 0.1, 5),  # 0.89 ≥ 0.25 left
        ("sv_ratio", 4.0, 2),  # above 2, and 2 itself is not
        ("sv_ratio", 5.0, 4),
        ("ratio", 0.25, 2),
        ("adaptive_ratio", 0.2, 4),
        ("threshold", 1.0, 4),
        ("threshold", 0.9, 5),
        ("sv_cumulative", 0.8, 3),  # 14 ≥ 14
        ("quantile", 0.81, 4),  # 14.175: 14 is not enough
        ("adaptive_quantile", 0.5, 2),
        ("energy", 1.0, 6),
        ("quantile", 1.0, 6),
        ("sv_ratio", 1.0, 1),  # none is above the largest, and one is kept
    ],
)
def test_each_method_follows_its_formula(name: str, parameter: float, rank: int) -> None:
    assert MethodRank(name, parameter).choose(spectrum(SIGMA)) == rank


def by_definition(name: str, parameter: float, sigma: "np.ndarray[Any, Any]") -> int:
    """The tools' definitions on a complete spectrum, in their own words."""
    energy = np.cumsum(sigma**2) / np.sum(sigma**2)
    nuclear = np.cumsum(sigma) / np.sum(sigma)
    if name in {"energy", "adaptive_energy"}:
        return int(np.sum(energy < parameter)) + 1
    if name in {"sv_fro", "adaptive_fro"}:
        return int(np.sum(np.sqrt(energy) < parameter)) + 1
    if name == "error":
        tail = np.sqrt(np.maximum(np.sum(sigma**2) - np.concatenate([[0.0], np.cumsum(sigma**2)]), 0.0))
        return max(int(np.argmax(tail <= parameter * np.sqrt(np.sum(sigma**2)))), 1)
    if name in {"sv_cumulative", "quantile", "adaptive_quantile"}:
        return int(np.sum(nuclear < parameter)) + 1
    if name == "threshold":
        return max(int(np.sum(sigma > parameter)), 1)
    ratio = 1 / parameter if name == "sv_ratio" else parameter
    return max(int(np.sum(sigma > ratio * sigma[0])), 1)


PARAMETERS = {name: 20.0 if name == "sv_ratio" else 0.3 for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(2))
def test_methods_agree_with_their_definitions_on_random_matrices(name: str, seed: int) -> None:
    matrix = torch.randn(30, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sigma = torch.linalg.svdvals(matrix @ torch.diag(torch.arange(50, dtype=torch.float64) + 1).inverse())
    expected = by_definition(name, PARAMETERS[name], sigma.numpy())
    assert MethodRank(name, PARAMETERS[name]).choose(spectrum(sigma, shape=(30, 50))) == expected


falling = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=24).map(lambda x: sorted(x, reverse=True))


@pytest.mark.parametrize("name", ["energy", "error", "sv_ratio", "threshold", "quantile"])  # one of each rule
@given(
    sigma=falling,
    parameter=st.floats(0.0, 1.0),
    cap=st.none() | st.integers(1, 20),
    floor=st.integers(0, 1),
)
@settings(max_examples=30, deadline=None)
def test_part_of_the_values_decides_as_all_do_or_not_at_all(
    name: str, sigma: list[float], parameter: float, cap: int | None, floor: int
) -> None:
    value = 1.0 + 30 * parameter if name == "sv_ratio" else parameter
    policy = MethodRank(name, value, max_rank=cap, min_rank=floor)
    final = policy.choose(spectrum(sigma))
    assert final is not None
    for known in range(len(sigma)):
        early = policy.choose(spectrum(sigma, known))
        assert early is None or early == final or close_call(sigma, known)


def close_call(sigma: list[float], known: int) -> bool:
    """Whether what is unknown is below rounding, where part may leave out what all would keep."""
    energies = [value * value for value in sigma]
    return sum(energies[known:]) <= 1e-9 * sum(energies)


@pytest.mark.parametrize("name", METHODS)
def test_asking_for_twice_as_many_ends_with_a_choice(name: str) -> None:
    sigma = torch.logspace(0, -2, 200, dtype=torch.float64)
    policy = MethodRank(name, PARAMETERS[name])
    known = policy.first_guess((200, 203))
    while (rank := policy.choose(spectrum(sigma, known))) is None:
        assert known < 200
        known = min(2 * known, 200)
    assert rank == policy.choose(spectrum(sigma))


def test_an_energy_that_is_reached_needs_no_more_values() -> None:
    assert MethodRank("energy", 0.8).choose(spectrum(SIGMA, 2)) == 2


def test_an_energy_that_is_not_reached_needs_more_values() -> None:
    assert MethodRank("energy", 0.95).choose(spectrum(SIGMA, 2)) is None


def test_a_cap_decides_before_the_energy_is_reached() -> None:
    assert MethodRank("energy", 0.99, max_rank=2).choose(spectrum(SIGMA, 2)) == 2


def test_a_cap_decides_a_nuclear_share_without_all_values() -> None:
    flat = torch.ones(100, dtype=torch.float64)
    policy = MethodRank("sv_cumulative", 0.9, max_rank=16)
    assert policy.first_guess((100, 103)) == 16
    assert policy.choose(spectrum(flat, 16)) == 16


def test_a_nuclear_share_asks_for_every_value_first() -> None:
    assert MethodRank("quantile", 0.9).first_guess((1280, 640)) == 640


def test_other_methods_ask_for_a_few_values_first() -> None:
    assert MethodRank("sv_fro", 0.9).first_guess((1280, 640)) == 64
    assert MethodRank("sv_fro", 0.9).first_guess((4, 320, 3, 3)) == 4


def test_convolutions_have_their_own_parameter_and_cap() -> None:
    policy = MethodRank("threshold", 1.5, conv_parameter=0.1, max_rank=3, max_conv_rank=5)
    assert policy.choose(spectrum(SIGMA)) == 3
    assert policy.choose(spectrum(SIGMA, shape=(6, 1, 3, 3))) == 5
    assert MethodRank("threshold", 3.0, conv_parameter=1.5).choose(spectrum(SIGMA, shape=(6, 8, 1, 1))) == 4


def test_one_value_is_kept_unless_none_may_be() -> None:
    assert MethodRank("threshold", 100.0).choose(spectrum(SIGMA)) == 1
    assert MethodRank("threshold", 100.0, min_rank=0).choose(spectrum(SIGMA)) == 0


def test_a_floor_keeps_more_than_the_method_asks_for() -> None:
    assert MethodRank("energy", 0.1, min_rank=4).choose(spectrum(SIGMA)) == 4
    assert MethodRank("energy", 0.1, min_rank=4).choose(spectrum(SIGMA, 3)) is None


def test_no_rank_is_given_to_values_that_are_zero() -> None:
    factors = Spectrum.of_factors(torch.tensor([3.0, 1.0]), (8, 8))
    assert MethodRank("energy", 0.1, min_rank=6).choose(factors) == 2


@pytest.mark.parametrize("name", METHODS)
def test_a_change_of_zero_is_left_out(name: str) -> None:
    assert MethodRank(name, PARAMETERS[name]).choose(Spectrum(torch.zeros(2), 0.0, (2, 2))) == 0


def test_a_planted_rank_comes_back() -> None:
    generator = torch.Generator().manual_seed(1)
    planted: Tensor = torch.randn(40, 5, generator=generator) @ torch.randn(5, 30, generator=generator)
    sigma = torch.linalg.svdvals(planted)
    known = Spectrum(sigma[:12], float(planted.double().square().sum()), (40, 30))
    assert MethodRank("error", 1e-3).choose(known) == 5
    assert MethodRank("ratio", 1e-3).choose(known) == 5


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("energy", 95.0),
        ("energy", -0.1),
        ("sv_ratio", 0.5),
        ("threshold", -1.0),
        ("quantile", math.nan),
        ("sv_ratio", math.inf),
    ],
)
def test_parameters_that_make_no_sense_are_refused(name: str, parameter: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not take"):
        MethodRank(name, parameter)


def test_an_unknown_method_is_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match=r"sv_knee is not known\. .*sv_fro"):
        MethodRank("sv_knee", 1.0)


def test_limits_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_rank 2 is below the minimum rank 4"):
        MethodRank("energy", 0.9, max_rank=2, min_rank=4)


def test_what_is_left_out_and_what_is_spelt_out_are_one_policy() -> None:
    short, long = MethodRank("energy", 0.9, max_rank=8), MethodRank("energy", 0.9, 0.9, 8, 8)
    assert short == long
    assert hash(short) == hash(long)


def test_a_method_is_a_rank_policy() -> None:
    assert isinstance(MethodRank("energy", 0.9), RankPolicy)
