"""Nothing of ours touches the GPU while the host captures a graph: any call of another thread would end the capture."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pocket_pipelines.pipelines import load_pocket

import sigmascope
from sigmascope.integrations import process_recording
from sigmascope.monitor import Recorder, utilization
from sigmascope.records.run import Run

pytestmark = pytest.mark.gpu

CAPTURES = 50
READINGS_A_SECOND = 20.0
CAPTURE_SECONDS = 0.06
"""Longer than from one reading to the next."""


@contextmanager
def busy_threads(record: Callable[[], Run], path: Path) -> Iterator[list[str]]:
    """The thread that keeps the record and the one that samples, at their quickest; yields what each did, in turn.

    The sampler is that of recorders that are made within the block.
    """
    done: list[str] = []

    def recorded() -> Run:
        run = record()
        done.append("keeper")
        return run

    def sampling(self: Any, sample: Callable[[], None], *rest: Any) -> None:
        def sampled() -> None:
            sample()
            done.append("sampler")

        init(self, sampled, *rest)

    init = utilization.SamplerClient.__init__
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(utilization, "MAX_SAMPLE_HZ", READINGS_A_SECOND)
        patched.setattr(utilization.SamplerClient, "__init__", sampling)
        patched.setattr(process_recording, "_LEAST_PERIODS_OF_A_WRITE", 0.0)
        keeper = process_recording.PeriodicSaver(recorded, path, seconds=1.0 / READINGS_A_SECOND)
        keeper.start()
        try:
            yield done
        finally:
            keeper.stop()


def test_the_threads_that_keep_and_sample_break_no_capture(cuda: torch.device, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 1 << 20, device=cuda)
    expected = torch.relu(x * 2) + 1
    captured: Counter[str] = Counter()
    made_recorder: list[Recorder] = []
    with busy_threads(lambda: made_recorder[0].run(), tmp_path / "run.json") as done:
        recorder = Recorder(sample_hz=READINGS_A_SECOND)
        made_recorder.append(recorder)
        with recorder, recorder.stage("denoising"):
            for _ in range(CAPTURES):
                with recorder.step():  # leaves events that nobody has asked for yet
                    torch.relu(x)
                graph = torch.cuda.CUDAGraph()
                before = len(done)
                with torch.cuda.graph(graph):  # capture_error_mode="global"
                    made = torch.relu(x * 2) + 1
                    time.sleep(CAPTURE_SECONDS)
                captured.update({*done[before:]})
                with recorder.step():
                    graph.replay()
                assert torch.equal(made, expected)
    assert captured["keeper"] >= 0.5 * CAPTURES  # both threads did work meanwhile
    assert captured["sampler"] >= 0.5 * CAPTURES
    steps = recorder.run().stages[0].steps
    assert len(steps) == 2 * CAPTURES
    assert all(seconds is None or seconds >= 0 for seconds in steps.gpu_seconds)


@pytest.mark.filterwarnings("default")  # those of torch.compile and Triton are not about us
def test_a_compiled_model_with_graphs_of_its_own_gives_the_same_under_a_watch(
    cuda: torch.device, tmp_path: Path
) -> None:
    pipeline: Any = load_pocket("unet", "base").to(cuda)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet = torch.compile(pipeline.unet, mode="reduce-overhead")

    def picture(seed: int) -> torch.Tensor:
        generator = torch.Generator(cuda).manual_seed(seed)
        made: torch.Tensor = pipeline(
            "a red cube", num_inference_steps=4, height=64, width=64, output_type="pt", generator=generator
        ).images
        return made.clone()

    watches: list[Any] = []
    with (
        busy_threads(lambda: watches[0].record(), tmp_path / "run.json") as done,
        sigmascope.watch(pipeline, sample_hz=READINGS_A_SECOND) as run,
    ):
        watches.append(run)
        watched = [picture(seed) for seed in (0, 1, 2)]  # compiled and captured in the first two
    assert "keeper" in done
    torch._dynamo.reset()
    bare = [picture(seed) for seed in (0, 1, 2)]
    record = run.record()
    assert [stage.name for stage in record.stages].count("generation") == 3
    assert all(len(stage.steps) == 4 for stage in record.walk() if stage.name == "denoising")
    for own, without in zip(watched, bare, strict=True):
        assert torch.equal(own, without)
