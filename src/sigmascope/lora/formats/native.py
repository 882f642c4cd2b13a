"""Native LBM naming: the checkpoint's own module paths (SPEC section 7).

`<module>.lora_up.weight` (out, r[, 1, 1]), `<module>.lora_down.weight` (r, in[, kh, kw]) and the scalar
`<module>.alpha`; the header says `lbm_native_naming: "true"`. We always write alpha = r, so that a reader
which ignores alpha gets the same ΔW.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError, NonFiniteError, SigmascopeError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.asked_rank import true_alpha
from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.precision import at_least_float32, is_real
from sigmascope.lora.ranks import most_common_rank
from sigmascope.lora.shapes import is_convolution

UP = ".lora_up.weight"
DOWN = ".lora_down.weight"
ALPHA = ".alpha"

# They change what the other factors mean, so a reader that skips them reads a different LoRA.
_REFUSED = {
    ".lora_mid.weight": "a Tucker core (lora_mid)",
    ".dora_scale": "DoRA magnitudes (dora_scale)",
}


def recognises(keys: Sequence[str]) -> bool:
    """Tell native naming by dotted module paths; kohya's are flattened behind "lora_"."""
    modules = _factor_modules(keys)
    return bool(modules) and not any(module.startswith("lora_") for module in modules)


def read(checkpoint: Checkpoint) -> LoraFile:
    """Read every module of an open file. A missing alpha means alpha = rank (ComfyUI's scale 1).

    float8 factors come as float32, which loses nothing; others keep their dtype.

    Raises:
        LoraFormatError: A factor without its partner, factors of wrong shape or without numbers, or factors
            of a kind that is more than up and down.
        NonFiniteError: A factor holds NaN or Inf.
    """
    keys = list(checkpoint.keys())
    _refuse_other_kinds(checkpoint.path, keys)
    names = _factor_modules(keys)
    modules = {name: _read_module(checkpoint, name) for name in names}
    used = {name + suffix for name in names for suffix in (UP, DOWN, ALPHA)}
    return LoraFile(
        modules=modules,
        metadata=dict(checkpoint.metadata),
        path=checkpoint.path,
        format=FORMAT.name,
        unused_keys=(*(key for key in keys if key not in used), *checkpoint.skipped),
    )


def module_tensors(module: str, factors: LoraFactors) -> dict[str, Tensor]:
    """Give the three tensors of one module by key, with alpha = rank (float32) and contiguous factors."""
    pair = factors.with_unit_scale()
    up, down = pair.up.detach(), pair.down.detach()
    if is_convolution(pair.weight_shape):
        kernel = pair.weight_shape[2:]
        up = up.reshape(*up.shape, *(1 for _ in kernel))
        down = down.reshape(pair.rank, *pair.weight_shape[1:])
    return {
        module + UP: up.contiguous(),
        module + DOWN: down.contiguous(),
        module + ALPHA: torch.tensor(float(pair.rank)),
    }


def native_metadata(rank: int | None, conv_rank: int | None) -> dict[str, str]:
    """Give the header for a LoRA of these ranks; None where it has no Linear or no convolution.

    `ss_*` are the fields by which kohya's tools and the web UIs know a LoRA; `networks.lora` is their name
    for plain up/down factors.
    """
    first = rank if rank is not None else conv_rank
    header = {
        "lbm_native_naming": "true",
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(first),
        "ss_network_alpha": str(first),
        "ss_base_model_version": "lbm",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "lbm/lora",
        "modelspec.implementation": "sigmascope",
    }
    if conv_rank is not None:
        header["ss_network_args"] = json.dumps({"conv_dim": str(conv_rank), "conv_alpha": str(conv_rank)})
    return header


def _metadata(modules: Mapping[str, LoraFactors]) -> dict[str, str]:
    linear = [pair.rank for pair in modules.values() if not is_convolution(pair.weight_shape)]
    convolution = [pair.rank for pair in modules.values() if is_convolution(pair.weight_shape)]
    return native_metadata(most_common_rank(linear), most_common_rank(convolution))


