"""How often a comparison cries wolf, and how often it finds a slowdown that was planted, idle and beside other programs.

    python benchmarks/regression_rates.py [--pairs 200] [--runs 10] [--slowdown 0.1] [--where idle load] [--order turn] [--threads 1] [--json FILE]
    python benchmarks/regression_rates.py --draws 40 [--slowdown 0.05] [--clock cpu] [--json FILE]

Pairs: a small pipeline runs watched, as it is and with so many more convolutions in each step that the run takes a tenth longer,
ten times a side: in a row as `sigmascope bench` repeats it, or in turn as one compares on a machine that drifts. Each side is compared as `sigmascope compare` does it, by its first sentence (the whole run) and by the rows of its table (stage and
step): a side as it is with the one before it, for false alarms, and a slower side with the one as it is before it. Beside
other programs there is a process for each processor that never rests; it ends with this one. A difference is *found*
(unchanged: *accused*), *not comparable*, since the runs waited for a processor, *undecided*, or *denied* (unchanged: *as before*).

Draws: a small UNet denoises in turn as it is (A) and with a step that takes some per cent longer (B: after each call the host
waits for that share of the call's time). Then, many times, as many runs as one would make are drawn and checked: A
against A for false alarms, B against A for what is found. Draws share runs, so the rates of one benchmark are less exact
than their number suggests. On a machine that others use too, `--clock cpu` takes the processor time of the loop for its
time: that of the wall would tell of the others. Beside it stands what a bare threshold on the medians would have said, as pytest-benchmark has it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.families import make_pipeline

import sigmascope
from sigmascope.analysis.recipe import used_by_others
from sigmascope.analysis.run_comparison import (
    ALPHA,
    FigureComparison,
    compare_run_sets,
    compare_totals,
)
from sigmascope.analysis.run_figures import figures_of
from sigmascope.analysis.two_samples import p_of_higher
from sigmascope.monitor import Recorder
from sigmascope.records.run import Run

FIGURES = ("total", "denoising", "denoising step")
DRAWS = 400
DRAWN_SLOWDOWN = 0.03
"""Runs that are drawn from two sides in turns do not drift apart: less than the usual limit is no noise."""
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
    """What `sigmascope check` says of one figure with this limit, but for drift: runs that are drawn have no order."""
    return is_over_threshold(new, old) and p_of_higher(new, old) < ALPHA


def is_over_threshold(new: Sequence[float], old: Sequence[float]) -> bool:
    """What a bare threshold on the medians says."""
    return statistics.median(new) > (1 + DRAWN_SLOWDOWN) * statistics.median(old)


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


RUNS = 10
"""On each side: what `sigmascope bench` takes."""
LEAST_RUN_SECONDS = 0.26
"""The system tells of other programs in runs of a fifth of a second and more, and a machine may become faster meanwhile."""
CALLS = 100
"""Of the convolution in a step; one more is less than 1 %."""
SPIN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""
OUTCOMES = ("found", "not comparable", "undecided", "denied")
UNCHANGED = {"found": "accused", "denied": "as before"}
"""What the same is called where nothing was planted."""


@contextmanager
def beside_others() -> Iterator[None]:
    """A process for each processor that never rests, and ends with this one."""
    command = [sys.executable, "-c", SPIN, str(os.getpid())]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class Loop:
    """A small pipeline whose denoiser does nothing but convolutions, some 0.3 s of them a run; in a slower one so many more that
    the whole run takes longer by the slowdown.
    """

    def __init__(self, slowdown: float) -> None:
        self._pipeline = make_pipeline("sd15")
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(32, 32, 3, padding=1).eval()
        kept = torch.randn(1, 32, 64, 64)

        def forward(latents: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor]:
            for _ in range(self._calls):
                layer(kept)
            return (torch.zeros_like(latents),)

        self._pipeline.unet.forward = forward
        self._calls, self._steps = CALLS, 4
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._steps = max(4, round(threads * LEAST_RUN_SECONDS * self._steps / self._least_seconds()))
        whole, self._calls = self._least_seconds(), 0
        convolutions = whole - self._least_seconds()
        torch.set_num_threads(threads)
        self._of_side = {False: CALLS, True: round(CALLS * (1 + slowdown * whole / convolutions))}

    def _least_seconds(self) -> float:
        """Of the processor, for a run on one thread: other programs do not change it by much."""
        took = []
        for _ in range(10):
            began = time.process_time()
            self._record()
            took.append(time.process_time() - began)
        return min(took)

    def _record(self) -> Run:
        with sigmascope.watch(self._pipeline, keep_run=False) as watching:
            self._pipeline("a fox", height=32, width=32, num_inference_steps=self._steps, output_type="pt")
        return watching.record()

    def run(self, *, slower: bool = False) -> Run:
        """One recorded run."""
        self._calls = self._of_side[slower]
        return self._record()


def outcome(compared: FigureComparison) -> str:
    """What is said of one figure: one of `OUTCOMES`."""
    if not compared.is_comparable:
        return "not comparable"
    if compared.undecided is not None:
        return "undecided"
    return "denied" if compared.is_noise else "found"


def outcomes(new: Sequence[Run], baseline: Sequence[Run]) -> dict[str, str]:
    """By figure what is said of it; "any" is the gravest of them."""
    rows, _ = compare_run_sets(new, baseline)
    told = {"first sentence": outcome(compare_totals(new, baseline))}
    told |= {row.name: outcome(row) for row in rows if row.unit == "seconds"}
    return {**told, "any": min(told.values(), key=OUTCOMES.index)}


Pair = tuple[list[Run], list[Run]]
"""The new side and the one before it."""


def in_a_row(loop: Loop, runs: int) -> Iterator[dict[str, Pair]]:
    """Endless pairs of each kind, all runs of a side one after the other; each unchanged side is in three of them."""
    before = [loop.run() for _ in range(runs)]
    while True:
        same = [loop.run() for _ in range(runs)]
        slow = [loop.run(slower=True) for _ in range(runs)]
        yield {"unchanged": (same, before), "slower": (slow, same)}
        before = same


def in_turn(loop: Loop, runs: int) -> Iterator[dict[str, Pair]]:
    """The same where the sides of a pair take turns; of two sides as they are every other run is a new one."""
    before: list[Run] = []
    while True:
        both = [(loop.run(), loop.run(slower=True)) for _ in range(runs)]
        same, slow = [one for one, _ in both], [one for _, one in both]
        if before:
            yield {"unchanged": ([*before, *same][1::2], [*before, *same][::2]), "slower": (slow, same)}
        before = same


ORDERS = {"row": in_a_row, "turn": in_turn}


def rates_of_pairs(
    pairs: int, runs: int, slowdown: float, where: str, order: str
) -> dict[str, dict[str, Counter[str]]]:
    """By kind of pair and figure, how many pairs came out how."""
    counts: dict[str, dict[str, Counter[str]]] = {"unchanged": {}, "slower": {}}
    others, ratios = [], []
    with beside_others() if where == "load" else nullcontext():
        endless = ORDERS[order](Loop(slowdown), runs)
        began = time.perf_counter()
        for number, kinds in enumerate(islice(endless, pairs), 1):
            for kind, (new, before) in kinds.items():
                for figure, word in outcomes(new, before).items():
                    counts[kind].setdefault(figure, Counter())[word] += 1
            ratios.append(compare_totals(*kinds["slower"]).ratio or 1)
            share = used_by_others(kinds["unchanged"][0])
            others += [] if share is None else [share]
            if number % 10 == 0 or number == pairs:
                took = (time.perf_counter() - began) / number
                print(f"  {where}: {number} of {pairs}, {took / 2:.2f} s a pair", file=sys.stderr, flush=True)
    used = (
        f"{100 * statistics.median(others):.0f} % of the processors ({100 * min(others):.0f} to {100 * max(others):.0f} %)"
        if others
        else "an unknown share of the processors: the runs were too short"
    )
    print(
        f"\n{where}, in {order}: others used {used}; slower runs took {statistics.median(ratios) - 1:+.1%} in the median"
    )
    for kind, figures in counts.items():
        for figure, words in figures.items():
            names = UNCHANGED if kind == "unchanged" else {}
            shares = (f"{names.get(word, word)} {words[word]}" for word in OUTCOMES)
            print(f"  {kind:10} {figure:16} {', '.join(shares)} of {pairs}")
    return counts


def pairs_main(options: argparse.Namespace) -> None:
    """Compare pairs, idle and beside other programs."""
    torch.set_num_threads(options.threads)
    slowdown = 0.1 if options.slowdown is None else options.slowdown
    print(
        f"{options.pairs} pairs of {options.runs} runs a side on {options.threads} threads; planted: {100 * slowdown:g} %"
    )
    results = {
        where: rates_of_pairs(options.pairs, options.runs, slowdown, where, options.order)
        for where in options.where
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    """Compare pairs, or draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200, help="of each kind (default 200)")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"on each side of a pair (default {RUNS})")
    parser.add_argument("--where", nargs="+", choices=("idle", "load"), default=("idle", "load"))
    parser.add_argument(
        "--order", choices=ORDERS, default="turn", help="of the runs of two sides (default turn)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the loop (default 1)")
    parser.add_argument(
        "--draws", type=int, metavar="RUNS", help="draw from so many runs of each kind instead"
    )
    parser.add_argument("--steps", type=int, default=20, help="of a run that is drawn (default 20)")
    parser.add_argument("--slowdown", type=float, help="planted, as a fraction (default 0.1; of draws 0.05)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="whose time counts (default wall)")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    if options.draws is None:
        pairs_main(options)
    else:
        draws_main(options, 0.05 if options.slowdown is None else options.slowdown)


def draws_main(options: argparse.Namespace, slowdown: float) -> None:
    """Run the loop in turn as it is and slowed down, then draw."""
    unet = small_unet()
    clock = CLOCKS[options.clock]
    recorded(unet, options.steps, 0.0, clock)  # warm up
    same, slower = [], []
    for _ in range(options.draws):
        same.append(recorded(unet, options.steps, 0.0, clock))
        slower.append(recorded(unet, options.steps, slowdown, clock))
    step = figures_of(same)["denoising step"].values
    spread = statistics.stdev(step) / statistics.mean(step)
    print(
        f"{options.draws} runs of each kind, {options.steps} steps of {1e3 * statistics.median(step):.1f} ms; "
        f"their medians vary by {100 * spread:.1f} % from run to run; planted: {100 * slowdown:g} %"
    )
    print(
        f"{'runs a side':>11}  {'who':<10} {'what':<7}" + "".join(f"{name:>16}" for name in (*FIGURES, "any"))
    )
    results = {}
    for size in (5, 10, 20):
        if 2 * size > options.draws:
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
