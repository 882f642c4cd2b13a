"""Files of kinds that Sigmascope's tools do not read and ComfyUI does: OFT, BOFT, GLoRA. Their names can be judged."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import LoraFormatError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.file import LoraFile, ModuleFacts
from sigmascope.lora.formats.kohya import FLAT_PREFIXES
from sigmascope.lora.formats.lazy import LazyMapping
from sigmascope.lora.formats.opening import open_lora

_KEY: Final = re.compile(
    r"(?P<name>.+)\.(?P<end>oft_blocks|oft_diag|boft_blocks|[ab][12]\.weight|rescale|alpha|dora_scale)"
)
_BLOCKS: Final = ("oft_blocks", "oft_diag", "boft_blocks")
_GLORA: Final = ("a1.weight", "a2.weight", "b1.weight", "b2.weight")
_PARTS: Final = dict.fromkeys(_BLOCKS, "blocks") | {end: end.removesuffix(".weight") for end in _GLORA}
_BUTTERFLY: Final = 4  # axes of BOFT's blocks, where OFT's have three
_COMFYUI_STARTS: Final = ("diffusion_model.", "text_encoders.")

UNKNOWN_SHAPE: Final = ()
"""Of a weight of which only the number of rows is known."""


@dataclass(frozen=True, eq=False)
class UnreadChange:
    """A change that is not formed here, by its tensors.

    Attributes:
        kind: `oft`, `boft` or `glora`.
        weight_shape: Of the weight; () where its tensors do not tell.
        parameters: Number of stored values.
        parts: Its tensors, by the names that `AppliedPatch.tensors` has for them.
    """

    kind: str
    weight_shape: tuple[int, ...]
    parameters: int
    parts: Mapping[str, Tensor]

    needs_base: ClassVar[bool] = True

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Not to be had.

        Raises:
            LoraFormatError: Always.
        """
        raise LoraFormatError(f"a change of kind {self.kind} is not formed from its file.")

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """Not to be had; raises what `delta` does."""
        return float(self.delta(base).norm())


@contextmanager
def open_any(path: Path, *, check_finite: bool = True) -> Iterator[LoraFile]:
    """Open a LoRA file, also of kinds that `open_lora` refuses; raises what that does."""
    unread = open_unread(path)
    if unread is not None:
        yield unread
        return
    with open_lora(path, check_finite=check_finite) as lora:
        yield lora


def open_unread(path: Path) -> LoraFile | None:
    """The modules of a file that holds such changes and nothing else, by name; None for any other file.

    Args:
        path: The file. It is not kept open; a change that is read opens it again.

    Raises:
        CheckpointError: It cannot be read.
    """
    with open_checkpoint(path) as checkpoint:
        groups = _groups(checkpoint)
        if groups is None:
            return None
        facts = {name: _facts(checkpoint, ends) for name, ends in groups.items()}
        metadata = dict(checkpoint.metadata)
    known = {name: one for name, one in facts.items() if one is not None}
    if len(known) < len(groups):
        return None
    return LoraFile(
        modules={},
        metadata=metadata,
        path=path,
        format=_format(next(iter(groups))),
        changes=LazyMapping(
            {name: name for name in groups}, lambda name: _read(path, known[name], groups[name])
        ),
        facts=known,
    )


def _groups(checkpoint: Checkpoint) -> dict[str, dict[str, str]] | None:
    """Key by ending, for each module; None if a key is of another kind."""
    groups: dict[str, dict[str, str]] = {}
    for key in checkpoint:
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        groups.setdefault(match["name"], {})[match["end"]] = key
    return groups or None


def _facts(checkpoint: Checkpoint, ends: Mapping[str, str]) -> ModuleFacts | None:
    shapes = {end: checkpoint.info(key).shape for end, key in ends.items()}
    parameters = sum(prod(shape) for end, shape in shapes.items() if end != "alpha")
    blocks = next((shapes[end] for end in _BLOCKS if end in shapes), None)
    if blocks is not None:
        return ModuleFacts("boft" if len(blocks) == _BUTTERFLY else "oft", UNKNOWN_SHAPE, None, parameters)
    if not all(end in shapes for end in _GLORA):
        return None
    b1, b2 = (shapes[end] for end in _GLORA[2:])
    if b1[1] == b2[0]:  # b1·b2, as GLoRA's factors are ordered now
        return ModuleFacts("glora", (b1[0], *b2[1:]), b2[0], parameters)
    return ModuleFacts("glora", (b2[0], *b1[1:]), b1[0], parameters)


def _read(path: Path, facts: ModuleFacts, ends: Mapping[str, str]) -> WeightChange:
    """Raises NonFiniteError for NaN or Inf."""
    parts: dict[str, Tensor] = {}
    with open_checkpoint(path) as checkpoint:
        for end, key in ends.items():
            parts[_PARTS.get(end, end)] = tensor = checkpoint.tensor(key)
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{path}: {key} holds NaN or Inf.")
    parts.pop("alpha", None)
    return UnreadChange(facts.kind, facts.weight_shape, facts.parameters, parts)


def _format(name: str) -> str:
    if name.startswith(FLAT_PREFIXES) and "." not in name:
        return "kohya"
    return "comfyui" if name.startswith(_COMFYUI_STARTS) else "native"
