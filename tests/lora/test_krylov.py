import math
from functools import cache
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.lora import linalg as krylov
from sigmascope.lora.decompose import leading_vectors, left_directions, to_ordinary_scale
from sigmascope.lora.linalg import leading_subspace, orthonormal_rows, whitening

TOLERANCE = 1e-3


@cache
def planted(rows: int, columns: int, name: str) -> Tensor:
    """A matrix with one of the `SPECTRA`, made once."""
    return with_spectrum(rows, columns, SPECTRA[name])


def with_spectrum(rows: int, columns: int, values: Tensor, seed: int = 0) -> Tensor:
    """A float32 matrix with planted singular values."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=generator, dtype=torch.float64)).Q
    matrix: Tensor = (left * values) @ right.T
    return matrix.float()


def power_law(count: int, exponent: float) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64) ** -exponent


def error_over_optimum(matrix: Tensor, vectors: Tensor, rank: int) -> float:
    """‖A − A·VVᵀ‖ with the best rank-r choice inside the span, over the best of all."""
    wide = matrix.double()
    basis = torch.linalg.qr(vectors.double()).Q
    kept = torch.linalg.svdvals(wide @ basis)[:rank].square().sum()
    energies = energies_of(matrix)
    return sqrt(float((energies.sum() - kept) / energies[rank:].sum()))


@cache
def energies_of(matrix: Tensor) -> Tensor:
    """All squared singular values; the same matrix is asked for several ranks."""
    energies: Tensor = torch.linalg.svdvals(matrix.double()).square()
    return energies


SPECTRA = {
    "slow": power_law(300, 0.3),
    "usual": power_law(300, 0.7),
    "fast": power_law(300, 2.0),
    "flat": torch.ones(300, dtype=torch.float64),
    "low rank above a floor": torch.cat([torch.ones(8), torch.full((292,), 1e-3)]).double(),
    "far apart": torch.logspace(0, -5, 300, dtype=torch.float64),
}


@pytest.fixture(params=[torch.bfloat16, None], ids=["bfloat16", "float32"])
def fast_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations in this dtype, whatever the machine is quick at."""
    monkeypatch.setattr(krylov, "fast_dtype", lambda _: request.param)


@pytest.mark.usefixtures("fast_dtype")
@pytest.mark.parametrize("steep", [False, True])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("shape", [(400, 300), (320, 800)])
def test_the_error_is_within_the_tolerance_of_the_optimum(
    name: str, shape: tuple[int, int], steep: bool
) -> None:
    matrix = planted(*shape, name)
    energy = float(matrix.double().square().sum())
    for rank in (1, 8, 32):
        found = leading_subspace(matrix, rank, total_energy=energy, tolerance=TOLERANCE, steep=steep)
        assert found.converged
        assert error_over_optimum(matrix, found.vectors, rank) <= 1 + TOLERANCE


def test_bfloat16_and_float32_iterations_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = with_spectrum(300, 400, SPECTRA["usual"])
    energy = float(matrix.double().square().sum())
    captured = {}
    for dtype in (torch.bfloat16, None):
        monkeypatch.setattr(krylov, "fast_dtype", lambda _, dtype=dtype: dtype)
        vectors = leading_subspace(matrix, 16, total_energy=energy, tolerance=TOLERANCE).vectors
        captured[dtype] = error_over_optimum(matrix, vectors, 16)
    assert captured[torch.bfloat16] == pytest.approx(captured[None], abs=TOLERANCE)


def test_what_bfloat16_cannot_resolve_is_found_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "fast_dtype", lambda _: torch.bfloat16)
    values = torch.cat([torch.ones(8), power_law(200, 0.5) * 1e-4]).double()
    matrix = with_spectrum(256, 256, values)
    energy = float(matrix.double().square().sum())
    found = leading_subspace(matrix, 16, total_energy=energy, tolerance=TOLERANCE)
    assert error_over_optimum(matrix, found.vectors, 16) <= 1 + 5 * TOLERANCE


def test_the_same_matrix_gives_the_same_bits_whatever_was_drawn_before() -> None:
    matrix = with_spectrum(200, 260, power_law(200, 0.7))
    energy = float(matrix.double().square().sum())
    first = leading_subspace(matrix, 8, total_energy=energy, tolerance=TOLERANCE)
    torch.randn(3)
    again = leading_subspace(matrix, 8, total_energy=energy, tolerance=TOLERANCE)
    assert torch.equal(first.vectors, again.vectors)


def test_a_matrix_of_lower_rank_than_asked_gives_that_many_directions() -> None:
    matrix = with_spectrum(200, 300, power_law(5, 0.5))
    energy = float(matrix.double().square().sum())
    directions = left_directions(leading_vectors(matrix, 20, total_energy=energy)[1], 20)
    assert directions.shape == (200, 5)
    assert error_over_optimum(matrix.T, directions, 4) <= 1 + TOLERANCE


