"""What a profiler saw of chosen steps, block by block."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sigmascope.records.run import Stage
from sigmascope.records.structure import from_plain

PROFILES: Final = "profiles"
"""The fact of a stage in which its `StepsProfile`s lie."""


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One block of the denoiser in all steps that were profiled.

    Attributes:
        name: Its path in the denoiser; "" is the denoiser as a whole.
        class_name: Of the module.
        calls: How often it ran.
        cpu_seconds: From its beginning to its end on the host, all inside included. On an accelerator that is the
            time to send the work, not to do it.
        self_cpu_seconds: The part of it outside of all operators: Python, hooks and dispatch.
        device_seconds: Of the kernels that it started; None without an accelerator.
        allocated_bytes: All that it allocated, also what was freed again at once.
        peak_growth_bytes: How far the memory in use grew above that at the beginning of a call, at most.
    """

    name: str
    class_name: str
    calls: int
    cpu_seconds: float
    self_cpu_seconds: float
    device_seconds: float | None = None
    allocated_bytes: int | None = None
    peak_growth_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """One operator in all steps that were profiled, without those that it called itself.

    Attributes:
        name: As torch has it, such as "aten::addmm".
        calls: How often it ran.
        self_cpu_seconds: On the host.
        self_device_seconds: Of its own kernels; None without an accelerator.
    """

    name: str
    calls: int
    self_cpu_seconds: float
    self_device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StepsProfile:
    """Sums over the steps that were profiled. Profiled steps are slower than others.

    Attributes:
        class_name: Of the denoiser.
        steps: Which of its forward calls, counted from 1.
        whole: All of the denoiser.
        blocks: Its parts in the order in which they first ran, none inside another.
        operators: The most expensive ones first.
        device: Whose kernels and memory these are; None: the host's.
        traces: Files with the whole trace, one a step, for ui.perfetto.dev.
        unavailable: What could not be seen, with the reason.
    """

    class_name: str
    steps: tuple[int, ...] = ()
    whole: BlockProfile | None = None
    blocks: tuple[BlockProfile, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()
    device: str | None = None
    traces: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


def profiles_of(stage: Stage) -> tuple[StepsProfile, ...]:
    """The profiles that were taken during a stage.

    Raises:
        ValueError: The record is damaged; the message says where.
    """
    return tuple(from_plain(one, StepsProfile, PROFILES) for one in stage.facts.get(PROFILES) or ())
