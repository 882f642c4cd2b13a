import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.pipeline.peak_prediction import counted
from sigmascope.pipeline.tile_plan import TilePlan, plan, tile_starts
from sigmascope.pipeline.tiling import tiled_map

FACTOR = 8


def pooled(pixels: Tensor) -> Tensor:
    """An encoder that sees nothing beyond its own latent element."""
    flat = pixels.reshape(-1, 1, *pixels.shape[-2:])
    return functional.avg_pool2d(flat, FACTOR).reshape(
        *pixels.shape[:-2], *(s // FACTOR for s in pixels.shape[-2:])
    )


def repeated(latents: Tensor) -> Tensor:
    """A decoder that sees nothing beyond its own latent element."""
    return latents.repeat_interleave(FACTOR, -1).repeat_interleave(FACTOR, -2)


@pytest.mark.parametrize(
    ("length", "tile", "overlap", "starts"),
    [(10, 10, 2, (0,)), (4, 10, 2, (0,)), (18, 10, 2, (0, 8)), (11, 10, 2, (0, 1)), (20, 10, 2, (0, 5, 10))],
)
def test_tiles_cover_the_length(length: int, tile: int, overlap: int, starts: tuple[int, ...]) -> None:
    assert tile_starts(length, tile, overlap) == starts


@given(st.integers(1, 200), st.integers(2, 60), st.data())
def test_neighbours_share_at_least_the_overlap_and_reach_the_end(
    length: int, tile: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, tile - 1))
    starts = tile_starts(length, tile, overlap)
    assert all(0 < after - before <= tile - overlap for before, after in itertools.pairwise(starts))
    assert (starts[0], starts[-1]) == (0, max(length - tile, 0))


@settings(deadline=None)
@given(st.integers(16, 150), st.integers(16, 150), st.integers(2, 8), st.data())
def test_tiling_a_pointwise_encoder_changes_nothing(
    height: int, width: int, tile: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, tile - 1))
    pixels = torch.randn(1, 2, height, width, generator=torch.Generator().manual_seed(0))
    tiles = plan(height, width, tile * FACTOR, overlap * FACTOR, FACTOR)
    torch.testing.assert_close(tiled_map(pooled, pixels, tiles), pooled(pixels))


@pytest.mark.parametrize("overlap", [0, 8, 16, 24, 32, 40, 56])
def test_tiling_a_pointwise_decoder_changes_nothing_at_any_overlap(overlap: int) -> None:
    latents = torch.randn(2, 3, 12, 21)
    tiled = tiled_map(repeated, latents, plan(96, 168, 64, overlap, FACTOR))
    torch.testing.assert_close(tiled, repeated(latents))


def test_shares_of_all_tiles_add_up_to_one() -> None:
    axis = plan(100, 100, 32, 16, 4).rows
    for latents in (True, False):
        total = torch.zeros(axis.size(latents=latents))
        for index, share in enumerate(axis.weights(latents=latents)):
            total[axis.span(index, latents=latents)] += share
        torch.testing.assert_close(total, torch.ones_like(total))


def test_shares_rise_linearly_over_the_overlap() -> None:
    _, second = plan(8, 14, 8, 2, 1).columns.weights(latents=True)
    torch.testing.assert_close(second, torch.tensor([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]))


def test_shares_rise_over_all_that_tiles_share_and_not_towards_the_pictures_border() -> None:
    first, second = plan(8, 9, 8, 2, 1).columns.weights(latents=True)
    falling = torch.tensor([8, 7, 6, 5, 4, 3, 2, 1]) / 8
    torch.testing.assert_close(first, falling)
    torch.testing.assert_close(second, falling.flip(0))


def test_a_tiles_own_places_are_left_bit_for_bit() -> None:
    pixels = torch.randn(1, 1, 8, 14)
    tiled = tiled_map(lambda part: part * 1.7, pixels, plan(8, 14, 8, 2, 1))
    assert torch.equal(tiled[..., :6], (pixels * 1.7)[..., :6])


def test_one_tile_is_the_direct_result_bit_for_bit() -> None:
    pixels = torch.randn(1, 3, 40, 40, dtype=torch.bfloat16)
    assert torch.equal(tiled_map(pooled, pixels, plan(40, 40, 64, 16, FACTOR)), pooled(pixels))


