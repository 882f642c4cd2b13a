"""What a record says about memory: findings, growth from call to call, and what was running at each peak.

Growth compares the memory that stages of one name, or the steps of a stage, leave in use in the process and on each
device.

A peak belongs to the innermost stage that was open at that moment and reached it. The component is the one that this
stage or step ran; the peak includes memory that other components hold.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Final

from sigmascope import units
from sigmascope.analysis.generations import Case, cases, whole
from sigmascope.analysis.rules import RULES, Seen, rule
from sigmascope.analysis.run_figures import MOST_READINGS, Number, Slope, theil_sen
from sigmascope.records.memory import mib
from sigmascope.records.performance import PROCESS, readable_curves
from sigmascope.records.run import RUNS_BEFORE, ComponentFacts, Finding, Run, Stage, names_in, stage_path

_MIB: Final = 2**20
_FRAGMENTED_SHARE: Final = 0.25
_FRAGMENTED_BYTES: Final = 1024 * _MIB
_SHORT_OF_MEMORY_SHARE: Final = 0.8
"""Of a device: when more is held, memory is short."""
_NEAR_LIMIT_SHARE: Final = 0.95
_KEPT_BYTES: Final = 256 * _MIB
_KEPT_SHARE: Final = 0.5
_MOST_OF_A_FALL: Final = 0.8
_LOADS: Final = frozenset({"model_loading", "lora_application"})
"""Stages whose purpose is to leave more memory in use."""
_TILES: Final = "tiles would make it less (pipe.vae.enable_tiling())"
_WORTHWHILE_TILES_SHARE: Final = 0.9
"""Share of a peak: tiles that leave more than this are not worth it."""
_COMFORTABLE_SHARE: Final = 0.7
"""Weights that take less of a device than this leave room for activations at usual sizes."""


@rule("memory.near_the_limit", "warning", about="memory")
def near_the_limit(case: Case) -> Iterator[Seen]:
    """Memory was almost full: a slightly larger image will not fit."""
    for device in case.accelerators():
        highest, name = _most_reserved(case, device.device)
        if device.total_bytes and highest > _NEAR_LIMIT_SHARE * device.total_bytes:
            yield Seen(
                message=f"{name} held {units.mib(highest)} MB of {device.device}'s {units.mib(device.total_bytes)} MB.",
                evidence={
                    "device": device.device,
                    "peak_mb": mib(highest),
                    "total_mb": mib(device.total_bytes),
                },
                advice="To free memory, use VAE tiling, half precision or offloading (pipe.enable_model_cpu_offload()).",
                stage=name,
            )


def _most_reserved(case: Case, device: str) -> tuple[int, str | None]:
    """The most that the allocator held, and the first stage that saw it, the innermost of those around it."""
    highest, at = 0, None
    for stage in case.stages:  # outer ones before those in them
        held = None if stage.peak is None else stage.peak.accelerator(device).reserved_bytes
        if held and (held > highest or (held == highest and at is not None and _is_in(stage, at))):
            highest, at = held, stage
    return highest, None if at is None else at.name


def _is_in(stage: Stage, outer: Stage) -> bool:
    return any(inner is stage for inner in outer.walk())


@rule("memory.kept_after_stage", "warning", about="memory")
def kept_after_a_stage(case: Case) -> Iterator[Seen]:
    """A stage that loads nothing left most of the memory it took in use.

    The stages around it must leave it in use too: outputs for the next stage are freed by then, and so are weights that
    are offloaded after the generation.
    """
    for stage in _leaves(case):
        if stage.name in _LOADS or stage.memory is None or stage.peak is None or not stage.success:
            continue
        for memory in stage.memory.current.accelerators:
            baseline = stage.memory.baseline.accelerator(memory.device).allocated_bytes
            peak = stage.peak.accelerator(memory.device).allocated_bytes
            if baseline is None or peak is None or memory.allocated_bytes is None or peak <= baseline:
                continue
            kept = memory.allocated_bytes - baseline
            is_much = kept > max(_KEPT_BYTES, _KEPT_SHARE * (peak - baseline))
            if is_much and _is_kept_around(case, stage, memory.device, kept):
                yield Seen(
                    message=f"{stage.name} left {units.mib(kept)} MB more in use on {memory.device} than before it began.",
                    evidence={
                        "device": memory.device,
                        "kept_mb": mib(kept),
                        "peak_growth_mb": mib(peak - baseline),
                    },
                    advice="Look for outputs, hidden states or graphs that are kept. Use torch.no_grad() and del, and "
                    "do not collect latents in lists.",
                    stage=stage.name,
                )


def _leaves(case: Case) -> Iterator[Stage]:
    """Stages without others inside: a finding names the innermost stage."""
    return (stage for stage in case.stages if not stage.children)


def _is_kept_around(case: Case, stage: Stage, device: str, kept: int) -> bool:
    """Whether all stages around this one leave at least half as much in use, as far as that is known."""
    for outer in case.stages:
        if outer is stage or outer.memory is None or not _is_in(stage, outer):
            continue
        before = outer.memory.baseline.accelerator(device).allocated_bytes
        after = outer.memory.current.accelerator(device).allocated_bytes
        if before is not None and after is not None and after - before < kept / 2:
            return False
    return True


@rule("values.not_finite", "error", about="pictures")
def values_not_finite(case: Case) -> Iterator[Seen]:
    """The first tensor that holds NaN or infinity, which spoils all that comes after it.

    A stage's tensors are mostly its results, so the tensors of the stages inside it come before its own.
    """
    for stage in sorted(case.stages, key=lambda stage: stage.started_seconds + stage.seconds):
        for name, facts in stage.tensors.items():
            nans, infinities = facts.nan_count or 0, facts.inf_count or 0
            if not nans and not infinities:
                continue
            half = facts.dtype.removeprefix("torch.") == "float16"  # bfloat16 has the range of float32
            yield Seen(
                message=f"{name} of {stage.name} is the first tensor with NaN or infinity: "
                f"{_not_finite_words(nans, infinities)} among {units.counted(facts.num_elements, 'element')}.",
                evidence={"tensor": name, "nan": nans, "inf": infinities, "dtype": facts.dtype},
                advice="float16 overflows at 65,504. Run this part in bfloat16 or float32. For SDXL's VAE, use force_upcast or "
                "madebyollin/sdxl-vae-fp16-fix." if half else "Check the stage before it: weights, LoRA strength, input.",
                stage=stage.name,
            )  # fmt: skip
            return


def _not_finite_words(nans: int, infinities: int) -> str:
    parts = [f"{nans:,} NaN"] * bool(nans) + [units.counted(infinities, "infinite value")] * bool(infinities)
    return " and ".join(parts)


@rule("memory.fragmented", "info", "warning", about="memory", looks_at="run")
def fragmented(run: Run) -> Iterator[Seen]:
    """PyTorch took far more memory from the device than its tensors needed.

    Memory that the allocator keeps from one stage for the next is not fragmentation, so the most that it ever held is
    compared with the most that tensors ever took. Some fragmentation is usual; it matters when memory is short.
    """
    case = whole(run)
    sizes = {accelerator.device: accelerator.total_bytes for accelerator in case.accelerators()}
    for device in _devices(case):
        reserved, name = _most_reserved(case, device)
        allocated = max(
            (stage.peak.accelerator(device).allocated_bytes or 0 for stage in case.stages if stage.peak),
            default=0,
        )
        idle = reserved - max(allocated, _held_before(case, device))
        if not allocated or idle <= max(_FRAGMENTED_BYTES, _FRAGMENTED_SHARE * reserved):
            continue
        yield Seen(
            severity="warning" if reserved > _SHORT_OF_MEMORY_SHARE * (sizes.get(device) or 0) > 0 else "info",
            message=f"PyTorch held {units.mib(reserved)} MB on {device} in {name}: {units.mib(idle)} MB "
            f"({100 * idle / reserved:.0f} %) more than tensors ever took, because its free blocks were too small to "
            "reuse.",
            evidence={"device": device, "idle_mb": mib(idle), "fragmentation": idle / reserved},
            advice="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or generate the largest images first. "
            "torch.cuda.empty_cache() frees the unused blocks for other programs.",
            stage=name,
        )  # fmt: skip


def _devices(case: Case) -> list[str]:
    devices = (
        peak.device for stage in case.stages for peak in (stage.peak.accelerators if stage.peak else ())
    )
    return list(dict.fromkeys(devices))


def _held_before(case: Case, device: str) -> int:
    """What the allocator held when the first stage began; 0 where that is not known."""
    for stage in sorted(case.stages, key=lambda stage: stage.started_seconds):
        if stage.memory is not None:
            return stage.memory.baseline.accelerator(device).reserved_bytes or 0
    return 0


@rule("placement.cpu_while_accelerator_free", "warning", about="a slow device")
def cpu_while_an_accelerator_is_free(case: Case) -> Iterator[Seen]:
    """The denoiser ran on the CPU, without offloading, though there is an accelerator."""
    devices = case.accelerators()
    if not devices:
        return
    for name, part in case.components("denoiser").items():
        if part.module is None or set(part.module.devices) != {"cpu"} or part.offload is not None:
            continue
        yield Seen(
            message=f"{name} ({part.class_name}) ran on the CPU, though there is {devices[0].device} "
            f"({devices[0].name or 'unnamed'}).",
            evidence={"component": name, "accelerator": devices[0].device, "mb": mib(part.module.nbytes)},
            advice=f'Call pipe.to("{devices[0].device.partition(":")[0]}"), or pipe.enable_model_cpu_offload() if it does '
            "not fit.",
        )


@rule("placement.weights_moved_every_step", "warning", "info", about="offloading")
def weights_moved_every_step(case: Case) -> Iterator[Seen]:
    """Sequential or group offloading moves the denoiser's weights to the device in every step."""
    steps = sum(len(stage.steps) for stage in case.with_steps())
    for name, part in case.components("denoiser").items():
        if part.offload not in ("sequential", "group") or part.module is None or part.module.nbytes is None:
            continue
        moved = part.module.nbytes * steps
        room = _is_there_room(case, [part])
        yield Seen(
            severity="warning" if part.offload == "sequential" or room else "info",
            message=f"{part.offload.capitalize()} offloading moves {name}'s {units.mib(part.module.nbytes)} MB to the "
            f"device in every step: {units.mib(moved)} MB over {units.counted(steps, 'step')}.",
            evidence={"component": name, "offload": part.offload, "steps": steps, "moved_mb": mib(moved)},
            advice="The denoiser fits on the device: keep it there (pipe.enable_model_cpu_offload() moves each model once a "
            "generation)." if room else "Try pipe.enable_model_cpu_offload(), which moves each model once a generation. "
            "If that does not fit, group offloading with use_stream=True hides part of the copying.",
        )  # fmt: skip


