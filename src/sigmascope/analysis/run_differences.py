"""What differs in the set-up of two sets of runs: the machine, the versions, the pipeline, its call."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from sigmascope.analysis.diagnostics.case import cases
from sigmascope.records.benchmark import BENCHMARK, others_of
from sigmascope.records.host import HostFacts
from sigmascope.records.pipeline import AttentionFacts, CallFacts, ComponentFacts, PipelineFacts
from sigmascope.records.run import Run

_SWITCHES = ("offload", "compiled", "layerwise_casting", "channels_last", "tiling", "slicing")
_CALL = ("num_inference_steps", "guidance_scale", "height", "width", "num_frames", "batch_size", "seed")
_OTHERS_APART = 0.1
_OF_BENCHMARK = ("device", "seed", "threads")


def set_up_differences(new: Sequence[Run], baseline: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """What is known of both sides and not the same, as (before, now). What one side does not tell is left out.

    Args:
        new: Any number of runs.
        baseline: Any number of runs.
    """
    ours, theirs = _set_up(new), _set_up(baseline)
    found = {
        name: (before, ours[name]) for name, before in theirs.items() if name in ours and before != ours[name]
    }
    before, now = _others(baseline), _others(new)
    if before is not None and now is not None and abs(now - before) > _OTHERS_APART:
        found["processor used by others"] = (f"{100 * before:.0f} %", f"{100 * now:.0f} %")
    return found


def _others(runs: Sequence[Run]) -> float | None:
    """How busy others kept the processor, on average."""
    shares = [share for run in runs if (share := others_of(run.facts)) is not None]
    return fmean(shares) if shares else None


def _set_up(runs: Sequence[Run]) -> dict[str, str]:
    """Every fact of the runs' set-up; where they do not agree, all values."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, value in _of_run(run):
            if value is not None:
                found.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _of_run(run: Run) -> Iterator[tuple[str, object]]:
    if run.host is not None:
        yield from _of_host(run.host)
    noted = run.facts.get(BENCHMARK)
    if isinstance(noted, Mapping):
        yield from ((name, noted.get(name)) for name in _OF_BENCHMARK)
    try:
        found = list(cases(run))
    except ValueError:  # facts of a shape that is not ours: there is nothing to say of them
        return
    for case in found:
        yield from _of_call(case.call)
        if case.pipeline is not None:
            yield from _of_pipeline(case.pipeline)


def _of_host(host: HostFacts) -> Iterator[tuple[str, object]]:
    yield "processor", host.cpu_model
    yield "processor threads", host.cpu_count_logical
    yield "system", host.os
    yield "Python", host.python_version
    yield from host.libraries.items()
    for device in host.accelerators:
        yield device.device, device.name
        yield f"{device.device} driver", device.driver_version


def _of_call(call: CallFacts) -> Iterator[tuple[str, object]]:
    yield from ((name, getattr(call, name)) for name in _CALL)


def _of_pipeline(pipeline: PipelineFacts) -> Iterator[tuple[str, object]]:
    yield "pipeline", pipeline.class_name
    yield "architecture", pipeline.architecture
    yield from _of_attention(pipeline.attention)
    for name, part in pipeline.components.items():
        yield from _of_component(name, part)


def _of_attention(attention: AttentionFacts) -> Iterator[tuple[str, object]]:
    for name, counts in (("processors", attention.processors), ("backends", attention.backends)):
        if counts:
            yield f"attention {name}", " + ".join(sorted(counts))


def _of_component(name: str, part: ComponentFacts) -> Iterator[tuple[str, object]]:
    yield f"{name} class", part.class_name
    if part.module is None:
        return
    yield f"{name} parameters", part.module.parameters
    for what, counts in (("dtype", part.module.dtypes), ("device", part.module.devices)):
        if counts:
            yield f"{name} {what}", max(counts, key=lambda key: counts[key])
    for switch in _SWITCHES:
        value = getattr(part, switch)
        yield f"{name} {switch}", "none" if value is None and switch == "offload" else value
