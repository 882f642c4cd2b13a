"""Whether the LoRAs of a call acted in it, beside its picture: on what did not run, and changed while it ran."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.families import generate, make_pipeline
from tests.families.family import FAMILIES
from tests.families.loras import lora_state
from tests.families.pipelines import PROMPT
from tests.integrations.diffusers.other_pipelines import controlnet, image_to_image
from torch import Tensor, nn

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora, spoiling_lora
from sigmascope.analysis.lora_idle import idle_lora
from sigmascope.analysis.lora_state import standing
from sigmascope.records.run import Run
from sigmascope.reports.html import to_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:No LoRA keys", "ignore:Already found a `peft_config`"),
]
EMBEDS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
NOT_IN_EMBEDDINGS, NOT_RUN = {"lora_not_in_embeddings"}, {"lora_encoder_not_run"}


@torch.no_grad()
def encode(pipeline: Any) -> dict[str, Any]:
    """What a program gives a call in place of a prompt."""
    if type(pipeline).__name__ == "FluxPipeline":
        made = pipeline.encode_prompt(PROMPT, None, device="cpu", max_sequence_length=32)
        return {"prompt": None, "prompt_embeds": made[0], "pooled_prompt_embeds": made[1]}
    made = pipeline.encode_prompt(
        PROMPT, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True
    )
    return {"prompt": None, "negative_prompt": None, **dict(zip(EMBEDS, made, strict=False))}


def told(run: Run) -> set[str]:
    """The findings on the calls."""
    calls = [stage for stage in run.walk() if stage.name == "generation"]
    return {finding["id"] for call in calls for finding in call.facts.get("idle_loras", ())}


class Program:
    """A pipeline with a LoRA on its text encoders, or on the denoiser too, loaded in a watch."""

    def __init__(self, family: str, *, on_denoiser: bool = False) -> None:
        self.family, self.pipeline = family, make_pipeline(family)
        known = FAMILIES[family]
        parts = (*known.lora_encoders, *([known.denoiser] if on_denoiser else ()))
        self.lora = lora_state(self.pipeline, parts, size=0.3)
        self.bare = self.picture(**encode(self.pipeline))

    def picture(self, **given: Any) -> Tensor:
        return generate(self.pipeline, self.family, num_inference_steps=1, **given)

    def load(self) -> None:
        self.pipeline.load_lora_weights(dict(self.lora))

    def watched(self, **given: Any) -> tuple[bool, set[str]]:
        """Whether the picture moved, and what a watch says of the call."""
        with sigmascope.watch(self.pipeline) as watching:
            moved = not torch.equal(self.picture(**given), self.bare)
        return moved, told(watching.record())


def test_a_lora_that_was_there_before_the_watch_is_said_to_act_if_it_does() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ["unet"], size=0.3)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for factors, acts in ((state, True), (zeros, False)):
        pipeline.unload_lora_weights()
        pipeline.load_lora_weights(dict(factors), adapter_name="style")
        layers = sum(hasattr(module, "lora_A") for module in pipeline.unet.modules())
        with sigmascope.watch(pipeline) as watching:
            picture = generate(pipeline, "sd15", num_inference_steps=1)
        said = acting_lora(watching.record())
        assert torch.equal(picture, bare) is not acts
        assert (said is not None) is acts
        assert said is None or f"style on {layers} layers of unet at strength 1." in said


@pytest.mark.parametrize("family", ["sd15", "sdxl", "flux"])
def test_a_text_encoders_lora_acts_through_the_embeddings_that_were_made_with_it(family: str) -> None:
    program = Program(family)
    unwatched = encode(program.pipeline)
    with sigmascope.watch(program.pipeline):
        before = encode(program.pipeline)
        program.load()
        after = encode(program.pipeline)
    assert program.watched(**before) == (False, NOT_IN_EMBEDDINGS)
    assert program.watched(**after) == (True, set())
    assert program.watched(**unwatched) == (False, NOT_RUN)
    assert program.watched(**encode(program.pipeline)) == (True, NOT_RUN)  # outside of any watch
    assert program.watched() == (True, set())  # the prompt itself
    program.pipeline.set_adapters("default_0", 0.5)
    assert program.watched(**after) == (True, set())


@pytest.mark.parametrize("where", ["taken off", "in another pipeline"])
def test_a_lora_that_is_in_the_embeddings_alone_is_not_said_to_do_nothing(where: str) -> None:
    program = Program("sd15")
    without = encode(program.pipeline)
    with sigmascope.watch() as watching:
        program.load()
        made = encode(program.pipeline)
        if where == "taken off":
            program.pipeline.unload_lora_weights()
        else:
            program.pipeline = make_pipeline("sd15")
        picture = program.picture(**made)
    assert not torch.equal(picture, program.bare)
    run = watching.record()
    assert told(run) == {"lora_in_embeddings"}
    assert "model.lora_elsewhere" not in {finding.id for finding in run.findings}
    said = standing(run)
    assert said is not None
    assert said.words == "unknown"
    assert "the embeddings that the call was given were made with one" in said.says
    assert program.watched(**without)[1] == set()


def test_a_lora_that_is_on_the_denoiser_too_acts_with_any_embeddings() -> None:
    program = Program("sd15", on_denoiser=True)
    unwatched = encode(program.pipeline)
    program.load()
    assert program.watched(**unwatched) == (True, set())


BY_PEFT = {"r": 2, "target_modules": ["to_q", "to_out.0"]}
OFF: dict[str, dict[str, Any]] = {"disabled": {}, "scaled": {"cross_attention_kwargs": {"scale": 0.0}}}


@pytest.mark.parametrize("how", OFF)
@pytest.mark.parametrize("changes", [{"bias": "lora_only"}, {"init_lora_weights": "olora"}], ids=str)
def test_a_lora_that_changed_the_model_itself_is_open_where_it_is_off(
    how: str, changes: dict[str, Any]
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unet.add_adapter(LoraConfig(**{**BY_PEFT, "init_lora_weights": False, **changes}), "a")
    for name, bias in pipeline.unet.named_parameters():
        bias.data += 0.5 * ("bias" in changes and name.endswith("base_layer.bias"))
    if how == "disabled":
        pipeline.disable_lora()
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, "sd15", num_inference_steps=1, **OFF[how])
    assert not torch.equal(picture, bare)
    run = watching.record()
    assert told(run) == {"lora_in_base"}
    assert headline(run).startswith("Whether the LoRA acts is unknown: with ")
    assert acting_lora(run) is None


@pytest.mark.parametrize("off", ["set_adapters", "deleted", "strength"])
def test_of_an_adapter_that_is_off_beside_one_that_acts_it_is_told_what_the_model_lacks(off: str) -> None:
    bare = make_pipeline("sd15")
    pipeline = make_pipeline("sd15")
    first = LoraConfig(**BY_PEFT, init_lora_weights="pissa")
    pictures = []
    for own, configs in ((bare, {}), (pipeline, {"a": first})):
        torch.manual_seed(0)
        for name, config in {"b": LoraConfig(**BY_PEFT, init_lora_weights=False), **configs}.items():
            own.unet.add_adapter(config, name)
        with sigmascope.watch(own) as setting:
            if configs and off == "strength":
                own.set_adapters(["a", "b"], [0.0, 1.0])
            else:
                own.set_adapters(["b"])
            if configs and off == "deleted":
                own.delete_adapters("a")
        with sigmascope.watch(own) as watching:
            pictures.append(generate(own, "sd15", num_inference_steps=1))
    assert not torch.equal(*pictures)
    stages = [one for one in setting.record().walk() if one.name == "lora_application"]
    stage = stages[-1] if off == "deleted" else None
    run = watching.record()
    ids = {one["id"] for one in stage.facts["lora_application"]["findings"]} if stage else told(run)
    assert "lora_off_in_base" in ids
    assert idle_lora(run) is None
    says = next(
        one.message for one in (setting.record() if stage else run).findings if one.id == "lora_off_in_base"
    )
    assert 'though the adapter a is off: with init_lora_weights="pissa" it took a part out of' in says


def on_half(pipeline: Any, half: str) -> None:
    layers = [
        name
        for name, layer in pipeline.vae.named_modules()
        if name.startswith(half) and isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    pipeline.vae.add_adapter(LoraConfig(r=2, target_modules=layers, init_lora_weights=False), "a")


@pytest.mark.parametrize(
    ("half", "call", "found"),
    [
        ("encoder", {}, {"lora_not_run"}),
        ("decoder", {}, set()),
        ("decoder", {"output_type": "latent"}, {"lora_not_run"}),
        ("decoder", {"cross_attention_kwargs": {"scale": 0.0}}, set()),
    ],
    ids=str,
)
def test_a_lora_on_half_of_a_vae_acts_where_this_half_runs(
    half: str, call: dict[str, Any], found: set[str]
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1, **call)
    on_half(pipeline, half)
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1, **call), bare)
    run = watching.record()
    assert told(run) == found
    assert moved is (not found)
    assert (f"it is on vae.{half}, which did not run" in headline(run)) is not moved


def show_picture(pipeline: Any) -> None:
    """Have Qwen-Image's encoder see a picture beside its tokens, as the pipelines do that edit one."""
    ids = torch.tensor([[5, 6, 7]])
    pipeline.text_encoder.config.image_token_id = pipeline.text_encoder.model.config.image_token_id = 6

    def encode_with_picture(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        made = pipeline.text_encoder(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == 6).int(),
            pixel_values=torch.linspace(-1.0, 1.0, 4 * 3 * 2 * 14 * 14).reshape(4, -1),
            image_grid_thw=torch.tensor([[1, 2, 2]]),
            output_hidden_states=True,
        )
        return made.hidden_states[-1], torch.ones_like(ids)

    pipeline._get_qwen_prompt_embeds = encode_with_picture


