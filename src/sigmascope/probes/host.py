"""Facts about the machine and the software on it, and how much of its processor other programs use."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from sigmascope.probes.accelerators import Accelerator, detect_accelerator, why_no_devices
from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.run import HostFacts

LIBRARIES = (
    "sigmascope",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "xformers",
    "triton",
    "flash-attn",
    "sageattention",
    "bitsandbytes",
    "torchao",
    "optimum-quanto",
    "gguf",
)
"""Distributions whose version can change what a pipeline costs or makes."""

# Fields of the processor's times that are no use of it, or are in others already.
_IDLE = ("idle", "iowait")
_COUNTED_ELSEWHERE = ("guest", "guest_nice")  # Linux has them in user and nice already


def host_facts(accelerator: Accelerator | None = None) -> HostFacts:
    """CPU, RAM, system, Python, library versions and accelerators. Never raises, imports no library.

    Args:
        accelerator: What to ask about devices; None finds out (`detect_accelerator`).
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    readings: dict[str, Reading[Any]] = {
        "cpu_model": attempt(_cpu_model),
        "cpu_count_logical": _processor_count(psutil.cpu_count),
        "cpu_count_physical": _processor_count(lambda: psutil.cpu_count(logical=False)),
        "ram_total_bytes": attempt(lambda: int(psutil.virtual_memory().total)),
        "os": attempt(platform.platform),
        "python_version": attempt(platform.python_version),
    }
    unavailable = {name: reading.reason for name, reading in readings.items() if reading.reason is not None}
    devices = accelerator.devices()
    if not devices:
        unavailable["accelerators"] = why_no_devices(accelerator)
    return HostFacts(
        **{name: reading.value for name, reading in readings.items()},
        libraries=_library_versions(),
        accelerators=tuple(accelerator.facts(device) for device in devices),
        unavailable=unavailable,
    )


def _cpu_model() -> str:
    """The processor's name as its maker writes it.

    Raises:
        LookupError: The system does not tell.
    """
    if platform.system() == "Linux":
        return _cpu_model_of_linux(Path("/proc/cpuinfo").read_text())
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    name = platform.processor()
    if not name:
        raise LookupError("the system does not name its processor")
    return name


def _cpu_model_of_linux(cpuinfo: str) -> str:
    """x86 says "model name"; Arm boards say "Model" or "Hardware", Arm servers nothing."""
    fields = dict(reversed([_cpuinfo_field(line) for line in cpuinfo.splitlines() if ":" in line]))
    for name in ("model name", "Model", "Hardware", "cpu model", "cpu"):
        if fields.get(name):
            return fields[name]
    raise LookupError("/proc/cpuinfo does not name the processor")


def _cpuinfo_field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _processor_count(count: Callable[[], int | None]) -> Reading[int]:
    reading = attempt(count)
    if reading.value is None:
        return Reading(None, reading.reason or "the system does not tell")
    return Reading(reading.value)


def _library_versions() -> dict[str, str]:
    """Versions from the installed metadata; ComfyUI, which is not installed, from what is loaded."""
    versions = {}
    for name in LIBRARIES:
        version = attempt(lambda name=name: metadata.version(name)).value  # type: ignore[misc]
        if version is not None:
            versions[name] = version
    comfyui = getattr(sys.modules.get("comfyui_version"), "__version__", None)
    return versions if comfyui is None else versions | {"comfyui": str(comfyui)}


@dataclass(frozen=True, slots=True)
class CpuMoment:
    """What was used up to a moment. Seconds of one processor thread.

    Attributes:
        at: On the clock that never goes back.
        machine: By everybody, and by what runs beside this machine on the same host (steal).
        own: By this process, all of its threads.
    """

    at: float
    machine: float
    own: float


def cpu_moment() -> Reading[CpuMoment]:
    """What was used up to now (some 50 µs). Never raises."""
    return attempt(_read_cpu_moment)


def _read_cpu_moment() -> CpuMoment:
    times = psutil.cpu_times()._asdict()
    machine = sum(value for name, value in times.items() if name not in (*_IDLE, *_COUNTED_ELSEWHERE))
    return CpuMoment(time.monotonic(), machine, time.process_time())


def others_share(before: CpuMoment, after: CpuMoment) -> float | None:
    """The share of all processor threads that others used in between, 0 to 1; None if no time passed.

    The system counts in hundredths of a second: over less than a second the share is rough.
    """
    room = (after.at - before.at) * (os.cpu_count() or 1)
    if room <= 0:
        return None
    used = (after.machine - before.machine) - (after.own - before.own)
    return min(max(used / room, 0.0), 1.0)
