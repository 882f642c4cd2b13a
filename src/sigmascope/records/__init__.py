"""What is known of a run, as frozen values that outlive it. No torch here."""

from typing import TYPE_CHECKING

import lazy_loader

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

_WITH_JSON = ["load_run", "run_from_json", "run_to_json", "save_run"]
"""Loaded when they are first used (PEP 562): cattrs takes longer to import than the rest."""
__getattr__, __dir__, _ = lazy_loader.attach(__name__, submod_attrs={"serialization": _WITH_JSON})

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
