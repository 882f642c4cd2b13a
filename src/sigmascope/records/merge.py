"""The runs of several processes as one, and back: one process a GPU, as torchrun and accelerate start them.

Each process records its own run. Merged, each is a stage named for its rank, on one clock, with all of its own
stages inside. Times are those of the machines' clocks: if the clocks differ, so do the ranks' times.
"""

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sigmascope.errors import ConfigError
from sigmascope.records.memory import MemorySnapshot, PeakMemory
from sigmascope.records.performance import (
    MEMORY_OVER_TIME,
    PROCESS,
    SYSTEM,
    UTILIZATION,
    readable_curves,
    readable_utilization,
)
from sigmascope.records.recorded import Recorded, runs_of
from sigmascope.records.run import GROUP, Folded, HostFacts, Run, Stage
from sigmascope.records.serialization import from_plain, run_from_plain, run_to_plain, to_plain

RANK: Final = "rank"
"""The fact of a merged run's stage that says whose it is."""

DIFFERENT_MACHINES: Final = "the ranks ran on machines that differ; each stage lists its own"


def merge_runs(runs: Iterable[Recorded], names: Sequence[str] | None = None) -> Run:
    """Return the runs of all ranks as one run.

    Devices keep their names where each belongs to one rank. Where two ranks call theirs "cuda:0", as with
    CUDA_VISIBLE_DEVICES a rank, they become "cuda:0 (rank 0)" and "cuda:0 (rank 1)". A device on which a rank never
    allocated anything is left out of that rank's stages. Resident memory stays each process's own.

    Args:
        runs: One of each rank, in any order.
        names: What to call them. If None, "rank 0", "rank 1", … as each run says which rank it is; where one does not say,
            by their order.

    Raises:
        ConfigError: No runs, a run, a rank or a name twice, ranks of groups of different sizes without names, not as many
            names as runs, or a run with an invalid start time.

    Examples:
        >>> parts = [Run(str(n), "FLUX", f"2026-11-21T10:00:0{n}+00:00", 4.0) for n in (0, 1)]
        >>> merged = merge_runs(parts)
        >>> [(stage.name, stage.started_seconds) for stage in merged.stages], merged.seconds
        ([('rank 0', 0.0), ('rank 1', 1.0)], 5.0)
    """
    runs = runs_of(runs)
    named = _named(runs, names)
    started = {name: _start_of(run) for name, run in named.items()}
    first = min(started.values())
    devices = _device_names(named)
    stages = [
        _stage_of(name, run, (started[name] - first).total_seconds(), devices[name])
        for name, run in named.items()
    ]
    host = _common_host(named, devices)
    return Run(
        id=uuid.uuid5(uuid.NAMESPACE_OID, _encodable(" ".join(run.id for run in runs))).hex,
        name=" + ".join(dict.fromkeys(run.name for run in runs if run.name)),
        started_at=first.isoformat(),
        seconds=max(stage.started_seconds + stage.seconds for stage in stages),
        host=host,
        stages=tuple(sorted(stages, key=lambda stage: stage.started_seconds)),
        facts={**_common_facts(runs), "ranks": list(named)},
        complete=all(run.complete for run in runs),
        unavailable={} if host is not None else {"host": DIFFERENT_MACHINES},
    )


def _encodable(text: str) -> str:
    """The text with escapes for what UTF-8 lacks, which JSON may hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _named(runs: Sequence[Run], names: Sequence[str] | None) -> dict[str, Run]:
    if not runs:
        raise ConfigError("There are no runs to merge.", hint="Give the run of each rank.")
    chosen = _rank_names(runs) if names is None else list(names)
    if len(chosen) != len(runs):
        raise ConfigError(f"There are {len(runs)} runs, but {len(chosen)} names.", hint="Name each run.")
    for what, given in (("name", chosen), ("run", [run.id for run in runs])):
        twice = [name for name, count in Counter(given).items() if count > 1]
        if twice:
            raise ConfigError(
                f"The {what} {twice[0]!r} is given twice.", hint="Give each rank once, or name each run."
            )
    return dict(zip(chosen, runs, strict=True))


def _rank_names(runs: Sequence[Run]) -> list[str]:
    places = [place_of(run) for run in runs]
    known = [place for place in places if place is not None]
    if len(known) < len(runs):
        return [f"rank {number}" for number in range(len(runs))]
    sizes = sorted({place.world_size for place in known})
    if len(sizes) > 1:
        raise ConfigError(
            f"These are ranks of groups of {' and '.join(map(str, sizes))} processes.",
            hint="Give the runs of one launch, or name each run.",
        )
    return [f"rank {place.rank}" for place in known]


class Place(NamedTuple):
    """Which of several processes made a run.

    Attributes:
        rank: From 0.
        world_size: How many processes there are.
        machine: The name of the rank's machine; None: not known.
    """

    rank: int
    world_size: int
    machine: str | None = None


def place_of(run: Run) -> Place | None:
    """Which rank of how many a run was made by, where it says so."""
    told = run.facts.get(GROUP)
    rank, size, machine = (
        (told.get(name) for name in Place._fields) if isinstance(told, Mapping) else (None, None, None)
    )
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
        return None
    return Place(rank, size, machine if isinstance(machine, str) and machine else None)


def machines_of(ranks: Mapping[str, Run]) -> dict[str, str]:
    """The machine of each rank by the rank's name; empty where all ran on the same one, or that is not known."""
    places = {name: place_of(run) for name, run in ranks.items()}
    machines = {name: place.machine for name, place in places.items() if place is not None and place.machine}
    return machines if len(set(machines.values())) > 1 else {}


