"""Saved runs: `sigmascope show` one, `compare` two sets of them, and `check` one set against the other."""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from sigmascope import units
from sigmascope.cli.console import Console, plain, print_json, put, say, table
from sigmascope.cli.options import AsJson, Full
from sigmascope.errors import ConfigError, RecordError, SigmascopeError, StoreError
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.reports.surfaces import surfaces

if TYPE_CHECKING:
    from sigmascope.analysis.run_comparison import CheckedFigure, FigureComparison, RegressionCheck
    from sigmascope.analysis.what_changed import WhatChanged
    from sigmascope.analysis.work_comparison import WorkComparison
    from sigmascope.records.performance import BeforeAfterDict, ComparedGenerationDict
    from sigmascope.records.run import Run


app = typer.Typer(rich_markup_mode="rich")
KEPT_RUNS: Final = "runs that were kept (latest, latest~1, @tag, an id)"
EPILOG = """Examples:

sigmascope compare before.json after.json

sigmascope compare             the last run that was kept, with the last comparable one before it

sigmascope compare after --baseline before --by-step
"""


_LONGEST_HEADLINE: Final = 800
"""Letters, as in Markdown: the sentences of a comparison, and lists of figures, are longer than one value."""
_WIDEST_NAME: Final = 24
_WIDE: Final = 100
"""Columns. In fewer, a change that is not comparable goes into two lines, rather than a name of so many letters."""
_LONGEST_NAME: Final = 255
_MOST_ALLOWED: Final = 1000.0
"""Times as long: what a user may allow."""
_NOT_COMPARABLE: Final = "not comparable: "
"""How the reason of a check begins."""
_NO_CHANGE: Final = {
    "as before": ", within noise",
    "undecided": ", not to be told from noise",
    "not comparable": ", not comparable",
}
"""What is said of a difference that is no change, by the figure's state."""


CHECK_EPILOG = """Examples:

sigmascope check today/*.json --baseline yesterday/*.json

sigmascope check today --baseline yesterday --max_slowdown 5% --json

sigmascope check latest latest~1 latest~2 --against-history
"""


SHOW_EPILOG = """Examples:

sigmascope show run.json

sigmascope show                the newest run of this folder

sigmascope show latest         the last run that was kept

sigmascope show run.json --full

sigmascope show run.json --html report.html

sigmascope show before.json after.json --html change.html
"""


REGRESSED = 1
TROUBLE = 2
"""Exit code of every error, so that a script can tell it from a regression."""


_VERDICT_STYLE = {"regressed": "bold red", "higher": "yellow", "undecided": "yellow", "lower": "green"}


def _path_argument(help_text: str) -> Any:
    """An argument of runs, shown without a default."""
    return typer.Argument(help=help_text, show_default=False)


class ManyBaselines(TyperCommand):
    """A command whose `--baseline` takes all values up to the next option, such as a shell's `*.json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values."""
        return super().parse_args(ctx, repeated(args, "--baseline"))


@app.command("compare", cls=ManyBaselines, epilog=EPILOG)
def compare(
    runs: Annotated[
        list[Path] | None,
        _path_argument(f"Runs: files written by Run.save, or folders of them, or {KEPT_RUNS}."),
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            "--baseline",
            help="Runs before the change; several may follow. Without it, the first of two runs is the one before; "
            "before a run alone, or the last one that was kept, it is the last comparable one that was kept.",
            show_default=False,
        ),
    ] = None,
    by_step: Annotated[
        bool, typer.Option("--by_step", help="Compare step by step too, the first step included.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Show the figures that did not change beyond noise, too.")
    ] = False,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Chance of a false alarm to accept for each figure.")
    ] = 0.01,
    as_json: AsJson = False,
) -> None:
    """Compare runs with those before a change: times of stages and steps, and memory peaks.

    First a sentence says how the time changed, where, and what explains it; then
    what differs in prompts, call, pipeline, versions and machine; then the figures
    that changed beyond noise. The ratio is that of the medians, with its 95 %
    bootstrap interval where there are three runs on each side. Runs of a benchmark
    are compared case by case. For an exit code use sigmascope check.
    """
    from sigmascope.analysis.run_comparison import Limits, require_alpha, require_pairs
    from sigmascope.analysis.work_comparison import compare_work

    require_alpha(alpha)
    with _told_as_json({"comparisons": []}, wanted=as_json):
        sides, named = _sides_of(runs, baseline)
        pairs, missing = require_pairs(*sides, named=named)
        limits = Limits(alpha)
        comparisons = tuple(
            compare_work(work, *sides, by_step=by_step, limits=limits) for work, sides in pairs.items()
        )
    if as_json:
        print_json({"comparisons": [comparison.as_dict() for comparison in comparisons], "missing": missing})
    else:
        _print_comparisons(Console(), comparisons, missing, full=full)


