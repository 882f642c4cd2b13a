"""What becomes of one module of a LoRA file on a model."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Reason = Literal[
    "other_architecture",
    "other_shape",
    "transposed",
    "text_encoder_missing",
    "part_missing",
    "prefix",
    "block_missing",
    "twice",
    "unknown",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    """One module.

    Attributes:
        name: As the file has it.
        kind: `lora` for plain factors, else `loha`, `lokr`, `tucker`, `dora`, `diff`, `set`, `oft`, `boft` or `glora`.
        shape: Of the weight that it is made for; () where its tensors do not tell.
        part: Of the model: `denoiser`, `text_encoder`, …; as its name says.
        rank: Of its factors; None where it has none.
        alpha: As stored in the file; None where there is none, and then the scale is 1.
        scale: What its factors' product is multiplied with; None unless the factors are plain and were read.
        norm: ‖ΔW‖ at strength 1; None where it was not read, is not finite, or depends on the model's weight.
        layers: The model's weights that it changes: one, or several where it is fused and the model is not.
        model_shape: Of the first of those.
        reason: Why it changes none; None where it does.
        detail: The same in words.
        nearest: Names in the model that are nearest to its own, where it changes none.
        finite: Whether all its numbers are; None where they were not read.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    part: str
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = None
    norm: float | None = None
    layers: tuple[str, ...] = ()
    model_shape: tuple[int, ...] | None = None
    reason: Reason | None = None
    detail: str | None = None
    nearest: tuple[str, ...] = ()
    finite: bool | None = None

    @property
    def matched(self) -> bool:
        """Whether it changes a weight of the model."""
        return self.reason is None

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        listed = {name: list(getattr(self, name)) for name in ("shape", "layers", "nearest")}
        model_shape = None if self.model_shape is None else list(self.model_shape)
        return asdict(self) | listed | {"model_shape": model_shape, "matched": self.matched}
