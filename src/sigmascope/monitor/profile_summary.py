"""From a profiler's events to sums for each block and each operator."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch._C._autograd import DeviceType

from sigmascope.monitor.profile_blocks import LABEL
from sigmascope.records.profile import BlockProfile, OperatorProfile

MOST_OPERATORS: Final = 30
_MEMORY: Final = "[memory]"


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    cpu_us: float = 0.0
    self_cpu_us: float = 0.0
    device_us: float = 0.0


@dataclass(slots=True)
class ProfileSums:
    """Grows by one profiled step after another.

    Attributes:
        has_device: Whether there are kernels on an accelerator.
    """

    has_device: bool
    blocks: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    operators: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    allocated: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    growth: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kernel_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, profiler: Any) -> None:
        """Take a `torch.profiler.profile` that has stopped."""
        for event in profiler.events():
            if event.device_type == DeviceType.CPU:
                self._add_event(event)
        self._add_memory(list(profiler.profiler.kineto_results.events()))

    def device(self) -> str | None:
        """The device on which kernels ran longest, which need not be the current one; None if none ran."""
        return f"cuda:{max(self.kernel_us, key=self.kernel_us.__getitem__)}" if self.kernel_us else None

    def whole(self, class_name: str) -> BlockProfile | None:
        """The denoiser itself; None if it was never seen."""
        return self._block("", class_name) if "" in self.blocks else None

    def all_blocks(self, class_names: Mapping[str, str]) -> tuple[BlockProfile, ...]:
        """The blocks that ran, in the order in which they began.

        Args:
            class_names: By path.
        """
        return tuple(self._block(path, class_names[path]) for path in self.blocks if path in class_names)

    def top_operators(self) -> tuple[OperatorProfile, ...]:
        """The most expensive operators: by the device's time where there is one."""
        by_cost = sorted(self.operators.items(), key=lambda item: self._cost(item[1]), reverse=True)
        return tuple(
            OperatorProfile(
                name, found.calls, found.self_cpu_us / 1e6, found.device_us / 1e6 if self.has_device else None
            )
            for name, found in by_cost[:MOST_OPERATORS]
        )

    def _add_event(self, event: Any) -> None:
        is_mark = event.name.startswith(LABEL)
        found = self.blocks[event.name.removeprefix(LABEL)] if is_mark else self.operators[event.name]
        found.calls += 1
        found.cpu_us += event.cpu_time_total
        found.self_cpu_us += event.self_cpu_time_total
        if not is_mark:
            for kernel in event.kernels:
                self.kernel_us[kernel.device] += kernel.duration
        events = _below(event) if is_mark else (event,)
        found.device_us += sum(_device_us(one) for one in events)

    def _add_memory(self, events: list[Any]) -> None:
        kind = DeviceType.CUDA if self.has_device else DeviceType.CPU
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in events
            if event.name() == _MEMORY and event.device_type() == kind
        )
        for event in events:
            if event.name().startswith(LABEL) and event.device_type() == DeviceType.CPU:
                path, start = event.name().removeprefix(LABEL), event.start_ns()
                inside = [size for at, size in changes if start <= at <= start + event.duration_ns()]
                self.allocated[path] += sum(size for size in inside if size > 0)
                self.growth[path] = max(self.growth[path], _highest_sum(inside))

    def _cost(self, found: _Sum) -> float:
        return found.device_us if self.has_device else found.self_cpu_us

    def _block(self, path: str, class_name: str) -> BlockProfile:
        found = self.blocks[path]
        return BlockProfile(
            path,
            class_name,
            found.calls,
            found.cpu_us / 1e6,
            found.self_cpu_us / 1e6,
            found.device_us / 1e6 if self.has_device else None,
            self.allocated[path],
            self.growth[path],
        )


def _below(event: Any) -> Iterator[Any]:
    """An event and all that it called, without recursion: traces are deep."""
    waiting = [event]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += one.cpu_children


def _device_us(event: Any) -> float:
    """Of the kernels that an event started itself. A mark's own shadow on the device is no kernel."""
    return float(sum(kernel.duration for kernel in event.kernels if not kernel.name.startswith(LABEL)))


def _highest_sum(changes: Iterable[int]) -> int:
    """The highest of the running sums, at least 0."""
    highest = running = 0
    for change in changes:
        running += change
        highest = max(highest, running)
    return highest
