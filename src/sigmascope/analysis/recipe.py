"""What runs were made with, how that differs between two sets of runs, and what the differences explain.

A recipe is everything that can change a run: prompts, seed, steps, size, scheduler, LoRAs, dtypes, devices, offloading,
compiling, versions, the machine. `what_changed` compares recipes, times (`sigmascope.analysis.breakdown`) and the outputs
of stages, and says in a sentence or two what changed and why.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan, prod
from statistics import fmean, median
from typing import Any, Final

from sigmascope import units
from sigmascope.analysis.breakdown import OWN, TimeShare, time_breakdown
from sigmascope.analysis.generations import Case, cases
from sigmascope.analysis.two_samples import p_of_higher
from sigmascope.records.performance import (
    BENCHMARK,
    COLLECTIONS,
    COMPILED_GRAPHS,
    DISK_READ,
    PAGE_FAULTS,
    others_of,
)
from sigmascope.records.run import (
    OUTPUT_HASHES,
    RECIPE,
    AttentionFacts,
    CallFacts,
    ComponentFacts,
    HostFacts,
    PipelineFacts,
    Run,
    Stage,
    TensorFacts,
    is_duration,
    names_in,
)

_NONE: Final = "none"
_OTHERS: Final = "processor used by others"
_NOT_SET: Final = "not set"
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
_FEWEST_RUNS_TO_TEST: Final = 5
_FEWEST_RUNS_TO_SEPARATE: Final = 3
"""With this many runs on each side, but too few to test, all of one side must be above all of the other."""
_LEAST_CHANGE_IF_TESTED: Final = 0.03
_LEAST_CHANGE_IF_SEPARATE: Final = 0.1
_LEAST_CHANGE_OF_FEW_RUNS: Final = 0.2
_MOST_P: Final = 0.01
_LEAST_CHANGE_SECONDS_OF_FEW_RUNS: Final = 0.1
"""Other programs may delay a few runs by this much."""
_PREDICTION_TOLERANCE: Final = 0.2
"""Share by which a ratio may miss the one predicted from the amount of work."""
_AMOUNTS_OF_WORK: Final = (
    "num_inference_steps",
    "guidance_batches",
    "batch_size",
    "height",
    "width",
    "num_frames",
)
"""The time of denoising grows at least in proportion to these."""
_PIXELS: Final = ("height", "width", "num_frames")
_PER_PICTURE: Final = ("batch_size", *_PIXELS)
_FAULTS: Final = "page faults from disk"
_READ: Final = "read from disk"
_COLLECTED: Final = "full garbage collections"
_LOAD: Final = (_OTHERS, _FAULTS, _READ, _COLLECTED)
"""Entries that may change times, but no output."""
_MACHINE: Final = re.compile(
    rf"processor.*|{_FAULTS}|{_READ}|{_COLLECTED}|system|Python|threads|device|sigmascope|torch|diffusers|transformers|peft|accelerate|numpy|"
    r"[a-z]+:\d+( driver)?"
)
_BELONGS_TO: Final = {
    "text_encoding": re.compile(
        r".*prompt.*|text_encoder.*|tokenizer.*|LoRA text_encoder.*|clip_skip|max_sequence.*|batch_size"
    ),
    "model_sampling": re.compile(r"scheduler.*|num_inference_steps"),
    "latent_encoding": re.compile(r"vae.*|has_image|(.*_)?images?|" + "|".join(_PER_PICTURE)),
    "denoising": re.compile(
        r"scheduler.*|seed|generator state|denoiser calls a step|attention.*|guidance.*|eta|strength|callback|LoRA.*|"
        r"(unet|transformer|transformer_2|prior|denoiser|decoder|controlnet).*|graphs compiled|"
        + "|".join(_AMOUNTS_OF_WORK)
    ),
    "latent_decoding": re.compile(r"vae.*|output_type|" + "|".join(_PER_PICTURE)),
}
"""By stage, the entries of a recipe that act in it first."""

_HASH_DIGITS_SHOWN: Final = 12
_NO_EFFECT_ON_TIME: Final = re.compile(
    r"seed|generator state|eta|guidance_scale|LoRA .* (strength|file|content)|.* weights|.*prompt.*|scheduler .*"
)
"""Entries whose values do not change how long a run takes."""
_LONGEST_VALUE_IN_SENTENCE: Final = 60

_MADE_BY: Final = {("latent_decoding", "latent"): "denoising"}
"""The stage that made a tensor, if it is not the stage that holds it."""

Differences = Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class WhatChanged:
    """What differs between two sets of runs, baseline first in each pair.

    Attributes:
        headline: A sentence or two: how the time changed, where and why, and which output differs.
        recipe: What differs in the recipes.
        rows: Parts of the time, as (label, seconds before, seconds now), the largest change first.
        output: The first stage and tensor whose values differ, as "denoising: latent". None if none does, or if they
            differ among the runs of one side.
    """

    headline: str
    recipe: Differences
    rows: tuple[tuple[str, float, float], ...]
    output: str | None

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "headline": self.headline,
            "recipe": {name: list(sides) for name, sides in self.recipe.items()},
            "rows": [{"label": label, "before": before, "now": now} for label, before, now in self.rows],
            "output": self.output,
        }


def what_changed(new: Sequence[Run], baseline: Sequence[Run]) -> WhatChanged:
    """Compare runs with earlier runs of the same work; each side needs at least one.

    Runs that broke off are left out of times and outputs: the work that they did not do would count as time saved.
    """
    recipe = recipe_differences(new, baseline)
    broken_off = _broken_off(new, baseline)
    new, baseline = ([run for run in side if run.complete] for side in (new, baseline))
    if not (new and baseline):
        differs = ", ".join(_in_words(name, sides) for name, sides in list(recipe.items())[:3])
        more = f" The recipe differs: {differs}." if differs else ""
        return WhatChanged(f"{broken_off} Times and outputs are not compared.{more}", recipe, (), None)
    rows = _rows(new, baseline)
    output = first_difference(new, baseline)
    is_seeded = _NOT_SET not in _recipe([*new, *baseline]).get("seed", _NOT_SET)
    sentences = [
        _time_sentence(new, baseline, rows, recipe),
        _output_sentence(output, recipe, is_seeded=is_seeded),
    ]
    text = " ".join(filter(None, sentences))
    # Load from other programs is not a change of the run: if the time is as before, only the table has it.
    changes = [_in_words(name, sides) for name, sides in recipe.items() if name != _OTHERS or sentences[0]]
    if not sentences[0] and (text or changes):
        sentences.insert(0, "Times are as before.")
    callback = recipe.get("callback", ("", ""))[1]
    is_mentioned = any(change in text for change in changes) or (callback != "" and callback in text)
    if changes and not is_mentioned:
        sentences.append(f"The recipe differs: {', '.join(changes[:3])}.")
    if not any(sentences):
        sentences = ["Nothing differs beyond noise."]
    return WhatChanged(
        " ".join(filter(None, [*sentences, broken_off])),
        recipe,
        tuple((row.label, before, row.seconds) for row, before in rows),
        output,
    )


def _broken_off(new: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """Which runs are not whole."""
    counts = [(sum(not run.complete for run in side), len(side)) for side in (baseline, new)]
    told = [
        f"the run {when}" if total == 1 else f"{count} of {total} runs {when}"
        for (count, total), when in zip(counts, ("before", "now"), strict=True)
        if count
    ]
    text = f"{' and '.join(told)} broke off."
    return text[0].upper() + text[1:] if told else None


def _rows(new: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[TimeShare, float]]:
    """Each part of the time now, with the seconds before; medians of the runs, the largest change first."""
    now, before = _medians(new), _medians(baseline)
    gone = {key: row for key, row in before.items() if key not in now}
    rows = [(row, before[key].seconds if key in before else 0.0) for key, row in now.items()]
    rows += [(_with_seconds(row, 0.0), row.seconds) for row in gone.values()]
    return sorted(rows, key=lambda row: -abs(row[0].seconds - row[1]))


def _medians(runs: Sequence[Run]) -> dict[tuple[str, str], TimeShare]:
    shares: dict[tuple[str, str], list[TimeShare]] = {}
    for run in runs:
        for share in time_breakdown(run):
            shares.setdefault((share.name, share.part), []).append(share)
    missing = len(runs)
    return {
        key: _with_seconds(same[0], median([share.seconds for share in same] + [0.0] * (missing - len(same))))
        for key, same in shares.items()
    }


def _with_seconds(share: TimeShare, seconds: float) -> TimeShare:
    return replace(share, seconds=seconds)


def _time_sentence(
    new: Sequence[Run],
    baseline: Sequence[Run],
    rows: Sequence[tuple[TimeShare, float]],
    recipe: Differences,
) -> str | None:
    """How the time of a run changed and why; None if it did not change beyond noise."""
    now, before = median(run.seconds for run in new), median(run.seconds for run in baseline)
    if not rows or not (is_duration(now) and is_duration(before)) or min(now, before) <= 0:
        return None
    if not _is_certain(now / before, new, baseline):
        return None
    how = f"{now / before:.2f} × as long" if now > before else f"{before / now:.2f} × as fast"
    change = f"{how}: {units.seconds(before)} → {units.seconds(now)}."
    least, most = sorted(_predicted_ratios(rows, recipe))
    changed = [_in_words(name, recipe[name]) for name in _AMOUNTS_OF_WORK if name in recipe]
    amounts = f"{' and '.join(changed)} {'explains' if len(changed) == 1 else 'explain'}" if changed else ""
    if amounts and least / (1 + _PREDICTION_TOLERANCE) <= now / before <= most * (1 + _PREDICTION_TOLERANCE):
        return f"{change} {amounts} it."
    same_way = [(row, was) for row, was in rows if (row.seconds > was) == (now > before)]
    if not same_way:  # records that do not add up
        return change
    row, was = same_way[0]
    difference = (
        f"{units.seconds(abs(row.seconds - was))} {'more' if row.seconds > was else 'less'} {_where(row)}"
    )
    return f"{change} {difference}{_why(row, recipe)}." + (f" {amounts} part of it." if amounts else "")


def _is_certain(ratio: float, new: Sequence[Run], baseline: Sequence[Run]) -> bool:
    """Whether a ratio of medians is more than noise; the fewer runs there are, the larger it must be."""
    now, before = [run.seconds for run in new], [run.seconds for run in baseline]
    fewest = min(len(now), len(before))
    if (
        fewest < _FEWEST_RUNS_TO_TEST
        and abs(median(now) - median(before)) < _LEAST_CHANGE_SECONDS_OF_FEW_RUNS
    ):
        return False
    if fewest < _FEWEST_RUNS_TO_SEPARATE:
        return abs(ratio - 1) > _LEAST_CHANGE_OF_FEW_RUNS
    if fewest < _FEWEST_RUNS_TO_TEST:
        is_apart = min(now) > max(before) or max(now) < min(before)
        return is_apart and abs(ratio - 1) > _LEAST_CHANGE_IF_SEPARATE
    higher, lower = (now, before) if ratio > 1 else (before, now)
    return abs(ratio - 1) > _LEAST_CHANGE_IF_TESTED and p_of_higher(higher, lower) < _MOST_P


def _predicted_ratios(rows: Sequence[tuple[TimeShare, float]], recipe: Differences) -> tuple[float, float]:
    """The ratios predicted from the amount of work: in proportion to pixels, and to their square as in attention."""
    factors = {name: _ratio(*recipe[name]) for name in _AMOUNTS_OF_WORK if name in recipe}
    pixels = prod(factors.get(name, 1.0) for name in _PIXELS)
    picture = pixels * factors.get("batch_size", 1.0)
    work = prod(factors.values())
    total = sum(before for _, before in rows) or 1.0
    least = most = 0.0
    for row, before in rows:
        stages = names_in(row.name)
        factor = work if "denoising" in stages else picture if stages[-1].startswith("latent_") else 1.0
        least += before * factor
        most += before * (factor * pixels if factor != 1 else 1.0)
    return least / total, most / total


def _ratio(before: str, now: str) -> float:
    try:
        return float(now) / float(before)
    except (ValueError, ZeroDivisionError):  # several values, or none
        return 1.0


def _where(row: TimeShare) -> str:
    stage = row.stage
    if row.part == "outside stages":
        return f"in {OWN}" if row.name == OWN else row.name
    if row.part == "scheduler":
        return f"in the scheduler's steps of {stage}"
    if row.part == "between steps":
        return f"in your callback {row.callback}" if row.callback else f"between the steps of {stage}"
    if row.part == "steps":
        return f"in the steps of {stage}"
    return f"in {stage}" + (
        ", outside its models, such as in its tokenizer" if _is_outside_models(row) else ""
    )


def _is_outside_models(row: TimeShare) -> bool:
    return row.in_models is not None and row.in_models < row.seconds / 2


def _why(row: TimeShare, recipe: Differences) -> str:
    """The differences of the recipe that may act there; "" if the place itself says enough."""
    if row.callback or row.part == "scheduler" or _is_outside_models(row):
        return ""
    costly = {name: sides for name, sides in recipe.items() if not _NO_EFFECT_ON_TIME.fullmatch(name)}
    causes = _causes(row.stage, costly)
    if not causes:
        return "; nothing in the recipe explains it"
    return "; " + " and ".join(_in_words(name, recipe[name]) for name in causes[:2]) + " may explain it"


def _causes(stage: str, recipe: Differences) -> list[str]:
    """The differing entries that act in this stage first; if there are none, those of the machine."""
    belongs = _BELONGS_TO.get(stage)
    own = [
        name
        for name in recipe
        if belongs is not None and belongs.fullmatch(name) and name not in _AMOUNTS_OF_WORK
    ]
    return own or [name for name in recipe if _MACHINE.fullmatch(name)]


def _in_words(name: str, sides: tuple[str, str]) -> str:
    return f"{name} {_short(sides[0])} → {_short(sides[1])}"


def _short(value: str) -> str:
    return (
        value if len(value) <= _LONGEST_VALUE_IN_SENTENCE else f"{value[: _LONGEST_VALUE_IN_SENTENCE - 1]}…"
    )


def _output_sentence(output: str | None, recipe: Differences, *, is_seeded: bool) -> str | None:
    """Which output differs first, and why; None if none differs."""
    if output is None:
        return None
    stage, _, tensor = output.partition(": ")
    recipe = {name: sides for name, sides in recipe.items() if name not in _LOAD}
    before = list(_BELONGS_TO)[: list(_BELONGS_TO).index(stage) + 1] if stage in _BELONGS_TO else []
    causes = [name for earlier in before for name in recipe if _BELONGS_TO[earlier].fullmatch(name)]
    causes = list(dict.fromkeys(causes)) or [name for name in recipe if _MACHINE.fullmatch(name)]
    if not causes and not is_seeded and stage != "text_encoding":
        return f"The outputs differ from the {tensor} of {stage} on, as they do without a seed."
    why = (
        ", ".join(_in_words(name, recipe[name]) for name in causes[:3]) or "nothing in the recipe explains it"
    )
    return f"The outputs differ from the {tensor} of {stage} on: {why}."


def first_difference(new: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """The first stage and tensor, "denoising: latent", whose values differ between the sides, but not within one.

    Tensors are compared by shape, dtype and the hash of their bytes. If a run has no hash, exact statistics of all their
    values are compared instead.
    """
    sides = [[_outputs(run) for run in runs] for runs in (baseline, new)]
    for name in sides[0][0]:
        told = [[_told(run.get(name)) for run in runs] for runs in sides]
        way = next(
            (way for way in (0, 1) if all(run[way] is not None for runs in told for run in runs)), None
        )
        if way is None:
            continue
        before, now = ({run[way] for run in runs} for runs in told)
        if len(before) > 1 or len(now) > 1:
            return None  # the runs of one side differ among themselves, as without a seed
        if before != now:
            return name
    return None


def _outputs(run: Run) -> dict[str, tuple[TensorFacts, str | None]]:
    """The outputs of each stage in the last generation, with the hash of their bytes if there is one."""
    found: dict[str, tuple[TensorFacts, str | None]] = {}
    for stage in run.walk():
        hashes = stage.facts.get(OUTPUT_HASHES)
        known = hashes if isinstance(hashes, Mapping) else {}
        for name, facts in stage.tensors.items():
            digest = known.get(name)
            made_by = _MADE_BY.get((stage.name, name), stage.name)
            found[f"{made_by}: {name}"] = facts, digest if isinstance(digest, str) else None
    return found


Told = tuple[tuple[object, ...] | None, tuple[object, ...] | None]


def _told(output: tuple[TensorFacts, str | None] | None) -> Told:
    """What identifies a tensor: its hash, and its statistics; None for what it lacks."""
    if output is None:
        return None, None
    facts, digest = output
    return (None if digest is None else (facts.shape, facts.dtype, digest)), _values(facts)


def _values(facts: TensorFacts) -> tuple[object, ...] | None:
    if facts.mean is None:
        return None
    return (
        facts.shape,
        facts.dtype,
        facts.min,
        facts.max,
        facts.mean,
        facts.std,
        facts.nan_count,
        facts.inf_count,
    )


def recipe_differences(new: Sequence[Run], baseline: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """The entries that both sides have and that differ, as (before, now)."""
    ours, theirs = _recipe(new), _recipe(baseline)
    differences = {
        name: (before, ours[name]) for name, before in theirs.items() if name in ours and before != ours[name]
    }
    for name in _consequences(differences):
        del differences[name]
    before, now = _used_by_others(baseline), _used_by_others(new)
    if before is not None and now is not None and abs(now - before) > _NOTABLE_CHANGE_OF_OTHERS_SHARE:
        differences[_OTHERS] = (f"{100 * before:.0f} %", f"{100 * now:.0f} %")
    faults = [_median_fact(runs, PAGE_FAULTS) for runs in (baseline, new)]
    if _are_apart(faults, _NOTABLE_CHANGE_OF_FAULTS):
        differences[_FAULTS] = (f"{faults[0]:,.0f}", f"{faults[1]:,.0f}")
    read = [_median_fact(runs, DISK_READ) for runs in (baseline, new)]
    if _are_apart(read, _NOTABLE_CHANGE_OF_READ_BYTES):
        differences[_READ] = (units.format_size(int(read[0])), units.format_size(int(read[1])))
    for name, fact, notable in (
        (_COLLECTED, COLLECTIONS, _NOTABLE_CHANGE_OF_COLLECTIONS),
        ("graphs compiled", COMPILED_GRAPHS, 0.0),
    ):
        counts = [_median_fact(runs, fact) for runs in (baseline, new)]
        if _are_apart(counts, notable):
            differences[name] = (f"{counts[0]:,.0f}", f"{counts[1]:,.0f}")
    return differences


def _consequences(differences: Differences) -> list[str]:
    """Entries that differ only because another does.

    A dtype changes the weights' fingerprint, because it rounds every value; a LoRA's file changes its content; a seed
    changes the generator's state.
    """
    consequences = ["generator state"] if {"generator state", "seed"} <= differences.keys() else []
    for name in differences:
        part, _, what = name.rpartition(" ")
        component = part.removeprefix("LoRA ").split(".")[0]
        is_file = what == "content" and f"{part} file" in differences
        if is_file or (what in ("weights", "content") and f"{component} dtype" in differences):
            consequences.append(name)
    return consequences


def _median_fact(runs: Sequence[Run], name: str) -> float:
    """The median of a number among the runs' facts; NaN where a run lacks it."""
    values = [run.facts.get(name) for run in runs]
    known = [value for value in values if isinstance(value, int | float)]
    return float(median(known)) if len(known) == len(values) else nan


