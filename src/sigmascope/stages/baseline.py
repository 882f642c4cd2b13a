"""The skeleton of every stage: a baseline before it, a measurement after it, and models' states at both moments.

A stage's `capture_…_baseline` gives `baseline_of` with entries of its own. Its `references` keep what the analysis
needs, and no model and no tensor alive. `analyze_…_results` begins with `measure`, which reads memory and checks
time and peaks, and ends with `Measurement.as_dict`: what all analyses hold, failures too. `summary` prints them.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar
from uuid import UUID

import torch
from torch import nn

from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.probes.models import module_facts, modules_in, offload_of, unwrap
from sigmascope.probes.reading import Reading, attempt, attribute, error_text, exception_details, lookup
from sigmascope.records.memory import (
    MIB,
    AcceleratorMemory,
    GpuPeak,
    MemoryImpact,
    MemoryImpactDict,
    MemorySnapshot,
    PeakMemory,
    PeakMemoryDict,
    mib,
)
from sigmascope.records.run import TensorFacts
from sigmascope.stages.schema import (
    Check,
    GpuNow,
    MemoryNow,
    ModelStateDict,
    StageAnalysis,
    StageBaseline,
    StatisticsDict,
    TensorDict,
    as_dict,
)

NO_BASELINE: Final = "there is no baseline"
NO_ACCELERATOR: Final = "no accelerator was found"
NO_PEAKS: Final = "peaks are measured only while a monitor runs: use WorkflowMonitor, or pass a stage's peak"
TEXT_NOT_KEPT = "an error given as text, which is not kept"
NO_PATCHER = "only a ComfyUI ModelPatcher has patches"
NO_WEIGHTS = "it has no weights"
UNTOLD = "the system does not report it"
COMPARED = (
    "model_id",
    "class_type",
    "device",
    "dtype",
    "parameters",
    "patches_count",
    "patches_uuid",
    "adapters",
)

_ON_THE_STAGE: Final = frozenset({"baseline", "current_memory", "memory_impact", "peak_memory"})
"""What of an analysis its stage holds."""
_FOR_THE_ANALYSIS: Final = frozenset({"references", "captured"})
"""Entries of a baseline that are not facts."""
_BYTES_BY_SUFFIX: Final = {"_mb": MIB, "_gb": 1024 * MIB, "_bytes": 1, "": MIB}
_Counted = TypeVar("_Counted")
_Memories = Sequence[MemorySnapshot | PeakMemory]


@dataclass(frozen=True, slots=True, repr=False)
class References:
    """What a baseline keeps for its analysis, beside what a stage adds. Models are referred to weakly."""

    snapshot: MemorySnapshot
    accelerator: Accelerator | None
    models: Mapping[str, Callable[[], Any] | None] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


_References = TypeVar("_References", bound=References)


def baseline_of(
    kind: type[References], accelerator: Accelerator | None, models: Mapping[str, object], **own: Any
) -> StageBaseline:
    """The entries that all baselines have: memory is read, and models are referred to weakly.

    Args:
        kind: What the stage keeps for its analysis.
        accelerator: What to ask about devices; None finds out.
        models: By the name of the baseline's entry with their state, for `state_now`.
        own: What `kind` has beside all stages' entries.
    """
    weakly = {name: reference_to(model) for name, model in models.items()}
    references = kind(memory_snapshot(accelerator), accelerator, weakly, **own)
    return {"timestamp": time.time(), "memory": memory_now(references.snapshot), "references": references}


def references_of(baseline: object, kind: type[_References]) -> _References | None:
    """What a stage's baseline keeps; None for one of another stage, or one that was read from a file."""
    references = lookup(baseline, "references")
    return references if isinstance(references, kind) else None


def plain_baseline(baseline: object) -> dict[str, Any] | None:
    """The baseline as plain values, without what it keeps for the analysis."""
    if not isinstance(baseline, Mapping):
        return None
    return attempt(lambda: _plain(baseline)).value or {}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(held) for name, held in value.items() if name not in _FOR_THE_ANALYSIS}
    return str(value) if isinstance(value, torch.device | UUID) else value


