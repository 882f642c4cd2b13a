"""How large the reports of a run are and how long they take to write, against their limits.

A usual run (4 calls of a small pipeline, 30 steps each) in at most 1 MB; 10,000 steps in less than 6 MB and 2 seconds; Markdown
in 60 lines.

python benchmarks/report_size.py
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.families.pipelines import make_pipeline

import sigmascope
from sigmascope.records.run import Run, Stage, Steps

MB = 1 << 20


def usual_run() -> Run:
    """Four calls, as somebody makes a few pictures."""
    pipe = make_pipeline("sd15")
    with sigmascope.watch(pipe) as watching:
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            pipe("a red fox", num_inference_steps=30, height=64, width=64, generator=generator)
    return watching.record()


def long_run(run: Run, steps: int = 10_000) -> Run:
    """The same with one long denoising beside it."""
    columns = Steps(
        tuple(0.02 * step for step in range(steps)), tuple(0.02 + step % 7 / 1000 for step in range(steps))
    )
    stage = Stage("denoising", run.seconds, 0.03 * steps, steps=columns)
    return replace(run, seconds=run.seconds + stage.seconds, stages=(*run.stages, stage))


def main() -> None:
    """Print a row for each report."""
    torch.set_num_threads(1)
    usual = usual_run()
    cases = (("usual run", usual, 1.0, None), ("10,000 steps", long_run(usual), 6.0, 2.0))
    print(
        f"{'report':14} {'MB':>7} {'of limit':>9} {'seconds':>8} {'of limit':>9} {'Markdown lines of 60':>21}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, run, most_mb, most_seconds in cases:
            path = Path(folder, "report.html")
            started = time.perf_counter()
            run.to_html(path)
            took = time.perf_counter() - started
            size = path.stat().st_size / MB
            of_time = "" if most_seconds is None else f"{took / most_seconds:.2f}"
            lines = len(sigmascope.to_markdown(run).splitlines())
            print(f"{name:14} {size:7.2f} {size / most_mb:9.2f} {took:8.2f} {of_time:>9} {lines:>21}")


if __name__ == "__main__":
    main()
