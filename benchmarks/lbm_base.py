"""Making an LBM's exact base, and loading it: time and memory beside the plain way.

    python benchmarks/lbm_base.py             a backbone of SDXL's depth and a fifth of its width
    python benchmarks/lbm_base.py --full      SDXL's own size: 2.57 billion parameters, 30 GB of disk

The backbone has random fp16 weights in a diffusers folder. `sigmascope lbm create-base` makes the base of it; the
plain way loads the models with diffusers, changes their state dicts and saves them with `torch.save` and
safetensors. Both write both formats, each in a process of its own, and every tensor is compared bit for bit. The
base is then loaded from every layout that LBM checkpoints have. All files are removed in the end.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from base_bench.backbones import SMALL, make_folder, make_single_file
from base_bench.processes import Measured, run_measured
from sigmascope.lbm.base import compare_files
from sigmascope.lbm.config import LbmConfig, parse_config

_JOBS = str(Path(__file__).parent / "base_bench" / "jobs.py")
_MIB = 1024**2


def main() -> None:
    """Make a backbone, make its base in all ways, compare, load, print."""
    options = parsed()
    config = LbmConfig() if options.full else parse_config({"denoiser": SMALL})
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {load:.1f}; fp16 to {options.torch_dtype}")
    with temporary_folder(options.folder) as folder:
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        begin = time.perf_counter()
        count = make_folder(folder / "backbone", config, torch.float16)
        print(
            f"backbone: {count:,} parameters in the UNet, made in {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        libraries = run_measured([_JOBS, "imports"], folder / "log")
        show("libraries alone", libraries)
        make_bases(folder, options)
        load_bases(folder, options, libraries.anonymous_bytes)


def make_bases(folder: Path, options: argparse.Namespace) -> None:
    """Ours from a folder, the plain way, and ours from a single file; each compared with the first."""
    ours = run_measured(create_base(folder, folder / "backbone", options), folder / "log")
    show("create-base", ours)
    arguments = (str(folder / "backbone"), str(folder / "config.yaml"), str(folder), options.torch_dtype)
    plain = run_measured([_JOBS, "plain", *arguments], folder / "log")
    show("plain way", plain)
    print(
        f"  create-base takes {ours.seconds / plain.seconds:.2f} of its time, {ours.cpu_seconds / plain.cpu_seconds:.2f}"
        f" of its CPU time, {ours.peak_bytes / plain.peak_bytes:.3f} of its memory"
    )
    files = tuple(
        folder / name for name in ("exact.safetensors", "exact.ckpt", "plain.ckpt", "plain.safetensors")
    )
    print(f"  {compare_files(files)} tensors equal bit for bit in {len(files)} files", flush=True)
    for name in ("plain.ckpt", "plain.safetensors"):
        (folder / name).unlink()
    if options.single_file:
        make_single_file(folder / "backbone", folder / "single.safetensors")
        shutil.rmtree(folder / "backbone")
        (folder / "exact.ckpt").rename(folder / "first.ckpt")
        again = run_measured(create_base(folder, folder / "single.safetensors", options), folder / "log")
        show("from a single file", again)
        same = compare_files((folder / "first.ckpt", folder / "exact.safetensors", folder / "exact.ckpt"))
        print(f"  {same} tensors equal bit for bit to those from the folder", flush=True)
        (folder / "first.ckpt").unlink()
        (folder / "single.safetensors").unlink()


def create_base(folder: Path, backbone: Path, options: argparse.Namespace) -> list[str]:
    """The command, as a user gives it."""
    return [
        *("-m", "sigmascope", "lbm", "create-base", "--json"),
        *("--config_path", str(folder / "config.yaml"), "--save_path", str(folder / "exact.ckpt")),
        *("--backbone_signature", str(backbone), "--torch_dtype", options.torch_dtype),
    ]


def load_bases(folder: Path, options: argparse.Namespace, libraries: int) -> None:
    """Load the base from every layout of SPEC section 7."""
    ckpt = str(folder / "exact.ckpt")
    whole = run_measured([_JOBS, "whole", ckpt], folder / "log")
    print(f"torch.load, not mapped, and the archive's sums: {whole.output.strip()}", flush=True)
    load_one("safetensors", folder / "exact.safetensors", folder, options, libraries)
    load_one("ckpt, bare", folder / "exact.ckpt", folder, options, libraries)
    (folder / "exact.safetensors").unlink()
    for layout in ("model_state_dict", "lightning"):
        run_measured([_JOBS, "wrap", ckpt, str(folder / f"{layout}.ckpt"), layout], folder / "log")
        load_one(f"ckpt, {layout}", folder / f"{layout}.ckpt", folder, options, libraries)
        (folder / f"{layout}.ckpt").unlink()


def load_one(name: str, path: Path, folder: Path, options: argparse.Namespace, libraries: int) -> None:
    """Load one file and show what it took, beside the model's own size."""
    arguments = (str(path), str(folder / "config.yaml"), options.torch_dtype)
    taken = run_measured([_JOBS, "load", *arguments], folder / "log")
    found = json.loads(taken.output.splitlines()[-1])
    show(f"load {name}", taken)
    print(
        f"  {found['modules']} modules, {found['tensors']} tensors, {found['bytes'] / _MIB:,.0f} MiB, "
        f"in {found['seconds']:.1f} s; anonymous memory above the libraries' "
        f"{(taken.anonymous_bytes - libraries) / found['bytes']:.2f} of the model",
        flush=True,
    )


def show(name: str, taken: Measured) -> None:
    """One line of what a process took."""
    print(
        f"{name:24} {taken.seconds:7.1f} s  CPU {taken.cpu_seconds:7.1f} s  peak {taken.peak_bytes / _MIB:8,.0f} MiB"
        f"  anonymous {taken.anonymous_bytes / _MIB:8,.0f} MiB",
        flush=True,
    )


@contextmanager
def temporary_folder(parent: Path | None) -> Iterator[Path]:
    """A folder that goes, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="lbm-base-", dir=parent) as name:
        yield Path(name)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="SDXL's own size")
    parser.add_argument("--single_file", action="store_true", help="make it from a single file too")
    parser.add_argument("--torch_dtype", default="bf16", choices=["bf16", "fp16", "float32"])
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    return parser.parse_args()


if __name__ == "__main__":
    main()
