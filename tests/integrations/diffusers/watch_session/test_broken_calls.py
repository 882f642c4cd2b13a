"""Ctrl-C inside a module that is called outside of any pipeline, of which PyTorch tells no hook."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor, nn

import sigmascope

TOKENS = torch.zeros(1, 4, dtype=torch.long)


@pytest.fixture
def interrupted(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calls the text encoder, which Ctrl-C ends, and goes on."""

    def call() -> None:
        def forward(*_args: Any, **_kwargs: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pipeline.text_encoder, "forward", forward)
            with contextlib.suppress(KeyboardInterrupt):
                pipeline.text_encoder(TOKENS)

    return call


def test_what_comes_next_does_not_lie_in_the_stage_that_broke_off(
    pipeline: Any, interrupted: Callable[[], None]
) -> None:
    before = marks(pipeline)
    with sigmascope.watch(pipeline) as run, torch.no_grad():
        interrupted()
        pipeline.text_encoder(TOKENS)
        interrupted()
        pipeline.vae.decode(torch.zeros(1, 4, 8, 8))
        interrupted()
        pipeline.unet(torch.zeros(1, 4, 16, 16), 1, torch.zeros(1, 77, 16))
    seen = [(stage.name, stage.success, len(stage.children)) for stage in run.stages]
    broken = ("text_encoding", False, 0)
    assert seen == [
        broken,
        ("text_encoding", True, 0),
        broken,
        ("latent_decoding", True, 0),
        broken,
        ("denoising", True, 0),
    ]
    assert run.complete
    assert marks(pipeline) == before
    assert left_behind() == []


def test_the_record_says_that_a_call_broke_off_and_that_its_end_was_not_seen(
    pipeline: Any, interrupted: Callable[[], None]
) -> None:
    with sigmascope.watch(pipeline) as run:
        interrupted()
    (stage,) = run.stages
    assert stage.error == "KeyboardInterrupt"


def test_ctrl_c_that_leaves_the_block_is_the_stage_s_error(pipeline: Any) -> None:
    def forward(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    pipeline.text_encoder.forward = forward
    watch = sigmascope.watch(pipeline)
    with pytest.raises(KeyboardInterrupt), watch as run:
        pipeline.text_encoder(TOKENS)
    assert [(stage.name, stage.error) for stage in run.stages] == [("text_encoding", "KeyboardInterrupt")]
    assert not run.complete


def test_an_encoder_that_calls_itself_and_others_has_not_broken_off(pipeline: Any) -> None:
    inner, depth = pipeline.text_encoder.forward, 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        if depth < 3:
            pipeline.text_encoder(*args, **kwargs)
            pipeline.vae.decode(torch.zeros(1, 4, 8, 8))
        return inner(*args, **kwargs)

    pipeline.text_encoder.forward = forward
    with sigmascope.watch(pipeline) as run, torch.no_grad():
        pipeline.text_encoder(TOKENS)
    assert all(stage.success for stage in run.walk())
    assert [stage.name for stage in run.stages] == ["text_encoding"]


class Fickle(nn.Module):
    """A denoiser of which Ctrl-C ends one call."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.calls, self.broken = 0, broken

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.broken:
            raise KeyboardInterrupt
        return sample + timestep


@pytest.mark.parametrize("broken", [2, 3])
def test_a_step_that_broke_off_in_a_loop_without_a_scheduler_ends_after_it_began(broken: int) -> None:
    denoiser = Fickle(broken)
    with sigmascope.watch(denoiser) as run:
        for step in range(3):
            with contextlib.suppress(KeyboardInterrupt):
                denoiser(torch.zeros(1), torch.tensor(float(step)))
    steps = run.stage("denoising").steps
    assert len(steps) == 3
    assert all(seconds >= 0 for seconds in steps.seconds)
