"""A `Run` as one HTML file to open, print or send on: no network, no other file, light and dark.

`run.html.jinja` lays out what is gathered here as plain values; the template engine escapes every one of them. Charts are
SVG with places in per cent, so that the page's own script only widens them to zoom in.

`look.css` is the look of all pages, and `parts.html.jinja` has what they are made of: the app (`sigmascope.ui`) uses both.
"""

import math
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final, get_args

import jinja2
from markupsafe import Markup

from sigmascope.__about__ import __version__
from sigmascope.analysis.breakdown import (
    TimeShare,
    failure_places,
    failures,
    headline,
    in_words,
    large_places,
    large_rows,
    run_findings,
    time_breakdown,
    times_in_words,
)
from sigmascope.analysis.lora_acting import ON_ARRIVING
from sigmascope.analysis.lora_idle import AS_BEFORE, idle_lora
from sigmascope.analysis.lora_state import standing
from sigmascope.analysis.memory import peak_owners
from sigmascope.analysis.recipe import LORAS, NONE, recipe_groups, recipe_of
from sigmascope.analysis.run_comparison import FigureComparison
from sigmascope.analysis.run_figures import GENERATION, known, percentile, step_seconds
from sigmascope.analysis.what_changed import WhatChanged, what_changed
from sigmascope.errors import ConfigError
from sigmascope.records.performance import PROCESS, SYSTEM, readable_curves
from sigmascope.records.prompts import PromptPrivacy, cleaner, privacy_of, without_texts
from sigmascope.records.recorded import Recorded, runs_of
from sigmascope.records.run import (
    THUMBNAIL,
    Run,
    Severity,
    Stage,
    folded_in_words,
    impossible_times,
    is_duration,
    path_in_words,
    stage_seconds,
)
from sigmascope.records.serialization import run_from_dict, run_to_dict, run_to_json
from sigmascope.reports.surfaces import Surface
from sigmascope.units import (
    UNKNOWN,
    counted,
    first_few,
    format_size,
    percent,
    percent_change,
    printable,
    rough_percent,
    seconds,
    seconds_change,
    statistic,
    took,
    with_noise,
)

