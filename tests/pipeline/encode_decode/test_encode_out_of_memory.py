"""Memory that runs out at any point of any strategy, in any order."""

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pipeline.sabotage import COPY_BACK, ERRORS, Sabotage, state_of
from torch import nn

from sigmascope import decode_latents, encode_latents
from sigmascope.errors import EveryStrategyFailedError
from sigmascope.records.latents import EncodingEvent

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample

WAYS = ("direct", "tiled", "cpu")


@pytest.fixture(scope="module")
def calls() -> dict[tuple[str, str], int]:
    """How many modules each strategy calls, by VAE, once it has been counted."""
    return {}


def _number_of_calls(calls: dict[tuple[str, str], int], one: "Sample", way: str) -> int:
    key = (one.name, way)
    if key not in calls:
        with Sabotage({}).at_work() as counter:
            encode_latents(
                one.vae, one.pixels, strategies=(way,), tile=32, on_event=counter.on_event, predict=False
            )
        calls[key] = counter.calls
    return calls[key]


@pytest.mark.parametrize("name", ["kl", "wan"])
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.slow
def test_whatever_runs_out_the_next_strategy_gives_the_latent(
    name: str, data: st.DataObject, request: pytest.FixtureRequest, calls: dict[tuple[str, str], int]
) -> None:
    one: Sample = request.getfixturevalue(name)
    order = data.draw(st.permutations((*WAYS, "dummy")), label="order")
    order = order[: data.draw(st.integers(1, 4), label="how many")]
    points = {}
    for way in order:
        last = 0 if way == "dummy" else _number_of_calls(calls, one, way) - 1
        somewhere = st.sampled_from([0, 1, last, COPY_BACK]) | st.integers(0, max(last, 0))
        if way != "dummy" and data.draw(st.booleans(), label=f"{way} runs out"):
            points[way] = data.draw(somewhere, label=f"{way} runs out at")
    error = data.draw(st.sampled_from(ERRORS), label="error")
    before = state_of(one.vae)
    sabotage = Sabotage(points, error, one.pixels)
    works = next((way for way in order if way not in points), None)
    latent = None
    with sabotage.at_work():
        try:
            latent, record = encode_latents(
                one.vae, one.pixels, strategies=order, tile=32, on_event=sabotage.on_event, predict=False
            )
        except EveryStrategyFailedError as failure:
            record = failure.record
    assert record.strategy == works
    tried = order if works is None else order[: order.index(works) + 1]
    outcomes = [(attempt.name, attempt.outcome) for attempt in record.attempts]
    assert outcomes == [(way, "succeeded" if way == works else "failed") for way in tried]
    assert state_of(one.vae) == before
    assert sabotage.alive_at_the_next == [0] * len(sabotage.alive_at_the_next)
    assert record.dummy == (works == "dummy")
    if latent is not None:
        assert latent.shape == one.latent.shape
        if works in ("direct", "cpu"):
            assert torch.equal(latent, one.latent)


@pytest.mark.slow
@pytest.mark.parametrize("order", list(itertools.permutations(WAYS)), ids="-".join)
def test_in_every_order_the_last_one_gives_the_latent(kl: "Sample", order: tuple[str, ...]) -> None:
    sabotage = Sabotage({order[0]: 3, order[1]: COPY_BACK})
    with sabotage.at_work():
        latent, record = encode_latents(
            kl.vae, kl.pixels, strategies=order, tile=32, on_event=sabotage.on_event, predict=False
        )
    assert record.strategy == order[2]
    assert latent.shape == kl.latent.shape


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt, FloatingPointError])
def test_any_other_error_passes_unchanged_and_the_vae_is_as_before(
    wan: "Sample", strategy: str, error: type[BaseException]
) -> None:
    mine = error("mine")
    before = state_of(wan.vae)
    sabotage = Sabotage({strategy: 9}, lambda: mine)
    with sabotage.at_work(), pytest.raises(error) as caught:
        encode_latents(
            wan.vae, wan.pixels, strategies=(strategy,), tile=32, on_event=sabotage.on_event, predict=False
        )
    assert caught.value is mine
    assert mine.__cause__ is None
    assert state_of(wan.vae) == before


def test_another_error_ends_the_record_too(kl: "Sample") -> None:
    ended: list[EncodingEvent] = []
    sabotage = Sabotage({"direct": 2}, lambda: ValueError("mine"))

    def on_event(event: EncodingEvent) -> None:
        sabotage.on_event(event)
        ended.append(event)

    with sabotage.at_work(), pytest.raises(ValueError, match="mine"):
        encode_latents(kl.vae, kl.pixels, on_event=on_event)
    record = ended[-1].record
    assert record is not None
    assert [(one.outcome, one.reason, one.error_type) for one in record.attempts] == [
        ("failed", "ValueError: mine", "ValueError")
    ]


@pytest.mark.slow
def test_tiles_are_halved_until_they_fit(kl: "Sample") -> None:
    """Nothing above 64 pixels fits: half of a picture of 384 is 192, and its half does not fit either."""

    def too_large(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if max(inputs[0].shape[-2:]) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = kl.vae.encoder.conv_in.register_forward_pre_hook(too_large)
    try:
        _, record = encode_latents(kl.vae, torch.zeros(1, 3, 256, 384))
    finally:
        handle.remove()
    tiles = [attempt.tile.height for attempt in record.attempts if attempt.tile is not None]
    assert tiles == [192, 96, 64]
    assert record.strategy == "tiled"


def test_a_failed_draw_leaves_the_generator_as_it_was(kl: "Sample") -> None:
    sabotage = Sabotage({"direct": COPY_BACK})
    drawn, _ = encode_latents(kl.vae, kl.pixels, sample=True, generator=torch.Generator().manual_seed(3))
    with sabotage.at_work():
        again, record = encode_latents(
            kl.vae,
            kl.pixels,
            strategies=("direct", "cpu"),
            sample=True,
            generator=torch.Generator().manual_seed(3),
            on_event=sabotage.on_event,
            predict=False,
        )
    assert record.strategy == "cpu"
    assert torch.equal(again, drawn)


def test_the_error_of_all_says_how_each_ended(kl: "Sample") -> None:
    sabotage = Sabotage(dict.fromkeys(WAYS, 0))
    with sabotage.at_work(), pytest.raises(EveryStrategyFailedError) as caught:
        encode_latents(kl.vae, kl.pixels, tile=32, on_event=sabotage.on_event, predict=False)
    for label in ("Direct VAE Encoding", "Tiled VAE Encoding", "CPU Fallback Encoding"):
        assert f"{label} failed: OutOfMemoryError: CUDA out of memory" in str(caught.value)
    assert isinstance(caught.value, MemoryError)


@pytest.mark.slow
@pytest.mark.parametrize("point", [0, 5, COPY_BACK])
@pytest.mark.parametrize("order", list(itertools.permutations(WAYS)), ids="-".join)
def test_decoding_goes_on_the_same_way(wan: "Sample", order: tuple[str, ...], point: int) -> None:
    before = state_of(wan.vae)
    sabotage = Sabotage({order[0]: point, order[1]: point})
    with sabotage.at_work():
        frames, record = decode_latents(
            wan.vae, wan.latent, strategies=order, tile=32, on_event=sabotage.on_event, predict=False
        )
    assert record.strategy == order[2]
    assert frames.shape == wan.pixels.shape
    assert state_of(wan.vae) == before
