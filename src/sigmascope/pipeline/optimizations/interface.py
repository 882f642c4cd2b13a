"""What a kind of optimization is, what it decides by, and how it holds a setting of the whole process.

A `Kind` says when its choice is taken, how that is applied, and what it does to weights. `Circumstances` is all
that it looks at: the pipeline, the hardware, the user's wishes, the call, and the memory that the call takes.
Choices on several pipelines may hold one setting of the process at once: `ProcessSetting`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch

from sigmascope.pipeline.pipeline_parts import Call, Subject
from sigmascope.pipeline.plan import (
    IMAGE_EFFECTS,
    Choice,
    Hardware,
    ImageEffect,
    NotTaken,
    OptimizationConfig,
)

Change = Literal["dtype", "device", "layout"]
"""What a choice does to weights, and so what has to be put back."""
Undo = Callable[[], None]
Considered = Iterator[Choice | NotTaken]
NO_ACCELERATOR = "no accelerator"
T = TypeVar("T")


@dataclass(slots=True)
class Circumstances:
    """What is known while a plan is made. It grows: each kind sees what those before it chose.

    Attributes:
        room_bytes: What the device has for this pipeline, with headroom kept free; None: not known.
        denoiser_bytes: Activations of the denoiser, a rough count.
        vae_bytes: Peak of decoding at once; None: could not be told.
        least_vae_bytes: The same with whatever the VAE offers to need less: image by image, tile by tile.
        dtypes: Planned dtype of each model, by name.
        chosen: Choices so far.
        unavailable: What could not be reckoned, and why.
    """

    subject: Subject
    hardware: Hardware
    config: OptimizationConfig
    call: Call
    room_bytes: int | None = None
    denoiser_bytes: int | None = None
    vae_bytes: int | None = None
    least_vae_bytes: int | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    chosen: list[Choice] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)

    def has(self, *kinds: str) -> bool:
        """Whether a choice of one of these kinds was taken."""
        return any(choice.kind in kinds for choice in self.chosen)

    def allows(self, effect: ImageEffect) -> bool:
        """Whether that much may happen to the image."""
        return IMAGE_EFFECTS.index(effect) <= IMAGE_EFFECTS.index(self.config.image)

    @property
    def no_accelerator(self) -> str:
        """Why it runs on the CPU."""
        return self.hardware.absence or f"{NO_ACCELERATOR}: it is to run on the CPU"

    def why_not(self, kind: str, component: str, effect: ImageEffect) -> NotTaken | None:
        """A refusal for a choice that needs an accelerator and may do that much to the image; None: go on."""
        if not self.hardware.is_accelerator:
            return NotTaken(kind, component, self.no_accelerator)
        return self.too_much(kind, component, effect)

    def too_much(self, kind: str, component: str, effect: ImageEffect) -> NotTaken | None:
        """A refusal if that much may not happen to the image."""
        if self.allows(effect):
            return None
        return NotTaken(
            kind,
            component,
            f'it changes the image by {effect}, and the configuration allows "{self.config.image}"',
        )

    @property
    def total_bytes(self) -> int:
        """All weights as planned."""
        return sum(self.weights.values())

    @property
    def largest(self) -> tuple[str, int]:
        """The model with the most weights as planned, and how many bytes these are."""
        name = max(self.weights, key=lambda one: self.weights[one], default="")
        return name, self.weights.get(name, 0)

    @property
    def work_bytes(self) -> int:
        """What is needed at once beside weights: the denoiser's activations, or decoding, which come in turn.

        Decoding that does not fit at once is done in slices and tiles, before weights are moved for it.
        """
        return max(self.denoiser_bytes or 0, self.least_vae_bytes or 0)

    def as_mb(self, values: Mapping[str, int]) -> dict[str, float]:
        """Bytes by name in MiB."""
        return {name: value / 2**20 for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of choice.

    Attributes:
        name: As `Choice.kind` has it.
        consider: Choices for a pipeline, and reasons where there are none.
        apply: Do one of them to a pipeline by the calls of diffusers and torch. It may give what has to be undone
            besides the pipeline's own structure and weights, such as a flag of the process; done first.
        changes: What it does to weights.
        narrows: Whether values are lost by it.
    """

    name: str
    consider: Callable[[Circumstances], Considered]
    apply: Callable[[Any, Choice], Undo | None]
    changes: frozenset[Change] = frozenset()
    narrows: bool = False


@dataclass(eq=False, slots=True)
class _Hold(Generic[T]):
    before: T


class ProcessSetting(Generic[T]):
    """Put back as it was once nobody holds it any more, in whatever order they let go.

    Args:
        read: Gives the setting as it is.
        write: Makes it what was read.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None]) -> None:
        self._read = read
        self._write = write
        self._holds: list[_Hold[T]] = []

    def hold(self) -> Undo:
        """Note the setting before it is changed. What is returned lets go; the last to let go puts it back."""
        hold = _Hold(self._read())
        self._holds.append(hold)
        return lambda: self._let_go(hold)

    def _let_go(self, hold: _Hold[T]) -> None:
        place = self._holds.index(hold)
        later = self._holds[place + 1 :]
        self._holds.remove(hold)
        if later:
            later[0].before = hold.before
        else:
            self._write(hold.before)
