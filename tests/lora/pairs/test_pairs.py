import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.errors import CheckpointError, ModelMismatchError, NonFiniteError
from sigmascope.lora.pairs import open_pair

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.conftest import MakePair, ModelPair, State

    from sigmascope.lora.pairs import CheckpointPair

CPU = torch.device("cpu")
CONV_IN = "denoiser.conv_in.weight"


def test_layers_are_the_matrices_and_convolutions_of_the_denoiser(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with open_pair(files.base, files.tuned) as pair:
        assert set(pair.layers) == set(files.layers)


def test_biases_and_norms_are_kept_apart(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with open_pair(files.base, files.tuned) as pair:
        assert set(pair.others) == {"denoiser.conv_in.bias", "denoiser.conv_norm_out.weight"}


def test_the_change_is_tuned_minus_base(make_model_pair: "MakePair") -> None:
    files = make_model_pair(dtype=torch.bfloat16)
    with open_pair(files.base, files.tuned) as pair:
        change = pair.change("denoiser.conv_in.weight", CPU)
    expected = files.tuned_state[CONV_IN].float() - files.base_state[CONV_IN].float()
    assert torch.equal(change.delta, expected)
    assert change.delta_norm == pytest.approx(expected.double().norm().item(), rel=1e-12)
    assert change.base_norm == pytest.approx(files.base_state[CONV_IN].double().norm().item(), rel=1e-12)


def test_double_precision_files_are_subtracted_in_double_precision(make_model_pair: "MakePair") -> None:
    files = make_model_pair(dtype=torch.float64)
    with open_pair(files.base, files.tuned) as pair:
        assert pair.change("denoiser.conv_in.weight", CPU).delta.dtype == torch.float64


def test_a_key_missing_from_the_tuned_file_is_named_with_the_file(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=lambda base, tuned: tuned.__delitem__(CONV_IN))
    with pytest.raises(ModelMismatchError, match=rf"tuned\.safetensors lacks {CONV_IN}"), _open(files):
        pass


def test_a_key_missing_from_the_base_file_is_named_with_the_file(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=lambda base, tuned: base.__delitem__(CONV_IN))
    with pytest.raises(ModelMismatchError, match=rf"base\.safetensors lacks {CONV_IN}"), _open(files):
        pass


def test_different_shapes_are_both_named(make_model_pair: "MakePair") -> None:
    def widen(base: "State", tuned: "State") -> None:
        tuned[CONV_IN] = torch.zeros(8, 9, 3, 3)

    files = make_model_pair(edit=widen)
    with pytest.raises(ModelMismatchError) as caught, _open(files):
        pass
    assert CONV_IN in caught.value.message
    assert "(8, 4, 3, 3)" in caught.value.message
    assert "(8, 9, 3, 3)" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["base", "tuned"])
def test_a_weight_that_is_not_finite_is_named_with_its_file(
    make_model_pair: "MakePair", side: str, value: float
) -> None:
    def damage(base: "State", tuned: "State") -> None:
        {"base": base, "tuned": tuned}[side][CONV_IN][0, 0, 0, 0] = value

    files = make_model_pair(edit=damage)
    with (
        open_pair(files.base, files.tuned) as pair,
        pytest.raises(NonFiniteError, match=rf"{side}\.safetensors: {CONV_IN} holds"),
    ):
        pair.change("denoiser.conv_in.weight", CPU)


def test_infinities_of_both_files_that_cancel_to_nan_are_found(make_model_pair: "MakePair") -> None:
    def damage(base: "State", tuned: "State") -> None:
        base[CONV_IN][0, 0, 0, 0] = tuned[CONV_IN][0, 0, 0, 0] = float("inf")

    files = make_model_pair(edit=damage)
    with open_pair(files.base, files.tuned) as pair, pytest.raises(NonFiniteError, match="1 Inf"):
        pair.change("denoiser.conv_in.weight", CPU)


def test_quantised_weights_are_refused(make_model_pair: "MakePair") -> None:
    def quantise(base: "State", tuned: "State") -> None:
        base[CONV_IN] = base[CONV_IN].to(torch.int8)

    files = make_model_pair(edit=quantise)
    with pytest.raises(CheckpointError, match=f"{CONV_IN} is int8"), _open(files):
        pass


def test_a_file_without_a_denoiser_is_refused_with_what_it_holds(make_model_pair: "MakePair") -> None:
    def strip(base: "State", tuned: "State") -> None:
        for key in [key for key in base if key.startswith("denoiser.")]:
            del base[key]

    files = make_model_pair(edit=strip)
    with (
        pytest.raises(ModelMismatchError, match=r"base\.safetensors holds no weights named denoiser"),
        _open(files),
    ):
        pass


def test_the_same_file_twice_is_refused(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with pytest.raises(ModelMismatchError, match="nothing differs"), open_pair(files.base, files.base):
        pass


def _open(files: "ModelPair") -> "AbstractContextManager[CheckpointPair]":
    return open_pair(files.base, files.tuned)


def test_complex_weights_are_refused(make_model_pair: "MakePair") -> None:
    def edit(base: "State", tuned: "State") -> None:
        for state in (base, tuned):
            state["denoiser.conv_in.weight"] = state["denoiser.conv_in.weight"].to(torch.complex64)

    files = make_model_pair(edit=edit)
    with (
        pytest.raises(CheckpointError, match=r"conv_in\.weight is complex64.*from both checkpoints"),
        open_pair(files.base, files.tuned),
    ):
        pass


def test_packed_float4_weights_are_refused(make_model_pair: "MakePair") -> None:
    def edit(base: "State", tuned: "State") -> None:
        for state in (base, tuned):
            packed = torch.zeros(16, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
            state["denoiser.time_embedding.linear_1.weight"] = packed

    files = make_model_pair(edit=edit)
    with (
        pytest.raises(CheckpointError, match=r"linear_1\.weight is float4"),
        open_pair(files.base, files.tuned),
    ):
        pass


def test_a_tensor_in_a_shard_that_the_index_does_not_name_is_named(tmp_path: Path) -> None:
    for name in ("base", "tuned"):
        folder = tmp_path / name
        folder.mkdir()
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(len(name)))
        save_file(
            {"denoiser.a.weight": weight, "denoiser.stray.weight": weight.clone()}, folder / "one.safetensors"
        )
        index = {"metadata": {}, "weight_map": {"denoiser.a.weight": "one.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_pair(tmp_path / "base", tmp_path / "tuned") as pair:
        unread = [finding for finding in pair.findings if finding.id == "lora.unread_keys"]
    assert [finding.evidence["keys"] for finding in unread] == ["denoiser.stray.weight"] * 2
