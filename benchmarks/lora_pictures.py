"""How near a LoRA's pictures are to the tuned model's, by the bytes of its file and by how its ranks were chosen.

    PYTHONPATH=. python benchmarks/lora_pictures.py [--models lbm unet mmdit] [--ranks 2 4 8 16] [--json] [--plot FILE]
    PYTHONPATH=. python benchmarks/lora_pictures.py --rows FILE ... [--plot FILE]

Three trained models, each with a fine-tune of another look: the pocket LBM, which translates a picture in one step, and
the pocket pipelines, a Stable Diffusion and a Stable Diffusion 3 in small, which paint prompts with 4 steps, with 20,
and with 20 and guidance.

At the bytes of each fixed rank, every other way gets as many: kohya's `sv_fro`, LyCORIS' `quantile` and KJNodes'
`adaptive_energy` (the largest file of a grid of parameters that fits), a budget whose errors count as they are or by
the size of the layer's weight, and statistics of calibration inputs that are not scored. Two are then fitted to the
tuned model's outputs: that of the statistics on the same calibration inputs, and that of the budget on noise, which
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tests.pocket_pipelines import KINDS, load_pocket, prompts, save_pocket

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lbm.calibration import fit_lbm_lora, lbm_statistics, noise_pictures
from sigmascope.lbm.images import psnr
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.families import denoiser_fingerprint
from sigmascope.lora.fit import FitOptions
from sigmascope.lora.ranks import FULL_RANK, FixedRank, MethodRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.resize import RankPlan, resize_lora
from sigmascope.lora.statistics import ModelStatistics
from sigmascope.pipeline.calibration import fit_saved_pipeline_lora, pipeline_statistics

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
        """Of prompts of training's, with 20 steps and guidance."""
        if of == "noise":
            return None
        texts = self._calibrating(seed)
        with open_checkpoint(self.base if of == "base" else self.tuned) as checkpoint:
            fingerprint = denoiser_fingerprint(checkpoint)
        return pipeline_statistics(
            load_pocket(self._kind, of),
            texts,
            call=CALLS["20 steps, guidance"],
            seed=1000 + seed,
            fingerprint=fingerprint,
        )

    def fit(self, lora: Path, save_to: Path, of: str, seed: int) -> None:
        """On the same prompts, or on as many of random words; four at a time."""
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
        "--calibration", type=int, default=8, help="scenes of the statistics; twice as many prompts"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of calibration")
    parser.add_argument("--fit_steps", type=int, default=400, help="of the optimizer, in each fit")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
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
            found = measure(pair, Path(folder), asked.seeds, asked.ranks)
        rows += [{"model": model, **row} for row in found]
        if not asked.json:
            print("\n\n".join(tables(model, found)), end="\n\n", flush=True)
    if asked.json:
        print(json.dumps(rows))
    if asked.plot is not None:
        plot(rows, asked.plot)
    return 0


def measure(pair: Pair, folder: Path, seeds: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each rank, way and kind of call."""

    def extract(name: str, options: ExtractOptions) -> Path:
        extract_lora(pair.base, pair.tuned, folder / f"{name}.safetensors", options)
        return folder / f"{name}.safetensors"

    def collected(of: str, seed: int = 0) -> Path | None:
        started, path = time.perf_counter(), folder / f"statistics-{of}-{seed}.safetensors"
        found = pair.statistics(of, seed)
        if found is None:
            return None
        found.save(path)
        print(f"statistics of {of}, {seed}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
        return path

    def fitted(path: Path, of: str, seed: int) -> Path:
        started, target = time.perf_counter(), path.with_name(f"{path.stem}-fitted.safetensors")
        pair.fit(path, target, of, seed)
        print(f"{target.stem} on {of}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
        return target

    known = [path for seed in range(seeds) if (path := collected("tuned", seed)) is not None]
    others = {"noise": collected("noise"), "the base": collected("base")}
    grids = {
        name: [extract(f"{method}-{p}", ExtractOptions(rules=RankRules(MethodRank(method, p)))) for p in GRID]
        for name, method in POLICIES.items()
    }
    large = extract("large", ExtractOptions(rank=RESIZED, conv_rank=RESIZED))
    judged: dict[Path | None, Scores] = {None: pair.score(None)}
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        fixed = extract(f"fixed-{rank}", ExtractOptions(rank=rank, conv_rank=rank))
        size = fixed.stat().st_size
        within = Budget(max_bytes=size)

        def resized(name: str, plan: RankPlan, by: Path | None = None) -> Path:
            resize_lora(large, folder / f"{name}.safetensors", plan, statistics=by)
            return folder / f"{name}.safetensors"

        ways: dict[str, Sequence[Path | None]] = {"no LoRA": [None], "fixed rank": [fixed]}
        for name, grid in grids.items():
            fitting = [path for path in grid if path.stat().st_size <= size]
            ways[name] = [max(fitting, key=lambda path: path.stat().st_size)] if fitting else []
        ways["budget, plain"] = [
            extract(f"plain-{rank}", ExtractOptions(budget=within, budget_weights="plain"))
        ]
        ways["budget, relative"] = [extract(f"relative-{rank}", ExtractOptions(budget=within))]
        ways["statistics"] = [
            extract(f"weighted-{rank}-{seed}", ExtractOptions(budget=within, statistics=path))
            for seed, path in enumerate(known)
        ]
        for name, path in others.items():
            if path is not None:
                made = extract(f"{name}-{rank}", ExtractOptions(budget=within, statistics=path))
                ways[f"statistics of {name}"] = [made]
        fits = {
            "statistics, fitted": [(path, "tuned", seed) for seed, path in enumerate(ways["statistics"])],
            "budget, fitted on noise": [(path, "noise", 0) for path in ways["budget, relative"]],
        }
        for name, asked in fits.items():
            ways[name] = [fitted(path, of, seed) for path, of, seed in asked if path is not None]
        whole = RankPlan(RankRules(FixedRank(FULL_RANK, FULL_RANK)), within)
        ways["resized, fixed rank"] = [resized(f"cut-{rank}", RankPlan(RankRules(FixedRank(rank, rank))))]
        ways["resized, budget"] = [resized(f"cut-budget-{rank}", whole)]
        ways["resized, statistics"] = [
            resized(f"cut-weighted-{rank}-{seed}", whole, path) for seed, path in enumerate(known)
        ]
        for way, files in ways.items():
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
