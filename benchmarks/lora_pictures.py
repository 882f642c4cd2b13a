"""How near a LoRA's pictures are to the tuned model's, by the bytes of its file and by how its ranks were chosen.

    python benchmarks/lora_pictures.py [--scenes 16] [--calibration 8] [--seeds 3] [--ranks 2 4 8 16] [--json]

The pocket model's base and its relighting fine-tune. At the bytes of each fixed rank, every other way gets as many:
kohya's `sv_fro`, LyCORIS' `quantile` and KJNodes' `adaptive_energy` (the largest file of a grid of parameters that fits),
a budget whose errors count as they are or by the size of the layer's weight, and statistics of calibration
pictures that are not scored. A LoRA of rank 64 is resized too: to the fixed rank, to its bytes, and to its bytes by
statistics. PSNR is against the tuned model's picture; medians over scenes, the worst scene in brackets;
with statistics the median and the worst of all calibration seeds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from sigmascope.lbm.images import psnr
from sigmascope.lbm.infer import lbm_statistics, noise_pictures, translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.ranks import FULL_RANK, FixedRank, MethodRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.resize import RankPlan, resize_lora

POLICIES = {
    "kohya sv_fro": "sv_fro",
    "LyCORIS quantile": "quantile",
    "KJNodes adaptive_energy": "adaptive_energy",
}
GRID = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RESIZED = 64
FIRST_SCORED, FIRST_CALIBRATION = 5000, 1000


def scenes(first: int, count: int) -> list[Image.Image]:
    """Rendered scenes by their numbers."""
    return [Image.fromarray(relighting_pair(first + number, COOL)[0]) for number in range(count)]


class Judge:
    """The tuned model's pictures of scenes, and how near those of base and LoRA come."""

    def __init__(self, count: int) -> None:
        self._pictures = scenes(FIRST_SCORED, count)
        self._base = load_lbm(BASE_PATH, CONFIG_PATH)
        self._truth = self._pictures_of(load_lbm(TUNED_PATH, CONFIG_PATH))

    def _pictures_of(self, model: LbmModel) -> list[Image.Image]:
        return [translate_image(model, picture, seed=3) for picture in self._pictures]

    def score(self, lora: Path) -> list[float]:
        """PSNR of each scene in dB."""
        with attach_lora(self._base, load_lora(lora)):
            results = self._pictures_of(self._base)
        return [psnr(result, truth) for result, truth in zip(results, self._truth, strict=True)]


def extract(target: Path, options: ExtractOptions) -> tuple[Path, int]:
    """Extract a LoRA of the pocket pair; gives the file and its bytes."""
    extract_lora(BASE_PATH, TUNED_PATH, target, options)
    return target, target.stat().st_size


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=int, default=16)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), asked.scenes, asked.calibration, asked.seeds, asked.ranks)
    print(json.dumps(rows) if asked.json else table(rows))
    return 0


def measure(
    folder: Path, count: int, calibration: int, seeds: int, ranks: Sequence[int]
) -> list[dict[str, object]]:
    """A row for each rank and way."""
    judge = Judge(count)
    judged: dict[Path, list[float]] = {}
    known: list[Path] = []
    for seed in range(seeds):
        started = time.perf_counter()
        first = FIRST_CALIBRATION + 100 * seed
        known.append(folder / f"statistics-{seed}.safetensors")
        lbm_statistics(TUNED_PATH, scenes(first, calibration), config_path=CONFIG_PATH, seed=seed).save(
            known[-1]
        )
        print(f"statistics {seed}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    noise = folder / "statistics-noise.safetensors"
    lbm_statistics(TUNED_PATH, noise_pictures(calibration, size=128), config_path=CONFIG_PATH).save(noise)
    base = folder / "statistics-base.safetensors"
    pictures = scenes(FIRST_CALIBRATION, calibration)
    lbm_statistics(BASE_PATH, pictures, config_path=CONFIG_PATH).save(base)
    grids = {
        name: [
            extract(
                folder / f"{method}-{p}.safetensors",
                ExtractOptions(rules=RankRules(MethodRank(method, p))),
            )
            for p in GRID
        ]
        for name, method in POLICIES.items()
    }
    large, _ = extract(folder / "large.safetensors", ExtractOptions(rank=RESIZED, conv_rank=RESIZED))
    rows: list[dict[str, object]] = []
    for rank in ranks:
        fixed, size = extract(folder / f"fixed-{rank}.safetensors", ExtractOptions(rank=rank, conv_rank=rank))

        def budget(name: str, size: int = size, **options: object) -> list[Path]:
            chosen = ExtractOptions(budget=Budget(max_bytes=size), **options)  # type: ignore[arg-type]
            return [extract(folder / f"{name}.safetensors", chosen)[0]]

        ways: dict[str, list[Path]] = {"fixed rank": [fixed]}
        for name, grid in grids.items():
            fitting = [path for path, taken in grid if taken <= size]
            ways[name] = [max(fitting, key=lambda path: path.stat().st_size)] if fitting else []
        ways["budget, plain"] = budget(f"plain-{rank}", budget_weights="plain")
        ways["budget, relative"] = budget(f"relative-{rank}")
        ways["statistics"] = [
            budget(f"weighted-{rank}-{seed}", statistics=path)[0] for seed, path in enumerate(known)
        ]
        ways["statistics of noise"] = budget(f"noise-{rank}", statistics=noise)
        ways["statistics of the base"] = budget(f"base-{rank}", statistics=base)

        def resized(name: str, plan: RankPlan, known: Path | None = None) -> Path:
            resize_lora(large, folder / f"{name}.safetensors", plan, statistics=known)
            return folder / f"{name}.safetensors"

        within = RankPlan(RankRules(FixedRank(FULL_RANK, FULL_RANK)), Budget(max_bytes=size))
        ways["resized, fixed rank"] = [resized(f"cut-{rank}", RankPlan(RankRules(FixedRank(rank, rank))))]
        ways["resized, budget"] = [resized(f"cut-plain-{rank}", within)]
        ways["resized, statistics"] = [
            resized(f"cut-weighted-{rank}-{seed}", within, path) for seed, path in enumerate(known)
        ]
        for way, files in ways.items():
            for path in files:
                if path not in judged:
                    judged[path] = judge.score(path)
            scores = [score for path in files for score in judged[path]]
            rows.append(
                {
                    "rank": rank,
                    "limit": size,
                    "way": way,
                    "bytes": max((path.stat().st_size for path in files), default=None),
                    "psnr": statistics.median(scores) if scores else None,
                    "worst": min(scores, default=None),
                }
            )
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    """Ways down, sizes across: dB to the tuned model's picture, and beyond a fixed rank."""
    ranks = list(dict.fromkeys(row["rank"] for row in rows))
    limits = {row["rank"]: row["limit"] for row in rows}
    lines = [
        "| way | "
        + " | ".join(f"{float(str(limits[rank])) / 1e6:.2f} MB (rank {rank})" for rank in ranks)
        + " |"
    ]
    lines.append("|---|" + "---|" * len(ranks))
    fixed = {row["rank"]: row["psnr"] for row in rows if row["way"] == "fixed rank"}
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for rank in ranks:
            (row,) = [row for row in rows if row["way"] == way and row["rank"] == rank]
            if row["psnr"] is None:
                cells.append("nothing so small")
                continue
            gain = float(str(row["psnr"])) - float(str(fixed[rank]))
            cells.append(f"{row['psnr']:.1f} [{row['worst']:.1f}] {gain:+.1f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
