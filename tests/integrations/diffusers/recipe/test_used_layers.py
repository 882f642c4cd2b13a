"""A LoRA on layers of a text encoder that the pipeline leaves out changes no picture, and is told so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig
from tests.families import generate, make_pipeline
from tests.families.encoders import clip
from tests.families.loras import lora_state, write
from tests.families.tokenizers import VOCABULARY, qwen_tokenizer
from tests.integrations.diffusers.recipe.test_idle_loras import encode, told
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers.modeling_outputs import BaseModelOutput

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_state import idle_lora
from sigmascope.integrations.diffusers.idle_loras import EMBEDDINGS
from sigmascope.integrations.diffusers.recipe import loras_of
from sigmascope.integrations.diffusers.used_layers import FollowedEncoding, begin_following

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Already found a `peft_config`")]
modes: Any = _get_current_function_mode_stack
UNUSED = {"lora_layers_unused"}


def put_on(encoder: Any, *layers: int, name: str = "late") -> None:
    """An adapter with random factors on attention in some layers."""
    modules = rf".*layers\.({'|'.join(map(str, layers))})\.self_attn\.\w+_proj"
    torch.manual_seed(0)
    encoder.add_adapter(LoraConfig(r=2, target_modules=modules, init_lora_weights=False), name)


CASES: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any], bool]] = {
    "the last layer of SDXL's first encoder": ("sdxl", "text_encoder", (1,), {}, False),
    "a layer before it": ("sdxl", "text_encoder", (0,), {}, True),
    "both": ("sdxl", "text_encoder", (0, 1), {}, True),
    "the last layer of its second encoder": ("sdxl", "text_encoder_2", (1,), {}, True),
    "what its clip_skip leaves out": (
        "sdxl",
        "text_encoder",
        (1, 2),
        {"clip_skip": 1, "guidance_scale": 1.0},
        False,
    ),
    "what only its negative prompt uses": ("sdxl", "text_encoder", (1, 2), {"clip_skip": 1}, True),
    "the last layer of SD 1.5": ("sd15", "text_encoder", (1,), {}, True),
    "what its clip_skip leaves out, without guidance": (
        "sd15",
        "text_encoder",
        (1,),
        {"clip_skip": 1, "guidance_scale": 1.0},
        False,
    ),
    "what its clip_skip leaves out of the prompt alone": (
        "sd15",
        "text_encoder",
        (1,),
        {"clip_skip": 1},
        True,
    ),
    "FLUX uses the pooled output": ("flux", "text_encoder", (1,), {}, True),
    "SD3 with clip_skip uses the pooled output too": ("sd3", "text_encoder", (1,), {"clip_skip": 1}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lora_acts_where_the_pipeline_uses_its_layers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, part, layers, given, acts = CASES[case]
    pipeline = make_pipeline(family)
    if 2 in layers:
        pipeline.register_modules(text_encoder=clip(16, layers=3))
    encoder = getattr(pipeline, part)
    if family == "sd15":  # its pipeline asks for a name that transformers 5 does not have
        monkeypatch.setattr(type(encoder), "text_model", property(lambda model: model), raising=False)
    bare = generate(pipeline, family, num_inference_steps=1, **given)
    put_on(encoder, *layers)
    unwatched = generate(pipeline, family, num_inference_steps=1, **given)
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, family, num_inference_steps=1, **given)
    run = watching.record()
    assert torch.equal(picture, unwatched)
    assert torch.equal(picture, bare) is not acts
    assert told(run) == (set() if acts else UNUSED)
    assert ("the LoRA is on what comes after" in headline(run)) is not acts
    assert run.unavailable == {}
    assert modes() == []


def test_the_first_sentence_says_how_many_layers_are_used() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert idle_lora(watching.record()) == (
        "The LoRA changes nothing in this call: the pipeline uses the first 1 of the 2 layers of text_encoder, "
        "and the LoRA is on what comes after (4 weights)."
    )


def test_beside_a_lora_that_acts_nothing_is_said() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    put_on(pipeline.text_encoder_2, 1)
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert told(watching.record()) == set()


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_layers_of_strength_0_are_none_that_it_acts_on(strength: float) -> None:
    pipeline = make_pipeline("sdxl")
    bare = generate(pipeline, "sdxl", num_inference_steps=1)
    put_on(pipeline.text_encoder, 0, 1)
    for name, layer in pipeline.text_encoder.named_modules():
        if "layers.0." in name and hasattr(layer, "scaling"):
            layer.scaling["late"] = strength
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(generate(pipeline, "sdxl", num_inference_steps=1), bare)
    assert moved is bool(strength)
    assert told(watching.record()) == (set() if moved else UNUSED | {"lora_strength_zero"})


def test_embeddings_that_were_made_with_it_in_a_watch_are_known_not_to_use_it() -> None:
    pipeline = make_pipeline("sdxl")
    bare = generate(pipeline, "sdxl", num_inference_steps=1, **encode(pipeline))
    put_on(pipeline.text_encoder, 1)
    unwatched = encode(pipeline)
    with sigmascope.watch(pipeline):
        made = encode(pipeline)
    for given, found in ((made, UNUSED), (unwatched, {"lora_encoder_not_run"})):
        with sigmascope.watch(pipeline) as watching:
            picture = generate(pipeline, "sdxl", num_inference_steps=1, **given)
        assert torch.equal(picture, bare)
        assert told(watching.record()) == found


def test_two_watches_of_one_pipeline_tell_the_same() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    with sigmascope.watch(pipeline) as outer, sigmascope.watch(pipeline) as inner:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert told(outer.record()) == told(inner.record()) == UNUSED
    assert modes() == []


def test_an_error_of_an_encoding_is_the_hosts_own_and_leaves_nothing_on() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    pipeline.text_encoder_2.register_forward_pre_hook(lambda *_: 1 / 0)
    with sigmascope.watch(pipeline), pytest.raises(ZeroDivisionError) as error:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert not any(str(entry.path).endswith("/used_layers.py") for entry in error.traceback)
    assert modes() == []


class Encoder(nn.Module):
    """Three layers, whose states it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, given: Tensor) -> BaseModelOutput:
        states = [given]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return BaseModelOutput(last_hidden_state=self.norm(states[-1]), hidden_states=tuple(states))


