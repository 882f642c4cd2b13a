"""Tiles along one side of a picture: where each begins, and how much it has to say about each place."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def tile_starts(length: int, tile: int, overlap: int) -> tuple[int, ...]:
    """First positions of tiles that cover `length`, evenly apart, the last one flush with the end.

    Neighbours have at least `overlap` in common.
    """
    if length <= tile:
        return (0,)
    count = math.ceil((length - overlap) / (tile - overlap))
    return tuple(round(index * (length - tile) / (count - 1)) for index in range(count))


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

    def size(self, *, latents: bool) -> int:
        """Length in latent elements or in pixels."""
        return self.length if latents else self.pixels

    def weights(self, *, latents: bool) -> list[Tensor]:
        """The share of each tile in each of its places: at every place the shares add up to 1.

        Where tiles overlap the shares rise and fall linearly; elsewhere, the picture's borders included, a
        tile's share is exactly 1.
        """
        ramp = self.overlap * (1 if latents else self.factor)
        spans = [self.span(index, latents=latents) for index in range(len(self.starts))]
        rises = [_rise(span.stop - span.start, ramp) for span in spans]
        total = torch.zeros(self.size(latents=latents), dtype=torch.float64)
        for span, rise in zip(spans, rises, strict=True):
            total[span] += rise
        return [(rise / total[span]).float() for span, rise in zip(spans, rises, strict=True)]


def _rise(length: int, ramp: int) -> Tensor:
    """Rises from each end over `ramp` places, then stays at 1."""
    position = torch.arange(1, length + 1, dtype=torch.float64)
    from_end = torch.minimum(position, length + 1 - position)
    return (from_end / (ramp + 1)).clamp(max=1.0)
