"""Stored factors against torch.linalg.svd in float64: rank, error at every rank, precision, scale."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.decompose import RoundedFactors, at_full_rank, decompose

SHAPES = {
    "wide Linear": (150, 260),
    "tall Linear": (260, 150),
    "square Linear": (160, 160),
    "small Linear": (24, 31),
    "one output": (1, 40),
    "one input": (40, 1),
    "1×1 convolution": (140, 150, 1, 1),
    "3×3 convolution": (136, 20, 3, 3),
    "convolution to 4 channels": (4, 40, 3, 3),
    "1-d convolution": (30, 16, 5),
    "3-d convolution": (24, 6, 3, 3, 3),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half a unit in the last place, at worst: of values that are just above a power of two.
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""What rounding both factors adds to the error, as a share of ‖ΔW‖."""
PRECISION = 1e-4  # of each squared error


def random_change(shape: tuple[int, ...], power: float = 0.6, seed: int = 0) -> Tensor:
    """A float32 change with singular values that fall by a power law, as those of fine-tunes do."""
    rows, columns = shape[0], math.prod(shape[1:])
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, min(rows, columns), generator=generator, dtype=torch.float64)).Q
        for size in (rows, columns)
    )
    values = torch.arange(1, min(rows, columns) + 1, dtype=torch.float64) ** -power
    change: Tensor = ((left * values) @ right.T).reshape(shape).float()
    return change


def singular_values(delta: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(delta.double().flatten(1))
    return values


def dense_error(delta: Tensor, stored: RoundedFactors, rank: int) -> float:
    """‖ΔW − up·down‖² of the first columns, as any reader of the file forms it."""
    up, down = stored.factors.up.double()[:, :rank], stored.factors.down.double()[:rank]
    return float((delta.double().flatten(1) - up @ down).square().sum())


def assert_errors_are_true(delta: Tensor, stored: RoundedFactors) -> None:
    assert len(stored.errors) == stored.factors.rank + 1
    for rank in range(stored.factors.rank + 1):
        assert float(stored.errors[rank]) == pytest.approx(
            dense_error(delta, stored, rank), rel=PRECISION, abs=0.0
        )


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 5, 16, 9999])
def test_the_errors_are_true_at_every_rank_and_near_the_optimum(
    kind: str, dtype: torch.dtype, rank: int
) -> None:
    delta = random_change(SHAPES[kind])
    stored = decompose(delta, rank, dtype, with_spectrum=True)
    assert_errors_are_true(delta, stored)
    sigma = singular_values(delta)
    kept = stored.factors.rank
    assert kept == min(rank, len(sigma))
    optimum, total = float(sigma[kept:].norm()), float(sigma.norm())
    assert stored.error_norm <= math.hypot(1.001 * optimum, ROUNDING[dtype] * total)
    assert stored.factors.up.dtype == stored.factors.down.dtype == dtype
    assert stored.factors.alpha == kept
    assert stored.factors.weight_shape == SHAPES[kind]


@pytest.mark.parametrize("kind", SHAPES)
def test_the_error_is_the_root_sum_square_of_the_discarded_singular_values(kind: str) -> None:
    delta = random_change(SHAPES[kind])
    stored = decompose(delta, 3, torch.float32)
    discarded = float(singular_values(delta)[3:].norm())
    total = float(delta.double().norm())
    # Exactly decomposed layers to float32's rounding, iterated ones to the tolerance from above.
    assert stored.error_norm == pytest.approx(discarded, rel=1e-3, abs=1e-6 * total)
    assert stored.error_norm >= discarded * (1 - 1e-7)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_spectrum_is_the_leading_part_of_all_singular_values(kind: str) -> None:
    delta = random_change(SHAPES[kind])
    spectrum = decompose(delta, 6, torch.float32, with_spectrum=True).spectrum
    sigma = singular_values(delta)
    torch.testing.assert_close(spectrum.values, sigma[: len(spectrum.values)], rtol=2e-3, atol=0.0)
    assert spectrum.total_energy == pytest.approx(float(sigma.square().sum()), rel=1e-12)
    assert len(spectrum.values) == min(6, len(sigma))


