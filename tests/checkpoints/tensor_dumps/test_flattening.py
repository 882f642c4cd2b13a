from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints.tensor_dumps import flatten, plain_metadata
from sigmascope.errors import ConfigError


def never(text: str) -> bool:
    return False


def names(nested: Any) -> list[str]:
    return list(flatten(nested, never, private=False).tensors)


class Embeds(NamedTuple):
    prompt_embeds: Tensor
    pooled: Tensor | None


@dataclass
class Output:
    hidden: Tensor
    layers: tuple[Tensor, ...]


ONE = torch.ones(1)


def test_a_tensor_keeps_its_name() -> None:
    found = flatten({"cond": ONE}, never, private=False)
    assert found.tensors["cond"] is ONE
    assert found.skeleton == {}


def test_anything_that_is_no_mapping_is_named_tensor() -> None:
    assert names(ONE) == ["tensor"]
    assert names([ONE, ONE]) == ["tensor.0", "tensor.1"]


def test_a_comfyui_conditioning_gives_cond_and_the_tensors_beside_it() -> None:
    nested = {"positive": [[ONE, {"pooled_output": ONE, "strength": 0.5}], [ONE, {}]]}
    found = flatten(nested, never, private=False)
    assert list(found.tensors) == ["positive.0.cond", "positive.0.pooled_output", "positive.1.cond"]
    assert found.skeleton["positive"][0] == [
        {"$tensor": "positive.0.cond"},
        {"pooled_output": {"$tensor": "positive.0.pooled_output"}, "strength": 0.5},
    ]


def test_a_diffusers_tuple_is_numbered_and_none_passed_over() -> None:
    assert names({"embeds": (ONE, None, ONE)}) == ["embeds.0", "embeds.2"]


def test_a_model_output_is_named_by_its_fields() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    output: Any = BaseModelOutputWithPooling(last_hidden_state=ONE, pooler_output=ONE)
    assert names({"clip": output}) == ["clip.last_hidden_state", "clip.pooler_output"]


@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        (Embeds(ONE, None), ["x.prompt_embeds"]),
        (Output(ONE, (ONE,)), ["x.hidden", "x.layers.0"]),
        (OrderedDict(a={"b": [ONE]}), ["x.a.b.0"]),
        ({1: ONE}, ["x.1"]),
    ],
)
def test_fields_and_keys_name_what_is_in_them(nested: Any, expected: list[str]) -> None:
    assert names({"x": nested}) == expected


def test_a_name_that_is_taken_gets_a_number() -> None:
    assert names({"a.b": ONE, "a": {"b": ONE}}) == ["a.b", "a.b~2"]


def test_arrays_become_tensors() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for given in (array, array[:, ::-1], array.astype(">f4")):
        found = flatten({"x": given}, never, private=False).tensors["x"]
        np.testing.assert_array_equal(found.numpy(), given)


def test_a_read_only_array_is_taken_without_a_warning() -> None:
    array = np.ones(2)
    array.flags.writeable = False
    assert names({"x": array}) == ["x"]


def test_objects_become_the_name_of_their_type() -> None:
    found = flatten({"x": [[ONE, {"control": object(), "dtype": torch.float16}]]}, never, private=False)
    assert found.skeleton["x"][0][1] == {"control": "<object>", "dtype": "torch.float16"}


def test_what_holds_itself_ends() -> None:
    around: dict[str, Any] = {"t": ONE}
    around["self"] = around
    assert flatten({"x": around}, never, private=False).skeleton["x"]["self"] == "<dict in itself>"


def test_too_deep_a_nesting_is_refused() -> None:
    nested: Any = ONE
    for _ in range(40):
        nested = [nested]
    with pytest.raises(ConfigError, match="more than 32 deep"):
        flatten({"x": nested}, never, private=False)


def test_no_tensor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tensor"):
        flatten({"x": None}, never, private=False)


def test_texts_and_tokens_of_a_conditioning_are_private() -> None:
    beside = {"prompt": "cat", "negative_prompts": ["dog"], "note": "of a cat", "input_ids": [320, 2368]}
    numbers = {"strength": 0.5, "num_tokens": 77, "area": [8, 8, 0, 0]}
    found = flatten({"x": [[ONE, {**beside, **numbers}]]}, never, private=True)
    assert found.skeleton["x"][0][1] == {
        "prompt": "<text>",
        "negative_prompts": ["<text>"],
        "note": "<text>",
        "input_ids": ["<text>", "<text>"],
        **numbers,
    }


def test_texts_of_metadata_called_prompts_are_private() -> None:
    told = {"prompt": "cat", "negative_prompts": ["dog"], "prompt_embeds_mask": "kept", "model": "sd15"}
    assert plain_metadata(told, never, private=True) == told | {
        "prompt": "<text>",
        "negative_prompts": ["<text>"],
    }


def test_a_tensor_in_metadata_is_described() -> None:
    assert plain_metadata({"x": torch.zeros(2, 3)}, never, private=True) == {
        "x": "<float32 tensor of shape (2, 3)>"
    }