@pytest.mark.parametrize(
    ("modules", "sees", "found"),
    [
        (r".*visual.*(qkv|proj)", False, {"lora_not_run"}),
        (r".*(visual|layers\.0).*(qkv|[qo]_proj)", False, set()),
        (r".*visual.*(qkv|proj)", True, set()),
    ],
)
def test_a_lora_on_an_encoder_s_vision_tower_acts_where_the_encoder_is_given_a_picture(
    modules: str, sees: bool, found: set[str]
) -> None:
    pipeline = make_pipeline("qwen_image")
    if sees:
        show_picture(pipeline)
    bare = generate(pipeline, "qwen_image", num_inference_steps=1)
    pipeline.text_encoder.add_adapter(LoraConfig(r=2, target_modules=modules, init_lora_weights=False), "a")
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(generate(pipeline, "qwen_image", num_inference_steps=1), bare)
    run = watching.record()
    assert moved is (not found)
    assert told(run) == found
    assert ("it is on text_encoder.model.visual, which did not run" in headline(run)) is not moved


def test_a_vae_s_encoder_with_a_lora_acts_where_a_picture_is_given() -> None:
    pipeline, call = image_to_image()
    pictures = []
    for is_on in (False, True):
        if is_on:
            on_half(pipeline, "encoder")
        with sigmascope.watch(pipeline) as watching:
            pictures.append(pipeline(**call, generator=torch.Generator().manual_seed(0)).images)
    assert not torch.equal(*pictures)
    assert told(watching.record()) == set()


NO_CONTROL: dict[str, dict[str, Any]] = {
    "cross_attention_kwargs": {"cross_attention_kwargs": {"scale": 0.0}},
    "controlnet_conditioning_scale": {"controlnet_conditioning_scale": 0.0},
    "control_guidance": {"control_guidance_start": 0.9, "control_guidance_end": 1.0},
}


