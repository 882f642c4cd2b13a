"""What is known of a run, as frozen values that outlive it. No torch here."""

from typing import TYPE_CHECKING, Any

from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import (
    STAGES,
    AcceleratorFacts,
    ExceptionDetails,
    Finding,
    HostFacts,
    ModuleFacts,
    Run,
    Stage,
    Steps,
    TensorFacts,
)

if TYPE_CHECKING:
    from sigmascope.records.serialization import load_run, run_from_json, run_to_json, save_run

_WITH_JSON = frozenset({"load_run", "run_from_json", "run_to_json", "save_run"})
"""Loaded when they are first used (PEP 562): cattrs takes longer to import than the rest."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_JSON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sigmascope.records import serialization

    return getattr(serialization, name)


__all__ = [
    "STAGES",
    "AcceleratorFacts",
    "AcceleratorMemory",
    "AcceleratorPeak",
    "ExceptionDetails",
    "Finding",
    "HostFacts",
    "MemoryImpact",
    "MemorySnapshot",
    "ModuleFacts",
    "PeakMemory",
    "Run",
    "Stage",
    "Steps",
    "TensorFacts",
    "load_run",
    "run_from_json",
    "run_to_json",
    "save_run",
]
