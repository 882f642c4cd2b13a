"""Runs as tables for other programs, in CSV or Parquet: a row a run, a stage, or a step. `docs/metrics.md` lists the columns.

Of prompts, and of the words of exceptions, nothing is in them.
"""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path
from sigmascope.history.store import KeptRun, Store
from sigmascope.installation import install_extra
from sigmascope.plain_text import in_one_line
from sigmascope.records.run import Run, Stage, device_seconds, stage_path

CSV: Final = ".csv"
PARQUET: Final = ".parquet"
TableName = Literal["runs", "stages", "steps"]
TABLES: Final[tuple[TableName, ...]] = ("runs", "stages", "steps")
Kind = Literal["text", "integer", "number", "truth"]
Cell = str | int | float | bool | None
_ROWS_AT_ONCE: Final = 10_000
_FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "|", "%")
"""How a text begins that a spreadsheet may take for a formula."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: With its unit: seconds, bytes.
        kind: Of its cells; each may be empty, which is unknown.
        holds: What is in it.
    """

    name: str
    kind: Kind
    holds: str


_RUN: Final = Column("run", "text", "the run's id")
COLUMNS: Final[dict[TableName, tuple[Column, ...]]] = {
    "runs": (
        _RUN,
        Column("name", "text", "what it is called"),
        Column("started_at", "text", "ISO 8601 in UTC"),
        Column("source", "text", "what kept it"),
        Column("outcome", "text", "`ok`, `failed`, `out of memory` or `interrupted`"),
        Column("seconds", "number", "the whole run"),
        Column("generations", "integer", "how many it made"),
        Column(
            "generation_seconds", "number", "the median generation, by the device's clock where that was read"
        ),
        Column("pipeline", "text", "its class"),
        Column("model", "text", "where it was loaded from"),
        Column("loras", "text", "files, separated by `; `"),
        Column("recipe", "text", "a digest of the request"),
        Column("device", "text", "such as `cuda:0`"),
        Column("hardware", "text", "its name"),
        Column("width", "integer", "pixels"),
        Column("height", "integer", "pixels"),
        Column("num_frames", "integer", "of a video"),
        Column("batch_size", "integer", "made at once"),
        Column("steps", "integer", "denoising steps of a generation"),
        Column("peak_bytes", "integer", "highest memory of the busiest device, else of the process"),
        Column("version", "text", "of Sigmascope"),
        Column("tags", "text", "separated by spaces"),
    ),
    "stages": (
        _RUN,
        Column("stage", "integer", "its number in the run, from 1"),
        Column("path", "text", "its name after those of the stages around it: `generation/denoising`"),
        Column("started_seconds", "number", "since the run began"),
        Column("seconds", "number", "on the host"),
        Column("device_seconds", "number", "on the accelerator"),
        Column("succeeded", "truth", "whether nothing was raised"),
        Column("error", "text", "the type of what was raised"),
        Column("steps", "integer", "how many steps it has of its own"),
        Column("peak_resident_bytes", "integer", "highest resident memory of the process"),
        Column("peak_device", "text", "the device that took most"),
        Column("peak_allocated_bytes", "integer", "highest bytes that PyTorch gave out there"),
        Column("peak_reserved_bytes", "integer", "highest bytes that PyTorch held there"),
    ),
    "steps": (
        _RUN,
        Column("stage", "integer", "the stage's number in the run"),
        Column("path", "text", "of the stage"),
        Column("step", "integer", "its number in the stage, from 1"),
        Column("started_seconds", "number", "since the stage began"),
        Column("seconds", "number", "on the host"),
        Column("device_seconds", "number", "on the accelerator"),
        Column("cpu_seconds", "number", "processor time of the process"),
        Column("resident_bytes", "integer", "of the process, at its end"),
        Column("allocated_bytes", "integer", "on the device, at its end"),
    ),
}
"""The columns of each table, in order. A list of programs reads them: columns are added at the end."""


def write_table(
    store: Store, runs: Sequence[KeptRun], path: str | os.PathLike[str], table: TableName = "runs"
) -> int:
    """Write a table, whole or not at all; only its owner can read it (mode 0600).

    In CSV a text that a spreadsheet could take for a formula gets an apostrophe before it.

    Args:
        store: Where their records are, of which one at a time is read.
        runs: Which.
        path: A file that ends in .csv or .parquet.
        table: Which one.

    Returns:
        How many rows.

    Raises:
        ConfigError: The file ends in something else, or the package for Parquet is not installed.
        WriteError: The file cannot be written. What was there before stays.
        StoreError: A record is damaged.
    """
    write = writer_of(Path(path))
    rows = (
        row
        for kept in runs
        for row in ([_run_row(kept)] if table == "runs" else rows_of(store.record(kept.number), table))
    )
    with atomic_path(path, private=True) as temporary:
        return write(rows, temporary, COLUMNS[table])


