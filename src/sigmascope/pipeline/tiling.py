"""Run a VAE over a large picture tile by tile, and blend where tiles overlap.

What is needed at once is the memory of one tile, and of the output. Away from seams a tile gives what the whole
picture gives, as far as the network is local: group normalisation and attention see only the tile.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.progress import Progress, no_progress
from sigmascope.records.latents import TileFacts

Sides = int | tuple[int, int]
"""One size for both sides, or (height, width)."""
Where = tuple[EllipsisType, slice, slice]


@dataclass(frozen=True, slots=True)
class TileAxis:
    """One side of a picture, cut into tiles. All but `pixels` and `factor` count latent elements.

    Attributes:
        pixels: Length in pixels; need not be a multiple of `factor`.
        length: Length in latent elements.
        factor: Pixels along one latent element.
        tile: Length of a tile.
        overlap: What neighbours have in common, at least.
        starts: First positions.
    """

    pixels: int
    length: int
    factor: int
    tile: int
    overlap: int
    starts: tuple[int, ...]

    def latent_span(self, index: int) -> slice:
        """The latent elements of a tile."""
        start = self.starts[index]
        return slice(start, min(start + self.tile, self.length))

    def pixel_span(self, index: int) -> slice:
        """The pixels of a tile. The last one's go to the end of the picture, whatever the factor."""
        span = self.latent_span(index)
        end = self.pixels if span.stop == self.length else span.stop * self.factor
        return slice(span.start * self.factor, end)

    def span(self, index: int, *, latents: bool) -> slice:
        """The latent elements or the pixels of a tile."""
        return self.latent_span(index) if latents else self.pixel_span(index)

    @property
    def least_shared_pixels(self) -> int:
        """What every tile has in common with the next, in pixels; 0 where there is but one."""
        return min(_shared([self.pixel_span(index) for index in range(len(self.starts))]), default=0)

    def size(self, *, latents: bool) -> int:
        """Length in latent elements or in pixels."""
        return self.length if latents else self.pixels

    def weights(self, *, latents: bool) -> list[Tensor]:
        """The share of each tile in each of its places: at every place the shares add up to 1.

        A tile's share rises and falls linearly over all that it has in common with the tile before and the tile
        after it, which may be more than was asked for. Elsewhere, the picture's borders included, it is exactly 1.
        """
        spans = [self.span(index, latents=latents) for index in range(len(self.starts))]
        shared = [0, *_shared(spans), 0]
        rises = [
            _rise(span.stop - span.start, before, after)
            for span, before, after in zip(spans, shared, shared[1:], strict=False)
        ]
        total = torch.zeros(self.size(latents=latents), dtype=torch.float64)
        for span, rise in zip(spans, rises, strict=True):
            total[span] += rise
        return [(rise / total[span]).float() for span, rise in zip(spans, rises, strict=True)]


def _shared(spans: Sequence[slice]) -> list[int]:
    """What each tile has in common with the next."""
    return [span.stop - after.start for span, after in itertools.pairwise(spans)]


def _rise(length: int, before: int, after: int) -> Tensor:
    """Rises over the first `before` places, stays at 1, and falls over the last `after`."""
    position = torch.arange(1, length + 1, dtype=torch.float64)
    return torch.minimum(position / (before + 1), (length + 1 - position) / (after + 1)).clamp(max=1.0)


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
        return TileFacts(
            *self.tile_pixels, rows.least_shared_pixels, columns.least_shared_pixels, count=self.count
        )


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


def checked_tile(tile: int | None, factor: int) -> int:
    """A tile's side in latent elements.

    Raises:
        ConfigError: `factor` is below 1, or `tile` is not a positive multiple of it.
    """
    if factor < 1:
        raise ConfigError(
            f"downscale: {factor} is no factor.", hint="Give the VAE's spatial factor, such as 8."
        )
    if tile is None or tile < factor or tile % factor:
        raise ConfigError(
            f"tile: {tile} pixels are not a positive multiple of the VAE's factor {factor}.",
            hint=f"Take {_nearest(tile or 0, factor, factor, None)}.",
        )
    return tile // factor


def _nearest(size: int, factor: int, lowest: int, highest: int | None) -> str:
    """The multiples of `factor` on both sides of `size` that are allowed, as words."""
    below = max(size // factor * factor, lowest)
    above = max(-(-size // factor) * factor, lowest)
    if highest is not None:
        below, above = min(below, highest), min(above, highest)
    return str(below) if below == above else f"{below} or {above}"


def checked_overlap(overlap: int | None, tile: int, factor: int) -> int:
    """What neighbours share, in latent elements; a quarter of the tile if None.

    Args:
        overlap: In pixels.
        tile: In latent elements.
        factor: Pixels along a latent element.

    Raises:
        ConfigError: It is not a multiple of `factor`, or tiles would not advance.
    """
    if overlap is None:
        return quarter(tile)
    highest = (tile - 1) * factor
    if overlap < 0 or overlap % factor or overlap > highest:
        raise ConfigError(
            f"overlap: {overlap} pixels do not work with tiles of {tile * factor}: it takes a multiple of the "
            f"VAE's factor {factor} from 0 to {highest}.",
            hint=f"Take {_nearest(overlap, factor, 0, highest)}.",
        )
    return overlap // factor


def quarter(tile: int) -> int:
    """The overlap of tiles that is taken if none is asked for: a quarter, at least 1; 0 of tiles of 1.

    In latent elements, as is `tile`.
    """
    return min(max(tile // 4, 1), tile - 1)


def tile_starts(length: int, tile: int, overlap: int) -> tuple[int, ...]:
    """First positions of tiles that cover `length`, evenly apart, the last one flush with the end.

    Neighbours have at least `overlap` in common.
    """
    if length <= tile:
        return (0,)
    count = math.ceil((length - overlap) / (tile - overlap))
    return tuple(round(index * (length - tile) / (count - 1)) for index in range(count))


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


def _holds_latents(tensor: Tensor, plan: TilePlan) -> bool:
    size = tuple(tensor.shape[-2:])
    pixels, latents = plan.size(latents=False), plan.size(latents=True)
    if size in (pixels, latents):
        return size != pixels
    raise ConfigError(
        f"tensor: expected {_size(pixels)} pixels or {_size(latents)} latent elements, found {_size(tensor.shape)}.",
        hint="Plan the tiles for this tensor's own height and width.",
    )


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _where(plan: TilePlan, row: int, column: int, *, latents: bool) -> Where:
    return (..., plan.rows.span(row, latents=latents), plan.columns.span(column, latents=latents))


def _check(part: Tensor, where: Where, output: Tensor | None) -> None:
    _, rows, columns = where
    others = part if output is None else output
    expected = (*others.shape[:-2], rows.stop - rows.start, columns.stop - columns.start)
    if tuple(part.shape) != expected:
        raise ModelMismatchError(
            f"The VAE gave a tile of {_size(part.shape)}, expected {_size(expected)}.",
            hint="Give `plan` the VAE's own spatial factor as downscale, and how it rounds.",
        )


def _empty(part: Tensor, size: tuple[int, int]) -> Tensor:
    dtype = torch.promote_types(part.dtype, torch.float32)
    return torch.zeros(*part.shape[:-2], *size, dtype=dtype, device=part.device)
