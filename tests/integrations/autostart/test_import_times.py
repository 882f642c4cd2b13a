"""What a program's imports take, by package: planted packages that sleep, and programs that must not notice it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integrations.programs import plain, watched, write

import sigmascope
from sigmascope.analysis.breakdown import time_breakdown
from sigmascope.integrations.imports import FINDER, ImportTimes, _Telling
from sigmascope.integrations.watch_settings import Settings

SLEEP = 0.2
LOUD = """
import warnings
warnings.warn("loud is deprecated", DeprecationWarning, stacklevel=2)
"""
SCRIPT = f"""
import sys, time
import slow_outer
import loud
import importlib.util
print(type(importlib.util.find_spec("slow_later").loader).__name__)

def read_image():
    time.sleep({2 * SLEEP})

from sigmascope.monitor import stage  # stacks are looked at from here on
read_image()
with stage("generation"):
    time.sleep({SLEEP})
import slow_later
print(slow_later.__loader__.__class__.__name__, slow_later.__spec__.loader is slow_later.__loader__)
try:
    import broken
except ZeroDivisionError as error:
    import traceback
    traceback.print_exc()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports")
    write(folder, "script.py", SCRIPT)
    write(folder, "loud.py", LOUD)
    write(folder, "broken.py", "1 / 0")
    write(
        folder,
        "slow_outer/__init__.py",
        f"import time; time.sleep({SLEEP}); import slow_outer.part, slow_inner",
    )
    write(folder, "slow_outer/part.py", f"import time; time.sleep({SLEEP})")
    write(folder, "slow_inner.py", f"import time; time.sleep({SLEEP})")
    write(folder, "slow_later.py", f"import time; time.sleep({SLEEP})")
    return folder


@pytest.mark.slow
def test_each_package_has_its_own_time_and_the_rows_sum_to_the_whole(folder: Path) -> None:
    done = watched(["script.py"], folder, Settings(output="run.json", quiet="1", launched="1", stacks="1"))
    assert done.code == 0, done.err
    run = sigmascope.load_run(folder / "run.json")
    packages = run.facts["imports"]
    assert packages["slow_outer"] >= 2 * SLEEP  # with its own part
    assert packages["slow_inner"] >= SLEEP
    assert "slow_later" not in packages  # after the first stage
    rows = {row.label: row for row in time_breakdown(run)}
    assert rows["imports"].seconds >= 3 * SLEEP
    assert rows["before the first stage"].seconds >= 2 * SLEEP
    assert rows["before the first stage"].places[0].label == "read_image (script.py:9)"
    assert sum(row.seconds for row in rows.values()) == pytest.approx(run.seconds, rel=0.01)


@pytest.mark.slow
def test_the_program_notices_nothing(folder: Path) -> None:
    alone, under_watch = plain(["script.py"], folder), watched(["script.py"], folder)
    assert (under_watch.code, under_watch.out, under_watch.err) == (alone.code, alone.out, alone.err)
    assert "script.py:4: DeprecationWarning: loud" in alone.err


@pytest.fixture
def timed() -> Iterator[ImportTimes]:
    FINDER.time_imports()
    assert FINDER.times is not None
    yield FINDER.times
    FINDER.time_no_more()


def test_what_is_only_looked_up_keeps_its_loader(timed: ImportTimes) -> None:
    import importlib.util

    spec = importlib.util.find_spec("wsgiref")
    assert spec is not None
    assert not isinstance(spec.loader, _Telling)
    assert "wsgiref" not in timed.seconds_before(sys.maxsize)


def test_it_ends_with_the_first_import_after_the_first_stage(
    timed: ImportTimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("planted_one", "planted_two"):
        (tmp_path / f"{name}.py").write_text("")
    __import__("planted_one")
    timed.is_over = lambda: True
    __import__("planted_two")
    assert [package for package, *_ in timed.segments] == ["planted_one"]
    assert FINDER.times is None


def test_only_time_before_a_moment_counts() -> None:
    times = ImportTimes()
    times.segments = [("torch", 0, 2_000_000_000), ("diffusers", 2_000_000_000, 5_000_000_000), ("torch", 5_000_000_000, 6_000_000_000)]  # fmt: skip
    assert times.seconds_before(4_000_000_000) == {"torch": 2.0, "diffusers": 2.0}
    assert list(times.seconds_before(10**10).items()) == [("torch", 3.0), ("diffusers", 3.0)]
