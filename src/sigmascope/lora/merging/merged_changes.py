"""The changes that several LoRAs together make to each layer, made when they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.merging.base_weights import BaseWeights
from sigmascope.lora.merging.merge_methods import MergeMethod
from sigmascope.lora.merging.reducible import FormedChange, reducible
from sigmascope.lora.merging.reducible_change import ReducibleChange
from sigmascope.lora.names.united import UnitedLoras
from sigmascope.lora.shapes import same_matrix

_NAMED: Final = 5
_NEEDS_BASE: Final = frozenset({"dora", "set"})


@dataclass(frozen=True)
class MergedChanges:
    """What a merge makes of each layer.

    Attributes:
        united: The LoRAs under common names.
        weights: What each LoRA's change is multiplied with.
        method: How the changes of one layer become one.
        dtype: In which factors are stored.
        bases: Weights of the base model, for changes that depend on them.

    Raises:
        ModelMismatchError: Two LoRAs change a layer of different shape.
        LoraFormatError: A change depends on the base model, and none is given.
    """

    united: UnitedLoras
    weights: Sequence[float]
    method: MergeMethod
    dtype: torch.dtype
    bases: BaseWeights | None = None

    def __post_init__(self) -> None:
        self._require_same_shapes()
        waiting = [name for name in self.united.names if self._needs_base(name)] if self.bases is None else []
        if waiting:
            raise LoraFormatError(
                f"{len(waiting)} modules depend on the base model (DoRA or whole weights): "
                f"{', '.join(waiting[:_NAMED])}.",
                hint="Give --base_model_path, or merge into a checkpoint with --into.",
            )

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers whose change is a matrix, and so has a rank."""
        return tuple(name for name in self.united.names if len(self.shape(name)) > 1)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Biases, norms and single numbers."""
        return tuple(name for name in self.united.names if len(self.shape(name)) <= 1)

    @property
    def formed(self) -> tuple[str, ...]:
        """Layers whose change has to be formed: by the method, or since a LoRA has more there than up and down."""
        return tuple(name for name in self.layers if not self._is_plain(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the changed weight; of several forms the one with a kernel."""
        shapes = [self.united.loras[position].shape_of(name) for position in self.united.positions(name)]
        return max(shapes, key=len)

    def old_rank(self, name: str) -> int | None:
        """The sum of the LoRAs' ranks there; None where the change is formed."""
        if not self._is_plain(name):
            return None
        return sum(self.united.loras[position].rank_of(name) or 0 for position in self._acting(name))

    def load(self, name: str, wanted: int) -> ReducibleChange:
        """Read and combine one layer's changes; safe to call from threads."""
        if not self._is_plain(name):
            return FormedChange(self._combined(name), self.dtype)
        shape = self.shape(name)
        parts, weights = [], []
        for position in self._acting(name):
            change = self.united.change(position, name)
            assert isinstance(change, LoraFactors)
            parts.append(replace(change, weight_shape=shape))
            weights.append(self.weights[position])
        return reducible(LoraFactors.concatenate(parts, weights), wanted, self.dtype)

    def vector(self, name: str) -> Tensor:
        """Read and combine one bias's or norm's changes, in float32."""
        return self._combined(name)

    def _combined(self, name: str) -> Tensor:
        shape = self.shape(name)
        deltas = {
            position: self._delta(position, name).reshape(shape).mul_(self.weights[position])
            for position in self.united.positions(name)
            if self.weights[position] != 0.0
        }
        return self.method.combine(name, deltas) if deltas else torch.zeros(shape)

    def _delta(self, position: int, name: str) -> Tensor:
        change = self.united.change(position, name)
        if isinstance(change, LoraFactors) or change.kind not in _NEEDS_BASE:
            return change.delta()
        assert self.bases is not None  # or the constructor has refused it
        return change.delta(self.bases.weight(position, self.united.sources[position][name]))

    def _is_plain(self, name: str) -> bool:
        return self.method.is_linear and all(
            name in self.united.loras[position].modules for position in self._acting(name)
        )

    def _needs_base(self, name: str) -> bool:
        return any(
            self.united.loras[position].kind_of(name) in _NEEDS_BASE for position in self._acting(name)
        )

    def _acting(self, name: str) -> tuple[int, ...]:
        """The LoRAs of a layer without those of weight 0; all of them where none is left."""
        positions = self.united.positions(name)
        return tuple(one for one in positions if self.weights[one] != 0.0) or positions

    def _require_same_shapes(self) -> None:
        for name in self.united.names:
            positions = self.united.positions(name)
            shapes = {position: self.united.loras[position].shape_of(name) for position in positions}
            first = shapes[positions[0]]
            for position, shape in shapes.items():
                if not same_matrix(first, shape):
                    raise ModelMismatchError(
                        f"{name} is {first} in {self.united.loras[positions[0]]} and {shape} in "
                        f"{self.united.loras[position]}.",
                        hint="Merge LoRAs of the same base model.",
                    )
