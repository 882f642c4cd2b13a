"""How near a LoRA's pictures are to the tuned model's, by the bytes of its file and by how its ranks were chosen.

    PYTHONPATH=. python benchmarks/lora_pictures.py [--models lbm unet mmdit] [--ranks 2 4 8 16] [--json] [--plot FILE]
    PYTHONPATH=. python benchmarks/lora_pictures.py --ways "budget, relative" statistics
    PYTHONPATH=. python benchmarks/lora_pictures.py --rows FILE ... [--plot FILE]

Three trained models, each with a fine-tune of another look: the pocket LBM, which translates a picture in one step, and
the pocket pipelines, a Stable Diffusion and a Stable Diffusion 3 in small, which paint prompts with 4 steps, with 20,
and with 20 and guidance.

At the bytes of each fixed rank, every other way gets as many: kohya's `sv_fro`, LyCORIS' `quantile` and KJNodes'
`adaptive_energy` (the largest file of a grid of parameters that fits), a budget whose errors count as they are or by
the size of the layer's weight, and statistics of calibration inputs that are not scored. Two are then fitted to the
tuned model's outputs: that of the statistics on some calibration inputs, and that of the budget on noise, which
needs no data. A LoRA of rank 64 is resized too: to the fixed rank, to its bytes, and to its bytes by statistics.

PSNR is against the tuned model's picture of the same input and seed: the median over the inputs, and the worst in
brackets. With statistics both are over all calibration seeds; pictures from prompts are of three sampling seeds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tests.pocket_pipelines import KINDS, load_pocket, prompts, save_pocket

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lbm.images import psnr
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.lbm_statistics import fit_lbm_lora, lbm_statistics, noise_pictures
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.fingerprint import denoiser_fingerprint
from sigmascope.lora.fit import FitOptions
from sigmascope.lora.ranks import FULL_RANK, FixedRank, MethodRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.resize import RankPlan, resize_lora
from sigmascope.lora.statistics import ModelStatistics
from sigmascope.pipeline.pipeline_statistics import fit_saved_pipeline_lora, pipeline_statistics

POLICIES = {
    "kohya sv_fro": "sv_fro",
    "LyCORIS quantile": "quantile",
    "KJNodes adaptive_energy": "adaptive_energy",
}
GRID = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RESIZED = 64
FIRST_SCORED, FIRST_CALIBRATION = 5000, 1000
SAMPLING_SEEDS = 3
CALLS: Mapping[str, Mapping[str, Any]] = {
    "4 steps": {"num_inference_steps": 4, "guidance_scale": 1.0},
    "20 steps": {"num_inference_steps": 20, "guidance_scale": 1.0},
    "20 steps, guidance": {"num_inference_steps": 20, "guidance_scale": 3.0},
}

STATISTICS_CALL: Mapping[str, Any] = {"num_inference_steps": 3, "guidance_scale": 3.0}
STATISTICS_PROMPTS = 64

Scores = dict[str, list[float]]
"""PSNR of each scored picture in dB, by how the model was called."""


class Pair(ABC):
    """A base and its fine-tune, the inputs of both, and the tuned model's pictures.

    Attributes:
        base: The base's checkpoint.
        tuned: The fine-tune's.
    """

    base: Path
    tuned: Path

    @abstractmethod
    def statistics(self, of: str, seed: int) -> ModelStatistics | None:
        """Statistics of the "tuned" model, of the "base", or of the tuned one with "noise" for inputs; None: no such."""

    @abstractmethod
    def fit(self, lora: Path, save_to: Path, of: str, seed: int) -> None:
        """Fit a LoRA to the tuned model's outputs, on the inputs of the "tuned" statistics or on "noise"."""

    @abstractmethod
    def score(self, lora: Path | None) -> Scores:
        """How near the base's pictures come, with a LoRA or without."""


