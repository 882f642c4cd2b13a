"""Where a run's time went, in rows that sum to the whole, and the one sentence to read first.

`time_breakdown` divides the wall time of a run among its stages, their steps, the time between steps, and the time
outside all stages. `headline` says what went wrong, or else which row is the longest, and where memory was highest.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Final, Literal

from sigmascope import units
from sigmascope.analysis.generations import cases
from sigmascope.analysis.lora_idle import acted_before, idle_lora, refused_lora
from sigmascope.analysis.memory import PeakOwner, peak_owners, tiling_advice, use_around
from sigmascope.analysis.run_figures import (
    GENERATION,
    is_timed_on_device,
    known,
    seconds_in_steps,
    step_seconds,
)
from sigmascope.plain_text import in_one_line
from sigmascope.records.failures import raised_in
from sigmascope.records.performance import (
    AFTER,
    BEFORE,
    BETWEEN,
    CHILDREN,
    IMPORT,
    OUTSIDE_STAGES,
    PROCESS,
    HostPlace,
    host_stacks,
)
from sigmascope.records.run import (
    IMPORTS,
    OWN_SECONDS,
    SCHEDULER_SECONDS,
    STAGES,
    Finding,
    FoldedStages,
    Run,
    Stage,
    is_duration,
    names_in,
    stage_path,
    stage_seconds,
)

Part = Literal["stage", "rest of stage", "steps", "scheduler", "between steps", "outside stages"]
OWN: Final = "the watch itself"
IMPORTING: Final = "imports"
_HEADLINE_WASTE_SHARE: Final = 0.25
"""Share of the run's time: a finding that could save this much is the headline."""
_LEAST_START_SHARE: Final = 0.1
"""Of the run: a start that took as long has a clause of its own."""
_LEAST_SPREAD: Final = 2.0
"""The longest step by the median, from which it is named."""
_LEAST_OF_CHILDREN: Final = 1.0
"""Seconds: importing PyTorch takes as many."""
_LEAST_SHARE_SHOWN: Final = 0.005
_LEAST_PLACE_SHARE: Final = 0.25
"""Share of the longest row's time: the headline names a place in the program's own code that takes this much."""
_MOST_PLACES_OF_ROW: Final = 3
_MOST_PACKAGES: Final = 3
_FINDING_WITH_ROW: Final = "time.callback_takes_long"
_TOLD_FIRST: Final = (
    "time.waited_for_processor",
    "series.at_once",
    "time.compiles_no_more",
    "series.first_steps_recur",
    "series.slows_down",
    "series.part_slows_down",
    "series.first_is_slow",
    "memory_leak",
    "series.one_stands_out",
)
"""Findings on the run as a whole, of which the first one leads the headline."""
_LONGEST_ERROR: Final = 800
"""Characters, where it is not shown whole."""
_SHARED: Final = (
    "; another generation ran at the same time, and a scheduler that both use counts the steps of both"
)
_FAULTS: Final = ("critical", "error")
_CAUSES: Final = {"values.not_finite": "lora_not_finite", "picture.not_finite": "lora_not_finite"}
"""What a finding follows from, where the run has both."""


@dataclass(frozen=True, slots=True)
class TimeShare:
    """One row of a breakdown.

    Attributes:
        name: The stage with those around it, "generation/denoising"; of time outside stages where it lies.
        part: Of the stage: all of it, its steps, the scheduler's part of them, what is between them, or what no other
            row has.
        seconds: By the accelerator's clock where it timed the stage, else by the host's.
        count: How many stages, steps, or gaps between steps.
        callback: What the pipeline calls between the steps; None: nothing, or not known.
        in_models: Of a stage, the seconds of the models in it that have no row; None: it has none.
        is_unique: Whether no stage inside another one has the same name.
        places: Where in the program's own code it passed, the longest first, if its stacks were sampled and nothing else
            explains the row. Together they are no longer than the row.
        packages: Of imports: those that took longest, with their seconds.
        is_without_imports: Of time before the first stage: whether imports have a row of their own.
        each_seconds: Of a row of steps or of whole stages: each that was timed, but for folded ones.
    """

    name: str
    part: Part
    seconds: float
    count: int = 1
    callback: str | None = None
    in_models: float | None = None
    is_unique: bool = True
    places: tuple[HostPlace, ...] = ()
    packages: tuple[tuple[str, float], ...] = ()
    is_without_imports: bool = False
    each_seconds: tuple[float, ...] = ()

    @property
    def stage(self) -> str:
        """The stage's own name, on one line."""
        return in_one_line(names_in(self.name)[-1])

    @property
    def label(self) -> str:
        """The row's name for a table, such as "denoising, steps"."""
        *around, _ = names_in(self.name)
        stage = self.stage if self.is_unique or not around else f"{in_one_line(around[-1])}: {self.stage}"
        if self.part in ("stage", "outside stages"):
            return stage
        return f"{stage}, the rest" if self.part == "rest of stage" else f"{stage}, {self.part}"


