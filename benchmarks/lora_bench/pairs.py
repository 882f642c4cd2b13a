"""Base and tuned checkpoints with the names and shapes of an LBM model, made from random numbers.

Everything follows from the recipe: the same recipe gives the same bytes. Tensors are made and written one at a time.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lora_bench.spectra import Spectrum, planted_change
from sigmascope.checkpoints import StreamingWriter, read_header
from sigmascope.progress import Progress, no_progress

Shapes = Mapping[str, tuple[int, ...]]

DENOISER = "denoiser."
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_RELATIVE_CHANGE = 0.05  # ‖Δ‖ / ‖W‖
_WEIGHT_GAIN = 0.6  # a weight's standard deviation times √(fan in)
_FILES = ("base.safetensors", "tuned.safetensors")
_RECIPE = "recipe"


@dataclass(frozen=True)
class Recipe:
    """What a pair is made from.

    Attributes:
        spectrum: How each layer's change falls.
        layers: Keep this many Linear and Conv2d layers, at least one of each shape; None keeps all.
        fraction: Keep this share of the layers of each shape, at least one; None keeps all.
        dtype: What both files are rounded to: `bf16`, `fp16`, `fp32`.
        seed: Of all random numbers.
    """

    spectrum: Spectrum
    layers: int | None = None
    fraction: float | None = None
    dtype: str = "bf16"
    seed: int = 0

    @property
    def text(self) -> str:
        """The recipe as one line of JSON, which goes into both headers."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def is_whole(self) -> bool:
        """Whether the model is complete, VAE included."""
        return self.layers is None and self.fraction is None


def pair_files(folder: Path) -> tuple[Path, Path]:
    """Where a folder keeps its base and its tuned model."""
    return folder / _FILES[0], folder / _FILES[1]


def ensure_pair(
    folder: Path, recipe: Recipe, shapes: Shapes | None = None, progress: Progress = no_progress
) -> None:
    """Make the pair in `folder`, unless it is there already from the same recipe.

    Args:
        folder: Is made when missing; `base.safetensors` and `tuned.safetensors` in it are replaced.
        recipe: What to make.
        shapes: Shape by key; those of the full-size LBM model when left out.
        progress: Told after each tensor.

    Raises:
        WriteError: The disk is too small or cannot be written.
    """
    if all(
        file.exists() and read_header(file).metadata.get(_RECIPE) == recipe.text
        for file in pair_files(folder)
    ):
        return
    write_pair(folder, recipe, lbm_shapes() if shapes is None else shapes, progress)


def lbm_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the full-size model, from the model itself without any weights."""
    from sigmascope.lbm.model import build_lbm

    return {name: tuple(tensor.shape) for name, tensor in build_lbm(device="meta").state_dict().items()}


def is_layer(name: str, shape: Sequence[int]) -> bool:
    """Whether the tensor is the weight of a Linear or Conv2d layer of the denoiser."""
    return name.startswith(DENOISER) and name.endswith(".weight") and len(shape) in (2, 4)


def shape_classes(shapes: Shapes) -> dict[tuple[int, ...], list[str]]:
    """Group the denoiser's layers by shape; keys of weights, in the model's order."""
    classes: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        if is_layer(name, shape):
            classes.setdefault(shape, []).append(name)
    return classes


def chosen_tensors(shapes: Shapes, recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The tensors of a pair: all, or the chosen layers with their biases, four norms and the counter."""
    if recipe.is_whole:
        return dict(shapes)
    classes = shape_classes(shapes)
    counts = _counts({shape: len(names) for shape, names in classes.items()}, recipe)
    kept = {name for shape, names in classes.items() for name in _spread(names, counts[shape])}
    kept |= {f"{name.removesuffix('weight')}bias" for name in kept}
    kept |= set([name for name in shapes if name.startswith(DENOISER) and ".norm" in name][:4])
    return {name: shape for name, shape in shapes.items() if name in kept or name == "num_iterations"}


def _counts(sizes: Mapping[tuple[int, ...], int], recipe: Recipe) -> dict[tuple[int, ...], int]:
    """How many layers of each shape: one each, then by D'Hondt, so that the shares come near the model's own."""
    if recipe.fraction is not None:
        return {shape: max(1, round(size * recipe.fraction)) for shape, size in sizes.items()}
    counts = dict.fromkeys(sizes, 1)
    wanted = min(recipe.layers or 0, sum(sizes.values()))
    while sum(counts.values()) < wanted:
        open_ones = [shape for shape in sizes if counts[shape] < sizes[shape]]
        counts[max(open_ones, key=lambda shape: sizes[shape] / (counts[shape] + 1))] += 1
    return counts


def _spread(names: Sequence[str], count: int) -> list[str]:
    """`count` names at even distances, so that all depths of the model are met."""
    return [names[int((place + 0.5) * len(names) / count)] for place in range(count)]


def write_pair(folder: Path, recipe: Recipe, shapes: Shapes, progress: Progress = no_progress) -> None:
    """Write both files; see `ensure_pair`."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = chosen_tensors(shapes, recipe)
    dtype = DTYPES[recipe.dtype]
    data_bytes = sum(math.prod(shape) for shape in chosen.values()) * dtype.itemsize
    metadata = {"format": "pt", _RECIPE: recipe.text}
    with ExitStack() as files:
        base, tuned = (
            files.enter_context(StreamingWriter(file, metadata, expected=chosen, data_bytes=data_bytes))
            for file in pair_files(folder)
        )
        for done, (name, shape) in enumerate(chosen.items(), start=1):
            before, after = tensor_pair(name, shape, recipe)
            base.write(name, before)
            tuned.write(name, after)
            progress(done, len(chosen), name)


def tensor_pair(name: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """One tensor of the base and the same of the tuned model, as they are stored.

    The change is added to the rounded base and the sum is rounded again, as in a fine-tune of a stored model: the
    second rounding is the floor under every change that real files have.
    """
    if not shape:
        return torch.tensor(0.0), torch.tensor(20_000.0)  # num_iterations
    dtype = DTYPES[recipe.dtype]
    base = _base_weight(name, shape, _generator(recipe.seed, "base", name)).to(dtype)
    if not name.startswith(DENOISER):
        return base, base  # a fine-tune of the denoiser leaves the VAE alone
    generator = _generator(recipe.seed, "change", name)
    if len(shape) < 2:
        change = torch.randn(shape, generator=generator).mul_(_RELATIVE_CHANGE * 0.05)
    else:
        size = _RELATIVE_CHANGE * float(base.float().norm())
        change = planted_change(shape, recipe.spectrum, generator).mul_(size)
    return base, change.add_(base.float()).to(dtype)


def _base_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    weight = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        return weight.mul_(_WEIGHT_GAIN / math.sqrt(math.prod(shape[1:])))
    return weight.mul_(0.1).add_(1.0) if name.endswith(".weight") else weight.mul_(0.05)


def _generator(seed: int, purpose: str, name: str) -> torch.Generator:
    """A generator of its own for each tensor, so that leaving some out changes none of the others."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
