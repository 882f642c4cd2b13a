"""The generator of LBM-shaped pairs."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_bench.pairs import (
    Recipe,
    Shapes,
    chosen_tensors,
    ensure_pair,
    is_layer,
    lbm_shapes,
    pair_files,
    shape_classes,
)
from lora_bench.spectra import SPECTRA, Spectrum, planted_change

SHAPES: Shapes = {
    "denoiser.conv_in.weight": (16, 4, 3, 3),
    "denoiser.conv_in.bias": (16,),
    **{f"denoiser.blocks.{depth}.to_q.weight": (24, 24) for depth in range(12)},
    **{f"denoiser.blocks.{depth}.norm.weight": (24,) for depth in range(12)},
    **{f"denoiser.blocks.{depth}.ff.weight": (48, 24) for depth in range(4)},
    "vae.vae_model.encoder.conv_in.weight": (8, 3, 3, 3),
    "num_iterations": (),
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    ensure_pair(tmp_path / "whole", Recipe(Spectrum()), SHAPES)
    return tmp_path / "whole"


def pair(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    base, tuned = pair_files(folder)
    return load_file(base), load_file(tuned)


def layers(names: Shapes) -> int:
    return sum(is_layer(name, shape) for name, shape in names.items())


def test_a_pair_has_the_names_and_shapes_asked_for(whole: Path) -> None:
    for state in pair(whole):
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == dict(SHAPES)


def test_the_same_recipe_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    ensure_pair(tmp_path / "again", Recipe(Spectrum()), SHAPES)
    for one, other in zip(pair_files(whole), pair_files(tmp_path / "again"), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_pair_that_is_there_is_not_made_again(whole: Path) -> None:
    before = [file.stat().st_mtime_ns for file in pair_files(whole)]
    ensure_pair(whole, Recipe(Spectrum()), SHAPES)
    assert [file.stat().st_mtime_ns for file in pair_files(whole)] == before


def test_another_recipe_makes_it_anew(whole: Path) -> None:
    before = pair(whole)[1]["denoiser.conv_in.weight"]
    ensure_pair(whole, Recipe(Spectrum(), seed=1), SHAPES)
    assert not torch.equal(pair(whole)[1]["denoiser.conv_in.weight"], before)


def test_leaving_layers_out_changes_none_of_the_others(whole: Path, tmp_path: Path) -> None:
    ensure_pair(tmp_path / "part", Recipe(Spectrum(), layers=6), SHAPES)
    for part, all_of_it in zip(pair(tmp_path / "part"), pair(whole), strict=True):
        assert all(torch.equal(tensor, all_of_it[name]) for name, tensor in part.items())


@pytest.mark.parametrize("count", [3, 7, 17])
def test_a_part_has_as_many_layers_as_asked_for_and_every_shape(count: int) -> None:
    part = chosen_tensors(SHAPES, Recipe(Spectrum(), layers=count))
    assert layers(part) == count
    assert shape_classes(part).keys() == shape_classes(SHAPES).keys()


def test_the_commonest_shape_gets_the_rest() -> None:
    part = chosen_tensors(SHAPES, Recipe(Spectrum(), layers=5))
    assert len(shape_classes(part)[24, 24]) == 3


def test_the_chosen_layers_lie_at_all_depths() -> None:
    names = shape_classes(chosen_tensors(SHAPES, Recipe(Spectrum(), layers=5)))[24, 24]
    assert names == [f"denoiser.blocks.{depth}.to_q.weight" for depth in (2, 6, 10)]


def test_a_fraction_takes_its_share_of_each_shape() -> None:
    part = shape_classes(chosen_tensors(SHAPES, Recipe(Spectrum(), fraction=0.5)))
    assert {shape: len(names) for shape, names in part.items()} == {
        (16, 4, 3, 3): 1,
        (24, 24): 6,
        (48, 24): 2,
    }


def test_a_chosen_layer_keeps_its_bias() -> None:
    assert "denoiser.conv_in.bias" in chosen_tensors(SHAPES, Recipe(Spectrum(), layers=3))


def test_the_full_size_model_has_792_layers_of_32_shapes() -> None:
    classes = shape_classes(lbm_shapes())
    assert (len(classes), sum(map(len, classes.values()))) == (32, 792)


def test_the_change_is_a_twentieth_of_the_weight(whole: Path) -> None:
    base, tuned = pair(whole)
    for name in ("denoiser.conv_in.weight", "denoiser.blocks.3.ff.weight"):
        change = (tuned[name].double() - base[name].double()).norm() / base[name].double().norm()
        assert float(change) == pytest.approx(0.05, rel=0.02)


def test_a_denoiser_fine_tune_leaves_the_vae_alone(whole: Path) -> None:
    base, tuned = pair(whole)
    assert torch.equal(
        base["vae.vae_model.encoder.conv_in.weight"], tuned["vae.vae_model.encoder.conv_in.weight"]
    )


def test_biases_change_too(whole: Path) -> None:
    base, tuned = pair(whole)
    assert not torch.equal(base["denoiser.conv_in.bias"], tuned["denoiser.conv_in.bias"])


def test_weights_are_stored_as_bf16_and_the_counter_as_float32(whole: Path) -> None:
    base, _ = pair(whole)
    assert {tensor.dtype for name, tensor in base.items() if name != "num_iterations"} == {torch.bfloat16}
    assert base["num_iterations"].dtype == torch.float32


def singular_values(shape: tuple[int, ...], spectrum: Spectrum) -> Tensor:
    change = planted_change(shape, spectrum, torch.Generator().manual_seed(3))
    values: Tensor = torch.linalg.svdvals(change.double().flatten(1))
    return values


@pytest.mark.parametrize("name", SPECTRA)
def test_a_planted_change_has_norm_one(name: str) -> None:
    values = singular_values((48, 8, 3, 3), SPECTRA[name])
    assert float(values.square().sum()) == pytest.approx(1.0, abs=1e-5)


def test_an_exact_change_has_its_rank() -> None:
    values = singular_values((96, 64), Spectrum(exact=16))
    assert int((values > 1e-6 * values[0]).sum()) == 16


def test_the_head_falls_as_a_power_law() -> None:
    values = singular_values((1200, 1000), Spectrum(alpha=0.7, head=8, noise=0.0))[:8]
    falls = -torch.log(values[1:] / values[0]) / torch.log(torch.arange(2.0, 9.0, dtype=torch.float64))
    assert float(falls.mean()) == pytest.approx(0.7, abs=0.05)


def test_the_floor_holds_its_share_of_the_energy() -> None:
    spectrum = Spectrum(alpha=0.0, head=4, noise=0.3)
    energy = singular_values((600, 600), spectrum).square()
    # By chance 4 directions of 600 lie in the floor as well: each of the planted ones gains a little.
    assert float(energy[:4].sum()) == pytest.approx(0.7, abs=0.02)
    assert math.isclose(float(energy.sum()), 1.0, abs_tol=1e-5)