def _is_there_room(case: Case, parts: list[ComponentFacts]) -> bool:
    needed = sum(part.module.nbytes or 0 for part in parts if part.module is not None)
    largest = _largest_device_bytes(case)
    return largest is not None and needed < _COMFORTABLE_SHARE * largest


def _largest_device_bytes(case: Case) -> int | None:
    return max(
        (device.total_bytes for device in case.accelerators() if device.total_bytes is not None), default=None
    )


@rule("placement.offloaded_though_it_fits", "info", about="offloading")
def offloaded_though_it_fits(case: Case) -> Iterator[Seen]:
    """Model offloading is on, though all weights fit on the device together."""
    parts = [part for part in (case.pipeline.components.values() if case.pipeline else ()) if part.module]
    if not any(part.offload == "model" for part in parts) or not _is_there_room(case, parts):
        return
    needed = sum(part.module.nbytes or 0 for part in parts if part.module is not None)
    yield Seen(
        message=f"Model offloading is on, though all weights together take {units.mib(needed)} MB of the device's "
        f"{units.mib(_largest_device_bytes(case))} MB.",
        evidence={"weights_mb": mib(needed), "device_mb": mib(_largest_device_bytes(case))},
        advice="Keep the pipeline on the device: pipe.remove_all_hooks(); pipe.to(device).",
    )


