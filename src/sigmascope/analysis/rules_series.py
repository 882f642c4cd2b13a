"""Rules on the generations of a run as one series: what recurs in each of them, drifts, or befalls one among many.

A generation alone does not show it: first steps that are slow again and again look like a warm-up, and a step time that
creeps up from one generation to the next looks even within each.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import median
from typing import Final, NamedTuple

from sigmascope import units
from sigmascope.analysis.breakdown import seconds_between_steps
from sigmascope.analysis.generations import Case, cases, compilations_in, compiles, most_at_once
from sigmascope.analysis.recipe import DYNAMIC, Differences, recipe_differences
from sigmascope.analysis.rules import Seen, rule
from sigmascope.analysis.rules_time import is_slow_first_step
from sigmascope.analysis.run_figures import MUCH_WAITED, known, step_seconds, theil_sen, waited_seconds
from sigmascope.analysis.what_changed import causes_in_words
from sigmascope.plain_text import in_one_line
from sigmascope.records.performance import processor_use_of
from sigmascope.records.run import RECIPE, Role, Run, Stage, is_duration, stage_seconds

RECUR: Final = "series.first_steps_recur"
SLOW_DOWN: Final = "series.slows_down"
AT_ONCE: Final = "series.at_once"
_LEAST_EXCESS_SECONDS: Final = 0.5
_FEWEST_FOR_DRIFT: Final = 6
"""Sen's bounds with a confidence of 99 % take as many."""
_LEAST_DRIFT: Final = 0.1
_LORA: Final = "lora_application"
_LEAST_GROWTH_OF_LORAS: Final = 0.5
"""Of the first call's time: files of several sizes take different times."""
_LEAST_RISE: Final = 1.5
_LEAST_PAUSE_SECONDS: Final = 30.0
_FEWEST_FOR_OUTLIER: Final = 5
_LEAST_OUTLIER_RATIO: Final = 2.0
_MANY_PAGES: Final = 100
_MOST_NAMED: Final = 6
_MOST_CAUSES: Final = 2
_NOT_IN_A_STEP: Final = ("num_inference_steps", "callback", "output_type")
"""Entries of a recipe that do not change what a step takes."""
_BESIDE_OTHERS: Final = 0.5
"""So many other generations ran during one, on average: its times are theirs too."""
_ALONE: Final = 0.1
"""Fewer than this: it ran alone."""
_LEAST_SHARED: Final = 1.5
"""How many times as long steps beside others take: below it there was room for all."""
_TEXT_LENGTH: Final = "text length"
_FEWEST_OF_EACH: Final = 2
"""Generations with a slow first step, and with a fast one, that tell whether a change of text is its cause."""


class _Generation(NamedTuple):
    """One generation's steps, by the clock that timed them.

    Attributes:
        case: The generation.
        stage: The stage of the steps.
        number: From 1 on.
        first: Seconds of the first step.
        usual: The median of the others.
        longest: Of the others.
        beside: How many other generations ran meanwhile on the same devices, on average.
    """

    case: Case
    stage: Stage
    number: int
    first: float
    usual: float
    longest: float
    beside: float = 0.0

    @property
    def excess(self) -> float:
        """What the first step took beyond the others."""
        return self.first - self.usual

    @property
    def is_slow_at_first(self) -> bool:
        """Whether that is much."""
        return is_slow_first_step(self.first, self.usual)

    def work(self) -> tuple[object, ...]:
        """What decides how much a step works."""
        return _work_of(self.case)


_SHAPES: Final = {
    "height": "height",
    "width": "width",
    "num_frames": "number of frames",
    "batch_size": "batch size",
    "guidance_batches": "number of guidance batches",
}
"""Arguments that change the shapes of the denoiser's input, with their names in a sentence."""


def _work_of(case: Case) -> tuple[object, ...]:
    """Two generations with the same have the same shapes."""
    return (
        None if case.pipeline is None else case.pipeline.class_name,
        *(getattr(case.call, name) for name in _SHAPES),
    )


def _outermost(run: Run) -> list[Case]:
    """A case for each generation, without those inside others."""
    try:
        run_cases = [case for case in cases(run) if case.number is not None]
    except ValueError:  # facts that somebody changed by hand
        return []
    return [next(alike) for _, alike in groupby(run_cases, key=lambda case: case.number)]


