"""Several threads on one VAE: each finds it as it is, and not as another has it for a while."""

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope import decode_latents, encode_latents
from sigmascope.pipeline import model_state
from sigmascope.pipeline.model_state import in_turn

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


class Meeting(nn.Module):
    """Sees whether two are in it at once, and in which mode each of them finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 8, stride=8)
        self.use_tiling = True
        self.inside = self.most = 0
        self.found: set[tuple[bool, bool]] = set()
        self.one_left = threading.Event()

    def encode(self, pixels: Tensor) -> Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.found.add((self.training, self.use_tiling))
        self.one_left.wait(0.05)
        self.inside -= 1
        latent: Tensor = self.convolution(pixels)
        return latent


def test_threads_on_one_vae_take_turns() -> None:
    vae = Meeting().train()
    threads = [
        threading.Thread(
            target=encode_latents, args=(vae, torch.zeros(1, 3, 16, 16)), kwargs={"predict": False}
        )
        for _ in range(3)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert vae.most == 1
    assert vae.found == {(False, True)}  # in evaluation, with the tiling that its host has set
    assert (vae.training, vae.use_tiling) == (True, True)


def test_a_thread_may_come_in_again(kl: "Sample") -> None:
    def on_event(event: Any) -> None:
        if event.kind == "ended" and event.direction == "encoding":
            decode_latents(kl.vae, kl.latent, predict=False)
            inner.append(event)

    inner: list[Any] = []
    encode_latents(kl.vae, kl.pixels, predict=False, on_event=on_event)
    assert len(inner) == 1


def test_a_pipeline_and_its_vae_are_one() -> None:
    class Pipeline:
        vae = Meeting()

    taken = threading.Event()

    def come_in() -> None:
        with in_turn(Pipeline.vae):
            taken.set()

    thread = threading.Thread(target=come_in)
    with in_turn(Pipeline()):
        thread.start()
        assert not taken.wait(0.05)
    thread.join()
    assert taken.is_set()


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_is_kept_of_a_turn(error: type[Exception] | None) -> None:
    try:
        with in_turn(Meeting()):
            if error is not None:
                raise error
    except ValueError:
        pass
    assert model_state._queues == {}
