"""A record of a long life: the last generations in full, sums of those before them."""

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from sigmascope.analysis.breakdown import time_breakdown
from sigmascope.monitor import Recorder
from sigmascope.records import Run, Stage, load_run
from sigmascope.records.run import Folded
from sigmascope.records.serialization import run_to_json

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeClock, FakeHost

SECONDS = [3.0, 1.0, 4.0, 1.5, 9.0, 2.5]


def generate(recorder: Recorder, clock: "FakeClock", seconds: float, *, fails: bool = False) -> None:
    """A generation whose denoising has two steps and takes half of its time."""
    try:
        with recorder.stage("generation") as stage:
            clock.pass_seconds(seconds / 2)
            with recorder.stage("denoising"):
                for _ in range(2):
                    with recorder.step():
                        clock.pass_seconds(seconds / 4)
            if fails:
                raise ValueError("no latent")
        stage.fact("call", {})
    except ValueError:
        pass


def watched(clock: "FakeClock", keep: int | None) -> Run:
    recorder = Recorder("server", sample_hz=None, clock=clock, keep=keep)
    with recorder.stage("model_loading"):
        clock.pass_seconds(10)
    for number, seconds in enumerate(SECONDS):
        generate(recorder, clock, seconds, fails=number == 1)
    return recorder.run()


def folded_of(run: Run) -> Folded:
    assert run.folded is not None
    return run.folded


def sums_of(stages: list[Stage]) -> tuple[float, ...]:
    """Reckoned from the stages of a run that is whole."""
    seconds = [stage.seconds for stage in stages]
    steps = [step for stage in stages for step in stage.steps.seconds]
    failures = sum(not stage.success for stage in stages)
    return len(stages), sum(seconds), max(seconds), failures, len(steps), sum(steps)


def test_the_last_generations_stay_and_others_are_told_by_their_sums(
    clock: "FakeClock", host: "FakeHost"
) -> None:
    whole, run = watched(clock, None), watched(clock, 2)
    generations = [stage for stage in whole.stages if stage.name == "generation"]
    assert [stage.seconds for stage in run.stages] == [10.0, *SECONDS[-2:]]
    folded = folded_of(run)
    assert (folded.kept, folded.generations) == (2, 4)
    assert (folded.first_at_seconds, folded.last_at_seconds) == (10.0, 10.0 + sum(SECONDS[:4]))
    denoisings = [stage.children[0] for stage in generations]
    for path, stages in (("generation", generations[:4]), ("generation/denoising", denoisings[:4])):
        sums = folded.stages[path]
        found = (sums.count, sums.seconds, sums.longest_seconds, sums.failures, sums.steps, sums.step_seconds)
        assert found == pytest.approx(sums_of(stages))
    assert list(folded.stages) == ["generation", "generation/denoising"]
    assert run.seconds == whole.seconds


def test_a_run_of_fewer_generations_is_what_it_is_without_a_limit(
    clock: "FakeClock", host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    monkeypatch.setattr("sigmascope.monitor.scope.process_time_ns", lambda: 0)
    monkeypatch.setattr("sigmascope.monitor.scope.processor_moment", lambda: None)
    for keep in (None, len(SECONDS)):
        clock.ns = 0
        monkeypatch.setattr("uuid.uuid4", lambda: type("Id", (), {"hex": "same"}))
        text = run_to_json(watched(clock, keep))
        texts.append(text.partition('"seconds"')[2])  # without the wall clock
    assert texts[0] == texts[1]
    assert '"folded"' not in texts[0]


def test_slashes_in_names_part_no_stages(clock: "FakeClock") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=1)
    for _ in range(3):
        with recorder.stage("generation"), recorder.stage("vae/encode"):
            clock.pass_seconds(2.0)
    run = recorder.run()
    assert {path: sums.seconds for path, sums in folded_of(run).stages.items()} == {
        "generation": 4.0,
        "generation/vae~1encode": 4.0,
    }
    assert {row.label: (row.seconds, row.count) for row in time_breakdown(run)} == {"vae/encode": (6.0, 3)}


def test_a_generation_that_is_open_is_not_folded(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=1)
    opened, may_close = threading.Event(), threading.Event()

    def slow() -> None:
        with recorder.stage("generation"):
            opened.set()
            may_close.wait(30)

    thread = threading.Thread(target=slow)
    thread.start()
    opened.wait(30)
    for _ in range(3):
        generate(recorder, clock, 1.0)
    ends = [stage.unavailable.get("end") for stage in recorder.run().stages]
    may_close.set()
    thread.join()
    assert [end is not None for end in ends] == [True, False]
    assert folded_of(recorder.run()).generations == 3
    assert [stage.seconds for stage in recorder.run().stages] == [3.0]