@rule("placement.loaded_again", "warning", about="offloading", looks_at="run")
def loaded_again(run: Run) -> Iterator[Seen]:
    """A run loaded the same model more than once, such as a text encoder for every image."""
    seconds: dict[tuple[object, ...], list[float]] = {}
    for stage in whole(run).named("model_loading"):
        if "moves" in stage.facts:
            continue  # to another device: nothing is read
        source = tuple(str(stage.facts.get(name)) for name in ("source", "subfolder", "dtype"))
        for facts in stage.modules.values():
            seconds.setdefault((facts.class_name, facts.parameters, *source), []).append(stage.seconds)
    for (class_name, *_), loads in seconds.items():
        if len(loads) < 2:
            continue
        again = sum(loads[1:])
        yield Seen(
            message=f"{class_name} was loaded {len(loads)} times; the loads after the first took {units.seconds(again)}.",
            evidence={"class": str(class_name), "times": len(loads), "gain_seconds": again},
            advice="Load it once and keep it. To free memory, move it to the CPU instead of deleting it.",
            stage="model_loading",
        )


FEWEST_CALLS = 8
FEWEST_EVEN: Final = 4
_MOST_UNEVEN: Final = 1.5
"""The most that one of a few calls may add, by what another adds."""
_LEAST_EVEN_BYTES: Final = _MIB
_FEWEST_UNEVEN: Final = 5
"""After the first one; of these each may add another amount."""
_LATER_SHARE_OF_FEW: Final = 0.75
_LEAST_SHARE_GROWN: Final = 0.1
_SIZES: Final = ("height", "width", "num_frames", "batch_size")
TOLERANCE_BYTES: Number = 64 * 1024
"""What a process may grow by in each call: logs and allocators take some. Device counters are exact."""
RECORD_BYTES: Final = 20 * 1024
"""What it may grow by besides for each stage of a call: the record of a pipeline's stage takes 14 KiB, whatever its steps."""
_RISING_SHARE_OF_CALLS: Final = 0.5
"""By so many the resident set must rise."""
_MOST_WARM_UP_CALLS: Final = 5
_LATER_SHARE_OF_SLOPE: Final = 0.25
"""The later half of the calls must grow by this much of the whole slope."""
HEAP = "heap_in_use_bytes"
"""The fact of a stage that holds what malloc had given out, `{"before": …, "after": …}`."""
HEAP_OF_PROCESS = "the process's heap"
_THE: Final = {PROCESS: "the process"}
_LEAK: Final = "memory_leak"
Measure = tuple[str, list[int], list[int]]


