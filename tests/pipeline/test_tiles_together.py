"""Tiles that meet at norms and attention against the whole: what a VAE gives without tiles is the truth."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLHunyuanVideo
from diffusers.models.attention_processor import Attention, AttnProcessor
from tests.families.vaes import parameters, pixels_of, relative_error, three_level_vae
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sigmascope
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH
from sigmascope.pipeline import tiles_together
from sigmascope.pipeline.model_state import Ram
from sigmascope.pipeline.peak_prediction import Planned, predict_peak
from sigmascope.pipeline.tile_plan import TilePlan, plan
from sigmascope.pipeline.tiling import in_tiles, tiled_map
from sigmascope.records.latents import TileFacts

ROUNDING = 2e-5
"""Of float32, through all layers, relative to the whole."""


def like_a_photograph(*shape: int, seed: int = 0) -> Tensor:
    """Large areas that differ from each other, and detail: what makes tiles differ."""
    generator = torch.Generator().manual_seed(seed)
    octaves = [torch.randn(1, 3, side, side, generator=generator) / side**0.5 for side in (2, 4, 8, 16, 32)]
    whole = sum(functional.interpolate(one, size=shape, mode="bicubic") for one in octaves)
    assert isinstance(whole, Tensor)
    return whole / whole.abs().max()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    with torch.no_grad():
        yield
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
@pytest.mark.parametrize("attention", [False, True])
def test_tiles_are_encoded_and_decoded_as_the_whole(attention: bool) -> None:
    vae = three_level_vae(attention=attention)
    picture = like_a_photograph(128, 160)
    tiles = plan(128, 160, 64, None, 4)
    latent = parameters(vae, picture)[:, :4]
    for function, source in ((parameters, picture), (pixels_of, latent)):
        run = functools.partial(function, vae)
        direct = run(source)
        assert relative_error(tiled_map(run, source, tiles), direct) > 0.2  # each tile by itself
        assert relative_error(tiled_map(run, source, tiles, modules=(vae,)), direct) < ROUNDING


@pytest.mark.slow
def test_a_trained_vae_gives_in_tiles_what_it_gives_at_once() -> None:
    vae = load_lbm(BASE_PATH, CONFIG_PATH).vae
    picture = like_a_photograph(128, 96)
    direct = vae.encode(picture)
    assert relative_error(vae.encode(picture, tile_size=64), direct) < ROUNDING
    assert relative_error(vae.decode(direct, tile_size=64), vae.decode(direct)) < ROUNDING
    latent, record = sigmascope.encode_latents(vae.vae_model, picture, strategies="tiled", tile=64)
    assert relative_error(latent, vae.vae_model.encode(picture).latent_dist.mode()) < ROUNDING
    tile = record.attempts[-1].tile
    assert tile is not None
    assert (tile.norm_statistics, tile.norm_reason) == ("whole", None)
    assert tile.overlap_difference is not None
    assert tile.overlap_difference < ROUNDING


@pytest.mark.slow
def test_a_vae_trained_here_gives_in_tiles_what_it_gives_at_once() -> None:
    vae = three_level_vae().train()
    optimizer = torch.optim.Adam(vae.parameters(), 2e-3)
    with torch.enable_grad():
        losses = []
        for step in range(60):
            picture = like_a_photograph(64, 64, seed=step)
            loss = functional.mse_loss(vae.decode(vae.encode(picture).latent_dist.mode()).sample, picture)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    vae.eval()
    picture = like_a_photograph(256, 256, seed=1000)
    run = functools.partial(parameters, vae)
    tiles = plan(256, 256, 128, None, 4)
    direct = run(picture)
    assert relative_error(tiled_map(run, picture, tiles), direct) > 0.05
    assert relative_error(tiled_map(run, picture, tiles, modules=(vae,)), direct) < ROUNDING


@pytest.mark.parametrize("size", [(131, 159), (67, 130), (64, 161)])
def test_sides_that_are_no_multiple_of_the_factor(size: tuple[int, int]) -> None:
    vae = three_level_vae()
    picture = like_a_photograph(*size)
    run = functools.partial(parameters, vae)
    tiled, facts = in_tiles(run, picture, plan(*size, 64, 16, 4), modules=(vae,))
    assert relative_error(tiled, run(picture)) < ROUNDING
    assert facts.norm_statistics == "whole"


def test_pictures_of_a_batch_have_statistics_of_their_own() -> None:
    vae = three_level_vae()
    pictures = torch.cat([like_a_photograph(96, 96, seed=1), 0.1 * like_a_photograph(96, 96, seed=2)])
    run = functools.partial(parameters, vae)
    tiled = tiled_map(run, pictures, plan(96, 96, 64, None, 4), modules=(vae,))
    assert relative_error(tiled, run(pictures)) < ROUNDING


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2e-2), (torch.float64, 1e-7)])
def test_other_types(dtype: torch.dtype, rounding: float) -> None:
    vae = three_level_vae().to(dtype)
    picture = like_a_photograph(96, 128).to(dtype)
    run = functools.partial(parameters, vae)
    tiled = tiled_map(run, picture, plan(96, 128, 64, None, 4), modules=(vae,))
    assert tiled.dtype == dtype
    assert relative_error(tiled.double(), run(picture).double()) < rounding


class Silus(TorchFunctionMode):
    """Counts them."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is functional.silu
        return func(*args, **(kwargs or {}))