def time_breakdown(run: Run) -> tuple[TimeShare, ...]:
    """The rows of a run in the order in which they first appear, with folded generations.

    They sum to the run's seconds, or to more if stages ran side by side. If a stage inside a usual one (`STAGES`) is not
    usual itself, such as that of a text encoder, its time is in the row of the stage around it.
    """
    if not is_duration(run.seconds):
        return ()
    callbacks = _callbacks(run)
    shares = [share for stage in run.stages for share in _shares_of_stage(stage, "", callbacks)]
    if run.folded is not None:
        shares += _shares_of_folded(run.folded.stages)
    own, imports, before, *later = _outside_stages(run)
    rows = [row for row in _summed([own, imports, before, *shares, *later]) if row.seconds > 0]
    names = Counter((row.stage, row.part) for row in rows)
    rows = [replace(row, is_unique=names[row.stage, row.part] == 1) for row in rows]
    stacks = host_stacks(run)
    if stacks is None:
        return tuple(rows)
    places = stacks.places
    if any(row.name == IMPORTING for row in rows):
        places = tuple(place for place in places if (place.stage, place.function) != (BEFORE, IMPORT))
    return tuple(_with_places(row, places) for row in rows)


def _with_places(row: TimeShare, places: Iterable[HostPlace]) -> TimeShare:
    """The row with the places seen in it; a usual stage without steps or inner stages needs none."""
    if row.part in ("steps", "scheduler") or (row.part == "stage" and row.stage in STAGES):
        return row
    part = "stage" if row.part == "rest of stage" else row.part
    seen = [place for place in places if (place.stage, place.part) == (row.name, part)]
    seen = [place for place in seen if is_duration(place.seconds) and place.seconds > 0]
    total = sum(place.seconds for place in seen)
    most = min(1.0, row.seconds / total) if total else 1.0
    shown = [replace(place, seconds=place.seconds * most) for place in seen]
    return replace(row, places=tuple(sorted(shown, key=lambda place: -place.seconds)))


def large_places(row: TimeShare, run: Run) -> list[HostPlace]:
    """The places of a row to show: at most three, none below half a per cent of the time."""
    return [
        place
        for place in row.places[:_MOST_PLACES_OF_ROW]
        if place.seconds >= _LEAST_SHARE_SHOWN * run.seconds
    ]


def large_rows(run: Run) -> tuple[list[TimeShare], float]:
    """The rows with at least half a per cent of the time, and the seconds of all others together."""
    rows = time_breakdown(run)
    large = [row for row in rows if row.seconds >= _LEAST_SHARE_SHOWN * run.seconds]
    return large, sum((row.seconds for row in rows), 0.0) - sum(row.seconds for row in large)


def _callbacks(run: Run) -> dict[int, str]:
    """The callback between the steps of a stage, by the stage's `id`."""
    try:
        return {
            id(stage): case.call.callback
            for case in cases(run)
            for stage in case.stages
            if case.call.callback
        }
    except ValueError:  # facts that somebody changed by hand
        return {}