@pytest.mark.parametrize("rank", [1, 4, 30])
@pytest.mark.parametrize("shape", [(50, 60), (320, 200), (40, 30, 3, 3)])
@pytest.mark.parametrize("asked", [1, 9])
def test_a_planted_rank_comes_back_and_nothing_more(shape: tuple[int, ...], rank: int, asked: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    columns = math.prod(shape[1:])
    left, right = (
        torch.randn(rows, rank, generator=generator, dtype=torch.float64) for rows in (shape[0], columns)
    )
    delta = (left @ right.T).reshape(shape).float()
    stored = decompose(delta, asked * rank, torch.float32, with_spectrum=True)
    assert stored.factors.rank == rank
    assert stored.error_norm <= 1e-6 * float(delta.double().norm())
    assert_errors_are_true(delta, stored)
    if asked > 1 and rank < 30:
        assert stored.spectrum.complete


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(150, 200), (40, 30)])
def test_cutting_gives_the_factors_of_the_smaller_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    delta = random_change(shape)
    stored = decompose(delta, 12, dtype)
    cut = stored.cut(5)
    assert torch.equal(cut.factors.up, stored.factors.up[:, :5])
    assert torch.equal(cut.factors.down, stored.factors.down[:5])
    assert cut.factors.alpha == 5.0
    assert cut.error_norm == pytest.approx(math.sqrt(dense_error(delta, stored, 5)), rel=PRECISION)
    optimum = float(singular_values(delta)[5:].norm())
    assert cut.error_norm <= math.hypot(1.001 * optimum, ROUNDING[dtype] * float(delta.norm()))
    assert stored.cut(12) is stored


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-7, 1e20, 3e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(30, 40), (200, 200)])
def test_any_scale_that_the_storage_holds_is_decomposed_alike(
    shape: tuple[int, ...], dtype: torch.dtype, magnitude: float
) -> None:
    delta = (random_change(shape).double() * magnitude).float()
    stored = decompose(delta, 8, dtype)
    assert_errors_are_true(delta, stored)
    sigma = singular_values(delta)
    optimum = float(sigma[8:].norm())
    assert stored.error_norm <= math.hypot(1.001 * optimum, ROUNDING[dtype] * float(sigma.norm()))


@pytest.mark.parametrize("rank", [4, 9999])
@pytest.mark.parametrize("magnitude", [1e12, 1e20, 1e30])
def test_factors_beyond_the_storage_are_refused_with_a_way_out(magnitude: float, rank: int) -> None:
    delta = random_change((40, 50)).mul(magnitude)
    with pytest.raises(NonFiniteError, match=r"do not fit torch\.float16.*float or bf16"):
        decompose(delta, rank, torch.float16)


def test_factors_too_small_for_the_storage_have_no_more_singular_values_and_a_whole_error() -> None:
    delta = random_change((40, 50)).mul(1e-20)
    stored = decompose(delta, 4, torch.float16)
    assert stored.error_norm == pytest.approx(float(delta.double().norm()), rel=1e-9)
    assert stored.spectrum.complete
    assert stored.spectrum.significant == 0


def test_what_fades_below_the_storage_ends_the_spectrum() -> None:
    left, right = (
        torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(seed))).Q
        for seed in (0, 1)
    )
    delta = (left.double() * torch.logspace(-4, -18, 40, dtype=torch.float64) @ right.double().T).float()
    stored = decompose(delta, 40, torch.float16, with_spectrum=True)
    assert stored.spectrum.complete
    assert_errors_are_true(delta, stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30, 40), (300, 300), (4, 10, 3, 3)])
def test_ill_scaled_rows_and_columns_keep_true_errors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    delta = random_change(shape)
    delta[0] *= 1e3
    delta[:, 1] *= 1e-4
    stored = decompose(delta, 6, dtype, with_spectrum=True)
    assert_errors_are_true(delta, stored)
    optimum = float(singular_values(delta)[stored.factors.rank :].norm())
    total = float(delta.double().norm())
    assert stored.error_norm <= math.hypot(1.001 * optimum, ROUNDING[dtype] * total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3), (300, 400), (1, 1), (8, 2, 3, 3)])
