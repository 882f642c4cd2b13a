"""What an entry changes a weight by: adapter objects, tuples of every version, and their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor

from sigmascope.probes.adapters.applied import AdapterType
from sigmascope.probes.adapters.guarded import attribute, has, number, sequence

_PARTS: Mapping[str, tuple[str, ...]] = {
    "lora": ("up", "down", "alpha", "mid", "dora_scale", "reshape"),
    "loha": ("w1_a", "w1_b", "alpha", "w2_a", "w2_b", "t1", "t2", "dora_scale"),
    "lokr": ("w1", "w2", "alpha", "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
    "glora": ("a1", "a2", "b1", "b2", "alpha", "dora_scale"),
    "oft": ("blocks", "rescale", "alpha", "dora_scale"),
    "boft": ("blocks", "rescale", "alpha", "dora_scale"),
    "diff": ("diff", "options"),
    "set": ("set",),
    "model_as_lora": ("target",),
}
"""The order in which each kind keeps its parts. Earlier versions have fewer: no dora_scale, no reshape."""

_UNNAMED = {1: "diff", 4: "lora", 7: "loha", 8: "lokr"}
"""Before August 2023 a tuple said what it is by its length alone; length 1 is a difference to this day."""

_ROTATIONS = ("oft", "boft")  # their alpha bounds the rotation and scales nothing


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What is added to a weight or done to it, before any strength.

    Attributes:
        kind: Its adapter type, or "model_as_lora".
        tensors: By the names of `AppliedPatch.tensors`, and `target` for model_as_lora.
        rank: Of a low-rank change.
        alpha: As the file had it.
        scale: What the host makes of alpha and rank.
        reshape: The shape that the host enlarges the weight to before it adds this.
        pads: Whether a difference larger than the weight enlarges it.
        takes_rows: Whether the host takes the rows of one projection from a LoKr of fused ones.
        unavailable: What could not be read, with the reason.
    """

    kind: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = 1.0
    reshape: tuple[int, ...] | None = None
    pads: bool = False
    takes_rows: bool = False
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapter_type(self) -> AdapterType:
        """What it truly is: a LoRA with magnitudes is a DoRA."""
        if self.kind == "lora" and "dora_scale" in self.tensors:
            return "dora"
        return next((name for name in get_args(AdapterType) if name == self.kind), "unknown")


def read_value(value: object) -> Change:
    """Read an adapter object or a tuple, of any version. Lists are `expansion.changes_of`'s."""
    kind, parts = _kind_and_parts(value)
    if kind not in _PARTS:
        reason = f"{kind or type(value).__name__} is no kind of change that is known"
        return Change("unknown", scale=None, unavailable={"adapter_type": reason})
    named = dict(zip(_PARTS[kind], parts, strict=False))
    tensors = {name: part for name, part in named.items() if name != "alpha" and isinstance(part, Tensor)}
    alpha = number(named.get("alpha"))
    rank = _rank(kind, tensors)
    unavailable = {}
    if alpha is None and named.get("alpha") is not None:
        unavailable["alpha"] = f"is {type(named['alpha']).__name__}, not a number"
    return Change(
        kind,
        tensors,
        rank,
        alpha,
        _scale(kind, alpha, rank),
        _reshape(named.get("reshape")),
        _pads(named.get("options")),
        has(value, "row_offset"),  # LoKr since mid-2026
        unavailable,
    )


def _kind_and_parts(value: Any) -> tuple[str, tuple[Any, ...]]:
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], str):
            return value[0], sequence(value[1])
        return _UNNAMED.get(len(value), ""), value
    name = attribute(value, "name")
    return (name.lower() if isinstance(name, str) else ""), sequence(attribute(value, "weights"))


def _rank(kind: str, tensors: Mapping[str, Tensor]) -> int | None:
    """The number that ComfyUI divides alpha by. LoKr has one only where a factor is low-rank itself."""
    name = {"lora": ("down",), "loha": ("w1_b",), "lokr": _lokr_factor(tensors)}.get(kind, ())
    if kind == "glora":
        return _glora_rank(tensors)
    return next((int(tensors[part].shape[0]) for part in name if part in tensors), None)


def _lokr_factor(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    second = () if "w2" in tensors else ("w2_b",)
    return second if "w1" in tensors else (*second, "w1_b")


def _glora_rank(tensors: Mapping[str, Tensor]) -> int | None:
    """The side that all four factors share; two orders of the factors are in use."""
    if not {"a1", "a2", "b1", "b2"} <= tensors.keys():
        return None
    a1, a2 = tensors["a1"].shape, tensors["a2"].shape
    b1, b2 = tensors["b1"].shape, tensors["b2"].shape
    newer = [int(a2[0])] if b2[0] == b1[1] == a1[1] == a2[0] else []
    older = [int(a1[0])] if b2[1] == b1[0] == a1[0] == a2[1] else []
    return min([*newer, *older], default=None)  # of a square weight both hold, and the larger is its side


def _scale(kind: str, alpha: float | None, rank: int | None) -> float | None:
    if alpha is None or kind in _ROTATIONS:
        return 1.0
    if rank is None:
        return 1.0 if kind == "lokr" else None
    return alpha / rank if rank else None


def _reshape(value: object) -> tuple[int, ...] | None:
    sizes = sequence(value)
    return tuple(int(size) for size in sizes) if sizes else None


def _pads(options: object) -> bool:
    return isinstance(options, Mapping) and bool(options.get("pad_weight"))


def is_list_of_patches(value: object) -> bool:
    """Whether a value is what a model merge registers: a list of a weight and the patches upon it."""
    return isinstance(value, Sequence) and not isinstance(value, tuple | str)
