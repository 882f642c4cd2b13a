"""What is kept of a model at one moment, to be compared with another. It keeps no model and no weight alive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.fingerprints import Fingerprint
from sigmascope.stages.lora.applied import Applied

NOT_GIVEN = "no model was given"
NO_PATCHER = "only ComfyUI's patchers have one"


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """One weight at one moment."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class PatchMark:
    """What tells one change on a weight from another, without its tensors."""

    source: str | None
    index: int
    adapter_type: str
    strength: float | None
    state: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model is, and where its host would have it when it works and when it rests."""

    device: torch.device | None = None
    load_device: torch.device | None = None
    offload_device: torch.device | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """A UNet or CLIP at one moment.

    Attributes:
        model_type: What the host calls it.
        model_id: Its `id()`; None if there was no model.
        kind: Its type.
        reference: A weak reference; None if it takes none.
        parts: Weak references to what it is made of; one "" for a single model.
        patch_count: How many weights have changes; None if that could not be read.
        patches_uuid: Of ComfyUI's patcher.
        placement: Where it is.
        marks: The changes of each weight that has any.
        weights: By name without adapters.
        adapter_keys: Names of adapters' own tensors.
        wrapped_keys: How many weights are in layers that an adapter wraps.
        fingerprints: Of the weights that were looked at.
        samples: Of the same, a thousand elements each.
        fingerprint_seconds: What looking took; None if nothing was looked at.
        fingerprint_bytes: How much was looked at.
        unavailable: What could not be read, with the reason.
    """

    model_type: str
    model_id: int | None = None
    kind: type | None = None
    reference: Any = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    patch_count: int | None = None
    patches_uuid: Any = None
    placement: Placement = Placement()
    marks: Mapping[str, tuple[PatchMark, ...]] = field(default_factory=dict)
    weights: Mapping[str, WeightFacts] = field(default_factory=dict)
    adapter_keys: tuple[str, ...] = ()
    wrapped_keys: int = 0
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    fingerprint_seconds: float | None = None
    fingerprint_bytes: int = 0
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"CapturedModel({self.model_type!r}, {self.class_name!r}, …)"

    @property
    def class_name(self) -> str | None:
        """The class's name."""
        return None if self.kind is None else self.kind.__name__

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all tensors, adapters' included."""
        return (*self.weights, *self.adapter_keys)

    def model(self) -> object:
        """The model, if it still lives."""
        return None if self.reference is None else self.reference()


def marks_of(applied: Applied) -> dict[str, tuple[PatchMark, ...]]:
    """What tells the changes of each weight apart."""
    return {key: tuple(map(mark_of, patches)) for key, patches in applied.by_key().items()}


def mark_of(patch: AppliedPatch) -> PatchMark:
    """What tells this change from others on the weight. How far it has come counts only as acting or not."""
    state = patch.state if patch.state in ("failed", "inactive") else "acting"
    return PatchMark(patch.source, patch.index, patch.adapter_type, patch.strength, state)