Glue = Callable[[BaseModelOutput, Encoder], object]


def _written(made: BaseModelOutput, _: Encoder) -> Tensor:
    held = torch.zeros(2, 3, 4)
    held[0] = made.hidden_states[1]
    held[1].copy_(made.hidden_states[2][0])
    return held


def _by_numpy(made: BaseModelOutput, _: Encoder) -> Tensor:
    by_numpy: Tensor = torch.from_numpy(np.array(made.last_hidden_state.numpy()))
    both: Tensor = by_numpy + made.hidden_states[1]
    return both


GLUES: dict[str, tuple[Glue, int | None]] = {
    "a state": (lambda made, _: made.hidden_states[2], 2),
    "the one before all layers": (lambda made, _: made.hidden_states[0], 0),
    "the last": (lambda made, _: made.hidden_states[-1], 4),
    "several": (lambda made, _: torch.stack([made.hidden_states[1], made.hidden_states[2]], 1).mean(1), 2),
    "what it gives": (lambda made, _: (made.hidden_states[1], [made.last_hidden_state]), 4),
    "the norm run again": (lambda made, encoder: encoder.norm(made.hidden_states[1]), 1),
    "a layer run again": (lambda made, encoder: encoder.layers[2](made.hidden_states[1]), 3),
    "written into": (_written, 2),
    "by way of NumPy": (_by_numpy, 4),
    "chosen by a number": (
        lambda made, _: made.hidden_states[0] * float(made.hidden_states[2].sum().item()),
        2,
    ),
    "nothing of it": (lambda made, _: torch.zeros(1), None),
}


