"""Import paths of the last release. They work until the next one, with a DeprecationWarning that names the new path.

`MOVED` is the whole of it: an old module, and the modules where its names are now, in the order in which they are
looked through. The package finds old modules when nothing else of that name is there; an old module that is still
there and has lost some names looks them up in its `__getattr__`.
"""

import os
import sys
import warnings
from importlib import import_module
from typing import Any, Final

_PACKAGE: Final = "sigmascope."
MOVED: Final = {
    "analysis.bench_summary": "analysis.run_figures",
    "analysis.compare": "analysis.generations",
    "analysis.compare_report": "analysis.run_comparison",
    "analysis.compare_runs": "analysis.run_comparison",
    "analysis.compare_steps": "analysis.run_comparison",
    "analysis.diagnostics.diagnose": "analysis.diagnostics",
    "analysis.dump_comparison": "analysis.tensor_comparison",
    "analysis.dump_results": "analysis.tensor_comparison",
    "analysis.dumps": "analysis.tensor_comparison",
    "analysis.layout_candidates": "analysis.tensor_layouts",
    "analysis.leaks": "analysis.memory analysis.run_figures",
    "analysis.model_consistency": "analysis.diagnostics",
    "analysis.peak_owners": "analysis.memory",
    "analysis.percentiles": "analysis.run_figures",
    "analysis.regression": "analysis.run_comparison",
    "analysis.run_differences": "analysis.run_comparison",
    "analysis.score": "analysis.generations",
    "analysis.stage_findings": "analysis.diagnostics",
    "analysis.tensor_measuring": "analysis.tensor_errors",
    "analysis.tensor_results": "analysis.tensor_comparison",
    "analysis.tensors": "analysis.tensor_comparison",
    "analysis.tolerances": "analysis.tensor_errors",
    "analysis.work": "analysis.run_comparison",
    "checkpoints.dump_folder": "checkpoints.tensor_dumps",
    "checkpoints.dump_index": "checkpoints.tensor_dumps",
    "checkpoints.dump_metadata": "checkpoints.tensor_dumps",
    "checkpoints.files": "checkpoints.checkpoint",
    "checkpoints.flattening": "checkpoints.tensor_dumps",
    "checkpoints.numpy_arrays": "checkpoints.tensor_dumps",
    "checkpoints.quantisation": "checkpoints.reader",
    "integrations.autostart.process": "integrations.autostart",
    "lbm.basing.adaptation": "lbm.base",
    "lbm.basing.baseline": "lbm.base",
    "lbm.image_errors": "lbm.image_validation",
    "lbm.model": "lbm.config",
    "lbm.pocket.bench": "lbm.pocket.demo",
    "lbm.pocket.shards": "lbm.make_shards",
    "lbm.train": "lbm.training.train lbm.training.metrics",
    "lbm.training_terms": "lbm.training.objective",
    "lora.attach": "lora.apply",
    "lora.combine": "lora.merge lora.resize",
    "lora.file_size": "lora.budget",
    "lora.formats": "lora.reader lora.writer",
    "lora.inspection.lora_comparison": "lora.compare",
    "lora.inspection.strength": "lora.linalg",
    "lora.merge": "lora.apply",
    "lora.merging.merge_methods": "lora.merge lora.resize",
    "lora.merging.reduced_module": "lora.resize",
    "lora.merging.reduction": "lora.resize",
    "lora.merging.reduction_report": "lora.resize",
    "lora.merging.sparse_merging": "lora.merge",
    "lora.models.layout": "lora.families lora.fingerprint",
    "lora.models.pair_options": "lora.pairs",
    "lora.models.pairs": "lora.pairs",
    "lora.names.alignment": "lora.alignment",
    "lora.names.naming": "lora.module_names",
    "lora.numerics.full_rank": "lora.decompose",
    "lora.ranking.allocation": "lora.budget",
    "lora.ranking.budget": "lora.budget",
    "lora.ranking.layer_weights": "lora.budget",
    "lora.ranking.rank_methods": "lora.ranks",
    "lora.ranking.rank_rules": "lora.ranks",
    "lora.ranking.rank_spec": "lora.ranks",
    "lora.ranking.sizes": "units",
    "lora.ranking.spectrum": "lora.linalg",
    "lora.ranking.storage_cost": "lora.budget",
    "lora.spectrum": "lora.linalg",
    "lora.svd": "lora.decompose",
    "lora.validation.reconstruction": "lora.validate",
    "lora.validation.validation_picture": "lora.validate",
    "lora.verdict": "lora.compatibility",
    "monitor.context": "monitor.recorder",
    "monitor.hooks": "monitor.recorder",
    "monitor.live": "monitor.recorder",
    "monitor.profiling": "monitor.profile",
    "monitor.request": "monitor.generation",
    "monitor.step_progress": "monitor.live_line",
    "monitor.workflow_latents": "monitor.workflow",
    "monitor.workflow_lora": "monitor.workflow",
    "monitor.workflow_steps": "monitor.workflow",
    "monitor.workflow_text": "monitor.workflow",
    "pipeline.benching.diffusers_subject": "pipeline.bench",
    "pipeline.benching.loading": "pipeline.bench",
    "pipeline.benching.results": "pipeline.bench",
    "pipeline.benching.subject": "pipeline.bench",
    "pipeline.decode": "pipeline.encode_decode",
    "pipeline.encode": "pipeline.encode_decode",
    "pipeline.optimizing.config": "pipeline.plan",
    "pipeline.optimizing.hardware": "pipeline.plan",
    "pipeline.optimizing.images": "pipeline.measure",
    "pipeline.optimizing.measurement": "pipeline.measure",
    "pipeline.optimizing.plan": "pipeline.plan",
    "pipeline.optimizing.settings": "pipeline.optimizer",
    "pipeline.prediction": "pipeline.peak_prediction",
    "pipeline.prediction_learning": "pipeline.peak_prediction",
    "probes.adapters.applied": "probes.applied_patch",
    "probes.architecture": "probes.models",
    "probes.cpu_load": "probes.host",
    "probes.fingerprints": "probes.tensors",
    "probes.memory": "probes.host",
    "probes.modules": "probes.models",
    "probes.pipelines": "probes.models",
    "probes.process_memory": "probes.host",
    "probes.samples": "probes.tensors",
    "records.atomic": "files",
    "records.benchmark": "records.performance",
    "records.facts": "records.run",
    "records.finding": "records.run",
    "records.host": "records.run",
    "records.memory_over_time": "records.performance",
    "records.pipeline": "records.run",
    "records.profile": "records.performance",
    "records.requests": "records.performance",
    "records.stage_seconds": "records.run",
    "records.steps": "records.run",
    "records.typed": "records.memory",
    "records.utilization": "records.performance",
    "reports.profile": "reports.console",
    "stages.latent_decoding": "stages.latent_encoding",
    "stages.latents.typed": "stages.schema",
    "stages.lora.typed": "stages.schema",
    "stages.lora.typed_models": "stages.schema",
    "stages.text.thresholds": "stages.text_validation",
    "stages.text.typed": "stages.schema",
    "stages.typed": "stages.schema",
}
OLD_FOLDERS: Final = frozenset(old.rpartition(".")[0] for old in MOVED)
_GIVES_ONLY: Final = {
    "analysis.diagnostics.diagnose": ("diagnose",),
    "integrations.autostart.process": ("start_from_environment",),
}
"""Old modules that stand in `sys.modules` from the start. What looks for a name through all modules, as pickle
does, is to find no more in them than was asked for."""
_IN_STARTUP_FILES: Final = "integrations.autostart.process"
"""What the startup files for SIGMASCOPE=1 imported. The program has no part in it: a warning would be for nobody."""
_RENEW: Final = "the startup file is the last release's; `sigmascope watch --install` renews it."

