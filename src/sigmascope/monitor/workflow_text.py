"""Text encoding on a `WorkflowMonitor`: the stage's functions, with what the monitor knows filled in."""

from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console

from sigmascope.monitor.live import LiveStage
from sigmascope.monitor.workflow_steps import WorkflowSteps
from sigmascope.probes import Accelerator
from sigmascope.records.prompts import PromptPrivacy, redactor
from sigmascope.records.run import Stage
from sigmascope.stages import text_encoding
from sigmascope.stages.text.analysis import private_texts
from sigmascope.stages.text.conditioning_facts import read_conditioning
from sigmascope.stages.text.dumping import DumpFolder
from sigmascope.stages.text_encoding import TextEncodingThresholds

TEXT_ENCODING = "text_encoding"
_ON_THE_STAGE = frozenset({"baseline", "current_memory", "memory_impact", "peak_memory"})


class TextEncodingMethods(WorkflowSteps):
    """The functions of `sigmascope.stages.text_encoding` as methods. None of them raises."""

    accelerator: Accelerator | None
    thresholds: TextEncodingThresholds | None
    prompt_privacy: PromptPrivacy
    statistics: bool | None
    dumps: DumpFolder | None
    analyses: dict[str, Mapping[str, Any]]

    def capture_text_encoding_baseline(
        self, unet_model: object, clip_model: object, *, tokenizer: object = None
    ) -> dict[str, Any]:
        """See `sigmascope.capture_text_encoding_baseline`."""
        baseline, reason = self.guard.read(
            TEXT_ENCODING,
            lambda: text_encoding.capture_text_encoding_baseline(
                unet_model, clip_model, tokenizer=tokenizer, accelerator=self.accelerator
            ),
        )
        return {"unavailable": {"baseline": reason}} if baseline is None else dict(baseline)

    def encoding(self, which: Literal["positive", "negative"]) -> LiveStage:
        """Return a stage for `with`, inside the step, that times the encoding of one prompt apart."""
        return self.recorder.stage(f"{which}_prompt")

    def analyze_text_encoding_results(
        self,
        baseline: Mapping[str, Any] | None,
        positive_cond: object,
        negative_cond: object,
        positive_prompt: object,
        negative_prompt: object,
        elapsed_time: object,
        *,
        error: BaseException | str | None = None,
        token_limit: int | None = None,
    ) -> dict[str, Any]:
        """See `sigmascope.analyze_text_encoding_results`.

        Peaks and the prompts' own times come from the step; the analysis and the tensors' facts go to it.
        """
        self._keep_private(positive_prompt, negative_prompt)
        stage = self.last_stage(TEXT_ENCODING)
        record = self.record_of(stage)
        analysis, reason = self.guard.read(
            TEXT_ENCODING,
            lambda: text_encoding.analyze_text_encoding_results(
                baseline,
                positive_cond,
                negative_cond,
                positive_prompt,
                negative_prompt,
                elapsed_time if elapsed_time is not None or record is None else record.seconds,
                positive_seconds=_seconds_of(record, "positive_prompt"),
                negative_seconds=_seconds_of(record, "negative_prompt"),
                peak_memory=None if record is None else record.peak,
                error=error,
                thresholds=self.thresholds,
                token_limit=token_limit,
                statistics=self.statistics,
                prompt_privacy=self.prompt_privacy,
                dumps=self.dumps,
            ),
        )
        if analysis is None:
            return {"encoding_success": None, "unavailable": {"encoding_success": reason}}
        found = dict(analysis)
        self.analyses[TEXT_ENCODING] = found
        if stage is not None:
            self._note_text(stage, found, {"positive": positive_cond, "negative": negative_cond})
        return found

    def print_text_encoding_analysis_summary(
        self, analysis: Mapping[str, Any], console: Console | None = None
    ) -> None:
        """See `sigmascope.print_text_encoding_analysis_summary`."""
        self.guard.read(
            "summaries", lambda: text_encoding.print_text_encoding_analysis_summary(analysis, console)
        )

    def _keep_private(self, *prompts: object) -> None:
        """Take these prompts out of the errors on record."""
        if self.prompt_privacy != "full":
            self.redactions.append(redactor(private_texts(*prompts), self.prompt_privacy))

    def _note_text(
        self, stage: LiveStage, analysis: Mapping[str, Any], conditionings: Mapping[str, object]
    ) -> None:
        kept = {name: value for name, value in analysis.items() if name not in _ON_THE_STAGE}
        stage.fact(TEXT_ENCODING, kept)
        for which, conditioning in conditionings.items():
            first = read_conditioning(conditioning)[0].first
            for name, tensor in (("conditioning", first.tensor), ("pooled", first.pooled)):
                if tensor is not None:
                    stage.tensor(f"{which}_{name}", tensor, statistics=self.statistics)


def _seconds_of(record: Stage | None, name: str) -> float | None:
    """Seconds of the stages of that name inside a stage; None if there are none."""
    inner = [] if record is None else [stage.seconds for stage in record.walk() if stage.name == name]
    return sum(inner) if inner else None
