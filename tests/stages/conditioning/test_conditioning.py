"""Where the tensors of each form of conditioning are."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sigmascope.stages.conditioning import find_conditioning

EMBEDS = torch.randn(1, 77, 8)
POOLED = torch.randn(1, 12)
MASK = torch.ones(1, 77, dtype=torch.long)


@dataclass
class Output:
    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor


Named = namedtuple("Named", "context y")

FORMS: dict[str, tuple[Any, Tensor | None, Tensor | None]] = {
    "a tensor": (EMBEDS, None, None),
    "ComfyUI": ([[EMBEDS, {"pooled_output": POOLED, "attention_mask": MASK}]], POOLED, MASK),
    "ComfyUI in a tuple": (([[EMBEDS, {"pooled_output": POOLED}]],), POOLED, None),
    "ComfyUI's pair": ([EMBEDS, {"pooled_output": None}], None, None),
    "Stable Diffusion's tuple": ((EMBEDS, torch.randn(1, 77, 8)), None, None),
    "SDXL's tuple": ((EMBEDS, torch.randn(1, 77, 8), POOLED, torch.randn(1, 12)), POOLED, None),
    "SDXL's tuple without guidance": ((EMBEDS, None, POOLED, None), POOLED, None),
    "FLUX's tuple": ((EMBEDS, POOLED, torch.zeros(77, 3)), POOLED, None),
    "Qwen-Image's tuple": ((EMBEDS, MASK), None, MASK),
    "names": (
        {"negative_prompt_embeds": EMBEDS + 1, "prompt_embeds": EMBEDS, "attention_mask": MASK},
        None,
        MASK,
    ),
    "a denoiser's arguments": (
        {"encoder_hidden_states": EMBEDS, "added_cond_kwargs": {"text_embeds": POOLED}},
        POOLED,
        None,
    ),
    "a dataclass": (Output(EMBEDS, POOLED), POOLED, None),
    "a named tuple": (Named(EMBEDS, POOLED), POOLED, None),
    "a nest": ([{"cond": ({"crossattn": [EMBEDS]}, "text")}], None, None),
    "a mask of bytes": ({"context": EMBEDS, "attention_mask": MASK.bool()}, None, MASK.bool()),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_understood(form: str) -> None:
    conditioning, pooled, mask = FORMS[form]
    entry = find_conditioning(conditioning).first
    assert entry.tensor is EMBEDS
    assert entry.pooled is pooled
    assert (entry.attention_mask is None) if mask is None else torch.equal(entry.attention_mask, mask)  # type: ignore[arg-type]


def test_outputs_of_transformers(make_clip: Any, encode: Any) -> None:
    output = encode(make_clip(), "a fox")
    entry = find_conditioning(output).first
    assert entry.tensor is output.last_hidden_state
    assert entry.pooled is output.pooler_output


def test_the_projected_output_is_the_pooled_one(make_clip: Any, encode: Any) -> None:
    output = encode(make_clip(projection=True), "a fox")
    entry = find_conditioning(output).first
    assert entry.tensor is output.last_hidden_state
    assert entry.pooled is output.text_embeds


def test_regional_and_scheduled_prompts_are_entries() -> None:
    region = [EMBEDS + 1, {"area": (64, 64, 0, 0), "strength": 0.8, "mask": torch.ones(1, 8, 8)}]
    later = [EMBEDS + 2, {"start_percent": 0.5, "end_percent": 1.0}]
    found = find_conditioning([[EMBEDS, {}], region, later])
    assert found.structure == "comfyui"
    assert [dict(entry.metadata) for entry in found.entries] == [
        {},
        {"area": (64, 64, 0, 0), "strength": 0.8},
        {"start_percent": 0.5, "end_percent": 1.0},
    ]
    assert list(found.entries[1].others) == ["mask"]


def test_lists_of_comfyui_conditionings_are_all_entries() -> None:
    found = find_conditioning([[[EMBEDS, {}]], [[EMBEDS + 1, {}], [EMBEDS + 2, {"strength": 0.5}]]])
    assert (found.structure, len(found.entries)) == ("comfyui", 3)
    assert dict(found.entries[2].metadata) == {"strength": 0.5}


def test_prompts_of_different_length_are_entries() -> None:
    found = find_conditioning([torch.randn(12, 8), torch.randn(20, 8)])
    assert [entry.tensor.shape[0] for entry in found.entries if entry.tensor is not None] == [12, 20]


def test_prompts_of_one_length_in_a_list_are_entries_too() -> None:
    assert len(find_conditioning([torch.randn(20, 8), torch.randn(20, 8)]).entries) == 2
    assert len(find_conditioning((torch.randn(20, 8), torch.randn(20, 8))).entries) == 1


def test_a_mask_of_floating_numbers_is_not_pooled() -> None:
    mask = torch.ones(1, 77)
    entry = find_conditioning((EMBEDS, mask, EMBEDS + 1, mask + 0)).first
    assert entry.pooled is None
    assert entry.attention_mask is mask


@pytest.mark.parametrize(
    "array",
    [
        np.ones((1, 77, 8))[:, ::-1],
        np.ones((1, 77, 8), dtype=">f4"),
        np.asfortranarray(np.ones((1, 77, 8))),
        np.broadcast_to(np.float32(1), (1, 77, 8)),
    ],
    ids=["negative stride", "other byte order", "columns first", "read only"],
)
def test_any_array_of_numbers_is_a_tensor(array: Any) -> None:
    tensor = find_conditioning([array]).first.tensor
    assert tensor is not None
    assert torch.equal(tensor.double(), torch.ones(1, 77, 8).double())


def test_an_array_of_objects_is_no_tensor() -> None:
    assert find_conditioning([EMBEDS, np.array(["a", None], dtype=object)]).first.tensor is EMBEDS


def test_the_ids_of_flux_are_not_pooled() -> None:
    entry = find_conditioning((torch.randn(1, 1, 8), torch.zeros(1, 3))).first
    assert entry.pooled is None


def test_arrays_are_tensors() -> None:
    entry = find_conditioning(np.ones((1, 77, 8), dtype=np.float32)).first
    assert entry.tensor is not None
    assert entry.tensor.shape == (1, 77, 8)


def test_an_entry_that_holds_itself_ends() -> None:
    ring: list[Any] = [EMBEDS]
    ring.append(ring)
    assert find_conditioning(ring).first.tensor is EMBEDS


def test_a_list_that_is_only_itself_ends() -> None:
    ring: list[Any] = []
    ring.append([ring])
    assert find_conditioning(ring).first.tensor is None


@pytest.mark.parametrize("nothing", [None, "text", 7, [], {}, [[None, {}]], object(), nn.Linear(1, 1)])
def test_nothing_is_found_in_nothing(nothing: object) -> None:
    assert find_conditioning(nothing).first.tensor is None


def test_a_half_precision_embedding_of_an_accelerator_is_not_moved() -> None:
    tensor = torch.empty(1, 77, 8, device="meta", dtype=torch.bfloat16)
    assert find_conditioning([tensor]).first.tensor is tensor
