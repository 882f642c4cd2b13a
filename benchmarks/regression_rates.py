"""How often `sigmascope check` cries wolf, and how often it finds a slowdown that was planted.

    python benchmarks/regression_rates.py [--runs 40] [--slowdown 0.05] [--clock cpu] [--json FILE]

A small UNet denoises in turn as it is (A) and with a step that takes some per cent longer (B: after each call the host
waits for that share of the call's time). Then, many times, as many runs as one would make are drawn and checked: A
against A for false alarms, B against A for what is found. Draws share runs, so the rates of one benchmark are less exact
than their number suggests. On a machine that others use too, `--clock cpu` takes the processor time of the loop for its
time: that of the wall would tell of the others. Beside it stands what a bare threshold on the medians would have said, as pytest-benchmark has it.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from sigmascope.analysis.run_comparison import ALPHA, MAX_SLOWDOWN
from sigmascope.analysis.run_figures import figures_of
from sigmascope.analysis.two_samples import p_of_higher
from sigmascope.monitor import Recorder
from sigmascope.records.run import Run

FIGURES = ("total", "denoising", "denoising step")
DRAWS = 400
Clock = Callable[[], int]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter_ns, "cpu": time.process_time_ns}


def small_unet() -> UNet2DConditionModel:
    """A UNet of some 50 ms a call on 2 cores."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()


@torch.no_grad()
def recorded(unet: UNet2DConditionModel, steps: int, slowdown: float, clock: Clock) -> Run:
    """One run of the loop."""
    latents, text = torch.randn(1, 4, 32, 32), torch.randn(1, 8, 32)
    recorder = Recorder("loop", sample_hz=None, clock=clock)
    with recorder, recorder.stage("denoising"):
        for number in range(steps):
            with recorder.step():
                started = clock()
                latents = latents - 0.01 * unet(latents, number, text).sample
                ends = clock() + slowdown * (clock() - started)
                while clock() < ends:
                    pass
    return recorder.run()


def is_alarm(new: Sequence[float], old: Sequence[float]) -> bool:
    """What `sigmascope check` says of one figure with its defaults."""
    return is_over_threshold(new, old) and p_of_higher(new, old) < ALPHA


def is_over_threshold(new: Sequence[float], old: Sequence[float]) -> bool:
    """What a bare threshold on the medians says."""
    return statistics.median(new) > (1 + MAX_SLOWDOWN) * statistics.median(old)


def rates(
    same: Sequence[Run], slower: Sequence[Run], size: int, rng: random.Random
) -> dict[str, dict[str, float]]:
    """Shares of the draws in which each figure, or any, is called regressed."""
    values = {
        side: {name: figures_of(runs)[name].values for name in FIGURES}
        for side, runs in (("A", same), ("B", slower))
    }
    counts: dict[str, dict[str, int]] = {}
    for _ in range(DRAWS):
        drawn = rng.sample(range(len(same)), 2 * size)
        others = rng.sample(range(len(slower)), size)
        for judge in (is_alarm, is_over_threshold):
            for kind, side, chosen in (("alarm", "A", drawn[:size]), ("found", "B", others)):
                said = [
                    judge(
                        [values[side][name][index] for index in chosen],
                        [values["A"][name][index] for index in drawn[size:]],
                    )
                    for name in FIGURES
                ]
                row = counts.setdefault(f"{judge.__name__} {kind}", dict.fromkeys((*FIGURES, "any"), 0))
                for name, yes in zip((*FIGURES, "any"), (*said, any(said)), strict=True):
                    row[name] += yes
    return {row: {name: count / DRAWS for name, count in found.items()} for row, found in counts.items()}


def main() -> None:
    """Run the loop in turn as it is and slowed down, then draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="of each kind (default 40)")
    parser.add_argument("--steps", type=int, default=20, help="of a run (default 20)")
    parser.add_argument("--slowdown", type=float, default=0.05, help="planted, as a fraction (default 0.05)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="whose time counts (default wall)")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    unet = small_unet()
    clock = CLOCKS[options.clock]
    recorded(unet, options.steps, 0.0, clock)  # warm up
    same, slower = [], []
    for _ in range(options.runs):
        same.append(recorded(unet, options.steps, 0.0, clock))
        slower.append(recorded(unet, options.steps, options.slowdown, clock))
    step = figures_of(same)["denoising step"].values
    spread = statistics.stdev(step) / statistics.mean(step)
    print(
        f"{options.runs} runs of each kind, {options.steps} steps of {1e3 * statistics.median(step):.1f} ms; "
        f"their medians vary by {100 * spread:.1f} % from run to run; planted: {100 * options.slowdown:g} %"
    )
    print(
        f"{'runs a side':>11}  {'who':<10} {'what':<7}" + "".join(f"{name:>16}" for name in (*FIGURES, "any"))
    )
    results = {}
    for size in (5, 10, 20):
        if 2 * size > options.runs:
            continue
        found = results[size] = rates(same, slower, size, random.Random(0))
        for row, shares in found.items():
            judge, kind = row.split()
            who = "check" if judge == "is_alarm" else "threshold"
            print(
                f"{size:>11}  {who:<10} {kind:<7}" + "".join(f"{share:>16.1%}" for share in shares.values())
            )
    if options.json:
        options.json.write_text(json.dumps({"spread": spread, "rates": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
