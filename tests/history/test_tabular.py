"""Tables of runs, read back by the readers of Python and of pyarrow."""

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
from tests.history.kept_runs import kept_run

from sigmascope.errors import ConfigError
from sigmascope.history.store import Store, open_store
from sigmascope.history.tabular import COLUMNS, TABLES, TableName, in_csv, write_table
from sigmascope.records.run import Run, Stage, Steps

DOCS = Path(__file__).parents[2] / "docs"
FORMULA = '=HYPERLINK("http://x","y")'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/runs.db") as opened:
        yield opened


def with_text(run: Run, text: str) -> Run:
    """The run with a text of somebody's as its name, and that of a stage."""
    steps = Steps((0.0, 0.5), (0.5, 0.25), (0.25, None), (7, 8), (), {}, (0.1, 0.2))
    return replace(run, name=text, stages=(*run.stages, Stage(text, 0.0, 1.0, steps=steps)))


def python_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("table", TABLES)
def test_csv_and_parquet_hold_the_same_by_all_readers(store: Store, tmp_path: Path, table: TableName) -> None:
    for number in range(3):
        store.add(
            with_text(kept_run(id=f"run{number}", seconds=10.0 + number), "Größe, \"x\"; 'y'"),
            "watch",
            tags=("a",),
        )
    runs = store.runs()
    counts = {write_table(store, runs, tmp_path / f"t{ending}", table) for ending in (".csv", ".parquet")}
    stored = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist()
    parsed = pyarrow.csv.read_csv(
        tmp_path / "t.csv",
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=pyarrow.parquet.read_schema(tmp_path / "t.parquet"), strings_can_be_null=True
        ),
    ).to_pylist()
    assert counts == {len(stored)} != {0}
    assert parsed == stored
    assert [{name: in_csv(cell) for name, cell in row.items()} for row in stored] == python_rows(
        tmp_path / "t.csv"
    )


def test_a_row_of_each_table_says_what_the_record_says(store: Store, tmp_path: Path) -> None:
    store.add(with_text(kept_run(id="abc", seconds=10.0), "own"), "watch", tags=("fast", "b"))
    made: dict[str, list[dict[str, Any]]] = {}
    for table in TABLES:
        write_table(store, store.runs(), tmp_path / "t.parquet", table)
        made[table] = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist()
    [run] = made["runs"]
    assert (run["run"], run["seconds"], run["width"], run["height"], run["steps"]) == (
        "abc",
        10.0,
        1024,
        768,
        4,
    )
    assert (run["peak_bytes"], run["tags"], run["source"]) == (20 << 30, "b fast", "watch")
    assert [row["path"] for row in made["stages"]] == ["generation", "generation/denoising", "own"]
    assert made["stages"][0]["peak_device"] == "cuda:0"
    own = [row for row in made["steps"] if row["path"] == "own"]
    assert [(row["stage"], row["step"], row["seconds"], row["device_seconds"]) for row in own] == [
        (3, 1, 0.5, 0.25),
        (3, 2, 0.25, None),
    ]
    assert [(row["cpu_seconds"], row["resident_bytes"], row["allocated_bytes"]) for row in own] == [
        (0.1, 7, None),
        (0.2, 8, None),
    ]


@pytest.mark.parametrize(
    "text", [FORMULA, "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "＠x", "|cmd", "%0A=1"]
)
def test_no_text_begins_as_a_formula_does(store: Store, tmp_path: Path, text: str) -> None:
    store.add(with_text(kept_run(), text), "watch")
    for table in TABLES:
        write_table(store, store.runs(), tmp_path / "t.csv", table)
        cells = [cell for row in python_rows(tmp_path / "t.csv") for cell in row.values()]
        assert not [cell for cell in cells if cell.strip().startswith(tuple("=+-@|%＝＠"))]
        assert table == "steps" or any(cell.startswith("'") for cell in cells)


def test_a_number_below_zero_stays_a_number() -> None:
    assert in_csv(-1.5) == "-1.5"


def test_half_a_pair_of_surrogates_is_no_reason_to_fail(store: Store, tmp_path: Path) -> None:
    store.add(with_text(kept_run(), "a\ud800b"), "watch")
    for ending in (".csv", ".parquet"):
        assert write_table(store, store.runs(), tmp_path / f"t{ending}", "stages") == 3


def test_prompts_and_words_of_exceptions_are_in_no_table(store: Store, tmp_path: Path) -> None:
    run = kept_run(prompt="a red fox", error="ValueError: cannot draw a red fox")
    store.add(run, "watch")
    for table in TABLES:
        write_table(store, store.runs(), tmp_path / "t.csv", table)
        assert "fox" not in (tmp_path / "t.csv").read_text(encoding="utf-8")


def test_only_the_owner_reads_a_table(store: Store, tmp_path: Path) -> None:
    write_table(store, [], tmp_path / "t.csv")
    assert (tmp_path / "t.csv").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "t.csv").read_text() == ",".join(column.name for column in COLUMNS["runs"]) + "\n"


def test_another_ending_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.csv nor \.parquet"):
        write_table(store, [], tmp_path / "runs.xlsx")


def test_without_pyarrow_parquet_is_refused_with_what_to_install(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError) as refused:
        write_table(store, [], tmp_path / "runs.parquet")
    assert "[parquet]" in str(refused.value.hint)


@pytest.mark.parametrize("table", TABLES)
def test_the_page_lists_the_columns(table: TableName) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    part = text.partition(f"### The table `{table}`")[2].partition("###")[0]
    named = re.findall(r"^\| `(\w+)` \| (.+) \|$", part, re.MULTILINE)
    assert named == [(column.name, column.holds) for column in COLUMNS[table]]