@pytest.mark.parametrize("argument", NO_CONTROL)
def test_a_controlnets_lora_is_scaled_by_its_own_argument_alone(argument: str) -> None:
    pipeline, call = controlnet()
    zero = NO_CONTROL[argument]
    for layer in (pipeline.controlnet.controlnet_mid_block, *pipeline.controlnet.controlnet_down_blocks):
        nn.init.normal_(layer.weight)

    def picture() -> Tensor:
        made: Tensor = pipeline(**call, **zero, generator=torch.Generator().manual_seed(0)).images
        return made

    bare = picture()
    pipeline.controlnet.add_adapter(LoraConfig(**BY_PEFT, init_lora_weights=False), "a")
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(picture(), bare)
    assert told(watching.record()) == (set() if moved else {"lora_scaled_to_zero"})
    assert moved is (argument == "cross_attention_kwargs")


@pytest.mark.parametrize(
    ("family", "encoder", "layers", "argument", "scales"),
    [
        ("wan", "text_encoder", ["q", "v"], "attention_kwargs", False),
        ("sd3", "text_encoder_3", ["q", "v"], "joint_attention_kwargs", False),
        ("sd3", "text_encoder_2", ["q_proj"], "joint_attention_kwargs", True),
    ],
)
def test_a_scale_reaches_the_encoders_that_the_encoding_has_scaled(
    family: str, encoder: str, layers: list[str], argument: str, scales: bool
) -> None:
    pipeline = make_pipeline(family)
    off: dict[str, Any] = {argument: {"scale": 0.0}}
    bare = generate(pipeline, family, num_inference_steps=1)
    config = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    getattr(pipeline, encoder).add_adapter(config)
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(generate(pipeline, family, num_inference_steps=1, **off), bare)
    assert moved is not scales
    assert told(watching.record()) == ({"lora_scaled_to_zero"} if scales else set())


def test_a_dora_of_strength_0_acts_beside_a_lora_of_strength_0() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    for name, is_dora in (("dora", True), ("lora", False)):
        pipeline.unet.add_adapter(LoraConfig(**BY_PEFT, use_dora=is_dora, init_lora_weights=False), name)
    for name, magnitude in pipeline.unet.named_parameters():
        magnitude.data *= 1.5 if "magnitude" in name else 1.0
    pipeline.set_adapters(["dora", "lora"], [0.0, 0.0])
    with sigmascope.watch(pipeline) as watching:
        assert not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    run = watching.record()
    assert told(run) == set()
    assert idle_lora(run) is None


