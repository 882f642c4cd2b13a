"""Little memory on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIB = 2**20


@contextmanager
def capped(device: torch.device, free_bytes: int) -> Iterator[None]:
    """Let PyTorch's allocator have no more than this much more memory on a GPU."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.memory_reserved(device) + free_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
