"""What is known of a run, as frozen values that outlive it. No torch here."""

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
from sigmascope.records.serialization import load_run, run_from_json, run_to_json, save_run

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
