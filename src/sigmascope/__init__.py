"""Know what your LoRA does and where your diffusion pipeline's time and memory go.

The public names are loaded when they are first used (PEP 562), so that `import sigmascope` stays light.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sigmascope.__about__ import __version__

if TYPE_CHECKING:
    from sigmascope.analysis.dump_comparison import compare_tensors
    from sigmascope.checkpoints.dump_folder import TensorDumps
    from sigmascope.checkpoints.tensor_dumps import load_tensors, save_tensors
    from sigmascope.integrations.diffusers.watch import watch
    from sigmascope.monitor.performance import (
        PerformanceMonitor,
        create_mmdit_performance_monitor,
        monitor_generation_performance,
    )
    from sigmascope.monitor.profile import profile_steps
    from sigmascope.monitor.recorder import stage, step
    from sigmascope.monitor.workflow import ModelLoadingMonitor, WorkflowMonitor
    from sigmascope.pipeline.encode_decode import decode_latents, encode_latents
    from sigmascope.pipeline.optimizer import OptimizationConfig, PipelineOptimizer
    from sigmascope.records.merge import merge_runs
    from sigmascope.records.performance import PerformanceMetrics
    from sigmascope.records.run import Run, Stage
    from sigmascope.records.serialization import load_run, save_run
    from sigmascope.reports.console import print_run
    from sigmascope.reports.trace import write_trace
    from sigmascope.stages.latent_encoding import (
        _analyze_latent_output,
        _analyze_vae_encoding_performance,
        _calculate_latent_generation_memory_change,
        analyze_latent_decoding_results,
        analyze_latent_generation_results,
        capture_latent_decoding_baseline,
        capture_latent_generation_baseline,
        print_encoding_event,
        print_latent_decoding_analysis_summary,
        print_latent_generation_analysis_summary,
        print_latent_generation_start,
    )
    from sigmascope.stages.lora_application import (
        analyze_lora_application_results,
        analyze_lora_patches,
        calculate_memory_change,
        capture_lora_baseline,
        print_lora_analysis_summary,
        track_model_identity_changes,
        track_model_placement_changes,
        track_weight_modifications,
    )
    from sigmascope.stages.text_encoding import (
        TextEncodingThresholds,
        analyze_text_encoding_results,
        capture_text_encoding_baseline,
        print_text_encoding_analysis_summary,
    )

_HOMES = {
    "ModelLoadingMonitor": "sigmascope.monitor.workflow",
    "OptimizationConfig": "sigmascope.pipeline.optimizer",
    "PerformanceMetrics": "sigmascope.records.performance",
    "PerformanceMonitor": "sigmascope.monitor.performance",
    "PipelineOptimizer": "sigmascope.pipeline.optimizer",
    "Run": "sigmascope.records.run",
    "Stage": "sigmascope.records.run",
    "TensorDumps": "sigmascope.checkpoints.dump_folder",
    "TextEncodingThresholds": "sigmascope.stages.text_encoding",
    "WorkflowMonitor": "sigmascope.monitor.workflow",
    "_analyze_latent_output": "sigmascope.stages.latent_encoding",
    "_analyze_vae_encoding_performance": "sigmascope.stages.latent_encoding",
    "_calculate_latent_generation_memory_change": "sigmascope.stages.latent_encoding",
    "analyze_latent_decoding_results": "sigmascope.stages.latent_encoding",
    "analyze_latent_generation_results": "sigmascope.stages.latent_encoding",
    "analyze_lora_application_results": "sigmascope.stages.lora_application",
    "analyze_lora_patches": "sigmascope.stages.lora_application",
    "analyze_text_encoding_results": "sigmascope.stages.text_encoding",
    "calculate_memory_change": "sigmascope.stages.lora_application",
    "capture_latent_decoding_baseline": "sigmascope.stages.latent_encoding",
    "capture_latent_generation_baseline": "sigmascope.stages.latent_encoding",
    "capture_lora_baseline": "sigmascope.stages.lora_application",
    "capture_text_encoding_baseline": "sigmascope.stages.text_encoding",
    "compare_tensors": "sigmascope.analysis.dump_comparison",
    "create_mmdit_performance_monitor": "sigmascope.monitor.performance",
    "decode_latents": "sigmascope.pipeline.encode_decode",
    "encode_latents": "sigmascope.pipeline.encode_decode",
    "load_run": "sigmascope.records.serialization",
    "load_tensors": "sigmascope.checkpoints.tensor_dumps",
    "merge_runs": "sigmascope.records.merge",
    "monitor_generation_performance": "sigmascope.monitor.performance",
    "print_encoding_event": "sigmascope.stages.latent_encoding",
    "print_latent_decoding_analysis_summary": "sigmascope.stages.latent_encoding",
    "print_latent_generation_analysis_summary": "sigmascope.stages.latent_encoding",
    "print_latent_generation_start": "sigmascope.stages.latent_encoding",
    "print_lora_analysis_summary": "sigmascope.stages.lora_application",
    "print_run": "sigmascope.reports.console",
    "print_text_encoding_analysis_summary": "sigmascope.stages.text_encoding",
    "profile_steps": "sigmascope.monitor.profile",
    "save_run": "sigmascope.records.serialization",
    "save_tensors": "sigmascope.checkpoints.tensor_dumps",
    "stage": "sigmascope.monitor.recorder",
    "step": "sigmascope.monitor.recorder",
    "track_model_identity_changes": "sigmascope.stages.lora_application",
    "track_model_placement_changes": "sigmascope.stages.lora_application",
    "track_weight_modifications": "sigmascope.stages.lora_application",
    "watch": "sigmascope.integrations.diffusers.watch",
    "write_trace": "sigmascope.reports.trace",
}

__all__ = [
    "ModelLoadingMonitor",
    "OptimizationConfig",
    "PerformanceMetrics",
    "PerformanceMonitor",
    "PipelineOptimizer",
    "Run",
    "Stage",
    "TensorDumps",
    "TextEncodingThresholds",
    "WorkflowMonitor",
    "__version__",
    "_analyze_latent_output",
    "_analyze_vae_encoding_performance",
    "_calculate_latent_generation_memory_change",
    "analyze_latent_decoding_results",
    "analyze_latent_generation_results",
    "analyze_lora_application_results",
    "analyze_lora_patches",
    "analyze_text_encoding_results",
    "calculate_memory_change",
    "capture_latent_decoding_baseline",
    "capture_latent_generation_baseline",
    "capture_lora_baseline",
    "capture_text_encoding_baseline",
    "compare_tensors",
    "create_mmdit_performance_monitor",
    "decode_latents",
    "encode_latents",
    "load_run",
    "load_tensors",
    "merge_runs",
    "monitor_generation_performance",
    "print_encoding_event",
    "print_latent_decoding_analysis_summary",
    "print_latent_generation_analysis_summary",
    "print_latent_generation_start",
    "print_lora_analysis_summary",
    "print_run",
    "print_text_encoding_analysis_summary",
    "profile_steps",
    "save_run",
    "save_tensors",
    "stage",
    "step",
    "track_model_identity_changes",
    "track_model_placement_changes",
    "track_weight_modifications",
    "watch",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sigmascope' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _OldModule(ModuleType):
    """A module of the last release: gives its names from where they are now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from sigmascope.moved import moved_name

        return moved_name(self.__name__, name)


class _OldPaths:
    """Finds the modules of the last release. It is asked last: no import of what is there passes by it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        if package != "sigmascope":
            return None
        from sigmascope.moved import MOVED, OLD_FOLDERS

        if old not in MOVED and old not in OLD_FOLDERS:
            return None
        # typeshed wants the base class of importlib.abc, which would be one more module loaded
        return ModuleSpec(fullname, self, is_package=old in OLD_FOLDERS)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is imported before a name is asked for."""


if not any(type(finder).__name__ == _OldPaths.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_OldPaths())
for _old in ("analysis.diagnostics.diagnose", "integrations.autostart.process"):
    # a folder was where a module is now, and Python looks for nothing below a module
    sys.modules.setdefault(f"sigmascope.{_old}", _OldModule(f"sigmascope.{_old}"))