@dataclass(frozen=True, slots=True)
class Measurement:
    """What every analysis measures: memory now and against the baseline, time, peaks, and what was raised."""

    baseline: object
    snapshot: MemorySnapshot
    impact: MemoryImpact | None
    seconds: Reading[float]
    peak: PeakMemory | PeakMemoryDict | None
    error: BaseException | str | None

    def as_dict(self, success: bool, problems: str = "", **unavailable: str) -> StageAnalysis:
        """The entries that all analyses have.

        Args:
            success: Whether the stage succeeded.
            problems: What is wrong with its results, which is the error where nothing was raised.
            unavailable: Reasons of the stage's own.
        """
        error = self.error
        return {
            "success": success,
            "error": problems or None if error is None else error_text(error),
            "exception_details": exception_dict(error) if isinstance(error, BaseException) else None,
            "elapsed_time": self.seconds.value,
            "peak_memory": _peak_dict(self.peak),
            "baseline": plain_baseline(self.baseline),
            "current_memory": memory_now(self.snapshot),
            "unavailable": {**self._reasons(), **unavailable},
        }

    def impact_dict(self) -> MemoryImpactDict | None:
        """`memory_impact`, the same for all stages; None without a baseline."""
        return None if self.impact is None else self.impact.as_dict()

    def _reasons(self) -> dict[str, str]:
        reasons = {} if isinstance(self.baseline, Mapping) else {"baseline": NO_BASELINE}
        if self.seconds.value is None:
            reasons["elapsed_time"] = self.seconds.reason or UNTOLD
        if self.impact is None:
            reasons["memory_impact"] = NO_BASELINE
        else:
            both = self.impact.baseline, self.impact.current
            reasons |= memory_reasons(self.impact_dict(), both, "memory_impact")
        if self.peak is None:
            return reasons | {"peak_memory": NO_PEAKS}
        seen = (self.peak,) if isinstance(self.peak, PeakMemory) else ()
        return reasons | memory_reasons(_peak_dict(self.peak), seen, "peak_memory")


def _peak_dict(peak: PeakMemory | PeakMemoryDict | None) -> PeakMemoryDict | None:
    """The peaks as analyses hold them, none reserved below the allocated one: that was read at another moment."""
    if peak is None or isinstance(peak, PeakMemory):
        return None if peak is None else peak.as_dict()
    gpus = attempt(lambda: {device: _true_reserved(gpu) for device, gpu in peak["gpus"].items()}).value
    gpu = attempt(lambda: _true_reserved(peak["gpu"])).value
    return peak if gpus is None or gpu is None else {**peak, "gpu": gpu, "gpus": gpus}


def _true_reserved(gpu: GpuPeak) -> GpuPeak:
    allocated, reserved = gpu["peak_allocated_mb"], gpu["peak_reserved_mb"]
    if allocated is None or reserved is None or reserved >= allocated:
        return gpu
    at_seconds = gpu["peak_allocated_at_seconds"]
    return {**gpu, "peak_reserved_mb": allocated, "peak_reserved_at_seconds": at_seconds}


def measure(
    baseline: object,
    elapsed_time: object,
    peak_memory: PeakMemory | PeakMemoryDict | None,
    error: BaseException | str | None,
) -> Measurement:
    """Read memory, before the analysis takes any itself, and check what the caller handed over."""
    now, before = memory_of_now(baseline), memory_before(baseline)
    impact = None if before is None else MemoryImpact(before, now)
    return Measurement(baseline, now, impact, checked_seconds(elapsed_time), peak_memory, error)


def beside_the_stage(analysis: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an analysis that the stage itself does not hold already."""
    return {name: value for name, value in analysis.items() if name not in _ON_THE_STAGE}


def memory_of_now(baseline: object) -> MemorySnapshot:
    """Memory now, of the devices that the baseline was taken of."""
    references = references_of(baseline, References)
    return memory_snapshot(None if references is None else references.accelerator)


def memory_before(baseline: object) -> MemorySnapshot | None:
    """Memory at the baseline, also of one that was read from a file."""
    references = references_of(baseline, References)
    if references is not None:
        return references.snapshot
    memory = lookup(baseline, "memory")
    return snapshot_of(memory) if isinstance(memory, Mapping) else None


def snapshot_of(memory: Mapping[str, Any]) -> MemorySnapshot:
    """The snapshot that a `MemoryNow` was made of, as far as it tells."""
    ram, gpus = memory.get("ram") or {}, memory.get("gpus") or {}
    return MemorySnapshot(
        nbytes_in(ram, "total"),
        nbytes_in(ram, "used"),
        nbytes_in(ram, "available"),
        nbytes_in(memory, "process_rss"),
        tuple(device_memory(name, gpu) for name, gpu in gpus.items()),
    )


def device_memory(name: str, figures: object) -> AcceleratorMemory:
    """The memory of a device by figures that name their unit."""
    return AcceleratorMemory(
        name,
        nbytes_in(figures, "allocated"),
        nbytes_in(figures, "reserved"),
        nbytes_in(figures, "total"),
        nbytes_in(figures, "free"),
        nbytes_in(figures, "driver_used"),
    )


def nbytes_in(figures: object, name: str) -> int | None:
    """A figure in bytes, whatever unit its key names; an object's attributes are bytes, as psutil's are."""
    if not isinstance(figures, Mapping):
        values = (attribute(figures, name), attribute(figures, f"{name}_bytes"))
        return next((value for value in values if isinstance(value, int)), None)
    for suffix, unit in _BYTES_BY_SUFFIX.items():
        value = figures.get(f"{name}{suffix}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return round(value * unit)
    return None


def checked_seconds(seconds: object) -> Reading[float]:
    """A duration, or what is wrong with it."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return Reading(
            None,
            "no time was given"
            if seconds is None
            else f"{type(seconds).__name__} is not a number of seconds",
        )
    if not math.isfinite(seconds) or seconds < 0:
        return Reading(None, f"{seconds} s is not a valid duration")
    return Reading(float(seconds))


