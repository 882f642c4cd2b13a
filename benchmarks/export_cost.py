"""What exporting a generation costs: the host's thread, on which it is handed over, and the thread that counts and sends it.

    python benchmarks/export_cost.py [--generations 200] [--steps 50]

The host's part may take 5 ms; it is the processor time of its thread, less that of the same generation where nobody listens.
The collector is one that does not answer. Last come a scrape, and what is left of 17,700 paths that a scanner asks for.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["SIGMASCOPE_KEEP"] = "0"
os.environ["OTEL_EXPORTER_OTLP_TIMEOUT"] = "30"

import sigmascope
from sigmascope.monitor.publishing import PUBLISHER, Published, counted_metrics, export_runs
from sigmascope.records.performance import RequestRecord
from sigmascope.records.run import Run
from sigmascope.reports.otlp import OpenTelemetry
from sigmascope.reports.prometheus import Metrics

MOST_HOST_SECONDS = 0.005
STAGES = ("text_encoding", "model_sampling", "latent_encoding", "denoising", "latent_decoding")
SCANNED = 17_700
"""So many unknown paths a scanner was seen to ask for: sgl-project/sglang#31193."""


def generate(monitor: sigmascope.PerformanceMonitor, steps: int) -> float:
    """A generation of all stages; the processor time of its thread, in seconds."""
    started = time.thread_time()
    with monitor.monitor_generation("pocket", num_steps=steps):
        for name in STAGES:
            with sigmascope.stage(name):
                for _ in range(steps if name == "denoising" else 0):
                    with sigmascope.step():
                        pass
    return time.thread_time() - started


def seconds_of(generations: int, steps: int) -> list[float]:
    """Of so many generations, each with a moment for what is handed over."""
    monitor = sigmascope.PerformanceMonitor(sample_hz=None)
    took = []
    for _ in range(generations):
        took.append(generate(monitor, steps))
        PUBLISHER.drain(1.0)
    return took


@contextmanager
def silent_collector() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = []

        def take() -> None:
            while True:
                try:
                    taken.append(listening.accept())
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def counting_seconds(run: Run, repeats: int) -> tuple[float, float]:
    """For one run, of Prometheus and of OpenTelemetry, off the host's thread."""
    metrics, telemetry = Metrics(), OpenTelemetry()
    took = []
    for add in (metrics.add_run, telemetry.add):
        each = []
        for _ in range(repeats):
            started = time.thread_time()
            add(run)
            each.append(time.thread_time() - started)
        took.append(median(each))
    telemetry.end(0.1)
    return took[0], took[1]


def main() -> int:
    """Print the costs; 1 if the host's is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    alone = seconds_of(args.generations, args.steps)
    with silent_collector() as endpoint:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        metrics, last = counted_metrics(), list[Published]()
        leave = PUBLISHER.listen(lambda published: last.__setitem__(slice(None), [published]))
        export = export_runs(otlp=True)
        heard = seconds_of(args.generations, args.steps)
        leave()
        cost = median(heard) - median(alone)
        print(f"host's thread: {1e3 * median(alone):.2f} ms alone, {1e3 * median(heard):.2f} ms exported")
        print(
            f"  handing over: {1e3 * cost:.2f} ms (the slowest: {1e3 * max(alone):.1f} ms alone, {1e3 * max(heard):.1f} ms exported)"
        )
        prometheus, otlp = counting_seconds(last[0].run, args.generations)
        print(
            f"other thread: {1e3 * prometheus:.2f} ms for Prometheus, {1e3 * otlp:.2f} ms for OpenTelemetry"
        )
        for number in range(SCANNED):
            metrics.add_request(
                RequestRecord(str(number), "GET", f"/{number}/../etc/passwd", "", 0.01, 0.01, 404, 0, 0, 1)
            )
        started = time.thread_time()
        text = metrics.text(0)
        print(
            f"scrape: {1e3 * (time.thread_time() - started):.1f} ms, {len(text):,} bytes, {text.count(b'unknown'):,} lines with an unknown route or value"
        )
        print(f"dropped: {export.dropped()}")
        began = time.monotonic()
        export.close()
        print(f"end: {time.monotonic() - began:.1f} s, with a collector that never answers")
    return int(cost > MOST_HOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
