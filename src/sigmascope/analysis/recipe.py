"""What runs were made with, and how that differs between two sets of runs.

A recipe is everything that can change a run: prompts, seed, steps, size, scheduler, LoRAs, dtypes, devices, offloading,
compiling, versions, the machine.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import nan
from statistics import fmean, median
from typing import Any, Final

from sigmascope import units
from sigmascope.analysis.generations import Case, cases, most_at_once
from sigmascope.analysis.run_figures import GENERATION
from sigmascope.records.performance import (
    BENCHMARK,
    CACHED_GRAPHS,
    COLLECTIONS,
    COMPILED_GRAPHS,
    DISK_READ,
    PAGE_FAULTS,
    clock_of,
    others_of,
)
from sigmascope.records.run import (
    RECIPE,
    AttentionFacts,
    CallFacts,
    ComponentFacts,
    HostFacts,
    PipelineFacts,
    Run,
    Stage,
)

NONE: Final = "none"
"""Of an entry: there is none of it, and that is known."""
_OF_SEVERAL: Final = re.compile(r"\.\d+$")
"""The number of a prompt among several."""
OTHERS_USED: Final = "processor used by others"
NOT_SET: Final = "not set"
_SWITCHES: Final = ("offload", "compiled", "layerwise_casting", "channels_last", "tiling", "slicing")
_CALL_FIELDS: Final = (
    "num_inference_steps",
    "guidance_scale",
    "guidance_batches",
    "height",
    "width",
    "num_frames",
    "batch_size",
    "has_image",
)
_BENCHMARK_FIELDS: Final = ("device", "seed", "threads")
_NOTABLE_CHANGE_OF_OTHERS_SHARE: Final = 0.1
_NOTABLE_CHANGE_OF_FAULTS: Final = 100.0
_NOTABLE_CHANGE_OF_READ_BYTES: Final = 16.0 * units.MIB
_NOTABLE_CHANGE_OF_COLLECTIONS: Final = 5.0
_NOTABLE_RATIO_OF_CLOCKS: Final = 1.1
GENERATIONS: Final = "generations"
AT_ONCE: Final = "generations at once"
CLOCK: Final = "processor clock"
FAULTS: Final = "page faults from disk"
READ: Final = "read from disk"
COLLECTED: Final = "full garbage collections"
COMPILED: Final = "graphs compiled"
DYNAMIC: Final = " dynamic shapes"
"""How the entry of a compiled component ends that holds whether it was asked for graphs of all sizes."""
CACHED: Final = "graphs from the compiler's cache"
DETERMINISTIC: Final = "deterministic algorithms"
GLOBAL_STATE: Final = "global generator state"
"""Of PyTorch's own, from which it draws where it is given none."""
ENVIRONMENT: Final = r"[A-Z][A-Z0-9]+_[A-Z0-9_]+"
"""What names of the environment's switches look like, and no other entry of a recipe."""
_READ_WITH_ENVIRONMENT: Final = "train mode"
"""An entry of every record that holds the switches that were set."""
_PIPELINE: Final = "pipeline"
_CLASS: Final = " class"
"""What the entry ends in that each component has."""
LORAS: Final = "LoRAs"
_OF_LORA: Final = ("strength", "active", "merged", "file", "content")
_OF_NODE: Final = re.compile(r"(.+) \(.+\) .")
"""How an entry begins that was set on a node of ComfyUI: its class and its id."""
_HASH_DIGITS_SHOWN: Final = 12
_MOST_OF_SCHEDULE: Final = 4
Differences = Mapping[str, tuple[str, str]]
_CALL, _NODES, _MODELS, _LORAS_GROUP, _SCHEDULER = "Call", "Nodes", "Models", "LoRAs", "Scheduler"
_SURROUNDINGS, _VERSIONS, _MACHINE = "Surroundings", "Versions", "Machine"
GROUPS: Final = (_CALL, _NODES, _MODELS, _LORAS_GROUP, _SCHEDULER, _SURROUNDINGS, _VERSIONS, _MACHINE)
"""Of a recipe's entries, in the order in which they are shown."""
SET_UP: Final = (_MODELS, _LORAS_GROUP, _SURROUNDINGS, _VERSIONS, _MACHINE)
"""Of what does not change with what is asked for."""
_SET_ON_SAMPLERS: Final = ("seed", "num_inference_steps", "guidance_scale")
"""What a call has of the settings of ComfyUI's first sampler."""
_Entry = tuple[str, str, object]
"""Group, name and value."""