def exception_dict(error: BaseException) -> dict[str, str]:
    """`exception_details` of an analysis: type, message and stack trace. Nothing of it stays alive."""
    return asdict(exception_details(error)) | {"type": type(error).__qualname__}


def device_before_and_after(
    impact: MemoryImpact | None,
) -> tuple[str | None, AcceleratorMemory, AcceleratorMemory]:
    """The device in use and its memory at both moments; all unknown where there is none."""
    device = None if impact is None else impact.current.device_in_use()
    if impact is None or device is None:
        return None, AcceleratorMemory(""), AcceleratorMemory("")
    return device, impact.baseline.accelerator(device), impact.current.accelerator(device)


def cleanup_effectiveness(peak: object, impact: MemoryImpact | None) -> Reading[float]:
    """The share of the growth to the peak that was given back, or why it is not known.

    Of the device in use where there is one, else of this process.
    """
    if impact is None or not isinstance(peak, PeakMemory):
        return Reading(None, "a baseline and a stage's peak are needed")
    device = impact.current.device_in_use()
    share = (
        peak.rss_cleanup_effectiveness(impact)
        if device is None
        else peak.cleanup_effectiveness(impact, device)
    )
    return Reading(share, "memory did not grow")


def memory_now(snapshot: MemorySnapshot) -> MemoryNow:
    """The snapshot in MiB and percentages; `gpu` is the device in use."""
    in_use = snapshot.device_in_use()
    now: MemoryNow = {
        "ram": {
            "used_mb": mib(snapshot.ram_used_bytes),
            "available_mb": mib(snapshot.ram_available_bytes),
            "total_mb": mib(snapshot.ram_total_bytes),
            "percent_used": snapshot.ram_percent_used(),
        },
        "process_rss_mb": mib(snapshot.process_rss_bytes),
        "gpu": _gpu_now(snapshot.accelerator(in_use or "")),
        "gpus": {memory.device: _gpu_now(memory) for memory in snapshot.accelerators},
        "unavailable": {},
    }
    now["unavailable"] = memory_reasons(now, (snapshot,))
    return now


def memory_reasons(figures: object, memories: _Memories, path: str = "") -> dict[str, str]:
    """Why figures of memory are None, by the path to each, or to the dict of which all are.

    Args:
        figures: A dict of figures and dicts, or one figure.
        memories: What they were read from.
        path: Where they stand.
    """
    if _is_unknown(figures):
        return {path: _why_unknown(path, memories)}
    inner = figures.items() if isinstance(figures, Mapping) else ()
    parts = (memory_reasons(value, memories, f"{path}.{name}".lstrip(".")) for name, value in inner)
    return {name: why for part in parts for name, why in part.items()}


def _is_unknown(figures: object) -> bool:
    if isinstance(figures, Mapping) and figures:
        return all(map(_is_unknown, figures.values()))
    return figures is None


def _why_unknown(path: str, memories: _Memories) -> str:
    if "gpu" in path:
        devices = [device for memory in memories for device in memory.accelerators]
        if not devices:
            return next((w for m in memories if (w := m.unavailable.get("accelerators"))), NO_ACCELERATOR)
        known = (
            (name.removesuffix("_bytes"), why)
            for device in devices
            for name, why in device.unavailable.items()
        )
        is_share = path.endswith(("_pct", "_ratio", "fragmentation"))
        otherwise = "it would be a fraction of 0" if is_share else UNTOLD
        return next((why for name, why in known if name in path), otherwise)
    word = "rss" if "process" in path else "ram"
    return next((why for m in memories for name, why in m.unavailable.items() if word in name), UNTOLD)


def _gpu_now(memory: AcceleratorMemory) -> GpuNow:
    return {
        "allocated_mb": mib(memory.allocated_bytes),
        "reserved_mb": mib(memory.reserved_bytes),
        "total_mb": mib(memory.total_bytes),
        "free_mb": mib(memory.free_bytes),
        "driver_used_mb": mib(memory.driver_used_bytes),
        "fragmentation": memory.fragmentation(),
        "allocated_reserved_ratio": memory.allocated_ratio(),
    }


