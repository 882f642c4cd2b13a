"""Quantisations without a reader: the keys that tell them, and the shapes of their weights where those show.

A file of such a kind is refused by its name, or opened with weights that have names and shapes and cannot be read.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from sigmascope.checkpoints.checkpoint import Checkpoint
from sigmascope.checkpoints.kinds.kind import Shape


class Unread(NamedTuple):
    """A quantisation without a reader.

    Attributes:
        title: Its name.
        told: Endings of keys that only it has.
        codes: The ending of the keys of codes, in place of a weight's `.weight`; "" if no names follow from them.
        shape: A file and a layer, and the shape of its codes, to that of the weight.
    """

    title: str
    told: tuple[str, ...]
    codes: str = ""
    shape: Callable[[Checkpoint, str, Shape], Shape] = lambda checkpoint, layer, codes: codes


def _packed(count: int) -> Callable[[Checkpoint, str, Shape], Shape]:
    """Rows of which each code holds some numbers."""
    return lambda checkpoint, layer, codes: (*codes[:-1], codes[-1] * count) if len(codes) > 1 else codes


def _gptq(checkpoint: Checkpoint, layer: str, codes: Shape) -> Shape:
    """GPTQ packs the inputs, AWQ the outputs; both eight in an integer."""
    scales = f"{layer}.scales"
    if scales not in checkpoint or len(codes) != 2:
        return codes
    columns = checkpoint.info(scales).shape[-1]
    return columns, codes[0] * (8 if codes[1] == columns else 1)


def _hqq(checkpoint: Checkpoint, layer: str, codes: Shape) -> Shape:
    """HQQ writes the shape as a tensor of its own."""
    key = f"{layer}.shape"
    if key not in checkpoint or checkpoint.info(key).nbytes > 64:
        return codes
    return tuple(int(size) for size in checkpoint.tensor(key).flatten())


def _torchao(checkpoint: Checkpoint, layer: str, codes: Shape) -> Shape:
    """The header of torchao says in the header what class a weight has; those of 4 bits hold two in a code."""
    try:
        facts: Any = json.loads(checkpoint.metadata.get(f"{layer}.weight", "{}"))
    except (ValueError, RecursionError):
        return codes
    is_packed = isinstance(facts, dict) and str(facts.get("_type")).startswith("Int4")
    return _packed(2)(checkpoint, layer, codes) if is_packed else codes


UNREAD: Final = (
    Unread("SVDQuant (nunchaku)", (".wscales", ".smooth_factor", ".wtscale"), ".qweight", _packed(2)),
    Unread("GPTQ or AWQ", (".qweight",), ".qweight", _gptq),
    Unread("HQQ", (".W_q",), ".W_q", _hqq),
    Unread("optimum-quanto", (".weight._data", ".weight._scale"), ".weight._data"),
    Unread("torchao", ("._weight_qdata",), "._weight_qdata", _torchao),
    Unread("torchao", (":_data", ":int_data"), ".weight:_data"),
    Unread("NVFP4 by another tool", (".weight_global_scale",), ".weight_packed", _packed(2)),
    Unread("compressed-tensors (packed integers)", (".weight_packed",), ".weight_packed", _packed(8)),
)


def unread_kind(checkpoint: Checkpoint) -> tuple[Unread, str] | None:
    """The kind of a checkpoint that has no reader, and the key that tells it."""
    for kind in UNREAD:
        key = next((key for key in checkpoint if key.endswith(kind.told)), None)
        if key is not None:
            return kind, key
    return None


def names_and_shapes(checkpoint: Checkpoint, kind: Unread) -> Iterator[tuple[str, str, Shape]]:
    """The layer, the key of the codes and the shape of each weight of such a kind."""
    for codes in checkpoint:
        if kind.codes and codes.endswith(kind.codes):
            layer = codes.removesuffix(kind.codes)
            yield layer, codes, kind.shape(checkpoint, layer, checkpoint.info(codes).shape)


COMFYUI_PACKED: Final[Mapping[str, int]] = {"convrot_w4a4": 2, "asym_w4a8_int8": 2, "awq_w4a16": 2}
"""ComfyUI's formats without a reader whose codes hold more than one number."""
