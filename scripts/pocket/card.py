"""Measure the pocket model on held-out scenes and write the table of its card.

    python scripts/pocket/card.py [--scenes 128]

Prints Markdown for docs/pocket-model.md: mean PSNR in dB on scenes that training never saw.
"""

import argparse
import tempfile
from pathlib import Path

from quality import relighting_psnr, vae_psnr

from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, WARM
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.linalg import FULL_RANK
from sigmascope.lora.reader import load_lora

RANKS = (2, 4, 8, 16, 32, FULL_RANK)


def row(name: str, warm: float, cool: float, size: float | None, base: float, tuned: float) -> str:
    """Return one line of the table."""
    recovered = f"{100 * (cool - base) / (tuned - base):.1f} %"
    megabytes = "" if size is None else f"{size:.2f}"
    return f"| {name} | {megabytes} | {warm:.2f} | {cool:.2f} | {recovered} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=int, default=128, help="how many held-out scenes")
    scenes = range(parser.parse_args().scenes)
    base, tuned = load_lbm(BASE_PATH, CONFIG_PATH), load_lbm(TUNED_PATH, CONFIG_PATH)
    print(f"VAE reconstruction: {vae_psnr(base, COOL, scenes):.2f} dB over {len(scenes)} held-out scenes\n")
    base_cool, tuned_cool = relighting_psnr(base, COOL, scenes), relighting_psnr(tuned, COOL, scenes)
    print("| model | LoRA, MB | warm light, dB | cool light, dB | of the gap |\n|---|---|---|---|---|")
    print(row("base", relighting_psnr(base, WARM, scenes), base_cool, None, base_cool, tuned_cool))
    with tempfile.TemporaryDirectory() as folder:
        for rank in RANKS:
            path = Path(folder) / f"rank{rank}.safetensors"
            extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(rank=rank, conv_rank=rank))
            with attach_lora(base, load_lora(path)):
                warm, cool = (relighting_psnr(base, light, scenes) for light in (WARM, COOL))
            name = "base + LoRA, " + ("full rank" if rank == FULL_RANK else f"rank {rank}")
            print(row(name, warm, cool, path.stat().st_size / 1e6, base_cool, tuned_cool), flush=True)
    print(row("tuned", relighting_psnr(tuned, WARM, scenes), tuned_cool, None, base_cool, tuned_cool))


if __name__ == "__main__":
    main()