@pytest.mark.parametrize("fused_in_watch", [True, False])
@pytest.mark.parametrize("fails_later", [True, False])
def test_a_dora_that_was_fused_at_strength_0_stays_in_the_weights(
    fails_later: bool, fused_in_watch: bool, tmp_path: Path
) -> None:
    """Its magnitudes are in the weights, whatever becomes of its layers and of another file."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unet.add_adapter(LoraConfig(**BY_PEFT, use_dora=True, init_lora_weights=False), "dora")
    for name, magnitude in pipeline.unet.named_parameters():
        magnitude.data *= 1.5 if "magnitude" in name else 1.0
    if not fused_in_watch:
        pipeline.fuse_lora(lora_scale=0.0)
    with sigmascope.watch(pipeline) as watching:
        if fused_in_watch:
            pipeline.fuse_lora(lora_scale=0.0)
        pipeline.unload_lora_weights()
        if fails_later:
            (broken := tmp_path / "broken.safetensors").write_bytes(b"no weights")
            with pytest.raises(OSError, match="Unable to load"):
                pipeline.load_lora_weights(str(broken))
        assert not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    found = standing(watching.record())
    assert found is not None
    assert found.says == "The LoRA acts in the denoiser: it is merged into the weights."


def test_of_a_denoisers_lora_that_the_call_scales_to_zero_the_encoders_part_may_act_through_embeddings() -> (
    None
):
    program = Program("sd15", on_denoiser=True)
    unwatched = encode(program.pipeline)
    off = {"cross_attention_kwargs": {"scale": 0.0}}
    with sigmascope.watch(program.pipeline):
        before = encode(program.pipeline)
        program.load()
        after = encode(program.pipeline)
    assert program.watched(**before, **off) == (False, NOT_IN_EMBEDDINGS | {"lora_scaled_to_zero"})
    program.pipeline.set_adapters("default_0", 1.0)
    assert program.watched(**after, **off) == (True, set())
    program.pipeline.set_adapters("default_0", 1.0)
    assert program.watched(**unwatched, **off) == (False, NOT_RUN)


@pytest.mark.parametrize(
    "change",
    [
        lambda embeds: embeds | {"prompt_embeds": embeds["prompt_embeds"].clone()},
        lambda embeds: embeds | {"prompt_embeds": embeds["prompt_embeds"].mul_(1.0)},
    ],
    ids=["a copy", "written to"],
)
def test_embeddings_that_were_changed_since_are_not_known(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    program = Program("sd15")
    program.load()
    with sigmascope.watch(program.pipeline):
        embeds = encode(program.pipeline)
    assert program.watched(**change(embeds)) == (True, NOT_RUN)


def test_a_lora_of_zeros_changes_nothing_through_any_embeddings() -> None:
    program = Program("sd15")
    program.lora = {name: factor * ("lora_A" in name) for name, factor in program.lora.items()}
    program.load()
    with sigmascope.watch(program.pipeline):
        embeds = encode(program.pipeline)
    for given in (embeds, encode(program.pipeline)):
        assert program.watched(**given) == (False, {"lora_is_zero"})


def test_a_lora_with_nan_that_was_there_before_the_watch_is_not_said_to_act() -> None:
    pipeline = make_pipeline("sd15")
    lora = lora_state(pipeline, ["unet"], only="to_q")
    pipeline.load_lora_weights(
        {name: factor * torch.nan for name, factor in lora.items()}, adapter_name="bad"
    )
    with sigmascope.watch(pipeline) as run:
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert picture.isnan().any()
    assert acting_lora(run.record()) is None


@pytest.mark.parametrize("how", ["strength", "scale", "fused"])
def test_nan_at_strength_zero_is_never_called_a_lora_that_changes_nothing(how: str) -> None:
    """0 · NaN is NaN, and PEFT multiplies."""
    pipeline = make_pipeline("sd15")
    lora = lora_state(pipeline, ["unet"], only="attn1")
    lora[next(name for name in lora if "lora_B" in name)][0, 0] = torch.nan
    given: dict[str, Any] = {"cross_attention_kwargs": {"scale": 0.0}} if how == "scale" else {}
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora, adapter_name="a")
        if how != "scale":
            pipeline.set_adapters(["a"], [0.0])
        if how == "fused":
            pipeline.fuse_lora()
        picture = generate(pipeline, "sd15", num_inference_steps=1, **given)
    run = watching.record()
    assert picture.isnan().any()
    assert told(run) == set()
    assert (idle_lora(run), acting_lora(run)) == (None, None)
    spoilt = spoiling_lora(run)
    assert spoilt is not None
    assert "NaN or Inf" in spoilt
    assert headline(run).startswith(spoilt)


@pytest.mark.filterwarnings("ignore:.*")
def test_nan_in_an_adapter_that_is_off_spoils_nothing() -> None:
    pipeline = make_pipeline("sd15")
    lora, bad = (lora_state(pipeline, ["unet"], seed=seed, only="attn1") for seed in (0, 1))
    bad[next(name for name in bad if "lora_B" in name)][0, 0] = torch.nan
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(bad, adapter_name="a")
        pipeline.load_lora_weights(lora, adapter_name="b")
        pipeline.set_adapters(["b"])
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    run = watching.record()
    assert not picture.isnan().any()
    assert (idle_lora(run), spoiling_lora(run)) == (None, None)
    acts = acting_lora(run)
    assert acts is not None
    assert acts.startswith("The LoRA acts")


def test_embeddings_of_another_lora_are_not_this_ones() -> None:
    program = Program("sd15")
    other = lora_state(program.pipeline, ["text_encoder"], size=0.3, seed=1)
    with sigmascope.watch(program.pipeline):
        program.pipeline.load_lora_weights(other, adapter_name="other")
        embeds = encode(program.pipeline)
        program.pipeline.unload_lora_weights()
        program.load()
    _, found = program.watched(**embeds)
    assert found == NOT_IN_EMBEDDINGS


@pytest.mark.parametrize("boundary", [0.0, 2.0])
def test_a_lora_on_the_one_of_two_denoisers_that_does_not_run_changes_nothing(boundary: float) -> None:
    pipeline = make_pipeline("wan")
    second = type(pipeline.transformer).from_config(pipeline.transformer.config).eval()
    pipeline.register_modules(transformer_2=second)
    pipeline.register_to_config(boundary_ratio=boundary)  # 0: the first makes all steps, 2: the second
    bare = generate(pipeline, "wan", num_inference_steps=1)
    state = lora_state(pipeline, ["transformer"], size=0.3, only="attn")
    pipeline.load_lora_weights(state, load_into_transformer_2=True)
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(generate(pipeline, "wan", num_inference_steps=1), bare)
    run = watching.record()
    ran = run.stage("denoising").facts["denoiser_calls"]
    assert moved is ("transformer_2" in ran)
    assert told(run) == (set() if moved else {"lora_not_run"})


@pytest.mark.parametrize("has_first", [False, True])
def test_a_file_that_is_loaded_into_the_second_denoiser_is_looked_for_there(has_first: bool) -> None:
    pipeline = make_pipeline("wan")
    second = type(pipeline.transformer).from_config(pipeline.transformer.config).eval()
    pipeline.register_modules(transformer_2=second)
    first, file = (lora_state(pipeline, ["transformer"], size=0.3, only="attn", seed=seed) for seed in (1, 2))
    with sigmascope.watch(pipeline) as watching:
        if has_first:
            pipeline.load_lora_weights(first, adapter_name="first")
        pipeline.load_lora_weights(file, adapter_name="second", load_into_transformer_2=True)
    run = watching.record()
    stage = [stage for stage in run.walk() if stage.name == "lora_application"][-1]
    assert stage.facts["only_on"] == "transformer_2"
    assert stage.facts["lora_application"]["findings"] == []
    assert (acting_lora(run) or "").startswith("The LoRA acts: ")


Act = Callable[[Any], object]


def load(pipeline: Any, name: str = "style") -> None:
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], size=0.3, only="attn1"), adapter_name=name)


def in_step(act: Act, step: int) -> dict[str, Any]:
    """Arguments of a call of three steps that does something after one of them."""

    def callback(pipeline: Any, index: int, _timestep: object, held: dict[str, Any]) -> dict[str, Any]:
        if index + 1 == step:
            act(pipeline)
        return held

    return {"num_inference_steps": 3, "callback_on_step_end": callback}


CHANGES: dict[str, tuple[Act, Act]] = {
    "load_lora_weights": (lambda pipeline: None, load),
    "set_adapters": (load, lambda pipeline: pipeline.set_adapters("style", 0.0)),
    "disable_lora": (load, lambda pipeline: pipeline.disable_lora()),
    "delete_adapters": (load, lambda pipeline: pipeline.delete_adapters("style")),
    "unload_lora_weights": (load, lambda pipeline: pipeline.unload_lora_weights()),
}


@pytest.mark.parametrize(
    ("method", "step"), [*((method, 2) for method in CHANGES), ("load_lora_weights", 3), ("disable_lora", 3)]
)
def test_a_change_between_steps_is_told_with_its_step_and_no_verdict_on_the_whole(
    method: str, step: int
) -> None:
    before, act = CHANGES[method]
    pictures = []
    for is_changed in (False, True):
        pipeline = make_pipeline("sd15")
        before(pipeline)
        with sigmascope.watch(pipeline) as watching:
            call = in_step(act if is_changed else lambda pipeline: None, step)
            pictures.append(generate(pipeline, "sd15", **call))
    run = watching.record()
    (stage,) = (stage for stage in run.walk() if stage.name == "lora_application")
    assert (stage.facts["method"], stage.facts["after_step"]) == (method, step)
    assert stage.facts["lora_application"]["effective"] is True
    (found,) = (finding for finding in run.findings if finding.id.startswith("lora_changed"))
    assert (found.id, found.severity) == ("lora_changed_in_call", "info")
    assert f"{method} after step {step} of 3" in found.message
    is_late = torch.equal(*pictures)  # the call did not feel it
    assert is_late is (step == 3) is ("from the next call on" in found.message)


def test_a_change_outside_of_calls_has_no_step() -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as watching:
        load(pipeline)
    assert "after_step" not in watching.record().stage("lora_application").facts


@pytest.mark.parametrize("step", [2, 3])
def test_a_change_between_the_steps_of_an_own_loop_is_told_and_one_after_it_is_not_in_it(step: int) -> None:
    pipeline = make_pipeline("sd15")
    load(pipeline)
    unet, scheduler = pipeline.unet, pipeline.scheduler
    words = torch.zeros(1, 77, unet.config.cross_attention_dim)
    with sigmascope.watch() as watching, torch.no_grad():
        latent = torch.ones(1, unet.config.in_channels, 8, 8)
        scheduler.set_timesteps(3)
        for place, timestep in enumerate(scheduler.timesteps, 1):
            noise = unet(latent, timestep, words).sample
            latent = scheduler.step(noise, timestep, latent).prev_sample
            if place == step:
                pipeline.disable_lora()
    run = watching.record()
    assert ("lora_changed_in_call" in told(run)) is (step == 2)
    (stage,) = (stage for stage in run.walk() if stage.name == "lora_application")
    assert stage.facts.get("after_step") == (2 if step == 2 else None)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("replaced", [False, True])
def test_of_a_call_of_a_traced_denoiser_nobody_knows_whether_its_lora_acts(replaced: bool) -> None:
    pipeline = make_pipeline("sd15")
    unet = pipeline.unet
    bare = generate(pipeline, "sd15")
    inputs = (
        torch.zeros(2, 4, 8, 8),
        torch.tensor(1),
        torch.zeros(2, 77, unet.config.cross_attention_dim),
    )
    trace: Any = torch.jit.trace
    traced = trace(lambda *given: unet(*given, return_dict=False)[0], inputs, check_trace=False)
    if replaced:
        unet.forward = lambda sample, timestep, encoder_hidden_states, **_: (
            traced(sample, timestep, encoder_hidden_states),
        )
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], size=0.3, only="attn1"))
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, "sd15")
    assert torch.equal(picture, bare) is replaced
    assert told(watching.record()) == ({"lora_not_seen"} if replaced else set())


@pytest.mark.parametrize("watches_fusing", [True, False])
def test_a_lora_beside_a_fused_one_is_told_to_do_nothing(watches_fusing: bool) -> None:
    pipeline = make_pipeline("sd15")
    first, second = (lora_state(pipeline, ["unet"], size=0.2, seed=seed, only="attn1") for seed in (0, 1))
    pipeline.load_lora_weights(first, adapter_name="fast")
    pipeline.fuse_lora()
    alone = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unfuse_lora()
    pipeline.load_lora_weights(second, adapter_name="style")
    pipeline.set_adapters(["fast", "style"])
    if not watches_fusing:
        pipeline.fuse_lora(adapter_names=["fast"])
    with sigmascope.watch(pipeline) as watching:
        if watches_fusing:
            pipeline.fuse_lora(adapter_names=["fast"])
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.allclose(picture, alone, atol=1e-5)  # unfusing rounds
    run = watching.record()
    (found,) = (finding for finding in run.findings if finding.id == "lora_beside_merged")
    assert found.message.startswith("The LoRA style changes nothing beside the adapters that are merged")
    assert idle_lora(run) is None


def test_strengths_that_a_watched_method_set_are_no_other_codes() -> None:
    pipeline = make_pipeline("flux")
    lora = lora_state(pipeline, ["transformer"], size=0.1)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(dict(lora), adapter_name="a")
        generate(pipeline, "flux", num_inference_steps=1)
        pipeline.load_lora_weights(dict(lora), adapter_name="b")
        pipeline.set_adapters(["a", "b"], [0.5, 0.5])  # together as before
        generate(pipeline, "flux", num_inference_steps=1)
    says = acting_lora(watching.record()) or ""
    assert says.startswith("The LoRA acts: ‖ΔW‖ / ‖W‖ is ")
    assert "other code" not in says


@pytest.mark.filterwarnings("ignore:Adapter cannot be set when")
@pytest.mark.parametrize("case", ["loaded alone", "fused first", "both set", "only the second wanted"])
def test_a_lora_that_loading_another_switched_off_is_told_where_it_stays_off(case: str) -> None:
    pipeline = make_pipeline("sd15")
    first, second = (lora_state(pipeline, ["unet"], size=0.1, seed=seed, only="attn1") for seed in (0, 1))
    pipeline.load_lora_weights(dict(second), adapter_name="b")
    alone = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unload_lora_weights()
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(first, adapter_name="a")
        if case == "fused first":
            pipeline.fuse_lora()
        pipeline.load_lora_weights(second, adapter_name="b")
        if case == "both set":
            pipeline.set_adapters(["a", "b"])
        if case == "only the second wanted":
            pipeline.set_adapters(["b"])
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    is_off = torch.allclose(picture, alone, atol=1e-5)
    assert is_off is (case != "both set")
    found = [one.message for one in watching.record().findings if one.id == "model.lora_replaced"]
    assert found == (
        ["Loading the LoRA b switched a off, which changes nothing in the call since."]
        if case in ("loaded alone", "fused first")
        else []
    )


@pytest.mark.parametrize("off", ["disable_lora", "set_adapters", "scale"])
def test_a_module_that_was_trained_whole_acts_while_the_factors_beside_it_are_off(off: str) -> None:
    pipeline = make_pipeline("flux")
    bare = generate(pipeline, "flux", num_inference_steps=1)
    config = LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["proj_out"], init_lora_weights=False)
    pipeline.transformer.add_adapter(config, "a")
    for name, weight in pipeline.transformer.named_parameters():
        weight.data += 0.1 * ("modules_to_save" in name)
    if off == "disable_lora":
        pipeline.disable_lora()
    elif off == "set_adapters":
        pipeline.set_adapters("a", 0.0)
    given: dict[str, Any] = {"joint_attention_kwargs": {"scale": 0.0}} if off == "scale" else {}
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, "flux", num_inference_steps=1, **given)
    assert not torch.equal(picture, bare)
    run = watching.record()
    assert told(run) == set()
    assert idle_lora(run) is None
    (lora,) = run.stage("generation").facts["recipe"]["loras"].values()
    assert lora["active"] >= 1


def test_of_a_merged_lora_the_strength_is_told_as_the_one_that_is_set_now() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], size=0.3), adapter_name="style")
    pipeline.fuse_lora(lora_scale=0.5)
    pipeline.set_adapters("style", 1.0)
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sd15", num_inference_steps=1)
    said = acting_lora(watching.record()) or ""
    assert "style on 181 layers of unet, merged (its strength is set to 1 now)." in said


@pytest.mark.parametrize("is_merging_watched", [False, True])
@pytest.mark.parametrize(("merged_at", "acts"), [(1.0, True), (0.0, False)])
def test_a_strength_of_0_that_was_set_after_merging_takes_nothing_out_of_the_weights(
    merged_at: float, acts: bool, is_merging_watched: bool
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ["unet"], size=0.3)

    def merge() -> None:
        pipeline.load_lora_weights(state)
        pipeline.fuse_lora(lora_scale=merged_at)
        pipeline.set_adapters("default_0", 0.0)

    if not is_merging_watched:
        merge()
    with sigmascope.watch(pipeline) as watching:
        if is_merging_watched:
            merge()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
        pipeline.set_adapters("default_0", 0.0)  # once more, which changes nothing
        again = generate(pipeline, "sd15", num_inference_steps=1)
    run = watching.record()
    assert torch.equal(picture, bare) is torch.equal(again, bare) is not acts
    assert told(run) == {"lora_merged_at_zero"}
    ids = {finding.id for finding in run.findings}
    assert ("lora_strength_zero" in ids) is (is_merging_watched and not acts)
    idle = idle_lora(run)
    if not is_merging_watched:
        assert idle is not None
        assert "unknown" in idle
    else:
        assert (idle is None) is acts
        assert idle is None or "strength 0 on 181 weights" in idle
    assert any("unknown" in finding.message for finding in run.findings) is not is_merging_watched
    assert (acting_lora(run) is not None) is (acts and is_merging_watched)


@pytest.mark.parametrize("watched", [False, True])
def test_of_a_lora_that_was_fused_before_the_watch_and_unloaded_it_is_open_whether_it_acts(
    watched: bool,
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)

    def fuse() -> None:
        load(pipeline)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()

    if not watched:
        fuse()
    with sigmascope.watch(pipeline) as watching:
        if watched:
            fuse()
        moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    run = watching.record()
    assert moved
    assert (told(run) == {"lora_fused_before"}) is not watched
    found = standing(run)
    assert found is not None
    assert found.words == ("acts" if watched else "unknown")
    assert ("the pipeline lists style as fused, but no layer has it merged" in found.says) is not watched


@pytest.mark.parametrize(
    ("how", "words"),
    [("fused", "unknown"), ("fused and kept", "acts"), ("unfused", "unknown"), ("not at all", None)],
)
def test_a_pipeline_made_of_one_that_fused_a_lora_does_not_run_as_if_there_were_none(
    how: str, words: str | None
) -> None:
    """The list of what is fused stays behind with the other pipeline, which alone knows what was unfused."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    load(pipeline)
    if how != "not at all":
        pipeline.fuse_lora()
    if how == "unfused":
        pipeline.unfuse_lora()
    if how != "fused and kept":
        pipeline.unload_lora_weights()
    made = type(pipeline).from_pipe(pipeline)
    with sigmascope.watch(made) as watching:
        is_moved = not torch.allclose(generate(made, "sd15", num_inference_steps=1), bare, atol=1e-4)
    assert is_moved is how.startswith("fused")
    found = standing(watching.record())
    assert (found and found.words) == words
    says = "other code than this pipeline called fuse_lora on unet, but no layer has it merged"
    assert (found is not None and says in found.says) is (words == "unknown")
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sd15", num_inference_steps=1)
    assert (told(watching.record()) == {"lora_fused_before"}) is (how == "fused")


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", ["style", "other"])
def test_a_fused_lora_may_act_beside_one_that_was_loaded_later_and_is_off(name: str, watched: bool) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)

    def fuse_and_load() -> None:
        load(pipeline)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        load(pipeline, name)
        pipeline.disable_lora()

    if not watched:
        fuse_and_load()
    with sigmascope.watch(pipeline) as watching:
        if watched:
            fuse_and_load()
        for _ in range(2):
            moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    assert moved
    assert idle_lora(watching.record()) is None
    found = standing(watching.record())
    assert found is not None
    assert found.words == ("acts" if watched else "unknown")
    assert ("lora_fused_before" in told(watching.record())) is not watched
    idle = [one.message for one in watching.record().findings if one.id == "lora_disabled"]
    assert [message.startswith(f"The LoRA {name} changes nothing") for message in idle] == [True]


