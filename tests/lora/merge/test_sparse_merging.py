import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import merge_utils

from sigmascope.errors import ConfigError
from sigmascope.lora.merge import MergeMethod, dare, kth_largest, require_density, ties, trimmed


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, float("nan")])
def test_a_density_that_is_no_share_is_refused(density: float) -> None:
    with pytest.raises(ConfigError, match="--density"):
        require_density(density)


def test_trimming_keeps_the_largest_magnitudes() -> None:
    change = torch.tensor([[0.1, -5.0, 2.0], [-0.2, 3.0, 0.0]])
    expected = torch.tensor([[0.0, -5.0, 2.0], [0.0, 3.0, 0.0]])
    assert torch.equal(trimmed(change, 0.5), expected)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.floats(0.01, 1.0), st.integers(0, 999))
def test_trimming_keeps_the_share_asked_for(size: int, density: float, seed: int) -> None:
    change = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = trimmed(change, density)
    assert int((kept != 0).sum()) == max(1, round(density * size))


@pytest.mark.parametrize("kind", ["normal", "equal", "few", "sorted", "mostly zero"])
@pytest.mark.parametrize("share", [1e-5, 0.01, 0.5, 0.9, 1.0])
def test_the_kth_largest_of_many_is_that_of_sorting(kind: str, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=generator).abs()
    if kind == "equal":
        values.fill_(2.0)
    elif kind == "few":
        values = values.mul(3).round()
    elif kind == "sorted":
        values = values.sort().values
    elif kind == "mostly zero":
        values[torch.rand(100_000, generator=generator) < 0.99] = 0.0
    k = max(1, round(share * len(values)))
    assert float(kth_largest(values, k)) == float(values.sort(descending=True).values[k - 1])


def test_ties_by_hand() -> None:
    one = torch.tensor([1.0, -2.0, 3.0, 0.5])
    two = torch.tensor([3.0, 5.0, -1.0, 0.0])
    three = torch.tensor([2.0, -1.0, -1.0, 0.0])
    # Nothing is trimmed. The sums 6, 2, 1 and 0.5 elect +, and those that have it are averaged.
    expected = torch.tensor([2.0, 5.0, 3.0, 0.5])
    torch.testing.assert_close(ties([one, two, three], 1.0), expected)


@pytest.mark.parametrize("density", [0.25, 0.5, 0.8])
def test_ties_is_that_of_peft(density: float) -> None:
    generator = torch.Generator().manual_seed(0)
    changes = [torch.randn(8, 10, generator=generator) for _ in range(3)]
    expected = merge_utils.ties(changes, torch.ones(3), density)
    torch.testing.assert_close(ties(changes, density), expected)


@pytest.mark.parametrize("weights", [(0.7, 0.5), (0.5, -1.0), (2.0, 0.1)])
@pytest.mark.parametrize("density", [0.25, 0.5, 0.8])
def test_ties_with_weights_is_that_of_peft(density: float, weights: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    changes = [torch.randn(8, 10, generator=generator) for _ in range(2)]
    expected = merge_utils.ties(changes, torch.tensor(weights), density)
    merged = MergeMethod("ties", density).combine("layer", dict(enumerate(changes)), dict(enumerate(weights)))
    torch.testing.assert_close(merged, expected)


def test_mergekit_elects_by_the_weighted_changes() -> None:
    changes = {0: torch.tensor([2.0, 4.0]), 1: torch.tensor([-3.0, 1.0])}
    weights = {0: 0.75, 1: 0.25}
    # First value: at strength 1 the sum -1 elects -, so -3 · 0.25. Weighted, 1.5 - 0.75 elects +, so 2 · 0.75.
    # Second: both are +, so the mean of 3 and 0.25.
    elected_first = MergeMethod("ties", 1.0).combine("layer", changes, weights)
    weighted_first = MergeMethod("ties_mergekit", 1.0).combine("layer", changes, weights)
    torch.testing.assert_close(elected_first, torch.tensor([-0.75, 1.625]))
    torch.testing.assert_close(weighted_first, torch.tensor([1.5, 1.625]))


def test_ties_trims_before_it_elects() -> None:
    one, two = torch.tensor([4.0, 0.1]), torch.tensor([-1.0, 3.0])
    torch.testing.assert_close(ties([one, two], 0.5), torch.tensor([4.0, 3.0]))


def test_signs_that_cancel_elect_nothing() -> None:
    assert torch.equal(ties([torch.tensor([1.0]), torch.tensor([-1.0])], 1.0), torch.zeros(1))


def test_one_change_at_full_density_stays_itself() -> None:
    change = torch.randn(4, 5)
    assert torch.equal(ties([change], 1.0), change)


def test_what_dare_keeps_is_rescaled() -> None:
    change = torch.randn(50, 40)
    kept = dare(change, 0.25, torch.Generator().manual_seed(0))
    where = kept != 0
    torch.testing.assert_close(kept[where], 4.0 * change[where])
    assert float(where.double().mean()) == pytest.approx(0.25, abs=0.05)


def test_dare_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(1)
    change = torch.tensor([1.0, -2.0, 3.0])
    mean = torch.stack([dare(change, 0.5, generator) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, change, rtol=0.1, atol=0.1)


def test_dare_repeats_itself_for_a_seed() -> None:
    change = torch.randn(6, 6)
    first, again = (dare(change, 0.5, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again)


def test_dare_at_full_density_drops_nothing() -> None:
    change = torch.randn(3, 3)
    assert torch.equal(dare(change, 1.0, torch.Generator()), change)