def _generations(run: Run) -> list[_Generation]:
    """Those that have at least two timed steps after the first."""
    found: list[_Generation] = []
    outermost = _outermost(run)
    for number, case in enumerate(outermost, start=1):
        for stage in case.with_steps()[:1]:
            seconds = step_seconds(stage)
            others = known(seconds[1:])
            if seconds[0] is not None and len(others) >= 2:
                beside = _beside(case, outermost)
                found.append(
                    _Generation(case, stage, number, seconds[0], median(others), max(others), beside)
                )
    return found


def _beside(case: Case, outermost: Sequence[Case]) -> float:
    """How many other generations ran during one, on the same devices, on average."""
    began, ended = _span(case)
    if not 0 < ended - began < math.inf:
        return 0.0
    meanwhile = 0.0
    for other in outermost:
        other_began, other_ended = _span(other)
        shared = min(ended, other_ended) - max(began, other_began)
        if other is not case and shared > 0 and _share_devices(case, other):
            meanwhile += shared
    return meanwhile / (ended - began)


def _span(case: Case) -> tuple[float, float]:
    stage = case.stages[0]
    return stage.started_seconds, stage.started_seconds + stage.seconds


def _share_devices(first: Case, second: Case) -> bool:
    """Whether two generations may have worked on one device; also where that is not known."""
    sides = [
        {
            device
            for part in case.components("denoiser").values()
            if part.module is not None
            for device in part.module.devices
        }
        for case in (first, second)
    ]
    return not all(sides) or bool(sides[0] & sides[1])


def _by_work(run: Run) -> Iterable[list[_Generation]]:
    """Those of the same work that had the devices for themselves, in the order in which they came."""
    by_work: dict[tuple[object, ...], list[_Generation]] = {}
    for generation in _generations(run):
        if generation.beside < _BESIDE_OTHERS:
            by_work.setdefault(generation.work(), []).append(generation)
    return by_work.values()


@rule(AT_ONCE, "warning", "info", about="a series of generations", looks_at="run")
def ran_at_once(run: Run) -> Iterator[Seen]:
    """Generations ran at the same time and shared the devices: each took longer than alone."""
    generations = _generations(run)
    crowded = [one for one in generations if one.beside >= _BESIDE_OTHERS]
    if len(crowded) < 2:
        return
    most = most_at_once([one.case.stages[0] for one in crowded])
    alone: dict[tuple[object, ...], list[float]] = {one.work(): [] for one in crowded}
    for one in generations:
        if one.beside < _ALONE and one.work() in alone:
            alone[one.work()].append(one.usual)
    ratios = [one.usual / median(alone[one.work()]) for one in crowded if any(alone[one.work()])]
    if ratios and median(ratios) < _LEAST_SHARED:
        return
    known_alone = [seconds for of_work in alone.values() for seconds in of_work]
    usual = median(one.usual for one in crowded)
    yield Seen(
        severity="warning" if ratios else "info",
        message=f"{len(crowded)} of {units.counted(len(generations), 'generation')} ran at the same time, up to {most} at once: "
        f"their steps took {units.seconds(usual)}"
        + (
            f", and {units.seconds(median(known_alone))} in those that ran alone ({median(ratios):.2f} × as long)."
            if ratios
            else ", since they shared what they ran on."
        ),
        evidence={
            "generations": len(crowded),
            "of_generations": len(generations),
            "most_at_once": most,
            "step_seconds": usual,
            "alone_step_seconds": median(known_alone) if ratios else None,
        },
        advice="Let requests wait for each other (a queue, or a lock around the pipeline), or make their pictures in one call, with a "
        "list of prompts. At once they come no sooner, and need more memory.",
        stage=crowded[0].stage.name,
    )