class LbmPair(Pair):
    """The pocket LBM: scenes to relight."""

    base, tuned = BASE_PATH, TUNED_PATH

    def __init__(self, count: int, calibration: int, steps: int) -> None:
        self._calibration, self._steps = calibration, steps
        self._pictures = self._scenes(FIRST_SCORED, count)
        self._model = load_lbm(BASE_PATH, CONFIG_PATH)
        self._truth = self._translated(load_lbm(TUNED_PATH, CONFIG_PATH))

    def statistics(self, of: str, seed: int) -> ModelStatistics | None:
        """Of scenes that are not scored."""
        path = BASE_PATH if of == "base" else TUNED_PATH
        return lbm_statistics(path, self._inputs(of, seed), config_path=CONFIG_PATH, seed=seed)

    def fit(self, lora: Path, save_to: Path, of: str, seed: int) -> None:
        """On the same scenes, or noise."""
        fit_lbm_lora(
            BASE_PATH,
            TUNED_PATH,
            lora,
            save_to,
            self._inputs(of, seed),
            FitOptions(steps=self._steps, seed=seed),
            config_path=CONFIG_PATH,
        )

    def _inputs(self, of: str, seed: int) -> list[Image.Image]:
        if of == "noise":
            return noise_pictures(self._calibration, size=128)
        return self._scenes(FIRST_CALIBRATION + 100 * seed, self._calibration)

    def score(self, lora: Path | None) -> Scores:
        """In one step."""
        if lora is None:
            made = self._translated(self._model)
        else:
            with attach_lora(self._model, load_lora(lora)):
                made = self._translated(self._model)
        return {"1 step": [psnr(picture, truth) for picture, truth in zip(made, self._truth, strict=True)]}

    def _translated(self, model: Any) -> list[Image.Image]:
        return [translate_image(model, picture, seed=3) for picture in self._pictures]

    def _scenes(self, first: int, count: int) -> list[Image.Image]:
        return [Image.fromarray(relighting_pair(first + number, COOL)[0]) for number in range(count)]


