import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora import validate
from sigmascope.lora.adapters import DiffChange, DoraChange, LohaChange, SetChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.pairs import open_pair
from sigmascope.lora.validate import Change, Residual, ResidualMeter, subtraction

KEY = "denoiser.layer.weight"
BIAS = "denoiser.layer.bias"
Measure = Callable[..., Residual]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Write a pair that holds one tensor, and measure a change of it."""

    def call(base: Tensor, tuned: Tensor, change: Change | None = None, key: str = KEY) -> Residual:
        other = {"denoiser.other.weight": torch.zeros(2, 2)}
        save_file({key: base, **other}, tmp_path / "base.safetensors")
        save_file({key: tuned, **other}, tmp_path / "tuned.safetensors")
        with open_pair(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors") as pair:
            return ResidualMeter(pair).measure(key, change)

    return call


def weights(*shape: int, dtype: torch.dtype = torch.float32, size: float = 0.1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    tuned = base + size * torch.randn(shape, generator=generator, dtype=torch.float64)
    return base.to(dtype), tuned.to(dtype)


def factors(*shape: int, rank: int, dtype: torch.dtype = torch.float32, alpha: float = 3.0) -> LoraFactors:
    generator = torch.Generator().manual_seed(rank)
    up = torch.randn(shape[0], rank, generator=generator)
    down = torch.randn(rank, math.prod(shape[1:]), generator=generator) * 0.05
    return LoraFactors(up.to(dtype), down.to(dtype), alpha, shape)


def true_error(base: Tensor, tuned: Tensor, change: LoraFactors) -> float:
    product = change.up.double() @ change.down.double() * (change.alpha / change.rank)
    return float((tuned.double() - base.double() - product.reshape(base.shape)).norm())


def cut_by_svd(base: Tensor, tuned: Tensor, rank: int, dtype: torch.dtype) -> LoraFactors:
    u, sigma, vh = torch.linalg.svd((tuned.double() - base.double()).flatten(1), full_matrices=False)
    up, down = u[:, :rank] * sigma[:rank].sqrt(), sigma[:rank, None].sqrt() * vh[:rank]
    return LoraFactors(up.to(dtype), down.to(dtype), float(rank), tuple(base.shape))


def test_the_norm_is_the_exact_sum_of_squares(measure: Measure) -> None:
    base, tuned = weights(700, 800, dtype=torch.bfloat16)
    squares = (tuned.double() - base.double()).square().flatten().tolist()
    found = measure(base, tuned)
    assert found.delta_norm == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-7)
    assert found.error_norm == found.delta_norm


def test_a_long_sum_of_equal_values_does_not_drift(measure: Measure) -> None:
    """They keep the rounding of a running sum on one side: what sums in float64 are for."""
    base, tuned = torch.zeros(1024, 1024), torch.full((1024, 1024), 0.1)
    exact = float(tuned[0, 0]) * 1024
    assert measure(base, tuned).delta_norm == pytest.approx(exact, rel=5e-7)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(40, 60), (24, 10, 3, 3), (16, 8, 1, 1), (6, 4, 3, 3, 3)])
def test_the_error_is_that_of_the_explicit_product(
    stored: torch.dtype, factor_dtype: torch.dtype, shape: tuple[int, ...], measure: Measure
) -> None:
    base, tuned = weights(*shape, dtype=stored)
    change = factors(*shape, rank=4, dtype=factor_dtype)
    assert measure(base, tuned, change).error_norm == pytest.approx(true_error(base, tuned, change), rel=1e-6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_rank_and_dtype_is_measured(data: st.DataObject, measure: Measure) -> None:
    dimensions = data.draw(st.sampled_from([2, 3, 4, 5]))
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=dimensions - 2, max_size=dimensions - 2))
    shape = (data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30)), *kernel)
    dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
    base, tuned = weights(*shape, dtype=data.draw(dtypes))
    rank = data.draw(st.integers(1, 40))
    change = factors(*shape, rank=rank, dtype=data.draw(dtypes), alpha=data.draw(st.floats(-8, 8)))
    found = measure(base, tuned, change)
    assert found.delta_norm == pytest.approx(float((tuned.double() - base.double()).norm()), rel=1e-6)
    assert found.error_norm == pytest.approx(true_error(base, tuned, change), rel=1e-5)


@pytest.mark.parametrize("block", [1, 7, 64, 65, 10_000])
def test_blocks_do_not_show(block: int, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_BLOCK_ELEMENTS", block)
    base, tuned = weights(33, 64)
    change = factors(33, 64, rank=5)
    found = measure(base, tuned, change)
    assert found.delta_norm == pytest.approx(float((tuned.double() - base.double()).norm()), rel=1e-6)
    assert found.error_norm == pytest.approx(true_error(base, tuned, change), rel=1e-6)


@pytest.mark.parametrize("rank", [3, 31, 32])
def test_the_small_error_of_float32_factors_is_not_the_rounding_of_their_product(
    rank: int, measure: Measure
) -> None:
    """Factors in float32 leave 10⁻⁷ of the change, which a product in float32 would double or hide."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(32, rank, generator=generator, dtype=torch.float64)
    change = left @ torch.randn(rank, 48, generator=generator, dtype=torch.float64)
    base, tuned = torch.zeros(32, 48), change.float()
    stored = cut_by_svd(base, tuned, rank, torch.float32)
    found = measure(base, tuned, stored)
    assert found.error_norm / found.delta_norm < 1e-6
    assert found.error_norm == pytest.approx(true_error(base, tuned, stored), rel=1e-7)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (20, 20)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_whole_change_beside_an_identity_is_measured_as_it_is_stored(
    shape: tuple[int, int], dtype: torch.dtype, measure: Measure
) -> None:
    base, tuned = weights(*shape)
    delta = (tuned - base) * 8
    identity = torch.eye(min(shape)) / 8
    up, down = (identity, delta) if shape[0] <= shape[1] else (delta, identity)
    change = LoraFactors(up.to(dtype), down.to(dtype), float(min(shape)), shape)
    assert measure(base, tuned, change).error_norm == pytest.approx(
        true_error(base, tuned, change), rel=1e-6, abs=1e-9
    )


