"""A store of the test's own, in which runs are kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sigmascope.history.store import Store, open_store


@pytest.fixture
def file(store_file: Path) -> Path:
    return store_file


@pytest.fixture
def store(file: Path) -> Iterator[Store]:
    with open_store() as opened:
        yield opened