ASSETS: Final = Path(__file__).parent
"""Where `look.css` and `report.js` are."""
_MOST_BARS: Final = 400
"""Stages, and steps of each stage, that have a bar of their own."""
_MOST_STEP_CHARTS: Final = 20
_MOST_SPARKS: Final = 60
_MOST_AT_A_GLANCE: Final = 4
_LONGEST_GLANCE: Final = 40
_FEWEST_FOR_A_CHART: Final = 4
_MOST_TENSORS: Final = 500
_MOST_LAYERS: Final = 20
_BINS: Final = 24
_MOST_THUMBNAILS: Final = 8
_MOST_THUMBNAIL_DIGITS: Final = 1 << 16
_JPEG: Final = re.compile(r"ffd8ff(?:[0-9a-f]{2})*")
_OUTLIER_FACTOR: Final = 2.0
"""Times the median: a step that stands out."""
_TICKS: Final = 6
_LAST_TICK_SHARE: Final = 0.93
"""Of the axis: beyond it there is no room for a label."""
_LEAST_FOLDED_SHARE: Final = 0.25
"""Of a run: a start that takes as much is folded on the timeline."""
_FOLDED_WIDTH: Final = 12.0
"""Per cent of the timeline."""
_COLOURS: Final = 6
_PLACES: Final = {PROCESS: "process (RAM)", SYSTEM: "whole machine (RAM)"}
_SCRIPT_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""What could end the script element that the record lies in."""


def write_html(
    runs: Recorded | Iterable[Recorded], path: str | os.PathLike[str], *, prompts: PromptPrivacy = "hash"
) -> None:
    """Write a report that any browser opens, whole or not at all.

    Args:
        runs: One run, or what has one, such as a `Watch`; or several, the first of which the others are compared with.
        path: The file, usually .html.
        prompts: What it says of prompts that the runs hold as text. With anything but "full" the words of exceptions are
            left out too, since they may quote one.

    Raises:
        ConfigError: No run, or no such privacy.
        WriteError: The file cannot be written. What was there before stays.
    """
    SURFACE.write(runs, path, prompts)


def to_html(
    runs: Recorded | Iterable[Recorded], *, prompts: PromptPrivacy = "hash", only_verdict: bool = False
) -> str:
    """Return the report that `write_html` writes; or, for a notebook's cell, the verdict and where the time went.

    Raises:
        ConfigError: No run, or no such privacy.
    """
    shown = private_runs(runs, prompts)
    if only_verdict:
        verdicts = [(run.name, headline(run), list(_time_rows(run))) for run in shown]
        return template("verdict.html.jinja").render(runs=verdicts)
    return template("report.html.jinja").render(report_view(shown), version=__version__)


def report_view(shown: Sequence[Run], *, with_json: bool = True) -> dict[str, Any]:
    """What `run.html.jinja` lays out.

    Args:
        shown: As `private_runs` gives them.
        with_json: Whether each run's record lies in the page.
    """
    views = [_run_view(run, number) for number, run in enumerate(shown, start=1)]
    for run, view in zip(shown, views, strict=True):
        view["json"] = _as_script_text(run_to_json(run)) if with_json else ""
    return {
        "title": shown[0].name if len(shown) == 1 else f"{len(shown)} runs",
        "runs": views,
        "comparison": _comparison(shown) if len(shown) > 1 else None,
    }


SURFACE: Final = Surface(
    "html",
    "Write a report that any browser opens; needs no network.",
    lambda runs, prompts: to_html(runs, prompts=prompts),
)


def template(name: str) -> jinja2.Template:
    """A template of this folder."""
    return environment().get_template(name)


@cache
def environment(*more: tuple[str, str]) -> jinja2.Environment:
    """Templates of `more`, and those of this folder. They make values harmless, and an undefined name is an error.

    Compiling a report's templates takes longer than filling them, so it is done once in a process.

    Args:
        more: Packages and their folders.
    """
    loaders = [jinja2.PackageLoader(package, folder) for package, folder in more]
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([*loaders, jinja2.PackageLoader("sigmascope.reports", "")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,  # `Markup` is our own
    )
    made.globals["asset"] = _asset
    return made


def _asset(name: str) -> Markup:
    """A file of this folder as it is, such as a style or a script: our own text, and none of a stranger's."""
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def jpeg_uri(jpeg: bytes) -> str:
    """A picture as the address of an `img`, so that a page needs no other file."""
    return f"data:image/jpeg;base64,{b64encode(jpeg).decode()}"


def private_runs(runs: Recorded | Iterable[Recorded], prompts: PromptPrivacy) -> list[Run]:
    """The runs without what the reader of a report is not to see.

    Raises:
        ConfigError: No run, or no such privacy.
    """
    privacy_of(prompts)
    all_runs = runs_of(runs)
    if not all_runs:
        raise ConfigError("There is no run to show.", hint="Give one at least.")
    return [_private(run, prompts) for run in all_runs]


def _private(run: Run, prompts: PromptPrivacy) -> Run:
    plain = run_to_dict(without_texts(run, prompts))
    shown = run_from_dict(_with_severities(cleaner(run, prompts)(plain), plain))
    return replace(shown, place=run.place)


def _with_severities(cleaned: Any, plain: Any) -> Any:
    """The cleaned values with the severities as they were: a prompt may be such a word, and nothing else may be there."""
    if isinstance(plain, Mapping):
        return {
            shown: value
            if key == "severity" and value in get_args(Severity)
            else _with_severities(cleaned[shown], value)
            for shown, (key, value) in zip(cleaned, plain.items(), strict=True)
        }
    if isinstance(plain, list):
        return [_with_severities(*pair) for pair in zip(cleaned, plain, strict=True)]
    return cleaned


