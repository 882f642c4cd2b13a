"""The runs that were kept: list, find, tag and exchange them, and query them in SQL."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.table import Table
from rich.text import Text

from sigmascope import units
from sigmascope.cli.console import Console, facts, plain, print_json, progress_bar, say, table
from sigmascope.cli.options import AsJson, Full, option_groups
from sigmascope.errors import ConfigError
from sigmascope.files import require_writable

if TYPE_CHECKING:
    from sigmascope.history.exchange import TakenIn
    from sigmascope.history.store import Filters, KeptRun, Store

_ID_SHOWN: Final = 8
"""Letters: 32 bits, so that among 10,000 runs some one in a hundred stores has two that look alike."""
_MOST_COLUMNS: Final = 6
"""Of a table that is too wide for the terminal, and folds its cells; with more of them each row is a list."""
_WIDEST: Final = 100_000


app = typer.Typer(rich_markup_mode="rich")

TableName = Literal["runs", "stages", "steps"]
References = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="latest, latest~1, @tag, or the beginning of an id.", show_default=False
    ),
]


@dataclass(frozen=True)
class Chosen:
    """Which runs are meant: all conditions hold."""

    pipeline: Annotated[str | None, typer.Option("--pipeline", help="A part of the pipeline's class.")] = None
    model: Annotated[str | None, typer.Option("--model", help="A part of the model's name or folder.")] = None
    lora: Annotated[
        str | None, typer.Option("--lora", help="A part of the name of a LoRA that was on it.")
    ] = None
    recipe: Annotated[str | None, typer.Option("--recipe", help="The beginning of the recipe's digest.")] = (
        None
    )
    outcome: Annotated[
        str | None, typer.Option("--outcome", help="ok, failed, interrupted or 'out of memory'.")
    ] = None
    tag: Annotated[str | None, typer.Option("--tag", help="One of its tags.")] = None
    source: Annotated[
        str | None,
        typer.Option("--source", help="What kept it: watch, process, bench, asgi, comfyui or import."),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since", help="Not earlier: 2026-03-01, 2026-03-01T14:30, yesterday, or ago: 90m, 12h, 7d, 2w."
        ),
    ] = None
    until: Annotated[str | None, typer.Option("--until", help="Earlier than that, written as --since.")] = (
        None
    )

    def filters(self) -> "Filters":
        """As the store takes them.

        Raises:
            ConfigError: One of them is no outcome, tag or moment.
        """
        from sigmascope.history.references import filters_of

        return filters_of(asdict(self))


@contextmanager
def _store(*, create: bool = False) -> Iterator["Store"]:
    from sigmascope.history.store import open_store

    with open_store(create=create) as store:
        yield store


@app.command("list", epilog="Example: sigmascope runs --pipeline flux --since 7d")
@option_groups
def list_runs(
    chosen: Chosen,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show this many, the newest.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the runs that were kept, the newest first."""
    filters = chosen.filters()
    with _store() as store:
        runs = store.runs(filters, limit=limit)
        count = len(runs) if len(runs) < limit else store.count(filters)
        name = store.name
    if as_json:
        print_json([run.as_dict() for run in runs])
        return
    console = Console()
    if runs:
        console.print(_table(runs))
    shown = f"{len(runs)} of {count:,} runs" if count > len(runs) else units.counted(count, "run")
    console.print(Text(f"{shown} in {name}", style="dim"), soft_wrap=True)


def _table(runs: "Sequence[KeptRun]") -> Table:
    made = table("Run", "Started", "Size", "Steps", "Time", "Peak", "What", left=("Started", "What"))
    made.columns[-1].no_wrap, made.columns[-1].overflow = False, "fold"
    for run in runs:
        row = run.row
        what = plain((row.pipeline or row.name).removesuffix("Pipeline"))
        if run.tags:
            what.append(" ").append_text(plain(f"@{' @'.join(run.tags)}", style="cyan"))
        if row.outcome != "ok":
            what.append(f" {row.outcome}", style="bold red")
        made.add_row(
            plain(row.id[:_ID_SHOWN]),
            units.local_time(row.started_at),
            units.UNKNOWN if row.width is None else f"{row.width}×{row.height}",
            units.UNKNOWN if row.steps is None else str(row.steps),
            units.seconds(row.seconds),
            units.UNKNOWN if row.peak_bytes is None else units.format_size(row.peak_bytes),
            what,
        )
    return made


def _named(references: Sequence[str], store: "Store") -> "list[KeptRun]":
    """The runs that the words mean, each once."""
    from sigmascope.history.references import runs_of

    return list({run.number: run for word in references for run in runs_of(word, store)}.values())


@app.command("show", epilog="Example: sigmascope runs show latest")
def show(references: References, full: Full = False, as_json: AsJson = False) -> None:
    """Show what is known of runs: their row, tags and notes, then the record."""
    from sigmascope.reports import print_run

    with _store() as store:
        runs = _named(references, store)
        records = [store.record(run.number) for run in runs]
    if as_json:
        from sigmascope.records.serialization import run_to_dict

        print_json(
            [
                {**run.as_dict(), "record": run_to_dict(record)}
                for run, record in zip(runs, records, strict=True)
            ]
        )
        return
    console = Console()
    for run, record in zip(runs, records, strict=True):
        console.print(_facts(run))
        print_run(record, console, full=full)


