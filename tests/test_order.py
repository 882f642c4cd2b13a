from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.order import LONGEST, pytest_collection_modifyitems

ROOT = Path(__file__).parents[1]


def test_the_longest_files_are_there() -> None:
    assert [file for file in LONGEST if not (ROOT / file).is_file()] == []


def test_the_longest_files_come_first_then_those_of_many_tests_and_each_stays_together() -> None:
    names = ["tests/a.py::1", "tests/b.py::1", "tests/b.py::2", f"{LONGEST[1]}::1", f"{LONGEST[0]}::1"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    alone: Any = SimpleNamespace()
    pytest_collection_modifyitems(alone, items)
    assert [item.nodeid for item in items] == names
    worker: Any = SimpleNamespace(workerinput={})
    pytest_collection_modifyitems(worker, items)
    assert [item.nodeid for item in items] == [names[4], names[3], names[1], names[2], names[0]]
