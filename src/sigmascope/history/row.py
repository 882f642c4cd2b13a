"""What of a run stands in a row of its own, to be asked for without reading the record: a pure function of the run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from statistics import median
from typing import Any, Final, TypedDict

from sigmascope.analysis.generations import PERFORMANCE, Case, cases
from sigmascope.analysis.recipe import recipe_digest
from sigmascope.errors import ConfigError
from sigmascope.plain_text import in_one_line
from sigmascope.records.failures import outcome_of
from sigmascope.records.merge import place_of
from sigmascope.records.performance import BENCHMARK, work_of
from sigmascope.records.run import (
    RECIPE,
    CallFacts,
    ComponentFacts,
    HostFacts,
    Run,
    impossible_times,
    is_duration,
    stage_seconds,
)

_COMFYUI, _FILES, _KEPT_FILES = "comfyui", "files", "files_kept"
_VERDICTS, _KEPT_LORAS = "lora_verdicts", "loras_kept"
"""Facts of a prompt of ComfyUI."""
_LONGEST: Final = 500
"""Letters of one value; a record changed by hand may hold any."""


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of a run that depend on its record alone; None: not known. `docs/history.md` says what each holds.

    Attributes:
        loras: Names of the LoRAs that were on the model: the file's if it is known, else the adapter's.
    """

    id: str
    name: str
    started_at: str
    outcome: str
    seconds: float
    generations: int
    generation_seconds: float | None = None
    pipeline: str | None = None
    model: str | None = None
    recipe: str | None = None
    work: str | None = None
    device: str | None = None
    hardware: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    batch_size: int | None = None
    steps: int | None = None
    peak_bytes: int | None = None
    version: str | None = None
    loras: tuple[str, ...] = ()

    def columns(self) -> dict[str, Any]:
        """By the names of the table `runs`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "loras"}


def row_of(run: Run) -> Row:
    """The row of a run.

    Raises:
        ConfigError: The run holds impossible times, as a file changed by hand may.
    """
    for wrong in impossible_times(run):
        raise ConfigError(f"The run is damaged: {wrong}.", hint="Leave it out, or record the run again.")
    case = _first_generation(run)
    generations = [stage for stage in run.stages if stage.name == "generation"]
    folded = 0 if run.folded is None else run.folded.generations
    seconds = [value for stage in generations if stage.success and is_duration(value := stage_seconds(stage))]
    noted = _mapping(run.facts.get(BENCHMARK))
    performance = _mapping(None if case is None or not case.stages else case.stages[0].facts.get(PERFORMANCE))
    device = _device(run, case, noted)
    return Row(
        _text(run.id) or "unnamed",
        _text(run.name) or "",
        _moment(run.started_at),
        outcome_of(run.stages, complete=run.complete),
        float(run.seconds),
        len(generations) + folded,
        median(seconds) if seconds else None,
        _pipeline(run, case),
        _model(run, case, performance, noted),
        recipe_digest(run),
        _text(work_of(run.facts)) or _rank(run),
        device,
        _hardware(run.host, device),
        **_size(case, noted),
        peak_bytes=_peak(run),
        version=_text(None if run.host is None else run.host.libraries.get("sigmascope")),
        loras=tuple(dict.fromkeys(filter(None, map(_text, _loras(run))))),
    )


def _rank(run: Run) -> str | None:
    """Ranks of one launch work side by side: none of them is a run before another one."""
    place = place_of(run)
    return None if place is None else f"rank {place.rank} of {place.world_size}"


def moment_in_utc(moment: datetime) -> str:
    """As every time in the store is written: ISO 8601 in UTC with microseconds, so that text sorts by time."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _moment(text: str) -> str:
    moment = datetime.fromisoformat(text)
    return moment_in_utc(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))


def _text(value: object) -> str | None:
    """On one line, without what a database's encoding lacks."""
    return None if value is None else in_one_line(value)[:_LONGEST]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def _first_generation(run: Run) -> Case | None:
    """The first generation of which a pipeline or a call is known; else the run as a whole."""
    try:
        known = list(cases(run))
    except ValueError:  # facts that somebody changed by hand
        return None
    named = (case for case in known if case.number is not None)
    return next(named, known[0] if known else None)


class _Size(TypedDict):
    width: int | None
    height: int | None
    num_frames: int | None
    batch_size: int | None
    steps: int | None