def _run_view(run: Run, number: int) -> dict[str, Any]:
    return {
        "id": f"run{number}",
        "name": run.name or "unnamed",
        "started_at": _started(run),
        "took": took(run.seconds),
        "complete": run.complete,
        "headline": headline(run),
        "tone": _tone(run),
        "cards": _cards(run),
        "time": list(_time_rows(run)),
        "findings": run_findings(run),
        "errors": failures(run),
        "raised_at": failure_places(run),
        "damage": list(islice(impossible_times(run), 5)),
        "folded": None if run.folded is None else folded_in_words(run.folded),
        "timeline": _timeline(run),
        "series": _series(run),
        "steps": list(islice(_steps(run.stages), _MOST_STEP_CHARTS)),
        "peaks": list(_peaks(run)),
        "loras": [
            _lora_view(analysis, stage.facts.get("method"))
            for stage in run.walk()
            if isinstance(analysis := stage.facts.get("lora_application"), Mapping)
        ],
        "tensors": list(islice(_tensors(run), _MOST_TENSORS)),
        "recipe": list(_recipe(run)),
        "thumbnails": list(islice(_thumbnails(run), _MOST_THUMBNAILS)),
    }


def _started(run: Run) -> str:
    """When it began, to the second; as the record has it, if that is no moment."""
    try:
        began = datetime.fromisoformat(run.started_at)
    except ValueError:
        return run.started_at
    return f"{began:%Y-%m-%d %H:%M:%S} {began.tzname() or ''}".rstrip()


def _recipe(run: Run) -> Iterator[dict[str, Any]]:
    """The recipe by groups, each with a glance at its first entries."""
    for group, entries in recipe_groups(run).items():
        glance = [f"{name} {value}" for name, value in entries.items() if len(str(value)) <= _LONGEST_GLANCE]
        yield {
            "name": group,
            "entries": list(entries.items()),
            "glance": f"{counted(len(entries), 'entry', 'entries')}: " + first_few(glance, _MOST_AT_A_GLANCE)
            if glance
            else counted(len(entries), "entry", "entries"),
        }


def _tone(run: Run) -> str:
    """Of the verdict: bad, warn, or good."""
    severities = {finding.severity for finding in run_findings(run)}
    told = standing(run)
    is_idle = idle_lora(run) is not None and told is not None and told.is_well is False  # else it is open
    if failures(run) or severities & {"critical", "error"} or is_idle:
        return "bad"
    return "warn" if "warning" in severities or not run.complete else "good" if run.stages else ""


def _cards(run: Run) -> list[dict[str, Any]]:
    """Four figures at a glance: time, step, peak of memory, LoRA."""
    plain: dict[str, Any] = {"tone": "", "strip": [], "bars": [], "curve": None}
    return [plain | card for card in (_time_card(run), _step_card(run), _peak_card(run), _lora_card(run))]


def _time_card(run: Run) -> dict[str, Any]:
    rows = list(_time_rows(run))
    generations = [stage_seconds(stage) for stage in run.stages if stage.name == GENERATION and stage.success]
    timed = [value for value in generations if is_duration(value)]
    longest = max(rows, key=lambda row: row["width"], default=None)
    note = "nothing was recorded" if longest is None else f"{longest['share']} of it {longest['label']}"
    if len(timed) > 1:
        note = f"{counted(len(timed), 'generation')}, each {seconds(median(timed))}"
    return {"label": "Time", "figure": seconds(run.seconds), "note": note, "strip": rows}