@rule(RECUR, "warning", about="a series of generations", looks_at="run")
def first_steps_recur(run: Run) -> Iterator[Seen]:
    """The first step is slow in generation after generation: compiled again for each new size, or loaded again."""
    generations = _generations(run)
    slow = [generation for generation in generations if generation.is_slow_at_first]
    if len(slow) < 2:
        return
    total = sum(generation.excess for generation in slow)
    compiled = any(compiles(one.case, "denoiser") for one in slow)
    reasons = _why_compiled([one.case for one in slow])
    new = _new_values([one.case for one in slow])
    by_size = bool(new) and len({one.work() for one in slow}) == len(slow)
    gave_up = any(noted.gave_up for one in generations if (noted := compilations_in(one.case)))
    spared = _new_but_fast(generations, slow) if by_size and not gave_up else 0
    changed = [] if by_size else _changed_each_time(slow, generations, run, is_compiled=compiled)
    again = "is compiled again" if compiled else "costs it again"
    names, values = " and ".join(new), "; ".join(map(_some, new.values()))
    if spared:
        others = units.counted(spared, "other new size")
        cause = f"{names} ({values}) {'was compiled' if compiled else 'cost it'} anew, {others} not"
    elif by_size:
        cause = f"each new {names} ({values}) {again}"
    elif changed:
        cause = f"each change of {' and '.join(changed[:_MOST_CAUSES])} {again}"
    elif reasons:
        cause = f"it is compiled again, since {reasons[0]}"
    else:
        cause = "what it loads or compiles is not kept from one generation to the next"
    least, most = min(one.first for one in slow), max(one.first for one in slow)
    took = units.seconds(most) if least == most else f"{units.seconds(least)} to {units.seconds(most)}"
    is_timed = is_duration(run.seconds) and run.seconds > 0
    share = (
        f" That is {units.percent(total, run.seconds)} of {units.seconds(run.seconds)}." if is_timed else ""
    )
    yield Seen(
        message=f"The first step took {took} in {len(slow)} of {units.counted(len(generations), 'generation')}, every "
        f"other step at most {units.seconds(max(one.longest for one in generations))}: {cause}.{share}",
        evidence={
            "generations": len(slow),
            "of_generations": len(generations),
            "first_seconds_least": least,
            "first_seconds_most": most,
            "median_seconds": median(one.usual for one in generations),
            "gain_seconds": total - slow[0].excess,
            "compiled": compiled,
            "new": "; ".join(f"{name} {_some(values)}" for name, values in new.items()) or None,
            "changed": ", ".join(changed) or None,
            "why_compiled": "; ".join(reasons) or None,
        },
        advice=_advice(
            changed,
            by_size=by_size,
            compiled=compiled,
            is_over=bool(spared),
            is_dynamic=_is_dynamic([one.case for one in slow]),
        ),
        stage=slow[0].stage.name,
    )


def _new_values(slow: Sequence[Case]) -> dict[str, list[object]]:
    """The arguments of which the slow generations have several values, in the order in which they came."""
    values = {
        title: list(dict.fromkeys(getattr(case.call, name) for case in slow))
        for name, title in _SHAPES.items()
    }
    return {title: several for title, several in values.items() if len(several) > 1 and None not in several}


def _why_compiled(slow: Sequence[Case]) -> list[str]:
    """Why functions were compiled again in these generations, the most frequent reasons first."""
    counts = Counter(reason for case in slow if (noted := compilations_in(case)) for reason in noted.why)
    return [reason for reason, _ in counts.most_common()]


def _new_but_fast(generations: Sequence[_Generation], slow: Sequence[_Generation]) -> int:
    """How many of the first generations of their work were not slow at first."""
    first: dict[tuple[object, ...], int] = {}
    for one in generations:
        first.setdefault(one.work(), one.number)
    return len({*first.values()} - {one.number for one in slow})


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:_MOST_NAMED]))
    return shown if len(values) <= _MOST_NAMED else f"{shown}, …"


def _differences(before: _Generation, now: _Generation, run: Run) -> dict[str, tuple[str, str]]:
    """What differs between two generations, the length of their texts first."""
    sides = [replace(run, stages=one.case.stages[:1], folded=None) for one in (now, before)]
    lengths = [_text_length(one.case) for one in (before, now)]
    known_lengths = [str(length) for length in lengths if length is not None]
    differs = {_TEXT_LENGTH: (known_lengths[0], known_lengths[1])} if len(set(known_lengths)) > 1 else {}
    return differs | recipe_differences(sides[:1], sides[1:])


def _text_length(case: Case) -> int | None:
    """How many tokens long the text is that goes into the denoiser; None: not known."""
    for stage in case.named("text_encoding"):
        for name, tensor in stage.tensors.items():
            if name == "prompt_embeds" and len(tensor.shape) == 3:
                return tensor.shape[1]
    return None