def find_leaks(run: Run) -> tuple[Finding, ...]:
    """A finding for each kind of stage that leaves more memory in use each time it runs.

    Looked at are stages of one name that ran at least 8 times after warming up, or 4 times if each adds as much, and the
    steps inside each stage;
    of each the process and every device. The process's heap is looked at where it was noted, beside its resident set.
    """
    return tuple(RULES[_LEAK].findings(run))


@rule(_LEAK, "warning", about="memory", looks_at="run")
def grows_from_call_to_call(run: Run) -> Iterator[Seen]:
    """A stage or step leaves more memory in use each time it runs."""
    by_work: dict[tuple[str, ...], list[Stage]] = {}
    for stage in run.walk():
        by_work.setdefault(_work_of(stage), []).append(stage)
    outermost = {stage.name for stage in run.stages}
    for (name, *_), stages in by_work.items():
        for measures in after_each(stages):
            for where, readings, inside in measures:
                leak = _leak(
                    name, "call", where, readings, recorded=_recorded(stages), is_alike=_did_alike(stages)
                )
                if leak is not None and (name in outermost or _grows_inside(inside, leak)):
                    yield leak
                    break
        for stage in stages:
            for where, readings in _after_each_step(stage):
                leak = _leak(name, "step", where, readings)
                if leak is not None:
                    yield leak


def _work_of(stage: Stage) -> tuple[str, ...]:
    """The stage's name; of loading, with what was loaded: each model of a pipeline adds to what is in use; of LoRAs, with the method."""
    if "method" in stage.facts:
        return (stage.name, str(stage.facts["method"]))
    if stage.name != "model_loading":
        return (stage.name,)
    loaded = (facts.class_name for facts in stage.modules.values())
    return (stage.name, *(str(stage.facts.get(name)) for name in ("source", "subfolder")), *sorted(loaded))


def _recorded(stages: Sequence[Stage]) -> int:
    """How many stages each call of them added to the record, itself included."""
    return max(sum(1 for _ in stage.walk()) for stage in stages)


def _did_alike(stages: Sequence[Stage]) -> bool:
    """Whether all were asked for pictures of one size, as many at once; each new size needs memory of its own."""
    asked = [facts if isinstance(facts := stage.facts.get("call"), Mapping) else {} for stage in stages]
    return len({tuple(call.get(name) for name in _SIZES) for call in asked}) <= 1


