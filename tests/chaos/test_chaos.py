"""A fiftieth of the chaos, at a seed that does not change."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.__main__ import KINDS
from tests.chaos.tries import MB, Case, Kind, kill_after, try_all

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small_part(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows of the table, in a process of its own: what other tests have left in ours is none of its business."""
    command = [sys.executable, "-m", "tests.chaos", "--seed", "1", "--n", "0.02", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [*command, "--keep", str(tmp_path_factory.mktemp("kept"))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert ran.stdout, ran.stderr
    return {row["kind"]: row for row in json.loads(ran.stdout)["kinds"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_part_of_it_survives(kind: str, small_part: dict[str, Any]) -> None:
    row = small_part[kind]
    assert row["tried"] > 0
    assert row["failed"] == {}, [Path(kept, "failure.txt").read_text()[:4000] for kept in row["kept"]]
    assert row["survived"] == row["tried"]


def survives(_case: Case) -> str:
    return "well"


def raises(case: Case) -> str:
    Path("left.txt").write_text("what the try made")
    sys.stdout.write("what the try said")
    raise ValueError(f"case {case.number}")


def dies(_case: Case) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def hangs(_case: Case) -> str:
    time.sleep(60)
    return "never"


def swallows(_case: Case) -> str:
    return f"{len(bytearray(200 * MB))} bytes"


def tried(attempt: Any, tmp_path: Path, **more: Any) -> Any:
    kind = Kind("planted", "nothing", 4, attempt, **more)
    return try_all(kind, seed=3, scale=1, work=tmp_path / "work", keep=tmp_path / "kept")


def test_what_survives_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    outcome = tried(survives, tmp_path)
    assert (outcome.tried, dict(outcome.survived), outcome.failed) == (4, {"well": 4}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_try_is_kept_with_its_reason_its_output_and_how_to_repeat_it(tmp_path: Path) -> None:
    outcome = tried(raises, tmp_path)
    assert outcome.failed == {number: f"ValueError: case {number}" for number in range(4)}
    text = (tmp_path / "kept/planted-2/failure.txt").read_text()
    assert "python -m tests.chaos planted --seed 3 --case 2" in text
    assert "in raises" in text
    assert "what the try said" in text
    assert (tmp_path / "kept/planted-2/left.txt").read_text() == "what the try made"


@pytest.mark.parametrize(
    ("attempt", "limits", "reason"),
    [
        (dies, {}, "died of SIGKILL"),
        (hangs, {"seconds": 0.2}, "took more than 0.2 s"),
        (swallows, {"memory": 100 * MB}, "MemoryError: "),
    ],
)
def test_a_try_that_dies_hangs_or_swallows_memory_has_failed(
    attempt: Any, limits: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert set(tried(attempt, tmp_path, **limits).failed.values()) == {reason}


@pytest.mark.slow
def test_memory_within_the_limit_is_given(tmp_path: Path) -> None:
    assert tried(swallows, tmp_path, memory=300 * MB).failed == {}


@pytest.mark.slow
def test_a_seed_and_a_number_decide_what_is_random_whatever_ran_before(tmp_path: Path) -> None:
    kind = Kind("planted", "nothing", 5, lambda case: str(case.random.random()))
    runs = [
        try_all(kind, seed=3, scale=1, work=tmp_path / "work", keep=tmp_path, jobs=jobs) for jobs in (1, 3)
    ]
    again = try_all(kind, seed=3, scale=1, work=tmp_path / "work", keep=tmp_path, only=2)
    other = try_all(kind, seed=4, scale=1, work=tmp_path / "work", keep=tmp_path)
    assert runs[0].survived == runs[1].survived
    assert len(runs[0].survived) == 5
    assert set(again.survived) == {str(random.Random("3/planted/2").random())} < set(runs[0].survived)
    assert not set(other.survived) & set(runs[0].survived)


def test_work_is_killed_in_the_middle_or_has_ended(tmp_path: Path) -> None:
    def count() -> None:
        for number in range(1000):
            (tmp_path / str(number)).touch()
            time.sleep(0.01)

    assert kill_after(0.2, count)
    assert 0 < len(list(tmp_path.iterdir())) < 100
    assert not kill_after(10, lambda: None)
    with pytest.raises(AssertionError, match="failed before"):
        kill_after(10, lambda: 1 // 0)