@contextmanager
def _told_as_json(nothing: Mapping[str, Any], *, wanted: bool) -> Iterator[None]:
    """Where nothing can be compared, stdout still holds JSON: what was found, and the error that stderr has too."""
    try:
        yield
    except SigmascopeError as error:
        if wanted:
            print_json({**nothing, "missing": {}, "error": error.message, "hint": error.hint})
        raise


def _sides_of(
    runs: Sequence[Path] | None, baseline: Sequence[Path] | None
) -> "tuple[tuple[list[Run], list[Run]], Path]":
    """The new runs and those before, and what a message calls the new ones.

    Raises:
        ConfigError: It is not said which runs are which.
        RecordError: As in `load_sides`.
        StoreError: As in `_with_the_one_before`.
    """
    if baseline:
        named = (runs or [Path("latest")])[0]
        sides = load_sides(runs or [named], baseline)
    elif runs and len(runs) == 2:
        named = runs[1]
        sides = load_sides(runs[1:], runs[:1])
    elif not runs or (len(runs) == 1 and _is_kept(runs[0])):
        named = (runs or [Path("latest")])[0]
        sides = _with_the_one_before(named)
    else:
        raise ConfigError(
            "compare needs two runs, or --baseline with the runs from before the change.",
            hint="sigmascope compare before.json after.json, or sigmascope compare after --baseline before. A run alone is compared if it was kept (sigmascope runs).",
        )
    return sides, named


def _with_the_one_before(named: Path) -> "tuple[list[Run], list[Run]]":
    """A run of the store, and the last one before it that did the same kind of work. Stderr names both.

    Raises:
        StoreError: There is no such run, none before it, or the store cannot be used.
        ConfigError: Several runs are meant.
    """
    from sigmascope.history.references import runs_of
    from sigmascope.history.store import open_store

    with open_store(create=False) as store:
        run, *others = runs_of(str(named), store)
        if others:
            raise ConfigError(
                f"{named} means {len(others) + 1} runs.", hint=f"sigmascope compare {named} --baseline RUN"
            )
        before = store.comparable_before(run, limit=1)
        if not before:
            raise StoreError(
                f"No run like {run.row.id} was kept before it: of the same pipeline, model, size, steps and device.",
                hint="List what is kept with sigmascope runs, and name two of them.",
            )
        for what, kept in (("Before", before[0]), ("Now", run)):
            say(f"{what}: {kept.row.id}, {units.local_time(kept.row.started_at)}", err=True)
        return [store.record(run.number)], [store.record(before[0].number)]


def _print_comparisons(
    console: Console, comparisons: "Sequence[WorkComparison]", missing: dict[str, str], *, full: bool
) -> None:
    """Print each comparison, and what could not be compared."""
    for comparison in comparisons:
        _print_comparison(console, comparison, full=full)
    for work, reason in missing.items():
        console.print(Text.assemble(plain(work or "other runs"), f": {reason}", style="yellow"))