def _facts(run: "KeptRun") -> Table:
    row = run.row
    size = None if row.width is None else f"{row.width}×{row.height}"
    shown = {
        "Run": row.id,
        "Started": units.local_time(row.started_at),
        "Kept by": run.source,
        "Outcome": row.outcome,
        "Pipeline": row.pipeline,
        "Model": row.model,
        "LoRAs": ", ".join(row.loras) or None,
        "Recipe": row.recipe,
        "Size": size,
        "Steps": None if row.steps is None else str(row.steps),
        "On": None if row.hardware is None else f"{row.device}: {row.hardware}",
        "Tags": ", ".join(run.tags) or None,
        **{f"Note {number}": note for number, note in enumerate(run.notes, 1)},
    }
    return facts([(label, None if value is None else plain(value)) for label, value in shown.items()])


@app.command("tag", epilog="Example: sigmascope runs tag before latest latest~1")
def tag(
    name: Annotated[str, typer.Argument(metavar="TAG", help="The tag.", show_default=False)],
    references: References,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag off.")] = False,
) -> None:
    """Give runs a tag, by which commands find them again: @TAG. A run with a tag is never dropped by itself."""
    from sigmascope.history.references import checked_tag

    wanted = checked_tag(name)
    with _store() as store:
        runs = _named(references, store)
        (store.untag if remove else store.tag)([run.number for run in runs], wanted)
    say(f"{units.counted(len(runs), 'run')}: {'without the tag' if remove else 'tagged'} {wanted}")


@app.command("note", epilog='Example: sigmascope runs note latest "new driver"')
def note(
    reference: Annotated[
        str,
        typer.Argument(metavar="RUN", help="latest, @tag, or the beginning of an id.", show_default=False),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note.", show_default=False)],
) -> None:
    """Add a note to a run."""
    if not text.strip():
        raise ConfigError("The note is empty.", hint="Write it in quotation marks.")
    with _store() as store:
        runs = _named([reference], store)
        store.note([run.number for run in runs], text.encode("utf-8", "replace").decode().replace("\0", ""))
    say(f"{units.counted(len(runs), 'run')} with a new note")


@app.command("rm", epilog="Example: sigmascope runs rm latest")
def rm(references: References) -> None:
    """Remove runs from the store. Files of records stay."""
    with _store() as store:
        runs = _named(references, store)
        store.remove([run.number for run in runs])
    for run in runs:
        say(f"Removed {run.row.id} ({units.local_time(run.row.started_at)})")


@app.command("prune", epilog="Example: sigmascope runs prune --most 1000")
def prune(
    most: Annotated[int | None, typer.Option("--most", min=0, help="Keep this many runs.")] = None,
    most_bytes: Annotated[
        str | None, typer.Option("--most_bytes", help="Keep records of this size in all, such as 500MB.")
    ] = None,
) -> None:
    """Drop the oldest runs, but for those with a tag, and give the space back."""
    from sigmascope.history.store import MOST_BYTES, MOST_RUNS

    nbytes = MOST_BYTES if most_bytes is None else units.parse_size(most_bytes, "--most_bytes")
    with _store() as store:
        removed = store.prune(MOST_RUNS if most is None else most, nbytes)
        left = store.count()
    say(f"Dropped {units.counted(removed, 'run')}; {left:,} {'is' if left == 1 else 'are'} left")


@app.command("export", epilog="Example: sigmascope runs export old.jsonl --until 2026-01-01")
@option_groups
def export(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A file that ends in .jsonl, .csv or .parquet.", show_default=False
        ),
    ],
    chosen: Chosen,
    references: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]", help="Which; without any, all that the options leave.", show_default=False
        ),
    ] = None,
    rows: Annotated[
        TableName,
        typer.Option(
            "--table",
            help="What a row of .csv or .parquet is: one of the runs, of their stages or of their steps.",
        ),
    ] = "runs",
) -> None:
    """Write runs to a file: all of them with tags and notes in .jsonl, for runs import; a table in .csv or .parquet."""
    from sigmascope.history.exchange import LINES, write_runs
    from sigmascope.history.tabular import write_table, writer_of

    if path.suffix != LINES:
        writer_of(path)
    elif rows != "runs":
        raise ConfigError(f"{path} is no table.", hint=f"Name it {rows}.csv or {rows}.parquet.")
    filters = chosen.filters()
    require_writable(path)
    with _store() as store:
        runs = _named(references, store) if references else store.runs(filters)[::-1]
        if path.suffix == LINES:
            write_runs(store, runs, path)
            count = len(runs)
        else:
            count = write_table(store, runs, path, rows)
    say(f"{units.counted(count, rows.removesuffix('s'))} in {path}")