def test_a_fused_lora_acts_beside_one_that_the_call_scales_to_zero() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        load(pipeline)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        load(pipeline, "other")
        picture = generate(pipeline, "sd15", num_inference_steps=1, cross_attention_kwargs={"scale": 0.0})
    assert not torch.equal(picture, bare)
    assert acting_lora(watching.record()) == "The LoRA acts in the denoiser: it is merged into the weights."
    idle = [one.message for one in watching.record().findings if one.id == "lora_scaled_to_zero"]
    assert [message.startswith("The LoRA other changes nothing") for message in idle] == [True]


def state_with_nan(pipeline: Any) -> dict[str, Tensor]:
    state = lora_state(pipeline, ["unet"], size=0.3, only="attn1")
    next(tensor for name, tensor in state.items() if "lora_B" in name).view(-1)[0] = torch.nan
    return state


def test_nan_that_was_beside_the_weights_is_gone_with_its_lora() -> None:
    """Fusing in the text encoder puts nothing into the denoiser's weights."""
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], size=0.3, only="attn1")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(state_with_nan(pipeline), adapter_name="style")
        pipeline.fuse_lora(components=["text_encoder"])
        pipeline.load_lora_weights(state, adapter_name="style", hotswap=True)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not picture.isnan().any()
    found = standing(watching.record())
    assert found is not None
    assert found.words == "acts"


