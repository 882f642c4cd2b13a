"""What the record of a picture takes, which nobody may take for a leak of the pipeline."""

import gc
import tracemalloc
from typing import Any

import pytest
from tests.families import generate

import sigmascope
from sigmascope.analysis.memory import RECORD_BYTES


def left_in_use(pipeline: Any) -> list[int]:
    """Bytes that Python holds after each of four pictures."""
    readings = []
    for _ in range(4):
        generate(pipeline, "sd15", num_inference_steps=1)
        gc.collect()
        readings.append(tracemalloc.get_traced_memory()[0])
    return readings


@pytest.mark.slow
def test_a_picture_s_record_leaves_room_below_what_is_taken_for_a_leak(pipeline: Any) -> None:
    with sigmascope.watch(pipeline):  # what is imported for it is no record
        generate(pipeline, "sd15", num_inference_steps=1)
    tracemalloc.start()
    try:
        plain = left_in_use(pipeline)
        with sigmascope.watch(pipeline) as run:
            watched = left_in_use(pipeline)
    finally:
        tracemalloc.stop()
    picture = run.record().stages[-1]
    taken = [now[-1] - now[1] for now in (watched, plain)]
    stages = sum(1 for _ in picture.walk())
    assert stages > 4
    assert 0 < (taken[0] - taken[1]) / 2 < 0.8 * stages * RECORD_BYTES