def _changes(
    before: _Generation, now: _Generation, run: Run, but: Collection[str] = _NOT_IN_A_STEP
) -> Differences:
    """What differs between two generations and may change the time of a step."""
    return {
        name: both
        for name, both in _differences(before, now, run).items()
        if name not in (*but, _TEXT_LENGTH) and causes_in_words({name: both})
    }


def _changed(before: _Generation, now: _Generation, run: Run) -> str | None:
    """The same in words, such as "LoRAs none → unet.style"."""
    return " and ".join(causes_in_words(_changes(before, now, run))[:_MOST_CAUSES]) or None


def _changed_each_time(
    slow: Sequence[_Generation], generations: Sequence[_Generation], run: Run, *, is_compiled: bool
) -> list[str]:
    """What each of these generations had otherwise than the one before it, and no other had.

    A text changes with most generations, and no time by itself: it is named only where several others kept it.
    """
    changes = {now.number: _differences(before, now, run) for before, now in pairwise(generations)}
    numbers = {one.number for one in slow}
    of_slow = [differs for number, differs in changes.items() if number in numbers]
    of_others = [differs for number, differs in changes.items() if number not in numbers]
    alike = [
        name
        for name in of_slow[0]
        if name not in _NOT_IN_A_STEP
        and all(name in others for others in of_slow)
        and not any(name in others for others in of_others)
    ]
    is_contrast = min(len(of_slow), len(of_others)) >= _FEWEST_OF_EACH
    named = [
        name
        for name in alike
        if (is_contrast and "prompt" in name)
        or (
            causes_in_words({name: of_slow[0][name]}) and (name != _TEXT_LENGTH or is_contrast or is_compiled)
        )
    ]
    return [name for name in named if _TEXT_LENGTH not in named or "prompt" not in name]


def _may_explain(*causes: str | None) -> str:
    named = " and ".join(filter(None, causes))
    return f"; {named} may explain it" if named else ""


def _pages_read(before: Sequence[_Generation], since: Sequence[_Generation]) -> str | None:
    """Pages of memory that each of some generations had to read from a disk, and each of others had not; None: no such."""
    counts = [[_faults(one) for one in side] for side in (before, since)]
    if any(None in side for side in counts):
        return None
    was, now = (median(known(side)) for side in counts)
    if max(was, now) < _MANY_PAGES or abs(now - was) < max(was, now) / 2:
        return None
    return f"pages read from a disk (swap, or weights) {was:,.0f} → {now:,.0f} in each"


def _faults(one: _Generation) -> float | None:
    use = processor_use_of(one.case.stages[0].facts)
    return None if use is None or use.major_faults is None else float(use.major_faults)


def _is_dynamic(slow: Sequence[Case]) -> bool:
    """Whether torch.compile was asked for graphs of all sizes (dynamic=True) already."""
    recipes = [stage.facts.get(RECIPE) for case in slow for stage in case.stages]
    surroundings = [recipe.get("surroundings") for recipe in recipes if isinstance(recipe, Mapping)]
    return any(
        str(name).endswith(DYNAMIC) and value == "True"
        for entries in surroundings
        if isinstance(entries, Mapping)
        for name, value in entries.items()
    )


def _advice(changed: Sequence[str], *, by_size: bool, compiled: bool, is_over: bool, is_dynamic: bool) -> str:
    if compiled and is_dynamic and (by_size or _TEXT_LENGTH in changed):
        return (
            "dynamic=True was asked for, and something in the model fixes a size all the same: TORCH_LOGS=recompiles,dynamic says "
            "what. Warm up two sizes, or each that you use, before timing."
        )
    if is_over and compiled:
        return (
            "PyTorch compiles for one size, then for all. To compile once only, ask for that at first (torch.compile(…, "
            "dynamic=True), or torch._dynamo.mark_dynamic), and warm up before timing."
        )
    if by_size and compiled:
        return (
            "Compile once for all sizes (torch.compile(…, dynamic=True)), or keep to a few sizes and warm up each of them. "
            "TORCH_LOGS=recompiles says which guard failed."
        )
    if compiled and _TEXT_LENGTH in changed:
        return "Compile once for all lengths (torch.compile(…, dynamic=True)), or pad all texts to one length (max_sequence_length)."
    if compiled:
        return "Something changes a guard each time: TORCH_LOGS=recompiles says which."
    if any("prompt" in name for name in changed):
        return (
            "A new text needs the text encoder, for which the denoiser may have to make room. Encode all prompts first "
            "(prompt_embeds), or use a smaller text encoder, or one in fewer bits."
        )
    return "Look for what is loaded, moved or tuned anew in each generation; warming up once does not help."