def _step_card(run: Run) -> dict[str, Any]:
    timed = [value for stage in run.walk() if len(stage.steps) for value in known(step_seconds(stage))]
    if not timed:
        has_steps = any(len(stage.steps) for stage in run.walk())
        return {"label": "Step", "figure": UNKNOWN, "note": "no step was timed" if has_steps else "no steps"}
    most = max(timed) or 1.0
    bars = [
        {"height": 100 * value / most, "slow": False, "about": about}
        for value, about in _binned(timed, most=_MOST_SPARKS)
    ]
    note = f"median of {counted(len(timed), 'step')}, the slowest {seconds(max(timed))}"
    return {"label": "Step", "figure": seconds(median(timed)), "note": note, "bars": bars}


def _peak_card(run: Run) -> dict[str, Any]:
    owners = peak_owners(run)
    device = run.peak().busiest_device()
    owner = next((owner for owner in owners if owner.where == (device or PROCESS)), next(iter(owners), None))
    if owner is None:
        return {"label": "Peak", "figure": UNKNOWN, "note": "no memory was read"}
    axis = _Axis(run.seconds)
    where = _PLACES.get(owner.where, owner.where)
    curve = next((curve for curve in _curves(run, axis) if curve["name"] == where), None)
    note = f"{where}, in {path_in_words(owner.stage)}"
    return {"label": "Peak", "figure": format_size(owner.bytes), "note": note, "curve": curve}


_NO_LAYERS: Final = (
    "no LoRA was beside the weights; one that was fused before the watch is not told from them"
)


def _lora_card(run: Run) -> dict[str, Any]:
    """Whether the LoRAs of the run act, in two words and a sentence."""
    told = standing(run)
    names = next((str(value) for name, value in recipe_of(run) if name == LORAS), None)
    if told is not None:
        tone = "warn" if told.is_well is None else "good" if told.is_well else "bad"
        return {"label": "LoRA", "figure": told.words, "note": told.says, "tone": tone}
    if names is None:
        return {"label": "LoRA", "figure": UNKNOWN, "note": "not looked at"}
    if names == NONE:
        return {"label": "LoRA", "figure": "none", "note": _NO_LAYERS}
    return {
        "label": "LoRA",
        "figure": "unknown",
        "note": f"{names}: whether it acts was not measured",
        "tone": "warn",
    }


def _thumbnails(run: Run) -> Iterator[dict[str, Any]]:
    """The last generations' small pictures, the last first; what is not a small JPEG is left out."""
    for stage in reversed(list(run.walk())):
        small = _mapping(stage.facts.get(THUMBNAIL))
        text = small.get("jpeg")
        if not isinstance(text, str) or len(text) > _MOST_THUMBNAIL_DIGITS or not _JPEG.fullmatch(text):
            continue
        yield {"uri": jpeg_uri(bytes.fromhex(text))}


def _as_script_text(text: str) -> Markup:
    """JSON for a script element, where text is not parsed as markup: nothing in it can end the element."""
    for character, escaped in _SCRIPT_ESCAPES.items():
        text = text.replace(character, escaped)
    return Markup(text)


def _time_rows(run: Run) -> Iterator[dict[str, Any]]:
    rows, small = large_rows(run)
    if not rows:
        return
    whole = max(run.seconds, small + sum(row.seconds for row in rows)) or 1.0
    shares = [(row.label, row.seconds, _note(row), large_places(row, run)) for row in rows]
    shares += [("all else", small, "", [])] if small else []
    left = 0.0
    for index, (label, taken, note, places) in enumerate(shares):
        width = 100 * taken / whole
        yield {
            "left": left,
            "label": label,
            "seconds": seconds(taken),
            "share": percent(taken, run.seconds),
            "width": width,
            "colour": index % _COLOURS,
            "note": note,
            "places": [
                (place.label, seconds(place.seconds), percent(place.seconds, run.seconds)) for place in places
            ],
        }
        left += width


def _note(row: TimeShare) -> str:
    return ", ".join(filter(None, (row.callback, in_words(row.packages), times_in_words(row))))


