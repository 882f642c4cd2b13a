import pytest

from sigmascope.analysis.run_figures import percentile


@pytest.mark.parametrize(
    ("share", "value"), [(0, 1.0), (50, 6.0), (89.9, 9.0), (90, 10.0), (99, 10.0), (100, 10.0)]
)
def test_a_percentile_is_the_value_at_that_share_of_the_sorted_ones(share: int | float, value: float) -> None:
    assert percentile([10.0, 1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0, 5.0], share) == value


def test_one_value_is_every_percentile() -> None:
    assert percentile([3.0], 0) == percentile([3.0], 99) == 3.0


@pytest.mark.parametrize(("values", "share"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_nothing_has_no_percentile(values: list[float], share: int) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, share)
