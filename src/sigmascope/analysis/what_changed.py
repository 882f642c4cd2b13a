"""What changed between two sets of runs, in a sentence or two, and why.

`what_changed` compares recipes (`sigmascope.analysis.recipe`), times (`sigmascope.analysis.breakdown`) and the outputs of
stages, and names what explains the difference.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any, Final

from sigmascope import units
from sigmascope.analysis.breakdown import OWN, TimeShare, time_breakdown
from sigmascope.analysis.lora_acting import ACTS
from sigmascope.analysis.lora_state import standing
from sigmascope.analysis.recipe import (
    AT_ONCE,
    CACHED,
    CLOCK,
    COLLECTED,
    COMPILED,
    DETERMINISTIC,
    ENVIRONMENT,
    FAULTS,
    GENERATIONS,
    GLOBAL_STATE,
    LORAS,
    NOT_SET,
    OTHERS_USED,
    READ,
    Differences,
    is_of_node,
    not_looked_at,
    recipe_differences,
    recipe_of_runs,
    used_by_others,
)
from sigmascope.analysis.run_comparison import (
    MAX_GROWTH,
    USUAL,
    FigureComparison,
    Limits,
    compare_run_sets,
    compare_wholes,
)
from sigmascope.analysis.run_figures import (
    BUSY,
    GENERATION,
    MUCH_WAITED,
    known,
    total_of,
    waited_seconds,
)
from sigmascope.records.failures import OK, outcome_of
from sigmascope.records.performance import processor_use_of
from sigmascope.records.run import OUTPUT_HASHES, Run, TensorFacts, is_duration, names_in

_PREDICTION_TOLERANCE: Final = 0.2
"""Share by which a ratio may miss the one predicted from the amount of work."""
_AMOUNTS_OF_WORK: Final = (
    GENERATIONS,
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
_MACHINE: Final = re.compile(
    rf"processor.*|{FAULTS}|{READ}|{COLLECTED}|system|Python|threads|device|sigmascope|torch|diffusers|transformers|peft|accelerate|numpy|"
    r"[a-z]+:\d+( driver)?|autocast|gradients|float32 matmul precision|TF32 .*|cuDNN .*|deterministic algorithms|oneDNN.*|flush denormals|"
    rf"SDPA kernels|default dtype|train mode|hooks on all modules|library functions|{ENVIRONMENT}"
)
_TWO_MACHINES: Final = "These are runs of two machines, so their times say little of what you changed: measure both sides on one."
_HARDWARE: Final = re.compile(r"processor|processor threads|[a-z]+:\d+")
_BELONGS_TO: Final = {
    "text_encoding": re.compile(
        r".*prompt.*|.*_embeds|text_encoder.*|tokenizer.*|LoRA text_encoder.*|clip_skip|max_sequence.*|batch_size"
    ),
    "model_sampling": re.compile(r"scheduler.*|num_inference_steps|sigmas|timesteps"),
    "latent_encoding": re.compile(
        r"vae.*|\w+_processor .*|has_image|(.*_)?images?|" + "|".join(_PER_PICTURE)
    ),
    "denoising": re.compile(
        r"scheduler.*|(global )?seed|(global )?generator .*|latents|sigmas|timesteps|.*_kwargs.*|denoiser calls a step|attention.*|guidance.*|true_cfg_scale|skip_.*|pag_.*|eta|strength|callback.*|LoRA.*|pipeline (?!methods).*|"
        rf"(unet|transformer|transformer_2|prior|denoiser|decoder|controlnet).*|{COMPILED}|{CACHED}|{AT_ONCE}|"
        + "|".join(_AMOUNTS_OF_WORK)
    ),
    "latent_decoding": re.compile(r"vae.*|\w+_processor .*|output_type|" + "|".join(_PER_PICTURE)),
}
"""By stage, the entries of a recipe that act in it first."""

_NO_EFFECT_ON_TIME: Final = re.compile(
    r"(global )?seed|(global )?generator .*|eta|guidance_scale|true_cfg_scale|latents|.*embeds.*|LoRA .* (strength|file|content)|.* weights|.*prompt.*|scheduler .*|"
    r".+ \(.+\) (.*seed|strength.*|filename_prefix)"
)
"""Entries whose values do not change how long a run takes."""
_LONGEST_VALUE_IN_SENTENCE: Final = 60

_MADE_BY: Final = {("latent_decoding", "latent"): "denoising"}
"""The stage that made a tensor, if it is not the stage that holds it."""
_NO_TIME: Final = "Whole times are not compared: the time of a run is NaN, infinite, or not above 0."
_TIMES_AS_BEFORE: Final = "Times are as before."
_TIMES_ALLOWED: Final = "Times differ by no more than is allowed."
_NOTHING: Final = "Nothing differs beyond noise."
_NOTHING_NOT_ALLOWED: Final = "Nothing differs by more than is allowed."
_LOAD: Final = (OTHERS_USED, CLOCK, FAULTS, READ, COLLECTED)
"""Entries that may change times, but no output."""
_MOST_UNREAD: Final = 4
_BEYOND: Final = "what your own code does between the pipeline's stages is not looked at"
_OF_WEIGHTS: Final = (
    "more than 64 values of each weight",
    "what was written through a weight's .data after it was first read",
)
_VARIES: Final = "kernels of a device may give other bits each time, since deterministic algorithms are off"
_MOST_CHANGE_OF_OWN: Final = 0.1
_LEAST_IDLE: Final = 0.1
"""Seconds."""
_STAGE: Final = "stage"
"""The part that is all of a stage."""
_LARGE: Final = 0.05
"""Of the time before: parts that are as long are looked at when all are alike."""
_SECOND: Final = 0.1
"""Of the time before: what the second longest part has where there is more than one that counts."""
_MOST_UNLIKE: Final = 0.03
"""By which parts that changed alike differ in their ratios; or by a quarter of the change, if that is more."""


@dataclass(frozen=True, slots=True)
class WhatChanged:
    """What differs between two sets of runs, baseline first in each pair.

    Attributes:
        headline: A sentence or two: how the time changed, where and why, and which output differs.
        recipe: What differs in the recipes.
        rows: Parts of the time, as (label, seconds before, seconds now), the largest change first.
        output: The first stage and tensor whose values differ, as "denoising: latent". None if none does, or if they
            differ among the runs of one side.
        fails_more: Whether a larger share of the new runs failed or broke off.
        figures: What is compared of the runs, whether it changed or not.
    """

    headline: str
    recipe: Differences
    rows: tuple[tuple[str, float, float], ...]
    output: str | None
    fails_more: bool = False
    figures: tuple[FigureComparison, ...] = ()

    @property
    def two_machines(self) -> str | None:
        """What to do where the two sides had other processors or devices, and a check is to tell of a change of code."""
        return _TWO_MACHINES if any(_HARDWARE.fullmatch(name) for name in self.recipe) else None

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "headline": self.headline,
            "recipe": {name: list(sides) for name, sides in self.recipe.items()},
            "rows": [{"label": label, "before": before, "now": now} for label, before, now in self.rows],
            "output": self.output,
        }


def what_changed(new: Sequence[Run], baseline: Sequence[Run], *, limits: Limits = USUAL) -> WhatChanged:
    """Compare runs with earlier runs of the same work; each side needs at least one.

    Runs that broke off are left out of times and outputs: the work that they did not do would count as time saved.
    """
    recipe = recipe_differences(new, baseline)
    broken_off, fails_more = _broken_off(new, baseline), _fails_more(new, baseline)
    new, baseline = ([run for run in side if run.complete] for side in (new, baseline))
    if not (new and baseline):
        differs = ", ".join(_in_words(name, sides) for name, sides in list(recipe.items())[:3])
        more = f" The recipe differs: {differs}." if differs else ""
        text = f"{broken_off} Times and outputs are not compared.{more}"
        return WhatChanged(text, recipe, (), None, fails_more)
    rows = _rows(new, baseline)
    output = first_difference(new, baseline)
    if output is None:  # what was drawn from it made no difference
        recipe = {name: sides for name, sides in recipe.items() if name != GLOBAL_STATE}
    asked = recipe_of_runs([*new, *baseline])
    is_seeded = any(NOT_SET not in asked.get(name, NOT_SET) for name in ("seed", "global seed"))
    total = compare_wholes(new, baseline, limits=limits)
    compared, _ = compare_run_sets(new, baseline, limits=limits)
    failed, bare = _failed_generations(new, baseline), _stages_of_one_side(new, baseline)
    time = _time_sentence(total, new, baseline, rows, recipe, may_be_failures=failed is not None)
    is_comparable = total is not None and total.is_comparable
    sentences = [
        failed,
        time,
        _output_sentence(
            output,
            recipe,
            not_looked_at([*baseline, *new]),
            is_seeded=is_seeded,
            may_vary=_may_vary([*baseline, *new]),
        ),
        bare if bare is None or total is not None else f"{bare.partition(',')[0]}.",
    ]
    text = " ".join(filter(None, sentences))
    # Load from other programs, or the processor's clock, is no change of the run: only a time that it may explain has it.
    is_timed = time is not None and is_comparable
    changes = [
        _in_words(name, sides)
        for name, sides in recipe.items()
        if name not in (OTHERS_USED, CLOCK) or is_timed
    ]
    callback = recipe.get("callback", ("", ""))[1]
    is_mentioned = any(change in text for change in changes) or (callback != "" and callback in text)
    if changes and not is_mentioned:
        sentences.append(f"The recipe differs: {', '.join(changes[:3])}.")
    is_only = time is None and not (text or changes)
    rest = (
        []
        if total is None
        else _other_figures(total, compared, rows, recipe, is_told=time is not None, is_only=is_only)
    )
    times = [one for one in (total, *compared) if one is not None and one.unit == "seconds"]
    is_calm = is_comparable and not any(one.state in ("changed", "undecided") for one in times)
    if time is None and is_calm and (text or changes or rest):
        rest.append(_TIMES_ALLOWED if any(one.is_allowed for one in times) else _TIMES_AS_BEFORE)
    sentences += rest
    loras = _loras_in_words(new, baseline)
    if not any(sentences) and loras is None:
        sentences = [_NOTHING_NOT_ALLOWED if any(one.is_allowed for one in compared) else _NOTHING]
    if time is not None and not is_comparable:
        sentences = [failed, *sentences[2:], time]  # what can be told comes first
    elif total is not None and not is_comparable:
        sentences.append(f"A small change of times could not be seen: {total.unavailable['wall']}.")
    elif time is None:
        sentences.append(_parts_not_comparable(compared))
    return WhatChanged(
        " ".join(filter(None, [loras, *sentences, broken_off])),
        recipe,
        () if bare is not None else tuple((row.label, before, row.seconds) for row, before in rows),
        output,
        fails_more,
        compared,
    )


def _fails_more(new: Sequence[Run], baseline: Sequence[Run]) -> bool:
    """Whether a larger share of the new runs is not whole, or has a generation that failed."""
    now, before = (
        sum(outcome_of(run.stages, complete=run.complete) != OK for run in side) / len(side)
        for side in (new, baseline)
    )
    return now > before


def _broken_off(new: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """Which runs are not whole."""
    counts = [(sum(not run.complete for run in side), len(side)) for side in (baseline, new)]
    told = [
        f"the {which} run" if total == 1 else f"{count} of {total} {which} runs"
        for (count, total), which in zip(counts, ("earlier", "new"), strict=True)
        if count
    ]
    text = f"{' and '.join(told)} broke off."
    return text[0].upper() + text[1:] if told else None


def _loras_in_words(new: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """What has become of the LoRAs, where those of all earlier runs did the one, and of all new ones the other.

    Of LoRAs that only one side has it is told if they do not act: that they are there, the recipe says.
    """
    before, now = ([standing(run) for run in side] for side in (baseline, new))
    if any(len({one and one.words for one in side}) != 1 for side in (before, now)):
        return None
    was, told = before[-1], now[-1]
    if told is None or was is None:
        only = told or was
        if only is None or only.is_well:
            return None
        return only.says if was is None else f"In the run before: {only.says}"
    if was.words == told.words:
        return None
    return (
        f"{told.says} {'Before, the LoRA acted.' if was.words == ACTS else f'In the run before: {was.says}'}"
    )


def _failed_generations(new: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """How many generations failed in runs that went on; None where none did, or as many of as many before."""
    counts = []
    for side in (new, baseline):
        succeeded = [stage.success for run in side for stage in run.stages if stage.name == GENERATION]
        counts.append((succeeded.count(False), len(succeeded)))
    now, before = (f"{failed} of {total}" for failed, total in counts)
    if counts[0] == counts[1] or not (counts[0][0] or counts[1][0]):
        return None
    return f"{now} generations failed (before: {before})."


def _stages_of_one_side(new: Sequence[Run], baseline: Sequence[Run]) -> str | None:
    """That the runs of one side have no stages; None where both have some, or neither has."""
    has_stages = [any(run.stages for run in side) for side in (baseline, new)]
    if has_stages[0] == has_stages[1]:
        return None
    which, side = ("new", new) if has_stages[0] else ("earlier", baseline)
    have = "run has" if len(side) == 1 else "runs have"
    return f"The {which} {have} no stages, so only whole times can be compared."


_Rows = dict[tuple[str, str], TimeShare]


def _rows(new: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[TimeShare, float]]:
    """Each part of the time now, with the seconds before; medians of the runs, the largest change first."""
    now, before = _medians(new), _medians(baseline)
    now, before = _undivided(now, before), _undivided(before, now)
    gone = {key: row for key, row in before.items() if key not in now}
    rows = [(row, before[key].seconds if key in before else 0.0) for key, row in now.items()]
    rows += [(_with_seconds(row, 0.0), row.seconds) for row in gone.values()]
    return sorted(rows, key=lambda row: -abs(row[0].seconds - row[1]))


def _medians(runs: Sequence[Run]) -> _Rows:
    shares: dict[tuple[str, str], list[TimeShare]] = {}
    for run in runs:
        for share in time_breakdown(run):
            shares.setdefault((share.name, share.part), []).append(share)
    missing = len(runs)
    return {
        key: _with_seconds(same[0], median([share.seconds for share in same] + [0.0] * (missing - len(same))))
        for key, same in shares.items()
    }


def _undivided(rows: _Rows, other: _Rows) -> _Rows:
    """The rows with one for each stage that is whole on the other side, such as where no step was told, in place of its parts."""
    whole = [name for name, part in other if part == _STAGE and (name, part) not in rows]
    joined: _Rows = {}
    for key, row in rows.items():
        around = next((name for name in whole if f"{key[0]}/".startswith(f"{name}/")), None)
        if around is not None:
            key, row = (around, _STAGE), replace(row, name=around, part=_STAGE, callback=None)
        before = joined.get(key)
        joined[key] = row if before is None else _with_seconds(row, before.seconds + row.seconds)
    return joined


def _with_seconds(share: TimeShare, seconds: float) -> TimeShare:
    return replace(share, seconds=seconds)


def _time_sentence(
    total: FigureComparison | None,
    new: Sequence[Run],
    baseline: Sequence[Run],
    rows: Sequence[tuple[TimeShare, float]],
    recipe: Differences,
    *,
    may_be_failures: bool,
) -> str | None:
    """How the time of a run changed and why, or why that cannot be told; None if it did not change beyond noise."""
    if total is None:
        return _NO_TIME
    if not rows:
        return None
    if not total.is_comparable:
        is_as_before = total.is_noise_on_the_wall and _both_waited(total)
        return None if is_as_before else _beside_others(total, new, baseline, rows)
    if total.is_noise:
        return None
    now, before = total.new, total.baseline
    recipe = _without_contrary_clock(recipe, is_slower=now > before)
    how = f"{units.times(now / before)} as long" if now > before else f"{units.times(before / now)} as fast"
    change = f"{how} ({units.seconds(before)} → {units.seconds(now)})"
    least, most = sorted(_predicted_ratios(rows, recipe))
    changed = [_in_words(name, recipe[name]) for name in _AMOUNTS_OF_WORK if name in recipe]
    amounts = f"{' and '.join(changed)} {'explains' if len(changed) == 1 else 'explain'}" if changed else ""
    if amounts and least / (1 + _PREDICTION_TOLERANCE) <= now / before <= most * (1 + _PREDICTION_TOLERANCE):
        return f"{change}: {amounts} it."
    same_way = [(row, was) for row, was in rows if (row.seconds > was) == (now > before)]
    if not same_way or _stages_of_one_side(new, baseline):  # records that do not add up, or hold no parts
        return f"{change}."
    row, was = same_way[0]
    difference = _more_or_less(row, was)
    is_contrary = most < 1 < now / before or now / before < 1 < least
    why = [*_why(row, recipe), *([f"{amounts} part of it"] if amounts and not is_contrary else [])]
    why += ["generations that failed may explain it"] if may_be_failures else []
    if not why and not _says_enough(row):
        why = ["nothing in the recipe explains it"]
        if _are_alike(rows, now / before):
            why.append(f"all parts are alike, as on a {'slower' if now > before else 'faster'} machine")
    if is_contrary:
        why.append(f"{' and '.join(changed)} should make it {'faster' if now > before else 'slower'}")
    return f"{change}: {'; '.join([difference, *why])}."


def _are_alike(rows: Sequence[tuple[TimeShare, float]], ratio: float) -> bool:
    """Whether every part that counts changed by the same ratio as the whole; of one part alone nobody knows."""
    whole = sum(was for _, was in rows)
    large = [(row.seconds, was) for row, was in rows if max(row.seconds, was) >= _LARGE * whole]
    longest = sorted(was for _, was in large)[-2:]
    unlike = max(_MOST_UNLIKE, abs(ratio - 1) / 4)
    return (
        len(longest) == 2
        and min(longest) >= _SECOND * whole
        and all(was > 0 and abs(now / was / ratio - 1) <= unlike for now, was in large)
    )


def _more_or_less(row: TimeShare, was: float) -> str:
    """Such as "133 ms more in your callback preview (generate.py:10)"."""
    return f"{units.seconds(abs(row.seconds - was))} {'more' if row.seconds > was else 'less'} {_where(row)}"


def _without_contrary_clock(recipe: Differences, *, is_slower: bool) -> Differences:
    """The differences without a clock that would have had the opposite effect."""
    if CLOCK not in recipe:
        return recipe
    before, now = (float(side.split()[0]) for side in recipe[CLOCK])
    return (
        recipe
        if (now < before) == is_slower
        else {name: sides for name, sides in recipe.items() if name != CLOCK}
    )


def _parts_not_comparable(compared: Sequence[FigureComparison]) -> str | None:
    """That a part cannot be compared, where the whole can and is as before."""
    parts = [figure for figure in compared if not figure.is_comparable]
    if not parts:
        return None
    largest = max(parts, key=_difference_of)
    return f"A change of {largest.name} could not be seen: {largest.unavailable['wall']}."


def _both_waited(compared: FigureComparison) -> bool:
    """Whether both sides waited much for a processor: then a wait is no change."""
    return compared.waited is not None and min(compared.waited) > MUCH_WAITED


def _beside_others(
    compared: FigureComparison,
    new: Sequence[Run],
    baseline: Sequence[Run],
    rows: Sequence[tuple[TimeShare, float]],
) -> str:
    """Why the times of the runs are not comparable, and what of them is."""
    waited = compared.waited or (0.0, 0.0)
    side = new if waited[1] >= waited[0] else baseline
    others = used_by_others(side)
    who = ""
    if others is not None and "other programs" not in compared.unavailable["wall"]:
        who = "; other programs ran" if others > BUSY else "; no other program ran"
    text = f"The times are not comparable: {compared.unavailable['wall']}{who}."
    again = " Measure again when nothing else runs." if others is not None and others > BUSY else ""
    again = f"{_idle_in_words(new, baseline, rows)}{again}"
    if compared.is_noise_on_the_wall:
        return f"{text} By the clock they are as before, but a small change could not be seen.{again}"
    if compared.ratio is None or not (total_of(new).own and total_of(baseline).own):
        return f"{text}{again}"
    change = f"{units.seconds(compared.baseline)} → {units.seconds(compared.new)}"
    if abs(compared.ratio - 1) <= _MOST_CHANGE_OF_OWN:
        return f"{text} The run's own processor time is as before: {change}.{again}"
    return f"{text} The run's own processor time was {change}, which other programs can change, too.{again}"


def _idle_in_words(
    new: Sequence[Run], baseline: Sequence[Run], rows: Sequence[tuple[TimeShare, float]]
) -> str:
    """That a run slept, or waited for a disk or a network, where this is most of what it took longer: no other program explains it."""
    idle = [[_idle_seconds(run) for run in side] for side in (baseline, new)]
    before, now = (known(side) for side in idle)
    longer = median(run.seconds for run in new) - median(run.seconds for run in baseline)
    if len(before) < len(baseline) or len(now) < len(new):
        return ""
    more = median(now) - median(before)
    slower = [(row, was) for row, was in rows if row.seconds > was]
    if not slower or more < max(_LEAST_IDLE, longer / 2):
        return ""
    return (
        f" But for {units.seconds(more)} more than before it neither worked nor waited for a processor: "
        f"{_more_or_less(*slower[0])}."
    )


def _idle_seconds(run: Run) -> float | None:
    """What a run passed, at least, neither at work nor waiting for a processor; None where that is not known, or it waits for a device."""
    use = processor_use_of(run.facts)
    waited = None if use is None else waited_seconds(use)
    if use is None or waited is None or not is_duration(run.seconds):
        return None
    if run.host is not None and run.host.accelerators:
        return None
    return max(run.seconds - use.own_seconds - waited, 0.0)


def _other_figures(
    total: FigureComparison,
    compared: Sequence[FigureComparison],
    rows: Sequence[tuple[TimeShare, float]],
    recipe: Differences,
    *,
    is_told: bool,
    is_only: bool,
) -> list[str]:
    """What the table holds beside the time of the whole run: a part's time, a peak of memory, what is undecided.

    Args:
        total: Of whole runs.
        compared: All figures.
        rows: Parts of the time.
        recipe: What differs.
        is_told: Whether the time of the whole run, or why it cannot be compared, is told already.
        is_only: Whether there is nothing else to tell.
    """
    parts = [figure for figure in compared if figure.name != total.name]
    told, is_open = [], [total, *parts]
    for unit in ("bytes",) if is_told else ("seconds", "bytes"):
        changed = [figure for figure in parts if figure.unit == unit and figure.has_changed]
        largest = max(changed, key=_difference_of, default=None)
        # A process's memory creeps: a little of it is told where nothing else is.
        if largest is not None and (unit == "seconds" or is_only or _is_notable(largest)):
            told.append(_part_in_words(largest, total, rows, recipe))
    if is_told:
        is_open = [figure for figure in parts if figure.unit == "bytes"]
    is_open = [figure for figure in is_open if figure.undecided is not None]
    # The whole run says more than its parts, and a part that differs more than those that differ less.
    for figure in sorted(is_open, key=lambda one: (one is not total, one.unit, -_difference_of(one)))[:1]:
        name = "the whole time" if figure is total else figure.name
        told.append(f"A change of {name} by {_growth(figure)} cannot be told from noise: {figure.undecided}.")
    return told


def _is_notable(peak: FigureComparison) -> bool:
    return peak.ratio is None or abs(peak.ratio - 1) > MAX_GROWTH


def _difference_of(figure: FigureComparison) -> float:
    return abs(figure.new - figure.baseline)


def _growth(figure: FigureComparison) -> str:
    """Such as "+21.0 % (2.00 s → 2.42 s)"."""
    share = "" if figure.ratio is None else f"{units.percent_change(figure.ratio - 1)} "
    return f"{share}({_amounts(figure)})"


def _amounts(figure: FigureComparison) -> str:
    """Such as "2.00 s → 2.42 s"."""
    amount = units.seconds if figure.unit == "seconds" else lambda value: f"{units.mib(round(value))} MB"
    return f"{amount(figure.baseline)} → {amount(figure.new)}"


def _part_in_words(
    figure: FigureComparison,
    total: FigureComparison,
    rows: Sequence[tuple[TimeShare, float]],
    recipe: Differences,
) -> str:
    """What changed beyond noise where the whole run did not."""
    if figure.unit == "bytes":
        by = "" if figure.ratio is None else f" by {100 * abs(figure.ratio - 1):,.1f} %"
        rose = "rose" if figure.new > figure.baseline else "fell"
        return f"The {figure.name} {rose}{by} ({_amounts(figure)})."
    stage = figure.name.removesuffix(" step")
    inside = [
        (row, was)
        for row, was in rows
        if stage in names_in(row.name) and (row.seconds > was) == (figure.new > figure.baseline)
    ]
    is_all_of_it = bool(inside) and inside[0][0].part == _STAGE  # then where it is has been told
    why = [] if not inside or is_all_of_it else [_more_or_less(*inside[0])]
    why += _why(inside[0][0], recipe) if inside else []
    whole = "" if total.undecided else ", the whole run as before"
    return f"{figure.name} {_growth(figure)}{whole}{': ' if why else ''}{'; '.join(why)}."


def _predicted_ratios(rows: Sequence[tuple[TimeShare, float]], recipe: Differences) -> tuple[float, float]:
    """The ratios predicted from the amount of work: in proportion to pixels, and to their square as in attention."""
    factors = {name: _ratio(*recipe[name]) for name in _AMOUNTS_OF_WORK if name in recipe}
    pixels = prod(factors.get(name, 1.0) for name in _PIXELS)
    each = factors.get(GENERATIONS, 1.0)
    picture = each * pixels * factors.get("batch_size", 1.0)
    work = prod(factors.values())
    total = sum(before for _, before in rows) or 1.0
    least = most = 0.0
    for row, before in rows:
        stages = names_in(row.name)
        grows = "denoising" in stages or stages[-1].startswith("latent_")
        factor = work if "denoising" in stages else picture if grows else each
        least += before * factor
        most += before * (factor * pixels if grows else each)
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


def _says_enough(row: TimeShare) -> bool:
    """Whether the place itself tells the cause."""
    return bool(row.callback) or row.part == "scheduler" or _is_outside_models(row)


def causes_in_words(recipe: Differences) -> list[str]:
    """The differences that may change times and peaks, each as "torch 2.13 → 2.14"; those of the machine's load last."""
    names = [name for name in recipe if name in _AMOUNTS_OF_WORK or not _NO_EFFECT_ON_TIME.fullmatch(name)]
    return [_in_words(name, recipe[name]) for name in sorted(names, key=lambda name: name in _LOAD)]


