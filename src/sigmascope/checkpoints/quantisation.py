"""Quantised weights: how they are told, read as the numbers that they stand for, and stored again (`dequantised`).

`KINDS` has a row for each way of storing: which scales lie beside the codes, what shapes those have, and how codes
become numbers and numbers codes again. Keys, types, shapes and ComfyUI's `comfy_quant` (a JSON text for each layer, or
for all in the header's `_quantization_metadata`) tell the row:

- 8-bit floats and integers times a scale per tensor, per channel or in blocks of 128×128: ComfyUI's `scale_weight`
  (with its mark `scaled_fp8`) and `weight_scale`, compressed-tensors' `weight_scale`, and `weight_scale_inv`;
- int8 ConvRot (rows rotated in groups by a Hadamard matrix), NVFP4 and MXFP8, by the package comfy-kitchen;
- NF4 and FP4 as bitsandbytes stores them: Dettmers et al., QLoRA, arXiv 2305.14314.

An 8-bit float without a scale is its own value. Any other quantisation has no reader: it is refused by name, or kept
as a weight that can be named and not read.
"""

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, CompositeCheckpoint, Rounding, TensorInfo, shortened
from sigmascope.errors import CheckpointError
from sigmascope.installation import install_extra

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Scales = Mapping[str, Tensor]

FP8: Final = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_E4M3, _BYTE, _INT8 = torch.float8_e4m3fn, torch.uint8, torch.int8
_E8M0: Final = getattr(torch, "float8_e8m0fnu", _BYTE)
_REAL: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
_BLOCK_SIZE: Final = 128
_ROWS: Final = 1024  # dequantised at once; a multiple of the 128 rows that block scales lie in
_CONFIG: Final = ".comfy_quant"
_HEADER_CONFIG: Final = "_quantization_metadata"
_MAX_CONFIG_BYTES: Final = 1 << 16
_ACTIVATION_SCALES: Final = (".scale_input", ".input_scale")
_MARKS: Final = ("scaled_fp8", _CONFIG)
_HINT: Final = (
    "Use the checkpoint that it was made from (bf16 or fp16), or save a dequantised copy with the tool named."
)
_DAMAGED: Final = (
    "Download the checkpoint again, or quantise it again: a weight cannot be read without its scales."
)


class Scale(NamedTuple):
    """A tensor beside a weight that its codes are read with.

    Attributes:
        endings: Of its key, in place of the weight's `.weight`; the first that is there counts.
        dtypes: That it can have.
        fits: Whether it can have a shape, for a weight of a shape.
        optional: Whether it may be missing.
    """

    endings: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    fits: Callable[[Shape, Shape], bool]
    optional: bool = False


class Kind(NamedTuple):
    """A way of storing a weight.

    Attributes:
        title: Its name.
        codes: The types that codes can have.
        packed: How many numbers are in a code.
        scales: By the name that the functions know them by.
        numbers: Codes of some rows, and their scales, to float32. None: there is no reader.
        again: The largest magnitude of a whole weight, and some rows of numbers, to what is read once those are stored.
    """

    title: str
    codes: frozenset[torch.dtype]
    packed: int = 1
    scales: Mapping[str, Scale] = {}
    numbers: Callable[[Tensor, Scales, Config], Tensor] | None = None
    again: Callable[[Tensor, Tensor, Scales, Config], Tensor] | None = None


