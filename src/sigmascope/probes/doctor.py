"""The machine as Sigmascope sees it: what is there, what will be measured, and what will not, and why.

Which optional dependencies are installed is read from the package's own metadata (`extras_facts`).
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Final

import torch
from packaging.requirements import Requirement

from sigmascope.files import without_home
from sigmascope.probes.accelerators import Accelerator, detect_accelerator, why_no_devices
from sigmascope.probes.host import heap_in_use, host_facts, process_rss, system_memory
from sigmascope.probes.matmul_precision import matmul_precision
from sigmascope.probes.nvml import read_nvml
from sigmascope.probes.reading import attempt
from sigmascope.records.memory import AcceleratorMemory
from sigmascope.records.run import HostFacts

_SETTINGS: Final = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    "TORCH_LOGS",
)
"""Variables of the environment that change what a pipeline costs."""

_FOR_DEVELOPERS = frozenset({"test", "dev", "docs", "bench", "all"})


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing that Sigmascope measures: `reason` says why it will not, or how it will."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ExtraFacts:
    """One extra.

    Attributes:
        name: As in `sigmascope[name]`.
        versions: Of its packages; None: not installed. Those of the extras that it contains are among them.
    """

    name: str
    versions: dict[str, str | None]

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package, version in self.versions.items() if version is None]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `sigmascope doctor` shows.

    Attributes:
        host: Machine, libraries and devices.
        python: The interpreter's path.
        torch: Build and settings of PyTorch.
        memory: Of each device now.
        measurements: What will be measured.
        extras: Optional dependencies.
        settings: Variables of the environment that are set.
        advice: What to change, if anything.
    """

    host: HostFacts
    python: str
    torch: dict[str, str | int | bool | None]
    memory: tuple[AcceleratorMemory, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    extras: tuple[ExtraFacts, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)


def examine(accelerator: Accelerator | None = None) -> DoctorReport:
    """Look at this machine. Never raises; no device is initialised.

    Args:
        accelerator: What to ask about devices; None finds out.
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    measurements = tuple(_measurements(accelerator))
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    return DoctorReport(
        host=host_facts(accelerator),
        python=without_home(sys.executable),
        torch=_torch_facts(),
        memory=tuple(accelerator.memory(device) for device in accelerator.devices()),
        measurements=measurements,
        extras=tuple(extras_facts()),
        settings=settings,
        advice=tuple(_advice(accelerator, settings)),
    )


def _measurements(accelerator: Accelerator) -> Iterator[Measurement]:
    absent = accelerator.absence or (None if accelerator.devices() else why_no_devices(accelerator))
    rss, heap, ram = process_rss(), heap_in_use(), system_memory()
    yield Measurement("time of stages and steps", works=True, reason="the host's monotonic clock")
    yield _measurement("memory of the process", rss.reason, "resident set, sampled at most 10 times a second")
    yield _measurement("memory of the machine", ram.unavailable.get("ram_used_bytes"), "by psutil")
    yield _measurement("tensors on the CPU", heap.reason, "what malloc has given out, for leaks")
    yield _measurement("memory of devices", absent, "PyTorch's allocator, peaks kept apart for nested stages")
    yield _measurement(
        "time on the device",
        absent or accelerator.untimed,
        "events at the edges of steps, read without waiting",
    )
    yield _measurement(
        "utilisation of the device",
        absent or _why_no_utilization(accelerator),
        "NVML, at most 5 times a second",
    )


def _measurement(name: str, reason: str | None, how: str) -> Measurement:
    return Measurement(name, works=reason is None, reason=how if reason is None else reason)


def _why_no_utilization(accelerator: Accelerator) -> str | None:
    return accelerator.no_utilization or read_nvml(accelerator.devices()[0]).unavailable.get(
        "utilization_percent"
    )


def _torch_facts() -> dict[str, str | int | bool | None]:
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": str(matmul_precision()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "allocator": attempt(torch.cuda.get_allocator_backend).value if torch.version.cuda else None,
    }


def _advice(accelerator: Accelerator, settings: dict[str, str]) -> Iterator[str]:
    allocator = settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if accelerator.kind == "cuda" and accelerator.devices() and "expandable_segments" not in allocator:
        yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation if the driver supports it."
    if "cudaMallocAsync" in allocator:
        yield "With backend:cudaMallocAsync, PyTorch reports some peaks as 0: figures of reserved memory may be missing."
    if settings.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield "CUDA_LAUNCH_BLOCKING=1 makes every kernel launch wait: the times are not those of a normal run."
    if settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        yield "PYTORCH_NO_CUDA_MEMORY_CACHING switches the caching allocator off: no peaks, and slow allocations."


def extras_facts(distribution: str = "sigmascope") -> list[ExtraFacts]:
    """The extras that users install, in the order of the metadata. Never raises; empty without metadata."""
    return attempt(lambda: _extras(distribution)).value or []


def _extras(distribution: str) -> list[ExtraFacts]:
    requirements = [Requirement(text) for text in metadata.requires(distribution) or []]
    names = [
        name
        for name in metadata.metadata(distribution).get_all("Provides-Extra") or []
        if name not in _FOR_DEVELOPERS
    ]
    return [
        ExtraFacts(
            name,
            {
                package: _version(package)
                for package in _packages(name, requirements, distribution, frozenset())
            },
        )
        for name in names
    ]


def _version(package: str) -> str | None:
    return attempt(lambda: metadata.version(package)).value


def _packages(
    extra: str, requirements: list[Requirement], distribution: str, seen: frozenset[str]
) -> dict[str, None]:
    """What an extra brings, in order, with what the extras that it contains bring."""
    packages: dict[str, None] = {}
    for requirement in requirements:
        if not _belongs_to(requirement, extra):
            continue
        if requirement.name != distribution:
            packages[requirement.name] = None
        for contained in (
            sorted(requirement.extras - seen - {extra}) if requirement.name == distribution else ()
        ):
            packages |= _packages(contained, requirements, distribution, seen | {extra})
    return packages


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    """Whether it is the extra that asks for it, and this machine is one that it is meant for."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