def _shares_of_stage(stage: Stage, around: str, callbacks: Mapping[int, str]) -> Iterator[TimeShare]:
    own = stage_path(stage.name)
    name = f"{around}/{own}" if around else own
    is_usual = stage.name in STAGES
    rows = [child for child in stage.children if child.name in STAGES or not is_usual]
    others = [child for child in stage.children if is_usual and child.name not in STAGES]
    steps, between = seconds_in_steps(stage), seconds_between_steps(stage)
    inside = sum(_seconds(child) for child in rows)
    between = max(between - inside, 0.0)
    is_divided = bool(rows or len(stage.steps))
    rest = max(_seconds(stage) - inside - steps - between, 0.0)
    models = [_seconds(child) for child in others if "component" in child.facts]
    in_models = sum(models) if models else None
    if is_divided:
        yield TimeShare(name, "rest of stage", rest, in_models=in_models)
    else:
        yield TimeShare(name, "stage", rest, in_models=in_models, each_seconds=(rest,))
    if len(stage.steps):
        scheduler = min(_scheduler_seconds(stage), steps)
        timed = tuple(known(step_seconds(stage)))
        yield TimeShare(name, "steps", steps - scheduler, len(stage.steps), each_seconds=timed)
        yield TimeShare(name, "scheduler", scheduler, len(stage.steps))
        yield TimeShare(name, "between steps", between, len(stage.steps), callbacks.get(id(stage)))
    for child in rows:
        yield from _shares_of_stage(child, name, callbacks)


def _seconds(stage: Stage) -> float:
    seconds = stage_seconds(stage)
    return seconds if is_duration(seconds) else 0.0


def _scheduler_seconds(stage: Stage) -> float:
    """The scheduler's time on the host; 0 if the steps were timed on the device."""
    seconds = stage.facts.get(SCHEDULER_SECONDS)
    if not isinstance(seconds, float) or not is_duration(seconds) or is_timed_on_device(stage):
        return 0.0
    return seconds


def seconds_between_steps(stage: Stage) -> float:
    """The host's time after each of a stage's steps, but no more than the device was idle."""
    steps = stage.steps
    if not len(steps):
        return 0.0
    whole = stage.seconds - steps.started[0]
    between = whole - sum(known(step_seconds(stage, on_device=False)))
    if is_timed_on_device(stage):
        between = min(between, whole - seconds_in_steps(stage))
    return between if is_duration(between) else 0.0


def _shares_of_folded(stages: Mapping[str, FoldedStages]) -> Iterator[TimeShare]:
    for path, sums in stages.items():
        inside = [
            inner.seconds
            for name, inner in stages.items()
            if name.startswith(f"{path}/") and "/" not in name[len(path) + 1 :]
        ]
        is_divided = bool(inside or sums.steps)
        rest = max(sums.seconds - sum(inside) - sums.step_seconds, 0.0)
        yield TimeShare(path, "rest of stage" if is_divided else "stage", rest, sums.count)
        if sums.steps:
            yield TimeShare(path, "steps", sums.step_seconds, sums.steps)


def _outside_stages(run: Run) -> list[TimeShare]:
    """The host's time before, between and after the stages, and how much of it was the watch's own work."""
    spans = [(stage.started_seconds, stage.started_seconds + stage.seconds) for stage in run.stages]
    folded_seconds = 0.0
    if run.folded is not None:
        spans.append((run.folded.first_at_seconds, run.folded.last_at_seconds))
        outermost = [sums.seconds for path, sums in run.folded.stages.items() if "/" not in path]
        folded_seconds = run.folded.last_at_seconds - run.folded.first_at_seconds - sum(outermost)
    whole = sum(end - start for start, end in spans if end > start)
    spans = sorted(
        (min(max(start, 0.0), run.seconds), min(max(end, 0.0), run.seconds))
        for start, end in spans
        if end > start
    )
    elsewhere = whole - sum(end - start for start, end in spans)  # where the clock jumped
    end = spans[0][0] if spans else run.seconds
    before, between = end, max(folded_seconds, 0.0)
    for started, ended in spans:
        between += max(started - end, 0.0)
        end = max(end, ended)
    between = max(between - elsewhere, 0.0)
    after = max(run.seconds - end, 0.0) if spans else 0.0
    own_before, own_later = _own_seconds(run)
    own_before, own_later = min(own_before, before), min(own_later, between + after)
    own_after = max(own_later - between, 0.0)
    packages = _imports(run)
    importing = min(sum(packages.values(), 0.0), before - own_before)
    parts = {
        OWN: own_before + own_later,
        IMPORTING: importing,
        BEFORE: before - own_before - importing,
        BETWEEN: max(between - own_later, 0.0),
        AFTER: after - own_after,
    }
    longest = sorted(packages.items(), key=lambda item: -item[1])[:_MOST_PACKAGES]
    return [
        TimeShare(
            name,
            OUTSIDE_STAGES,
            seconds,
            packages=tuple(longest) if name == IMPORTING else (),
            is_without_imports=name == BEFORE and importing > 0,
        )
        for name, seconds in parts.items()
    ]


