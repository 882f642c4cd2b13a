"""All that a kind of choice looks at when it decides: pipeline, hardware, wishes, the call, and the memory it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sigmascope.pipeline.optimizing.config import OptimizationConfig
from sigmascope.pipeline.optimizing.hardware import Hardware
from sigmascope.pipeline.optimizing.plan import IMAGE_EFFECTS, Choice, ImageEffect, NotTaken
from sigmascope.pipeline.optimizing.subject import Call, Subject

NO_ACCELERATOR = "no accelerator"


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
