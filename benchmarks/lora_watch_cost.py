"""What `sigmascope.watch` costs where LoRAs are used: loading, setting, fusing, and calls between which nothing changed.

    python benchmarks/lora_watch_cost.py [--repeats 3] [--rounds 40] [--only sdxl-1 sdxl-2 flux-6] [--profile set_adapters]

The pipelines have tiny widths, so that nearly all time goes into the number of layers: a U-Net with SDXL's blocks (560
LoRA modules), with one and with two LoRAs, and a small FLUX with six adapters. Each LoRA is loaded from a file.
`whole` is the program after its first call, the loading of the model left out. CPU time of the process; plain and
watched in turn, the least of all repeats of each. Beside it stand the watch's own milliseconds: the difference.

Calls between which nothing changed are measured for themselves, since what the watch adds to one is less than two of them
differ: four pipelines, without and with LoRAs, plain and watched, call after call in turn. Of each round the four times are
compared with each other, so that a machine whose speed wanders does so for all four. What the LoRAs add to the watch is the
median of all rounds: the look at them, and their factors among the weights that are known again.
"""

import argparse
import cProfile
import gc
import operator
import pstats
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

import sigmascope

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.families import generate, make_pipeline

Operation = Callable[[], object]
_RANK: Final = 4
_BEFORE: Final = 3
"""Calls that are not measured: what is kept from call to call is there after them."""
SETTINGS: Final = {"sdxl-1": ("sdxl", 1), "sdxl-2": ("sdxl", 2), "flux-6": ("flux", 6)}
"""Family and number of LoRAs."""


def pipeline_of(family: str) -> Any:
    """A small pipeline, SDXL's with as many layers as the real U-Net has."""
    torch.manual_seed(0)
    pipeline = make_pipeline(family)
    if family == "sdxl":
        unet = diffusers.UNet2DConditionModel.from_config(
            {
                **pipeline.unet.config,
                "block_out_channels": (4, 8, 8),
                "norm_num_groups": 2,
                "attention_head_dim": (1, 2, 2),
                "layers_per_block": 2,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "transformer_layers_per_block": (1, 2, 10),
            }
        )
        pipeline.unet = unet.eval()
    return pipeline