def _imports(run: Run) -> dict[str, float]:
    """What each package's import took before the first stage; empty where it is not on record."""
    noted = run.facts.get(IMPORTS)
    if not isinstance(noted, Mapping):
        return {}
    return {
        str(name): value for name, value in noted.items() if isinstance(value, float) and is_duration(value)
    }


def _own_seconds(run: Run) -> tuple[float, float]:
    """The watch's own time outside of stages, before the first stage and later; 0 if it was not recorded."""
    noted = run.facts.get(OWN_SECONDS)
    if not isinstance(noted, list | tuple) or len(noted) != len((BEFORE, AFTER)):
        return 0.0, 0.0
    before, later = (value if isinstance(value, float) and is_duration(value) else 0.0 for value in noted)
    return before, later


def _summed(shares: Iterable[TimeShare]) -> Iterator[TimeShare]:
    """One row for each stage and part."""
    rows: dict[tuple[str, Part], TimeShare] = {}
    for share in shares:
        row = rows.get((share.name, share.part))
        rows[share.name, share.part] = (
            share
            if row is None
            else replace(
                row,
                seconds=row.seconds + share.seconds,
                count=row.count + share.count,
                callback=row.callback or share.callback,
                in_models=_sum_of_known(row.in_models, share.in_models),
                each_seconds=row.each_seconds + share.each_seconds,
            )
        )
    yield from rows.values()


def _sum_of_known(first: float | None, second: float | None) -> float | None:
    return (first or 0.0) + (second or 0.0) if (first, second) != (None, None) else None


def headline(run: Run, *, with_whole_error: bool = True) -> str:
    """A sentence on what went wrong, or else on LoRAs that do nothing, or on where the time went, and one on where memory was highest.

    Args:
        run: The run.
        with_whole_error: Otherwise of an error of many lines there is the first one, and how many more it has.
    """
    first = _failure(run, with_whole_error) or _fault(run)
    if first is None and (idle := idle_lora(run)) is not None:
        first = f"{idle}{acted_before(run)}"
    if first is None:
        where = _waste(run) or _start_and_each(run) or _longest(run)
        first = " ".join(filter(None, (*_told_first(run), where)))
    return " ".join(filter(None, (first, _peak(run)))) or f"It took {units.seconds(run.seconds)}."


def _told_first(run: Run) -> list[str]:
    """The finding on the run as a whole that leads; beside a wait for a processor another one too, and memory that grows always.

    No wait makes first steps alone recur, and no slowness memory grow. Where first steps compile, they come before the wait: compilers take
    processors themselves.
    """
    found: dict[str, Finding] = {}
    for finding in run_findings(run):
        found.setdefault(finding.id, finding)
    told = [found[name] for name in _TOLD_FIRST if name in found]
    told, others = (told[:2], told[2:]) if told and told[0].id == _TOLD_FIRST[0] else (told[:1], told[1:])
    told += [finding for finding in others if finding.id == "memory_leak"]
    told.sort(key=lambda finding: finding.evidence.get("compiled") is not True)
    return [finding.message for finding in told]


def _failure(run: Run, with_whole_error: bool) -> str | None:
    failed = failed_stage(run)
    if failed is None:
        return None
    error = failed.error or ""
    why = f": {units.printable(error if with_whole_error else _beginning(error))}" if error else ""
    cause = refused_lora(failed)
    if cause is not None:
        why = f": {cause.rstrip('.')}{why and f'. It raised {why[2:]}'}"
    how = "was interrupted" if error.startswith("KeyboardInterrupt") else "failed"
    beside = _SHARED if error.startswith("IndexError") and _ran_beside_others(run, failed) else ""
    return f"{_which_failed(run)}{in_one_line(failed.name)} {how} after {units.seconds(failed.seconds)}{why.rstrip('.')}{beside}."