def _size(case: Case | None, noted: Mapping[str, Any]) -> _Size:
    """Of the call, else of the benchmark's case; steps are else counted."""
    call = CallFacts() if case is None else case.call

    def first(*values: object) -> int | None:
        return next((count for count in map(_count, values) if count is not None), None)

    counted = None if case is None else sum(len(stage.steps) for stage in case.named("denoising")) or None
    return {
        "width": first(call.width, noted.get("width")),
        "height": first(call.height, noted.get("height")),
        "num_frames": first(call.num_frames, noted.get("frames")),
        "batch_size": first(call.batch_size, noted.get("batch")),
        "steps": first(call.num_inference_steps, noted.get("steps"), counted),
    }


def _pipeline(run: Run, case: Case | None) -> str | None:
    """The pipeline's class; of a prompt of ComfyUI a name for the kinds of nodes in its graph."""
    if case is not None and case.pipeline is not None:
        return _text(case.pipeline.class_name)
    if _COMFYUI not in run.facts:
        return None
    nodes = _mapping(run.facts[_COMFYUI]).get("nodes")
    kinds = sorted(str(_mapping(node).get("class_type")) for node in nodes or ())
    return f"ComfyUI {sha256(' '.join(kinds).encode('utf-8', 'replace')).hexdigest()[:8]}"


def _model(
    run: Run, case: Case | None, performance: Mapping[str, Any], noted: Mapping[str, Any]
) -> str | None:
    """Where the pipeline was loaded from; else what it was called, or the first file of weights of a ComfyUI graph."""
    if case is not None and case.pipeline is not None and case.pipeline.source:
        return _text(case.pipeline.source)
    if _COMFYUI in run.facts:
        return next(_comfyui_models(run), None)
    return _text(noted.get("subject") or performance.get("model_name") or None)


def _comfyui_models(run: Run) -> Iterator[str]:
    """Files of weights that no LoRA came from, those of the first loader first."""
    loras = set(_loras(run))
    prompt = _mapping(run.facts.get(_COMFYUI))
    read = [file for stage in run.walk() for file in stage.facts.get(_FILES) or ()]
    for file in [*read, *(prompt.get(_KEPT_FILES) or ())]:
        name = _mapping(file).get("file")
        if isinstance(name, str) and name not in loras:
            yield in_one_line(name)[:_LONGEST]


def _loras(run: Run) -> Iterator[str]:
    for stage in run.walk():
        adapters = _mapping(_mapping(stage.facts.get(RECIPE)).get("loras"))
        for name, lora in adapters.items():
            file = _mapping(lora).get("file")
            yield file if isinstance(file, str) and file else str(name).partition(".")[2] or str(name)
        yield from _judged(stage.facts.get(_VERDICTS))
    yield from _judged(_mapping(run.facts.get(_COMFYUI)).get(_KEPT_LORAS))


def _judged(verdicts: object) -> Iterator[str]:
    """The files that verdicts of ComfyUI's nodes are about."""
    for verdict in verdicts if isinstance(verdicts, list | tuple) else ():
        shown = _mapping(verdict).get("lora")
        if isinstance(shown, str):
            yield shown.replace("\\", "/").rpartition("/")[2]


def _device(run: Run, case: Case | None, noted: Mapping[str, Any]) -> str | None:
    """The device of the denoiser's weights; else that in whose allocator the run took most, else the processor."""
    denoisers = [] if case is None else list(case.components("denoiser").values())
    offloaded = any(part.offload is not None for part in denoisers)
    held = next(filter(None, map(_device_of, denoisers)), None)
    if held is not None and not (offloaded and held == "cpu"):
        return _text(held)
    if isinstance(noted.get("device"), str):
        return _text(noted["device"])
    busiest = run.peak().busiest_device()
    if busiest is not None:
        return _text(busiest)
    return "cpu" if held is not None or run.host is not None else None


def _device_of(part: ComponentFacts) -> str | None:
    devices = {} if part.module is None else part.module.devices
    return max(devices, key=lambda name: devices[name], default=None)


def _hardware(host: HostFacts | None, device: str | None) -> str | None:
    """The name of the accelerator in use, else of the processor."""
    if host is None or device is None:
        return None
    if device.partition(":")[0] == "cpu":
        return _text(host.cpu_model)
    same = (facts for facts in host.accelerators if facts.device == device)
    kind = (facts for facts in host.accelerators if facts.device.startswith(device))
    facts = next(same, next(kind, None))
    return None if facts is None else _text(facts.name)


def _peak(run: Run) -> int | None:
    """The highest bytes that PyTorch's allocator gave out on the busiest device; without one, of the process."""
    peak = run.peak()
    device = peak.busiest_device()
    found = peak.rss_bytes if device is None else peak.accelerator(device).allocated_bytes
    return found if found is None or 0 <= found < 2**63 else None
