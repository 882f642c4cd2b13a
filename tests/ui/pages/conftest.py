"""The app on a store of a few runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.history.kept_runs import kept_run
from tests.ui.conftest import HOST

from sigmascope.cli.ui import own_parts
from sigmascope.history.location import SQLITE
from sigmascope.history.store import Store, open_store
from sigmascope.ui.app import make_app

HTML = {"accept": "text/html"}
"""What a browser asks for."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of the store, which is not there yet."""
    return f"{SQLITE}{tmp_path / 'runs.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def browser(url: str) -> Iterator[TestClient]:
    """Asks as a browser does."""
    with TestClient(make_app(own_parts(url, "hash")), base_url=HOST, headers=HTML) as client:
        yield client


@pytest.fixture
def three(store: Store) -> list[int]:
    """Three runs, the oldest first: their numbers. The last two are alike, and one failed."""
    store.add(
        kept_run(id="aaaa1111", started_at="2026-03-01T00:00:00+00:00", error="ValueError: no"), "watch"
    )
    store.add(
        kept_run(id="bbbb2222", started_at="2026-03-02T00:00:00+00:00", seconds=10.0),
        "watch",
        tags=["before"],
        notes=["new driver"],
    )
    store.add(kept_run(id="cccc3333", started_at="2026-03-03T00:00:00+00:00", seconds=20.0), "bench")
    return [run.number for run in reversed(store.runs())]
