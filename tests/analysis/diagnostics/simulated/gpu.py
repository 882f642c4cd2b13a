"""A device that real pipelines keep busy, though all that they compute is computed on the CPU.

Each operation that torch dispatches costs the host its launch and the device its arithmetic (torch's own FLOP formulas) on a
clock that nothing else moves, and its result takes memory until the host lets go of it. `.item()` waits for the device.
"""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sigmascope.probes import AcceleratorEvent, AllocatorBytes
from sigmascope.records.memory import AcceleratorMemory
from sigmascope.records.run import AcceleratorFacts

from .allocator import CachingAllocator

GIB = 2**30


class Event:
    """A mark in the device's queue."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu
        self._at_ns: int | None = None
        self.stream: int | None = None

    def record(self) -> bool:
        """Set it behind all that is queued."""
        self._at_ns = max(self._gpu.now_ns, self._gpu.queue_ends_ns)
        return True

    def query(self) -> bool:
        """Whether the device has come to it."""
        return self._at_ns is not None and self._at_ns <= self._gpu.now_ns

    def elapsed_seconds(self, end: "Event") -> float | None:
        """From this mark to the other."""
        return None if self._at_ns is None or end._at_ns is None else (end._at_ns - self._at_ns) / 1e9


class SimulatedGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The clock, the queue, the allocator, and what an accelerator tells of them.

    Args:
        total_gib: The device's size.
        scale: How many bytes each byte of a tensor counts for, since the pipelines are small.
        gflops: Arithmetic a second.
        launch_us: What an operation costs the host.
        shortest_us: What it costs the device at least.
    """

    kind = "cuda"
    untimed: str | None = None
    no_utilization: str | None = None
    absence: str | None = None

    def __init__(
        self,
        total_gib: float = 80.0,
        *,
        scale: int = 1,
        gflops: float = 10.0,
        launch_us: float = 5.0,
        shortest_us: float = 20.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_ns = self.queue_ends_ns = 0
        self.kernels: deque[tuple[int, int]] = deque(maxlen=4096)
        self.allocator = CachingAllocator()
        self.ticks: list[Any] = []
        self._total = round(total_gib * GIB)
        self._scale = scale
        self._gflops = gflops
        self._launch_seconds = launch_us / 1e6
        self._shortest_ns = round(1e3 * shortest_us)
        self._held: set[int] = set()
        self._flops_of: dict[tuple[Any, ...], int] = {}

    # --- time

    def __call__(self) -> int:
        """Nanoseconds, for a recorder's clock."""
        return self.now_ns

    def host_works(self, seconds: float) -> None:
        """Let the host do something else for so long."""
        self.now_ns += round(seconds * 1e9)
        for tick in self.ticks:
            tick(self.now_ns)

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        self.host_works(max(0, self.queue_ends_ns - self.now_ns) / 1e9)

    def _queue(self, nanoseconds: int) -> None:
        starts = max(self.now_ns, self.queue_ends_ns)
        self.queue_ends_ns = starts + nanoseconds
        self.kernels.append((starts, self.queue_ends_ns))

    # --- what torch does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.synchronize()
        elif not func.is_view:
            self.host_works(self._launch_seconds)
            self._queue(max(self._shortest_ns, round(self._flops(func, args, kwargs, result) / self._gflops)))
            for one in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(one, Tensor):
                    self._hold(one.untyped_storage())
        return result

    def _flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            return 0
        key = (func, *(one.shape for one in args if isinstance(one, Tensor)))
        if key not in self._flops_of:
            self._flops_of[key] = count(*args, **(kwargs or {}), out_val=result)
        return self._flops_of[key]

    def put(self, *modules: nn.Module) -> None:
        """Take the weights as lying on the device."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._hold(tensor.untyped_storage())

    def _hold(self, storage: UntypedStorage) -> None:
        address = storage._cdata
        if address in self._held:
            return
        self._held.add(address)
        block = self.allocator.allocate(self._scale * storage.nbytes())

        def let_go() -> None:
            self._held.discard(address)
            self.allocator.free(block)

        weakref.finalize(storage, let_go).atexit = False

    # --- what an accelerator is asked

    def device_count(self) -> int:
        """One."""
        return 1

    def devices(self) -> list[str]:
        """Its name."""
        return ["cuda:0"]

    def current_device(self) -> str | None:
        """The only one."""
        return "cuda:0"

    def memory(self, device: str) -> AcceleratorMemory:
        """The allocator's and the driver's view."""
        used = self.allocator.reserved
        return AcceleratorMemory(
            device, self.allocator.allocated, used, self._total, self._total - used, used
        )

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """The allocator's figures."""
        one = self.allocator
        return AllocatorBytes(one.allocated, one.reserved, one.peak_allocated, one.peak_reserved)

    def unavailable(self, device: str) -> Mapping[str, str]:
        """Nothing is."""
        return {}

    def reset_peak(self, device: str) -> str | None:
        """Let the peaks begin anew."""
        self.allocator.reset_peaks()
        return None

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """A mark."""
        return Event(self)

    def facts(self, device: str) -> AcceleratorFacts:
        """Its name and size."""
        return AcceleratorFacts(device, "Simulated", self._total, "0", "9.0")