Writer = Callable[[Iterator[tuple[Cell, ...]], Path, tuple[Column, ...]], int]


def writer_of(path: Path) -> Writer:
    """What writes a file of that ending.

    Raises:
        ConfigError: As for `write_table`.
    """
    if path.suffix == CSV:
        return _write_csv
    if path.suffix != PARQUET:
        raise ConfigError(
            f"{path} ends in neither {CSV} nor {PARQUET}.",
            hint=f"Name it runs{CSV}, for example; sigmascope runs export takes .jsonl, too.",
        )
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Parquet needs the package pyarrow.", hint=f"Install it with: {install_extra('parquet')}"
        ) from None
    return _write_parquet


def _run_row(kept: KeptRun) -> tuple[Cell, ...]:
    told = {
        **kept.row.columns(),
        "run": kept.row.id,
        "source": kept.source,
        "loras": "; ".join(kept.row.loras) or None,
        "tags": " ".join(kept.tags) or None,
    }
    return tuple(told[column.name] for column in COLUMNS["runs"])


def rows_of(run: Run, table: TableName) -> Iterator[tuple[Cell, ...]]:
    """The rows that a run has in the table of stages or that of steps, in the order of the columns."""
    cells_of = _stage_row if table == "stages" else _step_rows
    for number, (path, stage) in enumerate(_stages(run.stages, ""), 1):
        for cells in cells_of(stage):
            yield (run.id, number, path, *cells)


def _stages(stages: Iterable[Stage], around: str) -> Iterator[tuple[str, Stage]]:
    for stage in stages:
        own = stage_path(stage.name)
        path = f"{around}/{own}" if around else own
        yield in_one_line(path), stage
        yield from _stages(stage.children, path)


def _stage_row(stage: Stage) -> Iterator[tuple[Cell, ...]]:
    peak = stage.peak
    device = None if peak is None else peak.busiest_device()
    highest = None if peak is None or device is None else peak.accelerator(device)
    error = None if stage.error is None else stage.error.partition(":")[0].partition(" ")[0]
    yield (
        stage.started_seconds,
        stage.seconds,
        device_seconds(stage),
        stage.success,
        error if stage.exception_details is None else stage.exception_details.type,
        len(stage.steps),
        None if peak is None else peak.rss_bytes,
        device,
        None if highest is None else highest.allocated_bytes,
        None if highest is None else highest.reserved_bytes,
    )


def _step_rows(stage: Stage) -> Iterator[tuple[Cell, ...]]:
    steps = stage.steps
    columns = (steps.gpu_seconds, steps.cpu_seconds, steps.rss_bytes, steps.allocated_bytes)
    for index, (started, seconds) in enumerate(zip(steps.started, steps.seconds, strict=True)):
        yield (index + 1, started, seconds, *(column[index] if column else None for column in columns))


def _write_csv(rows: Iterator[tuple[Cell, ...]], path: Path, columns: tuple[Column, ...]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="", errors="replace") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in columns])
        for count, row in enumerate(rows, 1):  # noqa: B007 - the last number is the answer
            writer.writerow([in_csv(cell) for cell in row])
    return count


def in_csv(cell: Cell) -> str:
    """A cell as CSV has it: an unknown is empty, and no text is a formula."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if not isinstance(cell, str):
        return repr(cell)
    return f"'{cell}" if cell.lstrip().startswith(_FORMULAS) or cell.startswith(_FORMULAS) else cell


def _write_parquet(rows: Iterator[tuple[Cell, ...]], path: Path, columns: tuple[Column, ...]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds: dict[Kind, Any] = {
        "text": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
        "truth": pa.bool_(),
    }
    schema = pa.schema(
        [
            pa.field(column.name, kinds[column.kind], metadata={"description": column.holds})
            for column in columns
        ]
    )
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            cells = zip(*batch, strict=True)
            arrays = [
                pa.array([_storable(cell) for cell in column], field.type)
                for column, field in zip(cells, schema, strict=True)
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            count += len(batch)
    return count


def _storable(cell: Cell) -> Cell:
    """A text without halves of surrogate pairs; a number that 64 bits do not hold is unknown."""
    if isinstance(cell, str):
        with suppress(UnicodeEncodeError):
            cell.encode()
            return cell
        return cell.encode("utf-8", "replace").decode()
    return None if isinstance(cell, int) and not -(2**63) <= cell < 2**63 else cell