def _timeline(run: Run) -> dict[str, Any] | None:
    """Stages as bars in lanes by depth, above the curves of memory, on one axis."""
    if not is_duration(run.seconds) or run.seconds <= 0 or not run.stages:
        return None
    axis = _axis_of(run)
    bars = [*_start_bar(run, axis)]
    bars += [bar for depth, stage in _with_depth(run.stages) for bar in _bars(depth, stage, axis)]
    return {
        "lanes": 1 + max(bar["lane"] for bar in bars) if bars else 0,
        "bars": bars[:_MOST_BARS],
        "left_out": max(0, len(bars) - _MOST_BARS),
        "ticks": list(_ticks(axis)),
        "curves": list(_curves(run, axis)),
    }


@dataclass(frozen=True, slots=True)
class _Axis:
    """Moments of a run as per cent of the timeline's width.

    Attributes:
        whole: The run's seconds.
        start: Seconds before the first stage that are folded, which means drawn much shorter than they are; 0: none.
    """

    whole: float
    start: float = 0.0

    def at(self, moment: float | int) -> float:
        """Where a moment is."""
        width = _FOLDED_WIDTH if self.start else 0.0
        if moment <= self.start:
            return width * moment / self.start if self.start else 0.0
        return width + (100 - width) * (moment - self.start) / (self.whole - self.start)


def _axis_of(run: Run) -> _Axis:
    """An axis on which a long start of the script leaves room for the stages."""
    start = min((stage.started_seconds for stage in run.stages), default=0.0)
    is_long = is_duration(start) and _LEAST_FOLDED_SHARE * run.seconds <= start < run.seconds
    return _Axis(run.seconds, start if is_long else 0.0)


def _start_bar(run: Run, axis: _Axis) -> Iterator[dict[str, Any]]:
    """The bar of the folded start."""
    if axis.start:
        packages = next((row.packages for row in time_breakdown(run) if row.packages), ())
        what = f"imports ({in_words(packages)})" if packages else "before the first stage"
        yield {
            "name": f"start {seconds(axis.start)}",
            "about": f"start: {seconds(axis.start)}, {what}; drawn shorter than it is",
            "left": 0.0,
            "width": axis.at(axis.start),
            "lane": 0,
            "kind": "folded",
        }


def _with_depth(stages: Sequence[Stage], depth: int = 0) -> Iterator[tuple[int, Stage]]:
    for stage in stages:
        yield depth, stage
        yield from _with_depth(stage.children, depth + 1)


def _bars(depth: int, stage: Stage, axis: _Axis) -> Iterator[dict[str, Any]]:
    if not (is_duration(stage.seconds) and is_duration(max(stage.started_seconds, 0.0))):
        return
    about = f"{stage.name}: {seconds(stage.seconds)}" + ("" if stage.success else ", failed")
    if len(stage.steps):
        about += f", {counted(len(stage.steps), 'step')}"
    started = max(stage.started_seconds, 0.0)
    yield {
        "name": stage.name,
        "about": about,
        "left": axis.at(started),
        "width": axis.at(started + stage.seconds) - axis.at(started),
        "lane": depth,
        "kind": "" if stage.success else "failed",
    }


def _ticks(axis: _Axis) -> Iterator[dict[str, Any]]:
    """Round moments along the axis, but for those in its folded part."""
    whole, start = axis.whole, axis.start
    rough = (whole - start) / _TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    last = start + _LAST_TICK_SHARE * (whole - start)
    for index in range(math.ceil(start / step), int(last / step) + 1):
        yield {"left": axis.at(index * step), "label": seconds(index * step) if index else "0"}


