"""Quantised weights: how they are told, and read as the numbers that they stand for (`dequantised`).

Keys, types, shapes and ComfyUI's `comfy_quant` (a JSON text for each layer, or for all in the header's
`_quantization_metadata`) tell how a weight is stored; `kinds.KINDS` has the ways that can be read, `kinds.unread` the
names of others. An 8-bit float without a scale is its own value. Any other quantisation has no reader: it is refused by
name, or kept as a weight that can be named and not read.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, CompositeCheckpoint, TensorInfo, shortened
from sigmascope.checkpoints.kinds import KINDS
from sigmascope.checkpoints.kinds.kind import (
    BYTE,
    DAMAGED,
    FP8,
    Config,
    Kind,
    Layer,
    Shape,
    parsed,
    rounded_up,
)
from sigmascope.checkpoints.kinds.scaled import BLOCK_SIZE, scale_kind
from sigmascope.checkpoints.kinds.unread import COMFYUI_PACKED, names_and_shapes, unread_kind
from sigmascope.checkpoints.rounding import Recoded, Rounding, Storage, Sums
from sigmascope.errors import CheckpointError

_ROWS: Final = 1024  # dequantised at once; a multiple of the 128 rows that block scales lie in
_CONFIG: Final = ".comfy_quant"
_HEADER_CONFIG: Final = "_quantization_metadata"
_ACTIVATION_SCALES: Final = (".scale_input", ".input_scale")
_MARKS: Final = ("scaled_fp8", _CONFIG)
_SERVED: Final = tuple(ending for kind in KINDS.values() for ending in kind.served)
UNDESCRIBED: Final = "unknown"
"""How a weight is stored whose description is damaged."""
_HINT: Final = (
    "Use the checkpoint that it was made from (bf16 or fp16), or save a dequantised copy with the tool named."
)


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
    unknown = unread_kind(checkpoint)
    if not keep_unread:
        if unknown is not None:
            kind, key = unknown
            raise CheckpointError(
                checkpoint.path,
                f"is quantised by {kind.title} ({shortened(key)}), which cannot be undone here.",
                hint=_HINT,
            )
        if unread is not None:
            raise _not_read(checkpoint, unread)
    elif unknown is not None:
        kind, key = unknown
        why = f"is quantised by {kind.title} ({shortened(key)}), which has no reader here"
        weights |= {
            f"{layer}.weight": StoredWeight(codes, shape, kind.title, None, {}, {}, why)
            for layer, codes, shape in names_and_shapes(checkpoint, kind)
        }
    # Without a quantised weight those are names like any other.
    return DequantisedCheckpoint(checkpoint, weights, hidden) if weights else checkpoint


def _not_read(checkpoint: Checkpoint, weight: StoredWeight) -> CheckpointError:
    has_no_reader = weight.kind is None and weight.how != UNDESCRIBED
    hint = None if weight.unread and "not installed" in weight.unread else _HINT if has_no_reader else DAMAGED
    return CheckpointError(checkpoint.path, f"{weight.unread}.", hint=hint)


def _weights(checkpoint: Checkpoint) -> tuple[dict[str, StoredWeight], dict[str, str]]:
    """Quantised weights that a kind or ComfyUI's format tells, and keys that only serve them."""
    configs, damaged = _header_configs(checkpoint)
    weights: dict[str, StoredWeight] = {}
    hidden: dict[str, str] = {}
    for key in checkpoint:
        info, layer = checkpoint.info(key), key.removesuffix(".weight")
        if key.endswith(_ACTIVATION_SCALES):
            hidden[key] = "is a scale of activations, not a weight"
        elif key.endswith(_MARKS) and (info.dtype == BYTE or info.dtype in FP8):
            hidden[key] = "marks a quantisation and is not a weight"
        if layer == key or not _is_coded(info):
            continue
        if damaged is not None:
            weight: StoredWeight | None = _undescribed(info, damaged)
        else:
            weight = _stored(Layer(checkpoint, layer), info, configs.get(layer))
        if weight is not None:
            weights[key] = weight
            served = f"is the scale of {key}, which is dequantised on reading"
            hidden |= dict.fromkeys(weight.scales.values(), served)
    if weights:
        hidden |= {key: "describes a quantisation" for key in checkpoint if key.endswith(_SERVED)}
    return weights, {key: what for key, what in hidden.items() if key in checkpoint}


def _is_coded(info: TensorInfo) -> bool:
    """Whether a weight's numbers are codes: any other type beside a `weight_scale` is a model's own affair."""
    return info.dtype in FP8 or not (info.dtype.is_floating_point or info.dtype.is_complex)