@app.command("merge", epilog="Example: sigmascope runs merge rank*.json --output training.json")
def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The run of each process: a file, latest, @tag, or the beginning of an id.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file for the run of all.", show_default=False)
    ],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            help="What to call each, in order; rank 0, rank 1, … as they say, by default. Repeatable.",
        ),
    ] = None,
) -> None:
    """Make one run of those of several processes: the ranks of a training, or the machines of a generation."""
    from sigmascope.analysis.diagnostics import diagnose
    from sigmascope.analysis.rules_time import slowest_rank
    from sigmascope.cli.compare import load_runs
    from sigmascope.records.merge import machines_of, merge_runs, ranks_of
    from sigmascope.records.serialization import save_run

    runs = [
        run for path in paths for run in load_runs([path])
    ]  # one that is given twice stays two, and is refused
    merged = merge_runs(runs, name)
    merged = replace(merged, findings=diagnose(merged))
    require_writable(output)
    save_run(merged, output)
    say(f"{units.counted(len(runs), 'process', 'processes')} in {output}")
    for finding in merged.findings:
        if finding.id == "ranks.missing":
            say(finding.message)
    ranks = ranks_of(merged)
    slowest, machines = slowest_rank(ranks), machines_of(ranks)
    if slowest is not None:
        slow, fast = (
            f"{name} on {machines[name]}" if name in machines else name
            for name in (slowest.name, slowest.fastest)
        )
        say(
            f"Slowest: {slow}, {units.seconds(slowest.step_seconds)} a step; "
            f"the fastest, {fast}, {units.seconds(slowest.fastest_seconds)}"
        )


@app.command("import", epilog="Example: sigmascope runs import old.jsonl")
def import_runs(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]",
            help="Files of runs export, of Run.save or sigmascope watch, or folders of them. "
            "Without any, the runs that the store did not take when they ended.",
            show_default=False,
        ),
    ] = None,
    new_id: Annotated[
        bool, typer.Option("--new_id", help="Give each run an id of its own, beside the run that has its id.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take runs of files into the store. A run that is there already is not taken in twice.

    The exit code is 1 if a file or run was not taken in.
    """
    from sigmascope.history.exchange import take_in
    from sigmascope.history.keeper import unkept_files

    waiting = [] if paths else unkept_files()
    with _store(create=True) as store, progress_bar("Taking in") as show:
        so_far = 0

        def progress(done: int, total: int, what: str) -> None:
            nonlocal so_far
            so_far = done
            show(done, total, what)

        try:
            done = take_in(store, paths or waiting, new_ids=new_id, progress=progress)
        except KeyboardInterrupt:
            rest = "" if new_id else "; the same command takes in the rest"
            raise KeyboardInterrupt(
                f"Stopped by Ctrl-C. {units.counted(so_far, 'run')} taken in so far{rest}."
            ) from None
    for file in set(waiting) & set(done.files):
        file.unlink(missing_ok=True)
    if as_json:
        print_json({"added": list(done.added), "known": list(done.known), "refused": done.refused})
    else:
        _print_taken(done)
    if done.refused:
        raise typer.Exit(1)


def _print_taken(done: "TakenIn") -> None:
    known = f"; {units.counted(len(done.known), 'was', 'were')} there already" if done.known else ""
    say(f"{units.counted(len(done.added), 'run')} taken in{known}")
    for name, reason in done.refused.items():
        say(f"Not taken in: {reason if name in reason else f'{name}: {reason}'}", err=True)


@app.command(
    "query", epilog='Example: sigmascope runs query "SELECT pipeline, count(*) FROM runs GROUP BY pipeline"'
)
def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A query. It can only read.", show_default=False)],
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Show this many rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask the store in SQL. The page on history describes the tables."""
    with _store() as store:
        names, rows = store.query(sql, limit=limit)
    if as_json:
        keys = _keys(names)
        print_json([{key: _json_value(value) for key, value in zip(keys, row, strict=True)} for row in rows])
        return
    console = Console()
    shown = [[plain(_shown(value)) for value in row] for row in rows]
    made = table(*names, left=names, rows=shown)
    made.columns[0].no_wrap = True
    if console.measure(made, options=console.options.update(max_width=_WIDEST)).maximum <= console.width:
        console.print(made)
    elif len(names) > _MOST_COLUMNS:
        for row in shown:
            console.print(facts(zip(names, row, strict=True)), "")
    else:
        for column in made.columns:
            column.no_wrap, column.overflow = False, "fold"
        console.print(made)


def _keys(names: Sequence[str]) -> list[str]:
    """A key for each column; the second of a name gets a number, so that none is lost."""
    keys: list[str] = []
    for name in names:
        free = (f"{name}_{number}" if number > 1 else name for number in itertools.count(1))
        keys.append(next(key for key in free if key not in keys))
    return keys


def _shown(value: object) -> object:
    return units.UNKNOWN if value is None else f"{len(value):,} bytes" if isinstance(value, bytes) else value


def _json_value(value: object) -> object:
    return (
        value
        if isinstance(value, str | int | float | None)
        else value.hex()
        if isinstance(value, bytes)
        else str(value)
    )