def recipe_differences(new: Sequence[Run], baseline: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """The entries that both sides have and that differ, as (before, now)."""
    ours, theirs = recipe_of_runs(new), recipe_of_runs(baseline)
    renamed = _other_names(ours, theirs)
    both = {own: f"{name} (now {own.partition('.')[2]})" for own, name in renamed.items()}
    ours = _with_names(_with_unset(ours, theirs), both)
    theirs = _with_names(theirs, {name: both[own] for own, name in renamed.items()})
    if sorted(ours.get(LORAS, "").split(", ")) == sorted(theirs.get(LORAS, "").split(", ")):
        ours = {name: theirs.get(name, value) if name == LORAS else value for name, value in ours.items()}
    theirs = _with_unset(theirs, ours)
    differences = {
        name: (before, ours[name]) for name, before in theirs.items() if name in ours and before != ours[name]
    }
    for name in _consequences(differences):
        del differences[name]
    generations = [median(map(_count_generations, runs)) for runs in (baseline, new)]
    if min(generations) > 0 and generations[0] != generations[1]:
        differences[GENERATIONS] = (f"{generations[0]:g}", f"{generations[1]:g}")
    at_once = [median(most_at_once(_generations(run)) for run in runs) for runs in (baseline, new)]
    if min(at_once) > 0 and at_once[0] != at_once[1]:
        differences[AT_ONCE] = (f"{at_once[0]:g}", f"{at_once[1]:g}")
    before, now = used_by_others(baseline), used_by_others(new)
    if before is not None and now is not None and abs(now - before) > _NOTABLE_CHANGE_OF_OTHERS_SHARE:
        differences[OTHERS_USED] = (f"{100 * before:.0f} %", f"{100 * now:.0f} %")
    clocks = [_median_clock(runs) for runs in (baseline, new)]
    if all(clock > 0 for clock in clocks) and max(clocks) / min(clocks) > _NOTABLE_RATIO_OF_CLOCKS:
        differences[CLOCK] = (f"{clocks[0]:.1f} GHz", f"{clocks[1]:.1f} GHz")
    faults = [_median_fact(runs, PAGE_FAULTS) for runs in (baseline, new)]
    if _are_apart(faults, _NOTABLE_CHANGE_OF_FAULTS):
        differences[FAULTS] = (f"{faults[0]:,.0f}", f"{faults[1]:,.0f}")
    read = [_median_fact(runs, DISK_READ) for runs in (baseline, new)]
    if _are_apart(read, _NOTABLE_CHANGE_OF_READ_BYTES):
        differences[READ] = (units.format_size(int(read[0])), units.format_size(int(read[1])))
    for name, fact, notable in (
        (COLLECTED, COLLECTIONS, _NOTABLE_CHANGE_OF_COLLECTIONS),
        (COMPILED, COMPILED_GRAPHS, 0.0),
        (CACHED, CACHED_GRAPHS, 0.0),
    ):
        counts = [_median_fact(runs, fact) for runs in (baseline, new)]
        if _are_apart(counts, notable):
            differences[name] = (f"{counts[0]:,.0f}", f"{counts[1]:,.0f}")
    return differences


def _with_unset(recipe: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """A recipe with what only the other has: switches of the environment, since a record holds those that were set, and
    components that a pipeline of the same class may lack.
    """
    if _READ_WITH_ENVIRONMENT not in recipe:
        return dict(recipe)
    unset = {name: NOT_SET for name in other if re.fullmatch(ENVIRONMENT, name)}
    if recipe.get(_PIPELINE) == other.get(_PIPELINE) and any(name.endswith(_CLASS) for name in recipe):
        unset |= {name: NONE for name in other if name.endswith(_CLASS)}
    return unset | dict(recipe)


def _other_names(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """LoRAs of which only the names are others in the baseline, and those names: by their files or contents."""
    names = [[name for name in side.get(LORAS, "").split(", ") if name] for side in (ours, theirs)]
    renamed: dict[str, str] = {}
    for own in names[0]:
        others = (name for name in names[1] if name not in (*names[0], *renamed.values()))
        match = next((name for name in others if _is_same_lora(ours, own, theirs, name)), None)
        if own not in names[1] and match is not None:
            renamed[own] = match
    return renamed


def _with_names(recipe: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """A recipe in which LoRAs have other names."""
    given = {
        f"LoRA {old} {entry}": f"LoRA {name} {entry}" for old, name in names.items() for entry in _OF_LORA
    }
    renamed = {given.get(entry, entry): value for entry, value in recipe.items()}
    if names and LORAS in recipe:
        renamed[LORAS] = ", ".join(names.get(name, name) for name in recipe[LORAS].split(", "))
    return renamed


def _is_same_lora(ours: Mapping[str, str], own: str, theirs: Mapping[str, str], other: str) -> bool:
    """Whether two adapters of one component are from one file, or hold the same."""
    if own.partition(".")[0] != other.partition(".")[0]:
        return False
    pairs = [
        (ours.get(f"LoRA {own} {entry}"), theirs.get(f"LoRA {other} {entry}"))
        for entry in ("file", "content")
    ]
    known = [
        [value.split()[:2] for value in pair if value is not None] for pair in pairs
    ]  # without the file's name
    return next((both[0] == both[1] for both in known if len(both) == 2), False)


def _consequences(differences: Differences) -> list[str]:
    """Entries that differ only because another does.

    What is set on a node of ComfyUI is an entry of the call, too, where a sampler took it.
    A dtype changes the weights' fingerprint, because it rounds every value; a LoRA's file changes its content, and a LoRA
    the number of its component's parameters; a seed and a device change the generator's state.
    """
    with_loras = {
        lora.split(".")[0] for side in differences.get(LORAS, ()) for lora in side.split(", ") if "." in lora
    }
    is_other = any(name in differences for name in ("seed", "generator device"))
    consequences = ["generator state"] if is_other and "generator state" in differences else []
    consequences += [GLOBAL_STATE] if {"global seed", GLOBAL_STATE} <= differences.keys() else []
    set_in_call = [tuple(map(_number, differences[name])) for name in _SET_ON_SAMPLERS if name in differences]
    consequences += [
        name
        for name, sides in differences.items()
        if is_of_node(name) and tuple(map(_number, sides)) in set_in_call
    ]
    for name in differences:
        part, _, what = name.rpartition(" ")
        component = part.removeprefix("LoRA ").split(".")[0]
        is_file = what == "content" and f"{part} file" in differences
        is_of_lora = what == "parameters" and component in with_loras
        if is_file or is_of_lora or (what in ("weights", "content") and f"{component} dtype" in differences):
            consequences.append(name)
    return consequences


def _number(text: str) -> float | str:
    """A call has some whole numbers as fractions."""
    try:
        return float(text)
    except ValueError:
        return text


def is_of_node(name: str, stage: str = "") -> bool:
    """Whether an entry is what was set on a node of ComfyUI: on any, or on one whose stage has this name."""
    found = _OF_NODE.match(name)
    return found is not None and stage in ("", found[1])


def _median_fact(runs: Sequence[Run], name: str) -> float:
    """The median of a number among the runs' facts; NaN where a run lacks it."""
    values = [run.facts.get(name) for run in runs]
    known = [value for value in values if isinstance(value, int | float)]
    return float(median(known)) if len(known) == len(values) else nan


def _count_generations(run: Run) -> int:
    """How many generations a run made, with those of which only sums are kept."""
    return len(_generations(run)) + (0 if run.folded is None else run.folded.generations)


def _generations(run: Run) -> list[Stage]:
    return [stage for stage in run.stages if stage.name == GENERATION]


def _median_clock(runs: Sequence[Run]) -> float:
    """The median of the processors' clocks in the runs, in gigahertz; NaN where a run lacks it."""
    known = [clock for run in runs if (clock := clock_of(run)) is not None]
    return float(median(known)) if len(known) == len(runs) else nan


def _are_apart(sides: Sequence[float], notable: float) -> bool:
    """Whether two counts differ by more than `notable`, and by more than half of the larger."""
    return abs(sides[1] - sides[0]) > max(notable, max(sides) / 2)


def recipe_of_runs(runs: Sequence[Run]) -> dict[str, str]:
    """The recipe of the runs, with all values of entries in which they differ."""
    recipe: dict[str, set[str]] = {}
    for run in runs:
        for name, value in recipe_of(run):
            if value is not None:
                recipe.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(values)) for name, values in recipe.items()}


def recipe_of(run: Run) -> Iterator[tuple[str, object]]:
    """Everything known that the run was made with, by name, one generation after another."""
    yield from ((name, value) for _, name, value in _entries(run))


def recipe_groups(run: Run) -> dict[str, dict[str, object]]:
    """The same by `GROUPS`, for people to look something up; entries that are not known are left out."""
    groups: dict[str, dict[str, object]] = {group: {} for group in GROUPS}
    for group, name, value in _entries(run):
        if value is not None:
            groups[group][name] = value
    return {group: entries for group, entries in groups.items() if entries}


def _entries(run: Run) -> Iterator[_Entry]:
    try:
        run_cases = list(cases(run))
    except ValueError:  # facts that somebody changed by hand
        run_cases = []
    for case in run_cases:
        yield from _of_case(case)
    yield from _in(_NODES, _of_nodes(run))
    yield from _in(_LORAS_GROUP, _of_checks(run))
    benchmark = run.facts.get(BENCHMARK)
    if isinstance(benchmark, Mapping):
        yield from _in(_CALL, ((name, benchmark.get(name)) for name in _BENCHMARK_FIELDS))
    if run.host is not None:
        yield from _of_host(run.host)


def _in(group: str, entries: Iterable[tuple[str, object]]) -> Iterator[_Entry]:
    yield from ((group, name, value) for name, value in entries)


def recipe_digest(run: Run) -> str | None:
    """A name for what the run was asked to make: the same for runs of the same request.

    Prompts count by their hashes, so that it is the same whether their texts are kept. Left out is what may change a
    request's time or output behind its back: versions, machine, dtypes, offloading, files of weights, switches.

    Returns:
        16 hexadecimal digits; None: no generation's call is known.
    """
    entries: list[str] = []
    try:
        requests = [case for case in cases(run) if case.number is not None]
    except ValueError:  # facts that somebody changed by hand
        return None
    for case in requests:
        entries.append(f"generation {case.number}")
        entries += sorted(f"{name}={value}" for name, value in _of_request(case) if value is not None)
    set_on_nodes = _of_nodes(run, with_texts=False)
    entries += sorted(f"{name}={value}" for name, value in set_on_nodes if value is not None)
    return sha256("\n".join(entries).encode("utf-8", "replace")).hexdigest()[:16] if requests else None


def _of_request(case: Case) -> Iterator[tuple[str, object]]:
    facts = case.stages[0].facts if case.stages else {}
    prompts = facts.get("prompts")
    for name, prompt in prompts.items() if isinstance(prompts, Mapping) else ():
        if isinstance(prompt, Mapping):
            yield f"prompt {name}", prompt.get("sha256")
    yield "seed", facts.get("seeds") or case.call.seed
    yield from _of_call(case.call)
    yield "pipeline", None if case.pipeline is None else case.pipeline.class_name
    yield (
        "scheduler",
        next((stage.facts["scheduler"] for stage in case.stages if "scheduler" in stage.facts), None),
    )
    more = facts.get(RECIPE)
    if isinstance(more, Mapping):
        for part in ("arguments", "given"):
            for name, value in _mapping(more.get(part)).items():
                if not name.startswith("callback"):
                    yield name, value
        loras = more.get("loras")
        for name, lora in loras.items() if isinstance(loras, Mapping) else ():
            if isinstance(lora, Mapping):
                yield f"LoRA {name} strength", lora.get("strength")


def _of_nodes(run: Run, *, with_texts: bool = True) -> Iterator[tuple[str, object]]:
    """What was set on ComfyUI's nodes, but for prompts, which are entries of their own; texts by their hashes."""
    comfyui = _mapping(run.facts.get("comfyui"))
    nodes = [_mapping(node) for node in _listed(comfyui.get("nodes"))]
    kinds = {node.get("id"): node.get("class_type") for node in nodes}
    prompts = [name for stage in run.stages for name in _mapping(stage.facts.get("prompts"))]
    for entry in _listed(_mapping(comfyui.get("graph")).get("values")):
        node, name, value = entry if isinstance(entry, list) and len(entry) == 3 else ("", "", None)
        is_text, digest = isinstance(value, Mapping), _mapping(value).get("sha256")
        if f"{node} {name}" in prompts or (is_text and not (with_texts and digest)):
            continue
        shown = f"sha256 {str(digest)[:_HASH_DIGITS_SHOWN]}" if is_text else value
        yield f"{kinds.get(node, 'unknown')} ({node}) {name}", shown


def _listed(held: object) -> list[Any]:
    return held if isinstance(held, list) else []


def _mapping(held: object) -> Mapping[str, Any]:
    return held if isinstance(held, Mapping) else {}


def _of_checks(run: Run) -> Iterator[tuple[str, object]]:
    """Whether the weights that layers use confirm the LoRAs: the last that is known of each weight."""
    results: dict[str, str] = {}
    for stage in run.walk():
        analysis = stage.facts.get("lora_application")
        for side in ("unet", "clip"):
            changes = analysis.get(f"{side}_weight_changes") if isinstance(analysis, Mapping) else None
            checks = changes.get("checked") if isinstance(changes, Mapping) else None
            for key, check in checks.items() if isinstance(checks, Mapping) else ():
                result = check.get("result") if isinstance(check, Mapping) else None
                if result in ("confirmed", "contradicted"):
                    results[f"{side} {key}"] = result
    if results:
        against = sum(result == "contradicted" for result in results.values())
        yield (
            "weights in use",
            f"{units.counted(against, 'weight')} not as the LoRAs say" if against else "as the LoRAs say",
        )


def _of_case(case: Case) -> Iterator[_Entry]:
    outermost = case.stages[0] if case.stages else None
    facts = {} if outermost is None else outermost.facts
    more = facts.get(RECIPE)
    yield from _in(_CALL, _of_prompts(facts.get("prompts"), is_known=isinstance(more, Mapping)))
    seeds = facts.get("seeds")
    if isinstance(more, Mapping) or isinstance(seeds, list):
        yield _CALL, "seed", ", ".join(map(str, seeds)) if isinstance(seeds, list) else NOT_SET
    else:
        yield _CALL, "seed", case.call.seed
    given = _mapping(_mapping(more).get("arguments"))
    yield from _in(_CALL, ((name, value) for name, value in _of_call(case.call) if name not in given))
    if isinstance(more, Mapping):
        yield _CALL, "callback", case.call.callback or NONE
        yield from _of_more(more)
    for stage in case.stages:
        yield from _in(_SCHEDULER, _of_stage(stage))
    if case.pipeline is not None:
        yield from _in(_MODELS, _of_pipeline(case.pipeline))


def _of_prompts(prompts: object, *, is_known: bool) -> Iterator[tuple[str, object]]:
    kept = prompts if isinstance(prompts, Mapping) else {}
    told: dict[str, list[str]] = {}
    for name, prompt in kept.items():
        if isinstance(prompt, Mapping):
            text, digest = prompt.get("text"), f"sha256 {str(prompt.get('sha256'))[:_HASH_DIGITS_SHOWN]}"
            is_hidden = text is None or text.startswith("<prompt")  # as `cleaner` leaves it
            told.setdefault(_OF_SEVERAL.sub("", str(name)), []).append(
                digest if text is None or is_hidden else str(text)
            )
    for name in ("prompt", "negative_prompt"):
        if is_known and kept and name not in told:
            yield name, NONE
    yield from ((name, " | ".join(texts)) for name, texts in told.items())


def _of_more(more: Mapping[str, Any]) -> Iterator[_Entry]:
    """Entries from the fact `recipe`."""
    models = more.get("models")
    if isinstance(models, Mapping):
        yield from _in(_MODELS, ((f"{name} weights", fingerprint) for name, fingerprint in models.items()))
    yield from _in(_LORAS_GROUP, _of_loras(more.get("loras")))
    for part, group in (("arguments", _CALL), ("given", _CALL), ("surroundings", _SURROUNDINGS)):
        entries = more.get(part)
        if isinstance(entries, Mapping):
            yield from _in(group, entries.items())
    for name in ("device", "state"):
        of_each = more.get(f"generator_{name}s")
        if isinstance(of_each, list) and of_each:
            yield _CALL, f"generator {name}", ", ".join(map(str, of_each))
    drawn = more.get("global_states")
    if isinstance(drawn, Mapping):
        told = ", ".join(f"{device} {state}" for device, state in drawn.items())
        yield _CALL, GLOBAL_STATE, told or "not drawn from"
    yield _SURROUNDINGS, "threads", more.get("threads")


def _of_loras(loras: object) -> Iterator[tuple[str, object]]:
    if not isinstance(loras, Mapping):
        return
    yield LORAS, ", ".join(loras) or NONE
    for name, lora in loras.items():
        if isinstance(lora, Mapping):
            yield f"LoRA {name} strength", "-".join(map(str, sorted(set(lora.get("strength") or ()))))
            yield f"LoRA {name} active", f"{lora.get('active')} of {lora.get('layers')} layers"
            merged = lora.get("merged")  # records have it where some is
            yield f"LoRA {name} merged", f"in {merged} of {lora.get('layers')} layers" if merged else "no"
            if lora.get("sha256"):
                yield (
                    f"LoRA {name} file",
                    f"sha256 {str(lora['sha256'])[:_HASH_DIGITS_SHOWN]} {lora.get('file')}",
                )
            yield f"LoRA {name} content", lora.get("content")


def _of_stage(stage: Stage) -> Iterator[tuple[str, object]]:
    """The schedule, and how many times each step called the denoiser."""
    settings = stage.facts.get("settings")
    if stage.name == "model_sampling":
        yield "scheduler", stage.facts.get("scheduler")
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            yield f"scheduler {name}", value
        for name in ("timesteps", "sigmas"):
            yield f"scheduler {name}", _schedule_in_words(stage.facts.get(name))
    calls = stage.facts.get("denoiser_calls")
    if isinstance(calls, Mapping) and len(stage.steps):
        yield "denoiser calls a step", round(sum(calls.values()) / len(stage.steps), 2)


def _schedule_in_words(values: object) -> str | None:
    """The schedule as it was used: its numbers if they are few, else its ends and a hash."""
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(value, int | float) for value in values)
    ):
        return None
    shown = [f"{value:.6g}" for value in values]
    if len(shown) <= _MOST_OF_SCHEDULE:
        return ", ".join(shown)
    digest = sha256(",".join(shown).encode()).hexdigest()[:8]
    return f"{len(shown)} from {shown[0]}, {shown[1]} to {shown[-1]} ({digest})"


