"""What `sigmascope.watch` costs where LoRAs are used: loading, setting, fusing, and calls between which nothing changed.

    python benchmarks/lora_watch_cost.py [--repeats 3] [--only sdxl-1 sdxl-2 flux-6] [--profile set_adapters]

The pipelines have tiny widths, so that nearly all time goes into the number of layers: a U-Net with SDXL's blocks (560
LoRA modules), with one and with two LoRAs, and a small FLUX with six adapters. Each LoRA is loaded from a file.
`whole` is the program after its first call, the loading of the model left out. CPU time of the process; plain and
watched in turn, the least of all repeats of each. Beside it stand the watch's own milliseconds: the difference. What a LoRA
adds to an unchanged call is that row less the one of a call without a LoRA: the look at it, and its factors among the weights
that are known again.
"""

import argparse
import cProfile
import gc
import pstats
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

import sigmascope

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.families import generate, make_pipeline

Operation = Callable[[], object]
_RANK: Final = 4
UNCHANGED: Final = ("call without LoRA", "call")
_CALLS: Final = 30
"""Between which nothing changes: one costs as much as another, and the least of them counts."""
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

    yield "call without LoRA", lambda: generate(pipeline, family)
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
            took = []
            for _ in range(_CALLS if name in UNCHANGED else 1):
                began = time.process_time()
                with profiler or nullcontext():
                    operate()
                took.append(time.process_time() - began)
            seconds[name] = min(took)
            if profiler is not None:
                pstats.Stats(profiler).sort_stats("cumulative").print_stats(70)
    return {"whole": sum(seconds.values()), **seconds}


def least(runs: list[dict[str, float]]) -> dict[str, float]:
    """The least of each figure."""
    return {name: min(one[name] for one in runs) for name in runs[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
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
                own = seconds - bare[name]
                print(
                    f"  {name:34} {1000 * bare[name]:6.0f} {1000 * seconds:8.0f} {seconds / bare[name]:6.2f} {1000 * own:12.1f}"
                )


if __name__ == "__main__":
    main()
