"""Changes to plant in a Stable Diffusion pipeline or its call, and the words by which a comparison names each."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.families.pipelines import PROMPT


@dataclass(frozen=True)
class Change:
    """Something that is done to the pipeline, or arguments for `generate`."""

    words: str
    act: Callable[[Any], object] = lambda pipe: None
    call: Mapping[str, Any] = field(default_factory=dict)


def to_bfloat16(pipe: Any) -> None:
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.to(torch.bfloat16)


def with_euler(pipe: Any) -> None:
    from diffusers import EulerDiscreteScheduler

    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)


def with_lora(pipe: Any, strength: float = 1.0) -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "style")
    pipe.unet.set_adapters("style", strength)


@contextmanager
def slowed(owner: type, name: str, seconds: float) -> Iterator[None]:
    """A method of a class that takes longer."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slow)
    try:
        yield
    finally:
        setattr(owner, name, original)


CHANGES: dict[str, Change] = {
    "prompt": Change(f"prompt {PROMPT} → a dog", call={"prompt": "a dog"}),
    "negative prompt": Change(
        "negative_prompt blurry, low quality → blurred", call={"negative_prompt": "blurred"}
    ),
    "seed": Change("seed 0 → 4", call={"seed": 4}),
    "guidance": Change("guidance_scale 7.5 → 3.0", call={"guidance_scale": 3.0}),
    "batch": Change("batch_size 1 → 2", call={"num_images_per_prompt": 2}),
    "eta": Change("eta 0.0 → 0.5", call={"eta": 0.5}),
    "dtype": Change("text_encoder dtype float32 → bfloat16", to_bfloat16),
    "attention slicing": Change(
        "attention processors AttnProcessor2_0 → SlicedAttnProcessor",
        lambda pipe: pipe.enable_attention_slicing(),
    ),
    "VAE tiles": Change("vae tiling False → True", lambda pipe: pipe.vae.enable_tiling()),
    "scheduler": Change("scheduler DDIMScheduler → EulerDiscreteScheduler", with_euler),
    "LoRA": Change("LoRAs none → unet.style", with_lora),
}
"""Those that show in any call; the number of steps and the size of the picture depend on what the call had before."""
