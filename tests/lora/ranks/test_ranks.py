import pytest
import torch

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.linalg import Spectrum
from sigmascope.lora.ranks import FULL_RANK, FixedRank, RankPolicy, require_limits


@pytest.mark.parametrize(
    ("weight_shape", "rank"),
    [
        ((1280, 640), 32),  # Linear
        ((320, 320, 3, 3), 16),  # convolution
        ((640, 320, 1, 1), 16),  # a 1×1 convolution is a convolution
        ((4, 320, 3, 3), 4),  # conv_out cannot have more than its 4 channels
        ((8, 640), 8),
    ],
)
def test_linear_and_convolution_ranks(weight_shape: tuple[int, ...], rank: int) -> None:
    assert FixedRank(rank=32, conv_rank=16).rank_for(weight_shape) == rank


@pytest.mark.parametrize(
    ("weight_shape", "rank"), [((1280, 640), 640), ((320, 8, 3, 3), 72), ((4, 320, 3, 3), 4)]
)
def test_9999_is_all_of_it(weight_shape: tuple[int, ...], rank: int) -> None:
    assert FixedRank(FULL_RANK, FULL_RANK).rank_for(weight_shape) == rank


@pytest.mark.parametrize(
    ("rank", "conv_rank", "named"), [(0, 4, "rank 0 keeps nothing"), (4, -1, "conv_rank -1 keeps nothing")]
)
def test_a_rank_below_one_is_refused_by_name(rank: int, conv_rank: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FixedRank(rank, conv_rank)


def test_a_bias_has_no_rank() -> None:
    with pytest.raises(LoraFormatError, match="not a matrix"):
        FixedRank(4, 4).rank_for((320,))


def spectrum(known: int, weight_shape: tuple[int, ...] = (20, 30)) -> Spectrum:
    values = torch.linspace(2.0, 1.0, min(weight_shape[0], 20), dtype=torch.float64)
    return Spectrum(values[:known], float(values.square().sum()), weight_shape)


def test_a_fixed_rank_asks_for_just_that_many_values() -> None:
    assert FixedRank(8, 4).first_guess((1280, 640)) == 8
    assert FixedRank(8, 4).first_guess((320, 320, 3, 3)) == 4


def test_a_fixed_rank_is_chosen_once_its_values_are_known() -> None:
    assert FixedRank(8, 4).choose(spectrum(7)) is None
    assert FixedRank(8, 4).choose(spectrum(8)) == 8
    assert FixedRank(8, 4).choose(spectrum(4, (20, 30, 3, 3))) == 4


def test_a_fixed_rank_gives_no_rank_to_values_that_are_zero() -> None:
    assert FixedRank(8, 4).choose(Spectrum.of_factors(torch.tensor([3.0, 2.0]), (20, 30))) == 2
    assert FixedRank(8, 4).choose(Spectrum(torch.zeros(8), 0.0, (20, 30))) == 0


def test_a_fixed_rank_is_a_rank_policy_with_a_canonical_text() -> None:
    assert isinstance(FixedRank(8, 4), RankPolicy)
    assert FixedRank(8, 4).describe() == "fixed:8,conv=4"


@pytest.mark.parametrize(
    ("least", "most", "named"),
    [(-1, None, "below 0"), (0, 0, "--max_rank 0 keeps nothing"), (4, 2, "--max_rank 2 is below")],
)
def test_limits_that_leave_nothing_between_them_are_refused(least: int, most: int | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_limits(least, {"--max_rank": most})
