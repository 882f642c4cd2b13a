"""`WorkflowMonitor`: one object that watches a whole workflow, step by step.

It begins and ends steps with a call each, on a recorder, and offers the functions of `sigmascope.stages` as methods,
with what it knows of the step filled in. Hosts like to quote prompts in their errors: where prompts are private, no
word of what was raised is kept. The workflow's summary shows its stages, then what each stage's analysis says.

How a further stage joins: its pure functions live in `sigmascope/stages/<stage>.py`. Add methods that call them
through `_analysed`, take peaks and times from `_last_record(...)`, and `_keep` the analysis under the stage's name. Add
the sections of its summary to `SUMMARIES`. Steps, memory, peaks, findings and the comprehensive summary need nothing more.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, ParamSpec

from rich.console import Console

from sigmascope.analysis.diagnostics import MODEL_STATE
from sigmascope.analysis.memory import HEAP
from sigmascope.monitor.guard import Guard, log_quietly
from sigmascope.monitor.publishing import publication
from sigmascope.monitor.recorder import LiveStage, Recorder, with_findings
from sigmascope.probes import Accelerator, heap_in_use, memory_snapshot
from sigmascope.probes.models import file_facts, key_facts
from sigmascope.probes.tensors import quick_facts
from sigmascope.records.latents import (
    VAE_STAGES,
    Direction,
    EncodingRecord,
    Layout,
    SampleFacts,
    Strategy,
    attempt_stage,
    attempts_in,
    record_in,
)
from sigmascope.records.memory import PeakMemoryDict, change, mib
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.records.run import KEEP_GENERATIONS, Finding, Run, Stage
from sigmascope.stages import latent_encoding, lora_application, text_encoding
from sigmascope.stages.baseline import TEXT_NOT_KEPT, beside_the_stage, memory_now, model_state
from sigmascope.stages.conditioning import DumpFolder, read_conditioning
from sigmascope.stages.latent_encoding import record_of_step
from sigmascope.stages.latent_facts import find_latent
from sigmascope.stages.latent_summary import end_lines, latent_sections, print_lines
from sigmascope.stages.lora_application import Keys
from sigmascope.stages.lora_summary import lora_sections
from sigmascope.stages.summary import (
    NO_ACCELERATOR,
    Row,
    Section,
    as_it_is,
    mb,
    mb_change,
    print_summary,
    printable,
    seconds,
)
from sigmascope.stages.text_encoding import TextEncodingThresholds, text_sections
from sigmascope.units import percent

_log = logging.getLogger(__name__)
P = ParamSpec("P")

# How `stage_name` reads the names of steps.
_NUMBER = re.compile(r"^step_?\d+_+|_+step_?\d+$")
_OTHER_NAMES = {"latent_generation": "latent_encoding"}

TEXT_ENCODING = "text_encoding"
LORA_APPLICATION = "lora_application"
LATENTS = "latents"

SUMMARIES = {
    "lora_application": ("LORA APPLICATION", lora_sections),
    "text_encoding": ("TEXT ENCODING", text_sections),
    "latent_encoding": ("LATENT GENERATION", latent_sections),
    "latent_decoding": ("LATENT DECODING", latent_sections),
}
"""By stage: title and sections of its analysis. A stage that is not here has its analysis shown as it is."""


class WorkflowMonitor:
    """Watches a workflow step by step: time, memory, peaks, models, and what each stage's analysis says.

    It measures with a `Recorder`, which is its `recorder`: stages opened there and steps begun here are one
    record. It raises nothing into the host, except for a wrong argument to its constructor.

    Args:
        name: What the run is called.
        verbose: Print memory when a step begins, and its time and peak when it ends, to standard output.
        sample_hz: How often a thread looks at memory while a step is open, at most 10 a second; None: never.
        accelerator: Where to read devices; None: what torch would use.
        thresholds: Limits that analyses hold a text encoding to.
        prompt_privacy: Whether the record keeps prompts in full, their hash or nothing.
        statistics: True reads the values of an accelerator's tensors too, which waits for it.
        dumps: Where to save conditionings: a `sigmascope.TensorDumps`.
        keep_stages: How many of the last stages of each name the record holds in full; of earlier ones it holds sums
            (`Run.folded`). None keeps all, in a record that grows as long as the monitor lives.

    Raises:
        ConfigError: `prompt_privacy` does not exist.

    Examples:
        >>> monitor = WorkflowMonitor(verbose=False)
        >>> monitor.start_monitoring("text_encoding")
        >>> seconds = monitor.end_monitoring("text_encoding")
        >>> [stage.name for stage in monitor.run().stages]
        ['text_encoding']
    """

    def __init__(
        self,
        name: str = "workflow",
        *,
        verbose: bool = True,
        sample_hz: float | None = 10.0,
        accelerator: Accelerator | None = None,
        thresholds: TextEncodingThresholds | None = None,
        prompt_privacy: PromptPrivacy = "full",
        statistics: bool | None = None,
        dumps: DumpFolder | None = None,
        keep_stages: int | None = KEEP_GENERATIONS,
    ) -> None:
        keeps_words = privacy_of(prompt_privacy).keeps_words
        self.prompt_privacy = prompt_privacy
        self.recorder = Recorder(
            name,
            sample_hz=sample_hz,
            accelerator=accelerator,
            keeps_words=keeps_words,
            keep=keep_stages,
        )
        self.guard = Guard(keeps_words=keeps_words)
        self.verbose = verbose
        self.accelerator = accelerator
        self.thresholds = thresholds
        self.statistics = statistics
        self.dumps = dumps
        self.pictures: object = None
        self.analyses: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._open: list[_OpenStep] = []
        self._ended: dict[str, LiveStage] = {}

    def start_monitoring(self, step: str) -> None:
        """Begin a step: baseline, then clock and peaks. Steps may nest and repeat.

        Args:
            step: Such as "text_encoding"; `sigmascope.records.run.STAGES` has the usual names.
        """
        name = stage_name(step)
        stage = self.recorder.stage(name)
        heap = self._heap_bytes()
        if self.verbose:
            self._show(self._tell_begin, step, name)
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
        *,
        file: object = None,
        loaded: object = None,
        strategy_used: object = None,
        output: object = None,
    ) -> float | None:
        """End the innermost open step of that name.

        Args:
            step: As it was begun.
            model: The model that the step loaded or used; facts and state of it are kept, not the model.
            model_type: What to call it, such as "UNet" or "CLIP"; its class by default.
            error: What the step raised, if it did.
            file: What the model was loaded from, a path or several: `files`, `folder`, `format` and `size_mb` (MiB)
                become facts of the stage.
            loaded: What `load_state_dict`, or a library's loader, gave: `missing_keys`, `unexpected_keys` and their
                numbers become facts of the stage.
            strategy_used: Of an encoding or decoding by an engine of your own, for the lines that are printed:
                "Direct VAE Encoding", "direct" or 1. What `encode_latents` or `trying` did is known.
            output: Its latent, or its pictures, for the same.

        Returns:
            Elapsed seconds; None, with a line in the log, when no such step was begun.
        """
        name = stage_name(step)
        with self._lock:
            begun = self._innermost(name)
            if begun is not None:
                self._open.remove(begun)
        if begun is None:
            log_quietly(_log, "The step %r ended but was never begun.", step)
            return None
        stage = begun.stage
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        self.guard.read("steps", lambda: stage.__exit__(kind, error, trace))
        stage.fact(HEAP, {"before": begun.heap_bytes, "after": self._heap_bytes()})
        self._ended[name] = stage
        for facts in (lambda: file_facts(file), lambda: key_facts(loaded)):
            for key, value in (self.guard.read("files", facts) or {}).items():
                stage.fact(key, value)
        if model is not None:
            self.note_model(stage, model_type or type(model).__name__, model)
        record = self.guard.read("steps", stage.record)
        if record is None:
            return None
        if self.verbose:
            process = self.guard.read("summaries", lambda: _vae_process(record, strategy_used, output))
            self._show(
                lambda: print_lines(end_lines(step, record.seconds, record.peak, record.error, process))
            )
        return record.seconds

    def _innermost(self, name: str) -> "_OpenStep | None":
        """The open step of that name begun last in this thread, else in any; with the lock held."""
        begun = [step for step in reversed(self._open) if step.name == name]
        own = (step for step in begun if step.thread == threading.get_ident())
        return next(own, begun[0] if begun else None)

    def _tell_begin(self, step: str, name: str) -> None:
        """Print memory, and the video's dimensions if a baseline of it was taken for this step."""
        facts: dict[str, object] = {"memory": memory_now(memory_snapshot(self.accelerator))}
        if name == VAE_STAGES["encoding"]:
            facts["pictures"], self.pictures = self.pictures, None
        latent_encoding.print_latent_generation_start(facts, step)

    def _heap_bytes(self) -> int | None:
        reading = self.guard.read(HEAP, heap_in_use)
        return None if reading is None else reading.value

    def note_model(self, stage: LiveStage, model_type: str, model: object) -> None:
        """Keep facts and state of a model on a stage, for the comparison from stage to stage."""
        stage.module(model_type, model)
        stage.fact(f"{MODEL_STATE}{model_type}", self.guard.read("models", lambda: model_state(model)))

    def run(self) -> Run:
        """Return everything that is known now, with what the rules and the analyses of its stages find in it."""
        return with_findings(self.recorder.run(), self.guard)

    def capture_text_encoding_baseline(
        self, unet_model: object, clip_model: object, *, tokenizer: object = None
    ) -> dict[str, Any]:
        """See `sigmascope.capture_text_encoding_baseline`."""
        capture, where = text_encoding.capture_text_encoding_baseline, self.accelerator
        return self._analysed(
            TEXT_ENCODING, "baseline", capture, unet_model, clip_model, tokenizer=tokenizer, accelerator=where
        )

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
        stage, record = self._last_record(TEXT_ENCODING)
        analysis = self._analysed(
            TEXT_ENCODING,
            "encoding_success",
            text_encoding.analyze_text_encoding_results,
            baseline,
            positive_cond,
            negative_cond,
            positive_prompt,
            negative_prompt,
            _given_or(elapsed_time, record, "seconds"),
            positive_seconds=_seconds_of(record, "positive_prompt"),
            negative_seconds=_seconds_of(record, "negative_prompt"),
            peak_memory=None if record is None else record.peak,
            error=error,
            thresholds=self.thresholds,
            token_limit=token_limit,
            statistics=self.statistics,
            prompt_privacy=self.prompt_privacy,
            dumps=self.dumps,
        )
        if "text_processing" in analysis:
            self._keep(TEXT_ENCODING, analysis, stage, beside_the_stage)
            conditionings = {"positive": positive_cond, "negative": negative_cond}
            if stage is not None:
                self.guard.read(TEXT_ENCODING, lambda: self._note_tensors(stage, conditionings))
        return analysis

    def _note_tensors(self, stage: LiveStage, conditionings: Mapping[str, object]) -> None:
        for which, conditioning in conditionings.items():
            first = read_conditioning(conditioning)[0].first
            for name, tensor in (("conditioning", first.tensor), ("pooled", first.pooled)):
                if tensor is not None:
                    stage.tensor(f"{which}_{name}", tensor, statistics=self.statistics)

    def print_text_encoding_analysis_summary(
        self, analysis: Mapping[str, Any] | None, console: Console | None = None
    ) -> None:
        """See `sigmascope.print_text_encoding_analysis_summary`."""
        self._show(text_encoding.print_text_encoding_analysis_summary, analysis, console)

    def capture_lora_baseline(
        self, unet_model: object, clip_model: object, lora_path: object = None, *, keys: Keys = None
    ) -> dict[str, Any]:
        """See `sigmascope.capture_lora_baseline`."""
        capture, where = lora_application.capture_lora_baseline, self.accelerator
        return self._analysed(
            LORA_APPLICATION,
            "baseline",
            capture,
            unet_model,
            clip_model,
            lora_path,
            keys=keys,
            accelerator=where,
        )

    def track_model_identity_changes(
        self, original_model: object, modified_model: object, model_type: str
    ) -> dict[str, Any]:
        """See `sigmascope.track_model_identity_changes`."""
        track = lora_application.track_model_identity_changes
        return self._analysed(LORA_APPLICATION, "changes", track, original_model, modified_model, model_type)

    def track_weight_modifications(
        self, original_model: object, modified_model: object, model_type: str
    ) -> dict[str, Any]:
        """See `sigmascope.track_weight_modifications`."""
        track = lora_application.track_weight_modifications
        return self._analysed(LORA_APPLICATION, "changes", track, original_model, modified_model, model_type)

    def analyze_lora_patches(self, modified_model: object, model_type: str) -> dict[str, Any]:
        """See `sigmascope.analyze_lora_patches`."""
        analyze = lora_application.analyze_lora_patches
        return self._analysed(LORA_APPLICATION, "patches", analyze, modified_model, model_type)

    def track_model_placement_changes(
        self, original_model: object, modified_model: object, model_type: str
    ) -> dict[str, Any]:
        """See `sigmascope.track_model_placement_changes`."""
        track = lora_application.track_model_placement_changes
        return self._analysed(LORA_APPLICATION, "changes", track, original_model, modified_model, model_type)

    def calculate_memory_change(self, baseline_info: object, current_model: object) -> dict[str, Any]:
        """See `sigmascope.calculate_memory_change`."""
        calculate = lora_application.calculate_memory_change
        return self._analysed(LORA_APPLICATION, "memory", calculate, baseline_info, current_model)

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
        stage, record = self._last_record(LORA_APPLICATION)
        analysis = self._analysed(
            LORA_APPLICATION,
            "lora_application_success",
            lora_application.analyze_lora_application_results,
            baseline,
            modified_unet,
            modified_clip,
            lora_result,
            elapsed_time=_given_or(elapsed_time, record, "seconds"),
            peak_memory=None if record is None else record.peak,
            error=self._error_or(record, error),
        )
        if "unet_changes" in analysis:
            details = None if record is None else record.exception_details
            if analysis["exception_details"] is None and details is not None:
                analysis["exception_details"] = asdict(details)
            self._keep(LORA_APPLICATION, analysis, stage, lora_application.in_short)
        return analysis

    def print_lora_analysis_summary(
        self, analysis: Mapping[str, Any] | None, console: Console | None = None
    ) -> None:
        """See `sigmascope.print_lora_analysis_summary`."""
        self._show(lora_application.print_lora_analysis_summary, analysis, console)

    def trying(self, strategy: Strategy, direction: Direction = "encoding") -> LiveStage:
        """Return a stage for `with`, inside the step, that watches one strategy of your own engine apart.

        What it raises passes through and is kept as the reason why the strategy failed. `encode_latents` and
        `decode_latents` do this by themselves.
        """
        return self.recorder.stage(attempt_stage(strategy, direction))

    def capture_latent_generation_baseline(self, vae_model: object, video_data: object) -> dict[str, Any]:
        """See `sigmascope.capture_latent_generation_baseline`."""
        baseline = self._analysed(
            LATENTS,
            "baseline",
            latent_encoding.capture_latent_generation_baseline,
            vae_model,
            video_data,
            statistics=self.statistics,
            accelerator=self.accelerator,
        )
        self.pictures = baseline.get("pictures")
        return baseline

    def capture_latent_decoding_baseline(
        self,
        vae_model: object,
        latent: object,
        *,
        video_length: object = None,
        video_height: object = None,
        video_width: object = None,
    ) -> dict[str, Any]:
        """See `sigmascope.capture_latent_decoding_baseline`."""
        return self._analysed(
            LATENTS,
            "baseline",
            latent_encoding.capture_latent_decoding_baseline,
            vae_model,
            latent,
            video_length=video_length,
            video_height=video_height,
            video_width=video_width,
            statistics=self.statistics,
            accelerator=self.accelerator,
        )

    def analyze_latent_generation_results(
        self,
        baseline: Mapping[str, Any] | None,
        init_latent: object,
        elapsed_time: object = None,
        strategy_used: object = None,
        immediate_gpu_changes: object = None,
        video_length: object = None,
        video_height: object = None,
        video_width: object = None,
        *,
        record: EncodingRecord | None = None,
        error: BaseException | str | None = None,
        latent_layout: Layout | None = None,
    ) -> dict[str, Any]:
        """See `sigmascope.analyze_latent_generation_results`.

        Time, peaks, strategies and the memory right after come from the step; the analysis goes to it.
        """
        stage, step = self._last_record(VAE_STAGES["encoding"])
        analysis = self._analysed(
            LATENTS,
            "encoding_success",
            lambda: latent_encoding.analyze_latent_generation_results(
                baseline,
                init_latent,
                _given_or(elapsed_time, step, "seconds"),
                strategy_used,
                _given_or(immediate_gpu_changes, step, "memory"),
                video_length,
                video_height,
                video_width,
                record=record or record_in(step),
                attempts=attempts_in(step, "encoding"),
                peak_memory=None if step is None else step.peak,
                error=self._error_or(step, error),
                latent_layout=latent_layout,
                statistics=self.statistics,
            ),
        )
        return self._keep_latents("encoding", analysis, stage, "latent", init_latent)

    def analyze_latent_decoding_results(
        self,
        baseline: Mapping[str, Any] | None,
        decoded: object,
        elapsed_time: object = None,
        strategy_used: object = None,
        immediate_gpu_changes: object = None,
        *,
        record: EncodingRecord | None = None,
        error: BaseException | str | None = None,
    ) -> dict[str, Any]:
        """See `sigmascope.analyze_latent_decoding_results`; the step adds what it does to an encoding."""
        stage, step = self._last_record(VAE_STAGES["decoding"])
        analysis = self._analysed(
            LATENTS,
            "encoding_success",
            lambda: latent_encoding.analyze_latent_decoding_results(
                baseline,
                decoded,
                _given_or(elapsed_time, step, "seconds"),
                strategy_used,
                _given_or(immediate_gpu_changes, step, "memory"),
                record=record or record_in(step),
                attempts=attempts_in(step, "decoding"),
                peak_memory=None if step is None else step.peak,
                error=self._error_or(step, error),
                statistics=self.statistics,
            ),
        )
        return self._keep_latents("decoding", analysis, stage, "frames", decoded)

    def _keep_latents(
        self,
        direction: Direction,
        analysis: dict[str, Any],
        stage: LiveStage | None,
        name: str,
        output: object,
    ) -> dict[str, Any]:
        """The analysis, kept, with the facts of the latent or the pictures on its step."""
        if "latent_analysis" in analysis:
            self._keep(VAE_STAGES[direction], analysis, stage, beside_the_stage)
            tensor = self.guard.read(LATENTS, lambda: find_latent(output).tensor)
            if stage is not None and tensor is not None:
                stage.tensor(name, tensor, statistics=self.statistics)
        return analysis

    def _analyze_latent_output(
        self, init_latent: object, video_length: object, video_height: object, video_width: object
    ) -> dict[str, Any]:
        analyze, sizes = latent_encoding._analyze_latent_output, (video_length, video_height, video_width)
        return self._analysed(LATENTS, "status", analyze, init_latent, *sizes, statistics=self.statistics)

    def _analyze_vae_encoding_performance(
        self,
        elapsed_time: object,
        strategy_used: object,
        video_length: object,
        video_height: object,
        video_width: object,
    ) -> dict[str, Any]:
        analyze = latent_encoding._analyze_vae_encoding_performance
        sizes = video_length, video_height, video_width
        return self._analysed(LATENTS, "performance", analyze, elapsed_time, strategy_used, *sizes)

    def _calculate_latent_generation_memory_change(
        self, baseline: Mapping[str, Any] | None, current_ram: object, current_gpu: object
    ) -> dict[str, Any]:
        calculate = latent_encoding._calculate_latent_generation_memory_change
        return self._analysed(LATENTS, "memory", calculate, baseline, current_ram, current_gpu)

    def print_latent_generation_analysis_summary(
        self, analysis: Mapping[str, Any] | None, console: Console | None = None
    ) -> None:
        """See `sigmascope.print_latent_generation_analysis_summary`."""
        self._show(latent_encoding.print_latent_generation_analysis_summary, analysis, console)

    def print_latent_decoding_analysis_summary(
        self, analysis: Mapping[str, Any] | None, console: Console | None = None
    ) -> None:
        """See `sigmascope.print_latent_decoding_analysis_summary`."""
        self._show(latent_encoding.print_latent_decoding_analysis_summary, analysis, console)

    def _analysed(
        self,
        instrument: str,
        what: str,
        analyse: Callable[P, Mapping[str, Any]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> dict[str, Any]:
        """What a function of a stage gives; else None for `what`, and why."""
        analysis = self.guard.reading(instrument, lambda: analyse(*args, **kwargs))
        if analysis.value is None:
            return {what: None, "unavailable": {what: analysis.reason}}
        return dict(analysis.value)

    def _show(self, show: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self.guard.read("summaries", lambda: show(*args, **kwargs))

    def _keep(
        self,
        name: str,
        analysis: Mapping[str, Any],
        stage: LiveStage | None,
        shortened: Callable[[Mapping[str, Any]], object],
    ) -> None:
        """Keep an analysis for the summary, and in short on its step."""
        self.analyses[name] = analysis
        if stage is not None:
            self.guard.read(name, lambda: stage.fact(name, shortened(analysis)))
            publication(self.recorder, stage)()

    def last_stage(self, name: str) -> LiveStage | None:
        """The stage of that name that is open now, else the one that ended last."""
        with self._lock:
            begun = self._innermost(name)
        return self._ended.get(name) if begun is None else begun.stage

    def _last_record(self, name: str) -> tuple[LiveStage | None, Stage | None]:
        """The last stage of that name, and what is known of it now."""
        stage = self.last_stage(name)
        return stage, None if stage is None else self.guard.read("steps", stage.record)

    def _error_or(
        self, record: Stage | None, error: BaseException | str | None
    ) -> BaseException | str | None:
        """The error that was given, without words where none are kept, else the one that ended the step."""
        if isinstance(error, str) and not self.guard.keeps_words:
            return TEXT_NOT_KEPT
        return error if error is not None or record is None else record.error

    def get_peak_memory_summary(self) -> dict[str, Any]:
        """The highest memory of the whole workflow, and of each step in `steps`, in order.

        Returns:
            `ram`, `process`, `gpu`, `gpus` as in `PeakMemory.as_dict`, with seconds since the
            workflow began; `steps`, each with `name`, `seconds` and its own `peak_memory`. Beside them, flat:
            `ram_peak_mb` of the whole machine, `gpu_allocated_peak_mb` and `gpu_reserved_peak_mb` of the device
            with the highest peak (None without one), and `peak_timestamps`, by `ram`, `gpu_allocated` and
            `gpu_reserved` the seconds since the workflow began at which each was seen. MB are MiB.
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
        peaks = run.peak().as_dict()
        return {**peaks, **_flat_peaks(peaks), "steps": steps}

    def print_summary(self, console: Console | None = None) -> None:
        """Print steps, memory, peaks and findings, at most 80 columns wide."""
        self._show(lambda: print_summary("WORKFLOW SUMMARY", workflow_sections(self.run()), console))

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
            console: Where to print; standard output by default.
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
                self._show(_print_analysis, stage, chosen, console)


ModelLoadingMonitor = WorkflowMonitor
"""Another name for it."""


def stage_name(step: str) -> str:
    """The name of the stage that a step is: "LATENT_GENERATION_STEP5" is `latent_encoding`."""
    name = _NUMBER.sub("", re.sub(r"[\s-]+", "_", step.strip().lower()))
    return _OTHER_NAMES.get(name, name) or "step"


class _OpenStep(NamedTuple):
    name: str
    thread: int
    stage: LiveStage
    heap_bytes: int | None


def _vae_process(record: Stage, strategy_used: object, output: object) -> EncodingRecord | None:
    """What a step did with a VAE; None for steps that are not an encoding or decoding, and if nothing is known."""
    directions: tuple[Direction, ...] = ("encoding", "decoding")
    for direction in directions:
        if record.name == VAE_STAGES[direction]:
            tensor = find_latent(output).tensor
            facts = None if tensor is None else SampleFacts(quick_facts(tensor, None))
            return record_of_step(record, direction, strategy_used, facts)
    return None


def _given_or(given: object, record: Stage | None, name: Literal["seconds", "memory"]) -> Any:
    """What was given, else what the step's record has."""
    return given if given is not None or record is None else getattr(record, name)


def _seconds_of(record: Stage | None, name: str) -> float | None:
    """Seconds of the stages of that name inside a stage; None if there are none."""
    inner = [] if record is None else [stage.seconds for stage in record.walk() if stage.name == name]
    return sum(inner) if inner else None


def _flat_peaks(peaks: PeakMemoryDict) -> dict[str, Any]:
    ram, gpu = peaks["ram"], peaks["gpu"]
    return {
        "ram_peak_mb": ram["peak_used_mb"],
        "gpu_allocated_peak_mb": gpu["peak_allocated_mb"],
        "gpu_reserved_peak_mb": gpu["peak_reserved_mb"],
        "peak_timestamps": {
            "ram": ram["peak_used_at_seconds"],
            "gpu_allocated": gpu["peak_allocated_at_seconds"],
            "gpu_reserved": gpu["peak_reserved_at_seconds"],
        },
    }


def workflow_sections(run: Run) -> Iterator[Section]:
    """Overview, stages, peaks and findings of a run."""
    yield Section("📋", "WORKFLOW", list(_overview_rows(run)))
    yield Section("⏱️ ", "STEPS", [row for stage in run.stages for row in _stage_rows(stage, run, 0)])
    yield Section("📊", "PEAK MEMORY", list(_peak_rows(run)))
    yield Section("🚨", "FINDINGS", [_finding_row(finding) for finding in run.findings])


def _overview_rows(run: Run) -> Iterator[Row]:
    yield Row("Name", printable(run.name) or "-")
    yield Row("Started", run.started_at)
    yield Row("Total time", seconds(run.seconds))
    if not run.complete:
        yield Row("Complete", "no, a step is still open or broke off", "yellow")
    if not any(stage.peak and stage.peak.accelerators for stage in run.walk()):
        yield Row("GPU", NO_ACCELERATOR)


def _stage_rows(stage: Stage, run: Run, depth: int) -> Iterator[Row]:
    mark, style = ("✓", "") if stage.success else ("✗", "red")
    parts = [f"{seconds(stage.seconds)} ({percent(stage.seconds, run.seconds)})"]
    if stage.memory is not None:
        before, after = stage.memory.baseline, stage.memory.current
        parts.append(f"process {mb_change(mib(change(before.process_rss_bytes, after.process_rss_bytes)))}")
        for memory in after.accelerators:
            was = before.accelerator(memory.device).allocated_bytes
            parts.append(f"{memory.device} {mb_change(mib(change(was, memory.allocated_bytes)))}")
    if stage.peak is not None:
        parts += [f"{peak.device} peak {mb(mib(peak.allocated_bytes))}" for peak in stage.peak.accelerators]
    yield Row(f"{'  ' * depth}{mark} {printable(stage.name, 60)}", ", ".join(parts), style)
    if stage.error is not None:
        yield Row(f"{'  ' * depth}  error", printable(stage.error), "red")
    for child in stage.children:
        yield from _stage_rows(child, run, depth + 1)


def _peak_rows(run: Run) -> Iterator[Row]:
    peak = run.peak()
    yield Row("Process", f"{mb(mib(peak.rss_bytes))} at {seconds(peak.rss_at_seconds)}")
    yield Row("RAM", f"{mb(mib(peak.ram_used_bytes))} at {seconds(peak.ram_used_at_seconds)}")
    for device in peak.accelerators:
        allocated = f"{mb(mib(device.allocated_bytes))} at {seconds(device.allocated_at_seconds)}"
        reserved = f"{mb(mib(device.reserved_bytes))} at {seconds(device.reserved_at_seconds)}"
        yield Row(device.device, f"allocated {allocated}, reserved {reserved}")


def _finding_row(finding: Finding) -> Row:
    advice = f" {finding.advice}" if finding.advice else ""
    where = f"{finding.stage}: " if finding.stage else ""
    style = {"info": "cyan", "warning": "yellow"}.get(finding.severity, "red")
    return Row(finding.severity.capitalize(), printable(f"{where}{finding.message}{advice}"), style)


def analysis_sections(stage: str, analysis: Mapping[str, Any]) -> tuple[str, Iterator[Section]]:
    """Title and sections of one stage's analysis."""
    known = SUMMARIES.get(stage)
    if known is None:
        return f"{stage.replace('_', ' ').upper()}", as_it_is(analysis)
    return known[0], known[1](analysis)


def _print_analysis(stage: str, analysis: Mapping[str, Any], console: Console | None) -> None:
    title, sections = analysis_sections(stage, analysis)
    print_summary(f"{title} ANALYSIS SUMMARY", sections, console)
