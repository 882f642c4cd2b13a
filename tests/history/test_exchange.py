import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.history.kept_runs import kept_run
from tests.records.serialization.test_round_trip import Recipe, made, runs, texts

from sigmascope.errors import RecordError, StoreError
from sigmascope.history.exchange import Exchanged, from_line, line_of, take_in, write_runs
from sigmascope.history.location import SQLITE
from sigmascope.history.store import Store, open_store
from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run

tags = st.lists(st.from_regex(r"[a-z0-9._-]{1,20}", fullmatch=True), max_size=2).map(tuple)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(runs, tags, st.lists(texts, max_size=2).map(tuple), texts.filter(bool))
def test_nothing_of_a_run_is_lost_on_a_line(
    drawn: Recipe, tags: tuple[str, ...], notes: tuple[str, ...], source: str
) -> None:
    exchanged = Exchanged(made(drawn), source, tags, notes)
    line = line_of(exchanged)
    assert "\n" not in line
    assert repr(from_line(line, "x")) == repr(exchanged)  # repr, since NaN differs from itself


def test_from_one_store_to_another(store: Store, tmp_path: Path) -> None:
    odd = {"odd": [float("inf"), -0.0, {"$float": 1}, "\ud800"]}
    store.add(kept_run(id="a", facts=odd), "watch", tags=["x"], notes=["one", "two"])
    store.add(kept_run(id="b", loras={"unet.y": {}}), "bench")
    write_runs(store, store.runs(), tmp_path / "runs.jsonl")
    with open_store(str(f"sqlite:///{tmp_path}/other.db")) as other:
        done = take_in(other, [tmp_path / "runs.jsonl"])
        assert (set(done.added), done.known, done.refused) == ({"a", "b"}, (), {})

        def told(of: Store) -> dict[str, tuple[object, ...]]:
            return {
                run.row.id: (run.row, run.source, run.tags, run.notes, run.placed_at, of.record(run.number))
                for run in of.runs()
            }

        assert told(other) == told(store)
        assert take_in(other, [tmp_path / "runs.jsonl"]).known == done.added


def test_a_run_of_a_wrong_clock_stands_in_another_store_where_it_stood(store: Store, tmp_path: Path) -> None:
    for id, year in (("a", 2026), ("b", 2099), ("c", 1970)):
        store.add(kept_run(id=id, started_at=f"{year}-03-01T00:00:00+00:00"), "watch")
    write_runs(store, store.runs(), tmp_path / "runs.jsonl")
    with open_store(f"{SQLITE}{tmp_path / 'other.db'}") as other:
        take_in(other, [tmp_path / "runs.jsonl"])
        assert [run.row.id for run in other.runs()] == ["c", "b", "a"]


@pytest.mark.parametrize("place", [None, "", "soon", 7, [], "9999-12-31T23:59:59.999999-23:00"])
def test_a_place_that_is_none_is_not_taken_over(store: Store, tmp_path: Path, place: object) -> None:
    line = json.loads(line_of(Exchanged(kept_run(id="a"), "watch")))
    line["kept"]["placed_at"] = place
    (tmp_path / "runs.jsonl").write_text(json.dumps(line))
    assert take_in(store, [tmp_path / "runs.jsonl"]).added == ("a",)
    assert store.runs()[0].placed_at == "2026-03-01T12:00:10.000000+00:00"


def test_an_import_that_is_broken_off_is_gone_on_with(store: Store, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("\n".join(line_of(Exchanged(kept_run(), "x")) for _ in range(5)))

    def break_off(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_in(store, [tmp_path / "runs.jsonl"], progress=break_off)
    assert store.count() == 2
    done = take_in(store, [tmp_path / "runs.jsonl"])
    assert (len(done.added), len(done.known)) == (3, 2)


def test_a_file_of_a_watch_is_taken_in(store: Store, tmp_path: Path) -> None:
    run = kept_run()
    run.save(tmp_path / "run.json")
    assert take_in(store, [tmp_path]).added == (run.id,)
    [kept] = store.runs()
    assert (kept.source, store.record(kept.number)) == ("import", run)


def test_a_line_alone_can_be_shown(store: Store, tmp_path: Path) -> None:
    run = kept_run()
    store.add(run, "watch", tags=["x"])
    write_runs(store, store.runs(), tmp_path / "runs.jsonl")
    assert load_run(tmp_path / "runs.jsonl") == run


def test_what_cannot_be_taken_in_is_told_and_the_rest_is(store: Store, tmp_path: Path) -> None:
    store.add(kept_run(id="taken"), "watch")
    kept_run(id="taken", seconds=2.0).save(tmp_path / "1.json")
    (tmp_path / "2.json").write_text("{}")
    (tmp_path / "3.jsonl").write_text("nonsense\n")
    kept_run(id="good").save(tmp_path / "4.json")
    Run("times", "x", "2026-01-01T00:00:00", float("inf")).save(tmp_path / "5.json")
    done = take_in(store, [tmp_path])
    assert done.added == ("good",)
    assert done.files == (tmp_path / "4.json",)
    names = [f"{tmp_path / name}" for name in ("1.json: taken", "2.json", "3.jsonl", "5.json")]
    assert list(done.refused) == names


def test_a_new_id_lets_a_run_stand_beside_its_namesake(store: Store, tmp_path: Path) -> None:
    store.add(kept_run(id="taken"), "watch")
    kept_run(id="taken", seconds=2.0).save(tmp_path / "run.json")
    done = take_in(store, [tmp_path / "run.json"], new_ids=True)
    assert len(done.added) == 1
    assert {run.row.seconds for run in store.runs()} == {10.0, 2.0}


def test_a_store_that_is_taken_for_a_file_of_runs_is_told_how_to_export(store: Store, tmp_path: Path) -> None:
    with open_store(f"{SQLITE}{tmp_path / 'other.db'}") as other:
        other.add(kept_run(), "watch")
    done = take_in(store, [tmp_path / "other.db"])
    [reason] = done.refused.values()
    assert "is a store, not a file of runs" in reason
    assert f"SIGMASCOPE_STORE={tmp_path}/other.db sigmascope runs export runs.jsonl" in reason
    assert store.count() == 0


def test_a_file_that_is_not_there_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist"):
        take_in(store, [tmp_path / "none.jsonl"])
    [reason] = take_in(store, [tmp_path / f"{'x' * 300}.jsonl"]).refused.values()
    assert "cannot be read" in reason


def test_a_store_that_fails_is_no_matter_of_one_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_run().save(tmp_path / "run.json")

    def fail(*_: object, **__: object) -> None:
        raise StoreError("locked")

    monkeypatch.setattr(Store, "add", fail)
    with pytest.raises(StoreError, match="locked"):
        take_in(store, [tmp_path / "run.json"])