def _are_apart(sides: Sequence[float], notable: float) -> bool:
    """Whether two counts differ by more than `notable`, and by more than half of the larger."""
    return abs(sides[1] - sides[0]) > max(notable, max(sides) / 2)


def _recipe(runs: Sequence[Run]) -> dict[str, str]:
    """The recipe of the runs, with all values of entries in which they differ."""
    recipe: dict[str, set[str]] = {}
    for run in runs:
        for name, value in recipe_of(run):
            if value is not None:
                recipe.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(values)) for name, values in recipe.items()}


def recipe_of(run: Run) -> Iterator[tuple[str, object]]:
    """Everything known that the run was made with, by name, one generation after another."""
    try:
        run_cases = list(cases(run))
    except ValueError:  # facts that somebody changed by hand
        run_cases = []
    for case in run_cases:
        yield from _of_case(case)
    yield from _of_checks(run)
    benchmark = run.facts.get(BENCHMARK)
    if isinstance(benchmark, Mapping):
        yield from ((name, benchmark.get(name)) for name in _BENCHMARK_FIELDS)
    if run.host is not None:
        yield from _of_host(run.host)


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


def _of_case(case: Case) -> Iterator[tuple[str, object]]:
    outermost = case.stages[0] if case.stages else None
    facts = {} if outermost is None else outermost.facts
    more = facts.get(RECIPE)
    yield from _of_prompts(facts.get("prompts"), is_known=isinstance(more, Mapping))
    seeds = facts.get("seeds")
    if isinstance(more, Mapping) or isinstance(seeds, list):
        yield "seed", ", ".join(map(str, seeds)) if isinstance(seeds, list) else _NOT_SET
    else:
        yield "seed", case.call.seed
    yield from _of_call(case.call)
    if isinstance(more, Mapping):
        yield "callback", case.call.callback or _NONE
        yield from _of_more(more)
    for stage in case.stages:
        yield from _of_stage(stage)
    if case.pipeline is not None:
        yield from _of_pipeline(case.pipeline)