def _print_comparison(console: Console, comparison: "WorkComparison", *, full: bool) -> None:
    if comparison.work:
        console.print(plain(comparison.work, style="bold underline"))
    console.print(plain(comparison.changed.headline, limit=_LONGEST_HEADLINE, style="bold"))
    if comparison.changed.recipe:
        console.print(_differences(comparison.changed.recipe))
    groups = {"Figure": comparison.figures}
    if any(steps.lower is not None for steps in comparison.pooled_steps):
        before, now = comparison.runs
        groups[f"Steps of {before} and {now} runs, pooled"] = comparison.pooled_steps
    for heading, figures in groups.items():
        shown = [figure for figure in figures if full or figure.state != "as before"]
        if shown:
            console.print(_figures(heading, shown, width=console.width))
    told = [] if full else [figure.state for figures in groups.values() for figure in figures]
    same = told.count("as before")
    if same:
        console.print(
            Text(
                f"{units.counted(same, 'figure is', 'figures are')} as before, within noise; --full shows {'it' if same == 1 else 'them'}.",
                style="dim",
            )
        )
    if comparison.steps:
        console.print(_figures("Step by step", comparison.steps, width=console.width))
    _print_missing(console, comparison.missing)
    _print_notes(console, comparison.figures)
    if comparison.before_after is not None:
        console.print(_in_words(comparison.before_after, _generation_among(comparison.figures)))
    if any(comparison.folded):
        earlier = "Steps and the median generation leave out the earlier generations that were folded into sums: {:,} before, {:,} now."
        console.print(Text(earlier.format(*comparison.folded), style="dim"))
    before, now = comparison.runs
    console.print(Text(f"{now} {_runs(now)} against {before}.", style="dim"))


def _differences(differences: "Mapping[str, tuple[str, str]]") -> Table:
    made = table("Recipe", "Before", "Now", left=("Before", "Now"))
    for column in made.columns:
        column.no_wrap, column.overflow = False, "fold"
    for name, (before, now) in differences.items():
        made.add_row(plain(name), plain(before), plain(now))
    return made


def _figures(heading: str, figures: "Iterable[FigureComparison]", *, width: int) -> Table:
    figures = list(figures)
    made = table(heading, "Before", "Now", "Change", "Ratio", "95 % interval")
    longest = max((len(figure.name) for figure in figures), default=0)
    made.columns[0].min_width = min(longest, _WIDEST_NAME)
    for figure in figures:
        made.add_row(
            plain(figure.name),
            _amount(figure.baseline, figure.unit),
            _amount(figure.new, figure.unit),
            _change(figure, is_narrow=width < _WIDE),
            units.UNKNOWN if figure.ratio is None else f"{figure.ratio:.3f}",
            _interval(figure),
        )
    return made


def _amount(value: float, unit: str) -> str:
    """Seconds or bytes as people read them."""
    return units.seconds(value) if unit == "seconds" else f"{units.mib(round(value))} MB"


def _change(figure: "FigureComparison", *, is_narrow: bool) -> Text:
    """Coloured if it is beyond noise, or may be."""
    text = units.UNKNOWN if figure.ratio is None else units.percent_change(figure.ratio - 1)
    if figure.state in ("undecided", "not comparable"):
        between = "\n" if is_narrow and not figure.is_comparable else " "
        return Text(f"{figure.state}{between}{text}", style=_VERDICT_STYLE["undecided"])
    is_less = figure.ratio is not None and figure.ratio < 1
    return Text(text, style="dim" if not figure.has_changed else "green" if is_less else "red")


def _interval(figure: "FigureComparison") -> str:
    """The ratio's interval; a dash if there is none."""
    return (
        units.UNKNOWN
        if figure.lower is None or figure.upper is None
        else f"{figure.lower:.3f}-{figure.upper:.3f}"
    )


def _print_notes(console: Console, figures: "Iterable[FigureComparison]") -> None:
    """Say which figures leave out some runs, and why; and which are processor times, that stand in the same columns."""
    figures = list(figures)
    own = ", ".join(figure.name for figure in figures if figure.is_processor_time)
    if own:
        console.print(Text.assemble(plain(own), ": processor time, in place of the clock's", style="dim"))
    for figure in figures:
        if "runs" in figure.unavailable:
            console.print(
                Text.assemble(plain(figure.name), f": {figure.unavailable['runs']}", style="yellow")
            )


