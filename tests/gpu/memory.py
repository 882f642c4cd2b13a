"""Little memory, and where it runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIB = 2**20


@contextmanager
def capped(device: torch.device, free_bytes: int) -> Iterator[None]:
    """Let the process have no more than this much more memory on its device; in RAM, for work on the checks.

    Raises:
        RuntimeError: The device is the CPU, and the system has no limits of address space.
    """
    if device.type == "cpu":
        with _capped_ram(free_bytes):
            yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.memory_reserved(device) + free_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def _capped_ram(free_bytes: int) -> Iterator[None]:
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a file of the kernel
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
