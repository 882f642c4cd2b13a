"""A `Run`, or two sets of runs side by side, as Markdown for an issue tracker: 60 lines at most.

`report.md.jinja` lays it out. Whatever comes from the record is text there: no link, no tag, no mention of anybody.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from markupsafe import Markup

from sigmascope.analysis.breakdown import (
    TimeShare,
    failure_places,
    headline,
    large_places,
    large_rows,
    run_findings,
)
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.memory import peak_owners
from sigmascope.analysis.recipe import recipe_of
from sigmascope.analysis.what_changed import what_changed
from sigmascope.plain_text import in_one_line
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.records.recorded import Recorded
from sigmascope.records.run import Run, path_in_words
from sigmascope.reports.html import private_runs, template
from sigmascope.reports.surfaces import Surface
from sigmascope.units import format_size, percent, seconds, took

_MOST_ROWS: Final = 10
_MOST_PLACES: Final = 5
_MOST_FINDINGS: Final = 5
_MOST_OF_RECIPE: Final = 20
_LONGEST: Final = 160
_LONGEST_HEADLINE: Final = 800
_LONGEST_CHAIN: Final = 8000
_MARKS: Final = re.compile(r"([\\`*_{}\[\]#!|~])")
_SPECIAL: Final = {"&": "&amp;", "<": "&lt;", "@": "@\u200b", "://": ":\u200b//", "www.": "www\u200b."}
"""Tags, mentions and links, each broken by what shows as it was."""
_KEPT: Final = ("prompt", "negative_prompt", "seed", "num_inference_steps", "guidance_scale", "height", "width",
                "batch_size", "LoRAs", "weights in use", "scheduler", "pipeline", "dtypes", "processor", "threads", "system", "Python")  # fmt: skip
_DTYPE: Final = " dtype"
_LIBRARIES: Final = ("sigmascope", "torch", "diffusers", "transformers", "peft", "accelerate")


def to_markdown(runs: Recorded | Iterable[Recorded], *, prompts: PromptPrivacy = "hash") -> str:
    """Return what to paste into a bug report. Its first line says what is in it and what is left out.

    Args:
        runs: One run, or what has one, such as a `Watch`; or several, the first of which the others are compared with.
        prompts: What it says of prompts that the runs hold as text.

    Raises:
        ConfigError: No run, or no such privacy.
    """
    kept = privacy_of(prompts).kept
    shown = private_runs(runs, prompts)
    last = shown[-1]
    rows, small = large_rows(last)
    changed = what_changed(shown[1:], shown[:1]) if len(shown) > 1 else None
    findings = run_findings(last)
    return template("report.md.jinja").render(
        runs="one run" if changed is None else f"{len(shown)} runs, the first before the others",
        privacy=kept,
        headline=as_text(headline(last) if changed is None else changed.headline, _LONGEST_HEADLINE),
        acts=as_text((acting_lora(last) if changed is None else None) or "", _LONGEST_HEADLINE),
        raised_at=as_text(" → ".join(failure_places(last)), _LONGEST_CHAIN),
        name=as_text(last.name or "unnamed"),
        took=took(last.seconds),
        rows=[
            (label, seconds(taken), percent(taken, last.seconds))
            for label, taken in _time_rows(rows[:_MOST_ROWS], last)
        ]
        if changed is None or not changed.rows
        else [
            (as_text(label), seconds(before), seconds(now))
            for label, before, now in changed.rows[:_MOST_ROWS]
        ],
        heads=("time", "share") if changed is None or not changed.rows else ("before", "now"),
        small=seconds(small) if small and (changed is None or not changed.rows) else None,
        peaks=[
            (
                as_text(owner.where),
                format_size(owner.bytes),
                as_text(owner.component or path_in_words(owner.stage)),
            )
            for owner in peak_owners(last)
        ],
        findings=[
            (finding.severity, as_text(finding.message), as_text(finding.advice or ""))
            for finding in findings[:_MOST_FINDINGS]
        ],
        more_findings=max(0, len(findings) - _MOST_FINDINGS),
        differences=[] if changed is None else list(_cells(changed.recipe))[:_MOST_OF_RECIPE],
        recipe=[] if changed is not None else list(_recipe(last)),
    )


SURFACE: Final = Surface(
    "markdown",
    "Print it for an issue tracker, in 60 lines at most.",
    lambda runs, prompts: to_markdown(runs, prompts=prompts),
    is_file=False,
)


def _time_rows(rows: Sequence[TimeShare], run: Run) -> Iterator[tuple[Markup, float]]:
    """Each row, and under it what is known of its places in the program, of the longest ones in all."""
    places = [(place.seconds, row, place) for row in rows for place in large_places(row, run)]
    shown = sorted(places, key=lambda item: -item[0])[:_MOST_PLACES]
    for row in rows:
        yield as_text(row.label), row.seconds
        for taken, around, place in shown:
            if around is row:
                yield Markup("&emsp;") + as_text(place.label), taken


def _cells(recipe: Any) -> Iterator[tuple[Markup, Markup, Markup]]:
    for name, (before, now) in recipe.items():
        yield as_text(name), as_text(before), as_text(now)


def _recipe(run: Run) -> Iterator[tuple[Markup, Markup]]:
    recipe = {name: value for name, value in recipe_of(run) if value is not None}
    dtypes = [
        f"{name.removesuffix(_DTYPE)} {value}" for name, value in recipe.items() if name.endswith(_DTYPE)
    ]
    if dtypes:
        recipe["dtypes"] = ", ".join(dtypes)
    for name in (*_KEPT, *_LIBRARIES):
        if name in recipe:
            yield as_text(name), as_text(recipe[name])


def as_text(value: object, most: int = _LONGEST) -> Markup:
    """The value in one line that Markdown shows as it is: its marks lose their meaning, and nobody is mentioned."""
    line = in_one_line(value)
    line = line if len(line) <= most else f"{line[: most - 1]}…"
    escaped = _MARKS.sub(r"\\\1", line)
    for special, harmless in _SPECIAL.items():
        escaped = escaped.replace(special, harmless)
    return Markup(escaped)
