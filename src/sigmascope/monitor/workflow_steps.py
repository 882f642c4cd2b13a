"""Steps of a workflow that begin and end with a call each, on a recorder."""

import logging
import re
import threading
from typing import NamedTuple

from sigmascope.analysis.model_consistency import MODEL_STATE
from sigmascope.analysis.stage_memory import HEAP
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.live import LiveStage
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.run_findings import with_findings
from sigmascope.monitor.workflow_privacy import redacted
from sigmascope.probes import heap_in_use
from sigmascope.records.run import Run, Stage
from sigmascope.stages.failures import Redact
from sigmascope.stages.model_state import model_state

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"^step_?\d+_+|_+step_?\d+$")
_OTHER_NAMES = {"latent_generation": "latent_encoding"}


def stage_name(step: str) -> str:
    """The name of the stage that a step is: "LATENT_GENERATION_STEP5" is `latent_encoding`."""
    name = _NUMBER.sub("", re.sub(r"[\s-]+", "_", step.strip().lower()))
    return _OTHER_NAMES.get(name, name) or "step"


class _OpenStep(NamedTuple):
    name: str
    thread: int
    stage: LiveStage
    heap_bytes: int | None


class WorkflowSteps:
    """Begins and ends stages by name; see `WorkflowMonitor`.

    Args:
        recorder: What measures. Its stages and steps can be used beside the calls here.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.guard = Guard()
        self._lock = threading.Lock()
        self._open: list[_OpenStep] = []
        self._ended: dict[str, LiveStage] = {}
        self.redactions: list[Redact] = []

    def start_monitoring(self, step: str) -> None:
        """Begin a step: baseline, then clock and peaks. Steps may nest and repeat.

        Args:
            step: Such as "text_encoding"; `sigmascope.records.run.STAGES` has the usual names.
        """
        name = stage_name(step)
        stage = self.recorder.stage(name)
        heap = self._heap_bytes()
        self.guard.read("steps", stage.__enter__)
        with self._lock:
            self._open.append(_OpenStep(name, threading.get_ident(), stage, heap))

    def update_peak_memory(self) -> None:
        """Bring the peaks of the open steps up to date, at a moment when memory may be high."""
        self.recorder.look()

    def end_monitoring(
        self,
        step: str,
        model: object = None,
        model_type: str | None = None,
        error: BaseException | None = None,
    ) -> float | None:
        """End the innermost open step of that name.

        Args:
            step: As it was begun.
            model: The model that the step loaded or used; facts and state of it are kept, not the model.
            model_type: What to call it, such as "UNet" or "CLIP"; its class by default.
            error: What the step raised, if it did.

        Returns:
            Elapsed seconds; None, with a line in the log, when no such step was begun.
        """
        name = stage_name(step)
        with self._lock:
            begun = self._innermost(name)
            if begun is not None:
                self._open.remove(begun)
        if begun is None:
            _log.warning("The step %r ended but was never begun.", step)
            return None
        stage = begun.stage
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        self.guard.read("steps", lambda: stage.__exit__(kind, error, trace))
        stage.fact(HEAP, {"before": begun.heap_bytes, "after": self._heap_bytes()})
        self._ended[name] = stage
        if model is not None:
            self.note_model(stage, model_type or type(model).__name__, model)
        record = self.guard.read("steps", stage.record)[0]
        return None if record is None else record.seconds

    def _heap_bytes(self) -> int | None:
        reading = self.guard.read(HEAP, heap_in_use)[0]
        return None if reading is None else reading.value

    def note_model(self, stage: LiveStage, model_type: str, model: object) -> None:
        """Keep facts and state of a model on a stage, for the comparison from stage to stage."""
        stage.module(model_type, model)
        stage.fact(f"{MODEL_STATE}{model_type}", model_state(model))

    def last_stage(self, name: str) -> LiveStage | None:
        """The stage of that name that is open now, else the one that ended last."""
        with self._lock:
            begun = self._innermost(name)
        return self._ended.get(name) if begun is None else begun.stage

    def _innermost(self, name: str) -> "_OpenStep | None":
        """The open step of that name begun last in this thread, else in any; with the lock held."""
        begun = [one for one in reversed(self._open) if one.name == name]
        own = (one for one in begun if one.thread == threading.get_ident())
        return next(own, begun[0] if begun else None)

    def record_of(self, stage: LiveStage | None) -> Stage | None:
        """What is known of a stage now."""
        return None if stage is None else self.guard.read("steps", stage.record)[0]

    def run(self) -> Run:
        """Return everything that is known now, with what the rules and the analyses of its stages find in it.

        Where prompts are private, errors quote none that an analysis was given.
        """
        return with_findings(redacted(self.recorder.run(), self.redactions), self.guard)