def _generation_among(figures: "Iterable[FigureComparison]") -> "FigureComparison | None":
    """The time of the generations, or else of the whole runs."""
    from sigmascope.analysis.run_figures import GENERATION, TOTAL

    by_name = {figure.name: figure for figure in figures}
    return by_name.get(GENERATION) or by_name.get(TOTAL)


def _in_words(comparison: "BeforeAfterDict", time: "FigureComparison | None") -> Text:
    """Such as "16.00 s → 2.40 s: 85.0 % less, 6.67 × as fast; score 31.2 → 100.0; target missed → met"."""
    before, after, improvement = comparison["before"], comparison["after"], comparison["improvement"]
    parts = [f"{units.seconds(before['total_time'])} → {units.seconds(after['total_time'])}"]
    percent, factor = improvement["total_time_percent"], comparison["summary"]["improvement_factor"]
    if percent is not None and factor is not None:
        parts[0] += f": {abs(percent):.1f} % {'less' if percent >= 0 else 'more'}"
        if time is None or time.has_changed:
            faster = factor >= 1
            parts[0] += f", {units.times(factor if faster else 1 / factor)} as {'fast' if faster else 'long'}"
    if time is not None:
        parts[0] += _NO_CHANGE.get(time.state, "")
    if not (before.get("target_assumed") and after.get("target_assumed")):
        parts.append(f"score {_score(before)} → {_score(after)}")
        parts.append(f"target {_met(before)} → {_met(after)}")
    return Text.assemble(("Median generation ", "bold"), "; ".join(parts), ".")


def _score(side: "ComparedGenerationDict") -> str:
    score = None if side.get("target_assumed") else side["performance_score"]
    return units.UNKNOWN if score is None else f"{score:.1f}"


def _met(side: "ComparedGenerationDict") -> str:
    met = side["target_met"]
    return "none" if side.get("target_assumed") else "unknown" if met is None else "met" if met else "missed"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


