"""How far tiles are from the whole, and how long they take: ours that meet or take an estimate, each by itself, and diffusers'.

    python benchmarks/tile_errors.py [--size 512] [--tile 256] [--width 64] [--repeats 1]

An AutoencoderKL of `--width` channels (twice as many in its deeper half) with random weights, and the trained VAE of the
pocket model. The truth is what the same VAE gives at once. All take the same tiles, overlapping by a quarter, in
the same process, and the time of each is beside that of doing it at once. Ours are meant to stay below 1e-4, and below
twice the time of tiles by themselves.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH
from sigmascope.pipeline.tiling import in_tiles, plan, tiled_map

ERROR_LIMIT, TIME_LIMIT = 1e-4, 2.0


def random_vae(width: int) -> AutoencoderKL:
    """Of Stable Diffusion's depth, a residual layer a block, with attention."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(width, width, 2 * width, 2 * width),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=min(32, width // 4),
    ).eval()


def picture(kind: str, size: int) -> Tensor:
    """Noise, or what is like a photograph: large areas that differ, and detail."""
    generator = torch.Generator().manual_seed(0)
    if kind == "noise":
        return torch.rand(1, 3, size, size, generator=generator) * 2 - 1
    whole = torch.zeros(1, 3, size, size)
    for side in (2, 4, 8, 16, 32, 64):
        one = torch.randn(1, 3, side, side, generator=generator) / side**0.5
        whole += functional.interpolate(one, size=(size, size), mode="bicubic")
    return whole / whole.abs().max()


def by_diffusers(vae: Any, run: Callable[[Tensor], Tensor], source: Tensor, tile: int) -> Tensor:
    """With `enable_tiling`, and tiles of that size."""
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_overlap_factor = tile, 0.25
    vae.tile_latent_min_size = tile // 2 ** (len(vae.config.block_out_channels) - 1)
    try:
        return run(source)
    finally:
        vae.disable_tiling()


def timed(code: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    """The result, and the median of its seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        made = code()
        seconds.append(time.perf_counter() - began)
    return made, statistics.median(seconds)


def report(name: str, vae: Any, kind: str, options: argparse.Namespace) -> None:
    """A line for encoding and one for decoding."""
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    tiles = plan(options.size, options.size, options.tile, None, factor)
    given = picture(kind, options.size)

    def encode(pixels: Tensor) -> Tensor:
        made: Tensor = vae.encode(pixels).latent_dist.mode()
        return made

    def decode(latent: Tensor) -> Tensor:
        made: Tensor = vae.decode(latent).sample
        return made

    source = given
    for way, run in (("encode", encode), ("decode", decode)):
        run(source)  # once, for what is made on first use
        direct, whole_seconds = timed(lambda run=run, source=source: run(source), options.repeats)
        shown, seconds = [], {}
        for who, code in (
            ("diffusers", lambda run=run, source=source: by_diffusers(vae, run, source, options.tile)),
            ("apart", lambda run=run, source=source: tiled_map(run, source, tiles)),
            (
                "estimated",
                lambda run=run, source=source: in_tiles(
                    run, source, tiles, modules=(vae,), apart="it is measured here"
                )[0],
            ),
            ("ours", lambda run=run, source=source: tiled_map(run, source, tiles, modules=(vae,))),
        ):
            made, seconds[who] = timed(code, options.repeats)
            error = float((made - direct).norm() / direct.norm())
            shown.append(f"{error:10.1e}{seconds[who] / whole_seconds:7.2f}")
        ratio = seconds["ours"] / seconds["apart"]
        over = "  over the limit" if error > ERROR_LIMIT or ratio > TIME_LIMIT else ""
        print(f"{name:10}{kind:12}{way:8}{whole_seconds:8.1f}{''.join(shown)}{ratio:8.2f}{over}")
        source = direct


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=512, help="side of the picture in pixels")
    parser.add_argument("--tile", type=int, default=256, help="side of a tile in pixels")
    parser.add_argument("--width", type=int, default=64, help="channels of the random VAE")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {options.size}² in tiles of {options.tile}"
    )
    print("relative L2 to the whole, and seconds as a multiple of doing it at once")
    print(
        f"{'VAE':10}{'picture':12}{'':8}{'s whole':>8}{'diffusers':>17}{'apart':>17}{'estimated':>17}{'ours':>17}{'× apart':>8}"
    )
    vaes = {"random": random_vae(options.width), "trained": load_lbm(BASE_PATH, CONFIG_PATH).vae.vae_model}
    for name, vae in vaes.items():
        for kind in ("noise", "photograph"):
            report(name, vae, kind, options)


if __name__ == "__main__":
    main()