class PipelinePair(Pair):
    """A pocket pipeline: prompts that neither training nor calibration saw."""

    def __init__(self, kind: str, folder: Path, count: int, calibration: int, steps: int) -> None:
        self._kind, self._calibration, self._steps = kind, calibration, steps
        self.base, self.tuned = (save_pocket(kind, look, folder / look) for look in ("base", "tuned"))
        self._prompts = prompts(held_out=True)[:count]
        self._pipeline = load_pocket(kind, "base")
        self._truth = self._painted(load_pocket(kind, "tuned"))

    def statistics(self, of: str, seed: int) -> ModelStatistics | None:
        """Of prompts of training's, with few steps and guidance."""
        if of == "noise":
            return None
        texts = prompts(held_out=False)[seed * STATISTICS_PROMPTS :][:STATISTICS_PROMPTS]
        with open_checkpoint(self.base if of == "base" else self.tuned) as checkpoint:
            fingerprint = denoiser_fingerprint(checkpoint)
        return pipeline_statistics(
            load_pocket(self._kind, of),
            texts,
            call=STATISTICS_CALL,
            seed=1000 + seed,
            fingerprint=fingerprint,
        )

    def fit(self, lora: Path, save_to: Path, of: str, seed: int) -> None:
        """On a quarter as many prompts as statistics, or on as many of random words; four at a time."""
        fit_saved_pipeline_lora(
            self.base,
            self.tuned,
            lora,
            save_to,
            self._calibration if of == "noise" else self._calibrating(seed),
            FitOptions(steps=self._steps, gradient_accumulation_steps=1, seed=1000 + seed),
            call=CALLS["20 steps, guidance"],
            batch_size=4,
        )

    def _calibrating(self, seed: int) -> Sequence[str]:
        return prompts(held_out=False)[seed * self._calibration :][: self._calibration]

    def score(self, lora: Path | None) -> Scores:
        """Over the whole sampling."""
        if lora is None:
            made = self._painted(self._pipeline)
        else:
            with attach_lora(getattr(self._pipeline, KINDS[self._kind]), load_lora(lora)):
                made = self._painted(self._pipeline)
        return {
            name: [psnr(picture, truth) for picture, truth in zip(made[name], self._truth[name], strict=True)]
            for name in CALLS
        }

    def _painted(self, pipeline: Any) -> dict[str, list[Image.Image]]:
        painted: dict[str, list[Image.Image]] = {}
        for name, call in CALLS.items():
            painted[name] = []
            for seed in range(SAMPLING_SEEDS):
                generators = [
                    torch.Generator().manual_seed(100 * seed + number) for number in range(len(self._prompts))
                ]
                painted[name] += pipeline(list(self._prompts), generator=generators, **call).images
        return painted


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=["lbm", *KINDS], default=["lbm", *KINDS])
    parser.add_argument("--inputs", type=int, default=16, help="scored scenes; half as many prompts")
    parser.add_argument(
        "--calibration",
        type=int,
        default=8,
        help="scenes of statistics and fit; twice as many prompts of a fit",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of calibration")
    parser.add_argument("--fit_steps", type=int, default=400, help="of the optimizer, in each fit")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--ways", nargs="+", help="of choosing ranks, as the tables call them; all when left out"
    )
    parser.add_argument("--json", action="store_true", help="rows in place of tables")
    parser.add_argument("--plot", type=Path, help="draw bytes against PSNR into this file; needs matplotlib")
    parser.add_argument("--rows", type=Path, nargs="+", help="show what --json printed, and measure nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for path in asked.rows or ():
        rows += json.loads(path.read_text(encoding="utf-8"))
    for model in dict.fromkeys(row["model"] for row in rows):
        print("\n\n".join(tables(model, [row for row in rows if row["model"] == model])), end="\n\n")
    for model in asked.models if asked.rows is None else ():
        with tempfile.TemporaryDirectory() as folder:
            if model == "lbm":
                pair: Pair = LbmPair(asked.inputs, asked.calibration, asked.fit_steps)
            else:
                half, twice = max(1, asked.inputs // 2), 2 * asked.calibration
                pair = PipelinePair(model, Path(folder), half, twice, asked.fit_steps)
            makers = Makers(pair, Path(folder), asked.seeds)
            ways = asked.ways or list(makers.ways)
            if unknown := [way for way in ways if way not in makers.ways]:
                parser.error(f"--ways {unknown[0]}: there are {', '.join(makers.ways)}")
            # A fixed rank is what the others are compared with.
            found = measure(pair, makers, asked.ranks, list(dict.fromkeys(["fixed rank", *ways])))
        rows += [{"model": model, **row} for row in found]
        if not asked.json:
            print("\n\n".join(tables(model, found)), end="\n\n", flush=True)
    if asked.json:
        print(json.dumps(rows))
    if asked.plot is not None:
        plot(rows, asked.plot)
    return 0


class Makers:
    """Makes the files of each way to choose ranks, and what they are made from when it is first asked for.

    Args:
        pair: The models.
        folder: For the files.
        seeds: Of calibration.
    """

    def __init__(self, pair: Pair, folder: Path, seeds: int) -> None:
        self._pair, self._folder, self._seeds = pair, folder, seeds
        self._made: dict[str, Path | None] = {}
        self.ways: dict[str, Callable[[int], Sequence[Path | None]]] = {
            "no LoRA": lambda rank: [None],
            "fixed rank": lambda rank: [self.fixed(rank)],
            **{name: partial(self._policy, method) for name, method in POLICIES.items()},
            "budget, plain": lambda rank: [self._budget(rank, "plain")],
            "budget, relative": lambda rank: [self._budget(rank, "relative")],
            "statistics": self._weighted,
            "statistics of noise": partial(self._weighted, of="noise"),
            "statistics of the base": partial(self._weighted, of="base"),
            "statistics, fitted": self._weighted_and_fitted,
            "budget, fitted on noise": lambda rank: [
                self._fitted(self._budget(rank, "relative"), "noise", 0)
            ],
            "resized, fixed rank": lambda rank: [self._resized_fixed(rank)],
            "resized, budget": lambda rank: [self._resized(rank, self._whole(rank))],
            "resized, statistics": lambda rank: [
                self._resized(rank, self._whole(rank), path) for path in self._statistics("tuned")
            ],
        }

    def fixed(self, rank: int) -> Path:
        """One rank for all layers."""
        return self._extracted(f"fixed-{rank}", ExtractOptions(rank=rank, conv_rank=rank))

    def _size(self, rank: int) -> int:
        return self.fixed(rank).stat().st_size

    def _extracted(self, name: str, options: ExtractOptions) -> Path:
        path = self._folder / f"{name}.safetensors"
        if not path.exists():
            extract_lora(self._pair.base, self._pair.tuned, path, options)
        return path

    def _budget(self, rank: int, weights: str) -> Path:
        within = Budget(max_bytes=self._size(rank))
        return self._extracted(f"{weights}-{rank}", ExtractOptions(budget=within, budget_weights=weights))

    def _policy(self, method: str, rank: int) -> Sequence[Path]:
        """The largest file of the grid that fits."""
        grid = [
            self._extracted(f"{method}-{p}", ExtractOptions(rules=RankRules(MethodRank(method, p))))
            for p in GRID
        ]
        fitting = [path for path in grid if path.stat().st_size <= self._size(rank)]
        return [max(fitting, key=lambda path: path.stat().st_size)] if fitting else []

    def _statistics(self, of: str) -> Sequence[Path]:
        """Of each calibration seed, or of the first where they are not of the tuned model's inputs; none: no such."""
        found = [self._collected(of, seed) for seed in range(self._seeds if of == "tuned" else 1)]
        return [path for path in found if path is not None]

    def _collected(self, of: str, seed: int) -> Path | None:
        name = f"statistics-{of}-{seed}"
        if name not in self._made:
            started, path = time.perf_counter(), self._folder / f"{name}.safetensors"
            found = self._pair.statistics(of, seed)
            if found is not None:
                found.save(path)
            print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
            self._made[name] = None if found is None else path
        return self._made[name]

    def _weighted(self, rank: int, of: str = "tuned") -> Sequence[Path]:
        within = Budget(max_bytes=self._size(rank))
        return [
            self._extracted(f"{path.stem}-{rank}", ExtractOptions(budget=within, statistics=path))
            for path in self._statistics(of)
        ]

    def _weighted_and_fitted(self, rank: int) -> Sequence[Path]:
        return [self._fitted(path, "tuned", seed) for seed, path in enumerate(self._weighted(rank))]

    def _fitted(self, path: Path, of: str, seed: int) -> Path:
        target = path.with_name(f"{path.stem}-fitted.safetensors")
        started = time.perf_counter()
        self._pair.fit(path, target, of, seed)
        print(f"{target.stem} on {of}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
        return target

    def _whole(self, rank: int) -> RankPlan:
        """As many values of any layer as the bytes of the resized fixed rank hold."""
        size = self._resized_fixed(rank).stat().st_size
        return RankPlan(RankRules(FixedRank(FULL_RANK, FULL_RANK)), Budget(max_bytes=size))

    def _resized_fixed(self, rank: int) -> Path:
        return self._resized(rank, RankPlan(RankRules(FixedRank(rank, rank))))

    def _resized(self, rank: int, plan: RankPlan, by: Path | None = None) -> Path:
        large = self._extracted("large", ExtractOptions(rank=RESIZED, conv_rank=RESIZED))
        kind = "budget" if plan.budget is not None else "fixed"
        target = self._folder / f"resized-{rank}-{kind}-{'weights' if by is None else by.stem}.safetensors"
        resize_lora(large, target, plan, statistics=by)
        return target


def measure(pair: Pair, makers: Makers, ranks: Sequence[int], ways: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each rank, way and kind of call."""
    judged: dict[Path | None, Scores] = {None: pair.score(None)}
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        size = makers.fixed(rank).stat().st_size
        for way in ways:
            files = makers.ways[way](rank)
            if not files and way not in POLICIES:
                continue  # the model has no such inputs
            for path in files:
                if path not in judged:
                    judged[path] = pair.score(path)
            for call in judged[None]:
                scores = [score for path in files for score in judged[path][call]]
                rows.append(
                    {
                        "call": call,
                        "rank": rank,
                        "limit": size,
                        "way": way,
                        "bytes": max((path.stat().st_size for path in files if path), default=None),
                        "psnr": statistics.median(scores) if scores else None,
                        "worst": min(scores, default=None),
                    }
                )
        print(f"rank {rank} is scored", file=sys.stderr)
    return rows


def tables(model: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each kind of call: ways down, sizes across, dB to the tuned model's picture and beyond a fixed rank."""
    return [
        f"{model}, {call}:\n\n{table([row for row in rows if row['call'] == call])}"
        for call in dict.fromkeys(row["call"] for row in rows)
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ways down, sizes across."""
    ranks = list(dict.fromkeys(row["rank"] for row in rows))
    limits = {row["rank"]: row["limit"] for row in rows}
    lines = ["| way | " + " | ".join(f"{limits[rank] / 1e6:.2f} MB (rank {rank})" for rank in ranks) + " |"]
    lines.append("|---|" + "---|" * len(ranks))
    fixed = {row["rank"]: row["psnr"] for row in rows if row["way"] == "fixed rank"}
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for rank in ranks:
            (row,) = [row for row in rows if row["way"] == way and row["rank"] == rank]
            if row["psnr"] is None:
                cells.append("nothing so small")
                continue
            cells.append(f"{row['psnr']:.1f} [{row['worst']:.1f}] {row['psnr'] - fixed[rank]:+.1f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


DRAWN = {
    "fixed rank": ("#555555", "o"),
    "KJNodes adaptive_energy": ("#b8860b", "^"),
    "kohya sv_fro": ("#b05a2c", "v"),
    "budget, relative": ("#4a7ebb", "s"),
    "statistics": ("#1a7f4b", "D"),
    "budget, fitted on noise": ("#7d5fb2", "P"),
    "statistics, fitted": ("#c2347a", "*"),
}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw bytes against PSNR, a panel for each model and kind of call."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["model"], row["call"]) for row in rows))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.2 * lines), layout="constrained")
    for number, (model, call) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        of_panel = [row for row in rows if (row["model"], row["call"]) == (model, call)]
        for way, (colour, marker) in DRAWN.items():
            points = [
                (row["limit"] / 1e6, row["psnr"]) for row in of_panel if row["way"] == way and row["psnr"]
            ]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=way)
        axes.set_title(f"{model}, {call}", fontsize=10)
        axes.set_xscale("log")
        ticks = sorted({row["limit"] / 1e6 for row in of_panel})
        axes.set_xticks(ticks, [f"{tick:.2f}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("MB")
        axes.grid(alpha=0.3)
        if number % columns == 0:
            axes.set_ylabel("PSNR to the tuned picture, dB")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
