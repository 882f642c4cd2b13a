"""How often trends and `sigmascope check --against-history` cry wolf, and how soon a planted change is found.

    python benchmarks/trend_rates.py [--series 400] [--planted 400] [--noise 0.015]
    python benchmarks/trend_rates.py --real FOLDER [--runs 60]

Synthetic: series of 100 runs of seven kinds of noise. Unchanged: in how many a change point is told, once all runs are there,
and in how many of every fourth one was told as it came. Planted: how many changes are told with their third run, of time and
of memory. And series that jump between two levels.

Real: a small pipeline of each of five families runs in series, twice, as the machine is and beside a process for each
processor that never rests. The records are written to the folder, and read from there the next time. Nothing changes in any
of the series: each change point whose runs are comparable is a false alarm. Each series is also
checked as `sigmascope check --against-history` does it: one, three and five runs against the 50 before them.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.regression_rates import beside_others
from tests.families import make_pipeline

import sigmascope
from sigmascope.analysis.memory import held_less_before
from sigmascope.analysis.run_comparison import MAX_GROWTH, USUAL, Limits, check_regression, compare_totals
from sigmascope.analysis.run_figures import figures_of, timed_on_device
from sigmascope.analysis.trend import FEWEST_NEW, MOST_BEFORE, changed_with_last, trend_of
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_from_json, run_to_json

LENGTH = 100
KINDS = ("gaussian", "log-normal", "1 in 50 late", "1 in 20 late", "AR(1)", "drift up", "drift down")
LATE = {"1 in 50 late": 0.02, "1 in 20 late": 0.05}
DRIFT = {"drift up": 0.05, "drift down": -0.05}
SHARES, GAPS = (0.1, 0.2, 0.3, 0.5), (0.1, 0.5)
CHANGES = (1.1, 1.15, 1.3, 0.9, 0.75)
FAMILIES = ("flux", "sd15", "sdxl", "sd3", "qwen_image")
WHERE = ("as it is", "loaded")
Series = NDArray[np.float64]


def noisy(kind: str, count: int, noise: float, rng: np.random.Generator) -> Series:
    """Times around 10 s with a standard deviation of `noise`; those that are late take half as long again on average."""
    normal = rng.standard_normal(count)
    if kind == "log-normal":
        values = np.exp(noise * normal)
    elif kind in LATE:
        values = 1 + noise * normal
        late = rng.random(count) < LATE[kind]
        values[late] *= 1 + rng.exponential(0.5, late.sum())
    elif kind == "AR(1)":
        values, correlation = np.ones(count), 0.5
        for index in range(1, count):
            values[index] = (
                1
                + correlation * (values[index - 1] - 1)
                + noise * math.sqrt(1 - correlation**2) * normal[index]
            )
    else:
        values = (1 + noise * normal) * (1 + DRIFT.get(kind, 0.0) * np.arange(count) / LENGTH)
    return 10 * np.clip(values, 0.01, None)


def synthetic(series: int, planted: int, noise: float) -> None:
    """Print false alarms and finds, by kind of noise."""
    rng = np.random.default_rng(0)
    count = math.ceil(series / len(KINDS))
    alarms, early, looked_at = 0, 0, 0
    shown = "  ".join(f"{100 * (change - 1):+.0f} %" for change in CHANGES)
    print(f"noise {100 * noise:g} %, {LENGTH} runs a series; {planted} planted after 20 to 80 runs: {shown}")
    for kind in KINDS:
        unchanged = [noisy(kind, LENGTH, noise, rng).tolist() for _ in range(count)]
        false = sum(bool(trend_of(values, "seconds").changes) for values in unchanged)
        alarms += false
        early += sum(map(is_told_as_it_comes, unchanged[::4]))
        looked_at += len(unchanged[::4])
        found = [within(kind, change, planted, noise, rng) for change in CHANGES]
        print(
            f"  {kind:12} false {false} of {count}; within {FEWEST_NEW} runs: " + "  ".join(found), flush=True
        )
    print(
        f"  in all false {alarms} of {count * len(KINDS)} unchanged series: {100 * alarms / count / len(KINDS):.2f} %; "
        f"as they came {early} of {looked_at}"
    )
    memory, hits = 0, 0
    for _ in range(planted):
        at = int(rng.integers(20, 80))
        values = np.full(at + FEWEST_NEW, 20.0 * 2**30) * (1 + 0.0002 * rng.standard_normal(at + FEWEST_NEW))
        memory += bool(trend_of(values[:at].tolist(), "bytes").changes)
        values[at:] *= 1.02
        hits += any(change.at == at for change in trend_of(values.tolist(), "bytes").changes)
    print(f"  memory, noise 0.02 %, planted +2 %: false {memory}, found {hits} of {planted}")
    each = range(series // len(SHARES) // len(GAPS))
    jumping = [two_levels(share, gap, rng).tolist() for share in SHARES for gap in GAPS for _ in each]
    told = sum(bool(trend_of(values, "seconds").changes) for values in jumping)
    some = jumping[::4]
    early = sum(map(is_told_as_it_comes, some))
    print(
        f"  jumping between two levels: false {told} of {len(jumping)}; as they came {early} of {len(some)}"
    )


def two_levels(share: float, gap: float, rng: np.random.Generator) -> Series:
    """Times of which each is at the higher of two levels with the probability `share`, whatever the one before was."""
    return 10 * (1 + gap * (rng.random(LENGTH) < share)) * (1 + 0.01 * rng.standard_normal(LENGTH))


def is_told_as_it_comes(values: list[float]) -> bool:
    """Whether any run was told as the last of three that changed."""
    return any(changed_with_last(values[:end], "seconds") for end in range(1, len(values) + 1))


def within(kind: str, change: float, planted: int, noise: float, rng: np.random.Generator) -> str:
    """How many changes are found with their third run, at most one run off."""
    found = 0
    for _ in range(planted):
        at = int(rng.integers(20, 80))
        values = noisy(kind, at + FEWEST_NEW, noise, rng)
        values[at:] *= change
        found += any(abs(told.at - at) <= 1 for told in trend_of(values.tolist(), "seconds").changes)
    return f"{100 * found / planted:5.1f} %"


def record(folder: Path, count: int) -> None:
    """Write the series that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for where in WHERE:
        names = [f"{where} {turn} {family}.jsonl" for turn in range(2) for family in FAMILIES]
        missing = [name for name in names if not (folder / name).exists()]
        with beside_others() if missing and where == "loaded" else nullcontext():
            for name in missing:
                runs = series_of(name.removesuffix(".jsonl").split()[-1], count)
                (folder / name).write_text("\n".join(map(run_to_json, runs)) + "\n", encoding="utf-8")
                print(f"  {name}", file=sys.stderr, flush=True)


