"""How a picture is cut into tiles, and how much each counts where they overlap.

`plan` cuts it. A `TileAxis` is one side: where its tiles lie, and the ramps by which they are blended. A `Place` is one tile.
Whether to tile, and how large the tiles are, is decided by the memory that there is: `strategies.ladder`.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.records.latents import TileFacts

Sides = int | tuple[int, int]
"""One size for both sides, or (height, width)."""
Where = tuple[EllipsisType, slice, slice]


class ApartError(Exception):
    """Tiles cannot meet; the message says why."""


@dataclass(frozen=True, slots=True)
class Span:
    """A tile's features along one axis.

    Attributes:
        place: Where they are among the whole picture's features.
        own: The tile's own positions, counted within the tile. Each position of the picture belongs to one tile.
        own_place: The tile's own positions, counted within the whole picture.
    """

    place: slice
    own: slice
    own_place: slice


@dataclass(frozen=True, slots=True)
class TileAxis:
    """One side of a picture, cut into tiles. All but `pixels` and `factor` count latent elements.

    Attributes:
        pixels: Length in pixels; need not be a multiple of `factor`.
        length: Length in latent elements.
        factor: Pixels along one latent element.
        tile: Length of a tile.
        overlap: The least overlap of neighbours.
        starts: First positions.
    """

    pixels: int
    length: int
    factor: int
    tile: int
    overlap: int
    starts: tuple[int, ...]

    def span(self, index: int, *, latents: bool) -> slice:
        """The latent elements or pixels of a tile. The last tile reaches to the end, even if the factor does not divide it."""
        start = self.starts[index]
        stop = min(start + self.tile, self.length)
        if latents:
            return slice(start, stop)
        return slice(start * self.factor, self.pixels if stop == self.length else stop * self.factor)

    def spans(self, *, latents: bool) -> list[slice]:
        """`span` of all tiles."""
        return [self.span(index, latents=latents) for index in range(len(self.starts))]

    @property
    def least_shared_pixels(self) -> int:
        """The least overlap of a tile with the next, in pixels; 0 for a single tile."""
        return min(self.shared(latents=False)[1:-1], default=0)

    def shared(self, *, latents: bool) -> list[int]:
        """The overlap before each tile and after the last one; the first and last entries are 0."""
        pairs = itertools.pairwise(self.spans(latents=latents))
        return [0, *(span.stop - after.start for span, after in pairs), 0]

    def features(self, index: int, length: int, scale: Fraction) -> Span:
        """Where a tile's features are in the whole, and which of them are its own.

        Raises:
            ApartError: The features of this length do not lie on a grid that all tiles share.
        """
        last = len(self.starts) - 1
        start = self.starts[index] * scale
        span = self.span(index, latents=True)
        beyond = length - (span.stop - span.start) * scale
        if start.denominator > 1 or (beyond if index < last else abs(beyond) >= max(scale, 1)):
            raise ApartError(f"features of {length} do not lie on the grid of its tiles")
        cuts = [(after + before + self.tile) // 2 for before, after in itertools.pairwise(self.starts)]
        first = int(start)
        begin = 0 if index == 0 else int(cuts[index - 1] * scale) - first
        end = length if index == last else int(cuts[index] * scale) - first
        return Span(slice(first, first + length), slice(begin, end), slice(first + begin, first + end))

    def size(self, *, latents: bool) -> int:
        """Length in latent elements or in pixels."""
        return self.length if latents else self.pixels

    def weights(self, *, latents: bool, inner: bool = False) -> list[Tensor]:
        """The weight of each tile at each of its positions. At every position of the picture the weights add up to 1.

        A weight rises and falls linearly over the overlap with the tile before and the tile after, which may be larger
        than asked for. Elsewhere, the picture's borders included, it is exactly 1.

        Args:
            latents: Whether positions are latent elements.
            inner: Use only the inner half of each overlap, so that the tiles' edges have no weight.
        """
        spans = self.spans(latents=latents)
        shared = self.shared(latents=latents)
        rises = [
            _rise(span.stop - span.start, before, after, inner=inner)
            for span, before, after in zip(spans, shared, shared[1:], strict=False)
        ]
        total = torch.zeros(self.size(latents=latents), dtype=torch.float64)
        for span, rise in zip(spans, rises, strict=True):
            total[span] += rise
        return [(rise / total[span]).float() for span, rise in zip(spans, rises, strict=True)]


def _rise(length: int, before: int, after: int, *, inner: bool) -> Tensor:
    """Rises over the first `before` places, stays at 1, and falls over the last `after`."""
    position = torch.arange(1, length + 1, dtype=torch.float64)
    ends = []
    for places, shared in ((position, before), (position.flip(0), after)):
        outside = outer_places(shared) if inner else 0
        ends.append((places - outside) / (shared - 2 * outside + 1))
    return torch.minimum(*ends).clamp(0.0, 1.0)


def outer_places(shared: int) -> int:
    """How many positions at each end of an overlap are outside its inner half."""
    return shared // 4


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a picture and its latent are cut: `rows` along the height, `columns` along the width."""

    rows: TileAxis
    columns: TileAxis

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tiles along the height and along the width."""
        return len(self.rows.starts), len(self.columns.starts)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return math.prod(self.shape)

    @property
    def tile_pixels(self) -> tuple[int, int]:
        """Height and width of a tile; a picture smaller than that is one tile."""
        height, width = (min(axis.tile * axis.factor, axis.pixels) for axis in (self.rows, self.columns))
        return height, width

    @property
    def largest_input(self) -> tuple[int, int]:
        """Height and width in pixels of the largest part that the VAE is given."""
        height, width = (
            max(span.stop - span.start for span in axis.spans(latents=False))
            for axis in (self.rows, self.columns)
        )
        return height, width

    def size(self, *, latents: bool) -> tuple[int, int]:
        """Height and width of the whole picture, in pixels or latent elements."""
        return self.rows.size(latents=latents), self.columns.size(latents=latents)

    def facts(self) -> TileFacts:
        """What a record keeps of the plan, in pixels."""
        rows, columns = self.rows, self.columns
        return TileFacts(
            *self.tile_pixels, rows.least_shared_pixels, columns.least_shared_pixels, count=self.count
        )


@dataclass(frozen=True, slots=True)
class Place:
    """One tile of a plan; `frames` is the number of frames that go in, None for pictures."""

    plan: TilePlan
    row: int
    column: int
    frames: int | None = None

    def where(self, *, latents: bool) -> Where:
        """The index of the tile's latent elements, or of its pixels, in the whole tensor."""
        rows, columns = self.plan.rows, self.plan.columns
        return ..., rows.span(self.row, latents=latents), columns.span(self.column, latents=latents)

    def sides_of(self, places: int) -> tuple[int, ...] | None:
        """Height and width, after the frames of a video, of features whose positions are flattened into one axis.

        The sides are the latent's, or for pictures those times a power of two. None if `places` fits none of these.
        """
        _, *spans = self.where(latents=True)
        height, width = (span.stop - span.start for span in spans)
        if self.frames is not None:
            frames, rest = divmod(places, height * width)
            return None if rest or not 0 < frames <= self.frames else (frames, height, width)
        while height * width < places:
            height, width = 2 * height, 2 * width
        return (height, width) if height * width == places else None

    def of_whole(self, places: int) -> int:
        """How many positions the whole picture has at a layer where this tile has `places`."""
        rows, columns = self.plan.rows, self.plan.columns
        tile = min(rows.tile, rows.length) * min(columns.tile, columns.length)
        return places * rows.length * columns.length // tile


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

    Tiles are spread evenly, and neighbours overlap by at least `overlap`. No tile is smaller than `tile` unless the
    picture is.

    Args:
        height: Of the picture, in pixels. For decoding, latent height times `downscale`.
        width: The same.
        tile: Side of a tile in pixels, or (height, width): a multiple of `downscale`.
        overlap: Overlap of neighbours in pixels: a multiple of `downscale`, at least 0 and less than a tile. None
            is a quarter of the tile.
        downscale: The VAE's spatial factor: pixels along one latent element.
        rounding: What the VAE does with a side that `downscale` does not divide: AutoencoderKL and WAN drop
            the remainder ("down"), AutoencoderTiny adds a latent element ("up").

    Raises:
        ConfigError: A size that cannot work; the hint names sizes that can.
    """
    tiles = (tile, tile) if isinstance(tile, int) else tile
    overlaps = overlap if isinstance(overlap, tuple) else (overlap, overlap)
    rows = _axis("height", height, tiles[0], overlaps[0], downscale, rounding)
    return TilePlan(rows, _axis("width", width, tiles[1], overlaps[1], downscale, rounding))


def _axis(
    side: str,
    pixels: int,
    tile: int,
    overlap: int | None,
    factor: int,
    rounding: Literal["down", "up"],
) -> TileAxis:
    if factor < 1:
        raise ConfigError(
            f"downscale: {factor} is not a factor.", hint="Give the VAE's spatial factor, such as 8."
        )
    if tile < factor or tile % factor:
        raise ConfigError(
            f"tile: {tile} pixels are not a positive multiple of the VAE's factor {factor}.",
            hint=f"Take {_nearest(tile, factor, factor, None)}.",
        )
    latent_tile, highest = tile // factor, tile - factor
    if overlap is None:  # at least 1; 0 of tiles of 1
        overlap = min(max(latent_tile // 4, 1), latent_tile - 1) * factor
    if overlap < 0 or overlap % factor or overlap > highest:
        raise ConfigError(
            f"overlap: {overlap} pixels do not work with tiles of {tile}: the overlap must be a multiple of "
            f"the VAE's factor {factor}, from 0 to {highest}.",
            hint=f"Take {_nearest(overlap, factor, 0, highest)}.",
        )
    length = pixels // factor if rounding == "down" else -(-pixels // factor)
    if length < 1:
        raise ConfigError(
            f"{side}: {pixels} pixels are less than one latent element ({factor} pixels).",
            hint=f"Give at least {factor} pixels.",
        )
    shared = overlap // factor
    return TileAxis(pixels, length, factor, latent_tile, shared, tile_starts(length, latent_tile, shared))


def _nearest(size: int, factor: int, lowest: int, highest: int | None) -> str:
    """The multiples of `factor` on both sides of `size` that are allowed, as words."""
    below = max(size // factor * factor, lowest)
    above = max(-(-size // factor) * factor, lowest)
    if highest is not None:
        below, above = min(below, highest), min(above, highest)
    return str(below) if below == above else f"{below} or {above}"


def tile_starts(length: int, tile: int, overlap: int) -> tuple[int, ...]:
    """First positions of tiles that cover `length`, evenly spaced; the last tile ends at the end.

    Neighbours overlap by at least `overlap`.
    """
    if length <= tile:
        return (0,)
    count = math.ceil((length - overlap) / (tile - overlap))
    return tuple(round(index * (length - tile) / (count - 1)) for index in range(count))
