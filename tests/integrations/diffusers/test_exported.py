"""What a watch hands over to be exported: each call of a pipeline once, with its stages, steps and LoRAs."""

from collections.abc import Iterator

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state

import sigmascope
from sigmascope.monitor import publishing
from sigmascope.monitor.publishing import Published, Publisher
from sigmascope.reports.measurements import Measured, measured


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    own = Publisher()
    monkeypatch.setattr(publishing, "PUBLISHER", own)
    return own


@pytest.fixture
def heard(publisher: Publisher) -> Iterator[list[Published]]:
    published: list[Published] = []
    publisher.listen(published.append)
    yield published
    publisher.drain(5.0)


def parts(publisher: Publisher, heard: list[Published]) -> list[Measured]:
    publisher.drain(5.0)
    return [part for published in heard for part in measured(published.run)]


def test_each_call_is_handed_over_when_it_ends_not_when_the_watch_does(
    publisher: Publisher, heard: list[Published]
) -> None:
    pipeline = make_pipeline("flux")
    with sigmascope.watch(pipeline, keep_run=False) as run:
        generate(pipeline, "flux")
        [first] = parts(publisher, heard)
        generate(pipeline, "flux")
        assert len(parts(publisher, heard)) == 2
    recorded = run.stages[0]
    assert (first.pipeline, first.outcome) == ("FluxPipeline", "ok")
    assert first.generation_seconds == pytest.approx(recorded.seconds)
    assert {"text_encoding", "denoising", "latent_decoding"} <= {name for name, _ in first.stages}
    assert first.steps == run.stage("denoising").steps.seconds
    assert first.peaks["process"] > 0


def test_a_monitor_and_a_watch_of_the_same_call_count_it_once(
    publisher: Publisher, heard: list[Published]
) -> None:
    pipeline, monitor = make_pipeline("sd15"), sigmascope.PerformanceMonitor(sample_hz=None)
    with sigmascope.watch(pipeline, keep_run=False), monitor.monitor_generation("own name"):
        generate(pipeline, "sd15")
    [part] = parts(publisher, heard)
    assert part.pipeline == "StableDiffusionPipeline"
    assert part.outcome == "ok"


def test_a_call_that_fails_is_handed_over_as_such(publisher: Publisher, heard: list[Published]) -> None:
    pipeline = make_pipeline("sd15")

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    pipeline.vae.decode = out_of_memory
    with sigmascope.watch(pipeline, keep_run=False), pytest.raises(torch.OutOfMemoryError):
        generate(pipeline, "sd15")
    assert [part.outcome for part in parts(publisher, heard)] == ["oom"]


@pytest.mark.slow
def test_a_lora_is_judged_as_it_is_put_on_and_in_each_call(
    publisher: Publisher, heard: list[Published]
) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline, keep_run=False):
        pipeline.load_lora_weights(lora_state(pipeline, ["unet"]), adapter_name="style")
        generate(pipeline, "sd15")
        pipeline.set_adapters(["style"], [0.0])
        generate(pipeline, "sd15")
    told = [(part.outcome, part.verdicts) for part in parts(publisher, heard)]
    assert told == [(None, ("acts",)), ("ok", ("acts",)), (None, ()), ("ok", ("no_effect",))]


def test_an_output_is_the_same_whoever_listens(publisher: Publisher) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline, keep_run=False):
        alone = generate(pipeline, "sd15")
    publisher.listen(lambda _published: (_ for _ in ()).throw(OSError("down")))
    with sigmascope.watch(pipeline, keep_run=False):
        heard_of = generate(pipeline, "sd15")
    publisher.drain(5.0)
    assert torch.equal(torch.as_tensor(alone), torch.as_tensor(heard_of))
