"""The steps of a workflow in which a VAE encodes or decodes: their records, and where their analyses go."""

from collections.abc import Callable, Mapping
from typing import Any

from sigmascope.monitor.live import LiveStage
from sigmascope.monitor.workflow_steps import WorkflowSteps
from sigmascope.probes import Accelerator
from sigmascope.records.latent_findings import VAE_STAGES
from sigmascope.records.latents import Direction, Strategy, attempt_stage
from sigmascope.records.run import Stage
from sigmascope.stages.latents.finding_latent import find_latent

_ON_THE_STAGE = frozenset({"baseline", "current_memory", "memory_impact", "peak_memory"})


class LatentSteps(WorkflowSteps):
    """What the methods for encoding and decoding share."""

    accelerator: Accelerator | None
    statistics: bool | None
    analyses: dict[str, Mapping[str, Any]]

    def trying(self, strategy: Strategy, direction: Direction = "encoding") -> LiveStage:
        """Return a stage for `with`, inside the step, that watches one strategy of your own engine apart.

        What it raises passes through and is kept as the reason why the strategy failed. `encode_latents` and
        `decode_latents` do this by themselves.
        """
        return self.recorder.stage(attempt_stage(strategy, direction))

    def _latents(self, what: str, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        found, reason = self.guard.read("latents", read)
        return {what: None, "unavailable": {what: reason}} if found is None else dict(found)

    def _step(self, direction: Direction) -> tuple[LiveStage | None, Stage | None]:
        stage = self.last_stage(VAE_STAGES[direction])
        return stage, self.record_of(stage)

    def _analysed(
        self,
        stage: LiveStage | None,
        direction: Direction,
        output: object,
        read: Callable[[], Mapping[str, Any]],
    ) -> dict[str, Any]:
        """The analysis, kept for the summary and on its step, with the facts of the latent or the pictures."""
        found = self._latents("encoding_success", read)
        if "latent_analysis" not in found:
            return found
        self.analyses[VAE_STAGES[direction]] = found
        if stage is not None:
            kept = {name: value for name, value in found.items() if name not in _ON_THE_STAGE}
            stage.fact(VAE_STAGES[direction], kept)
            tensor = find_latent(output).tensor
            if tensor is not None:
                name = "latent" if direction == "encoding" else "frames"
                stage.tensor(name, tensor, statistics=self.statistics)
        return found


def or_seconds(elapsed: object, seen: Stage | None) -> object:
    """The seconds that were given, else the step's."""
    return elapsed if elapsed is not None or seen is None else seen.seconds


def or_memory(changes: object, seen: Stage | None) -> object:
    """The changes of memory that were given, else memory before and after the step."""
    return changes if changes is not None or seen is None else seen.memory


def or_error(error: BaseException | str | None, seen: Stage | None) -> BaseException | str | None:
    """The error that was given, else the one that ended the step."""
    return error if error is not None or seen is None else seen.error