def _leak(
    stage: str,
    period: str,
    where: str,
    readings: Sequence[int],
    *,
    recorded: int = 0,
    is_alike: bool = False,
) -> Seen | None:
    is_host = where in (PROCESS, HEAP_OF_PROCESS)
    grown = growth(
        readings,
        tolerance_bytes=TOLERANCE_BYTES + recorded * RECORD_BYTES if is_host else 0,
        rising=_RISING_SHARE_OF_CALLS if where == PROCESS else 0.0,
        few=period == "call",
        is_alike=is_alike,
    )
    if grown is None or not grown.is_leak:
        return None
    slope = grown.slope
    return Seen(
        message=f"Memory of {_THE.get(where, where)} grows by {_in_words(slope.value)} each {period}, over {units.counted(grown.calls, period)}.",
        evidence={
            "where": where,
            "calls": grown.calls,
            "mb_per_call": slope.value / 2**20,
            "mb_per_call_lower": slope.lower / 2**20,
            "mb_per_call_upper": slope.upper / 2**20,
            "grown_mb": mib(round(grown.total_bytes)),
        },
        advice="Look for tensors, outputs or graphs that are kept between calls (missing no_grad, growing lists).",
        stage=stage,
    )


def _in_words(nbytes: float) -> str:
    megabytes = nbytes / 2**20
    return f"{megabytes:.3g} MB" if megabytes < 1000 else units.format_size(round(nbytes))


def _grows_inside(changes: Sequence[int], leak: Seen) -> bool:
    """Whether an inner stage itself makes the growth that is seen at its end."""
    per_call = leak.evidence["mb_per_call"]
    return isinstance(per_call, float) and (mib(round(median(changes))) or 0.0) > per_call / 2


def _after_each_step(stage: Stage) -> Iterator[tuple[str, list[int]]]:
    columns = {PROCESS: stage.steps.rss_bytes, "the device in use": stage.steps.allocated_bytes}
    for where, column in columns.items():
        yield where, [figure for figure in column if figure is not None]


@dataclass(frozen=True, slots=True)
class Growth:
    """How memory grew over `calls` calls, those of the warm-up left out."""

    calls: int
    slope: Slope
    total_bytes: Number
    is_leak: bool