@app.command("check", cls=ManyBaselines, epilog=CHECK_EPILOG)
def check(
    runs: Annotated[
        list[Path],
        _path_argument(f"New runs: files written by Run.save, or folders of them, or {KEPT_RUNS}."),
    ],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            "--baseline", help="Earlier runs of the same work; several may follow.", show_default=False
        ),
    ] = None,
    against_history: Annotated[
        bool,
        typer.Option(
            "--against_history",
            help="In place of --baseline: the last 50 kept runs of the same work on the same device before these.",
        ),
    ] = False,
    max_slowdown: Annotated[
        str, typer.Option("--max_slowdown", help="How much longer a time may be.", metavar="<share>")
    ] = "5%",
    max_growth: Annotated[
        str, typer.Option("--max_growth", help="How much higher a peak of memory may be.", metavar="<share>")
    ] = "3%",
    alpha: Annotated[
        float, typer.Option("--alpha", help="Chance of a false alarm to accept for each figure.")
    ] = 0.01,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print it for a pull request.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check runs against a baseline: times of stages and steps, and memory peaks.

    A figure has regressed if it is higher beyond chance (Mann-Whitney) and by
    more than is allowed. The check also fails if a larger share of the new runs
    failed. It takes five runs on each side; to show 5 %, let ten on each side take
    turns, and give --max_slowdown 3%. Against ten kept runs or more
    (--against-history) three are enough, or one that is a fifth slower than all of
    them. The exit code is 0 without a regression, 1 with one, 2 for an error. Runs
    of a benchmark are checked case by case.
    """
    from sigmascope.units import parse_share

    try:
        with _told_as_json({"regressed": [], "undecided": [], "figures": []}, wanted=as_json):
            if bool(baseline) == against_history:
                raise ConfigError(
                    "check needs --baseline or --against-history, and not both.",
                    hint="sigmascope check new --baseline old, or sigmascope check latest --against-history.",
                )
            sides = load_sides(runs, baseline) if baseline else _with_history(runs)
            checks, missing = _check_work(
                sides,
                named=runs[0],
                against_history=against_history,
                max_slowdown=parse_share(max_slowdown, "--max_slowdown", _MOST_ALLOWED),
                max_growth=parse_share(max_growth, "--max_growth", _MOST_ALLOWED),
                alpha=alpha,
            )
    except SigmascopeError as error:
        error.exit_code = TROUBLE
        raise
    if as_json:
        print_json(_checks_as_dict(checks, missing))
    elif markdown:
        from sigmascope.reports.trend import checks_as_markdown

        put(checks_as_markdown({work: (done.check, done.changed) for work, done in checks.items()}, missing))
    else:
        _print_checks(Console(), checks, missing)
    if any(done.check.regressed or done.changed.fails_more for done in checks.values()):
        raise typer.Exit(REGRESSED)


def _with_history(paths: list[Path]) -> "tuple[list[Run], list[Run]]":
    """Runs, and the kept ones of the same work on the same device before the first of them.

    Raises:
        ConfigError: The runs are not of one kind of work.
        StoreError: There is no store, or it holds no such run.
    """
    from sigmascope.history.store import open_store
    from sigmascope.history.trends import comparable_before

    runs = load_runs(paths)
    with open_store(create=False) as store:
        before = comparable_before(store, runs)
    say(
        f"Against {units.counted(len(before), 'kept run')}, {units.local_time(before[0].started_at)} to "
        f"{units.local_time(before[-1].started_at)}",
        err=True,
    )
    return runs, before


def _check_work(
    sides: "tuple[list[Run], list[Run]]",
    *,
    named: Path,
    against_history: bool,
    max_slowdown: float,
    max_growth: float,
    alpha: float,
) -> "tuple[dict[str, _WorkCheck], dict[str, str]]":
    """Checks by the work that the runs did, and work that one side lacks."""
    from sigmascope.analysis.run_comparison import Limits, check_regression, require_pairs
    from sigmascope.analysis.what_changed import what_changed

    pairs, missing = require_pairs(*sides, named=named)
    checks = {}
    for work, (new, old) in pairs.items():
        check = check_regression(
            new,
            old,
            max_slowdown=max_slowdown,
            max_growth=max_growth,
            alpha=alpha,
            is_history=against_history,
        )
        changed = what_changed(new, old, limits=Limits(alpha, max_slowdown, max_growth))
        checks[work] = _WorkCheck(check, changed)
    return checks, missing


class _WorkCheck(NamedTuple):
    """A check, and what changed between the two sides."""

    check: "RegressionCheck"
    changed: "WhatChanged"


def _checks_as_dict(checks: "dict[str, _WorkCheck]", missing: dict[str, str]) -> dict[str, Any]:
    """One check as it is; those of several cases by name."""
    plainly = {
        work: {
            **work_check.check.as_dict(),
            "headline": work_check.changed.headline,
            "fails_more": work_check.changed.fails_more,
            "set_up_differences": work_check.changed.recipe,
        }
        for work, work_check in checks.items()
    }
    if list(checks) == [""]:
        return {**plainly[""], "missing": {**plainly[""]["missing"], **missing}}
    return {
        **{
            verdict: [f"{work}: {name}" for work, values in plainly.items() for name in values[verdict]]
            for verdict in ("regressed", "undecided")
        },
        "cases": plainly,
        "missing": missing,
    }


def _print_checks(console: Console, checks: "dict[str, _WorkCheck]", missing: dict[str, str]) -> None:
    for work, work_check in checks.items():
        if work:
            console.print(plain(work, style="bold underline"))
        console.print(plain(work_check.changed.headline, limit=_LONGEST_HEADLINE, style="bold"))
        if work_check.changed.recipe:
            changes = (
                f"{name} {before} → {now}" for name, (before, now) in work_check.changed.recipe.items()
            )
            console.print(
                Text("The recipe differs: ", style="yellow").append_text(
                    plain("; ".join(changes), limit=_LONGEST_HEADLINE)
                )
            )
        if work_check.changed.two_machines is not None:
            console.print(Text(work_check.changed.two_machines, style="yellow"))
        _print_check(console, work_check.check)
        if work_check.changed.fails_more:
            console.print(Text("More of these runs failed than before.", style="bold red"))
    for work, reason in missing.items():
        console.print(Text.assemble(plain(work or "other runs"), f": {reason}", style="yellow"))


def _print_check(console: Console, check: "RegressionCheck") -> None:
    made = table("Figure", "Before", "Now", "Ratio", "95 % interval", "Verdict", left=("Verdict",))
    for figure in check.figures:
        comparison = figure.comparison
        made.add_row(
            plain(comparison.name),
            _amount(comparison.baseline, comparison.unit),
            _amount(comparison.new, comparison.unit),
            "-" if comparison.ratio is None else f"{comparison.ratio:.3f}",
            _interval(comparison),
            Text(figure.verdict, style=_VERDICT_STYLE.get(figure.verdict, "")),
        )
    console.print(made)
    _print_missing(console, check.missing)
    _print_notes(console, [figure.comparison for figure in check.figures])
    for figure in check.regressed:
        name = plain(figure.comparison.name)
        console.print(
            Text.assemble((figure.verdict, _VERDICT_STYLE["regressed"]), " ", name, f": {figure.why}")
        )
    for reason, names in _by_reason(check.undecided).items():
        console.print(
            Text.assemble(
                ("undecided", _VERDICT_STYLE["undecided"]),
                " ",
                plain(", ".join(names), limit=_LONGEST_HEADLINE),
                f": {reason}",
            )
        )
    run_counts = [figure.comparison.runs for figure in check.figures]  # some figures are without some of them
    before, after = (max(counts) for counts in zip(*run_counts, strict=True)) if run_counts else (0, 0)
    style = "bold red" if check.regressed else "bold yellow" if check.undecided else "bold green"
    console.print(Text(f"{check.outcome} ({after} {_runs(after)} against {before}).", style=style))


def _by_reason(figures: "Iterable[CheckedFigure]") -> dict[str, list[str]]:
    """Names of figures by what is said of them; those that only differ in how much they changed are told together."""
    alike: dict[str, list[tuple[str, str, str]]] = {}
    for figure in figures:
        name, why = figure.comparison.name, figure.why
        change, _, reason = why.replace(" %, ", " %\n", 1).partition("\n")
        if why.startswith(_NOT_COMPARABLE):
            reason, _, change = why.rpartition("; ")
        alike.setdefault(reason or why, []).append((name, " ".join(change.split()[-2:]), why))
    told: dict[str, list[str]] = {}
    for reason, group in alike.items():
        if len(group) == 1:
            told[group[0][2]] = [group[0][0]]
        else:
            told[reason.removeprefix("but ")] = [f"{name} {change}" for name, change, _ in group]
    return told


def _print_missing(console: Console, missing: Mapping[str, str]) -> None:
    """Say which figures could not be compared; those with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        console.print(
            Text.assemble(plain(", ".join(names), limit=_LONGEST_HEADLINE), f": {reason}", style="yellow")
        )