def _start_of(run: Run) -> datetime:
    try:
        started = datetime.fromisoformat(run.started_at)
    except ValueError:
        message = f"The run {run.id} began at {run.started_at!r}, which is not a valid time."
        raise ConfigError(message, hint="Merge runs that a Recorder made.") from None
    return started if started.tzinfo is not None else started.replace(tzinfo=UTC)


def _device_names(named: Mapping[str, Run]) -> dict[str, dict[str, str]]:
    """By rank, what each device that it used is called in the merged run."""
    in_use = {name: devices_in_use(run) for name, run in named.items()}
    users = Counter(device for devices in in_use.values() for device in devices)
    return {
        name: {device: device if users[device] == 1 else f"{device} ({name})" for device in devices}
        for name, devices in in_use.items()
    }


def _stage_of(name: str, run: Run, offset_seconds: float, devices: Mapping[str, str]) -> Stage:
    own = on_devices(run, devices)
    about = {
        "run_id": run.id,
        "name": run.name,
        "started_at": run.started_at,
        "complete": run.complete,
        "devices": dict(devices),
        "host": None if run.host is None else to_plain(run.host),
        "facts": dict(run.facts),
        **({} if own.folded is None else {"folded": to_plain(own.folded)}),
    }
    return Stage(
        name=name,
        started_seconds=offset_seconds,
        seconds=run.seconds,
        success=all(stage.success for stage in run.walk()),
        error=next((f"{stage.name}: {stage.error}" for stage in run.walk() if stage.error), None),
        peak=own.peak(),
        children=tuple(_shifted(stage, offset_seconds) for stage in own.stages),
        facts={RANK: about},
        findings=run.findings,
        unavailable={**run.unavailable, "memory": "of the whole rank; its stages have theirs"},
    )


def _shifted(stage: Stage, seconds: float) -> Stage:
    children = tuple(_shifted(child, seconds) for child in stage.children)
    return replace(stage, started_seconds=stage.started_seconds + seconds, children=children)


def _common_host(named: Mapping[str, Run], devices: Mapping[str, Mapping[str, str]]) -> HostFacts | None:
    """The machine with the devices of all ranks, if it is the same for all as far as is known."""
    hosts = [run.host for run in named.values()]
    first = hosts[0]
    if first is None or any(host is None or _machine(host) != _machine(first) for host in hosts):
        return None
    if machines_of(named):  # machines of the same make
        return None
    accelerators = [
        replace(facts, device=devices[name][facts.device])
        for name, run in named.items()
        for facts in (run.host.accelerators if run.host else ())
        if facts.device in devices[name]
    ]
    return replace(first, accelerators=tuple(_each_once(accelerators)))


def _machine(host: HostFacts) -> list[object]:
    """What tells machines apart: all but the devices, of which each rank may see others."""
    apart = ("accelerators", "unavailable")
    return [getattr(host, entry.name) for entry in fields(host) if entry.name not in apart]


def _each_once(accelerators: Iterable[Any]) -> list[Any]:
    return list({facts.device: facts for facts in accelerators}.values())


def _common_facts(runs: Sequence[Run]) -> dict[str, Any]:
    """What all ranks say alike of the whole run, such as its pipeline."""
    first, *others = (run.facts for run in runs)
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }


def ranks_of(run: Run) -> dict[str, Run]:
    """Return the run of each rank again, by name, with the names and times that it had.

    Empty for a run of one process.
    """
    return {stage.name: _run_of(stage) for stage in run.stages if is_rank(stage)}


