"""One form for what ComfyUI's patchers and PEFT's layers hold: a change to one weight of a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from torch import Tensor

AdapterType = Literal["lora", "loha", "lokr", "glora", "oft", "boft", "dora", "diff", "set", "unknown"]
PatchType = Literal["lora_up", "lora_down", "diff", "unknown"]
_WORDS: Final[tuple[tuple[str, PatchType], ...]] = (
    ("lora_up.weight", "lora_up"),
    ("lora_down.weight", "lora_down"),
    ("diff", "diff"),
)
_DEEPEST: Final = 3  # containers in containers
PatchState = Literal["registered", "merged", "lazy", "inactive", "failed"]
"""The state of a change.

registered: known to the host, in no weight and no forward pass yet; merged: in the weight; lazy: applied to the
weight or beside it in each forward pass; inactive: there, but switched off or at strength 0; failed: it cannot be
applied, as where its shape is not the weight's.
"""
PatchCause = Literal["strength_zero", "disabled", "not_active", "others_merged", "bypassed"]
"""Why a change is inactive."""


class Standing(NamedTuple):
    """How far a change has come, what that was read from, and why it is inactive if it is."""

    state: PatchState
    reason: str
    cause: PatchCause | None = None


@dataclass(slots=True, eq=False)
class AppliedPatch:
    """One change to one weight. It holds the host's own tensors: let go of it when they have been looked at.

    Nothing writes into one: `replaced` makes another. It is not frozen, since a look makes thousands, and a frozen one
    takes seven times as long to make.

    Attributes:
        key: The weight's name in the model's state dict, as it would be without any wrapper of an adapter.
        adapter_type: What kind of change it is.
        patch_type: Its coarse type: lora_up for a LoRA or DoRA, whose up and down factors are one change; diff; what
            `patch_type_by_words` finds in any other.
        data_type: `str(type(...))` of what the host keeps for it.
        state: How far it has come.
        state_reason: What the state was read from.
        source: The adapter's name. ComfyUI keeps none: what it registered together is "LoRA 1", "LoRA 2" …
        index: Its place among the changes of that weight, in the order in which they are applied. Those of one
            index are one entry of the host's, as where a model is merged in with LoRAs of its own.
        strength: What the change is multiplied with besides `scale`; None if it cannot be read.
        strength_model: What the weight itself is multiplied with before the change is added.
        rank: Of a low-rank change; None for others.
        alpha: None where there is none, and then `scale` is 1.
        scale: alpha / rank, or alpha / √rank where the layer says so.
        tensors: By part. lora and dora: up, down, mid, dora_scale; loha: w1_a, w1_b, w2_a, w2_b, t1, t2;
            lokr: w1, w2, w1_a, w1_b, w2_a, w2_b, t2; glora: a1, a2, b1, b2; oft and boft: blocks, rescale;
            diff: diff; set: set; any but set: dora_scale. Shapes as the host has them, up (out, r[, …]) and
            down (r, in[, kh, kw]). Parts that are not there are left out.
        stored: Of a kind of which `tensors` has nothing, its tensors under the names that files have for them. Of a DoRA
            of PEFT's what its magnitudes are divided by: `norm`, kept of the weight that it was merged into, or of `weight`.
        host_names: What the host calls these tensors, where that is another name: up of PEFT's is lora_B.
        weight_shape: Of the weight that it is for; None if the model has none of that name.
        offset: (dimension, start, length) of the part of the weight that it changes; None: all of it.
        unavailable: What could not be read, with the reason.
        cause: Why it is inactive, as `sigmascope.lora.verdict.VERDICTS` lists it (`lora_disabled`, …).
        in_base: What its adapter changes in the model itself, which acts while the adapter is off; None if nothing.
    """

    key: str
    adapter_type: AdapterType
    patch_type: PatchType
    data_type: str
    state: PatchState
    state_reason: str = ""
    source: str | None = None
    index: int = 0
    strength: float | None = 1.0
    strength_model: float | None = 1.0
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = 1.0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    host_names: Mapping[str, str] = field(default_factory=dict)
    weight_shape: tuple[int, ...] | None = None
    offset: tuple[int, int, int] | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    cause: PatchCause | None = None
    in_base: str | None = None


def patch_type_by_words(kept: object) -> PatchType:
    """The coarse type of an unknown kind of change, by the words in its keys and texts, such as `lora_up.weight`.

    Tensors are not printed for this, because printing waits for an accelerator.
    """
    try:
        words = " ".join(_words(kept, _DEEPEST))
    except Exception:  # noqa: BLE001 - the host's objects may raise anything
        return "unknown"
    return next((kind for word, kind in _WORDS if word in words), "unknown")


def _words(kept: object, depth: int) -> Iterator[str]:
    if isinstance(kept, str):
        yield kept
    elif isinstance(kept, Mapping) and depth:
        for key, value in kept.items():
            yield from _words(key, depth - 1)
            yield from _words(value, depth - 1)
    elif isinstance(kept, list | tuple) and depth:
        for value in kept:
            yield from _words(value, depth - 1)
