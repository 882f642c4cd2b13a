"""Copies between the host and a CUDA device that neither waits for, and what is made of them once they are there.

`copy_to_host` begins a copy, `Pending` is what will be made of some. A copy into memory that is not pinned would block, so
both directions go through pinned memory, which PyTorch keeps to use again. On other devices copies wait, and so does
`on_host`, once for many tensors.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from sigmascope.probes.accelerators import CAPTURED, is_capturing
from sigmascope.probes.reading import PROBE_ERRORS, attempt

T = TypeVar("T")
Other = TypeVar("Other")
K = TypeVar("K", bound=Hashable)

_LOOK_EVERY = 0.0005


class HostCopy:
    """A copy of a tensor on the CPU.

    Args:
        tensor: Where it comes to lie.
        has_arrived: Tells without waiting whether it is complete; raises where that cannot be asked.
    """

    __slots__ = ("_has_arrived", "tensor")

    def __init__(self, tensor: Tensor, has_arrived: Callable[[], bool] = lambda: True) -> None:
        self.tensor = tensor
        self._has_arrived = has_arrived

    def has_arrived(self) -> bool:
        """Whether it is complete. Never raises: from a device that failed meanwhile it never comes."""
        try:
            return self.ask()
        except PROBE_ERRORS:
            return False

    def ask(self) -> bool:
        """Whether it is complete.

        Raises:
            Exception: What the device says that failed meanwhile, or that a graph is being captured.
        """
        return self._has_arrived()


def copy_to_host(tensor: Tensor) -> HostCopy:
    """Copy what is on an accelerator; from a CUDA device without waiting."""
    if tensor.device.type != "cuda":
        return HostCopy(tensor.detach().cpu())
    stream = torch.cuda.current_stream(tensor.device)
    copy = tensor.detach().to("cpu", non_blocking=True)
    tensor.record_stream(stream)  # it may have been made on another, and be freed at once
    passed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    passed.record(stream)

    def has_passed() -> bool:
        if is_capturing("cuda"):  # asking would break the capture
            raise LookupError(CAPTURED)
        return bool(passed.query())

    return HostCopy(copy, has_passed)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to a device; to a CUDA device without waiting."""
    if device.type != "cuda":
        return values.to(device)
    pinned = attempt(values.pin_memory).value  # some systems allow only so much
    return values.to(device) if pinned is None else pinned.to(device, non_blocking=True)


def on_host(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """The same tensors with those of an accelerator on the CPU, in one copy for each device and dtype.

    Tensors that cannot be joined, as of a class that packs its values, stay where they are.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype], dict[K, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "meta"):
            groups[tensor.device, tensor.dtype][key] = tensor
    found = dict(tensors)
    for group in groups.values():
        found |= attempt(partial(_joined_on_host, group)).value or {}
    return found


def _joined_on_host(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    flat = [
        tensor.detach().flatten().view(torch.uint8) for tensor in tensors.values()
    ]  # not all dtypes can be joined
    parts = torch.split(torch.cat(flat).cpu(), [part.numel() for part in flat])
    return {
        key: part.view(tensor.dtype).view(tensor.shape)
        for (key, tensor), part in zip(tensors.items(), parts, strict=True)
    }


class Pending(Generic[T]):
    """What is made of copies once they are there, which is done once.

    Args:
        make: Makes it.
        copies: That it is made of, or what is made of others.
    """

    __slots__ = ("_copies", "_made", "_make")

    def __init__(self, make: Callable[[], T], copies: "Iterable[HostCopy | Pending[Any]]" = ()) -> None:
        self._make: Callable[[], T] | None = make
        self._copies = tuple(copies)
        self._made: T | None = None

    def has_arrived(self) -> bool:
        """Whether all copies are there. Does not wait, and never raises."""
        return all(copy.has_arrived() for copy in self._copies)

    def ask(self) -> bool:
        """The same, but raises where a copy cannot come: see `HostCopy.ask`."""
        return all(copy.ask() for copy in self._copies)

    def result(self) -> T:
        """Make it; waits for copies that are still on their way.

        Raises:
            Exception: What making it raises, which is tried again next time, or what a device says whose copy cannot come.
        """
        while not self.ask():
            time.sleep(_LOOK_EVERY)
        if self._make is not None:
            self._made = self._make()
            self._make, self._copies = None, ()
        return cast(T, self._made)

    def then(self, make: Callable[[T], Other]) -> "Pending[Other]":
        """What is made of it in turn."""
        return Pending(lambda: make(self.result()), self._copies)