def test_zeros_that_were_fused_are_nothing_that_stays_in_the_weights() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ["unet"], size=0.0, only="attn1")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(state, adapter_name="style")
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        assert torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "does nothing"


def test_what_a_call_takes_out_that_was_fused_before_the_watch_may_not_be_what_was_put_in() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ["unet"], size=0.3, only="attn1")
    pipeline.load_lora_weights(dict(state), adapter_name="style")
    pipeline.fuse_lora(lora_scale=0.0)
    pipeline.set_adapters("style", 1.0)
    with sigmascope.watch(pipeline) as watching:
        pipeline.disable_lora()
        moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    assert moved
    found = standing(watching.record())
    assert found is not None
    assert found.words == "unknown"


@pytest.mark.parametrize("then", ["disable_lora", "unfuse_lora", "unload_lora_weights"])
def test_nan_that_was_fused_stays_in_the_weights(then: str) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(state_with_nan(pipeline), adapter_name="style")
        pipeline.fuse_lora()
        getattr(pipeline, then)()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert picture.isnan().all()
    found = standing(watching.record())
    assert found is not None
    assert found.words == "NaN or Inf"
    assert idle_lora(watching.record()) is None


def test_a_lora_that_was_fused_and_switched_off_in_the_watch_does_nothing() -> None:
    """PEFT takes it out of the weights again in the call."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        load(pipeline)
        pipeline.fuse_lora()
        pipeline.disable_lora()
        for _ in range(2):
            torch.testing.assert_close(generate(pipeline, "sd15", num_inference_steps=1), bare)
    assert idle_lora(watching.record()) is not None


def test_of_calls_without_a_lora_beside_the_weights_no_report_says_that_there_was_none() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    load(pipeline)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline._merged_adapters = set()  # as after merging by PEFT itself, which no pipeline lists
    with sigmascope.watch(pipeline) as watching:
        assert not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    assert "one that was fused before the watch is not told from them" in to_html(watching.record())


@pytest.mark.parametrize("is_taken_away", [True, False])
def test_what_is_written_to_the_data_of_factors_between_two_calls_is_seen_in_the_second(
    is_taken_away: bool,
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        load(pipeline)
        first = generate(pipeline, "sd15", num_inference_steps=1)
        for name, factor in pipeline.unet.named_parameters():
            if "lora_B" in name:
                factor.data.mul_(0.0 if is_taken_away else 2.0)
        second = generate(pipeline, "sd15", num_inference_steps=1)
    run = watching.record()
    assert not torch.equal(first, second)
    assert torch.equal(second, bare) is is_taken_away
    assert (acting_lora(run) is None) is is_taken_away
    said = idle_lora(run) or acting_lora(run) or ""
    assert ("all its changes are zero" if is_taken_away else "with other factors in the last call") in said


@pytest.mark.parametrize(
    ("dtype", "size", "moves", "words"),
    [
        (torch.bfloat16, 1e-4, False, "unknown"),
        (torch.float16, 1e-4, False, "unknown"),
        (torch.bfloat16, 1e-3, True, "acts"),
        (torch.float32, 1e-5, True, "acts"),
    ],
    ids=str,
)
def test_of_factors_that_outputs_may_be_too_coarse_for_it_is_open_whether_they_act(
    dtype: torch.dtype, size: float, moves: bool, words: str
) -> None:
    pipeline = make_pipeline("sd15").to(dtype)
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = {name: one.to(dtype) for name, one in lora_state(pipeline, ["unet"], size=size).items()}
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(state)
        moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)
    run = watching.record()
    assert moved is moves
    found = standing(run)
    assert found is not None
    assert found.words == words
    step = str(dtype).removeprefix("torch.")
    assert (f"under a thousandth of a step of {step}" in found.says) is not moves


def test_a_lora_that_is_set_again_as_it_was_is_still_said_to_act() -> None:
    """After a scale of 0, diffusers leaves strengths at 1."""
    pipeline = make_pipeline("sd15")
    load(pipeline)
    pipeline.set_adapters("style", 0.5)
    with sigmascope.watch(pipeline) as watching:
        pipeline.set_adapters("style", 0.5)
        pictures = [
            generate(pipeline, "sd15", num_inference_steps=1, cross_attention_kwargs={"scale": scale})
            for scale in (1.0, 0.0, 1.0)
        ]
    assert not torch.equal(pictures[0], pictures[2])
    said = acting_lora(watching.record())
    assert said is not None
    assert "at strength 1" in said


@pytest.mark.parametrize("begun", ["pissa", "olora"])
@pytest.mark.parametrize("where", ["in the watch", "before it", "beside zeros"])
def test_an_adapter_that_gives_the_model_its_own_weights_back_is_not_said_to_act(
    begun: str, where: str
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    config = LoraConfig(**BY_PEFT, init_lora_weights=begun)
    if where == "before it":
        pipeline.unet.add_adapter(config, "a")
    with sigmascope.watch(pipeline) as watching:
        if where != "before it":
            pipeline.unet.add_adapter(config, "a")
        if where == "beside zeros":
            pipeline.unet.add_adapter(LoraConfig(**BY_PEFT), "b")
            pipeline.set_adapters(["a", "b"])
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.allclose(picture, bare, atol=1e-5)
    record = watching.record()
    assert "lora_cancelled" not in {finding.id for finding in record.findings}
    said = standing(record)
    assert said is not None
    assert said.words == "unknown"
    assert "the adapter a began with a part that it took out of the model's weights" in said.says


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on several adapters
@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_beside_a_lora_that_acts_it_has_no_share(begun: str) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora_state(pipeline, ("unet",), size=0.3), adapter_name="a")
        pipeline.unet.add_adapter(LoraConfig(**BY_PEFT, init_lora_weights=begun), "p")
        pipeline.set_adapters(["a", "p"])
        generate(pipeline, "sd15", num_inference_steps=1)
    said = acting_lora(watching.record())
    assert said is not None
    assert said.startswith("The LoRA acts: ‖ΔW‖ / ‖W‖ is ")
    assert "(p)" not in said
    assert "LoRA p began with a part of the weights (init_lora_weights)" in said


def test_an_adapter_that_gives_back_half_of_what_it_took_acts() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unet.add_adapter(LoraConfig(**BY_PEFT, init_lora_weights="pissa"), "a")
    pipeline.set_adapters(["a"], [0.5])
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.allclose(picture, bare, atol=1e-5)
    said = standing(watching.record())
    assert said is not None
    assert said.words == "acts"


class _Attends:
    """An attention processor of a script's own."""

    def attend(self, attn: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (
            part.reshape(*part.shape[:2], attn.heads, -1).transpose(1, 2) for part in (query, key, value)
        )
        query, key, value = heads
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class _ReadsWeights(_Attends):
    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        words = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        linear = nn.functional.linear
        query, key = linear(hidden_states, attn.to_q.weight), linear(words, attn.to_k.weight)
        made = self.attend(attn, query, key, linear(words, attn.to_v.weight))
        return linear(made, attn.to_out[0].weight, attn.to_out[0].bias)


class _CallsLayers(_Attends):
    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        words = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        hidden_states = hidden_states.to(attn.to_q.weight.dtype)
        made = self.attend(attn, attn.to_q(hidden_states), attn.to_k(words), attn.to_v(words))
        out: Tensor = attn.to_out[0](made)
        return out


@pytest.mark.parametrize("when", ["in the watch", "before it"])
@pytest.mark.parametrize("only", [".attn", ""])
@pytest.mark.parametrize("processor", [_ReadsWeights, _CallsLayers])
def test_a_processor_that_reads_weights_leaves_what_is_beside_them_out(
    processor: type[_Attends], only: str, when: str
) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.unet.set_attn_processor(processor())
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ("unet",), size=0.3, only=only)
    if when == "before it":
        pipeline.load_lora_weights(state)
    with sigmascope.watch(pipeline) as watching:
        if when != "before it":
            pipeline.load_lora_weights(state)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    is_left_out = bool(only) and processor is _ReadsWeights
    assert torch.equal(picture, bare) is is_left_out
    said = standing(watching.record())
    assert said is not None
    assert said.words == ("unknown" if is_left_out else "acts")
    assert ("the processor _ReadsWeights of " in said.says) is is_left_out


