from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from sigmascope import encode_latents
from sigmascope.monitor import Recorder, current_recorder
from sigmascope.monitor.recorder import LiveStage
from sigmascope.pipeline.strategies import Outcome
from sigmascope.records.latents import RECORD_FACT, EncodingEvent, encoding_record

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


@pytest.fixture
def full(kl: "Sample") -> Iterator["Sample"]:
    """A VAE that takes pictures of 32 pixels at most."""

    def too_large(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if max(inputs[0].shape[-2:]) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = kl.vae.encoder.conv_in.register_forward_pre_hook(too_large)
    yield kl
    handle.remove()


def test_each_attempt_is_a_stage_inside_the_encodings(full: "Sample") -> None:
    with Recorder() as recorder:
        encode_latents(full.vae, full.pixels, tile=32)
    stage = recorder.run().stage("latent_encoding")
    assert [(one.name, one.success) for one in stage.children] == [
        ("direct_encoding", False),
        ("tiled_encoding", True),
    ]


def test_the_stage_keeps_the_record(full: "Sample") -> None:
    with Recorder() as recorder:
        _, record = encode_latents(full.vae, full.pixels, tile=32)
    assert encoding_record(recorder.run().stage("latent_encoding").facts[RECORD_FACT]) == record


def test_attempts_have_times_and_memory_of_their_own(full: "Sample") -> None:
    _, record = encode_latents(full.vae, full.pixels, tile=32)
    for attempt in record.attempts:
        assert attempt.seconds is not None
        assert attempt.peak is not None
        assert attempt.measured_peak_bytes is not None
        assert attempt.predicted_peak_bytes is not None


def test_no_recorder_is_current_afterwards(kl: "Sample") -> None:
    encode_latents(kl.vae, kl.pixels)
    assert current_recorder() is None


def test_the_latent_is_the_same_watched_or_not(kl: "Sample") -> None:
    with Recorder():
        latent, _ = encode_latents(kl.vae, kl.pixels)
    assert torch.equal(latent, kl.latent)


def test_events_tell_what_happens_in_order(full: "Sample") -> None:
    events: list[EncodingEvent] = []
    encode_latents(full.vae, full.pixels, tile=32, on_event=events.append)
    assert [event.kind for event in events] == [
        "began",
        "attempt_began",
        "attempt_ended",
        "attempt_began",
        "attempt_ended",
        "ended",
    ]
    began = [(event.strategy, event.tile) for event in events if event.strategy]
    assert [strategy for strategy, _ in began] == ["direct", "tiled"]
    assert [tile and (tile.height, tile.width) for _, tile in began] == [None, (32, 32)]


def test_an_event_handler_that_fails_changes_nothing(kl: "Sample") -> None:
    def fail(event: EncodingEvent) -> None:
        raise ValueError("mine")

    latent, _ = encode_latents(kl.vae, kl.pixels, on_event=fail)
    assert torch.equal(latent, kl.latent)


def test_a_monitor_that_fails_changes_nothing(kl: "Sample", monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Outcome:
        raise OSError("the probe is broken")

    monkeypatch.setattr("sigmascope.monitor.scope.Scope.open", fail)
    monkeypatch.setattr("sigmascope.monitor.scope.Scope.freeze", fail)
    latent, record = encode_latents(kl.vae, kl.pixels)
    assert torch.equal(latent, kl.latent)
    assert record.attempts[0].unavailable["peak"]


def test_predictions_learn_from_past_records(kl: "Sample") -> None:
    from dataclasses import replace

    _, record = encode_latents(kl.vae, kl.pixels)
    first = record.attempts[0]
    assert first.predicted_peak_bytes is not None
    predicted = 100 * 2**20
    seen = replace(first, predicted_peak_bytes=predicted, measured_peak_bytes=3 * predicted)
    _, again = encode_latents(kl.vae, kl.pixels, past=[replace(record, attempts=(seen,))])
    assert again.attempts[0].prediction_basis == "learned"
    assert again.attempts[0].predicted_peak_bytes == 3 * first.predicted_peak_bytes


def test_a_monitor_that_fails_loses_no_latent(kl: "Sample", monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the monitor is broken")

    monkeypatch.setattr(LiveStage, "fact", broken)
    monkeypatch.setattr(LiveStage, "tensor", broken)
    latent, record = encode_latents(kl.vae, kl.pixels, strategies="direct", predict=False)
    assert torch.equal(latent, kl.latent)
    assert record.success
