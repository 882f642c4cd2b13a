"""Run a VAE over a large picture tile by tile, and blend where tiles overlap.

An accelerator needs memory for one tile and for the output. Tiles meet at group norms and attention, so that these see
the whole picture (`tiles_together`). Convolutions need no meeting: away from a tile's edges they give the same values as
in the whole picture.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.pipeline.model_state import as_before, free_memory, let_go
from sigmascope.pipeline.tile_plan import ApartError, Place, TilePlan, Where, outer_places
from sigmascope.pipeline.tiles_together import (
    SmallCopy,
    Tile,
    can_estimate,
    go_through,
    why_apart,
    why_no_ram,
)
from sigmascope.progress import Progress, no_progress
from sigmascope.records.latents import NormStatistics, TileFacts


def tiled_map(
    function: Callable[[Tensor], Tensor],
    tensor: Tensor,
    plan: TilePlan,
    *,
    modules: Iterable[nn.Module] = (),
    progress: Progress = no_progress,
) -> Tensor:
    """Apply an encoder or a decoder to overlapping tiles and blend the results linearly.

    The tensor's size says whether it is pixels or latents. Only height and width are cut. Frames of a video stay
    together, because a causal video VAE carries state from one chunk of frames to the next.

    Args:
        function: Maps pixels (..., height, width) to latents, or latents to pixels.
        tensor: The whole picture or latent of `plan`.
        plan: From `plan`.
        modules: The modules that `function` runs. Their group norms and attention see the whole picture where possible;
            without `modules`, they see one tile at a time.
        progress: Called after each tile.

    Returns:
        The result for the whole picture, in the dtype that `function` gives; tiles are summed in float32. The result
        of a single tile is returned unchanged.

    Raises:
        ConfigError: The tensor is neither the plan's picture nor its latent.
        ModelMismatchError: `function` returns tiles of a size that does not fit the plan's `downscale`.
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
    """The result of `tiled_map`, and the facts of its tiles. Arguments and errors are those of `tiled_map`.

    Args:
        function: See `tiled_map`.
        tensor: See `tiled_map`.
        plan: See `tiled_map`.
        modules: See `tiled_map`.
        apart: Why tiles must not meet; None lets them.
        compared: The part of a tile's result that is compared with its neighbours'; None compares nothing.
        progress: See `tiled_map`.
    """
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
                [Tile(place, function, tensor[place.where(latents=latents)], whole) for place in places],
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
    """Every n-th row and column of a picture or latent, at most as many as a tile has."""
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
    """Blends the results of tiles into one picture, row by row.

    Args:
        plan: How the picture was cut.
        compared: The part of a tile's result that is compared with its neighbours'; None compares nothing.
        progress: Called after each tile.
        latents: Whether the results are latents.
        inner: Whether to use only the inner half of each overlap. Tiles that met are wrong only at their edges.
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
        """Blend in the result of the next tile."""
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
        """Compare overlaps with the tile above and the one to the left; keep this tile's last edges for the next ones."""
        axes = ("above", self._plan.rows, -2, place.row), ("left", self._plan.columns, -1, place.column)
        for name, axis, dim, index in axes:
            other = place.column if name == "above" else 0
            before = self._edges.pop((name, other), None)
            shared = axis.shared(latents=self._latents)
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
        outside = outer_places(size) if self._inner else 0
        return shared.narrow(dim, outside, size - 2 * outside).float()

    def result(self, norms: NormStatistics, reason: str | None) -> tuple[Tensor, TileFacts]:
        """The whole picture in the dtype of the tiles, and the facts of the tiles."""
        assert self._output is not None  # there is at least one tile
        facts = replace(
            self._plan.facts(),
            norm_statistics=norms,
            norm_reason=reason,
            overlap_difference=self._difference(),
        )
        return self._output.to(self._dtype), facts

    def _difference(self) -> float | None:
        """Relative L2 difference of neighbours in their overlaps; None if no tiles overlap.

        The larger of two: between their results, and between their features before they met at a norm.
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
