"""What training is fed: pictures of one size, in [-1, 1], with the numbers their random draws follow from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Pairs of pictures to train on; `height` and `width` are multiples of the model's `factor`.

    Attributes:
        source: What the model is given, in [-1, 1].
        target: What it should make of it, in [-1, 1].
        numbers: Of each sample in its epoch's stream. Noise and timesteps are drawn from these, so that a
            sample's draws do not depend on which process or batch it falls into.
        keys: Of each sample in its shard, for messages.
        epoch: That the samples belong to, from 0.
        mask: 1 where a pixel is valid, 0 elsewhere; None where the config names no mask.
        conditioning_images: In [-1, 1], by the config's `conditioning_images_keys`.
        conditioning_masks: In [0, 1], by the config's `conditioning_masks_keys`.
    """

    source: Float[Tensor, "batch 3 height width"]
    target: Float[Tensor, "batch 3 height width"]
    numbers: tuple[int, ...]
    keys: tuple[str, ...]
    epoch: int = 0
    mask: Float[Tensor, "batch 1 height width"] | None = None
    conditioning_images: Mapping[str, Float[Tensor, "batch 3 height width"]] = field(default_factory=dict)
    conditioning_masks: Mapping[str, Float[Tensor, "batch 1 height width"]] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many samples."""
        return len(self.numbers)
