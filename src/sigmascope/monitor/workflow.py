"""`WorkflowMonitor`: one object for a whole workflow, by the names that users of the seeds know.

How a further stage joins: its pure functions live in `sigmascope/stages/<stage>.py`. Write
`monitor/workflow_<stage>.py` with a class of methods that call them, as `workflow_text.py` does: take peaks and
times from `last_stage(...)`, put the analysis on it with `.fact`, and keep it in `analyses` under the stage's
name. Add the class to the bases of `WorkflowMonitor`, and the sections of its summary to `SUMMARIES` in
`workflow_summary.py`. Steps, memory, peaks, findings and the comprehensive summary need nothing more.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.workflow_latents import LatentMethods
from sigmascope.monitor.workflow_lora import LoraApplicationMethods
from sigmascope.monitor.workflow_summary import analysis_sections, workflow_sections
from sigmascope.monitor.workflow_text import TextEncodingMethods
from sigmascope.probes import Accelerator
from sigmascope.records.prompts import PromptPrivacy, check_privacy
from sigmascope.stages.summary import print_summary
from sigmascope.stages.text.dumping import DumpFolder
from sigmascope.stages.text_encoding import TextEncodingThresholds


class WorkflowMonitor(LatentMethods, LoraApplicationMethods, TextEncodingMethods):
    """Watches a workflow step by step: time, memory, peaks, models, and what each stage's analysis says.

    It measures with a `Recorder`, which is its `recorder`: stages opened there and steps begun here are one
    record. Nothing of it raises into the host but a wrong argument to the constructor.

    Args:
        name: What the run is called.
        sample_hz: How often a thread looks at memory while a step is open, at most 10 a second; None: never.
        accelerator: Where to read devices; None: what torch would use.
        thresholds: Limits that analyses hold a text encoding to.
        prompt_privacy: Whether the record keeps prompts in full, their hash or nothing.
        statistics: True reads the values of an accelerator's tensors too, which waits for it.
        dumps: Where to save conditionings: a `sigmascope.TensorDumps`.

    Raises:
        ConfigError: `prompt_privacy` does not exist.

    Examples:
        >>> monitor = WorkflowMonitor()
        >>> monitor.start_monitoring("text_encoding")
        >>> seconds = monitor.end_monitoring("text_encoding")
        >>> [stage.name for stage in monitor.run().stages]
        ['text_encoding']
    """

    def __init__(
        self,
        name: str = "workflow",
        *,
        sample_hz: float | None = 10.0,
        accelerator: Accelerator | None = None,
        thresholds: TextEncodingThresholds | None = None,
        prompt_privacy: PromptPrivacy = "full",
        statistics: bool | None = None,
        dumps: DumpFolder | None = None,
    ) -> None:
        check_privacy(prompt_privacy)
        super().__init__(Recorder(name, sample_hz=sample_hz, accelerator=accelerator))
        self.accelerator = accelerator
        self.thresholds = thresholds
        self.prompt_privacy = prompt_privacy
        self.statistics = statistics
        self.dumps = dumps
        self.analyses: dict[str, Mapping[str, Any]] = {}

    def get_peak_memory_summary(self) -> dict[str, Any]:
        """The highest memory of the whole workflow, and of each step in `steps`, in order.

        Returns:
            `ram`, `process`, `gpu`, `gpus` as in `peak_memory` of SPEC section 2, with seconds since the
            workflow began; `steps`, each with `name`, `seconds` and its own `peak_memory`.
        """
        run = self.recorder.run()
        steps = [
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "peak_memory": None if stage.peak is None else stage.peak.as_dict(),
            }
            for stage in run.walk()
        ]
        return {**run.peak().as_dict(), "steps": steps}

    def print_summary(self, console: Console | None = None) -> None:
        """Print steps, memory, peaks and findings, at most 80 columns wide."""
        self.guard.read(
            "summaries", lambda: print_summary("WORKFLOW SUMMARY", workflow_sections(self.run()), console)
        )

    def print_comprehensive_summary(
        self,
        lora_analysis: Mapping[str, Any] | None = None,
        text_encoding_analysis: Mapping[str, Any] | None = None,
        model_sampling_analysis: Mapping[str, Any] | None = None,
        latent_generation_analysis: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        """Print the summary of the workflow and of every analysis, in the order of the stages.

        Args:
            lora_analysis: Of the LoRA's application; None: the last one that this monitor made, if any.
            text_encoding_analysis: Likewise.
            model_sampling_analysis: Likewise.
            latent_generation_analysis: Likewise.
            console: Where to; standard output by default.
        """
        given = {
            "lora_application": lora_analysis,
            "text_encoding": text_encoding_analysis,
            "model_sampling": model_sampling_analysis,
            "latent_encoding": latent_generation_analysis,
            "latent_decoding": None,
        }
        self.print_summary(console)
        for stage, analysis in given.items():
            chosen = self.analyses.get(stage) if analysis is None else analysis
            if chosen is not None:
                self.guard.read("summaries", lambda s=stage, a=chosen: _print_analysis(s, a, console))  # type: ignore[misc]


def _print_analysis(stage: str, analysis: Mapping[str, Any], console: Console | None) -> None:
    title, sections = analysis_sections(stage, analysis)
    print_summary(f"{title} ANALYSIS SUMMARY", sections, console)


ModelLoadingMonitor = WorkflowMonitor
"""The name that the seeds give it."""