def test_generations_of_many_threads_are_all_counted(host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, keep=5)

    def work() -> None:
        for _ in range(50):
            with recorder.stage("generation"), recorder.stage("denoising"), recorder.step():
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = recorder.run()
    folded = folded_of(run)
    assert (len(run.stages), folded.generations) == (5, 395)
    assert folded.stages["generation/denoising"].steps == 395


def test_what_is_inside_a_generation_is_never_folded(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=2)
    with recorder.stage("generation"):
        for _ in range(9):
            with recorder.stage("generation"), recorder.stage("latent_decoding"):
                pass
    run = recorder.run()
    assert (len(run.stages[0].children), run.folded) == (9, None)


def test_generations_inside_a_stage_that_stays_open_are_folded(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=2)
    with recorder.stage("serving"):
        for _ in range(9):
            generate(recorder, clock, 1.0)
        run = recorder.run()
    assert (len(run.stages[0].children), folded_of(run).generations) == (2, 7)


def test_stages_beside_generations_are_bounded_by_their_names(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=3)
    for name in ("model_loading", "lora_application"):
        for _ in range(5):
            with recorder.stage(name):
                pass
    for number in range(200):
        with recorder.stage(f"request {number}"):
            generate(recorder, clock, 1.0)
    run = recorder.run()
    folded = folded_of(run)
    assert len(run.stages) < 30
    assert folded.generations + sum(stage.name == "generation" for stage in run.walk()) == 200
    outermost = sum(sums.count for path, sums in folded.stages.items() if "/" not in path)
    assert len(folded.stages) <= 101
    assert outermost >= 210 - len(run.stages)


def test_the_highest_memory_of_a_folded_generation_is_the_runs(
    clock: "FakeClock", accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, clock=clock, accelerator=accelerator, keep=1)
    with recorder:
        clock.pass_seconds(7)
        for nbytes in (100, 900, 300):
            with recorder.stage("generation"):
                clock.pass_seconds(1)
                accelerator.allocate(nbytes)
                recorder.look()
                accelerator.free(nbytes)
    peak = recorder.run().peak().accelerator("cuda:0")
    assert (peak.allocated_bytes, peak.allocated_at_seconds) == (900, 9.0)


def test_the_accelerators_time_is_summed_where_it_is_known(
    clock: "FakeClock", accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    accelerator.allocate(8)
    recorder = Recorder(sample_hz=None, clock=clock, accelerator=accelerator, keep=1)
    for seconds in (2.0, 5.0, 1.0):
        with recorder.stage("generation"):
            accelerator.queued_seconds += seconds
        accelerator.done_seconds = accelerator.queued_seconds
    sums = folded_of(recorder.run()).stages["generation"]
    assert (sums.device_seconds, sums.timed_on_device) == (7.0, 2)


def test_a_folded_scope_is_gone(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=1)
    generate(recorder, clock, 1.0)
    recorder._outside.children[0].facts["held"] = held = type("Held", (), {})()
    gone = weakref.ref(held)
    del held
    generate(recorder, clock, 1.0)
    gc.collect()
    assert gone() is None


def test_the_older_are_taken_whole_on_the_clock_of_the_run(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=2)
    recorder.spare = 10
    for seconds in SECONDS:
        generate(recorder, clock, seconds)
    assert (len(recorder.run().stages), recorder.run().folded) == (6, None)
    assert recorder.take_older(least=5) is None
    older = recorder.take_older(least=4)
    assert older is not None
    assert [(stage.started_seconds, stage.seconds) for stage in older.stages] == [
        (0.0, 3.0),
        (3.0, 1.0),
        (4.0, 4.0),
        (8.0, 1.5),
    ]
    assert (older.id, older.seconds, len(older.stages[0].children)) == (recorder.id, 9.5, 1)
    run = recorder.run()
    assert (len(run.stages), folded_of(run).generations) == (2, 4)
    assert recorder.take_older() is None


def test_folding_that_fails_is_no_error_of_the_host(
    clock: "FakeClock", host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(sample_hz=None, clock=clock, keep=1)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("sigmascope.monitor.scope.FoldedScopes.add", fail)
    for _ in range(3):
        generate(recorder, clock, 1.0)
    assert [stage.seconds for stage in recorder.run().stages] == [1.0]


def test_a_folded_run_is_read_again_as_it_was(
    clock: "FakeClock", host: "FakeHost", tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, path = watched(clock, 2), tmp_path_factory.mktemp("runs") / "run.json"
    run.save(path)
    assert path.read_text().startswith('{"schema":3,')
    assert repr(load_run(path)) == repr(run)