def test_a_tiny_and_a_huge_change_keep_their_relative_error(measure: Measure) -> None:
    for size in (1e-30, 1e-18, 1e15, 1e25):
        base, tuned = torch.zeros(30, 40), weights(30, 40)[1] * size
        change = cut_by_svd(base, tuned, 4, torch.float32)
        found = measure(base, tuned, change)
        assert found.error_norm == pytest.approx(true_error(base, tuned, change), rel=1e-6)


def test_what_is_added_to_an_unchanged_weight_is_the_whole_error(measure: Measure) -> None:
    base, _ = weights(12, 16)
    change = factors(12, 16, rank=2)
    found = measure(base, base.clone(), change)
    expected = float((change.up.double() @ change.down.double() * change.scale).norm())
    assert found.delta_norm == 0.0
    assert found.error_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("key", [KEY, BIAS])
def test_a_stored_difference_leaves_what_its_dtype_rounds(key: str, measure: Measure) -> None:
    base, tuned = weights(40, 30) if key == KEY else weights(40)
    stored = (tuned - base).half()
    found = measure(base, tuned, DiffChange({"diff": stored}), key=key)
    expected = (tuned.double() - base.double() - stored.double()).norm()
    assert found.error_norm == pytest.approx(float(expected), rel=1e-6)


def test_other_kinds_are_formed_and_compared(measure: Measure) -> None:
    base, tuned = weights(12, 18)
    generator = torch.Generator().manual_seed(3)
    w = {
        name: torch.randn(*shape, generator=generator)
        for name, shape in {
            "hada_w1_a": (12, 2),
            "hada_w1_b": (2, 18),
            "hada_w2_a": (12, 2),
            "hada_w2_b": (2, 18),
        }.items()
    }
    product = (w["hada_w1_a"] @ w["hada_w1_b"]) * (w["hada_w2_a"] @ w["hada_w2_b"])
    expected = (tuned.double() - base.double() - 0.5 * product.double()).norm()
    found = measure(base, tuned, LohaChange(w, 0.5))
    assert found.error_norm == pytest.approx(float(expected), rel=1e-6)


