"""Which files hold slow tests: those that say the word. `-m slow` imports no others: seconds, in each of its processes."""

from functools import cache
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests alone are asked for, leave out the files that cannot hold one."""
    is_test_file = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    only_slow: bool = config.option.markexpr == "slow"
    return True if only_slow and is_test_file and not says_slow(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a slow test in a file that does not say so: `-m slow` would never run it."""
    if item.get_closest_marker("slow") is not None and not says_slow(item.path):
        raise pytest.UsageError(
            f"{item.nodeid} is slow, and its file does not say the word: -m slow leaves it out"
        )


@cache
def says_slow(file: Path) -> bool:
    """Whether the word is in the file, as the marker's name or in that of a list of marked parameters."""
    return "slow" in file.read_text(encoding="utf-8").lower()