def growth(
    readings: Sequence[Number],
    *,
    tolerance_bytes: Number = TOLERANCE_BYTES,
    rising: float = 0.0,
    few: bool = False,
    is_alike: bool = False,
) -> Growth | None:
    """Whether memory grows steadily from call to call.

    It does when, with a confidence of 99 %, each call adds more than the tolerance, and the later half of the calls adds
    as well: caches that fill up and lazy initialisation grow at first and then stop. The first quarter of the calls, at
    most 5, is warm-up and is left out.

    Args:
        readings: Bytes in use after each call, in order.
        tolerance_bytes: Growth by call that does not count as a leak.
        rising: The share of calls, 0 to 1, that must add something. The resident set jumps with the largest call so
            far and stays there, which other calls do not add to.
        few: Whether 4 to 7 calls may tell too: those after the first must each add nearly the same.
        is_alike: Whether all calls did the same work. Then it is enough of 6 or 7 that none gives anything back, that the
            later ones add three quarters of what the earlier ones did, and that all add a tenth of what was in use.

    Returns:
        The growth; None when fewer than 8 calls are left, or 4 where few may tell.
    """
    calls = readings[min(_MOST_WARM_UP_CALLS, len(readings) // 4) :]
    if len(calls) < FEWEST_CALLS:
        is_enough = few and len(readings) >= FEWEST_EVEN
        return _growth_of_few(readings[1:], tolerance_bytes, is_alike=is_alike) if is_enough else None
    slope = theil_sen(calls)
    later = theil_sen(calls[len(calls) // 2 :]).value
    grows = slope.lower > tolerance_bytes and later > max(
        tolerance_bytes, _LATER_SHARE_OF_SLOPE * slope.value
    )
    thinned = calls[:: math.ceil(len(calls) / MOST_READINGS)]
    steps = [after > before for before, after in pairwise(thinned)]
    return Growth(len(calls), slope, calls[-1] - calls[0], grows and sum(steps) >= rising * len(steps))


def _growth_of_few(calls: Sequence[Number], tolerance_bytes: Number, *, is_alike: bool) -> Growth | None:
    """The growth of a few calls, each of which added as much, or all of which added much: what fills up adds less and less."""
    added = [after - before for before, after in pairwise(calls)]
    is_even = min(added) > max(tolerance_bytes, _LEAST_EVEN_BYTES) and max(added) <= _MOST_UNEVEN * min(added)
    early, late = sum(added[: len(added) // 2]), sum(added[len(added) // 2 :])
    is_steady = (
        is_alike
        and len(calls) >= _FEWEST_UNEVEN
        and min(added) >= 0
        and late >= _LATER_SHARE_OF_FEW * early
        and early + late
        > max(_LEAST_SHARE_GROWN * calls[0], len(added) * max(tolerance_bytes, _LEAST_EVEN_BYTES))
    )
    slope = Slope(float(median(added)), float(min(added)), float(max(added)))
    is_leak = is_even or is_steady
    return Growth(len(calls), slope, calls[-1] - calls[0], is_leak=True) if is_leak else None


def after_each(stages: Sequence[Stage]) -> Iterator[list[Measure]]:
    """Of the process, then of every device: where, bytes in use at the end of each stage, and how much each added.

    The process has two measures, the better one first.
    """
    impacts = [stage.memory for stage in stages if stage.memory is not None]
    heap = [_heap(stage) for stage in stages]
    process = [(i.baseline.process_rss_bytes, i.current.process_rss_bytes) for i in impacts]
    yield [(HEAP_OF_PROCESS, *_ends_and_changes(heap)), (PROCESS, *_ends_and_changes(process))]
    for device in dict.fromkeys(memory.device for i in impacts for memory in i.current.accelerators):
        pairs = [
            (i.baseline.accelerator(device).allocated_bytes, i.current.accelerator(device).allocated_bytes)
            for i in impacts
        ]
        yield [(device, *_ends_and_changes(pairs))]


def _heap(stage: Stage) -> tuple[int | None, int | None]:
    noted = stage.facts.get(HEAP)
    before, after = (noted.get(name) if isinstance(noted, Mapping) else None for name in ("before", "after"))
    return before if isinstance(before, int) else None, after if isinstance(after, int) else None


def _ends_and_changes(pairs: Sequence[tuple[int | None, int | None]]) -> tuple[list[int], list[int]]:
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    return [after for _, after in known], [after - before for before, after in known]


FACT: Final = "peak_owner"
SLACK_SECONDS: Final = 1e-6
"""By how much two figures of one moment may differ."""


@dataclass(frozen=True, slots=True)
class PeakOwner:
    """One peak and whose it is.

    Attributes:
        where: "process" (its resident memory) or a device (what is allocated there).
        bytes: How much it was.
        at_seconds: When, since the run began.
        stage: The stage that was at work, with those around it: "generation/latent_decoding".
        component: The pipeline's component that was at work; None: the stage ran none, or several took turns in it and
            it is not known which of them it was.
        component_bytes: Of its weights; None: not known.
        grown_bytes: By how much the peak is above what was in use when that stage began.
    """

    where: str
    bytes: int
    at_seconds: float | None
    stage: str
    component: str | None = None
    component_bytes: int | None = None
    grown_bytes: int | None = None


def held_less_before(now: Sequence[Run], before: Sequence[Run]) -> str | None:
    """Why a lower peak of the process says nothing of the runs; None: it may.

    A system that is short of memory takes back what lies unused, such as pages of a library's code. A process then holds less
    for good, whatever it runs. So where one process made the last run before and the first one now, and held less when a run
    began by most of what the peak fell, the runs themselves need as much as they did.

    Args:
        now: Runs of the same work on the same recipe, in their order.
        before: Those that ran before them.
    """
    if not (now and before) or not _follows_in_its_process(now[0], before[-1]):
        return None
    held, peaks = (
        [[amount for amount in map(of, side) if amount is not None] for side in (before, now)]
        for of in (_held_at_the_start, lambda run: run.peak().rss_bytes)
    )
    if not all((*held, *peaks)):
        return None
    fell, held_less = (median(earlier) - median(later) for earlier, later in (peaks, held))
    if fell <= 0 or held_less < _MOST_OF_A_FALL * fell:
        return None
    return f"the process held {units.mib(round(held_less))} MB less when the runs began; the system takes back memory that lies unused"


def _follows_in_its_process(run: Run, earlier: Run) -> bool:
    """Whether the earlier run was the last one before this that its process watched."""
    count, before = run.facts.get(RUNS_BEFORE), earlier.facts.get(RUNS_BEFORE)
    return isinstance(count, int) and isinstance(before, int) and count == before + 1


def _held_at_the_start(run: Run) -> int | None:
    memory = run.stages[0].memory if run.stages else None
    return None if memory is None else memory.baseline.process_rss_bytes


def peak_owners(run: Run) -> tuple[PeakOwner, ...]:
    """The owners of the run's highest memory: of the process's and of each device's."""
    highest: dict[str, PeakOwner] = {}
    for stage in run.stages:
        for owner in owners_of(stage):
            if owner.where not in highest or owner.bytes > highest[owner.where].bytes:
                highest[owner.where] = owner
    return tuple(highest.values())


def tiling_advice(run: Run, owner: PeakOwner) -> str | None:
    """What tiles would make of a peak that is a VAE's; without a number where the record does not hold it.

    Diffusers' `AutoencoderKL` works on tiles as large as its `sample_size`, one after the other. What the stage took
    beyond what was in use before it falls with the tile's share of the picture; the highest of the other stages stays.

    Returns:
        Such as "tiles would make it about 3.1 GB"; None: the peak is not a VAE's, or tiles are used or would not help.
    """
    name = names_in(owner.stage)[-1]
    found = next(
        (
            (case, stage)
            for case in _readable_cases(run)
            for stage in case.named("latent_decoding", "latent_encoding")
            if any(inner.name == name for inner in stage.walk())
            and _peak_of(stage, owner.where) == owner.bytes
        ),
        None,
    )
    if owner.where == PROCESS or found is None:
        return None
    case, stage = found
    parts = case.components("vae")
    part = parts.get(owner.component or "") or (next(iter(parts.values())) if len(parts) == 1 else None)
    if part is None or part.tiling is not False:
        return None
    side, height, width = part.config.get("sample_size"), case.call.height, case.call.width
    before = _baseline(stage, owner.where)
    if (
        part.class_name != "AutoencoderKL"
        or part.offload is not None  # then weights are among what the stage took
        or not isinstance(side, int)
        or height is None
        or width is None
        or before is None
        or side <= 0
        or min(height, width) <= 0
    ):
        return _TILES
    if max(height, width) <= side:
        return None
    share = min(side, height) * min(side, width) / (height * width)
    others = (
        _peak_of(other, owner.where) or 0
        for other in run.walk()
        if not any(inner.name == stage.name for inner in other.walk())
        and not any(_is_in(other, vae) for vae in case.stages if vae.name == stage.name)
    )
    tiled = max(round(before + (owner.bytes - before) * share), *others, 0)
    if tiled > _WORTHWHILE_TILES_SHARE * owner.bytes:
        return None
    return f"tiles would make it about {units.format_size(tiled)} (pipe.vae.enable_tiling())"


def _readable_cases(run: Run) -> list[Case]:
    try:
        return list(cases(run))
    except ValueError:  # facts that somebody changed by hand
        return []


def _peak_of(stage: Stage, where: str) -> int | None:
    return None if stage.peak is None else stage.peak.accelerator(where).allocated_bytes


def owners_of(stage: Stage, around: tuple[Stage, ...] = ()) -> Iterator[PeakOwner]:
    """The owners of one stage's peaks."""
    for where, nbytes, at_seconds in _peaks(stage):
        path = [*around, stage]
        while (inner := _inside(path[-1], where, nbytes, at_seconds)) is not None:
            path.append(inner)
        name = component_of_peak(path, where, nbytes, at_seconds)
        baseline = _baseline(path[-1], where)
        yield PeakOwner(
            where,
            nbytes,
            at_seconds,
            stage_path(*(outer.name for outer in path)),
            name,
            _component_bytes(path, name),
            None if baseline is None else nbytes - baseline,
        )


def _peaks(stage: Stage) -> Iterator[tuple[str, int, float | None]]:
    """Where, how much, and when since the run began."""
    peak = stage.peak
    if peak is None:
        return
    peaks = [(PROCESS, peak.rss_bytes, peak.rss_at_seconds)]
    peaks += [
        (device.device, device.allocated_bytes, device.allocated_at_seconds) for device in peak.accelerators
    ]
    for where, nbytes, at_seconds in peaks:
        if nbytes is not None:
            yield where, nbytes, None if at_seconds is None else stage.started_seconds + at_seconds


def _inside(stage: Stage, where: str, nbytes: int, at_seconds: float | None) -> Stage | None:
    """The stage inside that saw as much at that moment."""
    if at_seconds is None:
        return None
    for child in stage.children:
        begun = child.started_seconds - SLACK_SECONDS
        is_open = begun <= at_seconds <= child.started_seconds + child.seconds + SLACK_SECONDS
        if is_open and any(name == where and seen >= nbytes for name, seen, _ in _peaks(child)):
            return child
    return None


def _baseline(stage: Stage, where: str) -> int | None:
    if stage.memory is None:
        return None
    before = stage.memory.baseline
    return before.process_rss_bytes if where == PROCESS else before.accelerator(where).allocated_bytes


def use_around(stage: Stage, where: str) -> tuple[int, int] | None:
    """Bytes in use when a stage began, and what its peak added to them; None where one is not known, or it added nothing.

    Args:
        stage: Such as a generation.
        where: "process" or a device.
    """
    peaks = {name: nbytes for name, nbytes, _ in _peaks(stage)}
    before, peak = _baseline(stage, where), peaks.get(where)
    return None if before is None or peak is None or peak <= before else (before, peak - before)


def _component_bytes(path: list[Stage], name: str | None) -> int | None:
    """The bytes of a component's weights, as the pipeline's facts around it say."""
    for stage in reversed(path):
        facts: Any = stage.facts
        for key in ("pipeline", "components", name, "module", "nbytes"):
            facts = facts.get(key) if isinstance(facts, Mapping) else None
        if isinstance(facts, int):
            return facts
    return None


def with_owners(run: Run) -> Run:
    """The same run, in which it and each of its stages say under `peak_owner` whose their peaks are."""
    owners = peak_owners(run)
    stages = tuple(_stage_with_owners(stage, ()) for stage in run.stages)
    return replace(run, stages=stages, facts={**run.facts, FACT: _plain(owners)} if owners else run.facts)


def _stage_with_owners(stage: Stage, around: tuple[Stage, ...]) -> Stage:
    owners = _plain(tuple(owners_of(stage, around)))
    inner = tuple(_stage_with_owners(child, (*around, stage)) for child in stage.children)
    return replace(stage, children=inner, facts={**stage.facts, FACT: owners} if owners else stage.facts)


def _plain(owners: tuple[PeakOwner, ...]) -> dict[str, Any]:
    return {
        owner.where: {name: value for name, value in asdict(owner).items() if name != "where"}
        for owner in owners
    }


def component_of_peak(path: Sequence[Stage], where: str, nbytes: int, at_seconds: float | None) -> str | None:
    """The component that was at work when the memory of a place was highest.

    Returns:
        Its name; None where no stage of the path ran one, or several took turns and it is not known which it was.
    """
    worker = next((stage for stage in reversed(path) if stage.facts.get("component")), None)
    if worker is None or not worker.facts.get("component_turns"):
        return None if worker is None else worker.facts["component"]
    if at_seconds is None:
        return None
    since = _not_before(path, nbytes, at_seconds) if where == PROCESS else at_seconds
    return _only_one_between(worker, since, at_seconds)


def _not_before(path: Sequence[Stage], nbytes: int, at_seconds: float) -> float:
    """The earliest moment of the run at which the process may have been as large as it was seen to be later.

    A reading tells of its own moment. What no reading was is the system's running peak, which tells of all the time
    since it was last looked at: when the stage began, or with the last sample.
    """
    sampled = list(_samples(path))
    if any(
        seen == nbytes and abs(when - at_seconds) <= SLACK_SECONDS
        for when, seen in (*sampled, *_readings_after_steps(path[-1]))
    ):
        return at_seconds
    before = [when for when, _ in sampled if when < at_seconds - SLACK_SECONDS]
    return min(at_seconds, max((path[-1].started_seconds, *before)))


def _samples(path: Sequence[Stage]) -> Iterator[tuple[float, int]]:
    """When in the run the sampler read the process's memory, and how much it was."""
    for stage in path:
        curve = readable_curves(stage).get(PROCESS)
        if curve is not None:
            times = (stage.started_seconds + at_seconds for at_seconds in curve.at_seconds)
            yield from zip(times, curve.nbytes, strict=True)


def _readings_after_steps(stage: Stage) -> Iterator[tuple[float, int | None]]:
    steps = stage.steps
    for started, lasted, seen in zip(steps.started, steps.seconds, steps.rss_bytes, strict=False):
        yield stage.started_seconds + started + lasted, seen


def _only_one_between(stage: Stage, since: float, until: float) -> str | None:
    """The component that ran between two moments of the run; None if several did."""
    turns = stage.facts["component_turns"]
    first, last = (_step_at(stage, at_seconds) for at_seconds in (since, until))
    ran = {*[name for name, step in turns if step <= first][-1:]}
    ran |= {name for name, step in turns if first < step <= last}
    return ran.pop() if len(ran) == 1 else None


def _step_at(stage: Stage, at_seconds: float) -> int:
    """The step that had begun last at a moment of the run; before all of them the first."""
    since = at_seconds - stage.started_seconds + SLACK_SECONDS
    return max(0, sum(started <= since for started in stage.steps.started) - 1)
