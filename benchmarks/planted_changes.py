"""How often a comparison names what was changed, and how often it accuses when nothing was.

A small Stable Diffusion pipeline runs before and after each of several planted changes, three times on each side. The
headline of the comparison has to hold the words that name the change. Then the same pipeline runs many times unchanged:
the limit for pairs that are accused of anything is 0.

python benchmarks/planted_changes.py [--pairs 50]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.families.pipelines import make_pipeline

import sigmascope
from sigmascope.analysis.recipe import what_changed
from sigmascope.records.run import HostFacts, Run

RUNS = 3
CALL = {"prompt": "a cat", "num_inference_steps": 4, "height": 64, "width": 64}


@dataclass(frozen=True)
class Planted:
    """A change, and the words that name it."""

    name: str
    words: str
    change: Callable[[Any], Any] = lambda pipe: None
    call: dict[str, Any] | None = None
    edit: Callable[[Run], Run] = lambda run: run


def watched(pipe: Any, planted: Planted | None = None) -> Run:
    """One watched call."""
    call = {**CALL, "generator": torch.Generator().manual_seed(3), **((planted and planted.call) or {})}
    with sigmascope.watch(pipe) as watching:
        pipe(**call)
    run = watching.record()
    return planted.edit(run) if planted else run


@contextmanager
def slowed(owner: type, name: str, seconds: float) -> Iterator[None]:
    """A method that takes longer."""
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slow)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Other programs on all cores."""
    import os

    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextmanager
def two_threads() -> Iterator[None]:
    """As many threads as there are cores, where the baseline has one."""
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def preview(_pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A callback that waits."""
    time.sleep(0.2)
    return kwargs


def save_preview(pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A callback that decodes."""
    for _ in range(4):
        pipe.vae.decode(kwargs["latents"])
    return kwargs


def _to_bfloat16(pipe: Any) -> None:
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.to(torch.bfloat16)


def _with_euler(pipe: Any) -> None:
    from diffusers import EulerDiscreteScheduler

    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)


def _with_lora(pipe: Any, strength: float = 1.0) -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False), "style")
    pipe.set_adapters("style", strength)


def _twice(pipe: Any) -> None:
    inner = pipe.unet.mid_block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for _ in range(30):
            inner(*args, **kwargs)
        return inner(*args, **kwargs)

    pipe.unet.mid_block.forward = forward


def _older_torch(run: Run) -> Run:
    host = run.host or HostFacts()
    return replace(run, host=replace(host, libraries={**host.libraries, "torch": "2.12.0"}))


def planted_changes() -> list[Planted]:
    """Those that are made once; `main` has those that last while it runs."""
    return [
        Planted(
            "callback sleeps", "callback preview (planted_changes.py", call={"callback_on_step_end": preview}
        ),
        Planted("callback decodes previews", "callback", call={"callback_on_step_end": save_preview}),
        Planted("inner forward repeated", "in the steps of denoising", _twice),
        Planted("dtype", "dtype float32 → bfloat16", _to_bfloat16),
        Planted("attention slicing", "SlicedAttnProcessor", lambda pipe: pipe.enable_attention_slicing()),
        Planted("prompt", "prompt a cat → a dog", call={"prompt": "a dog"}),
        Planted("negative prompt", "negative_prompt none → ugly", call={"negative_prompt": "ugly"}),
        Planted("seed", "seed 3 → 4", call={"generator": torch.Generator().manual_seed(4)}),
        Planted("LoRA added", "LoRAs none → unet.style", _with_lora),
        Planted("scheduler", "scheduler DDIMScheduler → EulerDiscreteScheduler", _with_euler),
        Planted("steps", "num_inference_steps 4 → 8", call={"num_inference_steps": 8}),
        Planted("guidance", "guidance_scale 7.5 → 3.0", call={"guidance_scale": 3.0}),
        Planted("guidance off", "guidance_batches 2 → 1", call={"guidance_scale": 1.0}),
        Planted("size", "height 64 → 96", call={"height": 96, "width": 96}),
        Planted("batch", "batch_size 1 → 3", call={"num_images_per_prompt": 3}),
        Planted("eta", "eta 0.0 → 0.5", call={"eta": 0.5}),
        Planted("VAE tiles", "vae tiling False → True", lambda pipe: pipe.vae.enable_tiling()),
        Planted("library version", "torch", edit=_older_torch),
    ]


def headline_of(pipe: Any, before: list[Run], planted: Planted) -> str:
    """What the comparison says of runs after a change."""
    planted.change(pipe)
    watched(pipe, planted)  # the first is never like the others
    return what_changed([watched(pipe, planted) for _ in range(RUNS)], before).headline


def fresh() -> Any:
    """A pipeline that has run once."""
    pipe = make_pipeline("sd15")
    watched(pipe)
    return pipe


def main() -> None:
    """Print a row for each change, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="pairs of runs without a change")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = fresh()
    before = [watched(pipe) for _ in range(RUNS)]
    named: dict[str, tuple[bool, str]] = {}
    for planted in planted_changes():
        headline = headline_of(fresh(), before, planted)
        named[planted.name] = (planted.words in headline, headline)
    around = {
        "scheduler sleeps": ("in the scheduler's steps", slowed(type(pipe.scheduler), "step", 0.2)),
        "tokenizer sleeps": ("tokenizer", slowed(type(pipe.tokenizer), "__call__", 0.3)),
        "other programs": ("processor used by others", busy_cores()),
        "threads": ("threads 1 → 2", two_threads()),
    }
    for name, (words, context) in around.items():
        other = fresh()
        with context:
            headline = headline_of(other, before, Planted(name, words))
        named[name] = (words in headline, headline)
    lora = fresh()
    _with_lora(lora)
    with_lora = [watched(lora) for _ in range(RUNS)]
    lora.set_adapters("style", 0.5)
    headline = headline_of(lora, with_lora, Planted("LoRA strength", ""))
    named["LoRA strength"] = ("strength 1.0 → 0.5" in headline, headline)
    width = max(map(len, named))
    for name, (is_named, headline) in named.items():
        print(f"{'yes' if is_named else 'NO '}  {name:{width}}  {headline}")
    print(f"\nnamed: {sum(is_named for is_named, _ in named.values())} of {len(named)}")
    accused = []
    for _ in range(options.pairs):
        sides = [[watched(pipe) for _ in range(RUNS)] for _ in range(2)]
        headline = what_changed(sides[1], sides[0]).headline
        if headline != "Nothing differs beyond noise.":
            accused.append(headline)
    print(f"accused without a change: {len(accused)} of {options.pairs} pairs (limit 0)")
    for headline in accused:
        print(f"  {headline}")


if __name__ == "__main__":
    main()
