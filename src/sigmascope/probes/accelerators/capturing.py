"""Whether a graph is being captured, which waiting for the device would end with an error."""

from types import ModuleType
from typing import Any

import torch

from sigmascope.probes.reading import attempt


def is_capturing(kind: str) -> bool:
    """Whether the current stream of a device type is being captured into a graph. Never raises or initialises it.

    Args:
        kind: As torch calls it, such as "cuda"; types without graphs capture nothing.
    """
    backend: Any = getattr(torch, kind, None)
    return isinstance(backend, ModuleType) and attempt(lambda: _asked(backend)).value is True


def _asked(backend: Any) -> bool:
    return bool(backend.is_initialized() and backend.is_current_stream_capturing())
