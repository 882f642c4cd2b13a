import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sigmascope
from sigmascope.errors import NewerSchemaError, RecordError
from sigmascope.records import Run, Stage, Steps, load_run, run_to_json

RUN = Run(
    "01J9",
    "relight",
    "2026-11-20T10:00:00+00:00",
    3.0,
    stages=(Stage("denoising", 0.5, 2.0, steps=Steps(started=(0.0, 1.0), seconds=(1.0, 1.0))),),
)


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def document() -> dict[str, Any]:
    return json.loads(run_to_json(RUN))  # type: ignore[no-any-return]


def test_a_saved_run_is_loaded_as_it_was(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.json")
    assert sigmascope.load_run(tmp_path / "run.json") == RUN


def test_a_run_can_be_saved_to_a_path_in_text(tmp_path: Path) -> None:
    RUN.save(str(tmp_path / "run.json"))
    assert load_run(str(tmp_path / "run.json")) == RUN


def test_the_file_says_its_schema(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 2


def test_saving_makes_the_folder(tmp_path: Path) -> None:
    RUN.save(tmp_path / "missing" / "run.json")
    assert load_run(tmp_path / "missing" / "run.json") == RUN


def test_a_fact_that_json_lacks_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.json")
    odd = replace(RUN, stages=(replace(RUN.stages[0], facts={"where": {"is": {1, 2}}}),))
    with pytest.raises(TypeError, match=r"run\.stages\[0\]\.facts\.where\.is is of type set"):
        odd.save(tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == RUN


def test_a_fact_with_a_key_that_is_no_text_is_named() -> None:
    with pytest.raises(TypeError, match=r"run\.facts\.outer has a key of type int"):
        run_to_json(replace(RUN, facts={"outer": {1: "x"}}))


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = written(tmp_path / "future.json", {"schema": 7, "run": {"shape": "unheard of"}})
    with pytest.raises(NewerSchemaError, match=r"future\.json: has schema 7.*up to 3.*Upgrade"):
        load_run(path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_the_place(tmp_path: Path, share: float) -> None:
    text = run_to_json(RUN)
    (tmp_path / "cut.json").write_text(text[: int(len(text) * share)])
    with pytest.raises(RecordError, match=r"cut\.json: is not whole JSON: .* at line 1, column \d+"):
        load_run(tmp_path / "cut.json")


@pytest.mark.parametrize("other", [[], {}, 3, None, {"schema": 2}, {"run": {}}, {"images": [], "schema": 2}])
def test_json_that_is_no_run_is_refused(tmp_path: Path, other: object) -> None:
    with pytest.raises(RecordError, match="not a run of Sigmascope"):
        load_run(written(tmp_path / "other.json", other))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\x80\x02}q\x00.", "is not JSON: it is no text in UTF-8"),
        (b'{"schema', "JSON: Unterminated string starting at line 1, column 2"),
        (b'{"schema": 2, "run": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema": 2, "run": {"seconds": {"$float": "huge"}}}', "not the name of a float"),
        (b'{"schema": 2, "run": {"seconds": {"$float": [1]}}}', "not the name of a float"),
        (b'{"schema": 2, "run": {"seconds": ' + b"1" * 5000 + b"}}", "is not JSON"),
    ],
)
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(RecordError, match=message):
        load_run(tmp_path / "x.json")


@pytest.mark.parametrize("schema", ["2", 2.0, True, 1, 0, -1, None])
def test_a_schema_that_never_was_is_refused(tmp_path: Path, schema: object) -> None:
    with pytest.raises(RecordError, match=r"is damaged: its schema is .*, not 2 to 3"):
        load_run(written(tmp_path / "x.json", {"schema": schema, "run": {}}))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"seconds": "3.0"}, r"run\.seconds"),
        ({"seconds": True}, r"run\.seconds"),
        ({"complete": 1}, r"run\.complete"),
        ({"id": 5}, r"run\.id"),
        ({"stages": [{"name": "denoising"}]}, r"run\.stages\[0\]\.started_seconds"),
        ({"added_later": 1}, "added_later"),
        ({"findings": [{"id": "a", "severity": "dire", "message": "m"}]}, r"run\.findings\[0\]\.severity"),
        ({"findings": [{"id": "a", "severity": "info", "message": "m", "evidence": {"x": [1]}}]}, "evidence"),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, change: dict[str, Any], place: str) -> None:
    damaged = document()
    damaged["run"] |= change
    with pytest.raises(RecordError, match=place):
        load_run(written(tmp_path / "x.json", damaged))


@pytest.mark.parametrize("name", ["started", "rss_bytes"])
def test_step_columns_of_unequal_length_are_named(tmp_path: Path, name: str) -> None:
    damaged = document()
    damaged["run"]["stages"][0]["steps"][name] = [1]
    message = rf"the column {name} has 1 entries, seconds has 2 @ run\.stages\[0\]\.steps"
    with pytest.raises(RecordError, match=message):
        load_run(written(tmp_path / "x.json", damaged))


def test_a_missing_file_is_a_record_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nowhere\.json: does not exist"):
        load_run(tmp_path / "nowhere.json")


def test_a_folder_is_a_record_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        load_run(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "x\0"])
def test_a_path_that_no_file_can_have_is_a_record_error_with_a_hint(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError, match=r"cannot be read.*Check the path"):
        load_run(tmp_path / name)


def test_a_file_that_may_not_be_read_is_a_record_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RecordError, match=r"x\.json: cannot be read \(Permission denied\)\. Check the perm"):
        load_run(tmp_path / "x.json")
