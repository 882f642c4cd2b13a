"""Faults happen where they are planted, in our own calls alone, and are gone afterwards."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.chaos.planting import Fault, Point, counted, foreign_points, own_points, planted

from sigmascope import files, monitor
from sigmascope.errors import WriteError
from sigmascope.files import atomic_path, require_writable, temporary_name
from sigmascope.lbm.training.checkpoints import CheckpointFolder

FSYNC = Point("os", "fsync")
CHECKED = Point("sigmascope.files", "_checked_target")


def write(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("whole")


def failing(point: Point, at: int, *, lasts: bool = False) -> Fault:
    return Fault(point, at, lambda _: OSError(5, "planted"), lasts)


def test_the_call_of_that_number_raises_and_no_other(tmp_path: Path) -> None:
    fault = failing(FSYNC, 3)
    with planted([fault]):
        write(tmp_path / "first")
        with pytest.raises(WriteError, match="planted"):
            write(tmp_path / "second")
        write(tmp_path / "third")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["first", "third"]
    assert len(fault.raised) == 1


def test_a_fault_that_lasts_raises_in_every_call_after_it(tmp_path: Path) -> None:
    fault = failing(CHECKED, 2, lasts=True)
    with planted([fault]):
        require_writable(tmp_path / "first")
        for name in ("second", "third"):
            with pytest.raises(OSError, match="planted"):
                require_writable(tmp_path / name)


def test_what_others_call_does_not_fail() -> None:
    with planted([failing(Point("json", "dumps"), 1, lasts=True)]):
        assert json.dumps([1]) == "[1]"


def test_what_is_told_to_ignore_refusals_does_nothing_where_it_is_refused(tmp_path: Path) -> None:
    """`write_state` removes what it left with `rmtree(…, ignore_errors=True)`, which raises no OSError."""
    there = tmp_path / temporary_name(tmp_path / "checkpoint-000001")
    there.mkdir()
    fault = failing(Point("shutil", "rmtree"), 1)
    with planted([fault]), CheckpointFolder(tmp_path).locked():
        pass
    assert len(fault.raised) == 1
    assert there.is_dir()


def test_everything_is_as_it_was_afterwards() -> None:
    points = [*own_points("files"), *foreign_points()]
    before = {point: vars(owner).get(name) for point in points for owner, name in [point.owner()]}
    with planted([failing(point, 1) for point in points]):
        assert files._checked_target is not before[CHECKED]
    assert {point: vars(owner).get(name) for point in points for owner, name in [point.owner()]} == before


def test_a_module_that_is_imported_meanwhile_keeps_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ModuleType("sigmascope.late")
    before = files._checked_target
    with planted([failing(CHECKED, 1)]):
        monkeypatch.setitem(sys.modules, late.__name__, late)
        vars(late)["checked"] = files._checked_target  # as `from sigmascope.files import …` does
    assert vars(late)["checked"] is before


def test_calls_are_counted(tmp_path: Path) -> None:
    calls = counted(lambda: write(tmp_path / "file"), [FSYNC, CHECKED, Point("os", "rename")])
    assert calls == {FSYNC: 2, CHECKED: 1}  # the file, and its folder


def test_functions_and_methods_of_a_package_are_known() -> None:
    assert monitor.__name__ == "sigmascope.monitor"  # what is not loaded is not known
    names = {str(point) for point in own_points("monitor.guard", "files")}
    assert {"files.atomic_path", "monitor.guard.Guard.read"} <= names
    assert not [name for name in names if name.startswith(("monitor.recorder", "files.suppress"))]
