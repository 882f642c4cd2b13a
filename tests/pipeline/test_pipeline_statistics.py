"""Statistics of a pipeline's denoiser, made by the pipeline's own calls."""

from typing import Any

import pytest
import torch
from tests.families import make_pipeline

from sigmascope.errors import ConfigError
from sigmascope.pipeline.calibration import denoiser_of, pipeline_statistics


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux", "wan", "qwen_image"])
def test_every_layer_of_each_family_that_a_call_goes_through_is_met(family: str) -> None:
    pipeline = make_pipeline(family)
    call: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}
    call |= {"num_frames": 5} if family == "wan" else {}
    if family in ("flux", "sd3", "wan", "qwen_image"):
        call["max_sequence_length"] = 16
    found = pipeline_statistics(pipeline, ["a fox"], call=call)
    # What a last block makes of the text is read by nothing: all of it in Qwen-Image, the queries in SD 3.
    unread = {"qwen_image": "transformer_blocks.1.", "sd3": "transformer_blocks.2.attn.add_q_proj"}.get(
        family
    )
    assert all(unread is not None and name.startswith(unread) for name in found.unmet), found.unmet
    assert found.facts["calls"] >= 2
    assert found.facts["samplings"] == 1
    assert all(layer.rows > 0 for layer in found.values())


def test_it_has_no_denoiser_or_two() -> None:
    class Two:
        def __init__(self) -> None:
            self.components = {"unet": torch.nn.Linear(1, 1), "transformer": torch.nn.Linear(1, 1)}

    assert isinstance(denoiser_of(make_pipeline("sd15")), torch.nn.Module)
    for thing, count in ((object(), 0), (Two(), 2)):
        with pytest.raises(ConfigError, match=f"has {count} denoisers"):
            denoiser_of(thing)


def test_no_prompt_is_told() -> None:
    with pytest.raises(ConfigError, match="there is no prompt"):
        pipeline_statistics(make_pipeline("sd15"), [])


def test_a_pipeline_is_as_it_was_afterwards() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.text_encoder.requires_grad_(True)
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    before = [[parameter.requires_grad for parameter in part.parameters()] for part in parts]
    pipeline_statistics(
        pipeline, ["a fox", "a dog"], call={"num_inference_steps": 2, "height": 32, "width": 32}
    )
    for part, required in zip(parts, before, strict=True):
        assert [parameter.requires_grad for parameter in part.parameters()] == required
        assert all(parameter.grad is None for parameter in part.parameters())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in part.modules())
    image = pipeline("a fox", num_inference_steps=1, height=32, width=32, output_type="pt").images
    assert not image.requires_grad


def test_each_call_by_itself_where_no_gradient_comes_through_the_sampling() -> None:
    pipeline = make_pipeline("sd15")
    call: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}
    found = pipeline_statistics(pipeline, ["a fox"], call=call, through="calls")
    assert found.facts["samplings"] == 0
    assert found.facts["calls"] == 2
    assert not found.unmet
