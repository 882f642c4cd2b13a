"""What decides a call's output is in its recipe, and a comparison names it: switches, modes, hooks, arguments, schedules."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from tests.families.pipelines import generate, make_pipeline

import sigmascope
from sigmascope.analysis.recipe import recipe_differences
from sigmascope.analysis.what_changed import what_changed
from sigmascope.integrations.diffusers import surroundings
from sigmascope.integrations.diffusers.arguments import call_facts, given_arguments, other_arguments
from sigmascope.records.run import Run, Stage


def watched(pipe: Any, **call: Any) -> Run:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", **call)
    return watching.record()


@pytest.fixture(scope="module")
def pipe() -> Any:
    return make_pipeline("sd15")


@pytest.fixture(scope="module")
def before(pipe: Any) -> Run:
    return watched(pipe)


@contextmanager
def precision(name: str) -> Iterator[None]:
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)


@contextmanager
def without_one_dnn() -> Iterator[None]:
    switch: Any = torch.backends.mkldnn  # its `flags` set what only other devices have, too
    was, switch.enabled = switch.enabled, False
    try:
        yield
    finally:
        switch.enabled = was


@contextmanager
def with_hook(pipe: Any) -> Iterator[None]:
    def brighten(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * 1.01

    hook = pipe.unet.mid_block.register_forward_hook(functools.partial(brighten))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def with_free_u(pipe: Any) -> Iterator[None]:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    try:
        yield
    finally:
        pipe.disable_freeu()


def brighter(sample: Any, _timestep: Any) -> Any:
    return 1.01 * sample


@contextmanager
def patched(owner: Any, name: str, by: Callable[..., Any] | None = None) -> Iterator[None]:
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(owner, name, by or replacement)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def training(pipe: Any) -> Iterator[None]:
    pipe.unet.train()
    try:
        yield
    finally:
        pipe.unet.eval()


@contextmanager
def shorter(pipe: Any) -> Iterator[None]:
    was, pipe.tokenizer.model_max_length = pipe.tokenizer.model_max_length, 5
    try:
        yield
    finally:
        pipe.tokenizer.model_max_length = was


@contextmanager
def without_flash(_pipe: Any) -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@contextmanager
def with_variable(_pipe: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        yield


@contextmanager
def other_table(pipe: Any) -> Iterator[None]:
    was = pipe.scheduler.alphas_cumprod
    pipe.scheduler.alphas_cumprod = 0.99 * was
    try:
        yield
    finally:
        pipe.scheduler.alphas_cumprod = was


@contextmanager
def other_factor(pipe: Any) -> Iterator[None]:
    was = pipe.vae.config.scaling_factor
    pipe.vae.register_to_config(scaling_factor=0.2)
    try:
        yield
    finally:
        pipe.vae.register_to_config(scaling_factor=was)


@contextmanager
def with_foreign_class(pipe: Any, version: str = "0.1.3") -> Iterator[None]:
    """What merges tokens gives a block a class of its own (SD.Next 1444: another version of it, another picture)."""
    block, library = pipe.unet.mid_block, ModuleType("merger")
    library.__dict__["__version__"] = version
    own = type(block)
    merging = type("Merging", (own,), {"__module__": "merger.patch"})
    sys.modules["merger"], block.__class__ = library, merging
    try:
        yield
    finally:
        block.__class__ = own
        del sys.modules["merger"]


class Planted(NamedTuple):
    """A change, and by which words of a recipe it is named."""

    words: str
    around: Callable[[Any], AbstractContextManager[Any]] = lambda pipe: nullcontext()
    call: dict[str, Any] = {}  # noqa: RUF012 - never changed


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute that is there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def other_setting(pipe: Any) -> AbstractContextManager[None]:
    clipping = type(pipe.scheduler).from_config(pipe.scheduler.config, thresholding=True)
    return swapped(pipe, "scheduler", clipping)


def other_tokens(pipe: Any) -> AbstractContextManager[None]:
    tokenizer = copy.deepcopy(pipe.tokenizer)
    tokenizer.add_tokens(["<fox>"])
    return swapped(pipe, "tokenizer", tokenizer)


def a_third_more(*args: Any, **kwargs: Any) -> Any:
    return 1.3 * PLAIN_ATTENTION(*args, **kwargs)


def faster(kind: Any, name: str) -> AbstractContextManager[None]:
    """A method of a library's class in whose place a program puts its own, under the same name."""
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def cached(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    return swapped(kind, name, cached)


def seamless(pipe: Any) -> AbstractContextManager[None]:
    return swapped(pipe.unet.conv_in, "padding_mode", "circular")


PLAIN_ATTENTION = torch.nn.functional.scaled_dot_product_attention
LATENTS = torch.zeros(1, 4, 4, 4)


@contextmanager
def other_attention(pipe: Any) -> Iterator[None]:
    """What transformers calculates the text encoder's attention with."""
    pipe.text_encoder.set_attn_implementation("eager")
    try:
        yield
    finally:
        pipe.text_encoder.set_attn_implementation("sdpa")


@contextmanager
def without_denormals(_pipe: Any) -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def one_dnn_in_bfloat16(_pipe: Any) -> Iterator[None]:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = "ieee"


def in_chunks(pipe: Any) -> AbstractContextManager[None]:
    """As `unet.enable_forward_chunking` does."""
    blocks = [part for part in pipe.unet.modules() if hasattr(part, "_chunk_size")]
    return swapped(blocks[0], "_chunk_size", 1)


@contextmanager
def other_activation(pipe: Any) -> Iterator[None]:
    was, pipe.unet.conv_act = pipe.unet.conv_act, torch.nn.GELU()
    try:
        yield
    finally:
        pipe.unet.conv_act = was


@contextmanager
def otherwise_configured(pipe: Any) -> Iterator[None]:
    was = pipe.config.requires_safety_checker
    pipe.register_to_config(requires_safety_checker=not was)
    try:
        yield
    finally:
        pipe.register_to_config(requires_safety_checker=was)


PLANTED = {
    "denormal numbers": Planted("flush denormals False → True", without_denormals),
    "oneDNN's precision": Planted("oneDNN precision default → matmul bf16", one_dnn_in_bfloat16),
    "the text encoder's attention": Planted("text_encoder attention sdpa → eager", other_attention),
    "chunks": Planted("unet chunk_size none → 1, none", in_chunks),
    "groups of a norm": Planted(
        "unet num_groups 4 → 1, 4", lambda pipe: swapped(pipe.unet.conv_norm_out, "num_groups", 1)
    ),
    "an activation": Planted("unet activations 16 × SiLU → GELU, 15 × SiLU", other_activation),
    "a setting of the pipeline": Planted("pipeline requires_safety_checker ", otherwise_configured),
    "a component that was not there": Planted(
        "feature_extractor class none → dict", lambda pipe: swapped(pipe, "feature_extractor", {"size": 8})
    ),
    "a setting of the scheduler": Planted("scheduler thresholding False → True", other_setting),
    "tokens": Planted("tokenizer vocabulary 625 tokens", other_tokens),
    "a side to pad on": Planted(
        "tokenizer padding_side right → left", lambda pipe: swapped(pipe.tokenizer, "padding_side", "left")
    ),
    "attention by another library": Planted(
        "library functions none → functional.scaled_dot_product_attention by a_third_more",
        lambda pipe: swapped(torch.nn.functional, "scaled_dot_product_attention", a_third_more),
    ),
    "a method of the denoiser's class": Planted(
        "library functions none → UNet2DConditionModel.forward by cached (",
        lambda pipe: faster(type(pipe.unet), "forward"),
    ),
    "a step of the scheduler's class": Planted(
        "library functions none → DDIMScheduler.step by cached (test_surroundings.py:",
        lambda pipe: faster(type(pipe.scheduler), "step"),
    ),
    "a function of the pipeline's module": Planted(
        "library functions none → pipeline_stable_diffusion.randn_tensor by cached (",
        lambda pipe: faster(sys.modules[type(pipe).__module__], "randn_tensor"),
    ),
    "pictures without seams": Planted("unet padding_mode zeros → circular, zeros", seamless),
    "an epsilon": Planted(
        "unet eps 1e-05, 1e-06 → 0.5, 1e-05, 1e-06", lambda pipe: swapped(pipe.unet.conv_norm_out, "eps", 0.5)
    ),
    "a factor of the pipeline": Planted(
        "pipeline vae_scale_factor 2 → 4", lambda pipe: swapped(pipe, "vae_scale_factor", 4)
    ),
    "an image processor": Planted(
        "image_processor do_normalize True → False",
        lambda pipe: swapped(pipe, "image_processor", VaeImageProcessor(2, do_normalize=False)),
    ),
    "the scheduler's first noise": Planted(
        "scheduler init_noise_sigma 1.0 → 0.9", lambda pipe: swapped(pipe.scheduler, "init_noise_sigma", 0.9)
    ),
    "latents": Planted("latents none → 1×4×4×4 float32 ", call={"latents": LATENTS}),
    "a scale of LoRAs": Planted(
        "cross_attention_kwargs none → with scale", call={"cross_attention_kwargs": {"scale": 0.5}}
    ),
    "two prompts": Planted(
        "prompt a red fox over the lazy dog → a cat | a dog",
        call={"prompt": ["a cat", "a dog"], "negative_prompt": ["", ""]},
    ),
    "matmul precision": Planted("float32 matmul precision highest → medium", lambda pipe: precision("medium")),
    "autocast": Planted(
        "autocast off → cpu bfloat16", lambda pipe: torch.autocast("cpu", dtype=torch.bfloat16)
    ),
    "oneDNN off": Planted("oneDNN True → False", lambda pipe: without_one_dnn()),
    "SDPA kernels": Planted(
        "SDPA kernels flash + mem_efficient + math + cudnn → mem_efficient + math + cudnn", without_flash
    ),
    "a foreign hook": Planted("unet hooks none → brighten (test_surroundings.py:", with_hook),
    "FreeU": Planted("unet FreeU none → 4 × s1 0.9, s2 0.2, b1 1.2, b2 1.4", with_free_u),
    "a patched method": Planted(
        "unet methods none → forward by replacement (test_surroundings.py:", lambda pipe: patched(pipe.unet, "forward")
    ),
    "a patched method inside": Planted(
        "unet methods none → forward by replacement", lambda pipe: patched(pipe.unet.mid_block, "forward")
    ),
    "a library's class in place of a block's": Planted(
        "unet foreign modules none → Merging (merger 0.1.3)", with_foreign_class
    ),
    "a patched method of the pipeline": Planted(
        "pipeline methods none → encode_prompt by replacement", lambda pipe: patched(pipe, "encode_prompt")
    ),
    "a patched method of the scheduler": Planted(
        "scheduler methods none → scale_model_input by brighter",
        lambda pipe: patched(pipe.scheduler, "scale_model_input", brighter),
    ),
    "a scheduler's table": Planted("scheduler alphas_cumprod ", other_table),
    "a factor of the VAE": Planted("vae scaling_factor 0.18215 → 0.2", other_factor),
    "train mode": Planted("train mode none → unet", training),
    "a switch of the environment": Planted("NVIDIA_TF32_OVERRIDE not set → 0", with_variable),
    "a tokenizer's limit": Planted("tokenizer model_max_length 77 → 5", shorter),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_named(pipe: Any, before: Run, planted: Planted) -> None:
    with planted.around(pipe):
        now = watched(pipe, **planted.call)
    named = [f"{name} {was} → {new}" for name, (was, new) in recipe_differences([now], [before]).items()]
    assert any(words.startswith(planted.words) for words in named), named
    assert planted.words in what_changed([now], [before]).headline.split(". ")[0]


def test_the_tiles_of_a_vae_are_compared_where_it_uses_them(pipe: Any) -> None:
    assert "vae tiles" not in surroundings.surroundings_of(pipe)
    tiled = make_pipeline("sd15")
    tiled.vae.enable_tiling()
    tiled.vae.tile_sample_min_size = 16
    assert "sample_min_size 16" in surroundings.surroundings_of(tiled)["vae tiles"]


def test_the_schedule_as_it_is_used_is_compared(before: Run) -> None:
    """The shift applied twice, as in diffusers issue 13243: the same settings, other sigmas."""

    def with_sigmas(run: Run, sigmas: list[float]) -> Run:
        sampling = Stage("model_sampling", 0.0, 0.01, facts={"scheduler": "Euler", "sigmas": sigmas})
        [generation] = run.stages
        return replace(run, stages=(replace(generation, children=(sampling, *generation.children)),))

    runs = [with_sigmas(before, sigmas) for sigmas in ([1.0, 0.75, 0.00893, 0.0], [1.0, 0.5, 0.00299, 0.0])]
    differs = recipe_differences([runs[1]], [runs[0]])
    assert differs == {"scheduler sigmas": ("1, 0.75, 0.00893, 0", "1, 0.5, 0.00299, 0")}
    many = [with_sigmas(before, [1.0 - index / 40 for index in range(40)]) for _ in range(2)]
    assert recipe_differences([many[1]], [many[0]]) == {}


def test_the_environment_s_switches_are_named_and_its_secrets_are_not_read(
    monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = surroundings.surroundings_of(pipe)
    assert found["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "hf_secret" not in str(found)


def test_no_function_of_a_library_is_taken_for_a_replaced_one(pipe: Any) -> None:
    """What this package has put on their classes is none, and what decorators of libraries are made of neither."""
    with sigmascope.watch(pipe):
        assert surroundings.surroundings_of(pipe)["library functions"] == "none"


def test_a_function_that_is_replaced_between_two_looks_is_named_and_no_more_once_it_is_back(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> str:
        return surroundings.surroundings_of(pipe)["library functions"]

    def faster(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self, args, kwargs

    kind: Any = type(pipe.scheduler)
    assert named() == "none"
    with monkeypatch.context() as patch:
        patch.setattr(kind, "step", faster)
        assert named().startswith(f"{kind.__name__}.step by faster (test_surroundings.py:")
        assert named().startswith(f"{kind.__name__}.step by faster")
    assert named() == "none"
    with monkeypatch.context() as patch:
        patch.setattr(kind.step, "__code__", faster.__code__.replace(co_freevars=()))
        assert named().startswith(f"{kind.__name__}.step by faster (test_surroundings.py:")
    assert named() == "none"


def test_no_text_on_a_pipeline_is_read(pipe: Any) -> None:
    with swapped(pipe, "vae_scale_factor", "a secret cat"):
        assert "secret" not in str(surroundings.surroundings_of(pipe))


def test_what_a_start_script_sets_for_the_c_library_s_memory_is_read_without_paths(
    monkeypatch: pytest.MonkeyPatch, pipe: Any
) -> None:
    """InvokeAI 6007: its start script sets MALLOC_MMAP_THRESHOLD_, and all but the steps takes longer then."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    monkeypatch.setenv("LD_PRELOAD", "/home/me/lib/libtcmalloc.so.4:/opt/libiomp5.so")
    found = surroundings.surroundings_of(pipe)
    assert found["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    assert found["LD_PRELOAD"] == "libtcmalloc.so.4, libiomp5.so"


def test_arrays_lists_functions_and_unknown_objects_among_the_arguments(pipe: Any) -> None:
    class Odd:
        pass

    def on_end(_pipe: Any) -> None:
        pass

    given = given_arguments(
        {
            "sigmas": [1.0, 0.5],
            "timesteps": list(range(20)),
            "mask": np.zeros((2, 3), np.float32),
            "embeds": [torch.zeros(1, 2), torch.ones(1, 2)],
            "on_end": on_end,
            "odd": Odd(),
            "odds": [Odd()],
            "regions": {"a secret cat": 0.5},
            "attention_kwargs": {"scale": 0.5, "a secret dog": 1.0},
            "lyrics": "a text of the call's",
            "words": ["one", "two"],
            "prompt": ["a cat", None],
            "num_inference_steps": 4,
        }
    )
    assert given.texts["sigmas"] == "[1, 0.5]"
    assert given.texts["timesteps"].startswith("[0, 1, 2, 3, 4, 5, 6, 7, … 20 numbers, ")
    assert given.texts["mask"].startswith("2×3 float32 ")
    assert given.texts["on_end"].endswith(
        "on_end (test_surroundings.py:" + given.texts["on_end"].rsplit(":")[-1]
    )
    assert given.tensors.keys() == {"embeds"}
    assert given.not_looked_at == {"odd": "Odd", "odds": "list of Odd", "regions": "dict of 1"}
    assert given.texts["attention_kwargs"] == "with scale"
    assert "secret" not in str(given)
    assert not {"lyrics", "words", "prompt", "num_inference_steps"} & given.texts.keys()


def test_another_version_of_a_library_that_has_a_block_is_named(pipe: Any) -> None:
    runs = []
    for version in ("0.1.2", "0.1.3"):
        with with_foreign_class(pipe, version):
            runs.append(watched(pipe))
    assert recipe_differences(runs[1:], runs[:1])["unet foreign modules"] == (
        "Merging (merger 0.1.2)",
        "Merging (merger 0.1.3)",
    )


def test_the_scale_of_an_ip_adapter_is_compared(pipe: Any) -> None:
    """Its attention processors keep a list, with a scale for each image prompt."""
    told = []
    for scales in ([1.0], [0.3]):
        with swapped(
            pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2, "processor", Scaled(scales)
        ):
            told.append(surroundings.surroundings_of(pipe)["unet scale"])
    assert told == ["0.5, 0.7071067811865476, 1, [1.0]", "0.5, 0.7071067811865476, 1, [0.3]"]


class Scaled:
    """What an IP-Adapter puts in the place of an attention processor."""

    def __init__(self, scale: list[float]) -> None:
        self.scale = scale


def test_settings_of_a_cache_are_compared() -> None:
    from diffusers import FirstBlockCacheConfig

    made = make_pipeline("flux")
    assert surroundings.surroundings_of(made)["transformer cache"] == "none"
    made.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.25))
    assert surroundings.surroundings_of(made)["transformer cache"] == "FirstBlockCacheConfig threshold 0.25"


def brighten(_pipe: Any, _step: int, _timestep: Any, kwargs: Any, strength: float = 0.1) -> Any:
    return {"latents": kwargs["latents"] + strength}


def typed_in(strength: float, folder: str = "/tmp/ipykernel_71", comment: str = "") -> Callable[..., Any]:
    """A callback as a notebook's cell makes it."""
    names: dict[str, Any] = {}
    code = f"{comment}def preview(pipe, step, timestep, kwargs):\n    return {{'latents': kwargs['latents'] + {strength}}}"
    exec(compile(code, f"{folder}/9876543.py", "exec"), names)
    made: Callable[..., Any] = names["preview"]
    return made


def test_what_a_callback_does_is_compared_beside_its_name() -> None:
    def told(callback: Callable[..., Any]) -> dict[str, str]:
        texts = given_arguments({"callback_on_step_end": callback}).texts
        return {name: value for name, value in texts.items() if name.startswith("callback ")}

    strong, weak = (functools.partial(brighten, strength=value) for value in (0.5, 0.1))
    assert told(strong)["callback with"] == "strength 0.5"
    assert told(strong)["callback code"] == told(weak)["callback code"] == told(brighten)["callback code"]
    assert told(typed_in(0.1)) == told(typed_in(0.1, folder="/tmp/ipykernel_99", comment="# as before\n"))
    assert told(typed_in(0.1)) != told(typed_in(0.2))
    words: dict[str, Any] = {"strength": "a secret"}
    assert told(functools.partial(brighten, **words))["callback with"] == "no numbers"


def test_a_callback_of_a_notebook_is_named_by_its_line() -> None:
    assert (
        call_facts({"callback_on_step_end": typed_in(0.1, comment="# first\n")}).callback
        == "preview (<cell>:2)"
    )


@pytest.mark.slow
def test_the_seed_that_all_draw_from_is_compared_where_a_call_was_given_none(pipe: Any) -> None:
    def seeded(seed: int) -> Run:
        torch.manual_seed(seed)
        with sigmascope.watch(pipe) as watching, torch.no_grad():
            pipe("a fox", num_inference_steps=1, height=32, width=32, output_type="pt")
        return watching.record()

    first, again, other = (seeded(seed) for seed in (1, 1, 2))
    assert recipe_differences([again], [first]) == {}
    assert recipe_differences([other], [first]) == {"global seed": ("1", "2")}
    assert (
        "The outputs differ from the latent of denoising on: global seed 1 → 2."
        in what_changed([other], [first]).headline
    )
    assert "global seed" not in given_arguments({"generator": torch.Generator()}).texts


def test_each_scale_of_guidance_is_told_as_it_was_given(before: Run) -> None:
    """FLUX takes a distilled scale, and a second one for true guidance."""

    def with_scales(distilled: float, true: float) -> Run:
        arguments = {"guidance_scale": distilled, "true_cfg_scale": true}
        [generation] = before.stages
        recipe = {**generation.facts["recipe"], "arguments": other_arguments(arguments)}
        call = {**generation.facts["call"], "guidance_scale": call_facts(arguments).guidance_scale}
        return replace(
            before, stages=(replace(generation, facts={**generation.facts, "recipe": recipe, "call": call}),)
        )

    differs = recipe_differences([with_scales(3.5, 4.0)], [with_scales(3.5, 1.0)])
    assert differs == {"true_cfg_scale": ("1.0", "4.0")}
    assert recipe_differences([with_scales(2.0, 1.0)], [with_scales(3.5, 1.0)]) == {
        "guidance_scale": ("3.5", "2.0")
    }
