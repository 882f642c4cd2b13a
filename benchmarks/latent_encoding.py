"""Peak memory and time of encoding and decoding in tiles, beside doing it at once.

    python benchmarks/latent_encoding.py [--size 1024] [--width 0.25] [--tiles 512,256] [--repeats 1]

An AutoencoderKL of Stable Diffusion's layers with random weights, its channels times `--width` (1 is the real
thing: a minute and 4 GB on a few cores). Every measurement is a process of its own. The peak is that of its
resident memory beyond what it held before, with the VAE loaded and once used on a small picture; beside it is
what `sigmascope.pipeline.peak_prediction` expected. Tiles of half a side are meant to stay below 0.45 of the memory
of doing it at once.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sigmascope.pipeline.peak_prediction import Planned, predict_peak
from sigmascope.pipeline.tiling import plan, tiled_map

FACTOR = 8
MIB = 1024 * 1024
LIMIT = 0.45


def make_vae(width: float) -> AutoencoderKL:
    """Stable Diffusion's VAE, narrower."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=[round(channels * width) for channels in (128, 256, 512, 512)],
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=min(32, round(128 * width)),
    ).eval()


def peak_resident_bytes() -> int:
    """The most that this process has held so far."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


@torch.no_grad()
def measure(direction: str, size: int, width: float, tile: int) -> dict[str, float]:
    """Encode or decode once, in tiles of that side or at once if it is 0."""
    vae = make_vae(width)

    def run(tensor: Tensor) -> Tensor:
        made = (
            vae.encode(tensor).latent_dist.parameters
            if direction == "encoding"
            else vae.decode(tensor).sample
        )
        return made if isinstance(made, Tensor) else torch.as_tensor(made)

    channels, side = (3, size) if direction == "encoding" else (4, size // FACTOR)
    run(torch.zeros(1, channels, 8 * side // (size // FACTOR), 8 * side // (size // FACTOR)))
    source = torch.randn(1, channels, side, side)
    tiles = plan(size, size, tile, None, FACTOR) if tile else None
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    _ = run(source) if tiles is None else tiled_map(run, source, tiles)
    seconds = time.perf_counter() - began
    peak = peak_resident_bytes() - before
    planned = Planned(tuple(source.shape), "encoding" if direction == "encoding" else "decoding", tile=tiles)
    expected = (predict_peak(vae, planned).bytes or 0) - source.nbytes // (tiles.count if tiles else 1)
    return {"seconds": seconds, "peak": peak, "predicted": expected, "tiles": tiles.count if tiles else 1}


def measured_apart(direction: str, options: argparse.Namespace, tile: int) -> dict[str, float]:
    """The same in fresh processes: the median of each figure."""
    arguments = ["--one", direction, "--size", options.size, "--width", options.width, "--tiles", tile]
    command = [sys.executable, "-W", "ignore", __file__, *map(str, arguments)]
    found: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def report(direction: str, options: argparse.Namespace) -> None:
    """One table."""
    print(f"\n{direction}, {options.size}×{options.size}")
    print(
        f"{'':14}{'tiles':>6}{'peak MB':>10}{'of direct':>11}{'expected MB':>13}{'seconds':>9}{'× direct':>10}"
    )
    direct = measured_apart(direction, options, 0)
    for tile in (0, *map(int, options.tiles.split(","))):
        row = measured_apart(direction, options, tile) if tile else direct
        share = row["peak"] / direct["peak"]
        over = "  over the limit" if 0 < tile <= options.size // 2 and share > LIMIT else ""
        name = f"tiles of {tile}" if tile else "direct"
        print(f"{name:14}{row['tiles']:6.0f}{row['peak'] / MIB:10.0f}{share:11.2f}", end="")
        print(
            f"{row['predicted'] / MIB:13.0f}{row['seconds']:9.1f}{row['seconds'] / direct['seconds']:10.2f}{over}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024, help="side of the picture in pixels")
    parser.add_argument("--width", type=float, default=0.25, help="share of Stable Diffusion's channels")
    parser.add_argument("--tiles", default="512,256", help="sides of tiles in pixels")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", choices=("encoding", "decoding"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.size, options.width, int(options.tiles))))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, width {options.width}; ", end="")
    print(
        f"medians of {options.repeats}; peaks of tiles of half a side should stay below {LIMIT:.2f} of direct"
    )
    for direction in ("encoding", "decoding"):
        report(direction, options)


if __name__ == "__main__":
    main()