def test_frames_of_a_video_stay_together() -> None:
    seen: list[tuple[int, ...]] = []

    def encode(part: Tensor) -> Tensor:
        seen.append(tuple(part.shape))
        return pooled(part)

    video = torch.randn(1, 3, 5, 64, 96)
    assert tiled_map(encode, video, plan(64, 96, 64, 32, FACTOR)).shape == (1, 3, 5, 8, 12)
    assert seen == [(1, 3, 5, 64, 64)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_result_keeps_the_functions_dtype(dtype: torch.dtype) -> None:
    pixels = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    tiled = tiled_map(lambda part: part.to(dtype), pixels, plan(32, 32, 16, 8, 1))
    assert tiled.dtype == dtype


def test_half_precision_is_summed_in_float32() -> None:
    pixels = torch.full((1, 1, 8, 14), 0.1, dtype=torch.float16)
    assert torch.equal(tiled_map(lambda part: part, pixels, plan(8, 14, 8, 2, 1)), pixels)


@pytest.mark.parametrize(("rounding", "ceil"), [("down", False), ("up", True)])
def test_a_side_that_is_no_multiple_of_the_factor_ends_as_the_vae_ends_it(rounding: str, ceil: bool) -> None:
    def encode(part: Tensor) -> Tensor:
        return functional.avg_pool2d(part, FACTOR, ceil_mode=ceil)

    pixels = torch.randn(1, 1, 101, 67)
    tiles = plan(101, 67, 32, 16, FACTOR, rounding=rounding)  # type: ignore[arg-type]
    torch.testing.assert_close(tiled_map(encode, pixels, tiles), encode(pixels))


def test_no_more_is_held_than_one_tile_and_the_output() -> None:
    pixels = torch.empty(1, 3, 1024, 1024, device="meta", dtype=torch.float16)
    tiles = plan(1024, 1024, 256, 64, 1)
    found = counted(lambda: tiled_map(lambda part: part + 1, pixels, tiles))
    output, tile = 3 * 1024 * 1024, 3 * 256 * 256
    blending = output * 4 + tile * (2 + 4) + 2 * 256 * 256 * 4 + 100_000
    at_the_end = output * (4 + 2) + tile * 4 + 100_000
    assert found.tensor_bytes <= max(blending, at_the_end)


def test_tiles_may_be_oblong() -> None:
    tiles = plan(64, 256, (64, 128), (0, 32), FACTOR)
    assert (tiles.count, tiles.tile_pixels) == (3, (64, 128))


def test_the_default_overlap_is_a_quarter() -> None:
    assert plan(448, 448, 256, None, FACTOR).facts().overlap_width == 64


def test_facts_are_in_pixels() -> None:
    facts = plan(100, 512, 256, 128, FACTOR).facts()
    assert (facts.height, facts.width, facts.count, facts.by) == (100, 256, 3, "sigmascope")
    assert (facts.overlap_height, facts.overlap_width) == (0, 128)


def test_facts_tell_what_neighbours_really_share() -> None:
    facts = plan(264, 512, 256, 64, FACTOR).facts()
    assert (facts.overlap_height, facts.overlap_width) == (248, 128)


def test_the_largest_part_has_what_is_left_over() -> None:
    assert plan(100, 100, 48, 16, FACTOR).largest_input == (52, 52)


def test_progress_is_told_after_each_tile() -> None:
    told: list[tuple[int, int, str]] = []
    tiled_map(
        pooled, torch.zeros(1, 1, 64, 96), plan(64, 96, 64, 32, FACTOR), progress=lambda *a: told.append(a)
    )
    assert told == [(1, 2, "tile"), (2, 2, "tile")]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: plan(512, 512, 100, 16, 8), "96 or 104"),
        (lambda: plan(512, 512, 4, 0, 8), "Take 8"),
        (lambda: plan(512, 512, 0, 0, 8), "Take 8"),
        (lambda: plan(512, 512, -64, 0, 8), "Take 8"),
        (lambda: plan(512, 512, 64, 20, 8), "16 or 24"),
        (lambda: plan(512, 512, 64, 64, 8), "Take 56"),
        (lambda: plan(512, 512, 64, 200, 8), "Take 56"),
        (lambda: plan(512, 512, 64, -8, 8), "Take 0"),
        (lambda: plan(512, 512, 64, 8, 0), "such as 8"),
        (lambda: plan(5, 512, 64, 8, 8), "at least 8"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_sizes_that_can(
    make: Callable[[], TilePlan], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        make()


def test_half_a_tile_of_overlap_works() -> None:
    assert plan(512, 512, 512 // 4, 512 // 8, FACTOR).rows.starts == (0, 8, 16, 24, 32, 40, 48)


def test_a_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 64×64 pixels or 8×8 latent elements, found 1×3×64×72"):
        tiled_map(pooled, torch.zeros(1, 3, 64, 72), plan(64, 64, 32, 8, FACTOR))


def test_a_vae_of_another_factor_is_refused() -> None:
    with pytest.raises(ModelMismatchError, match=r"gave a tile of 1×3×8×8, expected 1×3×4×4"):
        tiled_map(
            lambda part: functional.avg_pool2d(part, 4), torch.zeros(1, 3, 64, 64), plan(64, 64, 32, 8, 8)
        )
