"""Memory that runs out inside a kernel: at any operation of PyTorch's, before or after it has made its result."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pipeline.sabotage import state_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sigmascope import encode_latents
from sigmascope.records.latents import EncodingEvent

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample

FOLLOWS = {"direct": "tiled", "tiled": "cpu", "cpu": "direct"}


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of each strategy, fails at one of the first, and watches what it has made."""

    def __init__(self, vae: nn.Module, pixels: Tensor, fails_at: int | None, *, made: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        known = (*vae.parameters(), *vae.buffers(), pixels)
        self.known = {one.untyped_storage().data_ptr() for one in known}
        self.fails_at, self.made = fails_at, made
        self.error: Callable[[], BaseException] = lambda: torch.OutOfMemoryError("CUDA out of memory.")
        self.calls, self.is_on = 0, False
        self.alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive_at: list[int] = []

    def on_event(self, event: EncodingEvent) -> None:
        if event.kind == "attempt_began":
            self.is_on, self.calls = True, 0
            self.alive_at.append(sum(one() is not None for one in self.alive))
            if len(self.alive_at) > 1:
                self.fails_at = None
        if event.kind == "attempt_ended":
            self.is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_on:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.calls == self.fails_at and not self.made:
            raise self.error()
        output = func(*args, **(kwargs or {}))
        storages = (one.untyped_storage() for one in tree_iter(output) if isinstance(one, Tensor))
        self.alive += [
            weakref.ref(one) for one in storages if one.nbytes() and one.data_ptr() not in self.known
        ]
        if self.calls == self.fails_at:
            raise self.error()
        return output


def _encode(one: "Sample", kernels: Kernels, *ways: str) -> Any:
    with kernels:
        return encode_latents(
            one.vae, one.pixels, strategies=ways, tile=64, predict=False, on_event=kernels.on_event
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [("kl", "direct"), ("wan", "direct"), ("wan", "tiled"), ("kl", "cpu")]
)
@given(where=st.floats(0, 1), made=st.booleans())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_is_alive_at_the_next_attempt(
    name: str, way: str, where: float, made: bool, request: pytest.FixtureRequest
) -> None:
    one: Sample = request.getfixturevalue(name)
    before = state_of(one.vae)
    counting = Kernels(one.vae, one.pixels, None)
    _encode(one, counting, way)
    kernels = Kernels(one.vae, one.pixels, 1 + round(where * (counting.calls - 1)), made=made)
    latent, record = _encode(one, kernels, way, FOLLOWS[way])
    assert [attempt.outcome for attempt in record.attempts] == ["failed", "succeeded"]
    assert kernels.alive_at == [0, 0]
    assert state_of(one.vae) == before
    assert latent.shape == one.latent.shape


@pytest.mark.parametrize("way", FOLLOWS)
@pytest.mark.parametrize("error", [
    KeyboardInterrupt("mine"),
    SystemExit("mine"),
    ValueError("out of memory"),
    AssertionError("not enough memory"),
    RuntimeError("index 9 is out of memory bounds"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_what_only_looks_like_memory_passes_and_the_vae_is_as_before(
    wan: "Sample", way: str, error: BaseException
) -> None:
    before = state_of(wan.vae)
    kernels = Kernels(wan.vae, wan.pixels, 100)
    kernels.error = lambda: error
    with pytest.raises(type(error)) as caught:
        _encode(wan, kernels, way, "dummy")
    assert caught.value is error
    assert state_of(wan.vae) == before
