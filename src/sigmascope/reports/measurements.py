"""A run in the numbers that a service exports: what Prometheus and OpenTelemetry are both given.

`measured` takes a run apart into generations, prompts of ComfyUI, and stages outside of both. `Labels` bounds the words that
go with the numbers: each value of a label is a time series for good, so that nothing which a client can invent becomes one,
and no prompt, path or id at all.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Literal, get_args

from sigmascope.analysis.lora_idle import OPEN_VERDICTS, idle_in_call, lacks_values
from sigmascope.records.failures import FAILED, INTERRUPTED, OK, RAN_OUT, outcome_of
from sigmascope.records.merge import is_rank
from sigmascope.records.performance import readable_utilization
from sigmascope.records.prompts import cleaner
from sigmascope.records.run import RECIPE, STAGES, Run, Stage, is_duration, stage_seconds

GENERATION: Final = "generation"
PROCESS: Final = "process"
"""What stands for a device where the resident memory of the process is meant."""
OTHER: Final = "other"
UNKNOWN: Final = "unknown"
Outcome = Literal["ok", "error", "oom", "cancelled"]
Verdict = Literal["acts", "no_effect", "unknown"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
OUTCOME_LABELS: Final[Mapping[str, Outcome]] = {
    OK: "ok",
    FAILED: "error",
    RAN_OUT: "oom",
    INTERRUPTED: "cancelled",
}
QUEUE: Final = "seconds_before"
"""The fact of a generation or a prompt that holds how long it waited, under "queue"."""
ROUTE: Final = "route"
"""The fact of a generation that holds the template of the route that asked for it."""
STAGE_BUCKETS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
STEP_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of histograms, in seconds: a step of a small model on a good card takes 10 ms, of a video 30 s."""
_COMFYUI, _LORA, _VERDICTS, _KEPT_LORAS = "comfyui", "lora_application", "lora_verdicts", "loras_kept"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,63}")
"""What a class, a stage or a model may be called in a label."""
_ROUTE: Final = re.compile(r"/[A-Za-z0-9_./{}:*…-]{0,127}")
_DEVICE: Final = re.compile(r"[a-z]{2,12}(?::[0-9]{1,3})?(?: \(rank [0-9]{1,4}\))?")
_MOST_MODELS: Final = 100
"""Names of models may come from clients; so may those of the other labels."""
_MOST_MERGED: Final = 64
"""Ranks of a merged run that are read."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A generation, a prompt, or a stage outside of both.

    Attributes:
        pipeline: The pipeline's class, "ComfyUI", or what its monitor calls the model; None: not known.
        generation_seconds: What the whole took; None: it is no generation.
        outcome: How it ended; None: it is no generation.
        stages: The names of the stages in it and their seconds, by the device's clock where that was read.
        steps: Seconds of each denoising step, by the device's clock where that was read.
        queue_seconds: How long it waited before; None: not known.
        route: The template of the route that asked for it; None: none did, or it is not known.
        peaks: The highest bytes that PyTorch allocated, by device; under "process" the highest resident bytes.
        totals: The bytes that devices have.
        verdicts: Whether each LoRA did something, in the order in which that was found out.
        stage: What it was taken from; None: the whole run.
    """

    pipeline: str | None
    generation_seconds: float | None
    outcome: Outcome | None
    stages: tuple[tuple[str, float], ...] = ()
    steps: tuple[float, ...] = ()
    queue_seconds: float | None = None
    route: str | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    stage: Stage | None = None


def measured(run: Run) -> Iterator[Measured]:
    """What a run holds, in numbers: each generation in it that lies in no other, and each stage outside of them.

    Of a merged run that is what each rank holds. A stage that quotes a prompt in its name is called "other".
    """
    accelerators = () if run.host is None else run.host.accelerators
    totals = {facts.device: facts.total_bytes for facts in accelerators if facts.total_bytes}
    clean = cleaner(run, "none")
    if _COMFYUI in run.facts:
        facts = _mapping(run.facts[_COMFYUI])
        inside = [part for stage in nodes_of(run) for part in stage.walk()]
        yield Measured(
            "ComfyUI",
            run.seconds if is_duration(run.seconds) else None,
            OUTCOME_LABELS[outcome_of(run.stages, complete=run.complete)],
            tuple(_stage_times(inside, clean)),
            tuple(_steps(inside)),
            _seconds(_mapping(facts.get(QUEUE)).get("queue")),
            None,
            _peaks(run.peak()),
            totals,
            (*_verdicts(inside), *_told(facts.get(_KEPT_LORAS))),
        )
        return
    for stage in _outermost(run.stages):
        inside = list(stage.walk())
        is_generation = stage.name == GENERATION
        seconds = stage_seconds(stage)
        yield Measured(
            _pipeline(run, inside),
            seconds if is_generation and is_duration(seconds) else None,
            OUTCOME_LABELS[outcome_of([stage])] if is_generation else None,
            tuple(_stage_times(inside[is_generation:], clean)),
            tuple(_steps(inside)),
            _seconds(_mapping(stage.facts.get(QUEUE)).get("queue")),
            _text(stage.facts.get(ROUTE)),
            {} if stage.peak is None else _peaks(stage.peak),
            totals,
            tuple(_verdicts(inside)),
            stage,
        )


def nodes_of(run: Run) -> Iterator[Stage]:
    """The stages of a prompt of ComfyUI, without the one that is around all of them."""
    for stage in run.stages:
        yield from stage.children if stage.name == GENERATION else (stage,)


def _outermost(stages: Iterable[Stage]) -> Iterator[Stage]:
    for number, stage in enumerate(stages):
        if not is_rank(stage):
            yield stage
        elif number < _MOST_MERGED:
            yield from stage.children