def _ran_beside_others(run: Run, failed: Stage) -> bool:
    """Whether another generation began before the one that a stage failed in was over, or the other way round."""
    generations = _generations(run)
    around = next((stage for stage in generations if any(part is failed for part in stage.walk())), None)
    return around is not None and any(
        other.started_seconds < around.started_seconds + around.seconds
        and around.started_seconds < other.started_seconds + other.seconds
        for other in generations
        if other is not around
    )


def _which_failed(run: Run) -> str:
    """How many generations of a series failed, and which was the first; nothing where all did, or there is one."""
    generations = _generations(run)
    failed = [number for number, stage in enumerate(generations, 1) if not stage.success]
    first = next((stage for stage in run.stages if not stage.success), None)
    if (
        run.folded is not None
        or not failed
        or first is not generations[failed[0] - 1]
        or len(generations) == 1
    ):
        return ""
    if len(failed) == 1:
        return f"Generation {failed[0]} of {len(generations)}: "
    return f"{len(failed)} of {len(generations)} generations failed, the first of them number {failed[0]}: "


def _beginning(error: str) -> str:
    """The first line of an error, with the next one if it announces that, and how many more there are."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    most = 2 if lines[0].endswith(":") else 1
    shown, left = " ".join(lines[:most]), len(lines) - most
    shown = shown if len(shown) <= _LONGEST_ERROR else f"{shown[: _LONGEST_ERROR - 1]}…"
    return f"{shown} … and {units.counted(left, 'more line')}" if left > 0 else shown


def failed_stage(run: Run) -> Stage | None:
    """Which stage failed: the innermost one in the first outermost stage that failed."""
    failed = next((stage for stage in run.stages if not stage.success), None)
    while failed is not None:
        inner = next((child for child in failed.children if not child.success), None)
        if inner is None:
            break
        failed = inner
    return failed


def failures(run: Run) -> list[tuple[str, str]]:
    """Stages that failed, with their errors; of those that one error passed through, the innermost alone."""
    return [
        (in_one_line(stage.name), stage.error)
        for stage in run.walk()
        if stage.error is not None and all(inner.error != stage.error for inner in stage.children)
    ]


def failure_places(run: Run) -> list[str]:
    """Where the headline's failure was raised: each place on the way there, with what it was raised from before it."""
    failed = failed_stage(run)
    details = None if failed is None else failed.exception_details
    places: list[str] = []
    for raised in [] if details is None else raised_in(details):
        places += [f"in the group, {raised}", *raised.frames] if raised.depth else raised.frames
        if raised.link is not None:
            places.append(f"{raised}, and then")
    return places


def _fault(run: Run) -> str | None:
    """The message of the gravest finding, if it is an error."""
    faults = [finding for finding in run_findings(run) if finding.severity in _FAULTS]
    return faults[0].message if faults else None


def run_findings(run: Run) -> list[Finding]:
    """The findings of the run and its stages, each once; the gravest first, among equals those with most to gain."""
    order = ("critical", "error", "warning", "info")
    unique: dict[tuple[str, str], Finding] = {}
    for finding in (*run.findings, *(finding for stage in run.walk() for finding in stage.findings)):
        unique.setdefault((finding.id, finding.message), finding)
    ids = {id for id, _ in unique}
    return sorted(
        unique.values(),
        key=lambda finding: (
            order.index(finding.severity),
            -gain_seconds(finding),
            _CAUSES.get(finding.id) in ids,
        ),
    )


def gain_seconds(finding: Finding) -> float:
    """The seconds that it says could be saved; 0 if it gives none."""
    gain = finding.evidence.get("gain_seconds")
    return gain if isinstance(gain, int | float) and is_duration(gain) else 0.0


def _waste(run: Run) -> str | None:
    """The finding that could save most, if that is much of the time and no row shows it."""
    costly = max(
        (finding for finding in run_findings(run) if finding.id not in (_FINDING_WITH_ROW, *_TOLD_FIRST)),
        key=gain_seconds,
        default=None,
    )
    is_timed = is_duration(run.seconds) and run.seconds > 0
    if costly is None or not is_timed or gain_seconds(costly) < _HEADLINE_WASTE_SHARE * run.seconds:
        return None
    share = units.percent(gain_seconds(costly), run.seconds)
    return f"{share} of {units.seconds(run.seconds)} could be saved. {costly.message}"


