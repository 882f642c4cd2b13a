"""Statistics of a pipeline's denoiser, and LoRAs fitted to it, by the pipeline's own calls."""

import copy
from typing import Any

import pytest
import torch
from tests.families import make_pipeline

from sigmascope.errors import ConfigError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.fit import FitOptions
from sigmascope.pipeline.pipeline_statistics import (
    denoiser_of,
    fit_pipeline_lora,
    noise_prompts,
    pipeline_statistics,
)


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


@pytest.mark.slow
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


@pytest.mark.parametrize("family", ["sd15", "sdxl", "flux", "wan", "qwen_image"])
def test_random_words_are_words_of_the_tokenizer_and_follow_the_seed(family: str) -> None:
    pipeline = make_pipeline(family)
    texts = noise_prompts(pipeline, 3, seed=5)
    assert [len(text.split()) for text in texts] == [8, 8, 8]
    for word in " ".join(texts).split():
        assert word.isalpha()
        assert len(pipeline.tokenizer(word, add_special_tokens=False).input_ids) == 1
    assert texts == noise_prompts(pipeline, 3, seed=5)
    assert texts != noise_prompts(pipeline, 3, seed=6)


def test_no_random_words_without_a_tokenizer_or_a_number() -> None:
    pipeline = make_pipeline("sd15")
    with pytest.raises(ConfigError, match="--noise 0 makes no prompt"):
        noise_prompts(pipeline, 0)
    pipeline.tokenizer = None
    with pytest.raises(ConfigError, match="has no tokenizer"):
        noise_prompts(pipeline, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "sd15",
        "flux",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "sd3", "wan", "qwen_image")),
    ],
)
def test_a_lora_comes_nearer_to_the_pipeline_that_it_was_made_from(family: str) -> None:
    pipeline = make_pipeline(family)
    tuned = denoiser_of(pipeline)
    base = copy.deepcopy(tuned)
    name = next(name for name, module in tuned.named_modules() if name.endswith(("attn1.to_v", "attn.to_v")))
    weight = tuned.get_parameter(f"{name}.weight")
    generator = torch.Generator().manual_seed(0)
    up, down = (
        torch.randn(len(weight), 2, generator=generator),
        torch.randn(2, weight.shape[1], generator=generator),
    )
    with torch.no_grad():
        weight.add_(up @ down)
    half = LoraFile({name: LoraFactors(0.5 * up, down, 2.0, tuple(weight.shape))})
    call: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}
    call |= {"num_frames": 5} if family == "wan" else {}
    if family in ("flux", "sd3", "wan", "qwen_image"):
        call["max_sequence_length"] = 16
    fitted = fit_pipeline_lora(
        base,
        pipeline,
        half,
        ["a fox", "a dog", "a house"],
        FitOptions(steps=40, learning_rate=0.05, gradient_accumulation_steps=1),
        call=call,
        batch_size=2,
    )
    assert fitted.calls + fitted.held_out >= 4
    assert fitted.after < 0.8 * fitted.before
    found, change = fitted.lora.modules[name].delta(), up @ down
    assert (found - change).norm() < (0.5 * change - change).norm()


def test_a_fit_needs_prompts_and_a_batch() -> None:
    pipeline = make_pipeline("sd15")
    with pytest.raises(ConfigError, match="there is no prompt"):
        fit_pipeline_lora(pipeline.unet, pipeline, LoraFile({}), [])
    name = "mid_block.resnets.0.time_emb_proj"
    shape = tuple(pipeline.unet.get_parameter(f"{name}.weight").shape)
    lora = LoraFile({name: LoraFactors(torch.zeros(shape[0], 1), torch.zeros(1, shape[1]), 1.0, shape)})
    with pytest.raises(ConfigError, match="--batch_size 0 paints nothing"):
        fit_pipeline_lora(pipeline.unet, pipeline, lora, ["a fox"], batch_size=0)


class Painter:
    """A pipeline that calls its denoiser three times for a prompt, if it is not told how often."""

    def __init__(self) -> None:
        self.unet = torch.nn.Sequential(torch.nn.Linear(4, 4))
        self.components = {"unet": self.unet}

    def __call__(self, prompts: Any, *, num_inference_steps: int = 3, **_: Any) -> Any:
        for step in range(num_inference_steps):
            out = self.unet(torch.full((2, 4), step + 1.0))
        return out


@pytest.mark.parametrize(("call", "totals"), [({}, [0] * 3 + [6] * 3), ({"num_inference_steps": 2}, [4] * 4)])
def test_no_bar_is_full_before_a_fit_has_recorded_its_calls(call: dict[str, Any], totals: list[int]) -> None:
    pipeline = Painter()
    base = copy.deepcopy(pipeline.unet)
    torch.nn.init.eye_(base.get_parameter("0.weight"))
    lora = LoraFile({"0": LoraFactors(torch.ones(4, 1), torch.ones(1, 4), 1.0, (4, 4))})
    seen: list[tuple[int, int, str]] = []
    fit_pipeline_lora(
        base, pipeline, lora, ["a fox", "a dog"], FitOptions(steps=2), call=call,
        progress=lambda *report: seen.append(report),
    )  # fmt: skip
    assert [report[:2] for report in seen if report[2] == "call"] == list(enumerate(totals, 1))
    steps = totals[-1] // 2
    others = [what for _, _, what in seen if what != "call" and not what.startswith("error")]
    judged = ("test call without the LoRA", "test call before the fit", "test call after the fit")
    assert others == [what for what in judged for _ in range(steps)]


def test_statistics_without_a_number_of_steps_do_not_fill_a_bar() -> None:
    seen: list[tuple[int, int, str]] = []
    pipeline_statistics(Painter(), ["a fox"], through="calls", progress=lambda *report: seen.append(report))
    assert seen == [(1, 0, "call"), (2, 0, "call"), (3, 0, "call")]
