"""Moments, their roots, and the file that keeps them."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import CheckpointError, NonFiniteError
from sigmascope.lora.decompose import at_full_rank, decompose
from sigmascope.lora.statistics import (
    LayerMetric,
    LayerStatistics,
    ModelStatistics,
    Moments,
    MomentSum,
    load_statistics,
    sketch_columns,
)

CPU = torch.device("cpu")


def rows_of(count: int, size: int, power: float, seed: int) -> Tensor:
    """Rows whose directions have energies that fall by a power law."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    scale = torch.arange(1, size + 1, dtype=torch.float64) ** -power
    made: Tensor = (torch.randn(count, size, generator=generator, dtype=torch.float64) * scale) @ turn
    return made


def moments_of(rows: Tensor, rank: int | None = None) -> Moments:
    size = rows.shape[1]
    total = MomentSum(size, CPU, None if rank is None else sketch_columns(size, rank, seed=0))
    for start in range(0, len(rows), 37):
        total.add(rows[start : start + 37].float())
    return total.result(rows.shape[0])


def dense(moments: Moments) -> Tensor:
    if moments.full is not None:
        return moments.full.double()
    assert moments.low_rank is not None
    return moments.diagonal.double().diag() + moments.low_rank.double() @ moments.low_rank.double().mT


@pytest.fixture(params=["whole", "sketched"])
def moments(request: pytest.FixtureRequest) -> Moments:
    return moments_of(rows_of(500, 70, 1.0, 1), None if request.param == "whole" else 12)


def test_a_narrow_layer_keeps_the_very_matrix() -> None:
    rows = rows_of(200, 30, 0.5, 2)
    expected = rows.mT @ rows / 200
    assert torch.allclose(dense(moments_of(rows)), expected, rtol=1e-5, atol=1e-6)


def test_a_sketch_keeps_the_trace_and_what_a_few_directions_hold() -> None:
    rows = rows_of(400, 90, 0.0, 3)[:, :1] @ torch.ones(1, 90, dtype=torch.float64)  # one direction
    rows = rows + 0.1 * rows_of(400, 90, 0.0, 4)
    true = rows.mT @ rows / 400
    kept = moments_of(rows, 4)
    assert kept.trace == pytest.approx(float(true.trace()), rel=1e-3)
    assert kept.captured > 0.95
    assert float((dense(kept) - true).norm() / true.norm()) < 0.05


def test_the_root_times_its_transpose_is_the_matrix_with_its_ridge(moments: Moments) -> None:
    root = moments.root(0.01, CPU, torch.float64)
    matrix = root.weigh(torch.eye(70, dtype=torch.float64))
    ridge = 0.01 * moments.trace / 70
    expected = dense(moments) + ridge * torch.eye(70, dtype=torch.float64)
    assert torch.allclose(matrix @ matrix.mT, expected, rtol=1e-6, atol=1e-9)


def test_what_is_weighed_and_unweighed_is_what_it_was(moments: Moments) -> None:
    root = moments.root(1e-3, CPU, torch.float64)
    rows = rows_of(9, 70, 0.3, 5)
    assert torch.allclose(root.unweigh(root.weigh(rows)), rows, rtol=1e-8, atol=1e-8)


def test_rounding_that_makes_a_matrix_negative_does_no_harm() -> None:
    matrix = torch.ones(6, 6, dtype=torch.float64) - 1e-3 * torch.eye(6, dtype=torch.float64)
    root = Moments(matrix.diagonal(), full=matrix).root(1e-6, CPU, torch.float64)
    rows = rows_of(4, 6, 0.0, 6)
    assert torch.allclose(root.unweigh(root.weigh(rows)), rows, rtol=1e-6, atol=1e-6)


def test_moments_of_nothing_have_no_root() -> None:
    with pytest.raises(NonFiniteError, match="zero or not finite"):
        Moments(torch.zeros(4), full=torch.zeros(4, 4)).root(1e-3, CPU, torch.float64)


def statistics(rows: int, columns: int, rank: int | None = None) -> LayerStatistics:
    return LayerStatistics(
        moments_of(rows_of(300, columns, 0.8, 7), rank),
        moments_of(rows_of(300, rows, 0.6, 8), rank),
        300,
    )


def symmetric_root(matrix: Tensor, ridge: float) -> Tensor:
    values, vectors = torch.linalg.eigh(
        matrix + ridge * matrix.trace() / len(matrix) * torch.eye(len(matrix))
    )
    root: Tensor = (vectors * values.sqrt()) @ vectors.mT
    return root


