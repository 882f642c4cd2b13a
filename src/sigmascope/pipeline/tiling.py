"""Run a VAE over a large picture tile by tile, and blend where tiles overlap.

What is needed at once is the memory of one tile, and of the output. Away from seams a tile gives what the whole
picture gives, as far as the network is local: group normalisation and attention see the tile only.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.pipeline.tiling_axis import TileAxis, tile_starts
from sigmascope.pipeline.tiling_sizes import checked_overlap, checked_tile
from sigmascope.progress import Progress, no_progress
from sigmascope.records.latents import TileFacts

Sides = int | tuple[int, int]
"""One size for both sides, or (height, width)."""
Where = tuple[EllipsisType, slice, slice]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a picture and its latent are cut: `rows` along the height, `columns` along the width."""

    rows: TileAxis
    columns: TileAxis

    @property
    def count(self) -> int:
        """Tiles in all."""
        return len(self.rows.starts) * len(self.columns.starts)

    @property
    def tile_pixels(self) -> tuple[int, int]:
        """Height and width of a tile; a picture smaller than that is one tile."""
        height, width = (min(axis.tile * axis.factor, axis.pixels) for axis in (self.rows, self.columns))
        return height, width

    @property
    def largest_input(self) -> tuple[int, int]:
        """Height and width in pixels of the largest part that the VAE is given."""
        height, width = (
            max(span.stop - span.start for span in map(axis.pixel_span, range(len(axis.starts))))
            for axis in (self.rows, self.columns)
        )
        return height, width

    def size(self, *, latents: bool) -> tuple[int, int]:
        """Height and width of the whole picture, in pixels or latent elements."""
        return self.rows.size(latents=latents), self.columns.size(latents=latents)

    def facts(self) -> TileFacts:
        """What a record keeps of it, in pixels."""
        rows, columns = self.rows, self.columns
        overlaps = rows.overlap * rows.factor, columns.overlap * columns.factor
        return TileFacts(*self.tile_pixels, *overlaps, count=self.count)


def plan(
    height: int,
    width: int,
    tile: Sides,
    overlap: Sides | None,
    downscale: int,
    *,
    rounding: Literal["down", "up"] = "down",
) -> TilePlan:
    """Cut a picture of height × width pixels into tiles that suit a VAE.

    Tiles are spread evenly, so that neighbours share at least `overlap`; none is smaller than `tile` unless the
    picture is.

    Args:
        height: Of the picture, in pixels. For decoding, latent height times `downscale`.
        width: The same.
        tile: Side of a tile in pixels, or (height, width): a multiple of `downscale`.
        overlap: What neighbours share, in pixels: a multiple of `downscale` from 0 to less than a tile. None
            is a quarter of the tile.
        downscale: The VAE's spatial factor: pixels along one latent element.
        rounding: What the VAE makes of a side that is no multiple of `downscale`: AutoencoderKL and WAN drop
            what is left over ("down"), AutoencoderTiny gives one more latent element ("up").

    Raises:
        ConfigError: A size that cannot work; the hint names sizes that can.
    """
    tiles, overlaps = _both(tile), _both(overlap)
    rows = _axis("height", height, tiles[0], overlaps[0], downscale, rounding)
    return TilePlan(rows, _axis("width", width, tiles[1], overlaps[1], downscale, rounding))


def tiled_map(
    function: Callable[[Tensor], Tensor], tensor: Tensor, plan: TilePlan, *, progress: Progress = no_progress
) -> Tensor:
    """Apply an encoder or a decoder to overlapping tiles and blend the results linearly.

    Which of the two it is, follows from the tensor's size. Only the last two axes are cut: frames of a
    video stay together, since a causal video VAE carries what it saw from one chunk to the next.

    Args:
        function: Maps pixels (..., height, width) to latents, or latents to pixels.
        tensor: The whole picture or latent of `plan`.
        plan: From `plan`.
        progress: Told after each tile.

    Returns:
        What `function` gives, for the whole, in its dtype; sums are in float32. A single tile's result is
        given back as it is.

    Raises:
        ConfigError: The tensor is neither the plan's picture nor its latent.
        ModelMismatchError: `function` gives tiles of a size that the plan's `downscale` does not explain.
    """
    from_latents = _holds_latents(tensor, plan)
    if plan.count == 1:
        return function(tensor)
    row_weights, column_weights = (
        axis.weights(latents=not from_latents) for axis in (plan.rows, plan.columns)
    )
    output: Tensor | None = None
    dtype = tensor.dtype
    indices = itertools.product(range(len(row_weights)), range(len(column_weights)))
    for done, (row, column) in enumerate(indices, start=1):
        part = function(tensor[_where(plan, row, column, latents=from_latents)])
        where = _where(plan, row, column, latents=not from_latents)
        _check(part, where, output)
        if output is None:
            dtype = part.dtype
            output = _empty(part, plan.size(latents=not from_latents))
        weight = row_weights[row][:, None] * column_weights[column]
        output[where] += part * weight.to(part.device)
        del part  # not to be held beside the next tile's work
        progress(done, plan.count, "tile")
    assert output is not None  # there is at least one tile
    return output.to(dtype)


def _both(sides: Sides | None) -> tuple[int, int] | tuple[None, None]:
    if sides is None:
        return None, None
    return (sides, sides) if isinstance(sides, int) else sides


def _axis(
    side: str,
    pixels: int,
    tile: int | None,
    overlap: int | None,
    factor: int,
    rounding: Literal["down", "up"],
) -> TileAxis:
    latent_tile = checked_tile(tile, factor)
    shared = checked_overlap(overlap, latent_tile, factor)
    length = pixels // factor if rounding == "down" else -(-pixels // factor)
    if length < 1:
        raise ConfigError(
            f"{side}: {pixels} pixels are less than one latent element, which is {factor}.",
            hint=f"Give at least {factor} pixels.",
        )
    return TileAxis(pixels, length, factor, latent_tile, shared, tile_starts(length, latent_tile, shared))


def _where(plan: TilePlan, row: int, column: int, *, latents: bool) -> Where:
    return (..., plan.rows.span(row, latents=latents), plan.columns.span(column, latents=latents))


def _holds_latents(tensor: Tensor, plan: TilePlan) -> bool:
    size = tuple(tensor.shape[-2:])
    pixels, latents = plan.size(latents=False), plan.size(latents=True)
    if size in (pixels, latents):
        return size != pixels
    raise ConfigError(
        f"tensor: expected {_size(pixels)} pixels or {_size(latents)} latent elements, found {_size(tensor.shape)}.",
        hint="Plan the tiles for this tensor's own height and width.",
    )


def _check(part: Tensor, where: Where, output: Tensor | None) -> None:
    _, rows, columns = where
    others = part if output is None else output
    expected = (*others.shape[:-2], rows.stop - rows.start, columns.stop - columns.start)
    if tuple(part.shape) != expected:
        raise ModelMismatchError(
            f"The VAE gave a tile of {_size(part.shape)}, expected {_size(expected)}.",
            hint="Give `plan` the VAE's own spatial factor as downscale, and how it rounds.",
        )


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _empty(part: Tensor, size: tuple[int, int]) -> Tensor:
    dtype = torch.promote_types(part.dtype, torch.float32)
    return torch.zeros(*part.shape[:-2], *size, dtype=dtype, device=part.device)
