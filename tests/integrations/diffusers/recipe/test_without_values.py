"""What is said of a LoRA of which the loader left tensors without values, or of which Accelerate has taken them away."""

from contextlib import suppress
from typing import Any

import accelerate
import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import State, lora_state
from torch import Tensor

import sigmascope
from sigmascope.analysis.lora_acting import acting_lora, spoiling_lora
from sigmascope.analysis.lora_idle import idle_lora
from sigmascope.analysis.lora_state import standing
from sigmascope.records.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def with_one_bias(state: State) -> State:
    name = next(key for key in state if key.endswith("lora_B.weight"))
    return state | {name.replace("weight", "bias"): torch.ones(state[name].shape[0])}


def without_one_factor(state: State) -> State:
    return {key: state[key] for key in [*state][1:]}


def call(pipeline: Any) -> Tensor | None:
    """The picture; None where the call fails, as some do that meet tensors on the meta device."""
    with suppress(RuntimeError):
        return generate(pipeline, "sd15", num_inference_steps=1)
    return None


@pytest.mark.parametrize("change", [with_one_bias, without_one_factor])
@pytest.mark.parametrize("watches_loading", [True, False])
def test_a_lora_without_some_values_is_not_said_to_act(change: Any, watches_loading: bool) -> None:
    pipeline = make_pipeline("sd15")
    state = change(lora_state(pipeline, ["unet"], only="to_q", size=0.3))
    if not watches_loading:
        pipeline.load_lora_weights(state)
    with sigmascope.watch(pipeline) as watching:
        if watches_loading:
            pipeline.load_lora_weights(state)
        call(pipeline)
    assert any(one.is_meta for one in pipeline.unet.parameters())
    run: Run = watching.record()
    found = standing(run)
    assert found is not None
    assert found.words == "without values"
    assert (acting_lora(run), idle_lora(run)) == (None, None)


def test_values_that_an_adapter_lacks_which_is_off_do_not_matter() -> None:
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], only="to_q", size=0.3)
    pipeline.load_lora_weights(without_one_factor(state), adapter_name="broken")
    pipeline.load_lora_weights(state, adapter_name="whole")
    pipeline.set_adapters(["whole"])
    with sigmascope.watch(pipeline) as watching:
        call(pipeline)
    assert spoiling_lora(watching.record()) is None
    assert acting_lora(watching.record()) is not None


@pytest.mark.parametrize("part", ["lora_A", "lora"])
def test_of_an_offloaded_lora_it_is_looked_at_what_is_kept_of_it(part: str) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ["unet"], only="to_q", size=0.3)
    pipeline.load_lora_weights({name: value * (part in name) for name, value in state.items()})
    accelerate.cpu_offload(pipeline.unet, execution_device="cpu")
    assert any(one.is_meta for one in pipeline.unet.parameters())
    for _ in range(2):  # what was seen to act is not looked at again
        with sigmascope.watch(pipeline) as watching:
            moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
        run = watching.record()
        assert moved is (part == "lora")
        assert (acting_lora(run) is not None) is moved
        assert (idle_lora(run) is None) is moved