def _curves(run: Run, axis: _Axis) -> Iterator[dict[str, Any]]:
    """Memory over time, of the process and of each device, each on a scale of its own that begins at 0."""
    if run.seconds <= 0:
        return
    points: dict[str, list[tuple[float, int]]] = {}
    for stage in run.stages:
        for where, curve in readable_curves(stage).items():
            times = (stage.started_seconds + at_seconds for at_seconds in curve.at_seconds)
            points.setdefault(where, []).extend(zip(times, curve.nbytes, strict=True))
    for where, readings in points.items():
        most = max(nbytes for _, nbytes in readings)
        if most <= 0:
            continue
        places = [(10 * axis.at(at), 100 - 95 * nbytes / most) for at, nbytes in sorted(readings)]
        line = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        yield {
            "name": _PLACES.get(where, where),
            "most": format_size(most),
            "points": line,
            "area": f"{places[0][0]:.2f},100 {line} {places[-1][0]:.2f},100",
        }


def _series(run: Run) -> dict[str, Any] | None:
    """A bar for each generation of a run, if there are enough to see how they go on."""
    timed = [stage.seconds for stage in run.stages if stage.name == GENERATION and is_duration(stage.seconds)]
    if len(timed) < _FEWEST_FOR_A_CHART or max(timed) <= 0:
        return None
    return {
        "count": len(timed),
        "median": seconds(median(timed)),
        "slowest": seconds(max(timed)),
        "slowest_number": timed.index(max(timed)) + 1,
        "bars": [
            {"height": 100 * value / max(timed), "slow": False, "about": about}
            for value, about in _binned(timed, "generation")
        ],
    }


def _steps(stages: Sequence[Stage], around: str = "") -> Iterator[dict[str, Any]]:
    """A chart for each stage with steps enough to see something in it; stages around them are numbered if they recur."""
    counts, passed = Counter(stage.name for stage in stages), Counter[str]()
    for stage in stages:
        passed[stage.name] += 1
        number = f" {passed[stage.name]}" if counts[stage.name] > 1 else ""
        if len(stage.steps) >= _FEWEST_FOR_A_CHART:
            yield {**_steps_view(stage), "around": around}
        yield from _steps(stage.children, f"{stage.name}{number}")


def _steps_view(stage: Stage) -> dict[str, Any]:
    timed = known(step_seconds(stage))
    if not timed:
        return {"stage": stage.name, "count": len(stage.steps), "bars": []}
    middle, most = median(timed), max(timed)
    outliers = [number for number, value in enumerate(timed, start=1) if value > _OUTLIER_FACTOR * middle]
    height = min(most, 4 * middle) or 1.0
    return {
        "stage": stage.name,
        "count": len(timed),
        "median": seconds(middle),
        "p90": seconds(percentile(timed, 90)),
        "slowest": seconds(most),
        "slowest_number": timed.index(most) + 1,
        "outliers": len(outliers),
        "bars": [
            {
                "height": 100 * min(value, height) / height,
                "slow": value > _OUTLIER_FACTOR * middle,
                "about": about,
            }
            for value, about in _binned(timed)
        ],
        "histogram": _histogram(timed),
    }


def _binned(
    timed: Sequence[float], what: str = "step", most: int = _MOST_BARS
) -> Iterator[tuple[float, str]]:
    """A bar a step, or whatever is timed; of more than there is room for, the slowest of several neighbours."""
    size = math.ceil(len(timed) / most)
    for start in range(0, len(timed), size):
        part = timed[start : start + size]
        several = f"{what}s {start + 1}-{start + len(part)}, the slowest"
        numbers = f"{what} {start + 1}" if size == 1 else several
        yield max(part), f"{numbers}: {seconds(max(part))}"


def _histogram(timed: Sequence[float]) -> list[dict[str, Any]]:
    least, most = min(timed), max(timed)
    if most <= least:
        return []
    width = (most - least) / _BINS
    counts = [0] * _BINS
    for value in timed:
        counts[min(int((value - least) / width), _BINS - 1)] += 1
    return [
        {
            "height": 100 * count / max(counts),
            "slow": False,
            "about": f"{seconds(least + index * width)} to {seconds(least + (index + 1) * width)}: {counted(count, 'step')}",
        }
        for index, count in enumerate(counts)
    ]