def _start_and_each(run: Run) -> str | None:
    """What a script's start took, and then each generation: two clauses, since nobody waits for the start again.

    None where no generation was recorded, or the start before the first is short.
    """
    generations = _generations(run)
    whole = sum(stage.seconds for stage in generations)
    start = generations[0].started_seconds if generations else 0.0
    if run.folded is not None or whole <= 0 or start < _LEAST_START_SHARE * run.seconds:
        return None
    rows = time_breakdown(run)
    inside = [row for row in rows if names_in(row.name)[0] == GENERATION and row.part != OUTSIDE_STAGES]
    before = [row for row in rows if row.name in (IMPORTING, BEFORE) or row.stage == "model_loading"]
    if not inside or not before:
        return None
    first, longest = (max(part, key=lambda row: row.seconds) for part in (before, inside))
    what = "imports" if first.name == IMPORTING else "loading" if first.name == BEFORE else first.stage
    seconds = [stage.seconds for stage in generations]
    each = f"each of {len(seconds)} generations" if len(seconds) > 1 else "the generation"
    spread = f" ({units.seconds(min(seconds))} to {units.seconds(max(seconds))})" if len(seconds) > 1 else ""
    return (
        f"Start {units.seconds(start)} (mostly {what}); {each} {units.seconds(median(seconds))}{spread}, "
        f"{units.percent(longest.seconds, whole)} of it {_where(longest)}."
    )


def _longest(run: Run) -> str | None:
    rows = time_breakdown(run)
    if not run.stages:
        children = run.facts.get(CHILDREN)
        if isinstance(children, float) and children >= _LEAST_OF_CHILDREN:
            return (
                f"Nothing was recorded in this process: no stage was opened. Its child processes used {units.seconds(children)} of "
                "processor time; each needs a watch of its own."
            )
        return "Nothing was recorded: no stage was opened."
    if not is_duration(run.seconds):
        return "How long it took is not known: the record holds no valid time."
    if not rows:
        return None
    longest = max(rows, key=lambda row: row.seconds)
    place, seconds = _longest_place(rows)
    if place is not None and longest.seconds < seconds <= run.seconds:
        return (
            f"{units.percent(seconds, run.seconds)} of {units.seconds(run.seconds)} went into {place.label}, "
            "outside of what the rows explain."
        )
    if longest.seconds > run.seconds:  # the sum over several threads or tasks
        return f"{units.seconds(longest.seconds)} in parallel, within {units.seconds(run.seconds)}, {_where(longest)}."
    return f"{units.percent(longest.seconds, run.seconds)} of {units.seconds(run.seconds)} {_where(longest)}."


def _longest_place(rows: Iterable[TimeShare]) -> tuple[HostPlace | None, float]:
    """The function with the most time in all rows together."""
    sums: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], HostPlace] = {}
    for place in sorted((place for row in rows for place in row.places), key=lambda place: -place.seconds):
        sums[place.function, place.file] += place.seconds  # type: ignore[assignment]
        places.setdefault((place.function, place.file), place)
    if not sums:
        return None, 0.0
    (key, seconds) = sums.most_common(1)[0]
    return places[key], seconds


def _where(row: TimeShare) -> str:
    first = row.places[0] if row.places else None
    if first is None or first.seconds < _LEAST_PLACE_SHARE * row.seconds:
        return _what_passed(row)
    return f"{_what_passed(row)}; {units.seconds(first.seconds)} of it in {first.label}"