def model_state(model: object) -> ModelStateDict:
    """Identity, class, device, patches and adapters of a model or what wraps one. Never raises.

    A model's identity is its `id()`, which tells objects apart while they live.

    Args:
        model: An `nn.Module`, ComfyUI's `ModelPatcher` or `CLIP`, a pipeline, or None.
    """
    if model is None:
        return _unknown_state("no model was given")
    state = attempt(lambda: _state_of(model))
    return state.value or _unknown_state(state.reason)


def state_now(baseline: object, name: str) -> ModelStateDict:
    """The state of a model of the baseline as it is now, with what changed since."""
    references = references_of(baseline, References)
    if references is None:
        return _unknown_state(NO_BASELINE)
    before: ModelStateDict = lookup(baseline, name)
    reference = references.models.get(name)
    model = None if reference is None else reference()
    if model is None and before["model_id"] is not None:
        return _unknown_state("the model is gone, or cannot be weakly referenced")
    state = model_state(model)
    if state["class_type"] is not None:
        is_moved = attempt(lambda: _is_moved_to_work(model)).value
        state["changed"] = [name for name in changes(before, state) if name != "device" or not is_moved]
    return state


def _is_moved_to_work(model: object) -> bool:
    """Whether hooks of offloading, or ComfyUI's patcher, move a model when it works: then another device is no change."""
    patcher = model if hasattr(model, "patches_uuid") else getattr(model, "patcher", None)
    module = unwrap(model)
    return getattr(patcher, "load_device", None) is not None or (
        module is not None and offload_of(module) is not None
    )


def _unknown_state(reason: str | None) -> ModelStateDict:
    return as_dict(ModelStateDict, why=reason, adapters=[])


def _state_of(model: object) -> ModelStateDict:
    facts = module_facts(model)
    patcher = model if hasattr(model, "patches_uuid") else getattr(model, "patcher", None)
    patches = getattr(patcher, "patches", None)
    uuid = None if patches is None else str(getattr(patcher, "patches_uuid", "")) or None
    return as_dict(
        ModelStateDict,
        facts,
        model_id=identity(model),
        class_type=facts.class_name,
        wrapper_class=facts.wrapper_class_name,
        device=Reading(most_common(facts.devices), NO_WEIGHTS),
        dtype=Reading(most_common(facts.dtypes), NO_WEIGHTS),
        patches_count=Reading(len(patches) if isinstance(patches, Mapping) else None, NO_PATCHER),
        patches_uuid=Reading(uuid, NO_PATCHER),
        adapters=_adapters(model),
    )


def most_common(counts: Mapping[_Counted, int]) -> _Counted | None:
    """What was counted most often, the first of several; None where nothing was."""
    return max(counts, key=lambda counted: counts[counted], default=None)


def identity(model: object) -> int:
    """What identifies a model among those that live; a mapping is identified by the modules that it holds."""
    if not isinstance(model, Mapping):
        return id(model)
    return hash(tuple(id(part) for part in model.values() if isinstance(part, nn.Module)))


def _adapters(model: object) -> list[str]:
    """Names of the PEFT adapters that act on the model, at whatever depth they were injected."""
    names: dict[str, None] = {}
    modules = modules_in(model) if isinstance(model, nn.Module) else ()
    for module in modules:
        active = getattr(module, "active_adapters", None) if hasattr(module, "lora_A") else None
        names |= dict.fromkeys(map(str, active)) if isinstance(active, list | tuple) else {}
    return list(names)


def changes(before: ModelStateDict, after: ModelStateDict) -> list[str]:
    """The fields in which two states differ. What is unknown on either side is not compared."""
    pairs = ((name, before.get(name), after.get(name)) for name in COMPARED)
    return [name for name, old, new in pairs if old is not None and new is not None and old != new]


def reference_to(model: object) -> Callable[[], Any] | None:
    """A reference that keeps nothing alive; None if the object takes none.

    Several models in a mapping are referred to one by one, since a dict takes no weak reference.
    """
    if isinstance(model, Mapping):
        parts = {name: reference_to(part) for name, part in model.items() if isinstance(part, nn.Module)}
        return (lambda: _still_there(parts)) if parts else None
    try:
        return weakref.ref(model)
    except TypeError:
        return None


def _still_there(parts: Mapping[Any, Callable[[], Any] | None]) -> dict[Any, Any] | None:
    """The models by name; None if one of them is gone."""
    models = {name: None if reference is None else reference() for name, reference in parts.items()}
    return None if None in models.values() else models


def check_of(problems: Iterable[str], *, known: bool) -> Check:
    """A check: True without problems, None if there was nothing to check."""
    messages = list(dict.fromkeys(problems))
    return {"passed": False if messages else True if known else None, "messages": messages}


def tensor_dict(facts: TensorFacts) -> TensorDict:
    """A tensor's facts as analyses hold them."""
    return as_dict(
        TensorDict,
        facts,
        shape=list(facts.shape),
        size_mb=facts.nbytes / MIB,
        statistics=as_dict(StatisticsDict, facts),
    )