def _of_prompts(prompts: object, *, is_known: bool) -> Iterator[tuple[str, object]]:
    kept = prompts if isinstance(prompts, Mapping) else {}
    for name in ("prompt", "negative_prompt"):
        if is_known and kept and name not in kept:
            yield name, _NONE
    for name, prompt in kept.items():
        if isinstance(prompt, Mapping):
            text, digest = prompt.get("text"), f"sha256 {str(prompt.get('sha256'))[:_HASH_DIGITS_SHOWN]}"
            is_hidden = text is None or text.startswith("<prompt")  # as `cleaner` leaves it
            yield str(name), digest if is_hidden else text


def _of_more(more: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Entries from the fact `recipe`."""
    models = more.get("models")
    if isinstance(models, Mapping):
        yield from ((f"{name} weights", fingerprint) for name, fingerprint in models.items())
    loras = more.get("loras")
    if isinstance(loras, Mapping):
        yield "LoRAs", ", ".join(loras) or _NONE
        for name, lora in loras.items():
            if isinstance(lora, Mapping):
                yield f"LoRA {name} strength", "-".join(map(str, sorted(set(lora.get("strength") or ()))))
                yield f"LoRA {name} active", f"{lora.get('active')} of {lora.get('layers')} layers"
                if lora.get("sha256"):
                    yield (
                        f"LoRA {name} file",
                        f"sha256 {str(lora['sha256'])[:_HASH_DIGITS_SHOWN]} {lora.get('file')}",
                    )
                yield f"LoRA {name} content", lora.get("content")
    arguments = more.get("arguments")
    if isinstance(arguments, Mapping):
        yield from arguments.items()
    states = more.get("generator_states")
    if isinstance(states, list) and states:
        yield "generator state", ", ".join(map(str, states))
    yield "threads", more.get("threads")


def _of_stage(stage: Stage) -> Iterator[tuple[str, object]]:
    """The schedule, and how many times each step called the denoiser."""
    settings = stage.facts.get("settings")
    if stage.name == "model_sampling":
        yield "scheduler", stage.facts.get("scheduler")
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            yield f"scheduler {name}", value
    calls = stage.facts.get("denoiser_calls")
    if isinstance(calls, Mapping) and len(stage.steps):
        yield "denoiser calls a step", round(sum(calls.values()) / len(stage.steps), 2)


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
    yield from ((name, getattr(call, name)) for name in _CALL_FIELDS)


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
    if part.role != "scheduler":  # which is named by the schedule that was set
        yield f"{name} class", part.class_name
    if part.module is None:
        return
    yield f"{name} parameters", part.module.parameters
    for what, counts in (("dtype", part.module.dtypes), ("device", part.module.devices)):
        if counts:
            yield f"{name} {what}", max(counts, key=lambda key: counts[key])
    for switch in _SWITCHES:
        value = getattr(part, switch)
        yield f"{name} {switch}", _NONE if value is None and switch == "offload" else value


def _used_by_others(runs: Sequence[Run]) -> float | None:
    """How busy other programs kept the processor, on average."""
    shares = [share for run in runs if (share := others_of(run.facts)) is not None]
    return fmean(shares) if shares else None