def test_autocast_and_modes_of_the_caller_hold_for_tiles_too() -> None:
    vae, tiles = three_level_vae(), plan(96, 128, 64, None, 4)
    picture = like_a_photograph(96, 128)
    run = functools.partial(parameters, vae)
    with torch.autocast("cpu", torch.bfloat16):
        with Silus() as apart:
            tiled_map(run, picture, tiles)
        with Silus() as together:
            tiled = tiled_map(run, picture, tiles, modules=(vae,))
        direct = run(picture)
    assert apart.count == together.count > 0
    assert tiled.dtype == direct.dtype == torch.bfloat16
    assert relative_error(tiled.float(), direct.float()) < 2e-2


@pytest.mark.slow
def test_videos_share_their_norms_over_space_and_time() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    video = torch.stack([like_a_photograph(64, 96, seed=frame)[0] for frame in range(5)], 1)[None]
    for kind in (
        AutoencoderKLCogVideoX,
        AutoencoderKLHunyuanVideo,
    ):  # whose attention looks back in time alone
        vae = kind(**options).eval()
        tiles = plan(64, 96, 64, None, 8)
        latent = parameters(vae, video)[:, :16]
        for function, source in ((parameters, video), (pixels_of, latent)):
            run = functools.partial(function, vae)
            tiled, facts = in_tiles(run, source, tiles, modules=(vae,))
            direct = run(source)
            assert (facts.norm_statistics, facts.norm_reason) == ("whole", None)
            assert relative_error(tiled_map(run, source, tiles), direct) > 0.1
            assert relative_error(tiled, direct) < ROUNDING


