"""The state of every random generator of this process: Python's, NumPy's, PyTorch's and the device's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Read the state of all generators.

    Args:
        device: That the process computes on; its own generator is read too.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the global one, which libraries use
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to what `random_state` read."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - as above
    torch.set_rng_state(state["torch"].cpu())
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


@contextmanager
def untouched_random_state(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, what follows draws as if it had not been."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(state, device)