@pytest.mark.parametrize(("of_inputs", "of_outputs"), [(8, 8), (None, 8), (8, None), (None, None)])
def test_a_change_is_weighed_by_both_roots_in_whatever_pieces(
    of_inputs: int | None, of_outputs: int | None
) -> None:
    """700 x 320 is more than one piece, whose rows do not divide it."""
    inputs = moments_of(rows_of(300, 320, 0.8, 7), of_inputs).root(1e-3, CPU, torch.float64)
    outputs = moments_of(rows_of(300, 700, 0.6, 8), of_outputs).root(1e-3, CPU, torch.float64)
    metric, change = LayerMetric(inputs, outputs, 0.5), rows_of(700, 320, 0.4, 9)
    right, left = (
        root.weigh(torch.eye(n, dtype=torch.float64)) for root, n in ((inputs, 320), (outputs, 700))
    )
    expected = 0.5 * left.mT @ change @ right
    before, memory = change.clone(), torch.full((700, 320), math.nan, dtype=torch.float64)
    assert torch.allclose(metric.weigh(change), expected, rtol=1e-9, atol=1e-9)
    assert metric.weigh(change, memory) is memory
    assert torch.allclose(memory, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(change, before)


@pytest.mark.parametrize("directions", [None, 8])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(50, 70, 6), (300, 280, 9), (24, 90, 24)])
def test_the_error_is_the_least_that_the_rank_allows(
    rows: int, columns: int, rank: int, directions: int | None
) -> None:
    """Against LAPACK's float64 SVD of G^½·ΔW·C^½ with symmetric roots."""
    known = statistics(rows, columns, directions)
    delta = rows_of(rows, columns, 0.4, 9).float()
    left = symmetric_root(dense(known.outputs), 1e-3)
    right = symmetric_root(dense(known.inputs), 1e-3)
    values = torch.linalg.svdvals(left @ delta.double() @ right)
    stored = decompose(delta, rank, torch.float32, metric=known.metric(1e-3), with_spectrum=True)
    product = stored.factors.up.double() @ stored.factors.down.double()
    error = float((left @ (delta.double() - product) @ right).norm())
    assert error <= 1.001 * float(values[rank:].norm()) + 3e-6 * float(values.norm())
    assert math.sqrt(float(stored.weighted[-1])) == pytest.approx(error, rel=1e-3, abs=1e-6)
    assert stored.error_norm == pytest.approx(float((delta.double() - product).norm()), rel=1e-4, abs=1e-5)
    assert stored.spectrum.total_energy == pytest.approx(float(values.square().sum()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_weighted_error_of_rounded_factors_is_the_true_one_at_every_rank(dtype: torch.dtype) -> None:
    known = statistics(40, 60)
    delta = (1e-3 * rows_of(40, 60, 0.4, 9)).float()
    stored = decompose(delta, 10, dtype, metric=known.metric(), with_spectrum=True)
    left, right = (symmetric_root(dense(side), 1e-3) for side in (known.outputs, known.inputs))
    up, down = stored.factors.up.double(), stored.factors.down.double()
    for rank in range(11):
        rest = delta.double() - up[:, :rank] @ down[:rank]
        assert float(stored.weighted[rank]) == pytest.approx(
            float((left @ rest @ right).norm()) ** 2, rel=1e-3
        )
        assert float(stored.errors[rank]) == pytest.approx(float(rest.norm()) ** 2, rel=1e-3)


def test_factors_that_were_mapped_back_are_balanced() -> None:
    known = statistics(40, 60)
    stored = decompose(
        1e-4 * rows_of(40, 60, 0.4, 9).float(), 8, torch.float32, metric=known.metric(), with_spectrum=True
    )
    lengths = stored.factors.up.norm(dim=0) / stored.factors.down.norm(dim=1)
    assert bool(((lengths > 0.5) & (lengths < 2.0)).all())


def test_at_full_rank_both_errors_are_those_of_rounding() -> None:
    known, delta = statistics(12, 20), rows_of(12, 20, 0.4, 9).float()
    stored = at_full_rank(delta, torch.float16, known.metric())
    rest = delta.double() - stored.factors.up.double() @ stored.factors.down.double()
    left, right = (symmetric_root(dense(side), 1e-3) for side in (known.outputs, known.inputs))
    assert float(stored.errors[-1]) == pytest.approx(float(rest.norm()) ** 2, rel=1e-4)
    assert float(stored.weighted[-1]) == pytest.approx(float((left @ rest @ right).norm()) ** 2, rel=1e-4)


def test_a_file_keeps_what_it_was_given(tmp_path: Path) -> None:
    layers = {"a.b": statistics(12, 20), "a.wide": statistics(40, 60, 8)}
    made = ModelStatistics(layers, "abc", {"calls": 3}, ("never",))
    made.save(tmp_path / "stats.safetensors")
    read = load_statistics(tmp_path / "stats.safetensors")
    assert (read.fingerprint, dict(read.facts), read.unmet, set(read)) == (
        "abc",
        {"calls": 3},
        ("never",),
        set(layers),
    )
    for name, layer in layers.items():
        assert torch.equal(dense(read[name].inputs), dense(layer.inputs))
        assert torch.equal(dense(read[name].outputs), dense(layer.outputs))
        assert read[name].weight == pytest.approx(layer.weight)


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors: it holds no statistics"):
        load_statistics(tmp_path / "other.safetensors")


METADATA = {"sigmascope_statistics": "1", "facts": "{}", "unmet": "[]", "fingerprint": ""}


@pytest.mark.parametrize(
    ("rows", "tensors", "says"),
    [
        ('{"a": 1}', {"x": torch.ones(1)}, r"a\.inputs"),
        ('["a"]', {"x": torch.ones(1)}, "not a complete statistics file"),
        ("[" * 100_000, {"x": torch.ones(1)}, "not a complete statistics file"),
        ('{"a": 1}', {"a.inputs.full": torch.ones(2, 3)}, "not square"),
        (
            '{"a": 1}',
            {"a.inputs.diagonal": torch.ones(2), "a.inputs.low_rank": torch.ones(3, 1)},
            "do not fit",
        ),
    ],
)
def test_a_file_that_is_damaged_is_refused(
    rows: str, tensors: dict[str, Tensor], says: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "part.safetensors", METADATA | {"rows": rows})
    with pytest.raises(CheckpointError, match=says):
        load_statistics(tmp_path / "part.safetensors")
