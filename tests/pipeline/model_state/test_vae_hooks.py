"""VAEs whose weights are cast or moved layer by layer, by diffusers or accelerate."""

from typing import Any

import pytest
import torch
from tests.families.group_offload import needs_group_offload
from tests.pipeline.conftest import MAKERS
from torch import Tensor

from sigmascope import decode_latents, encode_latents
from sigmascope.errors import EveryStrategyFailedError
from sigmascope.pipeline.model_state import execution_device, offloads_groups

PIXELS = torch.rand(1, 3, 32, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1


@pytest.fixture
def vae() -> Any:
    """An AutoencoderKL of its own: hooks stay on it."""
    import diffusers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MAKERS["AutoencoderKL"](diffusers).eval().requires_grad_(False)


@torch.no_grad()
def _mode(vae: Any, pixels: Tensor) -> Tensor:
    return vae.encode(pixels).latent_dist.mode()  # type: ignore[no-any-return]


@pytest.fixture
def cast(vae: Any) -> Any:
    for parameter in vae.parameters():
        parameter.data = parameter.data.bfloat16()
    vae.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return vae


@pytest.mark.parametrize("strategy", ["direct", "cpu"])
def test_weights_that_are_cast_layer_by_layer_compute_in_what_they_are_cast_to(
    cast: Any, strategy: str
) -> None:
    expected = _mode(cast, PIXELS.bfloat16())
    latent, _ = encode_latents(cast, PIXELS, strategies=strategy, predict=False)
    assert latent.dtype is torch.bfloat16
    assert torch.equal(latent, expected)


def test_a_failure_in_the_midst_of_a_cast_leaves_weights_as_they_are_stored(cast: Any) -> None:
    failures = [MemoryError()]

    def full(*_: object) -> None:
        if failures:
            raise failures.pop()

    cast.encoder.conv_in.register_forward_pre_hook(full)
    before = [(name, one.dtype, one.float().sum().item()) for name, one in cast.named_parameters()]
    _, record = encode_latents(cast, PIXELS, strategies=("direct", "cpu"), predict=False)
    assert record.strategy == "cpu"
    assert [(name, one.dtype, one.float().sum().item()) for name, one in cast.named_parameters()] == before


def test_offloaded_weights_are_used_where_the_hooks_put_them(vae: Any) -> None:
    import accelerate

    expected = _mode(vae, PIXELS)
    accelerate.cpu_offload(vae, execution_device=torch.device("cpu"))
    assert next(vae.parameters()).is_meta
    assert execution_device([vae]) == torch.device("cpu")
    latent, record = encode_latents(vae, PIXELS, strategies="direct")
    assert torch.equal(latent, expected)
    assert record.attempts[0].device == "cpu"
    decode_latents(vae, latent, strategies="tiled", tile=32)


def test_offloaded_weights_are_not_copied_to_ram(vae: Any) -> None:
    import accelerate

    accelerate.cpu_offload(vae, execution_device=torch.device("cpu"))
    with pytest.raises(EveryStrategyFailedError, match="offloaded piece by piece"):
        encode_latents(vae, PIXELS, strategies="cpu")


def test_layers_that_are_cast_are_not_moved(cast: Any) -> None:
    assert not offloads_groups([cast])


def test_groups_of_layers_that_are_moved_are_known(vae: Any) -> None:
    needs_group_offload()
    expected = _mode(vae, PIXELS)
    device = torch.device("cpu")
    vae.enable_group_offload(onload_device=device, offload_device=device, offload_type="leaf_level")
    assert offloads_groups([vae])
    latent, _ = encode_latents(vae, PIXELS, strategies="direct", predict=False)
    assert torch.equal(latent, expected)