def _header_configs(checkpoint: Checkpoint) -> tuple[dict[str, Config], CheckpointError | None]:
    """What ComfyUI's text in the header says of each layer, or what is wrong with it."""
    header = checkpoint.metadata.get(_HEADER_CONFIG)
    if header is None:
        return {}, None
    try:
        layers = parsed(checkpoint, _HEADER_CONFIG, header.encode()).get("layers")
    except CheckpointError as error:
        return {}, error
    given = layers.items() if isinstance(layers, dict) else ()
    return {name: config for name, config in given if isinstance(config, dict)}, None


def _undescribed(info: TensorInfo, error: CheckpointError) -> StoredWeight:
    what = error.message.removeprefix(f"{error.path}: ").rstrip(".")
    return StoredWeight(info.name, info.shape, UNDESCRIBED, None, {}, {}, what)


def _stored(layer: Layer, info: TensorInfo, config: Config | None) -> StoredWeight | None:
    """How a weight of codes is stored; None if it has no scales and nothing says that it needs some."""
    where = f"{_HEADER_CONFIG} in the header"
    try:
        if config is None and (text := layer.info(_CONFIG)) is not None and text.dtype == BYTE:
            config, where = layer.text(_CONFIG), shortened(text.name)
        said = None if config is None else _format_of(layer, info.name, config, where)
        name, facts = _kind_of(layer, info, said, config or {})
    except CheckpointError as error:
        return _undescribed(info, error)
    if name is None:
        return None
    kind = KINDS.get(name)
    packed = COMFYUI_PACKED.get(name, 1) if kind is None else kind.packed
    stated = facts.get("shape")
    own = (*info.shape[:-1], info.shape[-1] * packed) if info.shape else ()
    held = math.prod(info.shape) * packed
    if stated is not None and not (_is_shape(stated) and 0 <= held - math.prod(stated) < packed):
        what = f"{info.name} is said to have the shape {shortened(stated)}, but its codes hold {held} numbers"
        return _undescribed(info, CheckpointError(layer.checkpoint.path, what))
    shape = own if stated is None else tuple(stated)
    if kind is not None:
        shape = _without_filling(layer, shape, kind.filled_up)
    facts = {**facts, "dtype": info.dtype, "shape": shape}
    if kind is None or kind.numbers is None:
        why = f"{info.name} is stored in ComfyUI's format {shortened(name)}, which has no reader here"
        return StoredWeight(info.name, shape, f"ComfyUI's {shortened(name)}", None, {}, facts, why)
    scales, unread = _scales_of(layer, kind, shape, info)
    title = kind.title.format(
        dtype=str(info.dtype).removeprefix("torch."),
        scale=_scale_in_words(layer, shape, scales),
        quant_type=str(facts.get("quant_type", "")).upper(),
    )
    return StoredWeight(info.name, shape, title, kind, scales, facts, unread or kind.unusable(facts, shape))


def _is_shape(stated: object) -> bool:
    return isinstance(stated, list) and all(isinstance(size, int) and size >= 0 for size in stated)


def _without_filling(layer: Layer, shape: Shape, multiple: int) -> Shape:
    """The shape without rows that only fill it up to a multiple: the bias is as long as the weight has rows.

    ComfyUI knows the rows from its module. Nothing in the file tells columns that fill up.
    """
    bias = layer.info(".bias") if multiple > 1 else None
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else 0
    return (rows, *shape[1:]) if len(shape) == 2 and rounded_up(rows, multiple) == shape[0] else shape


def _scale_in_words(layer: Layer, shape: Shape, scales: Mapping[str, str]) -> str:
    known = scale_kind(shape, layer.checkpoint.info(scales["scale"]).shape) if "scale" in scales else None
    return known or "in an unknown way"


def _format_of(layer: Layer, key: str, config: Config, where: str) -> str:
    """The format that ComfyUI's text names.

    Raises:
        CheckpointError: It names none.
    """
    given = config.get("format")
    if isinstance(given, str) and given:
        return given
    stated = "gives no format" if not given else f"gives the format {shortened(given)}, which is no name,"
    raise CheckpointError(layer.checkpoint.path, f"{where} {stated} for {key}")


def _kind_of(layer: Layer, info: TensorInfo, said: str | None, config: Config) -> tuple[str | None, Config]:
    """The kind's name and what it needs to know; a name without a kind is a format that only ComfyUI knows."""
    for name, kind in KINDS.items():
        facts = kind.told(info, layer) if said is None else kind.named(said, config)
        if facts is not None:
            return name, facts
    return said, {}


