import pytest
import torch

from sigmascope.errors import ConfigError
from sigmascope.lora.merge import MergeMethod, require_weights


def deltas() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {position: torch.randn(6, 5, generator=generator) for position in (0, 2)}


def test_linear_is_the_sum() -> None:
    parts = deltas()
    assert torch.equal(MergeMethod().combine("layer", parts), parts[0] + parts[2])


def test_ties_keeps_what_one_change_alone_has() -> None:
    one, other = torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    assert torch.equal(MergeMethod("ties", 1.0).combine("layer", {0: one, 1: other}), one + other)


def test_dare_repeats_itself_for_module_seed_and_position_only() -> None:
    parts = deltas()
    method = MergeMethod("dare", 0.5, seed=3)
    merged = method.combine("layer", parts)
    assert torch.equal(merged, method.combine("layer", dict(reversed(parts.items()))))
    for other in (
        MergeMethod("dare", 0.5, seed=4).combine("layer", parts),
        method.combine("other", parts),
        method.combine("layer", {1: parts[0], 2: parts[2]}),
    ):
        assert not torch.equal(merged, other)


def test_dare_drops_for_each_lora_by_itself() -> None:
    ones = {position: torch.ones(40, 40) for position in range(2)}
    merged = MergeMethod("dare", 0.5).combine("layer", ones)
    assert set(merged.flatten().tolist()) == {0.0, 2.0, 4.0}


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (MergeMethod(density=0.3), "linear"),
        (MergeMethod("ties", 0.25), "ties, density 0.25"),
        (MergeMethod("ties_mergekit", 0.25), "ties_mergekit, density 0.25"),
        (MergeMethod("dare", 0.5, 7), "dare, density 0.5, seed 7"),
    ],
)
def test_the_text_says_what_counts(method: MergeMethod, text: str) -> None:
    assert method.describe() == text


def test_a_density_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--density"):
        MergeMethod("ties", 0.0)


def test_weights_are_one_for_each_lora() -> None:
    assert require_weights(None, 2) == (1.0, 1.0)
    assert require_weights((0.5, -1.0), 2) == (0.5, -1.0)
    with pytest.raises(ConfigError, match="1 number for 2 LoRAs"):
        require_weights((1.0,), 2)
    with pytest.raises(ConfigError, match="nan"):
        require_weights((1.0, float("nan")), 2)
