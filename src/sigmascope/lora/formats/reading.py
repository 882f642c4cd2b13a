"""Read the entries of an open LoRA file one at a time, whatever format their keys are in."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError, NonFiniteError, SigmascopeError
from sigmascope.lora.adapters import (
    Adapter,
    AdapterFacts,
    DiffChange,
    DoraChange,
    LohaChange,
    LokrChange,
    SetChange,
    TuckerChange,
    WeightChange,
)
from sigmascope.lora.adapters.dora import magnitudes_per_output, require_magnitudes
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import ModuleFacts
from sigmascope.lora.formats.entries import Entry, Kind
from sigmascope.lora.formats.keys import DOWN, EMBEDDING_DOWN, EMBEDDING_UP, UP, UP_BIAS
from sigmascope.lora.formats.scales import EntryScales
from sigmascope.lora.precision import at_least_float32, is_real

_ADAPTERS: Final[Mapping[Kind, type[Adapter]]] = {
    "tucker": TuckerChange,
    "loha": LohaChange,
    "lokr": LokrChange,
    "diff": DiffChange,
    "set": SetChange,
    "up_bias": DiffChange,
}


@dataclass(frozen=True, slots=True)
class EntryReader:
    """Reads what the entries of one file say.

    Attributes:
        checkpoint: The open file.
        scales: What its entries are scaled with.
        check_finite: Whether NaN and Inf are refused.
        keep_float8: Whether float8 stays float8; else it comes as float32.
    """

    checkpoint: Checkpoint
    scales: EntryScales
    check_finite: bool = True
    keep_float8: bool = False

    def facts(self, entry: Entry) -> ModuleFacts:
        """What the header tells of an entry.

        Raises:
            LoraFormatError: Tensors that do not fit together or hold no floating-point numbers.
        """
        infos = {role: self.checkpoint.info(key) for role, key in entry.roles.items()}
        for info in infos.values():
            self._require_numbers(info.name, info.dtype)
        shape, rank = self._shape_and_rank(entry)
        parameters = sum(prod(info.shape) for role, info in infos.items() if _is_value(entry, role))
        kind: str = "diff" if entry.kind == "up_bias" else entry.kind
        if entry.magnitude is not None:
            magnitudes = self.checkpoint.info(entry.magnitude)
            self._require_numbers(magnitudes.name, magnitudes.dtype)
            parameters, kind = parameters + prod(magnitudes.shape), "dora"
        return ModuleFacts("lora" if entry.is_plain else kind, shape, rank, parameters)

    def factors(self, entry: Entry) -> LoraFactors:
        """Read a plain entry.

        Raises:
            LoraFormatError: An alpha that is no number.
            NonFiniteError: A factor or alpha holds NaN or Inf.
        """
        shape, rank = self._shape_and_rank(entry)
        assert rank is not None
        if entry.kind == "embedding":  # its weight is (entries, width), transposed to what B·A gives
            up, down = (
                self._tensor(entry.roles[EMBEDDING_DOWN]).mT,
                self._tensor(entry.roles[EMBEDDING_UP]).mT,
            )
        else:
            up, down = (self._tensor(entry.roles[role]).flatten(1) for role in (UP, DOWN))
        try:
            return LoraFactors(up, down, self.scales.alpha(entry, rank, shape), shape)
        except SigmascopeError as error:
            raise self._named(entry, error) from error

    def change(self, entry: Entry) -> WeightChange:
        """Read an entry that is more than plain factors; raises what `factors` does."""
        if entry.magnitude is None:
            return self._adapter(entry)
        plain = entry.kind in {"lora", "embedding"}
        direction = self.factors(entry) if plain else self._adapter(entry)
        magnitude = self._tensor(entry.magnitude)
        try:
            return DoraChange(direction, magnitude, self._per_output(entry, direction.weight_shape))
        except SigmascopeError as error:
            raise self._named(entry, error) from error

    def _adapter(self, entry: Entry) -> Adapter:
        _, rank = self._shape_and_rank(entry)
        parts = {role: self._tensor(key) for role, key in entry.roles.items() if _is_value(entry, role)}
        try:
            return _ADAPTERS[entry.kind](parts, self.scales.scale(entry, rank))
        except SigmascopeError as error:
            raise self._named(entry, error) from error

    def _shape_and_rank(self, entry: Entry) -> AdapterFacts:
        """Raises LoraFormatError for tensors that do not fit together."""
        shapes = {role: self.checkpoint.info(key).shape for role, key in entry.roles.items()}
        try:
            if entry.kind == "lora":
                facts = AdapterFacts(_plain_shape(shapes[UP], shapes[DOWN]), shapes[DOWN][0])
            elif entry.kind == "embedding":
                entries, width = shapes[EMBEDDING_DOWN][1], shapes[EMBEDDING_UP][0]
                facts = AdapterFacts((entries, width), shapes[EMBEDDING_DOWN][0])
            elif entry.kind == "up_bias":
                facts = AdapterFacts(shapes[UP_BIAS], shapes[DOWN][0])
            else:
                facts = _ADAPTERS[entry.kind].facts(shapes)
            if entry.magnitude is not None:
                count = prod(self.checkpoint.info(entry.magnitude).shape)
                per_output = self._per_output(entry, facts.weight_shape)
                require_magnitudes(count, facts.weight_shape, per_output=per_output)
        except (SigmascopeError, IndexError) as error:
            raise self._named(entry, error) from error
        return facts

    def _per_output(self, entry: Entry, shape: tuple[int, ...]) -> bool:
        assert entry.magnitude is not None
        return entry.by_peft or magnitudes_per_output(self.checkpoint.info(entry.magnitude).shape, shape)

    def _tensor(self, key: str) -> Tensor:
        tensor = self.checkpoint.tensor(key)
        wide = tensor.to(at_least_float32(tensor.dtype))
        if self.check_finite and not bool(torch.isfinite(wide).all()):
            raise NonFiniteError(
                f"{self.checkpoint.path}: {key} holds NaN or Inf.",
                hint="Make the file again, in bf16 or float if it was fp16.",
            )
        return wide if tensor.dtype.itemsize == 1 and not self.keep_float8 else tensor

    def _require_numbers(self, key: str, dtype: torch.dtype) -> None:
        if not is_real(dtype):
            raise LoraFormatError(
                f"{self.checkpoint.path}: {key} is {str(dtype).removeprefix('torch.')}, "
                "not floating-point numbers.",
                hint="Convert the file to bf16, fp16 or float with the tool that made it.",
            )

    def _named(self, entry: Entry, error: Exception) -> SigmascopeError:
        """The error with the file and the module before it."""
        where = f"{self.checkpoint.path}: {entry.module}"
        if isinstance(error, SigmascopeError):
            return type(error)(f"{where}: {error.message}", hint=error.hint)
        return LoraFormatError(f"{where}: a tensor of it has too few axes.")


def _is_value(entry: Entry, role: str) -> bool:
    """Whether a tensor is part of the change, and not only looked at for its rank."""
    return not (entry.kind == "up_bias" and role == DOWN)


def _plain_shape(up: tuple[int, ...], down: tuple[int, ...]) -> tuple[int, ...]:
    """(out, in[, kh, kw]) from the factors: the kernel is down's, and up is 1×1."""
    pointwise = len(up) == 2 or set(up[2:]) <= {1}
    fits = len(down) >= 2 and len(up) in (2, len(down)) and pointwise
    if not fits or up[1] != down[0] or min(*up, *down) < 1:
        raise LoraFormatError(
            f"up is {up} and down is {down}.",
            hint="Expected up (out, rank[, 1, 1]) and down (rank, in[, kh, kw]), rank 1 or more.",
        )
    return (up[0], *down[1:])