def test_kinds_that_depend_on_the_base_get_it(measure: Measure) -> None:
    base, tuned = weights(12, 18, dtype=torch.bfloat16)
    assert measure(base, tuned, SetChange({"set_weight": tuned})).error_norm == 0.0
    direction = factors(12, 18, rank=2)
    changed = base.double() + direction.up.double() @ direction.down.double() * direction.scale
    expected = (tuned.double() - 2 * changed / changed.norm(dim=1, keepdim=True)).norm()
    dora = DoraChange(direction, torch.full((12, 1), 2.0))
    assert measure(base, tuned, dora).error_norm == pytest.approx(float(expected), rel=1e-6)


def test_a_change_of_another_shape_is_refused(measure: Measure) -> None:
    base, tuned = weights(12, 18)
    with pytest.raises(ModelMismatchError, match="does not fit"):
        measure(base, tuned, DiffChange({"diff": torch.zeros(12, 17)}))


@pytest.mark.parametrize("side", ["base", "tuned"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_are_named(side: str, value: float, measure: Measure) -> None:
    base, tuned = weights(12, 18)
    (base if side == "base" else tuned)[3, 4] = value
    with pytest.raises(NonFiniteError, match=rf"{side}\.safetensors: {KEY}"):
        measure(base, tuned, factors(12, 18, rank=2))


def test_a_change_that_overflows_float32_is_measured_all_the_same(measure: Measure) -> None:
    base, tuned = weights(12, 18)
    huge = LoraFactors(torch.full((12, 2), 3e38), torch.full((2, 18), 3e38), 2.0, (12, 18))
    assert measure(base, tuned, huge).error_norm == pytest.approx(2 * 9e76 * math.sqrt(12 * 18), rel=1e-6)


def test_a_change_that_overflows_float64_is_refused(measure: Measure) -> None:
    ends = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    parts = {end: torch.full((12, 2) if end.endswith("a") else (2, 18), 3e38) for end in ends}
    with pytest.raises(NonFiniteError, match=rf"{KEY}: .* too large"):
        measure(*weights(12, 18), LohaChange(parts, 1.0))


def test_threads_do_not_share_memory(tmp_path: Path) -> None:
    pairs = {f"denoiser.{i}.weight": weights(64 + i, 96) for i in range(12)}
    save_file({key: base for key, (base, _) in pairs.items()}, tmp_path / "base.safetensors")
    save_file({key: tuned for key, (_, tuned) in pairs.items()}, tmp_path / "tuned.safetensors")
    changes = {key: factors(*base.shape, rank=3) for key, (base, _) in pairs.items()}
    with open_pair(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors") as pair:
        meter = ResidualMeter(pair)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda key: meter.measure(key, changes[key]).error_norm, pairs))
    expected = [true_error(*pairs[key], changes[key]) for key in pairs]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 8, 60])
def test_rounding_stays_within_its_bound(rank: int) -> None:
    base, tuned = weights(80, 90)
    change = cut_by_svd(base, tuned, rank, torch.float32)
    delta = tuned - base
    block = delta.clone()
    taken = subtraction(change, base, torch.float32)
    taken.take_off(slice(0, 80), block)
    exact = delta.double() - change.up.double() @ change.down.double()
    rounding = float((block.double() - exact).norm())
    assert 0 < rounding < taken.rounding_bound(float(delta.double().norm()))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_an_empty_tensor_has_no_change_and_no_error(shape: tuple[int, ...], measure: Measure) -> None:
    empty = torch.zeros(shape)
    assert measure(empty, empty) == Residual(0.0, 0.0)