def _peaks(run: Run) -> Iterator[dict[str, str]]:
    for owner in peak_owners(run):
        yield {
            "where": _PLACES.get(owner.where, owner.where),
            "size": format_size(owner.bytes),
            "stage": path_in_words(owner.stage),
            "component": owner.component or "",
            "weights": "" if owner.component_bytes is None else format_size(owner.component_bytes),
            "at": seconds(owner.at_seconds),
        }


def _lora_view(analysis: Mapping[str, Any], method: object) -> dict[str, Any]:
    """What an analysis of a LoRA's application says: whether it changed something, what did not match, how much it changed where.

    Args:
        analysis: The fact of a stage.
        method: What was called in it, if that is known.
    """
    verdict, file = _mapping(analysis.get("verdict")), _mapping(analysis.get("lora_file"))
    modules = verdict.get("modules")  # of a record written earlier, only how many
    unmatched = [
        module
        for module in (modules if isinstance(modules, list) else ())
        if isinstance(module, Mapping) and not module.get("matched")
    ]
    total_unmatched = verdict.get("unmatched_modules")
    blocks = [
        (str(block.get("name")), float(block["relative_change"]))
        for side in ("unet", "clip")
        for block in _mapping(analysis.get(f"{side}_weight_changes")).get("by_block") or ()
        if isinstance(block, Mapping) and is_duration(block.get("relative_change"))
    ]
    arriving = [
        _mapping(_mapping(analysis.get(f"{side}_weight_changes")).get("arriving"))
        for side in ("unet", "clip")
    ]
    strongest = max((change for _, change in blocks), default=0.0) or 1.0
    checks = [
        (str(key), _mapping(check))
        for side in ("unet", "clip")
        for key, check in _mapping(_mapping(analysis.get(f"{side}_weight_changes")).get("checked")).items()
    ]
    against = [(key, check) for key, check in checks if check.get("result") == "contradicted"]
    is_lossy = not ON_ARRIVING.isdisjoint(
        _mapping(told).get("id") for told in analysis.get("findings") or ()
    )  # then they agree but for what is lost in rounding, which may be all
    return {
        "arrived": [
            f"Of what was merged into {one.get('stored')} weights, {_whole_percent(one['share'])} arrived, "
            f"{with_noise(one['noise'], _whole_percent(one['noise']) + ' of')}."
            for one in arriving
            if is_duration(one.get("noise")) and isinstance(one.get("share"), int | float)
        ],
        **_outcome_of_change(analysis, str(method or "It"), is_load=bool(file.get("filename"))),
        "several": list(_several_on(analysis)),
        "method": method,
        "file": file.get("filename"),
        "rank": file.get("rank"),
        "confirmed": 0 if is_lossy else sum(check.get("result") == "confirmed" for _, check in checks),
        "contradicted": [
            (key, *(statistic(norm) if is_duration(norm) else "?" for norm in norms))
            for key, check in against
            for norms in ((check.get("used_norm"), check.get("predicted_norm")),)
        ],
        "matched": verdict.get("matched_modules"),
        "total": verdict.get("total_modules"),
        "unmatched": [(module.get("name"), module.get("detail")) for module in unmatched[:_MOST_LAYERS]],
        "unmatched_left": max(
            0, (total_unmatched if isinstance(total_unmatched, int) else len(unmatched)) - _MOST_LAYERS
        ),
        "blocks": [
            {"name": name, "text": rough_percent(change), "width": 100 * change / strongest}
            for name, change in blocks
        ],
    }


