"""How often a comparison names what was changed, and how often it accuses when nothing was.

A small Stable Diffusion pipeline runs before and after each of several planted changes, three times on each side. The
headline of the comparison has to hold the words that name the change. Then the same pipeline runs many times unchanged:
the limit for pairs that are accused of anything is 0.

python benchmarks/planted_changes.py [--pairs 50]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.families.changes import CHANGES, Change, DroppedPages, lora_file, slowed, with_lora
from tests.families.pipelines import generate, make_pipeline

import sigmascope
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import HostFacts, Run

RUNS = 3
CALL = {"num_inference_steps": 4, "height": 64, "width": 64}


def watched(pipe: Any, **call: Any) -> Run:
    """One watched call."""
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", **{**CALL, **call})
    return watching.record()


@contextmanager
def busy_cores() -> Iterator[None]:
    """Other programs on all cores."""
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
    """Twice the threads of the baseline."""
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


def repeat_inside(pipe: Any) -> None:
    """Let a part of the denoiser do its work again and again, behind the back of all hooks."""
    inner = pipe.unet.mid_block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for _ in range(30):
            inner(*args, **kwargs)
        return inner(*args, **kwargs)

    pipe.unet.mid_block.forward = forward


MORE = {
    "callback sleeps": Change("callback preview (planted_changes.py", call={"callback_on_step_end": preview}),
    "callback decodes previews": Change(
        "callback save_preview (planted_changes.py", call={"callback_on_step_end": save_preview}
    ),
    "inner forward repeated": Change("in the steps of denoising", repeat_inside),
    "steps": Change("num_inference_steps 4 → 8", call={"num_inference_steps": 8}),
    "guidance off": Change("guidance_batches 2 → 1", call={"guidance_scale": 1.0}),
    "size": Change("height 64 → 96", call={"height": 96, "width": 96}),
}


def fresh() -> Any:
    """A pipeline that has run once."""
    pipe = make_pipeline("sd15")
    watched(pipe)
    return pipe


def headline_of(before: list[Run], change: Change) -> str:
    """What the comparison says of runs after a change."""
    runs = []
    for _ in range(RUNS):
        if not runs or change.in_first_call:
            pipe = fresh()
            change.act(pipe)
            if not change.in_first_call:
                watched(pipe, **change.call)  # the first is never like the others
        runs.append(watched(pipe, **change.call))
    return what_changed(runs, before).headline


def with_file(path: Path) -> list[Run]:
    """Runs of a pipeline that a LoRA was loaded into from a file."""
    pipe = fresh()
    with sigmascope.watch(pipe):
        pipe.load_lora_weights(str(path), adapter_name="style")
    watched(pipe)
    return [watched(pipe) for _ in range(RUNS)]


def with_older_torch(run: Run) -> Run:
    """The same, recorded with an older library."""
    host = run.host or HostFacts()
    return replace(run, host=replace(host, libraries={**host.libraries, "torch": "2.12.0"}))


def headlines(pipe: Any, before: list[Run]) -> Iterator[tuple[str, str, str]]:
    """Each change with the words that name it and what the comparison said."""
    around: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
        "scheduler sleeps": ("in the scheduler's steps", lambda: slowed(type(pipe.scheduler), "step", 0.2)),
        "tokenizer sleeps": ("tokenizer", lambda: slowed(type(pipe.tokenizer), "__call__", 0.3)),
        "other programs": ("The times are not comparable", busy_cores),
        "threads": ("threads 1 → 2", two_threads),
    }
    changes = {name: (change, nullcontext) for name, change in (CHANGES | MORE).items()}
    changes |= {name: (Change(words), context) for name, (words, context) in around.items()}
    for name, (change, context) in changes.items():
        with context():
            headline = headline_of(before, change)
        yield name, change.words, headline
    yield (
        "library version",
        "→ 2.12.0",
        what_changed([with_older_torch(run) for run in before], before).headline,
    )
    paged = fresh()
    if DroppedPages(paged.unet).works:
        runs = [watched(paged) for _ in range(RUNS)]
        yield "weights read from disk", "page faults from disk", what_changed(runs, before).headline
    else:
        print("--   weights read from disk: this system cannot be made to forget pages of a file here")
    compiled = fresh()
    compiled.unet.compile(backend="aot_eager")
    watched(compiled)
    warm = [watched(compiled) for _ in range(RUNS)]
    cold = []
    for _ in range(RUNS):
        torch.compiler.reset()
        cold.append(watched(compiled))
    yield "compiled again", "graphs compiled 0 →", what_changed(cold, warm).headline
    with tempfile.TemporaryDirectory() as folder:
        sides = [with_file(lora_file(Path(folder, str(seed)), seed)) for seed in (1, 2)]
    yield "LoRA file", "LoRA unet.style file sha256", what_changed(sides[1], sides[0]).headline
    lora = fresh()
    with_lora(lora)
    strong = [watched(lora) for _ in range(RUNS)]
    lora.set_adapters("style", 0.5)
    weak = [watched(lora) for _ in range(RUNS)]
    yield "LoRA strength", "strength 1.0 → 0.5", what_changed(weak, strong).headline


def main() -> None:
    """Print a row for each change, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="pairs of sets of runs without a change")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = fresh()
    before = [watched(pipe) for _ in range(RUNS)]
    named = []
    for name, words, headline in headlines(pipe, before):
        named.append(words in headline)
        print(f"{'yes' if named[-1] else 'NO '}  {name:26} {headline}", flush=True)
    print(f"\nnamed: {sum(named)} of {len(named)}")
    accused = []
    for _ in range(options.pairs):
        sides = [[watched(pipe) for _ in range(RUNS)] for _ in range(2)]
        headline = what_changed(sides[1], sides[0]).headline
        if not headline.startswith("Nothing differs beyond noise."):
            accused.append(headline)
    print(f"accused without a change: {len(accused)} of {options.pairs} pairs (limit 0)")
    for headline in accused:
        print(f"  {headline}")


if __name__ == "__main__":
    main()
