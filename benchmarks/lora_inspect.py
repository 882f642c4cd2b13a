"""Processor time and memory of `lora inspect` on a file of 1,000 modules, beyond those of importing PyTorch.

Each run is a process of its own, with one thread. The modules have the names, shapes and ranks of SDXL's attention layers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

MODULES, WIDTH, CONTEXT, RANK = 1000, 1280, 2048, 16
MOST_SECONDS, MOST_MIB = 1.0, 350.0

LAYERS = {
    **{f"attn{number}_to_{end}": (WIDTH, WIDTH) for number in (1, 2) for end in ("q", "out_0")},
    **{f"attn1_to_{end}": (WIDTH, WIDTH) for end in "kv"},
    **{f"attn2_to_{end}": (WIDTH, CONTEXT) for end in "kv"},
    "ff_net_0_proj": (8 * WIDTH, WIDTH),
    "ff_net_2": (WIDTH, 4 * WIDTH),
}

CHILD = """
import sys, time
import torch
before = time.process_time()
from sigmascope.cli.root import app
app(["lora", "inspect", sys.argv[1], *sys.argv[2:]], standalone_mode=False)
spent = time.process_time() - before
with open("/proc/self/status") as status:  # ru_maxrss would also count the process that started this one
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(spent, peak / 1024, file=sys.stderr)
"""


def write_lora(path: Path) -> None:
    """A file of MODULES modules in kohya's names, in float16, with an alpha each."""
    generator, state = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for number in range(MODULES):
        layer, (rows, columns) = list(LAYERS.items())[number % len(LAYERS)]
        name = f"lora_unet_input_blocks_8_1_transformer_blocks_{number // len(LAYERS)}_{layer}"
        down = torch.randn(RANK, columns, generator=generator) / columns**0.5
        state[f"{name}.lora_up.weight"] = (torch.randn(rows, RANK, generator=generator) * 0.01).half()
        state[f"{name}.lora_down.weight"] = down.half()
        state[f"{name}.alpha"] = torch.tensor(RANK / 2.0)
    save_file(state, path)


def measured(path: Path) -> tuple[float, float]:
    """Seconds of processor time, and MiB at the peak."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(path.parent)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    command = [sys.executable, "-c", CHILD, str(path)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, mebibytes = ran.stderr.split()[-2:]
    return float(seconds), float(mebibytes)


def main() -> None:
    """Print the medians and their ratio to what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="Processes.")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lora.safetensors")
        write_lora(path)
        measured(path)  # writes bytecode
        seconds, mebibytes = (
            median(values) for values in zip(*(measured(path) for _ in range(rounds)), strict=True)
        )
    print(f"{MODULES:,} modules of rank {RANK}: {seconds:.2f} s of processor time, {mebibytes:.0f} MiB")
    print(f"time {seconds / MOST_SECONDS:.2f}, memory {mebibytes / MOST_MIB:.2f} of what is allowed")


if __name__ == "__main__":
    main()
