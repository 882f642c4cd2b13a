"""A clock that the test turns, and a pipeline that has run."""

from functools import partial
from typing import Any

import pytest
from tests.pipeline.measured import Clock
from tests.pipeline.optimized import warm_pipeline

from sigmascope.monitor.recorder import Recorder
from sigmascope.pipeline import measure


def turned_clock(patch: pytest.MonkeyPatch) -> Clock:
    """A clock by which the runs of a measurement are timed as long as the patch holds."""
    made = Clock()
    patch.setattr(measure, "Recorder", partial(Recorder, sample_hz=None, clock=made))
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the runs of a measurement are timed by."""
    return turned_clock(monkeypatch)


@pytest.fixture
def sd15() -> Any:
    """One that all tests share, and leave as it was."""
    return warm_pipeline("sd15")
