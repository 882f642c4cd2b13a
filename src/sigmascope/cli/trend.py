"""`sigmascope trend`: a figure of the kept runs over time, with the places where it changed and what differs there."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.console import Console, print_json, put, say
from sigmascope.cli.options import AsJson, option_groups
from sigmascope.cli.runs.kept_runs import Chosen
from sigmascope.errors import ConfigError, StoreError
from sigmascope.files import atomic_path, require_writable

app = typer.Typer(rich_markup_mode="rich")

EPILOG = """Examples:

sigmascope trend                         what was run last, and where its time changed

sigmascope trend latest --figure peak    the runs like the last one

sigmascope trend --pipeline flux --since 30d --html trend.html
"""


@app.command("trend", epilog=EPILOG)
@option_groups
def trend(
    chosen: Chosen,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Only runs like this one: latest, @tag, or the beginning of an id.",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        str,
        typer.Option(
            "--figure",
            help="time (the whole run), generation, peak, step; or a figure of compare, such as latent_decoding.",
        ),
    ] = "time",
    by_recipe: Annotated[
        bool, typer.Option("--by_recipe", help="A series for each recipe: of the same request alone.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Show this many series, the latest.")
    ] = 5,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that any browser opens; needs no network.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it for an issue or a pull request.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a figure of the kept runs over time: where it changed, when, and what differs there.

    Runs of the same pipeline, model, size, steps and hardware are a series. A change
    is told three runs after it began. The exit code is 0, also where something became
    slower; 1 if there is no such run, 2 for options that make no sense. For an exit code that tells of a regression use
    sigmascope check --against-history.
    """
    from sigmascope.history.references import runs_of
    from sigmascope.history.store import open_store
    from sigmascope.history.trends import trends, with_causes

    filters = chosen.filters()
    if html is not None:
        require_writable(html)
    with open_store(create=False) as store:
        like = None
        if run is not None:
            like, *others = runs_of(run, store)
            if others:
                raise ConfigError(
                    f"{run} means {len(others) + 1} runs.",
                    hint="Name one, or filter: sigmascope trend --tag TAG",
                )
        found = trends(store, figure, filters, like=like, by_recipe=by_recipe, most=limit + 1)
        if not found:
            raise StoreError(
                "No kept run that is whole passes these filters.",
                hint="List what is kept with sigmascope runs.",
            )
        shown = [with_causes(store, series) for series in found[:limit]]
    if html is not None:
        from sigmascope.reports.trend import trends_as_html

        with atomic_path(html) as temporary:
            temporary.write_text(trends_as_html(shown), encoding="utf-8")
        say(f"The report is in {html}", err=True)
    if as_json:
        print_json([series.as_dict() for series in shown])
    elif markdown:
        from sigmascope.reports.trend import trends_as_markdown

        put(trends_as_markdown(shown))
    elif html is None:
        from sigmascope.reports.trend import render_trends

        Console().print(render_trends(shown))
    if len(found) > limit and not as_json:
        say("There are more series: --limit shows them.", err=True)