def _factor_modules(keys: Iterable[str]) -> list[str]:
    """Module paths that have an up or a down factor, in file order, each once."""
    paths = [key.removesuffix(end) for key in keys for end in (UP, DOWN) if key.endswith(end)]
    return list(dict.fromkeys(paths))


def _refuse_other_kinds(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        kind = next((what for end, what in _REFUSED.items() if key.endswith(end)), None)
        if kind is not None:
            raise LoraFormatError(
                f"{path}: {key} holds {kind}, and ΔW = up·down would leave it out.",
                hint="Convert the file to plain LoRA factors with the tool that made it.",
            )


def _read_module(checkpoint: Checkpoint, module: str) -> LoraFactors:
    up, down = (_read_factor(checkpoint, module, end) for end in (UP, DOWN))
    weight_shape = _weight_shape(checkpoint.path, module, up, down)
    rank = down.shape[0]
    alpha = _read_alpha(checkpoint, module, default=float(rank))
    try:
        alpha = true_alpha(alpha, rank, weight_shape, checkpoint.metadata)
        return LoraFactors(up.flatten(1), down.flatten(1), alpha, weight_shape)
    except SigmascopeError as error:
        raise type(error)(f"{checkpoint.path}: {module}: {error.message}", hint=error.hint) from error


def _read_factor(checkpoint: Checkpoint, module: str, end: str) -> Tensor:
    key = module + end
    if key not in checkpoint:
        other = DOWN if end == UP else UP
        raise LoraFormatError(
            f"{checkpoint.path}: {module} has {other[1:]} but no {end[1:]}.",
            hint="The file is incomplete: make it again, or take the whole module out.",
        )
    dtype = checkpoint.info(key).dtype
    if not is_real(dtype):
        raise LoraFormatError(
            f"{checkpoint.path}: {key} is {str(dtype).removeprefix('torch.')}, not floating-point numbers.",
            hint="Convert the file to bf16, fp16 or float with the tool that made it.",
        )
    tensor = checkpoint.tensor(key)
    wide = tensor.to(at_least_float32(dtype))
    if not bool(torch.isfinite(wide).all()):
        raise NonFiniteError(
            f"{checkpoint.path}: {key} holds NaN or Inf.",
            hint="Make the file again, in bf16 or float if it was fp16.",
        )
    return wide if dtype.itemsize == 1 else tensor  # PyTorch does not calculate in float8


def _read_alpha(checkpoint: Checkpoint, module: str, default: float) -> float:
    key = module + ALPHA
    if key not in checkpoint:
        return default
    alpha = checkpoint.tensor(key)
    if alpha.numel() != 1:
        raise LoraFormatError(
            f"{checkpoint.path}: {key} has the shape {tuple(alpha.shape)}.", hint="Expected a single number."
        )
    if alpha.is_complex() or (alpha.is_floating_point() and not is_real(alpha.dtype)):
        raise LoraFormatError(
            f"{checkpoint.path}: {key} is {str(alpha.dtype).removeprefix('torch.')}.",
            hint="Expected a single number.",
        )
    return float(alpha)


def _weight_shape(path: Path, module: str, up: Tensor, down: Tensor) -> tuple[int, ...]:
    """(out, in[, kh, kw]) from the factors: the kernel is down's, and up is 1×1."""
    pointwise = up.ndim == 2 or all(size == 1 for size in up.shape[2:])
    if down.ndim < 2 or up.ndim not in (2, down.ndim) or not pointwise:
        raise LoraFormatError(
            f"{path}: {module}: lora_up is {tuple(up.shape)} and lora_down {tuple(down.shape)}.",
            hint="Expected up (out, rank[, 1, 1]) and down (rank, in[, kh, kw]).",
        )
    return (up.shape[0], *down.shape[1:])


FORMAT = LoraFormat(
    name="native",
    recognises=recognises,
    read=read,
    module_tensors=module_tensors,
    metadata=_metadata,
)
