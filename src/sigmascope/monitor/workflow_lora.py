"""LoRA application on a `WorkflowMonitor`: the stage's functions, with what the monitor knows filled in."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from sigmascope.monitor.workflow_steps import WorkflowSteps
from sigmascope.probes import Accelerator
from sigmascope.records.run import Stage
from sigmascope.stages import lora_application
from sigmascope.stages.lora.baseline import Keys

LORA_APPLICATION = "lora_application"
_LORA_ON_THE_STAGE = frozenset({"baseline", "current_memory", "peak_memory"})
_IN_DETAIL = frozenset(
    {"weight_changes", "keys_modified", "keys_added", "keys_removed", "patch_details", "modules"}
)


class LoraApplicationMethods(WorkflowSteps):
    """The functions of `sigmascope.stages.lora_application` as methods. None of them raises."""

    accelerator: Accelerator | None
    analyses: dict[str, Mapping[str, Any]]

    def capture_lora_baseline(
        self, unet_model: object, clip_model: object, lora_path: object = None, *, keys: Keys = None
    ) -> dict[str, Any]:
        """See `sigmascope.capture_lora_baseline`."""
        return self._lora(
            "baseline",
            lambda: lora_application.capture_lora_baseline(
                unet_model, clip_model, lora_path, keys=keys, accelerator=self.accelerator
            ),
        )

    def track_model_identity_changes(
        self, original_model: object, modified_model: object, model_type: str
    ) -> dict[str, Any]:
        """See `sigmascope.track_model_identity_changes`."""
        return self._lora(
            "changes",
            lambda: lora_application.track_model_identity_changes(original_model, modified_model, model_type),
        )

    def track_weight_modifications(
        self, original_model: object, modified_model: object, model_type: str
    ) -> dict[str, Any]:
        """See `sigmascope.track_weight_modifications`."""
        return self._lora(
            "changes",
            lambda: lora_application.track_weight_modifications(original_model, modified_model, model_type),
        )

    def analyze_lora_patches(self, modified_model: object, model_type: str) -> dict[str, Any]:
        """See `sigmascope.analyze_lora_patches`."""
        return self._lora(
            "patches", lambda: lora_application.analyze_lora_patches(modified_model, model_type)
        )

    def track_model_placement_changes(
        self, original_model: object, modified_model: object, model_type: str
    ) -> dict[str, Any]:
        """See `sigmascope.track_model_placement_changes`."""
        return self._lora(
            "changes",
            lambda: lora_application.track_model_placement_changes(
                original_model, modified_model, model_type
            ),
        )

    def calculate_memory_change(self, baseline_info: object, current_model: object) -> dict[str, Any]:
        """See `sigmascope.calculate_memory_change`."""
        return self._lora(
            "memory", lambda: lora_application.calculate_memory_change(baseline_info, current_model)
        )

    def analyze_lora_application_results(
        self,
        baseline: object,
        modified_unet: object,
        modified_clip: object,
        lora_result: object,
        *,
        elapsed_time: object = None,
        error: BaseException | str | None = None,
    ) -> dict[str, Any]:
        """See `sigmascope.analyze_lora_application_results`.

        The time, the peaks and what was raised come from the step, if it was one of this monitor; the analysis
        goes to it, without what it has for single weights.
        """
        stage = self.last_stage(LORA_APPLICATION)
        record = self.record_of(stage)
        found = self._lora(
            "lora_application_success",
            lambda: lora_application.analyze_lora_application_results(
                baseline,
                modified_unet,
                modified_clip,
                lora_result,
                elapsed_time=record.seconds if elapsed_time is None and record is not None else elapsed_time,
                peak_memory=None if record is None else record.peak,
                error=error if error is not None or record is None else record.error,
            ),
        )
        if "unet_changes" in found:
            if found["exception_details"] is None and record is not None:
                found["exception_details"] = _details(record)
            self.analyses[LORA_APPLICATION] = found
            if stage is not None:
                stage.fact(LORA_APPLICATION, in_short(found))
        return found

    def print_lora_analysis_summary(
        self, analysis: Mapping[str, Any], console: Console | None = None
    ) -> None:
        """See `sigmascope.print_lora_analysis_summary`."""
        self.guard.read("summaries", lambda: lora_application.print_lora_analysis_summary(analysis, console))

    def _lora(self, what: str, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        found, reason = self.guard.read(LORA_APPLICATION, read)
        return {what: None, "unavailable": {what: reason}} if found is None else dict(found)


def in_short(analysis: Mapping[str, Any]) -> dict[str, Any]:
    """An analysis for the record: of single weights only how much each changed, of other lists how long they are."""
    return {name: _short(name, value) for name, value in analysis.items() if name not in _LORA_ON_THE_STAGE}


def _short(name: str, value: Any) -> Any:
    if name == "keys_value_changed" and isinstance(value, Mapping):
        return {key: change.get("relative_change") for key, change in value.items()}
    if name in _IN_DETAIL and isinstance(value, Mapping | list):
        return len(value)
    if isinstance(value, Mapping):
        return {key: _short(str(key), inner) for key, inner in value.items()}
    return value


def _details(record: Stage) -> dict[str, str] | None:
    """What the step raised, as `exception_details` of SPEC section 2."""
    details = record.exception_details
    if details is None:
        return None
    return {"type": details.type, "message": details.message, "traceback": details.traceback}