def _scales_of(
    layer: Layer, kind: Kind, shape: Shape, weight: TensorInfo
) -> tuple[dict[str, str], str | None]:
    """The keys of a weight's scales, and what is wrong with the first that is wrong."""
    keys: dict[str, str] = {}
    wrong: list[str] = []
    if weight.dtype not in kind.codes:
        stored = str(weight.dtype).removeprefix("torch.")
        wrong.append(f"{weight.name} is {stored} with scales, a quantisation that cannot be undone here")
    for name, scale in kind.scales.items():
        key = layer.key(scale.endings)
        if key is None:
            if not scale.optional:
                default = ".weight_scale" if ".weight_scale" in scale.endings else scale.endings[0]
                wrong.append(f"{layer.name}{default}, the scale of {weight.name}, is missing")
            continue
        keys[name], info = key, layer.checkpoint.info(key)
        if info.dtype not in scale.dtypes:
            stored = str(info.dtype).removeprefix("torch.")
            wrong.append(f"{key}, the scale of {weight.name}, is {stored}, which cannot be undone here")
        elif not scale.fits(shape, info.shape):
            wrong.append(
                f"{key} of shape {info.shape} does not fit as the scale of {weight.name} of shape {shape}"
            )
    return keys, wrong[0] if wrong else None


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
        self.undescribed = {
            key: weight.unread
            for key, weight in weights.items()
            if weight.unread is not None and weight.how == UNDESCRIBED
        }
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
        if not weight.kind.by_row:
            return numbers.copy_(weight.kind.numbers(codes, scales, weight.config))
        for start in range(0, info.shape[0] if info.shape else 1, _ROWS):
            some = slice(start, start + _ROWS)
            part = {name: _rows_of(scale, some, weight.shape) for name, scale in scales.items()}
            made = weight.kind.numbers(codes[some], part, weight.config)
            numbers[some] = made[: info.shape[0] - start] if info.shape else made
        return numbers

    def _scales(self, weight: StoredWeight) -> dict[str, Tensor]:
        source = self._sources[0]
        return {name: source.tensor(key) for name, key in weight.scales.items()}

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        if info.name not in self._weights:
            return super()._read_pieces(info, buffer)
        return Checkpoint._read_pieces(self, info, buffer)

    @property
    def as_stored(self) -> Checkpoint:
        """The opened file."""
        return self._sources[0]

    def storage(self, key: str) -> Storage:
        """See `Checkpoint.storage`."""
        weight = self._weights.get(key)
        if weight is not None and weight.unread is not None:
            raise _not_read(self, weight)
        if weight is None or weight.kind is None or weight.kind.store is None:
            return super().storage(key)
        return Storage(weight.how, (weight.codes, *weight.scales.values()))

    def recoded(self, key: str, sums: Sums) -> Recoded:
        """See `Checkpoint.recoded`."""
        self.storage(key)
        weight = self._weights[key]
        kind, old = weight.kind, self._scales(weight)
        assert kind is not None
        assert kind.store is not None
        assert kind.numbers is not None
        read, rows = kind.numbers, weight.shape[0]
        columns = math.prod(weight.shape[1:])
        codes, new = kind.store(sums, old, weight.config, (rows, columns))
        shaped = codes.reshape(weight.shape)

        def numbers(some: slice) -> Tensor:
            part = {name: _rows_of(scale, some, weight.shape) for name, scale in new.items()}
            return read(shaped[some], part, weight.config).reshape(-1, columns)

        return Recoded(
            {weight.codes: shaped} | {weight.scales[name]: scale for name, scale in new.items()},
            numbers,
            any(not torch.equal(scale, old[name]) for name, scale in new.items()),
        )

    def rounding(self, key: str) -> Rounding:
        """See `Checkpoint.rounding`."""
        weight = self._weights.get(key)
        if weight is None:
            return super().rounding(key)
        kind = weight.kind
        if weight.unread is not None or kind is None or kind.again is None:
            raise _not_read(self, weight)
        again, merged, scales = kind.again, kind.merged, self._scales(weight)
        return Rounding(
            weight.how,
            lambda peak, rows: again(peak, rows, scales, weight.config),
            None if merged is None else lambda peak, rows: merged(peak, rows, scales, weight.config),
        )


def _rows_of(scale: Tensor, some: slice, shape: Shape) -> Tensor:
    """The part of a scale that belongs to some of a weight's rows."""
    if scale.numel() == 1:
        return scale
    if scale.shape[0] == shape[0]:
        return scale[some]
    if scale.shape[0] == -(-shape[0] // BLOCK_SIZE) and len(scale.shape) == 2 and scale.shape[0] < shape[0]:
        return scale[some.start // BLOCK_SIZE : -(-some.stop // BLOCK_SIZE)]
    padded = rounded_up(shape[0], 128)
    return scale.reshape(padded, -1)[some.start : min(some.stop, padded)]
