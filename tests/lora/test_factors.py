from collections.abc import Callable
from math import nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.factors import LoraFactors, add_product

MakeFactors = Callable[..., LoraFactors]


def formed(factors: LoraFactors) -> Tensor:
    """ΔW by its definition, in float64."""
    return factors.alpha / factors.rank * (factors.up.double() @ factors.down.double())


Recipe = tuple[tuple[int, int], int, float, int]


def recipes(out: int | None = None, inner: int | None = None) -> st.SearchStrategy[Recipe]:
    """Weight shape, rank, alpha and seed."""
    sides = st.tuples(*(st.just(side) if side else st.integers(1, 9) for side in (out, inner)))
    return st.tuples(sides, st.integers(1, 12), st.floats(-8, 8), st.integers(0, 10_000))


def mixed(recipe: Recipe) -> LoraFactors:
    (out, inner), rank, alpha, seed = recipe
    generator = torch.Generator().manual_seed(seed)
    up, down = torch.randn(out, rank, generator=generator), torch.randn(rank, inner, generator=generator)
    return LoraFactors(up, down, alpha, (out, inner))


@settings(deadline=None, max_examples=40)
@given(recipes())
def test_norm_from_gram_matrices_is_that_of_the_formed_change(recipe: Recipe) -> None:
    factors = mixed(recipe)
    assert factors.frobenius_norm() == pytest.approx(float(formed(factors).norm()), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(recipes(5, 7), recipes(5, 7))
def test_inner_product_is_that_of_the_formed_changes(one: Recipe, other: Recipe) -> None:
    first, second = mixed(one), mixed(other)
    expected = float((formed(first) * formed(second)).sum())
    assert first.inner(second) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(recipes())
def test_singular_values_are_those_of_the_formed_change(recipe: Recipe) -> None:
    factors = mixed(recipe)
    expected = torch.linalg.svdvals(formed(factors))
    found = factors.singular_values()
    torch.testing.assert_close(found, expected[: found.shape[0]], rtol=1e-9, atol=1e-9)
    assert float(expected[found.shape[0] :].sum()) == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(recipes(4, 6), recipes(4, 6), st.floats(-2, 2))
def test_concatenation_is_the_weighted_sum(one: Recipe, other: Recipe, weight: float) -> None:
    first, second = mixed(one), mixed(other)
    total = LoraFactors.concatenate([first, second], [weight, 1.0])
    assert total.rank == first.rank + second.rank
    torch.testing.assert_close(formed(total), weight * formed(first) + formed(second), rtol=1e-5, atol=1e-5)


def test_a_convolution_by_the_change_is_down_then_pointwise_up(make_factors: MakeFactors) -> None:
    factors = make_factors((6, 3, 3, 3), rank=2, alpha=1.0)
    image = torch.randn(1, 3, 8, 8)
    two_steps = functional.conv2d(
        functional.conv2d(image, factors.down.reshape(2, 3, 3, 3)), factors.up.reshape(6, 2, 1, 1)
    )
    torch.testing.assert_close(functional.conv2d(image, factors.delta()), two_steps.mul(0.5))


def test_norm_of_millions_of_values_is_not_low(make_factors: MakeFactors) -> None:
    factors = LoraFactors(torch.full((4096, 1), 0.1), torch.full((1, 4096), 0.1), 1.0, (4096, 4096))
    exact = 4096 * float(torch.tensor(0.1)) ** 2
    assert factors.frobenius_norm() == pytest.approx(exact, rel=1e-12)


def test_cosine_of_a_change_with_itself_its_negative_and_zero(make_factors: MakeFactors) -> None:
    factors = make_factors((5, 4), rank=2)
    negative = LoraFactors(-factors.up, factors.down, factors.alpha, (5, 4))
    zero = LoraFactors(torch.zeros(5, 1), torch.zeros(1, 4), 1.0, (5, 4))
    assert factors.cosine(factors) == pytest.approx(1.0)
    assert factors.cosine(negative) == pytest.approx(-1.0)
    assert factors.cosine(zero) == 0.0


def test_delta_has_the_weights_shape_and_the_asked_dtype(make_factors: MakeFactors) -> None:
    delta = make_factors((4, 2, 3, 3), rank=2, dtype=torch.bfloat16).delta(torch.float64)
    assert delta.shape == (4, 2, 3, 3)
    assert delta.dtype == torch.float64


def test_delta_in_half_precision_is_rounded_once(make_factors: MakeFactors) -> None:
    factors = make_factors((16, 16), rank=8, dtype=torch.bfloat16)
    assert torch.equal(factors.delta(torch.bfloat16), factors.delta(torch.float32).to(torch.bfloat16))


def test_scale_is_alpha_over_rank(make_factors: MakeFactors) -> None:
    assert make_factors((8, 8), rank=4, alpha=2.0).scale == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_alpha_9999_on_full_factors_means_the_whole_change(
    make_factors: MakeFactors, dtype: torch.dtype
) -> None:
    stored_alpha = float(torch.tensor(9999.0, dtype=dtype))
    assert make_factors((4, 6), rank=4, alpha=stored_alpha).scale == 1.0


def test_alpha_9999_on_fewer_than_full_factors_is_taken_at_its_word(make_factors: MakeFactors) -> None:
    assert make_factors((4, 6), rank=3, alpha=9999.0).scale == 3333.0


def test_an_ordinary_alpha_above_a_narrow_layers_rank_still_scales(make_factors: MakeFactors) -> None:
    assert make_factors((4, 320, 3, 3), rank=8, alpha=16.0).scale == 2.0


def test_a_rank_above_both_sides_is_allowed(make_factors: MakeFactors) -> None:
    factors = make_factors((3, 4), rank=7)
    assert factors.singular_values().shape == (3,)
    torch.testing.assert_close(factors.delta().double(), formed(factors), rtol=1e-5, atol=1e-6)


def test_zero_factors_are_a_zero_change() -> None:
    zero = LoraFactors(torch.zeros(3, 2), torch.zeros(2, 4), 2.0, (3, 4))
    assert zero.frobenius_norm() == 0.0
    assert torch.equal(zero.delta(), torch.zeros(3, 4))


def test_gradients_flow_through_delta() -> None:
    up, down = torch.randn(3, 2, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(LoraFactors(up, down, 2.0, (3, 4)).delta().sum(), up)
    torch.testing.assert_close(gradient, down.detach().sum(1).expand(3, 2))


@pytest.mark.parametrize(
    ("up", "down", "weight_shape", "said"),
    [
        ((3, 2), (3, 4), (3, 4), "not matrices of one rank"),
        ((3, 2, 1, 1), (2, 4), (3, 4), "not matrices of one rank"),
        ((3, 0), (0, 4), (3, 4), "rank 0"),
        ((3, 2), (2, 4), (4, 3), "change a weight of (3, 4), but the weight is (4, 3)"),
        ((3, 2), (2, 4), (3,), "not a matrix"),
    ],
)
def test_factors_that_fit_nothing_are_refused(
    up: tuple[int, ...], down: tuple[int, ...], weight_shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(LoraFormatError) as refusal:
        LoraFactors(torch.zeros(up), torch.zeros(down), 1.0, weight_shape)
    assert said in str(refusal.value)


def test_integer_factors_are_refused() -> None:
    with pytest.raises(LoraFormatError, match="not floating point"):
        LoraFactors(torch.zeros(3, 2, dtype=torch.int8), torch.zeros(2, 4), 1.0, (3, 4))


def test_an_alpha_of_nan_is_refused(make_factors: MakeFactors) -> None:
    with pytest.raises(NonFiniteError, match="alpha is nan"):
        make_factors((3, 4), rank=2, alpha=nan)


def test_changes_of_different_weights_are_not_combined(make_factors: MakeFactors) -> None:
    linear, convolution = make_factors((4, 9), rank=2), make_factors((4, 1, 3, 3), rank=2)
    with pytest.raises(ModelMismatchError, match=r"\(4, 1, 3, 3\), \(4, 9\)"):
        linear.inner(convolution)
    with pytest.raises(ModelMismatchError):
        LoraFactors.concatenate([linear, convolution])


def test_nothing_cannot_be_concatenated(make_factors: MakeFactors) -> None:
    with pytest.raises(LoraFormatError):
        LoraFactors.concatenate([])
    with pytest.raises(LoraFormatError, match="1 LoRAs with 2 weights"):
        LoraFactors.concatenate([make_factors((4, 4), rank=1)], [1.0, 2.0])


def test_a_rank_above_the_weight_s_own_size_takes_no_matrix_of_that_size() -> None:
    """Gram matrices of a million columns would take 8 TB; every value of ΔW is a million quarters."""
    up, down = torch.full((2, 1 << 20), 0.5), torch.full((1 << 20, 3), 0.5)
    factors = LoraFactors(up, down, float(1 << 20), (2, 3))
    assert factors.frobenius_norm() == pytest.approx((1 << 18) * 6**0.5, rel=1e-12)
    assert factors.cosine(factors) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(320, 320), (64, 577), (40, 7), (4, 320)])
@pytest.mark.parametrize("rank", [1, 16, 128, 512])
@pytest.mark.parametrize("strength", [1.0, -0.25, 0.7])
def test_a_sum_is_rounded_once_whatever_the_rank(shape: tuple[int, int], rank: int, strength: float) -> None:
    torch.manual_seed(0)
    weight = torch.rand(shape) + 1.0
    up, down = 0.001 * torch.randn(shape[0], rank), 0.001 * torch.randn(rank, shape[1])
    exact = weight.double() + strength * (up.double() @ down.double())
    add_product(weight, up, down, strength)
    of_the_sum = 2.0**-24 * 2.0 ** exact.log2().floor()  # half a step of float32
    of_the_product = 2.0**-24 * (rank + 2) * abs(strength) * (up.double().abs() @ down.double().abs())
    assert bool(((weight.double() - exact).abs() <= of_the_sum + of_the_product).all())
