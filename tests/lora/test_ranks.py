import pytest

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.ranks import FULL_RANK, FixedRank


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
    with pytest.raises(LoraFormatError, match="no matrix"):
        FixedRank(4, 4).rank_for((320,))
