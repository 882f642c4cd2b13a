"""Which tensors of a checkpoint the modules of LoRAs are for."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import ModelMismatchError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import open_lora
from sigmascope.lora.models.layout import layout_of
from sigmascope.lora.names.alignment import AlignedLora, align
from sigmascope.lora.shapes import same_matrix

_WEIGHT: Final = ".weight"
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Landing:
    """One LoRA's change of one tensor, still in its file."""

    position: int
    weight: float
    layer: str


@dataclass(frozen=True, slots=True)
class Landings:
    """Where the changes of several LoRAs land.

    Attributes:
        by_key: The changes of each tensor, in the LoRAs' order. Those of weight 0 are none.
        unmatched: Modules that are of no tensor of the checkpoint, by LoRA's position.
    """

    by_key: dict[str, list[Landing]]
    unmatched: dict[int, tuple[str, ...]]


def open_aligned(files: ExitStack, path: Path, base: Checkpoint) -> AlignedLora:
    """Open a LoRA, with its modules under the names of a checkpoint's layers.

    Args:
        files: Closes it.
        path: In any format.
        base: The open checkpoint.

    Raises:
        SigmascopeError: From `open_lora` and `align`.
    """
    return aligned_with(base, files.enter_context(open_lora(path)))


def aligned_with(base: Checkpoint, lora: LoraFile) -> AlignedLora:
    """Name an open LoRA's modules by a checkpoint's layers.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one layer.
    """
    layers = [key.removesuffix(_WEIGHT) for key in base]
    return align(lora, layers, layout_of({key: base.info(key).shape for key in base}))


def landings(base: Checkpoint, aligned: Sequence[AlignedLora], weights: Sequence[float]) -> Landings:
    """Find the tensor of every change.

    Raises:
        ModelMismatchError: A module is for a weight of another shape.
    """
    by_key: dict[str, list[Landing]] = {}
    unmatched: dict[int, tuple[str, ...]] = {}
    wrong: list[str] = []
    for position, (one, weight) in enumerate(zip(aligned, weights, strict=True)):
        without_tensor: list[str] = []
        for layer in one.lora.names:
            key = f"{layer}{_WEIGHT}" if f"{layer}{_WEIGHT}" in base else layer
            if key not in base:  # the bias of a layer that has none
                without_tensor += one.sources[layer]
                continue
            shape, own = base.info(key).shape, one.lora.shape_of(layer)
            if layer in one.lora.modules and not same_matrix(own, shape):
                wrong.append(f"{layer} is {shape} in the checkpoint and {own} in {one.lora}")
            if weight != 0.0:
                by_key.setdefault(key, []).append(Landing(position, weight, layer))
        if one.unmatched or without_tensor:
            unmatched[position] = (*one.unmatched, *without_tensor)
    if wrong:
        raise ModelMismatchError(
            f"{len(wrong)} modules do not fit {base.path}: {'; '.join(wrong[:_NAMED])}{_and_more(len(wrong))}.",
            hint="Merge the LoRA into the model that it was made for.",
        )
    return Landings(by_key, unmatched)


def require_matched(
    base: Checkpoint,
    aligned: Sequence[AlignedLora],
    unmatched: Mapping[int, tuple[str, ...]],
    *,
    allow_unmatched: bool,
) -> None:
    """Refuse modules that are of no tensor, unless that is allowed; a LoRA of which nothing lands always.

    Raises:
        ModelMismatchError: Naming the first few.
    """
    nothing = [one.lora for one in aligned if not one.lora.names]
    if not nothing and (allow_unmatched or not unmatched):
        return
    parts = [
        f"{len(names)} modules of {aligned[position].lora}: {', '.join(names[:_NAMED])}{_and_more(len(names))}"
        for position, names in unmatched.items()
    ]
    other = "" if nothing else ", or go on without them: --allow_unmatched"
    raise ModelMismatchError(
        f"{base.path} has no tensors for {'; '.join(parts)}.",
        hint=f"Merge into the model that the LoRA was made for{other}.",
    )


def _and_more(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""