def _stage_times(stages: Iterable[Stage], clean: Callable[[str], str]) -> Iterator[tuple[str, float]]:
    for stage in stages:
        seconds = stage_seconds(stage)
        if is_duration(seconds):
            yield (stage.name if stage.name in STAGES or clean(stage.name) == stage.name else ""), seconds


def _steps(stages: Iterable[Stage]) -> Iterator[float]:
    for stage in stages:
        if stage.name in STAGES and stage.name != "denoising":
            continue  # tiles and files are no denoising steps
        on_device = stage.steps.gpu_seconds
        is_timed = len(on_device) == len(stage.steps) and all(seconds is not None for seconds in on_device)
        for seconds in on_device if is_timed else stage.steps.seconds:
            if seconds is not None and is_duration(seconds):
                yield seconds


def _peaks(peak: Any) -> dict[str, int]:
    peaks = {device.device: device.allocated_bytes for device in peak.accelerators if device.allocated_bytes}
    return peaks if peak.rss_bytes is None else {**peaks, PROCESS: peak.rss_bytes}


def _verdicts(stages: Sequence[Stage]) -> Iterator[Verdict]:
    """Of each LoRA that was put on, as was found out then, and of each that was on in a call."""
    for stage in stages:
        analysis = stage.facts.get(_LORA)
        if isinstance(analysis, Mapping) and str(stage.facts.get("method", "load_")).startswith("load_"):
            yield _verdict(analysis.get("effective"))
        yield from _told(stage.facts.get(_VERDICTS))
    calls = (stage for stage in stages if _mapping(_mapping(stage.facts.get(RECIPE)).get("loras")))
    yield from _of_call(next(calls, None))


def _told(verdicts: object) -> Iterator[Verdict]:
    """What was found out of the LoRAs of a node of ComfyUI."""
    for verdict in verdicts if isinstance(verdicts, list | tuple) else ():
        yield _verdict(_mapping(verdict).get("effective"))


def _of_call(stage: Stage | None) -> Iterator[Verdict]:
    """Of the LoRAs of a call, each once, whatever it is on; one that is switched off while another acts is meant to be."""
    if stage is None:
        return
    loras = _mapping(stage.facts[RECIPE]["loras"])
    idle = idle_in_call(stage)
    active = {name.partition(".")[2] for name, lora in loras.items() if _mapping(lora).get("active")}
    names = active or {name.partition(".")[2] for name in loras}
    if lacks_values(stage):
        verdict: Verdict = "unknown"
    elif not idle:
        verdict = "acts" if active else "no_effect"
    else:
        is_open = all(one.get("severity") == "info" or one.get("id") in OPEN_VERDICTS for one in idle)
        verdict = "unknown" if is_open else "no_effect"
    yield from [verdict] * len(names)


def _verdict(effective: object) -> Verdict:
    return "unknown" if not isinstance(effective, bool) else "acts" if effective else "no_effect"


def _pipeline(run: Run, stages: Iterable[Stage]) -> str | None:
    """Its class; where nobody knows it, what a monitor calls the model."""
    known = [*(stage.facts for stage in stages), run.facts]
    kinds = (_text(_mapping(facts.get("pipeline")).get("class_name")) for facts in known)
    models = (_text(_mapping(facts.get("performance")).get("model_name")) for facts in known)
    return next(filter(None, (*kinds, *map(model_label, models))), None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and is_duration(value) else None


class Label:
    """A label with a bounded set of values: those that are known, and the first others that look like a name.

    Safe to use from any thread.

    Attributes:
        folded: How many times a value became "other".
    """

    def __init__(self, pattern: re.Pattern[str], most: int, known: Iterable[str] = ()) -> None:
        self._pattern = pattern
        self._most = most
        self._known = frozenset((*known, OTHER, UNKNOWN))
        self._seen: set[str] = set()
        self._lock = Lock()
        self.folded = 0

    def of(self, value: str | None) -> str:
        """The value as the label has it."""
        if value is None:
            return UNKNOWN
        if value in self._known or value in self._seen:
            return value
        with self._lock:
            if self._pattern.fullmatch(value) and len(self._seen) < self._most:
                self._seen.add(value)
                return value
            self.folded += 1
        return OTHER


class Labels:
    """The labels of all metrics of one export, and how many values each did not take."""

    def __init__(self) -> None:
        self.model = Label(_NAME, _MOST_MODELS, ("unnamed",))
        self.pipeline = Label(_NAME, 50)
        self.stage = Label(_NAME, 100, (*STAGES, GENERATION))
        self.device = Label(_DEVICE, 64, (PROCESS,))
        self.route = Label(_ROUTE, 100)

    def folded(self) -> dict[str, int]:
        """How many times a value became "other", by label."""
        return {name: label.folded for name, label in vars(self).items()}


def model_label(name: str | None) -> str | None:
    """What a model is called in a label: of a path, or a name on the hub, the last part."""
    return None if name is None else name.replace("\\", "/").rstrip("/").rpartition("/")[2] or None


def gauges_of_devices(stages: Iterable[Stage]) -> Iterator[tuple[str, str, float]]:
    """What was sampled of devices during stages: the device, the name in the `hw.*` conventions, and the value there.

    Shares are 0 to 1, temperatures degrees Celsius, power watts.
    """
    for stage in stages:
        for device in readable_utilization(stage):
            for name, gauge, scale in (
                ("hw.gpu.utilization", device.busy_percent, 0.01),
                ("hw.temperature", device.temperature_celsius, 1.0),
                ("hw.power", device.power_watts, 1.0),
            ):
                if gauge is not None:
                    yield device.device, name, gauge.mean * scale
