from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sigmascope.checkpoints.torch_files import unwrap_state
from sigmascope.errors import CheckpointError

PATH = Path("x.ckpt")
T = torch.zeros(2)


@pytest.mark.parametrize(
    ("loaded", "keys"),
    [
        ({"denoiser.w": T}, ["denoiser.w"]),
        (OrderedDict(a=T, b=T), ["a", "b"]),
        ({"model_state_dict": {"a": T}}, ["a"]),
        ({"state_dict": {"model.a": T, "model.b": T}}, ["a", "b"]),
        ({"state_dict": {"a": T}}, ["a"]),
        ({"state_dict": {"model.model.a": T}}, ["model.a"]),
        ({"model.a": T}, ["model.a"]),
        ({"model_state_dict": {"a": T}, "state_dict": {"b": T}}, ["a"]),
        ({"model": {"a": T}, "optimizer": {"state": {0: {"exp_avg": T}}, "param_groups": []}}, ["a"]),
        (
            {"model": {"a": T}, "rng_state": torch.zeros(9, dtype=torch.uint8), "loss": torch.tensor(1.0)},
            ["a"],
        ),
        ({"state_dict": {"model": {"model.a": T}}, "epoch": 3}, ["model.a"]),
        ({"model": {"state_dict": {"model.a": T}}}, ["a"]),
        ({"a": T, "model": {"b": T}}, ["a"]),
        (
            {"state_dict": {"model.diffusion_model.a": T, "first_stage_model.b": T}},
            ["model.diffusion_model.a", "first_stage_model.b"],
        ),
    ],
)
def test_the_state_dict_is_found(loaded: dict[str, Any], keys: list[str]) -> None:
    assert list(unwrap_state(loaded, PATH).tensors) == keys


def test_what_is_no_weight_is_listed_with_the_reason() -> None:
    loaded = {"a": T, "epoch": 3, "nested": {"b": T}, 7: T, "sparse": torch.zeros(2, 2).to_sparse()}
    state = unwrap_state(loaded, PATH)
    assert list(state.tensors) == ["a"]
    assert state.skipped["epoch"] == "is a int, not a tensor"
    assert state.skipped["nested"] == "is a dict, not a tensor"
    assert state.skipped["7"] == "has a int for a name"
    assert "sparse" in state.skipped["sparse"]


def test_what_lies_beside_the_state_dict_is_listed() -> None:
    assert unwrap_state({"state_dict": {"model.a": T}, "epoch": 3}, PATH).skipped == {
        "epoch": "is not a weight"
    }


@pytest.mark.parametrize(
    "loaded",
    [
        {"a": T, "lpips_loss.x": T},
        {"model_state_dict": {"a": T, "lpips_loss.x": T}},
        {"state_dict": {"model.a": T, "model.lpips_loss.x": T}},
        {"state_dict": {"model.a": T, "lpips_loss.x": T}},
    ],
)
def test_the_loss_network_is_left_out(loaded: dict[str, Any]) -> None:
    state = unwrap_state(loaded, PATH)
    assert (list(state.tensors), list(state.skipped)) == (["a"], ["lpips_loss.x"])


def test_parameters_become_plain_tensors() -> None:
    assert not unwrap_state({"a": torch.nn.Parameter(T)}, PATH).tensors["a"].requires_grad


def test_two_keys_that_become_one_are_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"x\.ckpt: has 'a' twice"):
        unwrap_state({"state_dict": {"a": T, "model.a": T}}, PATH)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (T, "holds a Tensor, not a dictionary"),
        ([T], "holds a list, not a dictionary"),
        ({}, "no tensors where.*nothing"),
        ({"unet": {"a": T}, "epoch": 1}, "has no tensors.*its top level holds: unet, epoch"),
        ({"state_dict": {}}, "has no tensors"),
    ],
)
def test_where_no_tensor_is_found_the_error_says_what_was(loaded: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        unwrap_state(loaded, PATH)


@pytest.mark.parametrize(
    "loaded", [{"model": {"a": T}, "ema": {"a": T}, "epoch": 1}, {"unet": {"a": T}, "text_encoder": {"b": T}}]
)
def test_weights_under_several_keys_are_refused_by_name(loaded: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="holds weights under several keys") as caught:
        unwrap_state(loaded, PATH)
    first, second = list(loaded)[:2]
    assert f"'{first}', '{second}'" in caught.value.message
    assert f"weights_only=True)['{first}']" in (caught.value.hint or "")


def test_the_one_key_that_holds_weights_is_named() -> None:
    with pytest.raises(CheckpointError, match="There are some under 'unet'"):
        unwrap_state({"unet": {"a": T}, "epoch": 1}, PATH)


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize(
    ("make", "kind", "hint"),
    [
        (lambda: torch.zeros(2, 2).to_sparse(), "is sparse", "to_dense"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"is quantised .*qint8",
            "dequantize",
        ),
        (lambda: torch.empty(2, device="meta"), "is on the meta device, without values", "are loaded"),
    ],
    ids=["sparse", "quantised", "meta"],
)
@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"model": state}])
def test_tensors_of_a_kind_that_is_not_read_are_told_by_kind(
    make: Callable[[], torch.Tensor], kind: str, hint: str, wrap: Any
) -> None:
    tensor = make()
    with pytest.raises(CheckpointError, match=f"'w' {kind}.*, and 1 more") as caught:
        unwrap_state(wrap({"w": tensor, "v": tensor}), PATH)
    assert hint in (caught.value.hint or "")
