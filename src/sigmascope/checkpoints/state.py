"""Write PyTorch checkpoints whole or not at all."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from sigmascope.records.atomic import atomic_path


def save_torch(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` with `torch.save`: to a temporary file, flushed, renamed over the target.

    Args:
        path: The target (`.ckpt`, `.pt`).
        state: Tensors, numbers, texts and containers of them, so that `weights_only=True` reads it.

    Raises:
        WriteError: The target cannot be written; it is as it was before.
    """
    with atomic_path(path) as temporary, temporary.open("r+b") as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError as error:
            # After a refused write PyTorch finds its archive unfinished, and hides the reason behind that.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
