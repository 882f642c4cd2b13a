"""How often the first sentence names what was changed, and how often it accuses when nothing was.

A small Stable Diffusion pipeline runs before and after each of 76 planted changes, three times on each side: the first
sentence of the comparison has to hold the words that name the change. Series of generations that go wrong are judged by
the first sentence of their report. Then the same pipeline runs many times unchanged: the limit for pairs that are
accused of anything is 0, and under load 1 in 100.

python benchmarks/planted_changes.py [--pairs 50] [--loaded-pairs 100] [--only NAME …]
"""

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.regression_rates import beside_others
from tests.families.changes import (
    CHANGES,
    DroppedPages,
    lora_file,
    slowed,
    with_euler,
    with_lora,
)
from tests.families.pipelines import PROMPT, make_pipeline

import sigmascope
from sigmascope.analysis.breakdown import headline as verdict
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import HostFacts, Run

RUNS = 3
NEGATIVE = "blurry, low quality"
CALL = {
    "prompt": PROMPT,
    "negative_prompt": NEGATIVE,
    "num_inference_steps": 4,
    "height": 32,
    "width": 32,
    "output_type": "pt",
}


def unchanged(_pipe: Any) -> object:
    """Do nothing to a pipeline."""


@dataclass(frozen=True)
class Kind:
    """One kind of change.

    Attributes:
        words: What the first sentence has to hold.
        act: What is done to the pipeline.
        call: Arguments that are new; those that are None are left out.
        around: What holds while it runs.
        start: What is done to the pipeline before and after the change.
        start_call: Arguments of both sides.
        family: Of the pipeline.
        in_first_call: Whether it shows in the first call alone.
    """

    words: str
    act: Callable[[Any], object] = unchanged
    call: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Any], AbstractContextManager[Any]] = lambda pipe: nullcontext()
    start: Callable[[Any], object] = unchanged
    start_call: Mapping[str, Any] = field(default_factory=dict)
    family: str = "sd15"
    in_first_call: bool = False


def generate(pipe: Any, call: Mapping[str, Any], seed: int = 0) -> None:
    """One call, with a generator of its own."""
    given = {"generator": torch.Generator().manual_seed(seed), **CALL, **call}
    with torch.no_grad():
        pipe(**{name: value for name, value in given.items() if value is not None})


def watched(pipe: Any, call: Mapping[str, Any]) -> Run:
    """One watched call; an integer as `generator` is its seed."""
    call = dict(call)
    seed = call.pop("seed", 0)
    with sigmascope.watch(pipe) as watching:
        generate(pipe, call, seed)
    return watching.record()


def runs_of(kind: Kind, *, changed: bool) -> list[Run]:
    """The runs of one side."""
    call = {**kind.start_call, **(kind.call if changed else {})}
    runs: list[Run] = []
    while len(runs) < RUNS:
        pipe = make_pipeline(kind.family)
        kind.start(pipe)
        with kind.around(pipe) if changed else nullcontext():
            if kind.in_first_call:
                watched(pipe, kind.start_call)
            if changed:
                kind.act(pipe)
            if not (changed and kind.in_first_call):
                watched(pipe, call)  # the first is never like the others
            runs.append(watched(pipe, call))
            while len(runs) < RUNS and not (changed and kind.in_first_call):
                runs.append(watched(pipe, call))
    return runs


@contextmanager
def held(read: Callable[[], Any], write: Callable[[Any], object], value: object) -> Iterator[None]:
    """A switch that has another value."""
    was = read()
    write(value)
    try:
        yield
    finally:
        write(was)


@contextmanager
def in_environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment that is set."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def one_dnn_off(_pipe: Any) -> AbstractContextManager[None]:
    """PyTorch without oneDNN."""
    switch: Any = torch.backends.mkldnn
    return held(lambda: switch.enabled, lambda value: setattr(switch, "enabled", value), False)


