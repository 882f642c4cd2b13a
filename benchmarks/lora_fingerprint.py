"""How long fingerprints of a model's weights take, beside reading them once.

    python benchmarks/lora_fingerprint.py [--parameters 2.4e9] [--dtype bfloat16] [--threads 1 2] [--repeats 3]

Weights of the sizes of an SDXL-like U-Net, filled with noise, until there are as many parameters as asked for. The same
weights are read by a plain `torch.sum` of each tensor and by the fingerprints of the LoRA application's baseline, in
turn; the fastest of the repeats counts, since cores and memory are shared with whatever else the machine does. The
processor's own time tells more on a busy machine. Sampling a thousand elements a weight is the baseline's other part.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sigmascope.probes.fingerprints import fingerprints, samples

SHAPES = [
    (1280, 1280),
    (10240, 1280),
    (1280, 5120),
    (1280, 1280, 3, 3),
    (640, 640),
    (1280,),
    (320, 320, 3, 3),
]


def make_weights(parameters: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Weights of an SDXL-like U-Net's sizes, `parameters` of them or a few more."""
    noise = torch.randn(max(torch.Size(shape).numel() for shape in SHAPES)).to(device, dtype)
    found: dict[str, Tensor] = {}
    total = 0
    while total < parameters:
        shape = torch.Size(SHAPES[len(found) % len(SHAPES)])
        found[str(len(found))] = noise[: shape.numel()].roll(len(found)).reshape(shape)
        total += shape.numel()
    return found


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time of one call, and the processor's."""
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - began_cpu


def plain_sum(weights: dict[str, Tensor]) -> list[float]:
    """Read every weight once."""
    return torch.stack([weight.sum() for weight in weights.values()]).tolist()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=2.4e9)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    weights = make_weights(int(arguments.parameters), getattr(torch, arguments.dtype), arguments.device)
    nbytes = sum(weight.nbytes for weight in weights.values())
    count = sum(weight.numel() for weight in weights.values())
    print(f"{count / 1e9:.2f} billion parameters in {len(weights)} tensors, {nbytes / 1e9:.2f} GB\n")
    print(
        f"{'threads':>7} {'what':<13} {'seconds':>8} {'GB/s':>6} {'of a sum':>9} {'CPU s':>8} {'of a sum':>9}"
    )
    for threads in dict.fromkeys(arguments.threads):
        torch.set_num_threads(threads)
        jobs: dict[str, Callable[[], object]] = {
            "plain sum": lambda: plain_sum(weights),
            "fingerprints": lambda threads=threads: fingerprints(weights, threads=threads),  # type: ignore[misc]
            "samples": lambda: samples(weights),
        }
        times = {name: min(seconds_of(job) for _ in range(arguments.repeats)) for name, job in jobs.items()}
        sum_seconds, sum_cpu = times["plain sum"]
        for name, (seconds, cpu) in times.items():
            wall = f"{seconds:>8.3f} {nbytes / seconds / 1e9:>6.1f} {seconds / sum_seconds:>9.2f}"
            print(f"{threads:>7} {name:<13} {wall} {cpu:>8.3f} {cpu / sum_cpu:>9.2f}")


if __name__ == "__main__":
    main()