def _why(row: TimeShare, recipe: Differences) -> list[str]:
    """The differences of the recipe that may act there."""
    if _says_enough(row):
        return []
    costly = {
        name: sides
        for name, sides in recipe.items()
        if name not in _AMOUNTS_OF_WORK and not _NO_EFFECT_ON_TIME.fullmatch(name)
    }
    load = [name for name in (FAULTS, READ, COLLECTED) if name in costly and COMPILED not in costly]
    clock = [name for name in (CLOCK,) if name in costly]
    causes = dict.fromkeys([*_causes([row.stage], costly)[:2], *clock, *load])
    told = " and ".join(_in_words(name, recipe[name]) for name in causes)
    return [f"{told} may explain it"] if told else []


def _causes(stages: Sequence[str], recipe: Differences) -> list[str]:
    """The differing entries that act in these stages first; if there are none, those of the machine, then those of no stage."""
    places = [_BELONGS_TO[stage] for stage in stages if stage in _BELONGS_TO]
    own = [name for place in places for name in recipe if place.fullmatch(name)]
    own += [name for stage in stages for name in recipe if is_of_node(name, stage)]
    if "text_encoding" in stages and any("text_encoder" in side for side in recipe.get(LORAS, ())):
        own.insert(0, LORAS)
    elsewhere = [*_BELONGS_TO.values(), _MACHINE]
    return (
        list(dict.fromkeys(own))
        or [name for name in recipe if _MACHINE.fullmatch(name)]
        or [name for name in recipe if not any(place.fullmatch(name) for place in elsewhere)]
    )