def write_lora(denoiser: nn.Module, prefix: str, seed: int, path: Path) -> int:
    """A LoRA for the attention of a denoiser, as PEFT names it; returns its number of modules."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in denoiser.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
            for part, shape in (("A", (_RANK, layer.in_features)), ("B", (layer.out_features, _RANK))):
                tensors[f"{prefix}.{name}.lora_{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, path)
    return len(tensors) // 2


def fresh(files: list[Path], folder: Path) -> list[Path]:
    """Copies of files, of which nothing is known from a run before."""
    folder.mkdir()
    return [Path(shutil.copy(file, folder)) for file in files]


def operations(pipeline: Any, family: str, files: list[Path]) -> Iterator[tuple[str, Operation]]:
    """What a program does with its LoRAs, in this order."""
    names = [f"lora{number}" for number in range(len(files))]

    def load() -> None:
        for name, file in zip(names, files, strict=True):
            pipeline.load_lora_weights(str(file), adapter_name=name)

    yield "load", load
    yield "set_adapters", lambda: pipeline.set_adapters(names, [0.5] * len(names))
    yield "first call", lambda: generate(pipeline, family)
    yield "call", lambda: generate(pipeline, family)
    yield "same again", lambda: pipeline.set_adapters(names, [0.5] * len(names))
    yield "fuse", pipeline.fuse_lora
    yield "unfuse", pipeline.unfuse_lora
    yield "delete", lambda: pipeline.delete_adapters(names)


def run(setting: str, files: list[Path], *, watched: bool, profile: str | None = None) -> dict[str, float]:
    """CPU seconds of each operation, and of the whole."""
    family, _ = SETTINGS[setting]
    pipeline = pipeline_of(family)
    generate(pipeline, family)
    seconds: dict[str, float] = {}
    gc.collect()
    with sigmascope.watch(pipeline) if watched else nullcontext():
        generate(pipeline, family)
        for name, operate in operations(pipeline, family, files):
            profiler = cProfile.Profile() if watched and profile == name else None
            began = time.process_time()
            with profiler or nullcontext():
                operate()
            seconds[name] = time.process_time() - began
            if profiler is not None:
                pstats.Stats(profiler).sort_stats("cumulative").print_stats(70)
    return {"whole": sum(seconds.values()), **seconds}


def least(runs: list[dict[str, float]]) -> dict[str, float]:
    """The least of each figure."""
    return {name: min(one[name] for one in runs) for name in runs[0]}


class Unchanged(NamedTuple):
    """CPU seconds of calls between which nothing changed; of each round one."""

    plain: list[float]
    watched: list[float]
    plain_with: list[float]
    watched_with: list[float]

    def own(self) -> list[float]:
        """Of the watch, without a LoRA."""
        return [*map(operator.sub, self.watched, self.plain)]

    def own_with(self) -> list[float]:
        """Of the watch, with LoRAs."""
        return [*map(operator.sub, self.watched_with, self.plain_with)]

    def added(self) -> list[float]:
        """By the LoRAs, to what the watch takes."""
        return [*map(operator.sub, self.own_with(), self.own())]


def unchanged(setting: str, files: list[Path], rounds: int) -> Unchanged:
    """Calls of four pipelines in turn: plain, watched, plain with LoRAs, watched with LoRAs."""
    family, _ = SETTINGS[setting]
    pipelines = []
    with ExitStack() as watches:
        for has_loras, watched in product((False, True), (False, True)):
            pipeline = pipeline_of(family)
            generate(pipeline, family)
            if watched:
                watches.enter_context(sigmascope.watch(pipeline))
            for number, file in enumerate(files if has_loras else ()):
                pipeline.load_lora_weights(str(file), adapter_name=f"lora{number}")
            if has_loras:
                pipeline.set_adapters([f"lora{number}" for number in range(len(files))])
            pipelines.append(pipeline)
        seconds: list[list[float]] = [[] for _ in pipelines]
        gc.collect()
        for number in range(-_BEFORE, rounds):
            for pipeline, taken in zip(pipelines, seconds, strict=True):
                began = time.process_time()
                generate(pipeline, family)
                if number >= 0:
                    taken.append(time.process_time() - began)
    return Unchanged(*seconds)


def print_unchanged(calls: Unchanged) -> None:
    """Medians, and what the LoRAs add with the middle half of all rounds."""
    for name, plain, watched, own in (
        ("call without LoRA", calls.plain, calls.watched, calls.own()),
        ("unchanged call", calls.plain_with, calls.watched_with, calls.own_with()),
    ):
        print_row(name, statistics.median(plain), statistics.median(watched), statistics.median(own))
    low, middle, high = (1000 * value for value in statistics.quantiles(calls.added(), n=4))
    print(f"  what LoRAs add to the watch of an unchanged call: {middle:.1f} ms ({low:.1f} to {high:.1f})")


def print_row(name: str, plain: float, watched: float, own: float) -> None:
    """Of seconds."""
    print(f"  {name:34} {1000 * plain:6.0f} {1000 * watched:8.0f} {watched / plain:6.2f} {1000 * own:12.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40, help="Of unchanged calls.")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--profile", help="Print where the time of this operation goes.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for setting in given.only:
        family, count = SETTINGS[setting]
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"lora{number}.safetensors" for number in range(count)]
            pipeline = pipeline_of(family)
            prefix = "unet" if family == "sdxl" else "transformer"
            modules = [write_lora(getattr(pipeline, prefix), prefix, i, file) for i, file in enumerate(files)]
            plain, watched = [], []
            for number in range(given.repeats):
                plain.append(run(setting, files, watched=False))
                new = fresh(files, Path(folder) / str(number))
                watched.append(run(setting, new, watched=True, profile=given.profile))
            bare, seen = least(plain), least(watched)
            print(f"{setting}: {modules[0]} modules, CPU ms   plain  watched  ratio  watch's own")
            for name, seconds in seen.items():
                print_row(name, bare[name], seconds, seconds - bare[name])
            print_unchanged(unchanged(setting, files, given.rounds))


if __name__ == "__main__":
    main()