@pytest.mark.parametrize("rank", [1, 9999])
def test_a_change_of_nothing_is_zero_factors_without_error(
    shape: tuple[int, ...], dtype: torch.dtype, rank: int
) -> None:
    stored = decompose(torch.zeros(shape), rank, dtype, with_spectrum=True)
    assert stored.error_norm == 0.0
    assert not stored.factors.delta().any()
    assert stored.spectrum.complete
    assert stored.spectrum.significant == 0


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_rank_needs_no_singular_values(kind: str, dtype: torch.dtype) -> None:
    delta = random_change(SHAPES[kind])
    stored = decompose(delta, 9999, dtype)
    assert stored.spectrum.values.numel() == 0
    assert stored.error_norm == pytest.approx(
        math.sqrt(dense_error(delta, stored, stored.factors.rank)), rel=1e-9
    )
    assert stored.error_norm <= ROUNDING[dtype] * float(delta.double().norm())
    assert math.isnan(float(stored.errors[0]))


def test_full_rank_in_the_change_s_own_precision_loses_nothing() -> None:
    assert at_full_rank(random_change((20, 30)), torch.float32).error_norm == 0.0


def test_double_precision_is_kept() -> None:
    delta = torch.randn(140, 150, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stored = decompose(delta, 10, torch.float64)
    optimum = float(torch.linalg.svdvals(delta)[10:].norm())
    assert stored.error_norm == pytest.approx(optimum, rel=1e-12)


@pytest.mark.parametrize("shape", [(300, 320), (40, 50)])
def test_a_rounded_copy_for_the_iterations_leaves_the_errors_true(shape: tuple[int, ...]) -> None:
    delta = random_change(shape)
    stored = decompose(delta, 8, torch.float32, norm=float(delta.double().norm()), rounded=delta.bfloat16())
    assert_errors_are_true(delta, stored)
    assert stored.error_norm <= 1.001 * float(singular_values(delta)[8:].norm())


def test_the_same_change_gives_the_same_bits() -> None:
    first, second = (decompose(random_change((200, 300)), 16, torch.bfloat16) for _ in range(2))
    assert torch.equal(first.factors.up, second.factors.up)
    assert torch.equal(first.factors.down, second.factors.down)
    assert torch.equal(first.errors, second.errors)


kernels = st.sampled_from([(), (1, 1), (3, 3), (2, 3, 1), (3,)])


@settings(deadline=None, max_examples=80)
@given(
    out=st.integers(1, 40),
    inner=st.integers(1, 30),
    kernel=kernels,
    rank=st.integers(1, 60),
    dtype=st.sampled_from(DTYPES),
    power=st.floats(0.0, 4.0),
    exponent=st.integers(-6, 3),
    seed=st.integers(0, 999),
)
def test_any_shape_dtype_and_rank(
    out: int,
    inner: int,
    kernel: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    power: float,
    exponent: int,
    seed: int,
) -> None:
    delta = random_change((out, inner, *kernel), power, seed) * 10.0**exponent
    stored = decompose(delta, rank, dtype, with_spectrum=True)
    assert_errors_are_true(delta, stored)
    sigma = singular_values(delta)
    assert stored.factors.rank <= min(rank, len(sigma))
    # float16 has no more than 10 bits below 6·10⁻⁵, where small changes put their factors.
    rounding = 0.02 if dtype == torch.float16 and exponent < -3 else ROUNDING[dtype]
    if (
        min(delta.flatten(1).shape) <= 4
    ):  # of few values roundings do not average out: half an eps for up and for down
        rounding = max(rounding, math.sqrt(2) * torch.finfo(dtype).eps / 2)
    optimum, total = float(sigma[rank:].norm()), float(sigma.norm())
    assert stored.error_norm <= math.hypot(1.001 * optimum, rounding * total) + 1e-30