def preview(_pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A callback that waits."""
    time.sleep(0.2)
    return kwargs


def save_preview(pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A callback that decodes."""
    for _ in range(20):
        pipe.vae.decode(kwargs["latents"])
    return kwargs


def repeat_inside(pipe: Any) -> None:
    """Let a part of the denoiser do its work again and again, behind the back of all hooks."""
    inner = pipe.unet.mid_block.forward

    def repeated(*args: Any, **kwargs: Any) -> Any:
        for _ in range(30):
            inner(*args, **kwargs)
        return inner(*args, **kwargs)

    pipe.unet.mid_block.forward = repeated


def brighten(_module: Any, _inputs: Any, output: Any) -> Any:
    """A hook that changes what a block gives."""
    return output * 1.01


def edited_in_place(pipe: Any) -> None:
    """Scale a weight of a pipeline that was watched before, as a script that merges by hand does."""
    watched(pipe, {})
    with torch.no_grad():
        pipe.unet.conv_out.weight.mul_(1.01)


def edited_through_data(pipe: Any) -> None:
    """The same behind the back of PyTorch's counter of changes."""
    watched(pipe, {})
    pipe.unet.conv_out.weight.data.mul_(1.01)


def with_dropout(pipe: Any) -> None:
    """Dropout that acts in train mode alone."""
    for module in pipe.unet.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1


def shift_twice(pipe: Any) -> None:
    """Sigmas that are shifted again after they were set, by the same settings."""
    plain = pipe.scheduler.set_timesteps

    @functools.wraps(plain)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        scheduler = pipe.scheduler
        scheduler.sigmas = 3 * scheduler.sigmas / (1 + 2 * scheduler.sigmas)

    pipe.scheduler.set_timesteps = set_timesteps


def with_karras(pipe: Any) -> None:
    """Euler on the sigmas of Karras et al. (arXiv 2206.00364)."""
    from diffusers import EulerDiscreteScheduler

    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, use_karras_sigmas=True)


def image_to_image(pipe: Any) -> None:
    """Let the same parts take a picture."""
    from diffusers import StableDiffusionImg2ImgPipeline

    pipe.__class__ = StableDiffusionImg2ImgPipeline


def offloaded_in_groups(pipe: Any) -> None:
    """Move each layer in and out, in memory."""
    cpu = torch.device("cpu")
    pipe.unet.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")


def other_attention(pipe: Any) -> None:
    """Attention without PyTorch's fused kernel."""
    from diffusers.models.attention_processor import AttnProcessor

    pipe.unet.set_attn_processor(AttnProcessor())


def other_vae(pipe: Any) -> None:
    """A decoder that was tuned."""
    with torch.no_grad():
        for weight in pipe.vae.decoder.parameters():
            weight.mul_(1.001)


def compiled(pipe: Any) -> None:
    """A denoiser that dynamo runs."""
    torch.compiler.reset()
    pipe.unet.compile(backend="eager")


def patched_prompt(pipe: Any) -> None:
    """A method of the pipeline that does something else."""
    plain = pipe.encode_prompt

    def weighted(*args: Any, **kwargs: Any) -> Any:
        return tuple(embeds * 1.1 for embeds in plain(*args, **kwargs))

    pipe.encode_prompt = weighted


@functools.cache
def loras(seed: int) -> Path:
    """A LoRA's file."""
    return lora_file(Path(tempfile.mkdtemp(), str(seed)), seed)


def from_file(seed: int, pipe: Any) -> None:
    """Load a LoRA from its file."""
    with sigmascope.watch(pipe):
        pipe.load_lora_weights(str(loras(seed)), adapter_name="style")


def swapped_lora(pipe: Any) -> None:
    """Another file under the same name."""
    pipe.unload_lora_weights()
    from_file(2, pipe)


def on_disk(pipe: Any) -> None:
    """Weights that each call reads from a disk again."""
    if not DroppedPages(pipe.unet).works:
        print("--   this system cannot be made to forget pages of a file here")