@pytest.mark.parametrize("glue", GLUES)
def test_what_an_encoding_used_is_followed_to_its_embeddings(glue: str) -> None:
    from peft import inject_adapter_in_model

    use, expected = GLUES[glue]
    encoder: Any = inject_adapter_in_model(LoraConfig(target_modules=["layers.2"]), Encoder())
    following = begin_following({"text_encoder": encoder})
    assert following is not None
    with torch.no_grad():
        is_taken_off = following.pause()
        made = encoder(torch.ones(1, 3, 4))
        following.take("text_encoder", encoder, made)
        following.go_on(was_taken_off=is_taken_off)
        embeddings = use(made, encoder)
    following.end()
    used = following.used(embeddings)["text_encoder"]
    assert (used and used.used) == expected
    assert modes() == []


def test_a_mode_of_the_host_stays_where_it_was() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    following = FollowedEncoding(["text_encoder"])
    with following, Mode() as mode:
        is_taken_off = following.pause()
        assert (is_taken_off, modes()) == (False, [following, mode])
        following.go_on(was_taken_off=is_taken_off)
        following.end()
        assert modes() == [mode]
        following.end()
        assert modes() == [mode]
        following.go_on(was_taken_off=True)  # for the block to take off


def test_of_a_lora_on_early_layers_nothing_is_followed() -> None:
    pipeline = make_pipeline("sdxl")
    assert begin_following({"text_encoder": pipeline.text_encoder}) is None
    put_on(pipeline.text_encoder, 0, 1, name="early")
    assert begin_following({"text_encoder": pipeline.text_encoder}) is None
    put_on(pipeline.text_encoder, 1)
    for adapters, follows in ((["late"], True), (["early"], False), (["early", "late"], True)):
        pipeline.text_encoder.set_adapter(adapters)
        following = begin_following({"text_encoder": pipeline.text_encoder})
        assert (following is not None) is follows
        if following is not None:
            following.end()
    assert modes() == []


def qwen3() -> Any:
    """A language model of four layers, as pipelines have for a text encoder."""
    from transformers import Qwen3Config, Qwen3Model

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    return Qwen3Model(Qwen3Config(**sizes, **tokens, num_key_value_heads=1, head_dim=16)).eval()


OF_LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "Lumina2Pipeline": {"do_classifier_free_guidance": False},
    "ZImagePipeline": {"do_classifier_free_guidance": False},
    "Flux2KleinPipeline": {"text_encoder_out_layers": (1, 2, 3)},
}


@pytest.mark.parametrize(("layer", "acts"), [(3, False), (2, True)])
@pytest.mark.parametrize("name", OF_LANGUAGE_MODELS)
def test_of_other_encoders_too_it_is_known_which_layers_made_the_embeddings(
    name: str, layer: int, acts: bool
) -> None:
    kind: Any = getattr(diffusers, name)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    pipeline = kind(text_encoder=qwen3(), tokenizer=tokenizer, vae=None, transformer=None, scheduler=None)

    def embeddings() -> list[Tensor]:
        with torch.no_grad():
            made = pipeline.encode_prompt("a red fox", device="cpu", **OF_LANGUAGE_MODELS[name])[0]
        return [made] if isinstance(made, Tensor) else made

    bare = embeddings()
    put_on(pipeline.text_encoder, layer)
    with sigmascope.watch(pipeline):
        (made,) = embeddings()
    assert torch.equal(made, bare[0]) is not acts
    loras = loras_of(pipeline)
    assert EMBEDDINGS.made_with(loras, [made], []).result() is acts
    says = {} if acts else {"text_encoder": "the first 3 of the 4 layers of text_encoder"}
    assert EMBEDDINGS.unused_layers(loras, [made]) == says


def test_an_attached_lora_is_judged_likewise(tmp_path: Path) -> None:
    pipeline = make_pipeline("sdxl")
    bare = generate(pipeline, "sdxl", num_inference_steps=1)
    for only, acts in (("layers.1.", False), ("layers.0.", True)):
        state = lora_state(pipeline, ["text_encoder"], size=0.2, only=only)
        path = write(state, tmp_path / "style.safetensors")
        with sigmascope.attach_lora(pipeline, path), sigmascope.watch(pipeline) as watching:
            picture = generate(pipeline, "sdxl", num_inference_steps=1)
        assert torch.equal(picture, bare) is not acts
        assert told(watching.record()) == (set() if acts else UNUSED)