def _of_host(host: HostFacts) -> Iterator[_Entry]:
    yield _MACHINE, "processor", host.cpu_model
    yield _MACHINE, "processor threads", host.cpu_count_logical
    yield _MACHINE, "system", host.os
    yield _VERSIONS, "Python", host.python_version
    yield from _in(_VERSIONS, host.libraries.items())
    for device in host.accelerators:
        yield _MACHINE, device.device, device.name
        yield _VERSIONS, f"{device.device} driver", device.driver_version


def _of_call(call: CallFacts) -> Iterator[tuple[str, object]]:
    yield from ((name, getattr(call, name)) for name in _CALL_FIELDS)


def _of_pipeline(pipeline: PipelineFacts) -> Iterator[tuple[str, object]]:
    yield _PIPELINE, pipeline.class_name
    yield "architecture", pipeline.architecture
    yield from _of_attention(pipeline.attention)
    for name, part in pipeline.components.items():
        yield from _of_component(name, part)


def _of_attention(attention: AttentionFacts) -> Iterator[tuple[str, object]]:
    for name, counts in (("processors", attention.processors), ("backends", attention.backends)):
        if counts:
            yield f"attention {name}", " + ".join(sorted(counts))


def _of_component(name: str, part: ComponentFacts) -> Iterator[tuple[str, object]]:
    if part.role != "scheduler":  # which is named by the schedule that was set
        yield f"{name}{_CLASS}", part.class_name
    if part.module is None:
        return
    yield f"{name} parameters", part.module.parameters
    for what, counts in (("dtype", part.module.dtypes), ("device", part.module.devices)):
        if counts:
            yield f"{name} {what}", max(counts, key=lambda key: counts[key])
    for switch in _SWITCHES:
        value = getattr(part, switch)
        yield f"{name} {switch}", NONE if value is None and switch == "offload" else value


def not_looked_at(runs: Sequence[Run]) -> list[str]:
    """What decides the output of these runs and could not be read, each once: arguments, and weights of models."""
    found: list[str] = []
    for run in runs:
        for stage in run.walk():
            more = stage.facts.get(RECIPE)
            if isinstance(more, Mapping):
                arguments, models = more.get("not_looked_at"), more.get("models")
                if isinstance(arguments, Mapping):
                    found += [f"{name} ({kind})" for name, kind in arguments.items()]
                if isinstance(models, Mapping):
                    found += [
                        f"{name} weights" for name, fingerprint in models.items() if fingerprint is None
                    ]
    return list(dict.fromkeys(found))


def used_by_others(runs: Sequence[Run]) -> float | None:
    """How busy other programs kept the processor, on average."""
    shares = [share for run in runs if (share := others_of(run.facts)) is not None]
    return fmean(shares) if shares else None