_RENAMED: Final = {
    "BaselineReport": "BaseCheck",
    "PictureErrors": "ImageErrors",
    "ReducedModule": "ResizedModule",
    "StoredChange": "RoundedFactors",
    "UnitedLoras": "AlignedLoras",
    "combine_loras": "merge_loras",
    "run_baseline": "check_base",
    "understand_names": "parse_names",
    "unite": "align_all",
}


def moved_name(module: str, name: str) -> Any:
    """What a name of an old module is now.

    Args:
        module: The old module's whole name.
        name: What was imported from it.

    Raises:
        AttributeError: There was no such name.
    """
    old = module.removeprefix(_PACKAGE)
    if name in _GIVES_ONLY.get(old, (name,)):
        for home in MOVED.get(old, "").split():
            new = import_module(_PACKAGE + home)
            name = _RENAMED.get(name, name)
            if hasattr(new, name):
                there = getattr(new, name)
                defined_in = str(getattr(there, "__module__", ""))  # a home may only import the name
                _tell(module, defined_in if defined_in.startswith(_PACKAGE) else _PACKAGE + home, name)
                return there
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _tell(module: str, home: str, name: str) -> None:
    if module == _PACKAGE + _IN_STARTUP_FILES:
        if sys.stderr is not None and os.environ.get("SIGMASCOPE_QUIET") in (None, "0"):
            sys.stderr.write(f"Sigmascope: {_RENEW}\n")
        return
    warnings.warn(
        f"{module}.{name} is {home}.{name} now; the old path goes with the next release.",
        DeprecationWarning,
        stacklevel=4,
    )
