"""Run a VAE over a large picture tile by tile, and blend where tiles overlap.

What is needed at once on an accelerator is the memory of one tile, and of the output. Tiles meet at group norms and
attention, which see the whole picture (`tiles_together`). By itself a tile gives what the whole gives away from seams, as
far as the network is local.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor, nn

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.pipeline.model_state import as_before, free_memory, let_go
from sigmascope.pipeline.tiles_together import (
    ApartError,
    SmallCopy,
    Tile,
    can_estimate,
    go_through,
    why_apart,
    why_no_ram,
)
from sigmascope.progress import Progress, no_progress
from sigmascope.records.latents import NormStatistics, TileFacts

Sides = int | tuple[int, int]
"""One size for both sides, or (height, width)."""
Where = tuple[EllipsisType, slice, slice]


@dataclass(frozen=True, slots=True)
class Span:
    """A tile's features along one axis.

    Attributes:
        place: In those of the whole.
        own: The part of them that no other tile stands for.
        own_place: That, in those of the whole.
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
        overlap: What neighbours have in common, at least.
        starts: First positions.
    """

    pixels: int
    length: int
    factor: int
    tile: int
    overlap: int
    starts: tuple[int, ...]

    def span(self, index: int, *, latents: bool) -> slice:
        """The latent elements or the pixels of a tile. The last one's go to the end, whatever the factor."""
        start = self.starts[index]
        stop = min(start + self.tile, self.length)
        if latents:
            return slice(start, stop)
        return slice(start * self.factor, self.pixels if stop == self.length else stop * self.factor)

    def spans(self, *, latents: bool) -> list[slice]:
        """Of all tiles."""
        return [self.span(index, latents=latents) for index in range(len(self.starts))]

    @property
    def least_shared_pixels(self) -> int:
        """What every tile has in common with the next, in pixels; 0 where there is but one."""
        return min(_shared(self.spans(latents=False)), default=0)

    def features(self, index: int, length: int, scale: Fraction) -> Span:
        """Where features of a tile are.

        Raises:
            ApartError: They do not lie on a grid that all tiles share.
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
        """The share of each tile in each of its places: at every place the shares add up to 1.

        A tile's share rises and falls linearly over all that it has in common with the tile before and the tile
        after it, which may be more than was asked for. Elsewhere, the picture's borders included, it is exactly 1.

        Args:
            latents: Whether places are latent elements.
            inner: Let it rise and fall over the inner half of that alone, so that a tile's edges do not count.
        """
        spans = self.spans(latents=latents)
        shared = [0, *_shared(spans), 0]
        rises = [
            _rise(span.stop - span.start, before, after, inner=inner)
            for span, before, after in zip(spans, shared, shared[1:], strict=False)
        ]
        total = torch.zeros(self.size(latents=latents), dtype=torch.float64)
        for span, rise in zip(spans, rises, strict=True):
            total[span] += rise
        return [(rise / total[span]).float() for span, rise in zip(spans, rises, strict=True)]


def _shared(spans: Sequence[slice]) -> list[int]:
    """What each tile has in common with the next."""
    return [span.stop - after.start for span, after in itertools.pairwise(spans)]


def _rise(length: int, before: int, after: int, *, inner: bool) -> Tensor:
    """Rises over the first `before` places, stays at 1, and falls over the last `after`."""
    position = torch.arange(1, length + 1, dtype=torch.float64)
    ends = []
    for places, shared in ((position, before), (position.flip(0), after)):
        outside = _outside(shared) if inner else 0
        ends.append((places - outside) / (shared - 2 * outside + 1))
    return torch.minimum(*ends).clamp(0.0, 1.0)


def _outside(shared: int) -> int:
    """At both ends of what two tiles share: the places that are not of its inner half."""
    return shared // 4


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a picture and its latent are cut: `rows` along the height, `columns` along the width."""

    rows: TileAxis
    columns: TileAxis

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles along the height and along the width."""
        return len(self.rows.starts), len(self.columns.starts)

    @property
    def count(self) -> int:
        """Tiles in all."""
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
        """What a record keeps of it, in pixels."""
        rows, columns = self.rows, self.columns
        return TileFacts(
            *self.tile_pixels, rows.least_shared_pixels, columns.least_shared_pixels, count=self.count
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Which tile of a plan, and how many frames go in, of videos."""

    plan: TilePlan
    row: int
    column: int
    frames: int | None = None

    def where(self, *, latents: bool) -> Where:
        """Its latent elements or its pixels."""
        rows, columns = self.plan.rows, self.plan.columns
        return ..., rows.span(self.row, latents=latents), columns.span(self.column, latents=latents)

    def sides_of(self, places: int) -> tuple[int, ...] | None:
        """Height and width, after frames of videos, of features whose places are all on one axis.

        They are as large as the latent, or of pictures so many times two. None of features without such places.
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
        """How many places the whole has where this tile has so many."""
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
            f"downscale: {factor} is no factor.", hint="Give the VAE's spatial factor, such as 8."
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
            f"overlap: {overlap} pixels do not work with tiles of {tile}: it takes a multiple of the "
            f"VAE's factor {factor} from 0 to {highest}.",
            hint=f"Take {_nearest(overlap, factor, 0, highest)}.",
        )
    length = pixels // factor if rounding == "down" else -(-pixels // factor)
    if length < 1:
        raise ConfigError(
            f"{side}: {pixels} pixels are less than one latent element, which is {factor}.",
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
    """First positions of tiles that cover `length`, evenly apart, the last one flush with the end.

    Neighbours have at least `overlap` in common.
    """
    if length <= tile:
        return (0,)
    count = math.ceil((length - overlap) / (tile - overlap))
    return tuple(round(index * (length - tile) / (count - 1)) for index in range(count))


def tiled_map(
    function: Callable[[Tensor], Tensor],
    tensor: Tensor,
    plan: TilePlan,
    *,
    modules: Iterable[nn.Module] = (),
    progress: Progress = no_progress,
) -> Tensor:
    """Apply an encoder or a decoder to overlapping tiles and blend the results linearly.

    Which of the two it is, follows from the tensor's size. Only the last two axes are cut: frames of a
    video stay together, since a causal video VAE carries what it saw from one chunk to the next.

    Args:
        function: Maps pixels (..., height, width) to latents, or latents to pixels.
        tensor: The whole picture or latent of `plan`.
        plan: From `plan`.
        modules: What `function` runs. Their group norms see the whole picture, where that can be done; without
            any, they see a tile at a time.
        progress: Told after each tile.

    Returns:
        What `function` gives, for the whole, in its dtype; sums are in float32. A single tile's result is
        given back as it is.

    Raises:
        ConfigError: The tensor is neither the plan's picture nor its latent.
        ModelMismatchError: `function` gives tiles of a size that the plan's `downscale` does not explain.
    """
    return in_tiles(function, tensor, plan, modules=modules, progress=progress)[0]


def in_tiles(
    function: Callable[[Tensor], Tensor],
    tensor: Tensor,
    plan: TilePlan,
    *,
    modules: Iterable[nn.Module] = (),
    apart: str | None = None,
    compared: Callable[[Tensor], Tensor] | None = None,
    progress: Progress = no_progress,
) -> tuple[Tensor, TileFacts]:
    """What `tiled_map` gives, and what the tiles cost. Arguments as there, errors too."""
    latents = _holds_latents(tensor, plan)
    if plan.count == 1:
        return function(tensor), plan.facts()
    frames = tensor.shape[2] if tensor.ndim == 5 else None
    rows, columns = plan.shape
    places = [Place(plan, row, column, frames) for row in range(rows) for column in range(columns)]
    whole = tuple(modules)
    reason = apart or why_apart(whole) or ("gradients are recorded" if torch.is_grad_enabled() else None)
    new_blend = partial(_Blend, plan, compared, progress, latents=not latents)
    if reason is None:
        blend = new_blend(inner=True)
        handled = sys.exception()
        try:
            return _together(
                [Tile(one, function, tensor[one.where(latents=latents)], whole) for one in places],
                whole,
                blend,
            )
        except ApartError as error:
            reason = str(error)
        except Exception as error:
            reason = why_no_ram(error)
            if reason is None:
                raise
            let_go(error, handled)
        free_memory()
    parts = [(place, tensor[place.where(latents=latents)]) for place in places]
    if can_estimate(whole) and not torch.is_grad_enabled():
        try:
            blend = new_blend(inner=False)
            estimate = SmallCopy(function, _small_copy(tensor, plan, latents=latents))
            for place, part in parts:
                blend.add(place, estimate.tile(part))
            blend.differences += estimate.differences()
            return blend.result("estimated", reason)
        except ApartError as error:
            reason = f"{reason}, and {error}"
    blend = new_blend(inner=False)
    for place, part in parts:
        blend.add(place, function(part))
    return blend.result("per_tile", reason)


def _small_copy(tensor: Tensor, plan: TilePlan, *, latents: bool) -> Tensor:
    """Every n-th place of a picture or a latent, no more of them along either side than a tile has."""
    axes = plan.rows, plan.columns
    share = min(min(axis.tile / axis.length for axis in axes), 1.0)
    for dim, axis in ((-2, plan.rows), (-1, plan.columns)):
        places = max(round(axis.length * share), 1) * (1 if latents else axis.factor)
        every = (torch.arange(places, device=tensor.device) + 0.5) * (tensor.shape[dim] / places)
        tensor = tensor.index_select(dim, every.long())
    return tensor


def _together(
    tiles: Sequence[Tile], modules: Sequence[nn.Module], blend: "_Blend"
) -> tuple[Tensor, TileFacts]:
    with as_before(*modules), closing(go_through(tiles, modules, blend.differences)) as made:
        for place, part in made:
            blend.add(place, part)
            del part  # not to be held beside the next tile's work
    return blend.result("whole", tiles[0].attends_alone)


class _Blend:
    """Puts the results of tiles together as they come, row by row.

    Args:
        plan: How they were cut.
        compared: What of a result is held against its neighbours'; None: nothing is.
        progress: Told after each.
        latents: Whether the results are latents.
        inner: Whether only the inner half of what two share counts: what tiles that saw the whole's features lack
            is at their edges alone.
    """

    def __init__(
        self,
        plan: TilePlan,
        compared: Callable[[Tensor], Tensor] | None,
        progress: Progress,
        *,
        latents: bool,
        inner: bool = False,
    ) -> None:
        self._plan, self._compared, self._progress = plan, compared, progress
        self._latents, self._inner = latents, inner
        self._weights = [axis.weights(latents=latents, inner=inner) for axis in (plan.rows, plan.columns)]
        self._output: Tensor | None = None
        self._dtype = torch.float32
        self._done = 0
        self._edges: dict[tuple[str, int], Tensor] = {}
        self._sums: list[Tensor] = []
        self.differences: list[Tensor] = []

    def add(self, place: Place, part: Tensor) -> None:
        """Blend the next one in."""
        where = place.where(latents=self._latents)
        _check(part, where, self._output)
        if self._output is None:
            self._dtype = part.dtype
            self._output = _empty(part, self._plan.size(latents=self._latents))
        if self._compared is not None:
            self._compare(place, self._compared(part.detach()))
        rows, columns = self._weights
        weight = rows[place.row][:, None] * columns[place.column]
        self._output[where] += part * weight.to(part.device)
        self._done += 1
        self._progress(self._done, self._plan.count, "tile")

    def _compare(self, place: Place, part: Tensor) -> None:
        """With the tile above and the one to the left, where they overlap; of each tile its last edges are kept."""
        axes = ("above", self._plan.rows, -2, place.row), ("left", self._plan.columns, -1, place.column)
        for name, axis, dim, index in axes:
            other = place.column if name == "above" else 0
            before = self._edges.pop((name, other), None)
            shared = [0, *_shared(axis.spans(latents=self._latents)), 0]
            if index and before is not None:
                here = self._where_both_count(part.narrow(dim, 0, shared[index]), dim)
                both = torch.stack(
                    [(here - before).square().sum(), here.square().sum(), before.square().sum()]
                )
                self._sums.append(both)
            if after := shared[index + 1]:
                self._edges[name, other] = self._where_both_count(
                    part.narrow(dim, -after, after), dim
                ).clone()

    def _where_both_count(self, shared: Tensor, dim: int) -> Tensor:
        size = shared.shape[dim]
        outside = _outside(size) if self._inner else 0
        return shared.narrow(dim, outside, size - 2 * outside).float()

    def result(self, norms: NormStatistics, reason: str | None) -> tuple[Tensor, TileFacts]:
        """The whole, in the dtype of the tiles, and what they cost."""
        assert self._output is not None  # there is at least one tile
        facts = replace(
            self._plan.facts(),
            norm_statistics=norms,
            norm_reason=reason,
            overlap_difference=self._difference(),
        )
        return self._output.to(self._dtype), facts

    def _difference(self) -> float | None:
        """Relative L2 of neighbours from each other where they overlap; None where they share nothing.

        Of what they gave, or of what they brought to a layer at which they met, if that is more.
        """
        if not self._sums:
            return None
        apart, one, other = torch.stack(self._sums).sum(0)
        measured = torch.stack([(apart / (one + other) * 2).sqrt(), *self.differences])
        return float(measured.nan_to_num(0.0).max())


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
