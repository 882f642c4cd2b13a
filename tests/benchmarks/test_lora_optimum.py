"""The float64 optimum that extractions are measured against."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_bench.accuracy import LayerError, class_ratios, layer_ratios, stored_errors
from lora_bench.optimum import LayerOptimum, Optimum, ensure_optimum, optimum_file, tail_energies
from lora_bench.pairs import Recipe, ensure_pair, pair_files
from lora_bench.spectra import SPECTRA, Spectrum, planted_change

SHAPES = {"denoiser.a.weight": (24, 32), "denoiser.b.weight": (16, 4, 3, 3), "denoiser.b.bias": (16,)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensure_pair(tmp_path, Recipe(Spectrum()), SHAPES)
    return tmp_path


@pytest.mark.parametrize("shape", [(40, 40), (64, 24), (24, 64), (32, 8, 3, 3), (4, 32, 3, 3)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_tails_are_sums_of_squared_singular_values(shape: tuple[int, ...], spectrum: str) -> None:
    change = planted_change(shape, SPECTRA[spectrum], torch.Generator().manual_seed(1)).bfloat16().double()
    matrix = change.flatten(1)
    energies = torch.linalg.svdvals(matrix).square()
    expected = torch.stack([energies[rank:].sum() for rank in range(21)])
    tails, gap = tail_energies(matrix, 20)
    torch.testing.assert_close(tails, expected, rtol=1e-7, atol=0)
    assert gap < 1e-7


def test_a_tail_far_below_the_gram_matrix_rounding_is_right() -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.linalg.qr(torch.randn(size, 12, generator=generator, dtype=torch.float64)).Q
        for size in (30, 50)
    )
    values = 10.0 ** -torch.arange(12, dtype=torch.float64)  # energies from 1 down to 10⁻²²
    tails, _ = tail_energies((left * values) @ right.T, 8)
    assert float(tails[8]) == pytest.approx(1e-16, rel=0.02)


def test_a_rank_that_holds_everything_leaves_exactly_nothing() -> None:
    tails, _ = tail_energies(torch.randn(4, 90, dtype=torch.float64), 8)
    assert tails[4:].tolist() == [0.0] * 5


def test_a_zero_change_has_zero_tails() -> None:
    tails, gap = tail_energies(torch.zeros(6, 5, dtype=torch.float64), 3)
    assert tails.tolist() == [0.0] * 4
    assert gap == 0.0


def test_the_optimum_covers_linear_and_convolution_weights(folder: Path) -> None:
    optimum = ensure_optimum(folder)
    assert {name: layer.shape for name, layer in optimum.layers.items()} == {
        "denoiser.a": (24, 32),
        "denoiser.b": (16, 4, 3, 3),
    }


def test_the_optimum_is_that_of_the_stored_files(folder: Path) -> None:
    base, tuned = map(load_file, pair_files(folder))
    change = tuned["denoiser.b.weight"].double() - base["denoiser.b.weight"].double()
    expected = torch.linalg.svdvals(change.flatten(1))[5:].norm()
    assert ensure_optimum(folder).layers["denoiser.b"].error(5) == pytest.approx(float(expected), rel=1e-9)


def test_a_kept_optimum_is_read_back_equal_and_not_written_again(folder: Path) -> None:
    first = ensure_optimum(folder)
    written = optimum_file(folder).stat().st_mtime_ns
    assert ensure_optimum(folder) == first
    assert optimum_file(folder).stat().st_mtime_ns == written


def test_another_pair_in_the_folder_gets_its_own_optimum(folder: Path) -> None:
    first = ensure_optimum(folder)
    ensure_pair(folder, Recipe(Spectrum(), seed=5), SHAPES)
    assert ensure_optimum(folder).layers["denoiser.a"] != first.layers["denoiser.a"]


def test_a_higher_rank_than_kept_is_worked_out(folder: Path) -> None:
    ensure_optimum(folder)
    assert ensure_optimum(folder, 80).ranks == 80


def test_stored_errors_are_those_of_the_factors_with_their_alpha(folder: Path) -> None:
    base, tuned = map(load_file, pair_files(folder))
    change = tuned["denoiser.a.weight"].double() - base["denoiser.a.weight"].double()
    up, down = torch.randn(24, 2).half(), torch.randn(2, 32).half()
    lora = folder / "lora.safetensors"
    save_file(
        {
            "denoiser.a.lora_up.weight": up,
            "denoiser.a.lora_down.weight": down,
            "denoiser.a.alpha": torch.tensor(0.5),
        },
        lora,
    )
    expected = torch.linalg.norm(change - 0.25 * up.double() @ down.double())
    errors = stored_errors(folder, lora)
    assert errors.keys() == {"denoiser.a"}
    assert errors["denoiser.a"].rank == 2
    assert errors["denoiser.a"].error == pytest.approx(float(expected), rel=1e-12)


def by_hand() -> Optimum:
    tails = (16.0, 9.0, 4.0, 0.0)
    layers = {name: LayerOptimum((3, 5), tails) for name in ("one", "two")}
    return Optimum("", 3, 0.0, layers | {"wide": LayerOptimum((2, 9), tails)})


def test_ratios_are_taken_at_the_rank_that_was_stored() -> None:
    errors = {"one": LayerError(1, 3.3), "two": LayerError(2, 2.4)}
    assert layer_ratios(errors, by_hand()) == pytest.approx({"one": 1.1, "two": 1.2})


def test_a_rank_that_holds_everything_has_no_ratio() -> None:
    assert layer_ratios({"wide": LayerError(2, 1e-4)}, by_hand()) == {}


def test_a_layer_that_did_not_change_has_no_ratio() -> None:
    same = LayerOptimum((3, 5), (0.0, 0.0, 0.0, 0.0))
    assert layer_ratios({"same": LayerError(2, 0.0)}, Optimum("", 3, 0.0, {"same": same})) == {}


def test_each_shape_has_its_mean_and_its_worst() -> None:
    errors = {"one": LayerError(1, 3.3), "two": LayerError(1, 3.9), "wide": LayerError(2, 0.1)}
    square, wide = class_ratios(errors, by_hand())
    assert (square.shape, square.layers) == ((3, 5), 2)
    assert (square.mean, square.worst) == pytest.approx((1.2, 1.3))
    assert (wide.shape, wide.layers, wide.mean, wide.worst) == ((2, 9), 1, None, None)
