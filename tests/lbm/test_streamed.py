"""Models whose weights stay in their file compute what loaded ones do."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH
from sigmascope.lbm.streamed import streamed_lbm
from sigmascope.lora.statistics import ModelStatistics
from sigmascope.lora.statistics_collection import collect_statistics

SMALL = 1000  # elements: nearly all layers of the pocket model stay in the file


def latent() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0.7])


def stored_as(dtype: torch.dtype, tmp_path: Path) -> Path:
    path = tmp_path / "stored.safetensors"
    tensors = load_file(BASE_PATH)
    save_file(
        {key: tensor if tensor.dim() == 0 else tensor.to(dtype) for key, tensor in tensors.items()}, path
    )
    return path


def compared(model: LbmModel) -> tuple[Tensor, ModelStatistics]:
    results: list[Tensor] = []

    def run() -> None:
        with torch.inference_mode():
            results.append(model(*latent()))

    found = collect_statistics(model.denoiser, run)
    return results[0].clone(), found


@pytest.mark.slow
@pytest.mark.parametrize("stored", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_result_and_statistics_are_those_of_the_loaded_model(stored: torch.dtype, tmp_path: Path) -> None:
    path = stored_as(stored, tmp_path)
    result, expected = compared(load_lbm(path, CONFIG_PATH))
    with streamed_lbm(path, CONFIG_PATH, large=SMALL) as model:
        in_file = [name for name, weight in model.denoiser.named_parameters() if weight.is_meta]
        streamed, found = compared(model)
    assert len(in_file) > 50
    assert torch.equal(streamed, result)
    assert set(found) == set(expected)
    for name, layer in expected.items():
        for side in ("inputs", "outputs"):
            one, other = (getattr(of, side) for of in (found[name], layer))
            assert one.trace == pytest.approx(other.trace, rel=1e-5), (name, side)


def test_what_malloc_holds_free_is_given_back_at_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr("sigmascope.lbm.streamed.trim_heap", limits.append)
    with streamed_lbm(BASE_PATH, CONFIG_PATH, large=SMALL) as model, torch.inference_mode():
        model(*latent())
        in_file = [name for name, weight in model.denoiser.named_parameters() if weight.is_meta]
    assert len(limits) >= len(in_file) > 50
    assert max(limits) <= 1 << 30


@pytest.mark.slow
def test_nothing_of_a_weight_is_kept_for_the_way_back(tmp_path: Path) -> None:
    held: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.untyped_storage().nbytes())
        return tensor

    def graph_bytes(model: LbmModel) -> int:
        held.clear()
        x, _ = latent()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.denoiser.requires_grad_(False)(x.requires_grad_(), 700, encoder_hidden_states=None)
        return sum(held)

    weights = sum(weight.nbytes for weight in load_lbm(BASE_PATH, CONFIG_PATH).denoiser.parameters())
    loaded = graph_bytes(load_lbm(BASE_PATH, CONFIG_PATH))
    with streamed_lbm(BASE_PATH, CONFIG_PATH, large=SMALL) as model:
        assert graph_bytes(model) < loaded - 0.9 * weights


def test_a_weight_that_is_no_number_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    tensors = load_file(BASE_PATH)
    key = max(tensors, key=lambda name: tensors[name].numel() * name.startswith("denoiser"))
    tensors[key].view(-1)[0] = torch.nan
    save_file(tensors, path)
    with streamed_lbm(path, CONFIG_PATH, large=SMALL) as model, pytest.raises(NonFiniteError, match=key):
        model(*latent())