def scale_kind(weight: Shape, scale: Shape) -> str | None:
    """How a scale of one shape acts on a weight of another: per tensor, channel or block; None if it cannot."""
    if set(scale) <= {1}:
        return "per tensor"
    if weight and scale[0] == weight[0] and set(scale[1:]) <= {1} and len(scale) <= len(weight):
        return "per channel"
    blocks = tuple(-(-size // _BLOCK_SIZE) for size in weight)
    return f"in blocks of {_BLOCK_SIZE}" if len(weight) == 2 and scale == blocks else None


def _spread(scale: Tensor, shape: Shape) -> Tensor:
    """The scale in a shape that multiplies the weight."""
    kind = scale_kind(shape, tuple(scale.shape))
    if kind == "per tensor":
        return scale.reshape(())
    if kind == "per channel":
        return scale.reshape(-1, *(1 for _ in shape[1:]))
    rows, columns = shape
    return scale.repeat_interleave(_BLOCK_SIZE, 0)[:rows].repeat_interleave(_BLOCK_SIZE, 1)[:, :columns]


def _scaled(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return codes.to(torch.float32).mul_(_spread(scales["scale"].to(torch.float32), tuple(codes.shape)))


def _scaled_again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    """With the largest magnitude that each scale stands for at the end of the codes' range."""
    dtype: torch.dtype = config["dtype"]
    limit = 127.0 if dtype == _INT8 else torch.finfo(dtype).max
    kind = scale_kind(config["shape"], tuple(scales["scale"].shape))
    if kind == "per tensor":
        largest = peak
    elif kind == "per channel":
        largest = numbers.abs().amax(1, keepdim=True)
    else:
        rows, columns = numbers.shape
        size = _BLOCK_SIZE
        padded = torch.nn.functional.pad(numbers, (0, -columns % size, 0, -rows % size)).abs()
        largest = padded.reshape(padded.shape[0] // size, size, -1, size).amax((1, 3))
        largest = largest.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
    step = (largest / limit).clamp(min=1e-30)
    codes = (numbers / step).clamp_(-limit, limit)
    rounded: Tensor = codes.round_() if dtype == _INT8 else codes.to(dtype).to(torch.float32)
    return rounded.mul_(step)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _in_tiles(block: int) -> Callable[[Shape, Shape], bool]:
    """Whether scales of blocks along the rows lie in the 128×4 tiles that cuBLAS wants."""

    def fits(weight: Shape, scale: Shape) -> bool:
        tiles = (_rounded_up(weight[0], 128), _rounded_up(weight[-1] // block, 4))
        return len(weight) == 2 and math.prod(scale) == math.prod(tiles)

    return fits


def _is_one(weight: Shape, scale: Shape) -> bool:
    return set(scale) <= {1}


def _per_row(weight: Shape, scale: Shape) -> bool:
    return scale in {(weight[0],), (weight[0], 1)}


def _layout(name: str) -> Any:
    try:
        return getattr(importlib.import_module("comfy_kitchen.tensor"), name)
    except ImportError as error:
        raise ImportError(
            f"the package comfy-kitchen, which reads it, is not installed: {install_extra('comfyui')}"
        ) from error


def _by_layout(name: str, codes: Tensor, columns: int, **params: Any) -> Tensor:
    layout = _layout(name)
    facts = layout.Params(orig_dtype=torch.float32, orig_shape=(codes.shape[0], columns), **params)
    numbers: Tensor = layout.dequantize(codes, facts)
    return numbers


def _again_by_layout(name: str, numbers: Tensor, **how: Any) -> Tensor:
    layout = _layout(name)
    codes, facts = layout.quantize(numbers, **how)
    again: Tensor = layout.dequantize(codes, facts)
    return again[: numbers.shape[0], : numbers.shape[1]]


def _convrot_params(config: Config) -> dict[str, Any]:
    return {"is_weight": True, "convrot": True, "convrot_groupsize": config["convrot_groupsize"]}


def _convrot(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    scale = scales["scale"].to(torch.float32).reshape(-1, 1)
    return _by_layout("TensorWiseINT8Layout", codes, codes.shape[1], scale=scale, **_convrot_params(config))


def _convrot_again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    return _again_by_layout("TensorWiseINT8Layout", numbers, per_channel=True, **_convrot_params(config))


def _nvfp4(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return _by_layout(
        "TensorCoreNVFP4Layout",
        codes,
        2 * codes.shape[1],
        scale=scales["tensor"].to(torch.float32).reshape(()),
        block_scale=scales["blocks"].view(_E4M3),
    )


def _nvfp4_again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    return _again_by_layout("TensorCoreNVFP4Layout", numbers, scale=peak / (448.0 * 6.0))


def _mxfp8(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return _by_layout(
        "TensorCoreMXFP8Layout", codes.view(_E4M3), codes.shape[1], scale=scales["blocks"].view(_E8M0)
    )


def _mxfp8_again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    return _again_by_layout("TensorCoreMXFP8Layout", numbers)


def _bitsandbytes(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    """Two codes in a byte, the first in its upper half, each a place in the map of 16 values."""
    flat = codes.reshape(-1).view(_BYTE)
    places = torch.stack((flat >> 4, flat & 15), 1).reshape(-1).long()[: math.prod(config["shape"])]
    numbers: Tensor = scales["map"].to(torch.float32)[places].reshape(-1, config["blocksize"])
    return numbers.mul_(_absmax(scales, config)[:, None]).reshape(config["shape"])


def _absmax(scales: Scales, config: Config) -> Tensor:
    """The largest magnitude of each block, quantised to 8 bits itself where there is a nested map."""
    if "nested_map" not in scales:
        return scales["absmax"].to(torch.float32)
    coarse = scales["nested_map"].to(torch.float32)[scales["absmax"].long()]
    size = config["nested_blocksize"]
    nested = scales["nested_absmax"].to(torch.float32).repeat_interleave(size)[: coarse.numel()]
    return (coarse * nested).add_(float(config["nested_offset"]))


def _bitsandbytes_again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    """With the largest magnitude of each block as it is, because 8 bits of it change little."""
    blocks = numbers.reshape(-1, config["blocksize"])
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    values = scales["map"].to(torch.float32).sort().values
    places = torch.bucketize(blocks / largest, (values[1:] + values[:-1]) / 2)
    return (values[places] * largest).reshape(numbers.shape)


_BLOCK_SCALES: Final = ((".weight_scale",), frozenset({_E4M3, _E8M0, _BYTE}))
KINDS: Final[dict[str, Kind]] = {
    "scaled": Kind(
        "{dtype} scaled {scale}",
        FP8 | {_INT8},
        scales={
            "scale": Scale(
                (".weight_scale_inv", ".weight_scale", ".scale_weight"),
                _REAL,
                lambda weight, scale: scale_kind(weight, scale) is not None,
            )
        },
        numbers=_scaled,
        again=_scaled_again,
    ),
    "convrot": Kind(
        "int8 ConvRot",
        frozenset({_INT8}),
        scales={"scale": Scale((".weight_scale",), _REAL, _per_row)},
        numbers=_convrot,
        again=_convrot_again,
    ),
    "nvfp4": Kind(
        "NVFP4",
        frozenset({_BYTE}),
        2,
        {
            "blocks": Scale(*_BLOCK_SCALES, _in_tiles(16)),
            "tensor": Scale((".weight_scale_2",), _REAL, _is_one),
        },
        _nvfp4,
        _nvfp4_again,
    ),
    "mxfp8": Kind(
        "MXFP8",
        frozenset({_E4M3, _BYTE}),
        1,
        {"blocks": Scale(*_BLOCK_SCALES, _in_tiles(32))},
        _mxfp8,
        _mxfp8_again,
    ),
    "bitsandbytes": Kind(
        "bitsandbytes {quant_type}",
        frozenset({_BYTE}),
        2,
        {
            "absmax": Scale((".weight.absmax",), _REAL | {_BYTE}, lambda weight, scale: len(scale) == 1),
            "map": Scale((".weight.quant_map",), _REAL, lambda weight, scale: scale == (16,)),
            "nested_map": Scale(
                (".weight.nested_quant_map",), _REAL, lambda weight, scale: scale == (256,), True
            ),
            "nested_absmax": Scale(
                (".weight.nested_absmax",), _REAL, lambda weight, scale: len(scale) == 1, True
            ),
        },
        _bitsandbytes,
        _bitsandbytes_again,
    ),
    "convrot_w4a4": Kind("convrot_w4a4", frozenset({_INT8, _BYTE}), 2),
    "asym_w4a8_int8": Kind("asym_w4a8_int8", frozenset({_INT8, _BYTE}), 2),
    "awq_w4a16": Kind("awq_w4a16", frozenset({_INT8, _BYTE}), 2),
}
_BY_FORMAT: Final = {
    "float8_e4m3fn": "scaled",
    "float8_e5m2": "scaled",
    "int8_tensorwise": "scaled",
} | {name: name for name in ("nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16")}
"""The row of a `format` in `comfy_quant`; `convrot` in the same text makes int8 the row of its own."""
_BITSANDBYTES: Final = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")

# Kinds without a reader, by the endings that tell them, and how many numbers are in a code of the first ending.
_UNREAD: Final[tuple[tuple[str, tuple[str, ...], int | None], ...]] = (
    ("bitsandbytes int8", (".SCB",), None),
    ("SVDQuant (nunchaku)", (".wscales", ".smooth_factor", ".wtscale"), 2),
    ("GPTQ or AWQ", (".qweight",), None),
    ("HQQ", (".W_q",), None),
    ("optimum-quanto", (".weight._data", ".weight._scale"), 1),
    ("torchao", (":_data", ":int_data", "_weight_qdata"), 1),
    ("NVFP4 by another tool", (".weight_global_scale",), 2),
    ("compressed-tensors (packed integers)", (".weight_packed",), 8),
)
_CODES: Final = (".qweight", ".weight._data", ".weight:_data", "._weight_qdata", ".weight_packed")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight as its file stores it.

    Attributes:
        codes: The key of its codes.
        shape: Of the numbers that they stand for.
        how: In words.
        kind: Its row; None if there is none.
        scales: The keys of its scales.
        config: What else is known: `dtype` of the codes, `shape`, and what the file says.
        unread: Why it cannot be read; None if it can.
    """

    codes: str
    shape: Shape
    how: str
    kind: Kind | None
    scales: Mapping[str, str]
    config: Config
    unread: str | None = None


def dequantised(checkpoint: Checkpoint, *, keep_unread: bool = False) -> Checkpoint:
    """The checkpoint itself, or one that undoes its quantisation.

    Args:
        checkpoint: The opened file.
        keep_unread: Keep weights that cannot be read, with their names and shapes; reading one is an error then.

    Raises:
        CheckpointError: A weight cannot be read, and is not to be kept; the message says why.
    """
    weights, hidden = _weights(checkpoint)
    unread = next((weight for weight in weights.values() if weight.unread is not None), None)
    unknown = _unknown(checkpoint)
    if not keep_unread:
        if unknown is not None:
            name, key, _ = unknown
            raise CheckpointError(
                checkpoint.path,
                f"is quantised by {name} ({shortened(key)}), which cannot be undone here.",
                hint=_HINT,
            )
        if unread is not None:
            raise _not_read(checkpoint, unread)
    elif unknown is not None:
        weights |= _named_only(checkpoint, *unknown)
    # Without a quantised weight those are names like any other.
    return DequantisedCheckpoint(checkpoint, weights, hidden) if weights else checkpoint


def _not_read(checkpoint: Checkpoint, weight: StoredWeight) -> CheckpointError:
    hint = (
        None if weight.unread and "not installed" in weight.unread else _DAMAGED if weight.scales else _HINT
    )
    return CheckpointError(checkpoint.path, f"{weight.unread}.", hint=hint)


def _unknown(checkpoint: Checkpoint) -> tuple[str, str, int | None] | None:
    """The kind of a checkpoint that has no reader, the key that tells it, and the numbers in a code."""
    for name, endings, packed in _UNREAD:
        key = next((key for key in checkpoint if key.endswith(endings)), None)
        if key is not None:
            return name, key, packed
    return None


def _named_only(checkpoint: Checkpoint, name: str, key: str, packed: int | None) -> dict[str, StoredWeight]:
    """Weights under the names of their layers, in their shapes if those follow from the codes'."""
    weights = {}
    why = f"is quantised by {name} ({shortened(key)}), which has no reader here"
    for codes in checkpoint:
        ending = next((ending for ending in _CODES if codes.endswith(ending)), None)
        if ending is not None:
            stored = checkpoint.info(codes).shape
            shape = stored if packed is None or len(stored) < 2 else (*stored[:-1], stored[-1] * packed)
            weight = f"{codes.removesuffix(ending)}.weight"
            scales = f"{codes.removesuffix(ending)}.scales"
            if packed is None and scales in checkpoint and len(stored) == 2:
                columns = checkpoint.info(scales).shape[
                    -1
                ]  # GPTQ packs the inputs, AWQ the outputs; both in fours
                shape = (columns, stored[0] * (8 if stored[1] == columns else 1))
            weights[weight] = StoredWeight(codes, shape, name, None, {}, {}, why)
    return weights


def _weights(checkpoint: Checkpoint) -> tuple[dict[str, StoredWeight], dict[str, str]]:
    """Quantised weights that a row or ComfyUI's format tells, and keys that only serve them."""
    configs = dict(_configs(checkpoint))
    weights: dict[str, StoredWeight] = {}
    hidden: dict[str, str] = {}
    for key in checkpoint:
        info, layer = checkpoint.info(key), key.removesuffix(".weight")
        if key.endswith(_ACTIVATION_SCALES):
            hidden[key] = "is a scale of activations, not a weight"
        elif key.endswith(_MARKS) and (info.dtype == _BYTE or info.dtype in FP8):
            hidden[key] = "marks a quantisation and is not a weight"
        if layer == key or not _is_coded(info):
            continue
        weight = _stored(checkpoint, info, layer, configs.get(layer))
        if weight is not None:
            weights[key] = weight
            served = f"is the scale of {key}, which is dequantised on reading"
            hidden |= dict.fromkeys(weight.scales.values(), served)
    if weights:  # quantised states of bitsandbytes too
        hidden |= {key: "describes a quantisation" for key in checkpoint if key.endswith(_BITSANDBYTES)}
    return weights, {key: what for key, what in hidden.items() if key in checkpoint}


def _is_coded(info: TensorInfo) -> bool:
    """Whether a weight's numbers are codes: any other type beside a `weight_scale` is a model's own affair."""
    return info.dtype in FP8 or not (info.dtype.is_floating_point or info.dtype.is_complex)


def _configs(checkpoint: Checkpoint) -> Iterator[tuple[str, Config]]:
    """What ComfyUI's texts say of each layer."""
    header = checkpoint.metadata.get(_HEADER_CONFIG)
    if header is not None:
        layers = _parsed(checkpoint, _HEADER_CONFIG, header.encode()).get("layers", {})
        yield from ((name, config) for name, config in layers.items() if isinstance(config, dict))
    for key in checkpoint:
        if key.endswith(_CONFIG) and checkpoint.info(key).dtype == _BYTE:
            yield key.removesuffix(_CONFIG), _text(checkpoint, key)


def _text(checkpoint: Checkpoint, key: str) -> Config:
    if checkpoint.info(key).nbytes > _MAX_CONFIG_BYTES:
        raise CheckpointError(checkpoint.path, f"{shortened(key)} is too long for a text.", hint=_DAMAGED)
    return _parsed(checkpoint, key, bytes(checkpoint.tensor(key).flatten().tolist()))


def _parsed(checkpoint: Checkpoint, key: str, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise CheckpointError(
            checkpoint.path, f"{shortened(key)} is no JSON text that describes a quantisation.", hint=_DAMAGED
        )
    return parsed


def _stored(
    checkpoint: Checkpoint, info: TensorInfo, layer: str, config: Config | None
) -> StoredWeight | None:
    """How a weight of codes is stored; None if it has no scales and nothing says that it needs some."""
    name, facts = _row_of(checkpoint, info, layer, config)
    if name is None:
        return None
    kind = KINDS.get(name)
    packed = 1 if kind is None else kind.packed
    stated = facts.get("shape")
    own = (*info.shape[:-1], info.shape[-1] * packed) if info.shape else ()
    shape = tuple(stated) if isinstance(stated, list) and all(isinstance(n, int) for n in stated) else own
    facts = {**facts, "dtype": info.dtype, "shape": shape}
    if kind is None or kind.numbers is None:
        why = f"{info.name} is stored in ComfyUI's format {shortened(name)}, which has no reader here"
        return StoredWeight(info.name, shape, f"ComfyUI's {shortened(name)}", None, {}, facts, why)
    scales, unread = _scales_of(checkpoint, kind, layer, shape, info)
    title = kind.title.format(
        dtype=str(info.dtype).removeprefix("torch."),
        scale=scale_kind(shape, checkpoint.info(scales["scale"]).shape) if "scale" in scales else "",
        quant_type=str(facts.get("quant_type", "")).upper(),
    )
    return StoredWeight(info.name, shape, title, kind, scales, facts, unread or _unusable(name, facts, shape))


def _row_of(
    checkpoint: Checkpoint, info: TensorInfo, layer: str, config: Config | None
) -> tuple[str | None, Config]:
    if config is not None:
        said = str(config.get("format"))
        params = config.get("params")
        both = {**(params if isinstance(params, dict) else {}), **config}
        if said == "int8_tensorwise" and both.get("convrot"):
            return "convrot", {"convrot_groupsize": both.get("convrot_groupsize", 256)}
        return _BY_FORMAT.get(said, said), {}
    state = next((layer + end for end in _BITSANDBYTES if layer + end in checkpoint), None)
    if state is not None:
        return "bitsandbytes", _text(checkpoint, state)
    if f"{layer}.weight.absmax" in checkpoint:
        return "bitsandbytes", {}
    if f"{layer}.weight_scale_2" in checkpoint:
        return "nvfp4", {}
    ends = KINDS["scaled"].scales["scale"].endings
    scale = next((layer + end for end in ends if layer + end in checkpoint), None)
    if scale is None:
        return None, {}
    is_mxfp8 = info.dtype == _E4M3 and checkpoint.info(scale).dtype in {_E8M0, _BYTE}
    return "mxfp8" if is_mxfp8 else "scaled", {}


def _scales_of(
    checkpoint: Checkpoint, kind: Kind, layer: str, shape: Shape, weight: TensorInfo
) -> tuple[dict[str, str], str | None]:
    """The keys of a weight's scales, and what is wrong with the first that is wrong."""
    keys: dict[str, str] = {}
    wrong: list[str] = []
    if weight.dtype not in kind.codes:
        stored = str(weight.dtype).removeprefix("torch.")
        wrong.append(f"{weight.name} is {stored} with scales, a quantisation that cannot be undone here")
    for name, scale in kind.scales.items():
        key = next((layer + ending for ending in scale.endings if layer + ending in checkpoint), None)
        if key is None:
            if not scale.optional:
                default = ".weight_scale" if ".weight_scale" in scale.endings else scale.endings[0]
                wrong.append(f"{layer}{default}, the scale of {weight.name}, is missing")
            continue
        keys[name], info = key, checkpoint.info(key)
        if info.dtype not in scale.dtypes:
            stored = str(info.dtype).removeprefix("torch.")
            wrong.append(f"{key}, the scale of {weight.name}, is {stored}, which cannot be undone here")
        elif not scale.fits(shape, info.shape):
            wrong.append(
                f"{key} of shape {info.shape} does not fit as the scale of {weight.name} of shape {shape}"
            )
    return keys, wrong[0] if wrong else None


def _unusable(name: str, facts: Config, shape: Shape) -> str | None:
    """What is wrong with what the file says of a weight, or what is missing to read it."""
    if name == "bitsandbytes":
        needed = {"blocksize", "shape"} - {fact for fact in facts if isinstance(facts[fact], int | tuple)}
        return "its quant_state, with shape and blocksize, is missing" if needed else None
    group = facts.get("convrot_groupsize")
    if name == "convrot" and not (isinstance(group, int) and group > 0 and shape[-1] % group == 0):
        return f"rows of {shape[-1]} do not divide into the groups of {shortened(group)} that its comfy_quant names"
    if name in {"convrot", "nvfp4", "mxfp8"}:
        try:
            _layout("TensorWiseINT8Layout")
        except ImportError as error:
            return f"it holds {KINDS[name].title}, and {error}"
    return None


class DequantisedCheckpoint(CompositeCheckpoint):
    """Quantised weights as the numbers that they stand for, in float32.

    Args:
        source: The opened file.
        weights: How each quantised weight is stored.
        hidden: Keys that only serve the quantisation, and what each is.
    """

    def __init__(self, source: Checkpoint, weights: dict[str, StoredWeight], hidden: dict[str, str]) -> None:
        self.format = source.format
        self._weights = weights
        hidden = hidden | {
            weight.codes: f"holds the codes of {key}"
            for key, weight in weights.items()
            if weight.codes != key
        }
        places = {key: (source, key) for key in source if key not in hidden}
        places |= {key: (source, weight.codes) for key, weight in weights.items()}
        super().__init__(source.path, [source], places, source.metadata, {**source.skipped, **hidden})
        self.dequantised = {**self.dequantised, **{key: weight.how for key, weight in weights.items()}}
        self._infos |= {
            key: TensorInfo(key, weight.shape, torch.float32, 4 * math.prod(weight.shape))
            for key, weight in weights.items()
        }

    def _read(self, info: TensorInfo) -> Tensor:
        if info.name not in self._weights:
            return super()._read(info)
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        weight = self._weights.get(info.name)
        if weight is None:
            return super()._read_into(info, buffer)
        if weight.unread is not None or weight.kind is None or weight.kind.numbers is None:
            raise _not_read(self, weight)
        source, _ = self._places[info.name]
        codes, scales = source.tensor(weight.codes), self._scales(weight)
        numbers = buffer.view(torch.float32).reshape(info.shape)
        if weight.kind.title.startswith("bitsandbytes"):
            return numbers.copy_(weight.kind.numbers(codes, scales, weight.config))
        for start in range(0, info.shape[0] if info.shape else 1, _ROWS):
            some = slice(start, start + _ROWS)
            part = {name: _rows_of(scale, some, weight.shape) for name, scale in scales.items()}
            numbers[some] = weight.kind.numbers(codes[some], part, weight.config)
        return numbers

    def _scales(self, weight: StoredWeight) -> dict[str, Tensor]:
        source = self._sources[0]
        return {name: source.tensor(key) for name, key in weight.scales.items()}

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        if info.name not in self._weights:
            return super()._read_pieces(info, buffer)
        return Checkpoint._read_pieces(self, info, buffer)

    def rounding(self, key: str) -> Rounding:
        """See `Checkpoint.rounding`."""
        weight = self._weights.get(key)
        if weight is None:
            return super().rounding(key)
        kind = weight.kind
        if weight.unread is not None or kind is None or kind.again is None:
            raise _not_read(self, weight)
        again, scales = kind.again, self._scales(weight)
        return Rounding(weight.how, lambda peak, rows: again(peak, rows, scales, weight.config))


def _rows_of(scale: Tensor, some: slice, shape: Shape) -> Tensor:
    """The part of a scale that belongs to some of a weight's rows."""
    if scale.numel() == 1:
        return scale
    if scale.shape[0] == shape[0]:
        return scale[some]
    if scale.shape[0] == -(-shape[0] // _BLOCK_SIZE) and len(scale.shape) == 2 and scale.shape[0] < shape[0]:
        return scale[some.start // _BLOCK_SIZE : -(-some.stop // _BLOCK_SIZE)]
    padded = _rounded_up(shape[0], 128)
    return scale.reshape(padded, -1)[some.start : min(some.stop, padded)]