@rule(SLOW_DOWN, "warning", about="a series of generations", looks_at="run")
def slows_down(run: Run) -> Iterator[Seen]:
    """Steps take longer from generation to generation: something accumulates, or the device gets hot."""
    for alike in _by_work(run):
        usual = [one.usual for one in alike]
        if _waited([one.stage for one in alike[len(alike) // 2 :]]) > MUCH_WAITED:
            continue
        risen = list(_slow_since(alike, run))
        if risen or len(alike) < _FEWEST_FOR_DRIFT:
            yield from risen
            continue
        slope = theil_sen(usual)
        # What each waited for a processor is other programs' doing.
        own = [seconds * (1 - _waited([one.stage])) for seconds, one in zip(usual, alike, strict=True)]
        if not (_drifts(usual) and _drifts(own)):
            continue
        changed = _changed(alike[0], alike[-1], run)
        yield Seen(
            message=f"Steps became slower from generation to generation: {units.seconds(usual[0])} in the first of "
            f"{len(alike)}, {units.seconds(usual[-1])} in the last ({units.percent_change(usual[-1] / usual[0] - 1, 0)})"
            f"{_may_explain(changed, _pages_read(alike[:1], alike[-1:]))}.",
            evidence={
                "changed": changed,
                "generations": len(alike),
                "first_seconds": usual[0],
                "last_seconds": usual[-1],
                "growth_seconds_per_generation": slope.value,
                "gain_seconds": sum(max(one.usual - usual[0], 0.0) * len(one.stage.steps) for one in alike),
            },
            advice="Look for hooks, adapters or list entries that each generation adds, and for memory near its limit; then "
            "check the device's clocks and temperature.",
            stage=alike[0].stage.name,
        )


def _drifts(seconds: Sequence[float]) -> bool:
    """Whether they grow from one to the next beyond chance, and by much."""
    slope = theil_sen(seconds)
    return slope.lower > 0 and slope.value * (len(seconds) - 1) >= _LEAST_DRIFT * seconds[0]


def _slow_since(alike: Sequence[_Generation], run: Run) -> Iterator[Seen]:
    """From one generation on the usual step of each is far above that of each before."""
    ratios = {count: _rise(alike[:count], alike[count:]) for count in range(1, len(alike))}
    if not ratios:
        return
    count = max(ratios, key=lambda count: ratios[count])
    before, since = alike[:count], alike[count:]
    least = _LEAST_OUTLIER_RATIO if len(since) == 1 else _LEAST_RISE
    # What they waited for a processor is other programs' doing.
    if ratios[count] * (1 - _waited([one.stage for one in since])) < least:
        return
    was, usual = median(one.usual for one in before), median(one.usual for one in since)
    lost = sum((one.usual - was) * len(one.stage.steps) for one in since)
    if was <= 0 or not _LEAST_EXCESS_SECONDS <= lost < math.inf:  # never of a clock that went wrong
        return
    when, so_far = ("the first", "in it") if count == 1 else (f"generation {before[-1].number}", "before")
    changed = _changed(before[-1], since[0], run)
    yield Seen(
        message=f"Steps became slower after {when} of {len(alike)} generations of the same {'size' if changed else 'work'}"
        f"{_pause(before[-1], since[0])}: {units.seconds(was)} {so_far}, {units.seconds(usual)} since "
        f"({usual / was:.2f} × as long){_may_explain(changed, _pages_read(before, since))}.",
        evidence={
            "changed": changed,
            "generations": len(alike),
            "slow_generations": len(since),
            "first_seconds": was,
            "last_seconds": since[-1].usual,
            "gain_seconds": lost,
        },
        advice="See whether memory of the device is full since then (what the generations before left in it), and whether "
        "offloading, an adapter or a hook came in between.",
        stage=before[0].stage.name,
    )


def _rise(before: Sequence[_Generation], since: Sequence[_Generation]) -> float:
    """How many times as long the steps of each later generation are, at least, as those of each before; 0: that is chance.

    Among several one that is slow alone stands out (`one_stands_out`). Of one generation every step counts, but its first.
    """
    if len(since) == 1 < len(before):
        return 0.0
    if len(since) > 2 and max(one.usual for one in since) >= _LEAST_RISE * min(one.usual for one in since):
        return 0.0  # they still become slower
    most = before[0].longest if len(before) == 1 else max(one.usual for one in before)
    return min(one.usual for one in since) / most if most > 0 else 0.0


def _pause(last: _Generation, following: _Generation) -> str:
    """The pause between two generations in words, if it was long; empty: there was none."""
    before, after = last.case.stages[0], following.case.stages[0]
    seconds = after.started_seconds - before.started_seconds - before.seconds
    return f" and a pause of {units.seconds(seconds)}" if _LEAST_PAUSE_SECONDS <= seconds < math.inf else ""


@rule("series.first_is_slow", "info", about="a series of generations", looks_at="run")
def first_is_slow(run: Run) -> Iterator[Seen]:
    """All steps of the first generation took longer than those since: weights that were read or moved, or full memory."""
    for alike in _by_work(run):
        first, later = alike[0], alike[1:]
        usual = median(one.usual for one in later) if later else 0.0
        lost = (first.usual - usual) * len(first.stage.steps)
        if usual <= 0 or not _LEAST_EXCESS_SECONDS <= lost < math.inf or _waited([first.stage]) > MUCH_WAITED:
            continue
        if first.usual < _LEAST_OUTLIER_RATIO * max(one.longest for one in later):
            continue
        changed = _changed(first, later[0], run)
        yield Seen(
            message=f"All steps of the first of {len(alike)} generations of the same {'size' if changed else 'work'} were slow: "
            f"{units.seconds(first.usual)} each, {units.seconds(usual)} since ({first.usual / usual:.2f} × as long)"
            f"{_may_explain(changed, _pages_read(alike[:1], later))}.",
            evidence={
                "changed": changed,
                "generations": len(alike),
                "first_seconds": first.usual,
                "median_seconds": usual,
                "gain_seconds": lost,
            },
            advice="It was set up otherwise: compare it with no other."
            if changed
            else "Leave it out of timings. To make it faster, see what memory was full of before it, and whether its weights "
            "were read from a disk or moved meanwhile.",
            stage=first.stage.name,
        )


class _Part(NamedTuple):
    """What one generation took for a part of it beside its steps."""

    case: Case
    number: int
    seconds: float


_PARTS: Final[dict[str, Role]] = {
    "text_encoding": "text_encoder",
    "latent_encoding": "vae",
    "latent_decoding": "vae",
}
"""Stages beside the steps, with what works in them."""


def _parts(run: Run, name: str) -> Iterator[list[_Part]]:
    """A stage's times, by the work of the generations that have it and went well."""
    by_work: dict[tuple[object, ...], list[_Part]] = {}
    for number, case in enumerate(_outermost(run), start=1):
        seconds = sum(map(stage_seconds, stages := case.named(name)))
        if stages and is_duration(seconds) and all(stage.success for stage in case.stages):
            by_work.setdefault(_work_of(case), []).append(_Part(case, number, seconds))
    yield from by_work.values()


@rule("series.stage_is_slow_at_first", "info", "warning", about="a series of generations", looks_at="run")
def stage_is_slow_at_first(run: Run) -> Iterator[Seen]:
    """Decoding or encoding takes much longer the first time, or the first time at each size: it is compiled or tuned."""
    for name, role in _PARTS.items():
        groups = list(_parts(run, name))
        usual = [median(part.seconds for part in group[1:]) for group in groups if len(group) > 1]
        if not usual:
            continue
        firsts = [
            (group[0], median(part.seconds for part in group[1:]) if len(group) > 1 else max(usual))
            for group in groups
        ]
        slow = [(first, later) for first, later in firsts if is_slow_first_step(first.seconds, later)]
        if not slow:
            continue
        new = _new_values([first.case for first, _ in slow])
        at_sizes = len(slow) > 1 and bool(new)
        compiled = any(compiles(first.case, role) for first, _ in slow)
        waited = _waited([stage for first, _ in slow for stage in first.case.named(name)])
        if waited > MUCH_WAITED and not compiled:  # compilers take processors themselves
            continue
        least, most = (choose(first.seconds for first, _ in slow) for choose in (min, max))
        took = units.seconds(most) if least == most else f"{units.seconds(least)} to {units.seconds(most)}"
        excess = [first.seconds - later for first, later in slow]
        where = (
            f"the first time at each new {' and '.join(new)} ({'; '.join(map(_some, new.values()))})"
            if at_sizes
            else f"in generation {slow[0][0].number} of {sum(map(len, groups))}"
        )
        yield Seen(
            severity="warning" if at_sizes else "info",
            message=f"{name} took {took} {where}, and {units.seconds(max(later for _, later in slow))} "
            f"{'when that came again' if at_sizes else 'since'}"
            + (": torch.compile compiles in it." if compiled else "."),
            evidence={
                "generations": len(slow),
                "first_seconds_least": least,
                "first_seconds_most": most,
                "median_seconds": max(usual),
                "gain_seconds": sum(excess) - (excess[0] if at_sizes else 0.0),
                "compiled": compiled,
                "new": "; ".join(f"{title} {_some(values)}" for title, values in new.items()) or None,
            },
            advice=("Compile it for all sizes (dynamic=True), or keep to" if compiled else "Something is tuned or compiled for each size (torch.backends.cudnn.benchmark, MIOpen's search): switch it off, or keep to")
            + " a few sizes and warm up each of them."
            if at_sizes
            else "Leave it out of timings, or warm up once: what is compiled, tuned or loaded then is kept.",
            stage=name,
        )  # fmt: skip


@rule("series.part_slows_down", "warning", about="a series of generations", looks_at="run")
def part_slows_down(run: Run) -> Iterator[Seen]:
    """What is beside the steps, such as a callback or the decoding, takes longer from generation to generation."""
    for name in _PARTS:
        for group in _parts(run, name):
            yield from _growing(name, [part.case for part in group], [part.seconds for part in group], name)
    for alike in _by_work(run):
        between = [seconds_between_steps(one.stage) for one in alike]
        if len({len(one.stage.steps) for one in alike}) > 1:
            continue
        callback = alike[-1].case.call.callback
        what = (
            f"Your callback {callback}"
            if callback
            else f"What lies between the steps of {alike[0].stage.name}"
        )
        yield from _growing(what, [one.case for one in alike], between, alike[0].stage.name)


def _growing(what: str, of_cases: Sequence[Case], seconds: Sequence[float], stage: str) -> Iterator[Seen]:
    """Times of one part that grow beyond chance, and by much."""
    lost = sum(max(value - seconds[0], 0.0) for value in seconds)
    if len(seconds) < _FEWEST_FOR_DRIFT or seconds[0] <= 0 or not _LEAST_EXCESS_SECONDS <= lost < math.inf:
        return
    # What each waited for a processor is other programs' doing.
    own = [value * (1 - _waited(case.stages[:1])) for value, case in zip(seconds, of_cases, strict=True)]
    if not (_drifts(seconds) and _drifts(own)):
        return
    yield Seen(
        message=f"{in_one_line(what)} took longer from generation to generation: {units.seconds(seconds[0])} in the first of "
        f"{len(seconds)}, {units.seconds(seconds[-1])} in the last.",
        evidence={
            "generations": len(seconds),
            "first_seconds": seconds[0],
            "last_seconds": seconds[-1],
            "gain_seconds": lost,
        },
        advice="Look for what it adds to each time: a list that grows, files in one folder, hooks that are put on again.",
        stage=stage,
    )


@rule("series.loras_slow_down", "warning", about="a series of generations", looks_at="run")
def loras_slow_down(run: Run) -> Iterator[Seen]:
    """Loading or switching LoRAs takes longer each time: those that were loaded before are still there."""
    by_method: dict[str, list[Stage]] = {}
    for stage in run.walk():
        if stage.name == _LORA and is_duration(stage.seconds):
            by_method.setdefault(str(stage.facts.get("method", _LORA)), []).append(stage)
    for method, alike in by_method.items():
        seconds = [stage.seconds for stage in alike]
        if len(alike) < _FEWEST_FOR_DRIFT or _waited(alike[len(alike) // 2 :]) > MUCH_WAITED:
            continue
        slope, lost = theil_sen(seconds), sum(max(value - seconds[0], 0.0) for value in seconds)
        grown = slope.value * (len(alike) - 1)
        if slope.lower <= 0 or grown < _LEAST_GROWTH_OF_LORAS * seconds[0] or lost < _LEAST_EXCESS_SECONDS:
            continue
        yield Seen(
            message=f"{in_one_line(method)} took longer each time: {units.seconds(seconds[0])} in the first of "
            f"{len(alike)} calls, {units.seconds(seconds[-1])} in the last.",
            evidence={
                "calls": len(alike),
                "first_seconds": seconds[0],
                "last_seconds": seconds[-1],
                "gain_seconds": lost,
            },
            advice="Each LoRA that stays on the pipeline makes the next one slower. Take off what you do not use "
            "(pipe.delete_adapters, pipe.unload_lora_weights).",
            stage=_LORA,
        )


def _waited(stages: Sequence[Stage]) -> float:
    """The share of their time that was waited for a processor, the median; 0 where it is not known."""
    shares = []
    for stage in stages:
        use = processor_use_of(stage.facts)
        waited = None if use is None else waited_seconds(use)
        shares.append(0.0 if waited is None or stage.seconds <= 0 else waited / stage.seconds)
    return median(shares)


@rule("series.one_stands_out", "info", about="a series of generations", looks_at="run")
def one_stands_out(run: Run) -> Iterator[Seen]:
    """One generation among many took more than twice as long as the others of its size."""
    for alike in _by_work(run):
        later = alike[1:]  # the first is often slow
        seconds = [one.case.seconds for one in later]
        if len(seconds) < _FEWEST_FOR_OUTLIER:
            continue
        usual = median(seconds)
        slow = [one for one in later if one.case.seconds > _LEAST_OUTLIER_RATIO * usual]
        if len(slow) != 1 or slow[0].case.seconds - usual < _LEAST_EXCESS_SECONDS:
            continue
        [odd] = slow
        others = [one for one in later if one is not odd]
        where, excess = _largest_excess(odd, others)
        asked = " and ".join(causes_in_words(_changes(others[0], odd, run, but=()))[:_MOST_CAUSES])
        yield Seen(
            message=f"Generation {odd.number} took {units.seconds(odd.case.seconds)}, the others {units.seconds(usual)} in "
            f"the median: {units.seconds(excess)} more in {in_one_line(where)}{_may_explain(asked) or _why(odd)}.",
            evidence={
                "changed": asked or None,
                "generation": odd.number,
                "seconds": odd.case.seconds,
                "median_seconds": usual,
                "gain_seconds": odd.case.seconds - usual,
            },
            advice="It was asked for, or set up, otherwise than the others: nothing is wrong with the machine."
            if asked
            else "Look for what ran beside it: another program, a garbage collection, a page read from a disk.",
            stage=where,
        )


def _largest_excess(odd: _Generation, others: Sequence[_Generation]) -> tuple[str, float]:
    """The stage inside that took the most beyond its usual time."""
    outermost = odd.case.stages[0]
    names = [child.name for child in outermost.children] or [outermost.name]

    def seconds_in(one: _Generation, name: str) -> float:
        return sum(stage_seconds(stage) for stage in one.case.named(name))

    excesses = {
        name: seconds_in(odd, name) - median(seconds_in(one, name) for one in others) for name in names
    }
    name = max(excesses, key=lambda name: excesses[name])
    return name, excesses[name]


def _why(odd: _Generation) -> str:
    use = processor_use_of(odd.case.stages[0].facts)
    if use is None:
        return ""
    waited = waited_seconds(use) or 0.0
    if (use.stopped_seconds or 0.0) > waited / 2 > 0:
        return f"; the process was stopped for {units.seconds(use.stopped_seconds)}"
    if waited > MUCH_WAITED * odd.case.seconds:
        return f"; it waited {units.seconds(waited)} for a processor"
    return (
        f"; {use.major_faults:,} pages were read from a disk"
        if (use.major_faults or 0) >= _MANY_PAGES
        else ""
    )
