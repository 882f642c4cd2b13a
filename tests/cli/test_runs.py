"""`sigmascope runs`, and the other commands that take a run which was kept."""

import csv
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from tests.history.kept_runs import kept_run
from typer.testing import CliRunner, Result

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, RecordError, StoreError
from sigmascope.history.keeper import keep_all, unkept_files
from sigmascope.history.references import moment_of
from sigmascope.history.store import open_store
from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run


@pytest.fixture(autouse=True)
def file(store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return store_file


def invoked(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def did(*words: object) -> Result:
    done = invoked(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def kept(*runs: Run, tags: tuple[str, ...] = ()) -> None:
    with open_store() as store:
        for run in runs:
            store.add(run, "watch", tags=tags)


def on_day(day: int, name: str, **other: object) -> Run:
    return kept_run(id=name, started_at=f"2026-03-{day:02}T12:00:00+00:00", **other)  # type: ignore[arg-type]


def ids(*words: object) -> list[str]:
    return [run["id"] for run in json.loads(did("runs", *words, "--json").stdout)]


def test_alone_it_lists_the_newest_first() -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"), tags=("before",))
    lines = did("runs").stdout.splitlines()
    assert [line.split()[0] for line in lines if "@before" in line] == ["bbbb2222", "aaaa1111"]
    assert lines[3].split()[3:] == ["1024×768", "4", "10.00", "s", "20", "GB", "Flux", "@before"]
    assert lines[-1].startswith("2 runs in ")
    assert ids("list") == ids() == ["bbbb2222", "aaaa1111"]


def test_columns_of_one_name_are_told_apart_in_json() -> None:
    kept(on_day(1, "aaaa1111"))
    sql = "SELECT 1 AS a, 2 AS a, 3 AS a_2, 4 AS a"
    assert json.loads(did("runs", "query", sql, "--json").stdout) == [
        {"a": 1, "a_2": 2, "a_2_2": 3, "a_3": 4}
    ]


def test_a_wide_row_of_a_query_is_a_list() -> None:
    kept(on_day(1, "aaaa1111"))
    lines = did("runs", "query", "SELECT * FROM runs").stdout.splitlines()
    assert ["id", "aaaa1111"] in [line.split() for line in lines]
    assert ["pipeline", "FluxPipeline"] in [line.split() for line in lines]


def test_options_leave_some() -> None:
    kept(on_day(1, "a"), on_day(2, "b", pipeline="WanPipeline"), on_day(3, "c", error="ValueError"))
    assert ids("--pipeline", "wan") == ["b"]
    assert ids("--outcome", "failed") == ["c"]
    assert ids("--since", "2026-03-02T00:00+00:00", "--until", "2026-03-03T00:00+00:00") == ["b"]
    assert ids("-n", 1) == ["c"]
    assert "1 of 3 runs" in did("runs", "-n", 1).stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--outcome", "fine"),
        ("--since", "tomorrow"),
        ("--tag", "a b"),
        ("--until", "99999999w"),
        ("--since", "7d", "--until", "9d"),
        ("--since", "2026-03-01", "--until", "2026-03-01"),
    ],
)
def test_options_that_make_no_sense(words: tuple[str, ...]) -> None:
    kept(kept_run())
    assert isinstance(invoked("runs", "list", *words).exception, ConfigError)


def test_a_moment_may_be_so_long_ago() -> None:
    before = datetime.now(UTC)
    moment = datetime.fromisoformat(moment_of("90m", "--since"))
    assert before <= moment + timedelta(minutes=90) <= datetime.now(UTC)


def test_a_moment_may_be_a_day_or_before_all_days() -> None:
    begins = [datetime.fromisoformat(moment_of(day, "--since")) for day in ("yesterday", "today")]
    assert all(day.astimezone().time().isoformat() == "00:00:00" for day in begins)
    assert begins[0].astimezone().date() + timedelta(days=1) == begins[1].astimezone().date() == date.today()  # noqa: DTZ011 - the user's day
    assert moment_of("999999w", "--since") == "0001-01-01T00:00:00.000000+00:00"


def test_without_a_store_it_says_how_to_get_one() -> None:
    error = invoked("runs").exception
    assert isinstance(error, StoreError)
    assert "sigmascope watch" in (error.hint or "")


def test_show_tells_the_row_and_the_record() -> None:
    kept(on_day(1, "aaaa1111", loras={"unet.x": {"file": "style.safetensors"}}), tags=("before",))
    did("runs", "note", "latest", "new driver")
    shown = did("runs", "show", "aaaa").stdout
    for words in ("aaaa1111", "style.safetensors", "before", "new driver", "NVIDIA H200", "Run: a run"):
        assert words in shown
    [told] = json.loads(did("runs", "show", "aaaa", "--json").stdout)
    assert told["notes"] == ["new driver"]
    assert told["record"]["run"]["id"] == "aaaa1111"


def test_tags_come_and_go() -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"))
    did("runs", "tag", "before", "latest", "latest~1")
    assert ids("--tag", "@before") == ["bbbb2222", "aaaa1111"]
    did("runs", "tag", "before", "latest", "--remove")
    assert ids("--tag", "before") == ["aaaa1111"]


def test_removed_and_dropped_runs_are_gone() -> None:
    kept(*(on_day(day, f"run{day}") for day in range(1, 6)))
    did("runs", "rm", "run3")
    assert "Dropped 2 runs; 2 are left" in did("runs", "prune", "--most", 2).stdout
    assert ids() == ["run5", "run4"]


def test_runs_go_out_and_come_in_again(tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"), tags=("before",))
    assert "2 runs in" in did("runs", "export", tmp_path / "all.jsonl").stdout
    did("runs", "export", tmp_path / "one.jsonl", "latest~1")
    did("runs", "rm", "@before")
    assert "1 run taken in" in did("runs", "import", tmp_path / "one.jsonl").stdout
    assert "1 run taken in; 1 was there already" in did("runs", "import", tmp_path / "all.jsonl").stdout
    assert ids("--tag", "before") == ["bbbb2222", "aaaa1111"]


def test_runs_go_out_as_tables(tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"))
    assert "2 runs in" in did("runs", "export", tmp_path / "runs.csv").stdout
    with (tmp_path / "runs.csv").open(newline="") as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["aaaa1111", "bbbb2222"]
    assert "4 steps in" in did("runs", "export", "steps.csv", "latest", "--table", "steps").stdout
    assert "2 stages in" in did("runs", "export", "stages.parquet", "latest", "--table", "stages").stdout


@pytest.mark.parametrize("words", [("runs.txt",), ("runs.jsonl", "--table", "steps")])
def test_a_file_that_is_no_table_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111"))
    done = invoked("runs", "export", *words)
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / words[0]).exists()


def test_the_runs_of_several_processes_become_one_that_names_the_slowest(tmp_path: Path) -> None:
    for rank, seconds in enumerate((10.0, 14.0, 10.2)):
        on_day(1, f"rank-{rank}", seconds=seconds).save(tmp_path / f"rank{rank}.json")
    files = [tmp_path / f"rank{rank}.json" for rank in range(3)]
    told = did("runs", "merge", *files, "--output", tmp_path / "all.json").stdout
    assert "3 processes in" in told
    assert "Slowest: rank 1, 2.60 s a step; the fastest, rank 0, 1.80 s" in " ".join(told.split())
    merged = load_run(tmp_path / "all.json")
    assert [stage.name for stage in merged.stages] == ["rank 0", "rank 1", "rank 2"]
    assert {device.device for device in merged.peak().accelerators} == {
        f"cuda:0 (rank {rank})" for rank in range(3)
    }
    assert [finding.evidence["rank"] for finding in merged.findings if finding.id == "ranks.slow_rank"] == [
        "rank 1"
    ]
    assert "rank 1" in did("show", tmp_path / "all.json").stdout


def test_where_metrics_were_written_is_said(tmp_path: Path) -> None:
    on_day(1, "aaaa1111").save(tmp_path / "run.json")
    said = did("show", tmp_path / "run.json", "--prometheus", tmp_path / "runs.prom").stderr
    assert "The metrics are in" in " ".join(said.split())


def test_a_merge_says_which_machine_is_slow_and_which_rank_is_missing(tmp_path: Path) -> None:
    for rank, seconds in enumerate((10.0, 14.0)):
        group = {"rank": rank, "world_size": 3, "machine": f"node-{rank}"}
        run = on_day(1, f"rank-{rank}", seconds=seconds, facts={"group": group})
        run.save(tmp_path / f"{rank}.json")
    told = did("runs", "merge", tmp_path / "1.json", tmp_path / "0.json", "-o", tmp_path / "all.json").stdout
    assert "1 rank of 3 missing: 2." in told
    words = " ".join(told.split())
    assert "Slowest: rank 1 on node-1, 2.60 s a step; the fastest, rank 0 on node-0" in words


def test_processes_have_the_names_that_they_are_given(tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"))
    did(
        "runs",
        "merge",
        "latest",
        "latest~1",
        "--name",
        "node a",
        "--name",
        "node b",
        "-o",
        tmp_path / "all.json",
    )
    assert {stage.name for stage in load_run(tmp_path / "all.json").stages} == {"node a", "node b"}


@pytest.mark.parametrize("again", ["latest", "aaaa"])
def test_a_run_that_is_given_twice_is_not_merged_with_itself(again: str, tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111"))
    done = invoked("runs", "merge", "latest", again, "-o", tmp_path / "all.json")
    assert isinstance(done.exception, ConfigError)
    assert "'aaaa1111' is given twice" in str(done.exception)
    assert not (tmp_path / "all.json").exists()


def test_what_is_not_taken_in_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    done = invoked("runs", "import", tmp_path / "bad.json")
    assert done.exit_code == 1
    assert "not a run" in done.stderr


def test_an_import_without_files_takes_what_a_broken_store_did_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir()
    file.write_bytes(b"garbage" * 1000)
    keep_all([on_day(1, "aaaa1111")], "watch", print)
    file.unlink()
    assert len(unkept_files()) == 1
    assert "1 run taken in" in did("runs", "import").stdout
    assert unkept_files() == []
    assert ids() == ["aaaa1111"]
    assert "0 runs taken in" in did("runs", "import").stdout


def test_a_query_gives_a_table_or_json() -> None:
    kept(on_day(1, "a"), on_day(2, "b"))
    sql = "SELECT pipeline, count(*) AS runs FROM runs GROUP BY pipeline"
    assert json.loads(did("runs", "query", sql, "--json").stdout) == [{"pipeline": "FluxPipeline", "runs": 2}]
    assert "FluxPipeline" in did("runs", "query", sql).stdout
    assert isinstance(invoked("runs", "query", "DELETE FROM runs").exception, ConfigError)
    assert ids() == ["b", "a"]


def test_show_takes_a_run_that_was_kept() -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"))
    assert "Run: a run" in did("show", "latest~1").stdout
    assert len(json.loads(did("show", "aaaa", "bbbb", "--json").stdout)) == 2


def test_show_alone_takes_the_last_one_where_the_folder_holds_none(tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111"), on_day(2, "bbbb2222"))
    done = did("show")
    assert "bbbb2222" in done.stderr
    on_day(3, "here").save(tmp_path / "run.json")
    assert "run.json" in did("show").stderr


def test_a_file_comes_before_a_run_of_that_name(tmp_path: Path) -> None:
    kept(on_day(1, "aaaa1111", seconds=3.0))
    on_day(1, "other", seconds=9.0).save(tmp_path / "latest")
    [shown] = json.loads(did("show", "latest", "--json").stdout)
    assert shown["seconds"] == 9.0


@pytest.mark.parametrize("word", ["nothere", "nothere.json", "a/b"])
def test_what_is_neither_a_file_nor_kept_says_so(word: str) -> None:
    kept(kept_run())
    error = invoked("show", word).exception
    assert isinstance(error, RecordError)
    assert "does not exist" in error.message


def test_compare_alone_takes_the_last_run_and_the_last_like_it_before() -> None:
    kept(
        on_day(1, "first", seconds=10.0),
        on_day(2, "second", seconds=20.0),
        on_day(3, "other", seconds=5.0, size=(512, 512)),
        on_day(4, "newest", seconds=40.0),
    )
    done = did("compare")
    assert "2.00 × as long (20.00 s → 40.00 s)" in done.stdout
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [
        ["Before:", "second,"],
        ["Now:", "newest,"],
    ]
    assert "2.00 × as long (10.00 s → 20.00 s)" in did("compare", "second").stdout
    assert json.loads(did("compare", "--json").stdout)["comparisons"][0]["runs"] == [1, 1]


def test_compare_alone_needs_a_run_like_the_last() -> None:
    kept(on_day(1, "first", size=(512, 512)), on_day(2, "second"))
    error = invoked("compare").exception
    assert isinstance(error, StoreError)
    assert "No run like second" in error.message


def test_tags_are_the_sides_of_a_comparison_and_of_a_check() -> None:
    kept(*(on_day(day, f"old{day}", seconds=10.0 + day / 100) for day in range(1, 7)), tags=("before",))
    kept(*(on_day(day + 10, f"new{day}", seconds=30.0 + day / 100) for day in range(1, 7)), tags=("after",))
    assert "6 runs against 6" in did("compare", "@after", "--baseline", "@before").stdout
    assert invoked("check", "@after", "--baseline", "@before").exit_code == 1
    assert "6 runs against 6" in did("compare", "@before", "@after").stdout
