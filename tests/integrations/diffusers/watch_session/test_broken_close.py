"""Ctrl-C at each place of a watch's end, or of a recorder's: what is ours is off, the record is closed, the host hears it."""

import contextlib
import inspect
import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.families import make_pipeline
from tests.families.weights import built
from tests.integrations.diffusers.marks import left_behind, marks
from tests.interruption import Interruption, Place
from tests.own_threads import own_threads

import sigmascope
from sigmascope.integrations.diffusers.watch_session import Session
from sigmascope.monitor import Recorder, current_recorder
from sigmascope.monitor.live_line import LiveLine
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.utilization import SAMPLER
from sigmascope.records.run import Run

OURS = ("integrations", "monitor")


@pytest.fixture
def pipeline() -> Any:
    """With few modules: all are looked at as each of hundreds of watches begins, and after each end."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    made = make_pipeline("sd15")
    small = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4}
    made.unet = built(
        lambda: UNet2DConditionModel(
            8, down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
            mid_block_type=None, cross_attention_dim=made.unet.config.cross_attention_dim, attention_head_dim=4,
            **small,
        )
    )  # fmt: skip
    made.vae = built(lambda: AutoencoderKL(**small))
    return made


Exit = Callable[[], object]
Begun = tuple[Exit, Callable[[], Run]]


def a_watch(pipeline: Any) -> Begun:
    """Of a denoiser whose denoising nobody says is over, with all threads of ours."""
    watch = sigmascope.watch(pipeline, sample_hz=10.0, stacks=True)
    watch.__enter__()
    with torch.no_grad():
        size = pipeline.unet.config.sample_size
        words = torch.zeros(1, 77, pipeline.unet.config.cross_attention_dim)
        pipeline.unet(torch.zeros(1, 4, size, size), 1, words)
    return lambda: watch.__exit__(None, None, None), watch.record


def a_recorder(_: Any) -> Begun:
    recorder = Recorder(stacks=True)
    recorder.__enter__()
    return lambda: recorder.__exit__(None, None, None), recorder.run


def a_stage(_: Any) -> Begun:
    recorder = Recorder(keep=1)
    stage = recorder.stage("denoising")
    stage.__enter__()
    return lambda: stage.__exit__(None, None, None), recorder.run


def a_generation(_: Any) -> Begun:
    monitor = PerformanceMonitor(live=LiveLine(io.StringIO()))
    block = monitor.monitor_generation("model", "UNet", num_steps=1)
    block.__enter__()
    recorder = monitor.recorder
    assert recorder is not None
    return lambda: block.__exit__(None, None, None), recorder.run


def is_left(
    pipeline: Any, before: dict[str, Any], earlier: set[threading.Thread], seconds: float = 10.0
) -> list[str]:
    """What of ours is still there; a thread is, if it does not end within these seconds: others may have the processor."""
    ends = time.monotonic() + seconds
    for thread in own_threads() - earlier:
        thread.join(max(0.0, ends - time.monotonic()))
    threads = [thread.name for thread in own_threads() - earlier]
    found = {
        "marks": marks(pipeline) != before,
        "hooks, sessions or stacks": left_behind() != [],
        f"threads {threads}": threads != [],
        "the current recorder": current_recorder() is not None,
        "the sampler's lock": SAMPLER._lock.locked(),
    }
    return [what for what, is_there in found.items() if is_there]


def interrupted(begin: Callable[[Any], Begun], pipeline: Any, places: Iterator[Place]) -> Iterator[str]:
    """What is wrong after Ctrl-C at each place."""
    before, earlier = marks(pipeline), own_threads()
    for place in places:
        leave, record = begin(pipeline)
        name = f"{place[0].co_qualname}@{place[1]}"
        interruption = Interruption(*OURS, at=place)
        with contextlib.suppress(KeyboardInterrupt):
            interruption.during(leave)
            if interruption.is_raised:
                yield f"{name}: the host did not hear it"
        left = is_left(pipeline, before, earlier, 0.0 if is_first(place) else 10.0)
        if left and not is_first(place):
            yield f"{name}: left {left}"
        if left:
            leave()
            if left := is_left(pipeline, before, earlier):
                yield f"{name}: left by a second end {left}"
        run = record()
        if still_open := [stage.name for stage in run.walk() if "end" in stage.unavailable]:
            yield f"{name}: still open {still_open}"
        if run.complete and interruption.is_raised and not is_first(place) and not is_last(begin, place):
            yield f"{name}: the record is complete"


def is_first(place: Place) -> bool:
    """Whether nothing of ours has ended yet: the call of `__exit__` itself, up to where it can catch anything."""
    return place[0].co_name in ("__exit__", "to_the_end", "_entered_here", "running", "own")


def is_last(begin: Callable[[Any], Begun], place: Place) -> bool:
    """Whether the record may be over already, whole: a monitor reads it last."""
    return begin is a_generation or place[0].co_qualname == "Watch._leave"


def places_of(begin: Callable[[Any], Begun], pipeline: Any) -> list[Place]:
    for _ in range(2):  # in the first, modules are imported
        leave, _ = begin(pipeline)
        told = Interruption(*OURS)
        told.during(leave)
    # What is raised in `__del__` goes nowhere, by Python's own rule.
    return [place for place in told.places if place[0].co_name != "__del__"]


@pytest.mark.parametrize(
    "begin", [a_recorder, *(pytest.param(begin, marks=pytest.mark.slow) for begin in (a_stage, a_generation))]
)
def test_ctrl_c_at_each_place_of_an_end_leaves_nothing_and_is_raised(
    begin: Callable[[Any], Begun], pipeline: Any
) -> None:
    places = places_of(begin, pipeline)
    assert len(places) > 30
    assert next(interrupted(begin, pipeline, iter(places)), None) is None


@pytest.mark.slow
def test_ctrl_c_at_each_place_of_a_watch_s_end_leaves_nothing_and_is_raised(pipeline: Any) -> None:
    places = places_of(a_watch, pipeline)
    assert {"close", "_end_stages", "_detach", "take_off", "stop", "let_go", "leave_stacks"} <= {
        code.co_name for code, _ in places
    }
    assert next(interrupted(a_watch, pipeline, iter(places)), None) is None


def test_the_record_of_an_end_that_ctrl_c_broke_off_says_so(pipeline: Any) -> None:
    told: list[Run] = []
    watch = sigmascope.watch(pipeline, on_run=told.append)
    watch.__enter__()
    place = inspect.unwrap(Session._leave_sessions).__code__, -1
    with pytest.raises(KeyboardInterrupt):
        Interruption(*OURS, at=place).during(lambda: watch.__exit__(None, None, None))
    assert not watch.complete
    assert watch.unavailable["watch.end"] == "KeyboardInterrupt broke into the watch's end"
    assert [run.id for run in told] == [watch.id]