def _run_of(stage: Stage) -> Run:
    about: Mapping[str, Any] = stage.facts[RANK]
    host, folded = about["host"], about.get("folded")
    run = Run(
        id=about["run_id"],
        name=about["name"],
        started_at=about["started_at"],
        seconds=stage.seconds,
        host=None if host is None else from_plain(host, HostFacts, "host"),
        stages=tuple(_shifted(child, -stage.started_seconds) for child in stage.children),
        findings=stage.findings,
        facts=about["facts"],
        complete=about["complete"],
        unavailable={name: why for name, why in stage.unavailable.items() if name != "memory"},
        folded=None if folded is None else from_plain(folded, Folded, "folded"),
    )
    return renamed(run, {new: old for old, new in about["devices"].items() if new != old})


def is_rank(stage: Stage) -> bool:
    """Whether a stage is one process of a merged run; a fact of that name alone may be a LoRA's rank."""
    return isinstance(stage.facts.get(RANK), Mapping)


def devices_in_use(run: Run) -> list[str]:
    """The devices on which something was allocated, or may have been; without any, the current one.

    Args:
        run: Of one process. PyTorch's allocator counts for the process alone, so that a device that others use has
            0 bytes here.
    """
    allocated: dict[str, bool] = {}
    sampled: dict[str, bool] = {}
    current: str | None = None
    for stage in run.walk():
        for snapshot in _snapshots(stage):
            current = snapshot.current_device or current
            for memory in snapshot.accelerators:
                allocated[memory.device] = allocated.get(memory.device, False) or memory.allocated_bytes != 0
        for peak in () if stage.peak is None else stage.peak.accelerators:
            allocated[peak.device] = allocated.get(peak.device, False) or peak.allocated_bytes != 0
        sampled |= dict.fromkeys((reading.device for reading in readable_utilization(stage)), True)
    allocated = {**sampled, **allocated}
    in_use = [device for device, is_used in allocated.items() if is_used]
    return in_use or [device for device in allocated if device == current]


def _snapshots(stage: Stage) -> tuple[MemorySnapshot, ...]:
    return () if stage.memory is None else (stage.memory.baseline, stage.memory.current)


def on_devices(run: Run, devices: Mapping[str, str]) -> Run:
    """The run with only these devices.

    Args:
        run: Of one process.
        devices: New names by old ones; what is not among them is left out of memory, peaks and utilization.
    """
    kept = replace(run, stages=tuple(_without_others(stage, devices) for stage in run.stages))
    if run.folded is not None:
        kept = replace(kept, folded=replace(run.folded, peak=_peak_of(run.folded.peak, devices)))
    return renamed(kept, {old: new for old, new in devices.items() if old != new})


def _without_others(stage: Stage, devices: Mapping[str, str]) -> Stage:
    memory, peak = stage.memory, stage.peak
    if memory is not None:
        baseline, current = (_only(snapshot, devices) for snapshot in (memory.baseline, memory.current))
        memory = replace(memory, baseline=baseline, current=current)
    if peak is not None:
        peak = _peak_of(peak, devices)
    facts = dict(stage.facts)
    if readable_utilization(stage):  # and no caller's own fact of that name
        facts[UTILIZATION] = _only_of(facts[UTILIZATION], devices)
    if readable_curves(stage):
        facts[MEMORY_OVER_TIME] = _only_of(facts[MEMORY_OVER_TIME], (PROCESS, SYSTEM, *devices))
    children = tuple(_without_others(child, devices) for child in stage.children)
    return replace(stage, memory=memory, peak=peak, facts=facts, children=children)


def _peak_of(peak: PeakMemory, devices: Collection[str]) -> PeakMemory:
    return replace(
        peak,
        accelerators=tuple(device_peak for device_peak in peak.accelerators if device_peak.device in devices),
    )


def _only(snapshot: MemorySnapshot, devices: Mapping[str, str]) -> MemorySnapshot:
    kept = tuple(memory for memory in snapshot.accelerators if memory.device in devices)
    current = snapshot.current_device if snapshot.current_device in devices else None
    return replace(snapshot, accelerators=kept, current_device=current)


def _only_of(fact: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: figure for name, figure in fact.items() if name in names}


def renamed(run: Run, devices: Mapping[str, str]) -> Run:
    """The run with other names for devices wherever they stand alone, as keys or values, also in facts."""
    return run_from_plain(_renamed(run_to_plain(run), devices)) if devices else run


def _renamed(plain: Any, devices: Mapping[str, str]) -> Any:
    if isinstance(plain, str):
        return devices.get(plain, plain)
    if isinstance(plain, dict):
        return {devices.get(key, key): _renamed(value, devices) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_renamed(value, devices) for value in plain]
    return plain