def _joined(words: Iterable[str]) -> str:
    """Such as "a, b and c"."""
    *all_but_last, last = words
    return f"{', '.join(all_but_last)} and {last}" if all_but_last else last


def _with_surfaces(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each surface in place of its `**wanted`."""
    signature = inspect.signature(command)
    plain_parameters = [value for value in signature.parameters.values() if value.name != "wanted"]
    options = [
        inspect.Parameter(
            surface.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if surface.is_file else False,
            annotation=Annotated[
                (Path | None) if surface.is_file else bool,
                typer.Option(f"--{surface.name}", help=surface.help),
            ],
        )
        for surface in surfaces()
    ]
    shown = [*plain_parameters[:2], *options, *plain_parameters[2:]]
    parameters = [value.replace(kind=inspect.Parameter.KEYWORD_ONLY) for value in shown]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {value.name: value.annotation for value in parameters}
    return command


@app.command("show", epilog=SHOW_EPILOG)
@_with_surfaces
def show(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Files written by Run.save or sigmascope watch, or folders of them, or {KEPT_RUNS}; "
            "without one, the newest run of this folder, or else the last one that was kept.",
            show_default=False,
        ),
    ] = None,
    full: Full = False,
    browser: Annotated[
        bool | None,
        typer.Option(
            "--browser/--no_browser",
            help="Open the report in the browser. The default when no run is named and there is a browser.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            help=f"What {_joined(f'--{surface.name}' for surface in surfaces())} show of prompts: full, hash or none.",
        ),
    ] = "hash",
    as_json: AsJson = False,
    **wanted: Path | bool | None,
) -> None:
    """Show where a saved run's time and memory went, what is wrong, and what to do.

    The verdict comes first, then a bar for each part of the time, then at most
    five findings, the gravest first. A report of several runs compares the first
    with the others.
    """
    from sigmascope.reports import print_run

    privacy = privacy_of(prompts, f"--prompts {prompts}").name
    loaded = load_runs(runs) if runs else newest_runs(Path())
    asked = [surface for surface in surfaces() if wanted[surface.name]]
    for surface in asked:
        path = wanted[surface.name]
        if isinstance(path, Path):
            surface.write(loaded, path, privacy)
            verb = "are" if surface.noun.endswith("s") else "is"
            say(f"The {surface.noun} {verb} in {path}", err=True)
    if browser or (browser is None and not runs and _has_browser() and not (full or asked or as_json)):
        _open_in_browser(loaded, privacy)
    for surface in asked:
        if not surface.is_file:
            put(surface.render(loaded, privacy))
    if as_json:
        print_json([_as_dict(run) for run in loaded])
    for run in () if as_json or asked else loaded:
        print_run(run, full=full)


def _as_dict(run: "Run") -> dict[str, Any]:
    from dataclasses import asdict

    from sigmascope.analysis.breakdown import headline, run_findings, time_breakdown
    from sigmascope.analysis.lora_state import standing

    loras = standing(run)
    return {
        "name": run.name,
        "started_at": run.started_at,
        "seconds": run.seconds,
        "headline": headline(run),
        "loras": None if loras is None else loras._asdict(),
        "time": [{"label": row.label, **asdict(row)} for row in time_breakdown(run)],
        "findings": [asdict(finding) for finding in run_findings(run)],
    }


def _has_browser() -> bool:
    """Whether the user sits at a screen with a browser, not behind a pipe or ssh."""
    has_screen = (
        sys.platform in ("win32", "darwin") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    )
    return has_screen and sys.stdout.isatty()


def _open_in_browser(runs: "Sequence[Run]", prompts: PromptPrivacy) -> None:
    """Write the report to a temporary file and open it in the browser."""
    import tempfile
    import webbrowser

    from sigmascope.reports.html import write_html

    page = Path(tempfile.mkdtemp(prefix="sigmascope-"), "report.html")
    write_html(runs, page, prompts=prompts)
    if webbrowser.open(page.as_uri()):
        say(f"Opened {page}", err=True)
    else:
        say(f"No browser could be opened; the report is in {page}", err=True)


def newest_runs(folder: Path) -> "list[Run]":
    """The newest run among a folder's .json files, else the last that was kept. Stderr names it and each file that was skipped.

    Raises:
        ConfigError: There is none.
    """
    files = sorted(folder.glob("*.json"), key=_written_at, reverse=True)
    for path in files:
        try:
            run = load_runs([path])
        except SigmascopeError as error:
            say(f"Skipped: {error.message}", err=True)
            continue
        say(f"The newest run here is {path}", err=True)
        return run
    try:
        kept = load_runs([Path("latest")])
    except StoreError:
        raise ConfigError(
            "This folder holds no saved run.",
            hint="Make one with sigmascope watch SCRIPT, or name the file: sigmascope show RUN.json",
        ) from None
    say(f"No run is saved here. The last one that was kept is {kept[0].id}", err=True)
    return kept


def _written_at(path: Path) -> float:
    """When a file was last written; before all others for a link to nothing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return -math.inf


def load_sides(new: Sequence[Path], baseline: Sequence[Path]) -> "tuple[list[Run], list[Run]]":
    """The runs of both sides of a comparison.

    Raises:
        RecordError: As in `load_runs`; or both sides have the same run.
    """
    ours, theirs = load_runs(new), load_runs(baseline)
    ids = {run.id for run in theirs}
    twin = next((run for run in ours if run.id in ids and run in theirs), None)
    if twin is not None:
        message = f"the run {units.printable(twin.id)} is in the baseline too."
        raise RecordError(new[0], message, hint="Compare runs with earlier ones, not with themselves.")
    return ours, theirs


def load_runs(paths: Sequence[Path]) -> "list[Run]":
    """The runs in these files, in the .json files of these folders, by name, and those of the store that are meant.

    Raises:
        RecordError: A path does not exist, a folder holds no .json file, a file is not a run or holds impossible times,
            or two files are the same run.
        StoreError: A word that means a run of the store means none there, or several.
    """
    from sigmascope.records.run import impossible_times

    runs = {path: run for given in paths for path, run in _runs_of(given)}  # each file once
    for path, run in runs.items():
        for wrong in impossible_times(run):
            raise RecordError(path, f"is damaged: {wrong}.", hint="Leave it out, or record the run again.")
    _refuse_copies(runs)
    return list(runs.values())


def _runs_of(given: Path) -> "Iterator[tuple[Path, Run]]":
    """The runs of a file or folder; if there is none of that name, those of the store that it means."""
    from sigmascope.records.serialization import load_run

    if not _is_kept(given):
        yield from ((path, load_run(path)) for path in _files(given))
        return
    from sigmascope.history.references import runs_of
    from sigmascope.history.store import open_store

    try:
        with open_store(create=False) as store:
            for kept in runs_of(str(given), store):
                yield Path(f"{given} ({kept.row.id})"), store.record(kept.number)
    except StoreError as error:
        if str(given).startswith(("latest", "@")):
            raise
        message = f"does not exist. {error.message}"
        raise RecordError(
            given, message, hint="Check the path. sigmascope runs lists what is kept."
        ) from error


def _is_kept(given: Path) -> bool:
    """Whether a word means a run of the store: no file has that name, and it reads like one."""
    from sigmascope.history.references import is_reference

    return is_reference(str(given)) and not os.path.exists(given)  # noqa: PTH110 - False of a name that is too long, where `Path` raises


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"), key=_in_numbers)
    if not files:
        raise RecordError(
            path, "holds no saved run.", hint="Name a folder of .json files written by Run.save."
        )
    return files


def _in_numbers(path: Path) -> list[str]:
    """By which files are sorted as people number them: 2.json before 10.json."""
    return [
        part.zfill(_LONGEST_NAME) if part.isdecimal() else part for part in re.split(r"([0-9]+)", path.name)
    ]


def _refuse_copies(runs: "dict[Path, Run]") -> None:
    """Refuse a run that is given twice: it would count as two that agree."""
    seen: dict[str, list[Path]] = {}
    for path, run in runs.items():
        namesakes = seen.setdefault(run.id, [])
        twin = next((other for other in namesakes if runs[other] == run), None)
        if twin is not None:
            raise RecordError(path, f"is the same run as {twin}.", hint="Give each run once.")
        namesakes.append(path)


def repeated(args: Sequence[str], option: str) -> list[str]:
    """The arguments with `option a b` written as `option a option b`. Arguments after `--` stay unchanged."""
    written: list[str] = []
    takes = False
    for index, arg in enumerate(args):
        if arg == "--":
            return written + list(args[index:])
        if arg == option:
            takes = True
        elif arg.startswith("-") and arg != "-":
            takes = False
            written.append(arg)
        elif takes:
            written += [option, arg]
        else:
            written.append(arg)
    return written + ([option] if takes and args[-1] == option else [])
