"""Know what your LoRA does and where your diffusion pipeline's time and memory go.

The public names are loaded when they are first used (PEP 562), so that `import sigmascope` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sigmascope.__about__ import __version__

if TYPE_CHECKING:
    from sigmascope.analysis.tensors import compare_tensors
    from sigmascope.checkpoints.dump_folder import TensorDumps
    from sigmascope.checkpoints.tensor_dumps import load_tensors, save_tensors
    from sigmascope.monitor.performance import (
        PerformanceMonitor,
        create_mmdit_performance_monitor,
        monitor_generation_performance,
    )
    from sigmascope.monitor.workflow import ModelLoadingMonitor, WorkflowMonitor
    from sigmascope.records.performance import PerformanceMetrics
    from sigmascope.records.run import Run, Stage
    from sigmascope.records.serialization import load_run
    from sigmascope.stages.text_encoding import (
        TextEncodingThresholds,
        analyze_text_encoding_results,
        capture_text_encoding_baseline,
        print_text_encoding_analysis_summary,
    )

_HOMES = {
    "ModelLoadingMonitor": "sigmascope.monitor.workflow",
    "PerformanceMetrics": "sigmascope.records.performance",
    "PerformanceMonitor": "sigmascope.monitor.performance",
    "Run": "sigmascope.records.run",
    "Stage": "sigmascope.records.run",
    "TensorDumps": "sigmascope.checkpoints.dump_folder",
    "TextEncodingThresholds": "sigmascope.stages.text_encoding",
    "WorkflowMonitor": "sigmascope.monitor.workflow",
    "analyze_text_encoding_results": "sigmascope.stages.text_encoding",
    "capture_text_encoding_baseline": "sigmascope.stages.text_encoding",
    "compare_tensors": "sigmascope.analysis.tensors",
    "create_mmdit_performance_monitor": "sigmascope.monitor.performance",
    "load_run": "sigmascope.records.serialization",
    "load_tensors": "sigmascope.checkpoints.tensor_dumps",
    "monitor_generation_performance": "sigmascope.monitor.performance",
    "print_text_encoding_analysis_summary": "sigmascope.stages.text_encoding",
    "save_tensors": "sigmascope.checkpoints.tensor_dumps",
}

__all__ = [
    "ModelLoadingMonitor",
    "PerformanceMetrics",
    "PerformanceMonitor",
    "Run",
    "Stage",
    "TensorDumps",
    "TextEncodingThresholds",
    "WorkflowMonitor",
    "__version__",
    "analyze_text_encoding_results",
    "capture_text_encoding_baseline",
    "compare_tensors",
    "create_mmdit_performance_monitor",
    "load_run",
    "load_tensors",
    "monitor_generation_performance",
    "print_text_encoding_analysis_summary",
    "save_tensors",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sigmascope' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
