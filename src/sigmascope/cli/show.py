"""`sigmascope show`: saved runs in the terminal or as one HTML file, the verdict first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sigmascope.cli.compare import load_runs
from sigmascope.cli.console import print_json, say
from sigmascope.cli.options import AsJson, Full
from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.records.prompts import PromptPrivacy, check_privacy

if TYPE_CHECKING:
    from sigmascope.records.run import Run

EPILOG = """Examples:

sigmascope show run.json

sigmascope show                the newest run of this folder

sigmascope show run.json --full

sigmascope show run.json --html report.html

sigmascope show before.json after.json --html change.html
"""


def show(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files written by Run.save or sigmascope watch, or folders of them; "
            "without one, the newest run of this folder.",
            show_default=False,
        ),
    ] = None,
    full: Full = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a report that any browser opens; needs no network."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it for an issue tracker, in 60 lines at most.")
    ] = False,
    prompts: Annotated[
        str, typer.Option("--prompts", help="What --html and --markdown say of prompts: full, hash or none.")
    ] = "hash",
    as_json: AsJson = False,
) -> None:
    """Show where a saved run's time and memory went, what is wrong, and what to do.

    The verdict comes first, then a bar for each part of the time, then at most
    five findings, the gravest first. A report of several runs compares the first
    with the others.
    """
    from sigmascope.reports import print_run

    check_privacy(prompts)
    loaded = load_runs(runs) if runs else [newest_run(Path())]
    if html is not None:
        from sigmascope.reports.html import write_html

        write_html(loaded, html, prompts=cast(PromptPrivacy, prompts))
        say(f"The report is in {html}", err=True)
    if markdown:
        from sigmascope.reports.markdown import to_markdown

        typer.echo(to_markdown(loaded, prompts=cast(PromptPrivacy, prompts)), nl=False)
    if as_json:
        print_json([_as_dict(run) for run in loaded])
    for run in () if as_json or markdown or html is not None else loaded:
        print_run(run, full=full)


def _as_dict(run: "Run") -> dict[str, Any]:
    from dataclasses import asdict

    from sigmascope.analysis.breakdown import findings_of, headline, time_breakdown

    return {
        "name": run.name,
        "started_at": run.started_at,
        "seconds": run.seconds,
        "headline": headline(run),
        "time": [{"label": row.label, **asdict(row)} for row in time_breakdown(run)],
        "findings": [asdict(finding) for finding in findings_of(run)],
    }


def newest_run(folder: Path) -> "Run":
    """The run that was written last among a folder's .json files; it is named on stderr, and what is passed over.

    Raises:
        ConfigError: There is none.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        try:
            run = load_runs([path])[0]
        except SigmascopeError as error:
            say(f"Passed over: {error.message}", err=True)
            continue
        say(f"The newest run here is {path}", err=True)
        return run
    raise ConfigError(
        "This folder holds no saved run.",
        hint="Make one with sigmascope watch SCRIPT, or name the file: sigmascope show RUN.json",
    )
