"""What is to be done to a pipeline, what was considered and not taken, and why."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from sigmascope import units
from sigmascope.pipeline.optimizing.hardware import Hardware
from sigmascope.records.facts import JsonScalar

ImageEffect = Literal["none", "rounding", "precision", "approximation"]
IMAGE_EFFECTS: Final[tuple[ImageEffect, ...]] = ("none", "rounding", "precision", "approximation")
"""What a choice does to the image, the least first; see `OptimizationConfig.image`."""

Gain = Literal["speed", "memory"]
PIPELINE: Final = "pipeline"
"""The component of a choice that concerns all of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing to do to a pipeline.

    Attributes:
        kind: Which kind of choice, such as "precision".
        component: The pipeline's name of what it is done to, or "pipeline".
        call: The call of diffusers or torch that does the same by hand.
        reason: Why, with numbers.
        expected: What it shall bring, in words.
        gains: Whether it shall bring speed or memory.
        image: What it does to the image.
        options: Its parameters.
        numbers: What was reckoned, such as `mb_before` and `mb_after`.
        necessary: Without it the pipeline is not expected to run on the device at all.
        ram_mb: RAM that keeping the originals for an exact undo takes; 0: they are not needed.
    """

    kind: str
    component: str
    call: str
    reason: str
    expected: str
    gains: Gain
    image: ImageEffect
    options: Mapping[str, JsonScalar] = field(default_factory=dict)
    numbers: Mapping[str, JsonScalar] = field(default_factory=dict)
    necessary: bool = False
    ram_mb: float = 0.0

    @property
    def name(self) -> str:
        """Kind and component, which tell the choices of a plan apart."""
        return f"{self.kind} of {self.component}"


@dataclass(frozen=True, slots=True)
class NotTaken:
    """What was considered and left."""

    kind: str
    component: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reckoning:
    """Memory in MiB as far as it can be told beforehand. None: unknown, with the reason in `unavailable`.

    Attributes:
        weights_mb: Of each component as it is, by name.
        planned_weights_mb: The same with the plan's number formats.
        denoiser_mb: Activations of the denoiser at work: a rough count of the tensors that are alive.
        vae_mb: Peak of decoding at once, from the layers that the VAE's configuration describes.
        room_mb: What the device has for this pipeline.
    """

    weights_mb: Mapping[str, float] = field(default_factory=dict)
    planned_weights_mb: Mapping[str, float] = field(default_factory=dict)
    denoiser_mb: float | None = None
    vae_mb: float | None = None
    room_mb: float | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Choices in the order in which they are applied. `str(plan)` explains it."""

    pipeline: str
    architecture: str | None
    hardware: Hardware
    choices: tuple[Choice, ...] = ()
    not_taken: tuple[NotTaken, ...] = ()
    memory: Reckoning = field(default_factory=Reckoning)

    def without(self, names: Iterable[str], reason: str = "left out") -> "Plan":
        """The plan without the choices of these names or kinds.

        Args:
            names: Such as "precision" or "precision of vae".
            reason: For what is left out.
        """
        dropped = set(names)
        gone = [one for one in self.choices if one.name in dropped or one.kind in dropped]
        kept = tuple(one for one in self.choices if one not in gone)
        left = (*self.not_taken, *(NotTaken(one.kind, one.component, reason) for one in gone))
        return replace(self, choices=kept, not_taken=left)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(plan: Plan) -> Iterable[str]:
    yield f"{plan.pipeline} ({plan.architecture or 'architecture unknown'}) on {plan.hardware}"
    needed = sum(plan.memory.planned_weights_mb.values())
    room = plan.memory.room_mb
    yield f"Weights {units.mebibytes(needed)} MB as planned, room {'-' if room is None else units.mebibytes(room)} MB"
    for number, choice in enumerate(plan.choices, start=1):
        yield f"{number}. {choice.name}: {choice.call}"
        yield f"   {choice.reason} Expected: {choice.expected}. Image: {choice.image}."
    if plan.not_taken:
        yield "Not taken:"
    for left in plan.not_taken:
        yield f"- {left.kind} of {left.component}: {left.reason}"