def replaced(owner: Any, name: str) -> AbstractContextManager[None]:
    """A function of a library in whose place a program puts its own."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def faster(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    return held(lambda: plain, lambda value: setattr(owner, name, value), faster)


def seamless(pipe: Any) -> None:
    """Convolutions that go on at the other edge."""
    for module in pipe.unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"


def thresholding(pipe: Any) -> None:
    """A setting that schedules do not show."""
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, thresholding=True)


def without_normalizing(pipe: Any) -> None:
    """Pictures that are taken as they are."""
    from diffusers.image_processor import VaeImageProcessor

    pipe.image_processor = VaeImageProcessor(pipe.vae_scale_factor, do_normalize=False)


LATENTS = torch.linspace(-2, 2, 64).reshape(1, 4, 4, 4)
EMBEDS = torch.linspace(-1, 1, 77 * 16).reshape(1, 77, 16)
PICTURE = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
TAKES_A_PICTURE = {"image": PICTURE, "strength": 0.8, "height": None, "width": None}
_sdpa = torch.backends.cuda

KINDS: dict[str, Kind] = {
    **{
        name: Kind(change.words, change.act, change.call, in_first_call=change.in_first_call)
        for name, change in CHANGES.items()
    },
    "first run compiles": Kind("unet compiled False → True", lambda pipe: compiled(pipe), in_first_call=True),
    "callback sleeps": Kind("callback preview (planted_changes.py", call={"callback_on_step_end": preview}),
    "callback decodes previews": Kind(
        "save_preview (planted_changes.py", call={"callback_on_step_end": save_preview}
    ),
    "inner forward repeated": Kind("forward by repeated (planted_changes.py", repeat_inside),
    "steps": Kind("num_inference_steps 4 → 8", call={"num_inference_steps": 8}),
    "guidance off": Kind("guidance_batches 2 → 1", call={"guidance_scale": 1.0}),
    "size": Kind("height 32 → 64", call={"height": 64, "width": 64}),
    "scheduler sleeps": Kind(
        "in the scheduler's steps", around=lambda pipe: slowed(type(pipe.scheduler), "step", 0.2)
    ),
    "tokenizer sleeps": Kind(
        "tokenizer", around=lambda pipe: slowed(type(pipe.tokenizer), "__call__", 0.3)
    ),
    "other programs": Kind("The times are not comparable", around=lambda pipe: beside_others()),
    "threads": Kind(
        "threads 1 → 2", around=lambda pipe: held(torch.get_num_threads, torch.set_num_threads, 2)
    ),
    "weights read from disk": Kind("page faults from disk", on_disk),
    "LoRA file": Kind(
        "LoRA unet.style file sha256", swapped_lora, start=functools.partial(from_file, 1)
    ),
    "LoRA strength": Kind(
        "LoRA unet.style strength 1.0 → 0.5", lambda pipe: pipe.unet.set_adapters("style", 0.5), start=with_lora
    ),
    "LoRA gone": Kind("LoRAs unet.style → none", lambda pipe: pipe.unload_lora_weights(), start=with_lora),
    "LoRA off": Kind(
        "LoRA unet.style active", lambda pipe: pipe.unet.disable_adapters(), start=with_lora
    ),
    "scale of LoRAs": Kind(
        "cross_attention_kwargs", call={"cross_attention_kwargs": {"scale": 0.5}}, start=with_lora
    ),
    "sigmas": Kind("sigmas none → [", call={"sigmas": [14.6, 5.0, 1.0, 0.1], "num_inference_steps": None}, start=with_euler),
    "timesteps": Kind(
        "timesteps none → [", call={"timesteps": [999, 700, 300, 10], "num_inference_steps": None}, start=with_euler
    ),
    "shift applied twice": Kind("scheduler sigmas", shift_twice, family="sd3"),
    "Karras sigmas": Kind("scheduler use_karras_sigmas False → True", with_karras, start=with_euler),
    "latents": Kind("latents none → 1×4×4×4 float32", call={"latents": LATENTS}),
    "prompt embeds": Kind(
        "prompt_embeds none → 1×77×16 float32", call={"prompt": None, "prompt_embeds": EMBEDS}
    ),
    "two prompts": Kind(
        f"prompt {PROMPT} → a cat | a dog",
        call={"prompt": ["a cat", "a dog"], "negative_prompt": [NEGATIVE, NEGATIVE]},
    ),
    "autocast": Kind("autocast off → cpu bfloat16", around=lambda pipe: torch.autocast("cpu", torch.bfloat16)),
    "FreeU": Kind("unet FreeU none →", lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)),
    "foreign hook": Kind(
        "unet hooks none → brighten (planted_changes.py",
        lambda pipe: pipe.unet.mid_block.register_forward_hook(brighten),
    ),
    "matmul precision": Kind(
        "float32 matmul precision highest → medium",
        around=lambda pipe: held(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ),
    ),
    "oneDNN off": Kind("oneDNN True → False", around=one_dnn_off),
    "SDPA backend": Kind(
        "SDPA kernels flash +", around=lambda pipe: held(_sdpa.flash_sdp_enabled, _sdpa.enable_flash_sdp, False)
    ),
    "attention processor": Kind("attention processors AttnProcessor2_0 → AttnProcessor", other_attention),
    "tokenizer limit": Kind(
        "tokenizer model_max_length 77 → 5", lambda pipe: setattr(pipe.tokenizer, "model_max_length", 5)
    ),
    "dropout in train mode": Kind("train mode none → unet", lambda pipe: pipe.unet.train(), start=with_dropout),
    "weights edited in place": Kind("unet weights", edited_in_place),
    "weights edited through .data": Kind("unet weights", edited_through_data),
    "VAE tuned": Kind("vae weights", other_vae),
    "VAE slices": Kind(
        "vae slicing False → True",
        lambda pipe: pipe.vae.enable_slicing(),
        start_call={"num_images_per_prompt": 2},
    ),
    "strength of image to image": Kind(
        "strength 0.8 → 0.5", call={"strength": 0.5}, start=image_to_image, start_call=TAKES_A_PICTURE
    ),
    "input picture": Kind(
        "image ", call={"image": PICTURE.flip(2)}, start=image_to_image, start_call=TAKES_A_PICTURE
    ),
    "guidance rescaled": Kind("guidance_rescale 0.0 → 0.7", call={"guidance_rescale": 0.7}),
    "offload in memory": Kind("unet offload none → group", offloaded_in_groups),
    "compiled": Kind("unet compiled False → True", compiled),
    "environment switch": Kind(
        "NVIDIA_TF32_OVERRIDE", around=lambda pipe: in_environment("NVIDIA_TF32_OVERRIDE", "0")
    ),
    "patched method": Kind("pipeline methods none → encode_prompt by weighted", patched_prompt),
    "thresholding": Kind("scheduler thresholding False → True", thresholding),
    "tokens": Kind("tokenizer vocabulary", lambda pipe: pipe.tokenizer.add_tokens(["<fox>"])),
    "side of padding": Kind(
        "tokenizer padding_side right → left", lambda pipe: setattr(pipe.tokenizer, "padding_side", "left")
    ),
    "replaced attention": Kind(
        "functional.scaled_dot_product_attention by faster",
        around=lambda pipe: replaced(torch.nn.functional, "scaled_dot_product_attention"),
    ),
    "replaced method of a class": Kind(
        "UNet2DConditionModel.forward by faster", around=lambda pipe: replaced(type(pipe.unet), "forward")
    ),
    "seamless": Kind("unet padding_mode zeros → circular", seamless),
    "epsilon": Kind("unet eps", lambda pipe: setattr(pipe.unet.conv_norm_out, "eps", 0.5)),
    "image processor": Kind("image_processor do_normalize True → False", without_normalizing),
    "factor of the pipeline": Kind(
        "pipeline vae_scale_factor 2 → 4", lambda pipe: setattr(pipe, "vae_scale_factor", 4)
    ),
    "first noise": Kind(
        "scheduler init_noise_sigma 1.0 → 0.9", lambda pipe: setattr(pipe.scheduler, "init_noise_sigma", 0.9)
    ),
    "output of another kind": Kind("output_type pt → latent", call={"output_type": "latent"}),
}  # fmt: skip


def with_older_torch(run: Run) -> Run:
    """The same, recorded with an older library."""
    host = run.host or HostFacts()
    return replace(run, host=replace(host, libraries={**host.libraries, "torch": "2.12.0"}))


def older_library() -> str:
    """Runs of which one side had an older library."""
    before = runs_of(Kind(""), changed=False)
    return what_changed([with_older_torch(run) for run in before], before).headline


def compiled_again() -> str:
    """Runs of which one side compiled."""
    pipe = make_pipeline("sd15")
    compiled(pipe)
    watched(pipe, {})
    warm = [watched(pipe, {})]
    torch.compiler.reset()
    return what_changed([watched(pipe, {})], warm).headline


def series(count: int, each: Callable[[Any, int], Mapping[str, Any]], act: Callable[[Any], object]) -> str:
    """What the report says of generations, each of which something is done before."""
    pipe = make_pipeline("sd15")
    generate(pipe, {})
    act(pipe)
    with sigmascope.watch(pipe) as watching:
        for number in range(count):
            generate(pipe, each(pipe, number))
    return verdict(watching.record())


def new_size(_pipe: Any, number: int) -> Mapping[str, Any]:
    """Each generation is of another height."""
    return {"height": 32 + 32 * number}


def compiled_for_one_size(pipe: Any) -> None:
    """A denoiser that is compiled for each size anew."""
    torch.compiler.reset()
    pipe.unet.compile(backend="eager", dynamic=False)


def one_hook_more(pipe: Any, _number: int) -> Mapping[str, Any]:
    """Each generation leaves something behind that takes time."""
    pipe.unet.register_forward_hook(lambda *_: time.sleep(0.02))
    return {}


KEPT: list[torch.Tensor] = []


def memory_kept(_pipe: Any, _number: int) -> Mapping[str, Any]:
    """Each generation keeps 40 MB."""
    KEPT.append(torch.ones(10 * 2**20))
    return {}


def one_that_sleeps(_pipe: Any, number: int) -> Mapping[str, Any]:
    """One generation among many takes long."""
    return {"callback_on_step_end": preview} if number == 5 else {}


MADE: dict[str, tuple[str, Callable[[], str]]] = {
    "library version": ("→ 2.12.0", older_library),
    "compiled again": ("graphs compiled 0 →", compiled_again),
    "recompiled for each size": (
        "each new height (32, 64, 96) is compiled again",
        lambda: series(3, new_size, compiled_for_one_size),
    ),
    "steps creep up": ("slower from generation to generation", lambda: series(8, one_hook_more, unchanged)),
    "memory grows": ("Memory of the process grows by 4", lambda: series(6, memory_kept, unchanged)),
    "a slow callback": (
        "your callback preview (planted_changes.py",
        lambda: series(2, lambda pipe, number: {"callback_on_step_end": preview}, unchanged),
    ),
    "one of many": ("Generation 6 took", lambda: series(9, one_that_sleeps, unchanged)),
}
"""Those that no change of a call or pipeline makes, with the words of their first sentence."""


UNACCUSED = ("Nothing differs beyond noise.", "The times are not comparable", "A change of ")
"""How a first sentence begins that accuses nothing; the last one goes on that it cannot be told from noise."""


def first_sentence(text: str) -> str:
    """Up to the first full stop that a new sentence follows."""
    return text.split(". ")[0]


def sentences(only: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each change with the words that name it and what was said of it."""
    baselines: dict[tuple[object, ...], list[Run]] = {}
    for name, kind in KINDS.items():
        if not only or name in only:
            key = (kind.family, kind.start, tuple(kind.start_call))
            before = baselines.setdefault(key, [])
            before += [] if before else runs_of(replace(kind, in_first_call=False), changed=False)
            yield name, kind.words, what_changed(runs_of(kind, changed=True), before).headline
    for name, (words, make) in MADE.items():
        if not only or name in only:
            yield name, words, make()