class Small(nn.Module):
    """An encoder of factor 1 whose middle is given."""

    def __init__(self, middle: Callable[["Small", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norm = nn.GroupNorm(4, 8)
        self.middle = middle
        self.seen: list[Tensor] = []

    def forward(self, pixels: Tensor) -> Tensor:
        made: Tensor = self.last(self.middle(self, self.first(pixels)))
        return made


def cut(vae: nn.Module) -> tuple[Tensor, TileFacts]:
    return in_tiles(
        vae, like_a_photograph(24, 32), plan(24, 32, 16, 8, 1), modules=(vae,), compared=lambda a: a
    )


def test_a_vae_that_writes_into_itself_is_not_used_for_two_tiles_in_turn() -> None:
    def remembers(vae: Small, features: Tensor) -> Tensor:
        vae.seen = [features]
        return vae.norm(vae.norm(features)) + vae.seen[0]  # type: ignore[no-any-return]

    vae = Small(remembers)
    tiled, facts = cut(vae)
    assert (facts.norm_statistics, facts.norm_reason) == (
        "estimated",
        "it keeps state from one layer to the next",
    )
    assert tiled.shape == (1, 4, 24, 32)


def test_norms_of_another_kind_see_their_tile_and_the_record_says_so() -> None:
    vae = Small(lambda vae, features: (features - features.mean()) / features.std())
    vae.norm = nn.Identity()  # type: ignore[assignment]
    facts = cut(vae)[1]
    assert facts.norm_statistics == "per_tile"
    assert facts.norm_reason == "it has no GroupNorm, and other norms see only their own tile"
    assert facts.overlap_difference is not None
    assert facts.overlap_difference > 0.05


def test_tiles_that_have_no_room_to_wait_see_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_together, "free_ram", lambda: Ram(100, "this machine"))
    facts = cut(Small(lambda vae, features: vae.norm(features)))[1]
    assert facts.norm_statistics == "estimated"
    assert "this machine has 0 MB free" in str(facts.norm_reason)


def test_tiles_that_get_no_threads_see_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    facts = cut(Small(lambda vae, features: vae.norm(features)))[1]
    assert (facts.norm_statistics, facts.norm_reason) == (
        "estimated",
        "its tiles get no threads: can't start new thread",
    )


def test_where_ram_runs_out_while_tiles_wait_they_see_an_estimate() -> None:
    calls = iter(range(3))

    def fails(vae: Small, features: Tensor) -> Tensor:
        if next(calls, None) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return vae.norm(features)  # type: ignore[no-any-return]

    facts = cut(Small(fails))[1]
    assert facts.norm_statistics == "estimated"
    assert str(facts.norm_reason).startswith(
        "RAM ran out while its tiles waited for each other: RuntimeError"
    )


def errors_to_the_whole(
    vae: Any, run: Callable[[Tensor], Tensor], source: Tensor, tiles: TilePlan
) -> tuple[float, float, TileFacts]:
    """Of tiles by themselves, of tiles under an estimate, and the facts of these."""
    direct = run(source)
    alone = tiled_map(run, source, tiles)
    estimated, facts = in_tiles(run, source, tiles, modules=(vae,), apart="no room", compared=lambda a: a)
    assert (facts.norm_statistics, facts.norm_reason) == ("estimated", "no room")
    return relative_error(alone, direct), relative_error(estimated, direct), facts


@pytest.mark.slow
def test_an_estimate_of_a_trained_vae_is_near_the_whole() -> None:
    vae = load_lbm(BASE_PATH, CONFIG_PATH).vae.vae_model
    source = like_a_photograph(128, 192)
    tiles = plan(128, 192, 64, None, 2 ** (len(vae.config.block_out_channels) - 1))
    for function in (parameters, pixels_of):
        run = functools.partial(function, vae)
        alone, estimated, facts = errors_to_the_whole(vae, run, source, tiles)
        assert alone > 0.2
        assert estimated < 0.1
        assert facts.overlap_difference is not None
        assert 0.5 * estimated < facts.overlap_difference < 1  # tiles agree where all are equally off
        source = run(source)[:, : vae.config.latent_channels]


@pytest.mark.parametrize("kind", ["photograph", "noise"])
def test_an_estimate_of_random_weights_is_not_further_off(kind: str) -> None:
    vae = three_level_vae(attention=False, seed=0)
    source = like_a_photograph(132, 160)
    if kind == "noise":  # which an average over places would flatten
        source = torch.rand(source.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    run = functools.partial(parameters, vae)
    alone, estimated, _ = errors_to_the_whole(vae, run, source, plan(132, 160, 64, None, 4))
    assert estimated < (0.6 if kind == "photograph" else 1.2) * alone


@pytest.mark.parametrize(
    ("in_the_copy", "why"),
    [
        (2, "its tiles do not go through the same norms"),
        (0, "it met no group norm"),
        (None, "an estimate failed: ValueError"),
    ],
)
def test_where_nothing_can_be_estimated_norms_see_their_tile(in_the_copy: int | None, why: str) -> None:
    def run(vae: Small, features: Tensor) -> Tensor:
        norms: int | None = 1
        if features.shape[-2] < 16:  # the copy of 24 × 37 as large as a tile is 10 × 16
            norms = in_the_copy
        if norms is None:
            raise ValueError("too small")
        for _ in range(norms):
            features = vae.norm(features)
        return features

    vae, source = Small(run), like_a_photograph(24, 37)
    tiles = plan(24, 37, 16, 8, 1)
    tiled, facts = in_tiles(vae, source, tiles, modules=(vae,), apart="no room")
    assert facts.norm_statistics == "per_tile"
    assert str(facts.norm_reason).startswith(f"no room, and {why}")
    assert torch.equal(tiled, tiled_map(vae, source, tiles))


def test_weights_that_cannot_be_used_otherwise_are_used_as_they_are() -> None:
    """Such as quantised ones, which take part in their own operations alone."""
    calls = iter(range(2))

    def run(vae: Small, features: Tensor) -> Tensor:
        features = vae.norm(features)
        if next(calls, None) == 1:  # the first tile under the copy's statistics
            raise NotImplementedError("no such operation")
        return features

    vae, source = Small(run), like_a_photograph(24, 37)
    tiles = plan(24, 37, 16, 8, 1)
    tiled, facts = in_tiles(vae, source, tiles, modules=(vae,), apart="no room")
    assert facts.norm_statistics == "per_tile"
    assert str(facts.norm_reason).startswith("no room, and an estimate failed: NotImplementedError")
    assert torch.equal(tiled, tiled_map(vae, source, tiles))


def test_an_estimate_that_runs_out_of_memory_says_so() -> None:
    def fails(vae: Small, features: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    vae = Small(fails)
    with pytest.raises(torch.OutOfMemoryError):
        in_tiles(vae, like_a_photograph(24, 32), plan(24, 32, 16, 8, 1), modules=(vae,), apart="no room")


def test_where_gradients_are_recorded_tiles_go_by_themselves() -> None:
    vae = Small(lambda vae, features: vae.norm(features))
    with torch.enable_grad():
        tiled, facts = cut(vae)
    assert (facts.norm_statistics, facts.norm_reason) == ("per_tile", "gradients are recorded")
    assert tiled.requires_grad


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("point", [1, 4, 9, 17])
def test_what_ends_one_tile_ends_all(error: BaseException, point: int) -> None:
    calls = iter(range(point))

    def fails(vae: Small, features: Tensor) -> Tensor:
        for _ in range(3):
            features = vae.norm(features)
            if next(calls, None) is None:
                vae.seen.append(features)
                raise error
        return features

    vae = Small(fails)
    before = dict(vars(vae))
    with pytest.raises(type(error)) as raised:
        cut(vae)
    assert raised.value is error
    assert vars(vae) == before


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most that tensors hold at a time, beside the whole's features, which `torch.empty` makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_empty = func is torch.ops.aten.empty.memory_format
        for values, into in ((args, self.given), (found, self.given if is_empty else self.made)):
            for one in tree_leaves(values):
                if not isinstance(one, Tensor):
                    continue
                storage = one.untyped_storage()
                if storage not in self.given and storage not in self.made:
                    into.add(storage)
        self.highest = max(self.highest, sum(one.nbytes() for one in self.made))
        return found


@pytest.mark.slow
def test_on_an_accelerator_tiles_that_wait_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, picture = three_level_vae(attention=False), like_a_photograph(160, 160)
    run = functools.partial(parameters, vae)
    tiles = plan(160, 160, 64, None, 4)
    with Alive() as apart:
        tiled_map(run, picture, tiles)
    monkeypatch.setattr(tiles_together, "_RAM", "another memory")
    with Alive() as together:
        tiled = tiled_map(run, picture, tiles, modules=(vae,))
    assert tiles.count == 9
    assert together.highest < 1.2 * apart.highest
    assert relative_error(tiled, run(picture)) < ROUNDING


@pytest.mark.slow
def test_what_waits_in_ram_is_part_of_the_prediction_on_a_cpu() -> None:
    vae, picture = three_level_vae(attention=False), like_a_photograph(160, 160)
    tiles = plan(160, 160, 64, None, 4)
    planned = Planned((1, 3, 160, 160), "encoding", "tiled", tiles)
    apart, together = (
        predict_peak(vae, one).tensor_bytes for one in (planned, replace(planned, together=True))
    )
    whole_features = 16 * 160 * 160 * 4
    with Alive() as seen:
        tiled_map(functools.partial(parameters, vae), picture, tiles, modules=(vae,))
    assert apart is not None
    assert together is not None
    assert 0.8 < together / (seen.highest + 2 * whole_features) < 1.25
    assert together > 2 * apart


def test_the_difference_of_neighbours_is_relative_to_what_they_gave() -> None:
    given = iter((1.0, 2.0, 2.0, 4.0))
    _, facts = in_tiles(
        lambda part: torch.full_like(part, next(given)),
        torch.zeros(1, 1, 12, 12),
        plan(12, 12, 8, 4, 1),
        compared=lambda part: part,
    )
    # by hand: pairs 1-2, 2-4 side by side and 1-2, 2-4 one above the other share 4 × 8 places each
    apart, sizes = 1 + 4 + 1 + 4, (1 + 4) + (4 + 16) + (1 + 4) + (4 + 16)
    assert facts.overlap_difference == pytest.approx((apart / (sizes / 2)) ** 0.5)


def test_attention_by_tile_shows_in_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_together, "_MOST_PLACES_FOR_ATTENTION", 0)
    vae = three_level_vae()
    _, facts = in_tiles(
        functools.partial(parameters, vae),
        like_a_photograph(128, 160),
        plan(128, 160, 64, None, 4),
        modules=(vae,),
        compared=lambda part: part,
    )
    assert facts.norm_reason == "attention sees only its tile: the whole picture has too many positions"
    assert facts.overlap_difference is not None
    assert facts.overlap_difference > 0.02


def test_attention_by_other_means_than_pytorchs_function_is_told() -> None:
    vae = three_level_vae()
    for module in vae.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
    run = functools.partial(parameters, vae)
    _, facts = in_tiles(run, like_a_photograph(128, 160), plan(128, 160, 64, None, 4), modules=(vae,))
    assert facts.norm_statistics == "whole"
    assert facts.norm_reason == "attention sees only its tile: it does not use scaled_dot_product_attention"


def test_attention_under_a_mask_that_is_not_of_whole_frames_is_told() -> None:
    def looks_back(vae: Small, features: Tensor) -> Tensor:
        normal = vae.norm(features)
        places = normal.flatten(2).transpose(1, 2)
        mask = torch.ones(places.shape[1], places.shape[1], dtype=torch.bool).tril()
        seen = functional.scaled_dot_product_attention(places, places, places, attn_mask=mask)
        return seen.transpose(1, 2).view_as(normal)

    facts = cut(Small(looks_back))[1]
    assert facts.norm_statistics == "whole"
    assert facts.norm_reason == "attention sees only its tile: its mask differs between positions"
