"""What a pipeline's call gives, where no VAE made it: latents, or pictures of a denoiser that works in pixels."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

_OUTCOME_NAMES: Final = ("images", "frames", "videos", "latents")
"""Under which the state of a modular pipeline holds its outcome."""


def outcome_of(result: object) -> Tensor | None:
    """The first tensor in what a pipeline gives; an array is seen as a tensor, without a copy. None: neither.

    Args:
        result: A pipeline's output, tuple, list, state of a modular pipeline, or bare tensor.
    """
    values = getattr(result, "values", None)
    if isinstance(values, Mapping):  # a modular pipeline's state
        return next(
            (found for name in _OUTCOME_NAMES if (found := outcome_of(values.get(name))) is not None), None
        )
    if isinstance(result, Mapping):
        result = tuple(result.values())
    while isinstance(result, tuple | list) and result:
        result = result[0]
    if isinstance(result, np.ndarray) and result.dtype.kind == "f" and result.flags.writeable:
        return torch.from_numpy(result)
    return result if isinstance(result, Tensor) else None
