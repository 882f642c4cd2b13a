from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLTemporalDecoder,
    AutoencoderKLWan,
    AutoencoderTiny,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sigmascope.pipeline import peak_prediction
from sigmascope.pipeline.peak_prediction import NoTwinError, dry_run
from sigmascope.records.latents import Direction


def small_kl(**config: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        **config,
    ).eval()


def small_wan() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1).eval()


def small_qwen() -> AutoencoderKLQwenImage:
    statistics = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1, **statistics)


VAES: dict[str, Callable[[], Any]] = {
    "kl": small_kl,
    "kl without attention": lambda: small_kl(mid_block_add_attention=False),
    "tiny": lambda: AutoencoderTiny(num_encoder_blocks=(1, 1, 1, 1), num_decoder_blocks=(1, 1, 1, 1)).eval(),
}
SHAPES: dict[Direction, tuple[int, ...]] = {"encoding": (1, 3, 64, 96), "decoding": (1, 4, 24, 32)}


@torch.no_grad()
def allocated_at_most(code: Callable[[], object]) -> int:
    """What PyTorch's own profiler saw the CPU allocator hand out, at its highest."""
    code()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        code()
    recorder: Any = profiler.profiler
    events = [event for event in recorder.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


@pytest.mark.parametrize("direction", ["encoding", "decoding"])
@pytest.mark.parametrize("name", list(VAES))
def test_the_count_is_what_the_allocator_hands_out(name: str, direction: Direction) -> None:
    vae, source = VAES[name](), torch.randn(SHAPES[direction])
    real = allocated_at_most(lambda: vae.encode(source) if direction == "encoding" else vae.decode(source))
    assert 0.95 < dry_run(vae, SHAPES[direction], direction).peak_bytes / real < 1.25


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "direction", "shape"),
    [
        (small_kl, "decoding", (2, 4, 9, 7)),
        (small_qwen, "decoding", (1, 4, 1, 4, 6)),
        (small_wan, "encoding", (1, 3, 5, 32, 32)),
        (small_wan, "decoding", (1, 16, 3, 4, 4)),
    ],
)
def test_the_output_has_the_shape_of_the_real_one(
    make: Callable[[], Any], direction: Direction, shape: tuple[int, ...]
) -> None:
    vae, source = make(), torch.randn(shape)
    real = vae.decode(source).sample if direction == "decoding" else vae.encode(source).latent_dist.parameters
    assert dry_run(vae, shape, direction).output_shape == tuple(real.shape)


@pytest.mark.parametrize(
    ("direction", "shape"), [("encoding", (1, 3, 21, 16, 16)), ("decoding", (1, 16, 6, 2, 2))]
)
@pytest.mark.slow
def test_many_frames_of_a_streaming_vae_take_what_running_them_all_takes(
    direction: Direction, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dry_run(small_wan(), shape, direction)
    monkeypatch.setattr(peak_prediction, "_streamed_frames", lambda *_: None)
    peak_prediction._dry_run_of_recipe.cache_clear()
    assert quick == dry_run(small_wan(), shape, direction)


def test_half_precision_takes_half() -> None:
    vae = small_kl()
    full, half = (
        dry_run(vae, (1, 3, 64, 64), "encoding", dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert (half.peak_bytes * 2, half.output_itemsize) == (full.peak_bytes, 2)


def test_slicing_makes_a_batch_no_more_than_its_outputs() -> None:
    vae = small_kl()
    one = dry_run(vae, (1, 4, 16, 16), "decoding").peak_bytes
    together = dry_run(vae, (4, 4, 16, 16), "decoding").peak_bytes
    vae.enable_slicing()
    sliced = dry_run(vae, (4, 4, 16, 16), "decoding").peak_bytes
    assert together > 3 * one
    assert one < sliced < one + 8 * 3 * 32 * 32 * 4


def test_the_vaes_own_tiling_counts_for_the_whole_and_not_for_a_tile_of_ours() -> None:
    vae = small_kl()
    plain = dry_run(vae, (1, 3, 64, 64), "encoding")
    vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 16
    vae.enable_tiling()
    assert dry_run(vae, (1, 3, 64, 64), "encoding", own_tiles=False) == plain
    assert dry_run(vae, (1, 3, 64, 64), "encoding").peak_bytes < plain.peak_bytes


def test_a_decoder_that_mixes_frames_is_told_how_many_there_are() -> None:
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1
    )
    assert dry_run(vae, (3, 4, 8, 8), "decoding").output_shape == (3, 3, 16, 16)


class OwnVae(nn.Module):
    """A VAE without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.register_buffer("shift", torch.zeros(8, 1, 1))

    def encode(self, pixels: Tensor) -> Tensor:
        latent: Tensor = self.conv(pixels) + self.shift
        return latent


def test_a_module_without_a_config_is_copied_without_its_weights() -> None:
    found = dry_run(OwnVae(), (1, 3, 40, 40), "encoding")
    assert found.tensor_bytes == 2 * 8 * 10 * 10 * 4
    assert found.output_shape == (1, 8, 10, 10)


def test_the_hosts_hooks_are_not_called() -> None:
    vae, calls = OwnVae(), []
    vae.conv.register_forward_hook(lambda *_: calls.append(1))
    dry_run(vae, (1, 3, 40, 40), "encoding")
    assert not calls
    vae.encode(torch.zeros(1, 3, 40, 40))
    assert calls


@pytest.mark.parametrize("make", [small_kl, OwnVae])
def test_the_vae_stays_as_it_was(make: Callable[[], Any]) -> None:
    vae = make().train()
    before = {name: (id(value), value.clone()) for name, value in vae.state_dict(keep_vars=True).items()}
    attributes, state = dict(vars(vae)), torch.get_rng_state()
    dry_run(vae, (1, 3, 32, 32), "encoding")
    after = vae.state_dict(keep_vars=True)
    assert all(
        id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items()
    )
    assert vars(vae) == attributes
    assert vae.training
    assert torch.equal(torch.get_rng_state(), state)


class Broken(nn.Module):
    def encode(self, pixels: Tensor) -> Tensor:
        raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("vae", "reason"), [(object(), "object is not a module"), (Broken(), "KeyError: 'no such")]
)
def test_what_cannot_be_run_gives_the_reason(vae: object, reason: str) -> None:
    with pytest.raises(NoTwinError, match=reason):
        dry_run(vae, (1, 3, 32, 32), "encoding")
