"""`sigmascope runs`: its commands are imported when they are named."""

from typing import Any

import typer

from sigmascope.cli.groups import OnDemand, commands_on_demand

_MODULE = "sigmascope.cli.runs.kept_runs"
_Commands = commands_on_demand(
    {
        "list": OnDemand(_MODULE, "List the runs that were kept, the newest first."),
        "show": OnDemand(_MODULE, "Show what is known of runs: their row, tags and notes, then the record."),
        "tag": OnDemand(
            _MODULE,
            "Give runs a tag, by which commands find them again: @TAG. A run with a tag is never dropped by itself.",
        ),
        "note": OnDemand(_MODULE, "Add a note to a run."),
        "rm": OnDemand(_MODULE, "Remove runs from the store. Files of records stay."),
        "prune": OnDemand(
            _MODULE, "Drop the oldest runs, but for those with a tag, and give the space back."
        ),
        "export": OnDemand(
            _MODULE,
            "Write runs to a file: all of them with tags and notes in .jsonl, for runs import; a table in .csv or .parquet.",
        ),
        "merge": OnDemand(
            _MODULE,
            "Make one run of those of several processes: the ranks of a training, or the machines of a generation.",
        ),
        "import": OnDemand(
            _MODULE, "Take runs of files into the store. A run that is there already is not taken in twice."
        ),
        "query": OnDemand(_MODULE, "Ask the store in SQL. The page on history describes the tables."),
    }
)


class _ListByDefault(_Commands):  # type: ignore[misc, valid-type]
    """A group that lists where no command is named: `sigmascope runs --tag before`."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Put `list` before options that are not the help."""
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ListByDefault,
    rich_markup_mode="rich",
    help="List, find, tag and exchange the runs that were kept, and query them in SQL.",
    epilog="A run is named latest, latest~1 (the one before), @tag (all with that tag), or by the beginning of its id.",
)
