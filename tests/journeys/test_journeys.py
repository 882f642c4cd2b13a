"""Every kind of recording on every surface: nothing fails, and each shows the figures that the recording must have."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.journeys.recordings import RECORDINGS, Recording
from tests.journeys.surfaces import SURFACES, Kept, Seen, Surface, served


def journeys(recordings: Sequence[Recording], surfaces: Sequence[Surface]) -> list[Any]:
    """Each recording on each surface, the recordings one after another."""
    return [
        pytest.param(recording, surface, id=f"{recording.name}: {surface.name}")
        for recording, surface in product(recordings, surfaces)
    ]


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recording], Kept]:
    """Make a recording once, while a server answers."""

    @cache
    def keep(recording: Recording) -> Kept:
        folder = tmp_path_factory.mktemp("journey")
        made, metrics = served(lambda: recording.make(folder))
        made.run.save(folder / "run.json")
        return Kept(made, folder / "run.json", metrics)

    return keep


@pytest.mark.parametrize(("recording", "surface"), journeys(RECORDINGS, SURFACES))
def test_a_journey(
    recording: Recording, surface: Surface, kept: Callable[[Recording], Kept], tmp_path: Path
) -> None:
    other = RECORDINGS[0] if recording is not RECORDINGS[0] else RECORDINGS[1]
    seen = surface.look(kept(recording), kept(other), tmp_path)
    assert any(seen.parts), "nothing is expected of it"
    for part in seen.parts:
        assert re.search(part, seen.text), f"{part!r} is not in {surface.name}"


def test_a_recording_or_a_surface_more_is_one_line(kept: Callable[[Recording], Kept], tmp_path: Path) -> None:
    """All of them are tried with a new row, which takes nothing but the row."""
    recording = Recording("another", RECORDINGS[-1].make)
    surface = Surface("another", lambda mine, other, folder: Seen(mine.run.name, ("own loop",)))
    many, more = len(RECORDINGS) * len(SURFACES), journeys((*RECORDINGS, recording), (*SURFACES, surface))
    assert len(more) == many + len(RECORDINGS) + len(SURFACES) + 1
    test_a_journey(recording, surface, kept, tmp_path)


def test_each_surface_of_the_package_is_tried() -> None:
    from sigmascope.reports.surfaces import surfaces

    tried = {surface.name.lower() for surface in SURFACES}
    assert {surface.name for surface in surfaces()} <= tried
