"""Time and memory of `lora inspect --arrives` on a base of 12 billion parameters, in a sparse file.

    python benchmarks/lora_arrives.py                    # FLUX's layers in NVFP4: needs comfy-kitchen
    python benchmarks/lora_arrives.py --stored fp8       # scaled fp8
    python benchmarks/lora_arrives.py --blocks 2         # of each kind, for a quick look

The base's tensors are holes in the file, read as zeros; only the scales are written. A layer of zeros takes as long as
any other. Printed are the weights, wall and CPU time, and the process's peak of resident memory.
"""

import argparse
import json
import resource
import struct
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.arrival import arrivals

WIDTH, RANK = 3072, 16
DOUBLE = {
    f"{stream}_{part}": shape
    for stream in ("img", "txt")
    for part, shape in {
        "attn.qkv": (3 * WIDTH, WIDTH),
        "attn.proj": (WIDTH, WIDTH),
        "mlp.0": (4 * WIDTH, WIDTH),
        "mlp.2": (WIDTH, 4 * WIDTH),
        "mod.lin": (6 * WIDTH, WIDTH),
    }.items()
}
SINGLE = {
    "linear1": (7 * WIDTH, WIDTH),
    "linear2": (WIDTH, 5 * WIDTH),
    "modulation.lin": (3 * WIDTH, WIDTH),
}
SINGLES_PER_DOUBLE = 2


def layers(blocks: int) -> dict[str, tuple[int, int]]:
    """FLUX's attention, feed-forward and modulation layers, in the names of its own files."""
    named = {f"double_blocks.{i}.{name}": shape for i in range(blocks) for name, shape in DOUBLE.items()}
    singles = range(SINGLES_PER_DOUBLE * blocks)
    return named | {f"single_blocks.{i}.{name}": shape for i in singles for name, shape in SINGLE.items()}


def tensors_of(name: str, shape: tuple[int, int], stored: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and bytes of a layer's codes and scales."""
    rows, columns = shape
    if stored == "fp8":
        return {
            f"{name}.weight": ("F8_E4M3", shape, rows * columns),
            f"{name}.weight_scale": ("F32", (1,), 4),
        }
    return {
        f"{name}.weight": ("U8", (rows, columns // 2), rows * columns // 2),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16), rows * columns // 16),
        f"{name}.weight_scale_2": ("F32", (1,), 4),
    }


def write_base(path: Path, shapes: dict[str, tuple[int, int]], stored: str) -> None:
    """A safetensors file whose data is a hole, but for the scales of whole tensors."""
    header: dict[str, object] = {}
    ones, position = [], 0
    for name, shape in shapes.items():
        for key, (dtype, size, nbytes) in tensors_of(name, shape, stored).items():
            header[key] = {"dtype": dtype, "shape": size, "data_offsets": [position, position + nbytes]}
            ones += [position] if dtype == "F32" else []
            position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for place in ones:
            file.seek(start + place)
            file.write(struct.pack("<f", 1e-4))
        file.truncate(start + position)


def write_lora(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """Random factors for every layer."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, (rows, columns) in shapes.items():
        factors = {"lora_A": (RANK, columns), "lora_B": (rows, RANK)}
        for factor, shape in factors.items():
            values = torch.randn(shape, generator=generator).mul(0.01).to(torch.bfloat16)
            state[f"diffusion_model.{name}.{factor}.weight"] = values
    save_file(state, path)


def main() -> None:
    """Write both files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=19)
    parser.add_argument("--stored", choices=("nvfp4", "fp8"), default="nvfp4")
    given = parser.parse_args()
    shapes = layers(given.blocks)
    with tempfile.TemporaryDirectory() as folder:
        base, lora = Path(folder, "base.safetensors"), Path(folder, "lora.safetensors")
        write_base(base, shapes, given.stored)
        write_lora(lora, shapes)
        began, worked = time.perf_counter(), time.process_time()
        with open_checkpoint(base) as checkpoint:
            found = arrivals(lora, checkpoint)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    parameters = sum(rows * columns for rows, columns in shapes.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{len(found.weights)} of {len(shapes)} weights, {parameters / 1e9:.2f} billion parameters, {given.stored}"
    )
    print(
        f"{torch.get_num_threads()} threads: {seconds:.1f} s, {cpu:.1f} s of CPU time, peak of resident memory {peak:.2f} GiB"
    )
    for key, why in list(found.unavailable.items())[:1]:
        print(f"{len(found.unavailable)} unknown, such as {key}: {why}")


if __name__ == "__main__":
    main()