def test_a_matrix_with_one_huge_row_keeps_its_small_rows() -> None:
    matrix = with_spectrum(200, 200, power_law(200, 0.5))
    matrix[0] *= 1e6
    energy = float(matrix.double().square().sum())
    _, images = leading_vectors(matrix, 8, total_energy=energy)
    assert error_over_optimum(matrix.T, images, 8) <= 1 + TOLERANCE


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_scaling_by_powers_of_two_is_exact_and_brings_squares_into_range(magnitude: float) -> None:
    matrix = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)) * magnitude
    work, unit = to_ordinary_scale(matrix)
    assert torch.equal(work.double() * unit, matrix.double())
    assert 1e-12 < float(work.double().square().mean()) < 1e13


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_orthonormal_rows_span_what_they_were_made_of(rows: int, columns: int, seed: int) -> None:
    block = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    once = orthonormal_rows(block)
    assert once.shape[0] <= min(rows, columns)
    identity = torch.eye(once.shape[0], dtype=torch.float64)
    # What is kept has 8·√k·eps of the largest eigenvalue, whose rounding is about eps: off by 1 / 8√k at most.
    bound = 1.2 / (8 * math.sqrt(min(rows, columns)))
    torch.testing.assert_close(once.double() @ once.double().T, identity, atol=bound, rtol=0)
    twice = orthonormal_rows(once).double()
    torch.testing.assert_close(twice @ twice.T, identity, atol=1e-5, rtol=0)


def test_whitening_leaves_out_what_is_dependent() -> None:
    columns = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    columns = torch.cat([columns, columns[:, :2] + columns[:, 2:4]], dim=1)
    white = whitening(columns.T @ columns)
    assert white.shape == (8, 6)
    torch.testing.assert_close(white.T @ (columns.T @ columns) @ white, torch.eye(6), atol=1e-3, rtol=0)


def test_zero_rows_have_no_orthonormal_basis() -> None:
    assert orthonormal_rows(torch.zeros(3, 10)).shape == (0, 10)


@pytest.mark.usefixtures("fast_dtype")
@pytest.mark.parametrize("steep", [False, True])
@pytest.mark.parametrize("rate", [0.1, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("shape", [(160, 160), (160, 640), (640, 160)])
def test_values_that_fall_fast_are_taken_out_level_by_level_until_nothing_is_left(
    shape: tuple[int, int], rate: float, steep: bool
) -> None:
    values = torch.exp(-rate * torch.arange(160, dtype=torch.float64))
    matrix = with_spectrum(*shape, values)
    energy = float(matrix.double().square().sum())
    found = leading_subspace(matrix, 32, total_energy=energy, tolerance=TOLERANCE, steep=steep)
    assert found.converged
    basis = torch.linalg.qr(found.vectors.double()).Q
    left = float((matrix.double() - matrix.double() @ basis @ basis.T).norm())
    optimum = float(torch.linalg.svdvals(matrix.double())[32:].norm())
    assert left <= (1 + TOLERANCE) * optimum + 1e-6 * sqrt(energy)


def test_no_rows_have_a_basis_of_none() -> None:
    assert orthonormal_rows(torch.zeros(0, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    ("architecture", "is_fast"),
    [
        ("gfx900", False),
        ("gfx906:sramecc+:xnack-", False),
        ("gfx908:sramecc+:xnack-", True),
        ("gfx90a:sramecc+:xnack-", True),
        ("gfx90c", False),
        ("gfx942:sramecc+:xnack-", True),
        ("gfx1032", False),
        ("gfx1100", True),
        ("gfx1201", True),
    ],
)
def test_amds_devices_with_matrix_cores_for_bfloat16_use_it(
    architecture: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of AMD's table: https://rocm.docs.amd.com/projects/HIP/en/docs-6.3.2/reference/hardware_features.html."""
    number = architecture.removeprefix("gfx").partition(":")[0]
    major, minor = int(number[:-2]), int(number[-2])  # as HIP gives it: 9.0 of gfx90a, 10.3 of gfx1032
    properties = SimpleNamespace(gcnArchName=architecture, major=major, minor=minor)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert krylov.fast_dtype(torch.device("cuda")) == (torch.bfloat16 if is_fast else None)


@pytest.mark.parametrize(("capability", "is_fast"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_nvidias_devices_use_bfloat16_from_ampere_on(
    capability: tuple[int, int], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    major, minor = capability
    properties = SimpleNamespace(major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert krylov.fast_dtype(torch.device("cuda")) == (torch.bfloat16 if is_fast else None)
