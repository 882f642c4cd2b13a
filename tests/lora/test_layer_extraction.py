"""Layers read and subtracted in pieces, against plain subtraction of whole tensors."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora import layer_extraction
from sigmascope.lora.layer_extraction import LayerDelta, LayerReader
from sigmascope.lora.pairs import open_pair

State = dict[str, Tensor]
Write = Callable[[Path, State], Path]
CPU = torch.device("cpu")
PIECE = 1000

# One element, odd sizes, a whole number of pieces, one more and one less, many runs of the sums.
SHAPES = {
    "one": (1, 1),
    "odd": (7, 13),
    "conv": (5, 3, 3, 3),
    "exact": (25, 80),
    "over": (3, 667),
    "under": (1, 999),
    "large": (131, 101),
    "volume": (6, 5, 3, 2, 1),
}


def state(dtype: torch.dtype, seed: int, like: State | None = None, size: float = 1.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in SHAPES.items():
        values = size * torch.randn(shape, generator=generator)
        made[f"{name}.weight"] = (values if like is None else like[f"{name}.weight"].float() + values).to(
            dtype
        )
    return made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_extraction, "_PIECE", PIECE)


def one_file(folder: Path, tensors: State) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def shards(folder: Path, tensors: State) -> Path:
    folder.mkdir()
    weight_map = {key: f"part-{number % 3}.safetensors" for number, key in enumerate(tensors)}
    for name in set(weight_map.values()):
        save_file({key: tensors[key] for key in tensors if weight_map[key] == name}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return index


def lightning(folder: Path, tensors: State) -> Path:
    folder.mkdir()
    torch.save({"state_dict": tensors, "epoch": 3}, folder / "model.ckpt")
    return folder / "model.ckpt"


def diffusers_folder(folder: Path, tensors: State) -> Path:
    (folder / "unet").mkdir(parents=True)
    save_file(tensors, folder / "unet" / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "Pipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def assert_is_subtraction(change: LayerDelta, base: Tensor, tuned: Tensor) -> None:
    delta = tuned.float() - base.float()
    assert torch.equal(change.delta, delta)
    assert change.rounded is None or torch.equal(change.rounded, delta.bfloat16())
    assert change.delta_norm == pytest.approx(float(delta.double().norm()), rel=1e-7, abs=0.0)
    assert change.base_norm == pytest.approx(float(base.double().norm()), rel=1e-7, abs=0.0)
    assert change.largest == float(delta.abs().max())


DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float8 e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "float8 e5m2": (torch.float8_e5m2, torch.float8_e5m2),
    "bfloat16 base of a float32 model": (torch.bfloat16, torch.float32),
    "float8 base of a bfloat16 model": (torch.float8_e4m3fn, torch.bfloat16),
}


@pytest.mark.parametrize("kind", DTYPES)
def test_every_dtype_gives_the_difference_of_the_numbers(kind: str, tmp_path: Path) -> None:
    base_dtype, tuned_dtype = DTYPES[kind]
    base = state(base_dtype, 0)
    tuned = state(tuned_dtype, 1, base, 0.3)
    with open_pair(one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)) as pair:
        reader = LayerReader(pair, CPU)
        for layer in pair.layers:
            assert_is_subtraction(reader.read(layer), base[f"{layer}.weight"], tuned[f"{layer}.weight"])


@pytest.mark.parametrize("write", [one_file, shards, lightning, diffusers_folder])
def test_every_form_of_a_checkpoint_gives_the_same(write: Write, tmp_path: Path) -> None:
    base = state(torch.bfloat16, 0)
    tuned = state(torch.bfloat16, 1, base, 0.1)
    with open_pair(write(tmp_path / "b", base), write(tmp_path / "t", tuned)) as pair:
        reader = LayerReader(pair, CPU)
        assert len(pair.layers) == len(SHAPES)
        for layer in pair.layers:
            key = f"{layer.removeprefix('unet.')}.weight"
            assert_is_subtraction(reader.read(layer), base[key], tuned[key])


def test_a_scaled_float8_base_is_read_as_the_numbers_it_stands_for(tmp_path: Path) -> None:
    weight = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    base = {"a.weight": weight.to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(0.25)}
    files = one_file(tmp_path / "b", base), one_file(tmp_path / "t", {"a.weight": weight})
    with open_pair(*files) as pair:
        change = LayerReader(pair, CPU).read("a")
        assert_is_subtraction(change, base["a.weight"].float() * 0.25, weight)


def test_a_layer_that_either_side_has_in_double_precision_is_subtracted_in_it(tmp_path: Path) -> None:
    base = state(torch.float64, 0)
    base["odd.weight"] = base["odd.weight"].float()
    tuned = {key: value.double() + 1e-10 for key, value in base.items()}
    with open_pair(one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)) as pair:
        reader = LayerReader(pair, CPU)
        for layer in ("odd", "large"):
            change = reader.read(layer)
            assert change.delta.dtype == torch.float64
            assert torch.equal(change.delta, tuned[f"{layer}.weight"] - base[f"{layer}.weight"].double())


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-22, 1e-19, 1e-13, 1e-10, 1e10, 1e18, 1e25, 1e38])
def test_norms_hold_where_float32_squares_do_not(size: float, tmp_path: Path) -> None:
    base = {key: torch.zeros_like(value) for key, value in state(torch.float32, 0).items()}
    tuned = {
        key: (value.double().clamp(-3, 3) * size).float() for key, value in state(torch.float32, 1).items()
    }
    for order in ((base, tuned), (tuned, base)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with open_pair(one_file(folder / "b", order[0]), one_file(folder / "t", order[1])) as pair:
            reader = LayerReader(pair, CPU)
            for layer in pair.layers:
                key = f"{layer}.weight"
                assert_is_subtraction(reader.read(layer), order[0][key], order[1][key])


def test_an_unchanged_layer_has_no_largest_change_whatever_its_scale(tmp_path: Path) -> None:
    weights = {f"{size}.weight": torch.full((8, 9), size) for size in (1e-30, 1.0, 1e30)}
    with open_pair(one_file(tmp_path / "b", weights), one_file(tmp_path / "t", weights)) as pair:
        for layer in pair.layers:
            change = LayerReader(pair, CPU).read(layer)
            assert (change.delta_norm, change.largest) == (0.0, 0.0)
            assert change.base_norm == pytest.approx(math.sqrt(72) * float(layer), rel=1e-6)


@pytest.mark.parametrize("side", ["b", "t"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_is_refused_with_the_file_and_the_layer(
    dtype: torch.dtype, place: int, value: float, side: str, tmp_path: Path
) -> None:
    states = {"b": state(dtype, 0), "t": state(dtype, 1)}
    states[side]["large.weight"].view(-1)[place] = value
    files = one_file(tmp_path / "b", states["b"]), one_file(tmp_path / "t", states["t"])
    with open_pair(*files) as pair, pytest.raises(NonFiniteError) as caught:
        LayerReader(pair, CPU).read("large")
    kind = "1 NaN and 0 Inf" if math.isnan(value) else "0 NaN and 1 Inf"
    assert f"{tmp_path / side / 'model.safetensors'}: large.weight holds {kind}" in caught.value.message


def test_the_same_inf_on_both_sides_is_no_unchanged_layer(tmp_path: Path) -> None:
    base, tuned = state(torch.float32, 0), state(torch.float32, 0)
    base["odd.weight"][0, 0] = tuned["odd.weight"][0, 0] = math.inf
    files = one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)
    with open_pair(*files) as pair, pytest.raises(NonFiniteError, match=r"odd\.weight holds 0 NaN and 1 Inf"):
        LayerReader(pair, CPU).read("odd")


def test_a_difference_that_overflows_is_refused(tmp_path: Path) -> None:
    large = {"a.weight": torch.full((3, 3), 3e38)}
    files = one_file(tmp_path / "b", large), one_file(tmp_path / "t", {"a.weight": -large["a.weight"]})
    with (
        open_pair(*files) as pair,
        pytest.raises(NonFiniteError, match=r"a\.weight: the difference .*overflows"),
    ):
        LayerReader(pair, CPU).read("a")


def test_threads_read_into_memory_of_their_own(tmp_path: Path) -> None:
    base = state(torch.bfloat16, 0)
    tuned = state(torch.bfloat16, 1, base, 0.1)
    with open_pair(one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)) as pair:
        reader = LayerReader(pair, CPU)
        barrier, wrong = threading.Barrier(4), []

        def read_all() -> None:
            for layer in [*pair.layers] * 5:
                change = reader.read(layer)
                barrier.wait()
                key = f"{layer}.weight"
                if not torch.equal(change.delta, tuned[key].float() - base[key].float()):
                    wrong.append(layer)

        threads = [threading.Thread(target=read_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_memory_is_used_again_for_the_next_layer(tmp_path: Path) -> None:
    base, tuned = state(torch.float32, 0), state(torch.float32, 1)
    with open_pair(one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)) as pair:
        reader = LayerReader(pair, CPU)
        first = reader.read("large").delta.data_ptr()
        assert reader.read("odd").delta.data_ptr() == first


def test_a_weight_with_an_empty_axis_is_no_layer_and_no_obstacle(tmp_path: Path) -> None:
    base = {**state(torch.float32, 0), "empty.weight": torch.empty(0, 4)}
    tuned = {**state(torch.float32, 1), "empty.weight": torch.empty(0, 4)}
    with open_pair(one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)) as pair:
        assert set(pair.layers) == set(SHAPES)
        assert pair.others == ("empty.weight",)
        assert pair.change("empty.weight", CPU).delta_norm == 0.0


def test_one_double_precision_tensor_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    base, tuned = state(torch.float32, 0), state(torch.float32, 1)
    tuned["odd.weight"] = base["odd.weight"].double() + 1e-10
    with open_pair(one_file(tmp_path / "b", base), one_file(tmp_path / "t", tuned)) as pair:
        reader = LayerReader(pair, CPU)
        assert reader.read("odd").delta.dtype == torch.float64
        assert reader.read("large").delta.dtype == torch.float32
        assert pair.change("large.weight", CPU).delta.dtype == torch.float32