def series_of(family: str, count: int) -> list[Run]:
    """Runs of one small pipeline."""
    pipe, runs = make_pipeline(family), []
    for _ in range(count):
        with sigmascope.watch(pipe, keep_run=False) as watched:
            pipe("a fox", height=32, width=32, num_inference_steps=10)
        runs.append(watched.record())
    return runs


def real(folder: Path, count: int) -> None:
    """Print false alarms of trends and checks in the series of a folder, which are made where they are missing."""
    record(folder, count)
    told: Counter[str] = Counter()
    checks = {size: Counter[str]() for size in (1, 3, 5)}
    files = sorted(folder.glob("*.jsonl"))
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        runs = [run_from_json(line, source=str(file)) for line in lines]
        told += false_changes(runs)
        for size, outcomes in checks.items():
            outcomes += false_checks(runs, size)
    print(f"{len(files)} real series of {count} runs: {dict(told)}")
    for size, outcomes in checks.items():
        print(
            f"  check of {size} against history: {outcomes['regressed']} of {outcomes['checks']} cried wolf "
            f"({outcomes['figures']} of {outcomes['all figures']} figures)"
        )


def false_changes(runs: Sequence[Run]) -> Counter[str]:
    """Change points by what they are of, and whether the runs around them are comparable."""
    told: Counter[str] = Counter()
    for name, figure in figures_of(runs, timed_on_device(runs)).items():
        limits = Limits(bytes=MAX_GROWTH) if figure.unit == "bytes" else USUAL
        kind = "memory" if figure.unit == "bytes" else "time"
        told[f"figures of {kind}"] += 1
        for change in trend_of(figure.values, figure.unit, limits=limits).changes:
            sides = runs[change.at : change.end][:10], runs[max(change.start, change.at - 10) : change.at]
            is_told = (
                held_less_before(*sides) is None if kind == "memory" else compare_totals(*sides).is_comparable
            )
            told[f"{kind} told" if is_told else f"{kind} not comparable"] += 1
            if is_told:
                print(f"  {name}: {change}", file=sys.stderr)
    return told


def false_checks(runs: Sequence[Run], size: int) -> Counter[str]:
    """Checks of the runs after the tenth, each once, against those before them."""
    told: Counter[str] = Counter()
    for at in range(10, len(runs) - size + 1, size):
        check = check_regression(runs[at : at + size], runs[max(0, at - MOST_BEFORE) : at], is_history=True)
        told["checks"] += 1
        told["regressed"] += bool(check.regressed)
        told["figures"] += len(check.regressed)
        told["all figures"] += len(check.figures)
    return told


def main() -> None:
    """Print both, or the real series alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--series", type=int, default=400, help="unchanged ones (default 400)")
    parser.add_argument("--planted", type=int, default=400, help="of each kind and change (default 400)")
    parser.add_argument("--noise", type=float, default=0.015, help="standard deviation (default 0.015)")
    parser.add_argument(
        "--real", type=Path, metavar="FOLDER", help="series of runs, made where they are missing"
    )
    parser.add_argument("--runs", type=int, default=60, help="in each real series (default 60)")
    options = parser.parse_args()
    if options.real is not None:
        real(options.real, options.runs)
    else:
        synthetic(options.series, options.planted, options.noise)


if __name__ == "__main__":
    main()