def _several_on(analysis: Mapping[str, Any]) -> Iterator[str]:
    """Each LoRA's strength on each side where several are on the models: what a method changed is then not one file's own."""
    for side, name in (("unet", "denoiser"), ("clip", "text encoders")):
        loras = _mapping(_mapping(analysis.get(f"{side}_lora_patches")).get("loras"))
        told = [
            f"{lora} is off or at strength 0"
            if set(_mapping(facts.get("states"))) == {"inactive"}
            else f"‖ΔW‖ / ‖W‖ of {lora} is {rough_percent(float(facts['relative_change']))}"
            for lora, facts in ((str(key), _mapping(value)) for key, value in loras.items())
            if is_duration(facts.get("relative_change"))
        ]
        if len(loras) > 1 and told:
            yield f"Then in the {name}: {', '.join(told)}."


def _outcome_of_change(analysis: Mapping[str, Any], what: str, *, is_load: bool) -> dict[str, str]:
    """Whether a change of LoRAs changed what the models compute. It says nothing of the run's end: later ones may undo it."""
    effective = analysis.get("effective")
    if effective is True:
        return {"outcome": f"{what} changed the model.", "tone": "good" if is_load else ""}
    if effective is not False:
        return {"outcome": f"Whether {what[0].lower()}{what[1:]} changed the model is not known.", "tone": ""}
    is_as_before = any(_mapping(told).get("id") == AS_BEFORE for told in analysis.get("findings") or ())
    return {"outcome": f"{what} changed nothing.", "tone": "" if is_as_before else "bad"}


def _whole_percent(fraction: float) -> str:
    return f"{100 * fraction:,.0f} %"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tensors(run: Run) -> Iterator[dict[str, Any]]:
    for stage in run.walk():
        for name, facts in stage.tensors.items():
            broken = (facts.nan_count or 0) + (facts.inf_count or 0)
            yield {
                "stage": stage.name,
                "name": name,
                "shape": "×".join(map(str, facts.shape)) or "scalar",
                "dtype": facts.dtype.removeprefix("torch."),
                "size": format_size(facts.nbytes),
                "figures": [statistic(value) for value in (facts.min, facts.max, facts.mean, facts.std)],
                "broken": "-" if facts.nan_count is None else f"{broken:,}",
                "is_broken": broken > 0,
            }


def _before_and_now(figure: FigureComparison) -> tuple[str, str]:
    amounts = (figure.baseline, figure.new)
    before, now = (seconds(one) if figure.unit == "seconds" else format_size(round(one)) for one in amounts)
    return before, now


def _name_of(figure: FigureComparison) -> str:
    return f"{figure.name}, processor time" if figure.is_processor_time else figure.name


def _change_in_words(figure: FigureComparison) -> str:
    """Such as "+41.9 %", or "undecided +16.8 %"."""
    change = UNKNOWN if figure.ratio is None else percent_change(figure.ratio - 1)
    return change if figure.state == "changed" else f"{figure.state} {change}"


def _tone_of_comparison(runs: Sequence[Run], changed: WhatChanged) -> str:
    """Bad where more runs fail than before or LoRAs no longer act, warn where that is open; a mere difference has none."""
    before, now = ({told and told.is_well for told in map(standing, side)} for side in (runs[:1], runs[1:]))
    if changed.fails_more or (now == {False} and before != {False}):
        return "bad"
    return "warn" if before == {True} and now == {None} and all(map(standing, runs)) else ""


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """The runs after the first beside the first."""
    changed = what_changed(runs[1:], runs[:1])
    largest = max((max(before, now) for _, before, now in changed.rows), default=0.0) or 1.0
    return {
        "headline": changed.headline,
        "tone": _tone_of_comparison(runs, changed),
        "recipe": [(name, before, now) for name, (before, now) in changed.recipe.items()],
        "figures": [
            (_name_of(figure), *_before_and_now(figure), _change_in_words(figure))
            for figure in changed.figures
            if figure.state != "as before"
        ],
        "rows": [
            {
                "label": label,
                "before": seconds(before),
                "now": seconds(now),
                "change": seconds_change(now - before),
                "before_width": 100 * before / largest,
                "now_width": 100 * now / largest,
            }
            for label, before, now in changed.rows
        ],
    }
