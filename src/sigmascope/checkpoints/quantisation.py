"""Undo the quantisation of weights: 8-bit floats with scales beside them become float32.

Which tensors are quantised, and how, is told by keys, types and shapes. Dequantised are ComfyUI's `scale_weight` (with
its mark `scaled_fp8`) and `weight_scale` (with `comfy_quant`), compressed-tensors' `weight_scale` per tensor or per
channel, and the blocks of 128×128 of `weight_scale_inv`. An 8-bit float without a scale is its own value. All else is
refused by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.files import shortened
from sigmascope.errors import CheckpointError

FP8: Final = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
SCALES: Final = (".weight_scale_inv", ".weight_scale", ".scale_weight")
"""Endings of the scale of a `.weight`; by all of them the weight is multiplied, the one named `inv` too."""
BLOCK: Final = 128
_OF_ACTIVATIONS: Final = (".scale_input", ".input_scale")
_MARKS: Final = ("scaled_fp8", ".comfy_quant")
_SCALE_DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})

_REFUSED: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("bitsandbytes NF4 or FP4", (".absmax", ".quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4")),
    ("bitsandbytes int8", (".SCB",)),
    ("SVDQuant (nunchaku)", (".wscales", ".smooth_factor", ".wtscale")),
    ("GPTQ or AWQ", (".qweight",)),
    ("HQQ", (".W_q",)),
    ("optimum-quanto", (".weight._data", ".weight._scale")),
    ("torchao", (":_data", ":int_data", "_weight_qdata")),
    ("NVFP4", (".weight_scale_2", ".weight_global_scale")),
    ("compressed-tensors (packed integers)", (".weight_packed",)),
)
_HINT: Final = (
    "Use the checkpoint that it was made from (bf16 or fp16), or save a dequantised copy with the tool named."
)


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one that undoes its quantisation.

    Raises:
        CheckpointError: It is quantised in a way that is not undone here; the message names it.
    """
    found = quantisation_of(checkpoint)
    if not found.scales:
        return checkpoint
    return DequantisedCheckpoint(checkpoint, dict(found.scales), dict(found.hidden))


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a file's weights are quantised.

    Attributes:
        scales: Key of the scale, by key of the weight.
        hidden: Keys that only serve the quantisation, with what they are.
    """

    scales: Mapping[str, str]
    hidden: Mapping[str, str]


def quantisation_of(checkpoint: Checkpoint) -> Quantisation:
    """Find the quantised weights of an opened file and the tensors that belong to them.

    Raises:
        CheckpointError: They are quantised in a way that is not undone here; the message names it.
    """
    _refuse_named(checkpoint)
    scales: dict[str, str] = {}
    hidden: dict[str, str] = {}
    for key in checkpoint:
        ending = next((ending for ending in SCALES if key.endswith(ending)), None)
        weight = "" if ending is None else f"{key.removesuffix(ending)}.weight"
        if weight in checkpoint and _is_coded(checkpoint.info(weight)):
            _check_scale(checkpoint, checkpoint.info(weight), checkpoint.info(key))
            scales[weight] = key
            hidden[key] = f"is the scale of {weight}, which is given dequantised"
        elif key.endswith(_OF_ACTIVATIONS):
            hidden[key] = "is a scale of activations and no weight"
        elif key.endswith(_MARKS) and _is_mark(checkpoint.info(key)):
            hidden[key] = "marks a quantisation and is no weight"
    # Without a quantised weight those are names like any other.
    return Quantisation(scales, hidden if scales else {})


def _refuse_named(checkpoint: Checkpoint) -> None:
    for name, endings in _REFUSED:
        key = _first_ending(checkpoint, endings)
        if key is not None:
            message = f"is quantised by {name} ({shortened(key)}), which cannot be undone here."
            raise CheckpointError(checkpoint.path, message, hint=_HINT)


def _first_ending(keys: Iterable[str], endings: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key.endswith(endings)), None)


def _is_coded(info: TensorInfo) -> bool:
    """Whether a weight's numbers are codes: any other type beside a `weight_scale` is a model's own affair."""
    return info.dtype in FP8 or not (info.dtype.is_floating_point or info.dtype.is_complex)


def _check_scale(checkpoint: Checkpoint, weight: TensorInfo, scale: TensorInfo) -> None:
    if weight.dtype not in FP8:
        kind = str(weight.dtype).removeprefix("torch.")
        message = (
            f"{weight.name} is {kind} with scales ({scale.name}), a quantisation that cannot be undone here."
        )
        raise CheckpointError(checkpoint.path, message, hint=_HINT)
    if scale.dtype not in _SCALE_DTYPES:
        kind = "MXFP8" if str(scale.dtype).endswith("e8m0fnu") else str(scale.dtype).removeprefix("torch.")
        message = f"the scales of {weight.name} are {kind}, which cannot be undone here."
        raise CheckpointError(checkpoint.path, message, hint=_HINT)
    if scale_kind(weight.shape, scale.shape) is None:
        message = (
            f"{scale.name} of shape {scale.shape} is no scale for {weight.name} of shape {weight.shape}."
        )
        raise CheckpointError(checkpoint.path, message, hint=_HINT)


def scale_kind(weight: tuple[int, ...], scale: tuple[int, ...]) -> str | None:
    """How a scale of one shape acts on a weight of another: per tensor, channel or block; None if it cannot."""
    if set(scale) <= {1}:
        return "per tensor"
    if weight and scale[0] == weight[0] and set(scale[1:]) <= {1} and len(scale) <= len(weight):
        return "per channel"
    blocks = tuple(-(-size // BLOCK) for size in weight)
    return f"in blocks of {BLOCK}" if len(weight) == 2 and scale == blocks else None


def _is_mark(info: TensorInfo) -> bool:
    return info.dtype == torch.uint8 or info.dtype in FP8


class DequantisedCheckpoint(Checkpoint):
    """Weights of 8-bit floats times their scales, in float32. It owns the file: closing closes both.

    Args:
        source: The opened file.
        scales: Key of the scale, by key of the weight.
        hidden: Keys that serve the quantisation only, with what they are.
    """

    def __init__(self, source: Checkpoint, scales: dict[str, str], hidden: dict[str, str]) -> None:
        self.format = source.format
        self._source = source
        self._scales = scales
        infos = {key: source.info(key) for key in source if key not in hidden}
        how = dict(source.dequantised)
        for key, scale in scales.items():
            shape = infos[key].shape
            kind = str(infos[key].dtype).removeprefix("torch.")
            how[key] = f"{kind} scaled {scale_kind(shape, source.info(scale).shape)}"
            infos[key] = replace(
                infos[key], dtype=torch.float32, nbytes=4 * source.info(key).nbytes
            )  # a byte a number before
        super().__init__(source.path, infos, source.metadata, {**source.skipped, **hidden}, how)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights are read from."""
        return self._source.files

    def _read(self, info: TensorInfo) -> Tensor:
        if info.name not in self._scales:
            return self._source.tensor(info.name)
        return super()._read(info)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if info.name not in self._scales:
            return self._source.tensor_into(info.name, buffer)
        scale = self._source.tensor(self._scales[info.name]).to(torch.float32)
        numbers = buffer.view(torch.float32).reshape(info.shape)
        numbers.copy_(self._source.tensor(info.name))
        return numbers.mul_(_spread(scale, info.shape))

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        plain = info.name not in self._scales
        return self._source.pieces(info.name, buffer) if plain else super()._read_pieces(info, buffer)

    def close(self) -> None:
        """Close the file behind it."""
        self._source.close()


def _spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale in a shape that multiplies the weight."""
    kind = scale_kind(shape, tuple(scale.shape))
    if kind == "per tensor":
        return scale.reshape(())
    if kind == "per channel":
        return scale.reshape(-1, *(1 for _ in shape[1:]))
    rows, columns = shape
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