def _what_passed(row: TimeShare) -> str:
    stage = row.stage
    each = units.seconds(row.seconds / max(row.count, 1))
    if row.part == OUTSIDE_STAGES:
        if row.name == OWN:
            return "went into the watch itself, outside of stages"
        if row.name == IMPORTING:
            return f"went into imports: {in_words(row.packages)}"
        loading = "the script's own loading" if row.is_without_imports else "imports and loading"
        what = {BEFORE: loading, AFTER: "saving, and whatever else the script does"}.get(row.name)
        return f"passed {row.name}" + (f": {what}" if what else ", in the script's own code")
    if row.part == "steps":
        return f"went into {stage}: {units.counted(row.count, 'step')} of {_each_in_words(row, ' in the median')}"
    if row.part == "scheduler":
        return f"went into the scheduler, {each} in {_each_step(row)} of {stage}"
    if row.part == "between steps" and row.callback is not None:
        return f"went into your callback {row.callback}, {each} after {_each_step(row)}"
    if row.part == "between steps":
        return f"passed between the steps of {stage}, {each} after {_each_step(row)}"
    if row.part == "rest of stage":
        return f"passed in {stage}, but in none of its stages or steps"
    times = f", {row.count:,} times {_each_in_words(row, ' in the median')}" if row.count > 1 else ""
    return f"went into {stage}{times}{_outside_models(row)}"


def times_in_words(row: TimeShare) -> str:
    """How often something was done and what it took each time, such as "16 × 19.0 ms, the longest 17.60 s"; of two far apart, both."""
    if row.count == len(row.each_seconds) == 2 and max(row.each_seconds) > _LEAST_SPREAD * min(
        row.each_seconds
    ):
        return " and ".join(map(units.seconds, row.each_seconds))
    return f"{row.count:,} × {_each_in_words(row)}" if row.count > 1 else ""


def _each_in_words(row: TimeShare, how: str = "") -> str:
    """What a step or stage took: the median, and the longest where it is far from that; never a mean that none has."""
    if not row.each_seconds:  # folded, or gaps between steps
        return units.seconds(row.seconds / max(row.count, 1))
    usual, longest = median_low(row.each_seconds), max(row.each_seconds)
    if longest <= _LEAST_SPREAD * usual:
        return units.seconds(median(row.each_seconds))
    return f"{units.seconds(usual)}{how}, the longest {units.seconds(longest)}"


def _each_step(row: TimeShare) -> str:
    return f"each of {row.count:,} steps" if row.count > 1 else "one step"


def in_words(packages: Iterable[tuple[str, float]]) -> str:
    """Such as "torch 3.10 s, diffusers 2.00 s"."""
    return ", ".join(f"{units.printable(name)} {units.seconds(taken)}" for name, taken in packages)


def _outside_models(row: TimeShare) -> str:
    """How much of a stage was not its models' work, if that is most of it."""
    if row.in_models is None or row.in_models > row.seconds / 2:
        return ""
    what = ", such as its tokenizer" if row.name.endswith("text_encoding") else ""
    return f": {units.seconds(row.seconds - row.in_models)} of it outside its models{what}"


def _peak(run: Run) -> str | None:
    """The peak of the device with the most memory in use, or of the process if no device was watched."""
    owners = peak_owners(run)
    highest = max(owners, key=lambda owner: (owner.where != PROCESS, owner.bytes), default=None)
    if highest is None:
        return None
    advice = tiling_advice(run, highest)
    return (
        f"Peak of {_memory(highest)}{f': {advice}' if advice else ''}{_stays_and_each(run, highest.where)}."
    )


def _stays_and_each(run: Run, where: str) -> str:
    """What is in use between the generations, and what each adds while it runs; nothing where that is not known."""
    generations = _generations(run)
    known_use = [use for stage in generations if (use := use_around(stage, where)) is not None]
    if not known_use:
        return ""
    stays, added = (median(values) for values in zip(*known_use, strict=True))
    count, total, size = len(known_use), len(generations), units.format_size(int(added))
    if count < total:
        each = f"{'one' if count == 1 else count} of {total} generations {'adds' if count == 1 else 'add'} {size}"
    else:
        each = f"{f'each of {total} generations' if total > 1 else 'the generation'} adds {size}"
    return f"; {units.format_size(int(stays))} of it stays in use, {each}"


def _generations(run: Run) -> list[Stage]:
    return [stage for stage in run.stages if stage.name == GENERATION]


def _memory(owner: PeakOwner) -> str:
    where = "memory" if owner.where == PROCESS else owner.where
    stage = in_one_line(names_in(owner.stage)[-1])
    by = stage if owner.component in (None, stage) else f"{stage} ({owner.component})"
    return f"{where}: {units.format_size(owner.bytes)}, in {by}"
