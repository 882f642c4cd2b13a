"""The errors that a decomposition on the GPU reports are those that float64 finds on the CPU."""

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from tests.gpu.conftest import ON_CPU
from torch import Tensor

from sigmascope.lora.decompose import RoundedFactors, decompose
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.linalg import fast_dtype
from sigmascope.lora.statistics import LayerMetric, Moments

if TYPE_CHECKING:
    from tests.conftest import MakePair

pytestmark = pytest.mark.gpu

SHAPES = [(160, 640), (80, 720)] if ON_CPU else [(1280, 5120), (320, 2880)]
RANKS = [4, 64, 9999]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RIDGE = 1e-2
EVERY = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
EACH_RANK = pytest.mark.parametrize("rank", RANKS)
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "×".join(map(str, shape)))


@cache
def planted(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A change in float32, and its singular values: they fall as those of trained layers do."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(rows)
    kept = min(shape)
    left = torch.linalg.qr(torch.randn(rows, kept, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, kept, generator=generator, dtype=torch.float64)).Q
    values = torch.arange(1, kept + 1, dtype=torch.float64) ** -0.7
    return ((left * values) @ right.mT).float(), values


def remainder(change: Tensor, found: RoundedFactors) -> Tensor:
    """ΔW − up·down in float64 on the CPU: the factors' alpha is their rank."""
    up, down = (factor.cpu().double() for factor in (found.factors.up, found.factors.down))
    scale = found.factors.alpha / up.shape[1]
    return change.double() - scale * up @ down


def holds(reported: float, true: float, whole: float) -> None:
    """Within 1e-4 of the true error; of an error that is float32's rounding, within that rounding."""
    assert abs(reported - true) <= 1e-4 * true + 1e-6 * whole, (reported, true, whole)


@EVERY
@EACH_RANK
@EACH_SHAPE
def test_the_reported_error_is_the_true_one_and_near_the_optimum(
    shape: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    change, values = planted(shape)
    found = decompose(change.to(device), min(rank, *shape), dtype)
    assert found.factors.up.device == device
    assert found.factors.up.dtype == dtype
    whole = float(values.square().sum().sqrt())
    true = float(remainder(change, found).norm())
    holds(found.error_norm, true, whole)
    optimum = float(values[rank:].square().sum().sqrt())
    rounding = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype] * whole
    assert true <= math.hypot(optimum * (1 + 2e-3), rounding)


@cache
def moments(size: int, kept: int | None, seed: int) -> Moments:
    """Second moments of few directions; whole, or a diagonal and those directions."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(size, 24, generator=generator) * torch.arange(1, 25) ** -0.5
    diagonal = 0.1 + torch.rand(size, generator=generator)
    if kept is None:
        full = directions @ directions.mT + torch.diag(diagonal)
        return Moments(full.diagonal().clone(), full)
    return Moments(diagonal, None, directions[:, :kept].contiguous())


@cache
def matrix_of(size: int, kept: int | None, seed: int) -> Tensor:
    """R·Rᵀ = moments + ridge · their mean diagonal, in float64."""
    held = moments(size, kept, seed)
    if held.full is not None:
        matrix = held.full.double()
    else:
        assert held.low_rank is not None
        matrix = torch.diag(held.diagonal.double()) + held.low_rank.double() @ held.low_rank.double().mT
    return matrix + RIDGE * matrix.diagonal().mean() * torch.eye(size, dtype=torch.float64)


def weighted_norm(error: Tensor, of_outputs: Tensor, of_inputs: Tensor) -> float:
    """‖SᵀER‖, from ‖SᵀER‖² = tr(Eᵀ·SSᵀ·E·RRᵀ)."""
    return math.sqrt(float(((of_outputs @ error @ of_inputs) * error).sum().clamp_min(0)))


@EVERY
@EACH_RANK
@EACH_SHAPE
def test_the_error_in_the_statistics_metric_is_the_true_one(
    shape: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The narrow side has whole moments, the wide one a diagonal and directions, as `lora statistics` keeps them."""
    rows, columns = shape
    change, _ = planted(shape)
    metric = LayerMetric(
        moments(columns, 16, 1).root(RIDGE, device, torch.float32),
        moments(rows, None, 2).root(RIDGE, device, torch.float32),
    )
    found = decompose(change.to(device), min(rank, *shape), dtype, metric=metric)
    of_outputs, of_inputs = matrix_of(rows, None, 2), matrix_of(columns, 16, 1)
    whole = weighted_norm(change.double(), of_outputs, of_inputs)
    left = remainder(change, found)
    holds(math.sqrt(max(float(found.weighted[-1]), 0.0)), weighted_norm(left, of_outputs, of_inputs), whole)
    holds(found.error_norm, float(left.norm()), float(change.double().norm()))


@pytest.mark.skipif(ON_CPU, reason="of the CPU, tests/lora/extract tells")
def test_iterations_are_in_bfloat16_where_the_device_is_fast_at_it(device: torch.device) -> None:
    matrix = torch.randn(4096, 4096, device=device)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        some = matrix.to(dtype)
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        some @ some
        start.record()
        for _ in range(10):
            some @ some
        end.record()
        end.synchronize()
        seconds[dtype] = start.elapsed_time(end)
    is_fast = seconds[torch.bfloat16] * 2 < seconds[torch.float32]
    assert (fast_dtype(device) == torch.bfloat16) == is_fast, seconds


BACKENDS: list[Any] = [
    backend
    for backend in (
        torch.backends,
        torch.backends.cuda.matmul,
        getattr(torch.backends.mkldnn, "matmul", None),
    )
    if hasattr(backend, "fp32_precision")  # since PyTorch 2.9
]
CHOICES: dict[str, Callable[[], None]] = {
    "old name, high": lambda: torch.set_float32_matmul_precision("high"),
    "old name, medium": lambda: torch.set_float32_matmul_precision("medium"),
    "old flag": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}
if BACKENDS:
    CHOICES |= {
        "new, of CUDA": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        "new, of all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    }


@pytest.mark.parametrize("choice", CHOICES)
def test_an_extraction_has_the_same_bits_under_each_choice_of_precision(
    choice: str, device: torch.device, make_model_pair: "MakePair"
) -> None:
    files = make_model_pair()
    options = ExtractOptions(rank=4, conv_rank=4, save_precision="float", device=str(device))

    def extracted() -> dict[str, Tensor]:
        path = files.base.with_name("lora.safetensors")
        extract_lora(files.base, files.tuned, path, options)
        tensors: dict[str, Tensor] = load_file(path)
        return tensors

    expected = extracted()
    before = [backend.fp32_precision for backend in BACKENDS]
    try:
        CHOICES[choice]()
        chosen = [backend.fp32_precision for backend in BACKENDS]
        found = extracted()
        assert found.keys() == expected.keys()
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
        assert [backend.fp32_precision for backend in BACKENDS] == chosen
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend, precision in zip(BACKENDS, before, strict=True):
            backend.fp32_precision = precision
