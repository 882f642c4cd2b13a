import math
from collections.abc import Callable

import pytest
import torch

from sigmascope.errors import ConfigError
from sigmascope.lora.budget import Budget, StorageCost, parse_weights
from sigmascope.lora.linalg import Spectrum

FREE = StorageCost(2)
SHAPES: dict[str, tuple[int, ...]] = {"mid.conv": (16, 8, 3, 3), "up.attn": (40, 24)}


def spectra() -> dict[str, Spectrum]:
    built = {}
    for layer, shape in SHAPES.items():
        values = torch.arange(1, min(shape[0], math.prod(shape[1:])) + 1, dtype=torch.float64) ** -0.7
        built[layer] = Spectrum(values, float(values.square().sum()), shape)
    return built


def hint_of(error: ConfigError) -> str:
    return error.hint or ""


def test_an_error_below_rounding_is_refused_with_one_that_works() -> None:
    rough = StorageCost(2, rounding=0.00234)
    with pytest.raises(ConfigError, match=r"--max_error 0\.1% is not above .* 0\.234%") as refused:
        Budget(max_error=0.001).allocate(spectra(), rough)
    assert hint_of(refused.value).startswith(
        "Give --max_error 0.235% or more, or store with --save_precision float"
    )
    assert Budget(max_error=0.00235).allocate(spectra(), rough).error <= 0.00235


def test_an_error_of_exactly_the_rounding_is_refused_with_one_that_works() -> None:
    """float32: 1e-6 is 0.0001 %, whose product with 100 is a little less."""
    exact = StorageCost(4, rounding=1e-6)
    with pytest.raises(ConfigError, match=r"--max_error 0\.0001% is not above .* 0\.0001%") as refused:
        Budget(max_error=1e-6).allocate(spectra(), exact)
    assert hint_of(refused.value) == "Give --max_error 0.000101% or more."
    assert Budget(max_error=1.01e-6).allocate(spectra(), exact).error <= 1.01e-6


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_an_error_that_is_no_limit_says_what_one_is(share: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"--max_error {share * 100:g}% is not a limit: .* above 0% and below 100%"
    ):
        Budget(max_error=share)


def test_an_error_that_the_limits_exceed_is_refused_with_one_that_works() -> None:
    with pytest.raises(ConfigError, match=r"--max_error 5% cannot be met") as refused:
        Budget(max_error=0.05, max_rank=2).allocate(spectra(), FREE)
    least = float(hint_of(refused.value).removeprefix("Give --max_error ").split("%")[0]) / 100
    assert Budget(max_error=least, max_rank=2).allocate(spectra(), FREE).error <= least


def test_a_size_below_any_module_is_refused_with_one_that_works() -> None:
    with pytest.raises(ConfigError, match=r"--max_size 100 bytes is too small") as refused:
        Budget(max_bytes=100).allocate(spectra(), FREE)
    least = int(hint_of(refused.value).removeprefix("Give --max_size ").split(" ")[0])
    assert sum(Budget(max_bytes=least).allocate(spectra(), FREE).ranks.values()) == 1
    with pytest.raises(ConfigError):
        Budget(max_bytes=least - 1).allocate(spectra(), FREE)


def test_a_size_below_the_least_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        Budget(max_bytes=1_500, min_rank=4).allocate(spectra(), FREE)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Budget(), "a size or an error, not both"),
        (lambda: Budget(max_bytes=1, max_error=0.1), "a size or an error, not both"),
        (lambda: Budget(max_bytes=0), "--max_size 0 holds nothing"),
        (lambda: Budget(max_error=0.0), "--max_error 0% is not a limit"),
        (lambda: Budget(max_error=1.0), "--max_error 100% is not a limit"),
        (lambda: Budget(max_error=math.nan), "--max_error nan% is not a limit"),
        (lambda: Budget(max_bytes=9, weights=(("a", -1.0),)), "--weight_for a=-1 is not a weight"),
        (lambda: Budget(max_bytes=9, weights=(("a(", 1.0),)), "not a valid regular expression"),
        (lambda: Budget(max_bytes=9, max_rank=0), "--max_rank 0 keeps nothing"),
        (lambda: Budget(max_bytes=9, max_rank=2, min_rank=3), "--max_rank 2 is below"),
        (lambda: Budget(max_bytes=9, min_rank=-1), "below 0"),
        (lambda: parse_weights(["mid"]), "has no value"),
        (lambda: parse_weights(["mid=much"]), "--weight_for mid=much is not a weight"),
        (lambda: parse_weights(["mid=nan"]), "is not a weight"),
    ],
)
def test_what_makes_no_sense_is_refused(build: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build()


def test_weights_that_match_no_layer_are_refused() -> None:
    budget = Budget(max_bytes=9, weights=parse_weights(["upp.attn=2"]))
    with pytest.raises(ConfigError, match=r"--weight_for .* matches none .*up\.attn"):
        budget.check(list(SHAPES))


def test_budgets_that_differ_say_different_things() -> None:
    budgets = [
        Budget(max_bytes=100),
        Budget(max_bytes=101),
        Budget(max_error=0.1),
        Budget(max_bytes=100, weights=(("a", 2.0),)),
        Budget(max_bytes=100, weights=(("a", 3.0),)),
        Budget(max_bytes=100, max_rank=4),
        Budget(max_bytes=100, max_rank=4, max_conv_rank=2),
        Budget(max_bytes=100, min_rank=4),
    ]
    assert len({budget.describe() for budget in budgets}) == len(budgets)
    assert Budget(max_bytes=9, max_rank=4) == Budget(max_bytes=9, max_rank=4, max_conv_rank=4)