def accused(pairs: int, around: AbstractContextManager[None]) -> list[str]:
    """What is said of pairs of sets of runs without a change, where it is that something changed."""
    pipe = make_pipeline("sd15")
    watched(pipe, {})
    found = []
    with around:
        for _ in range(pairs):
            sides = [[watched(pipe, {}) for _ in range(RUNS)] for _ in range(2)]
            text = what_changed(sides[1], sides[0]).headline
            if not text.startswith(UNACCUSED):
                found.append(text)
    return found


def main() -> None:
    """Print a row for each change, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="pairs of sets of runs without a change")
    parser.add_argument("--loaded-pairs", type=int, default=100, help="the same beside other programs")
    parser.add_argument("--only", nargs="*", default=[], help="these changes alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    named = []
    for name, words, text in sentences(options.only):
        named.append(words in first_sentence(text))
        print(f"{'yes' if named[-1] else 'NO '}  {name:26} {text}", flush=True)
    print(f"\nnamed in the first sentence: {sum(named)} of {len(named)}")
    for pairs, around, what, limit in (
        (options.pairs, nullcontext(), "as the machine is", 0),
        (options.loaded_pairs, beside_others(), "beside other programs", options.loaded_pairs // 100),
    ):
        told = accused(pairs, around) if pairs else []
        print(f"accused without a change, {what}: {len(told)} of {pairs} pairs (limit {limit})")
        for text in told:
            print(f"  {text}")


if __name__ == "__main__":
    main()
