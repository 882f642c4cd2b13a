"""Samples of one size together, and then as tensors."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lbm.batches import Batch
from sigmascope.lbm.buckets import Size
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.shards.samples import Sample

VALID = 128
"""Grey levels from here on are valid: a JPEG's white is not quite white."""


class Buckets:
    """Samples that wait for others of their size."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: dict[Size, list[Sample]] = {}

    def add(self, sample: Sample) -> list[Sample] | None:
        """Take a sample in, and give the samples of its size when they are enough for a batch."""
        bucket = self._waiting.setdefault(sample.size, [])
        bucket.append(sample)
        return self._waiting.pop(sample.size) if len(bucket) == self._batch_size else None

    def take_rest(self) -> list[Sample] | None:
        """Give the unfinished batch whose first sample is the oldest, or None."""
        if not self._waiting:
            return None
        return self._waiting.pop(min(self._waiting, key=lambda size: self._waiting[size][0].number))

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the samples that wait."""
        return tuple(sorted(sample.number for bucket in self._waiting.values() for sample in bucket))


def collate(samples: list[Sample], config: LbmConfig, epoch: int) -> Batch:
    """Make a batch of samples of one size."""
    return Batch(
        source=_pictures(samples, config.source_key),
        target=_pictures(samples, config.target_key),
        numbers=tuple(sample.number for sample in samples),
        keys=tuple(sample.key for sample in samples),
        epoch=epoch,
        mask=_validity(samples, config.mask_key) if config.mask_key else None,
        conditioning_images={key: _pictures(samples, key) for key in config.conditioning_images_keys},
        conditioning_masks={key: _masks(samples, key) / 255.0 for key in config.conditioning_masks_keys},
    )


# In NumPy: these are too small to wake torch's threads for, which are the training step's.
def _pictures(samples: list[Sample], key: str) -> Float[Tensor, "batch 3 height width"]:
    stacked = np.stack([sample.pictures[key].transpose(2, 0, 1) for sample in samples], dtype=np.float32)
    return torch.from_numpy(stacked / np.float32(127.5) - np.float32(1))


def _validity(samples: list[Sample], key: str) -> Float[Tensor, "batch 1 height width"]:
    return (_masks(samples, key) >= VALID).float()


def _masks(samples: list[Sample], key: str) -> Float[Tensor, "batch 1 height width"]:
    return torch.from_numpy(np.stack([sample.masks[key][None] for sample in samples], dtype=np.float32))