def _in_words(name: str, sides: tuple[str, str]) -> str:
    return f"{name} {_short(sides[0])} → {_short(sides[1])}"


def _short(value: str) -> str:
    return (
        value if len(value) <= _LONGEST_VALUE_IN_SENTENCE else f"{value[: _LONGEST_VALUE_IN_SENTENCE - 1]}…"
    )


def _output_sentence(
    output: str | None, recipe: Differences, unread: Sequence[str], *, is_seeded: bool, may_vary: bool
) -> str | None:
    """Which output differs first, and why; None if none differs.

    Args:
        output: The first stage and tensor that differ.
        recipe: What differs in the recipes.
        unread: What could not be read of them.
        is_seeded: Whether the calls had seeds.
        may_vary: Whether a device need not give the same bits each time.
    """
    if output is None:
        return None
    stage, _, tensor = output.partition(": ")
    recipe = {name: sides for name, sides in recipe.items() if name not in _LOAD}
    before = list(_BELONGS_TO)[: list(_BELONGS_TO).index(stage) + 1] if stage in _BELONGS_TO else []
    causes = _causes(before, recipe)
    if not causes and not is_seeded and stage != "text_encoding":
        return f"The outputs differ from the {tensor} of {stage} on, as they do without a seed."
    why = ", ".join(
        _in_words(name, recipe[name]) for name in causes[:3]
    ) or "nothing in the recipe explains it" + (
        f"; not looked at: {', '.join((*unread[:_MOST_UNREAD], *_OF_WEIGHTS))}"
        if unread
        else f"; {_BEYOND}, nor {', nor '.join(_OF_WEIGHTS)}"
    ) + (f"; {_VARIES}" if may_vary else "")
    return f"The outputs differ from the {tensor} of {stage} on: {why}."


def _may_vary(runs: Sequence[Run]) -> bool:
    """Whether they ran beside an accelerator without PyTorch's deterministic algorithms."""
    has_device = all(run.host is not None and run.host.accelerators for run in runs)
    return has_device and recipe_of_runs(runs).get(DETERMINISTIC) == "False"


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
