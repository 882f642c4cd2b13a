"""Extracting a LoRA from two full models: our time, memory and error beside the usual ways to do it.

    python benchmarks/lora_extraction.py                       40 layers of an LBM, every shape among them
    python benchmarks/lora_extraction.py --full                all 792 layers: 10 GB of disk, 20 GB of memory
    python benchmarks/lora_extraction.py --full --sample 1     the same, the full SVD reckoned from 32 layers
    python benchmarks/lora_extraction.py --spectrum all --peers ours,svd_lowrank
    python benchmarks/lora_extraction.py --pair FOLDER         base.safetensors and tuned.safetensors made elsewhere

Every peer runs in a process of its own on files that are in the system's cache, and is timed from opening the files
until the LoRA is written; importing PyTorch is not counted, but is in the peak of memory. Each LoRA is then measured
against the best one of its rank, which is reckoned in float64 and kept beside the pair.
Pairs stay in --folder and are made again only when the recipe changes.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from lora_bench.pairs import DTYPES, Recipe, lbm_shapes, shape_classes
from lora_bench.peers import PEERS, PRECISIONS
from lora_bench.run import PairResult, Settings, make_pair, run_pair
from lora_bench.spectra import SPECTRA
from lora_bench.tables import as_json, class_table, limit_lines, time_table, whole_model_line
from sigmascope.checkpoints import atomic_path

_FOLDER = Path(__file__).parents[1] / "build" / "benchmarks"


def main() -> None:
    """Make the pairs that are missing, compare, print."""
    options = parsed()
    settings = Settings(
        peers=tuple(options.peers),
        rank=options.rank,
        conv_rank=options.conv_rank,
        precision=options.save_precision,
        device=options.device,
        sample=options.sample,
        repeats=options.repeats,
    )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, load {load:.1f}; "
        f"rank {options.rank}, convolutions {options.conv_rank}, {options.save_precision}, {options.device}"
    )
    results = []
    for name, folder in pairs(options):
        results.append(run_pair(name, folder, settings))
        show(results[-1])
    if options.json is not None:
        with atomic_path(options.json) as temporary:
            temporary.write_text(
                json.dumps([as_json(result) for result in results], indent=1), encoding="utf-8"
            )


def show(result: PairResult) -> None:
    """Print all tables of a pair."""
    layers = sum(map(len, shape_classes(result.shapes).values()))
    print(f"\n{result.name}: {layers} layers\n{time_table(result)}")
    whole = whole_model_line(result, lbm_shapes())
    print("\n".join(filter(None, [whole, limit_lines(result)])))
    print(f"\n{class_table(result)}", flush=True)


def pairs(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Name and folder of each pair, made where it is missing."""
    if options.pair is not None:
        yield options.pair.name, options.pair
        return
    size = "full" if options.full else f"{options.fraction or options.layers}"
    for name in list(SPECTRA) if options.spectrum == "all" else [options.spectrum]:
        layers = None if options.full or options.fraction else options.layers
        recipe = Recipe(SPECTRA[name], layers, options.fraction, options.dtype, options.seed)
        folder = options.folder / f"{name}-{size}"
        make_pair(folder, recipe)
        yield f"{name}, {size}", folder


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--layers", type=int, default=40, help="size of the pair that is made (default 40)")
    source.add_argument("--fraction", type=float, help="share of the layers of each shape instead")
    source.add_argument("--full", action="store_true", help="all 792 layers and the VAE")
    source.add_argument("--pair", type=Path, metavar="FOLDER", help="a pair that is there already")
    parser.add_argument(
        "--spectrum", choices=[*SPECTRA, "all"], default="default", help="of the planted changes"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of both models")
    parser.add_argument("--seed", type=int, default=0, help="of the pair")
    parser.add_argument("--peers", type=peer_names, default=list(PEERS), help=",".join(PEERS))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--conv_rank", type=int, default=16)
    parser.add_argument("--save_precision", choices=PRECISIONS, default="fp16")
    parser.add_argument("--device", default="cpu", help="where to decompose: cpu (default), cuda, cuda:1")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each peer but full_svd (default 3)")
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        metavar="K",
        help="full_svd decomposes K layers of each shape and the rest is reckoned (default 0: all layers)",
    )
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="where pairs are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def peer_names(text: str) -> list[str]:
    """Names out of `ours,svd_lowrank,full_svd`."""
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PEERS)}")
    return names


if __name__ == "__main__":
    main()