@pytest.mark.parametrize("zero", ["lora_A", "lora_B"])
@pytest.mark.parametrize("when", ["in the watch", "before it", "beside a fused one"])
def test_zeros_beside_another_lora_are_named_in_every_finding(zero: str, when: str) -> None:
    pipeline = make_pipeline("sd15")
    lora = lora_state(pipeline, ("unet",), size=0.3)
    zeros = {name: tensor * (zero not in name) for name, tensor in lora.items()}

    def load() -> None:
        pipeline.load_lora_weights(dict(lora), adapter_name="a")
        if when == "beside a fused one":
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
        pipeline.load_lora_weights(dict(zeros), adapter_name="b")

    if when == "before it":
        load()
    with sigmascope.watch(pipeline) as watching:
        if when != "before it":
            load()
        generate(pipeline, "sd15", num_inference_steps=1)
    run = watching.record()
    found = [
        finding["message"]
        for stage in run.walk()
        for finding in (
            *stage.facts.get("idle_loras", ()),
            *stage.facts.get("lora_application", {"findings": ()})["findings"],
        )
        if finding["id"] == "lora_is_zero"
    ]
    assert found
    assert all(
        message.startswith("The LoRA b changes nothing: all its changes are zero") for message in found
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("fuse, unload, load, set -1", "unknown"),
        ("fuse, unload, load, set -1, fuse", "unknown"),
        ("fuse, unload, load, set -0.5", "acts"),
        ("fuse, unload, load", "acts"),
        ("fuse, unfuse, unload, load, set -1", "acts"),
    ],
)
def test_what_takes_away_all_that_was_fused_before_is_not_said_to_act(program: str, words: str) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    lora = lora_state(pipeline, ("unet",), size=0.3)
    acts: dict[str, Callable[[], object]] = {
        "fuse": lambda: pipeline.fuse_lora(),
        "unfuse": lambda: pipeline.unfuse_lora(),
        "unload": lambda: pipeline.unload_lora_weights(),
        "load": lambda: pipeline.load_lora_weights(dict(lora), adapter_name="b"),
        "set -1": lambda: pipeline.set_adapters(["b"], [-1.0]),
        "set -0.5": lambda: pipeline.set_adapters(["b"], [-0.5]),
    }
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(dict(lora), adapter_name="a")
        for act in program.split(", "):
            acts[act]()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.allclose(picture, bare, atol=1e-5) is (words == "unknown")
    said = standing(watching.record())
    assert said is not None
    assert said.words == words


def test_a_fused_lora_keeps_its_share_when_it_is_set_to_another_strength() -> None:
    pipeline = make_pipeline("sd15")
    lora = lora_state(pipeline, ("unet", "text_encoder"), size=0.3)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(dict(lora), adapter_name="a")
        pipeline.fuse_lora(components=["unet"])
        fused = standing(watching.record())
        pipeline.set_adapters(["a"], [0.5])
        generate(pipeline, "sd15", num_inference_steps=1)
    said = standing(watching.record())
    assert fused is not None
    assert said is not None
    before, now = (re.findall(r"([\d.]+) % in the", told.says) for told in (fused, said))
    assert now == [before[0], f"{float(before[1]) / 2:.2g}"]
