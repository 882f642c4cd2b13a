"""Damaged models as they go through a pair: one clear error each, with the file and the tensor."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.errors import CheckpointError, ModelMismatchError, NonFiniteError, SigmascopeError
from sigmascope.lora.extract import extract_lora
from sigmascope.lora.pairs import CheckpointPair, open_pair

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair

CPU = torch.device("cpu")
BAD = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]


def read_all(files: "ModelPair") -> None:
    with open_pair(files.base, files.tuned) as pair:
        change_all(pair)


def change_all(pair: CheckpointPair) -> None:
    for key in (*pair.others, *(f"{layer}.weight" for layer in pair.layers)):
        pair.change(key, CPU)


def test_a_value_that_is_not_finite_anywhere_in_either_file_is_found(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    source = random.Random(0)
    keys = [key for key in files.base_state if key.startswith("denoiser.")]
    for number in range(40):
        side, key = source.choice(("base", "tuned")), source.choice(keys)
        dtype, value = source.choice(DTYPES), source.choice(BAD)
        for name, state in (("base", files.base_state), ("tuned", files.tuned_state)):
            damaged = {k: tensor.to(dtype, copy=True) for k, tensor in state.items()}
            if name == side:
                flat = damaged[key].view(-1)
                flat[source.randrange(flat.numel())] = value
            save_file(damaged, {"base": files.base, "tuned": files.tuned}[name])
        with pytest.raises(NonFiniteError) as caught:
            read_all(files)
        assert f"{side}.safetensors: {key} holds" in str(caught.value), number
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", ["base", "tuned"])
def test_extraction_ends_with_the_file_and_the_layer_and_writes_nothing(
    make_model_pair: "MakePair", tmp_path: Path, side: str
) -> None:
    files = make_model_pair()
    damaged = dict(files.base_state if side == "base" else files.tuned_state)
    damaged["denoiser.conv_out.weight"][0, 0, 0, 0] = float("nan")
    save_file(damaged, {"base": files.base, "tuned": files.tuned}[side])
    before = set(tmp_path.iterdir())
    with pytest.raises(NonFiniteError, match=rf"{side}\.safetensors.*conv_out\.weight holds 1 NaN"):
        extract_lora(files.base, files.tuned, tmp_path / "lora.safetensors")
    assert {path for path in tmp_path.iterdir() if path.suffix == ".safetensors"} == {
        path for path in before if path.suffix == ".safetensors"
    }


def test_any_byte_of_a_header_may_be_wrong(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    sound = files.tuned.read_bytes()
    header_bytes = 8 + int.from_bytes(sound[:8], "little")
    source = random.Random(1)
    kinds: set[type[SigmascopeError]] = set()
    for number in range(80):
        content = bytearray(sound)
        for _ in range(source.choice((1, 2, 8))):
            content[source.randrange(header_bytes)] = source.randrange(256)
        files.tuned.write_bytes(content)
        try:
            read_all(files)
        except SigmascopeError as error:
            kinds.add(type(error))
            message = str(error)
            assert "tuned.safetensors" in message, number
            assert "\n" not in message, number
    assert {CheckpointError, ModelMismatchError} <= kinds


def test_a_file_that_is_cut_while_it_is_open_is_an_error(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with open_pair(files.base, files.tuned) as pair:
        files.tuned.write_bytes(files.tuned.read_bytes()[:2000])
        with pytest.raises(CheckpointError, match=r"tuned\.safetensors: ends inside"):
            change_all(pair)
