"""Time of merging a LoRA into a live model: `merge_into_model` beside diffusers' `fuse_lora` in the same run.

    python benchmarks/lora_merge.py                 # 64 and 117 million parameters
    python benchmarks/lora_merge.py --rank 128 --repeats 7
    python benchmarks/lora_merge.py --scale 0.8     # no power of two: product and sum take two passes

Both add the same file to the same U-Net. `fuse_lora` keeps nothing: `unfuse_lora` subtracts, which does not give the
weights back to the bit. `merge_into_model` keeps the original values and checks that the result is finite, as
`fuse_lora(safe_fusing=True)` does. Rounds alternate, and the median ratios of neighbours are printed, of wall and of
processor time. On a machine that does other work, set OMP_NUM_THREADS=1 and read the second.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from torch import nn

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile
from sigmascope.lora.live_merge import MergedLora, merge_into_model
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import save_lora

WIDTHS = {"small": (64, 128, 224), "large": (96, 192, 320)}


def unet_of(widths: tuple[int, ...]) -> UNet2DConditionModel:
    """A U-Net of SDXL's make with random weights."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=64,
        block_out_channels=widths,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 4),
        attention_head_dim=8,
        cross_attention_dim=2048,
    ).eval()


def write_lora(unet: nn.Module, rank: int, file: Path) -> int:
    """A LoRA of every Linear and Conv2d; gives the number of modules."""
    modules = {}
    generator = torch.Generator().manual_seed(1)
    for name, layer in unet.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            shape = tuple(layer.weight.shape)
            inner = layer.weight[0].numel()
            up = 0.01 * torch.randn(shape[0], rank, generator=generator)
            down = 0.01 * torch.randn(rank, inner, generator=generator)
            modules[f"unet.{name}"] = LoraFactors(up, down, float(rank), shape)
    shapes = {f"unet.{key}": tuple(value.shape) for key, value in unet.state_dict().items()}
    save_lora(file, LoraFile(modules), format="peft", layout=layout_of(shapes), model_layers=list(shapes))
    return len(modules)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time and processor time of one call."""
    started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def compare(name: str, dtype: torch.dtype, rank: int, scale: float, repeats: int) -> None:
    """Print the ratios of one size and dtype."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lora.safetensors"
        ours, theirs = (unet_of(WIDTHS[name]).to(dtype) for _ in range(2))
        count = write_lora(ours, rank, file)
        lora = load_lora(file)
        theirs.load_lora_adapter(str(file), prefix="unet", use_safetensors=True)
        times: dict[str, list[tuple[float, float]]] = {
            what: [] for what in ("merge", "unmerge", "fuse", "unfuse", "safe")
        }
        merged: list[MergedLora] = []
        for _ in range(repeats + 1):
            times["merge"].append(seconds(lambda: merged.append(merge_into_model(ours, lora, scale))))
            times["unmerge"].append(seconds(lambda: merged.pop().unmerge()))
            times["fuse"].append(seconds(lambda: theirs.fuse_lora(lora_scale=scale)))
            times["unfuse"].append(seconds(theirs.unfuse_lora))
            times["safe"].append(seconds(lambda: theirs.fuse_lora(lora_scale=scale, safe_fusing=True)))
            theirs.unfuse_lora()
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    print(f"{parameters / 1e6:.0f} M, {str(dtype).removeprefix('torch.')}, rank {rank}, {count} modules")
    for one, other in (("merge", "fuse"), ("merge", "safe"), ("unmerge", "unfuse")):
        pairs = list(zip(times[one][1:], times[other][1:], strict=True))  # the first warms up
        wall, processor = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        middle = [statistics.median(pair[i][0] for pair in pairs) for i in (0, 1)]
        print(
            f"  {one} {middle[0]:.3f} s, {other} {middle[1]:.3f} s: "
            f"{wall:.2f}× the time, {processor:.2f}× the processor's"
        )


def main() -> None:
    """Measure both sizes in float32 and bfloat16."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="strength of the LoRA")
    parser.add_argument("--repeats", type=int, default=5, help="rounds beside the first, which warms up")
    options = parser.parse_args()
    for name in WIDTHS:
        for dtype in (torch.float32, torch.bfloat16):
            compare(name, dtype, options.rank, options.scale, options.repeats)


if __name__ == "__main__":
    main()
