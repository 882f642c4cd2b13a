"""The ways of encoding and decoding (SPEC section 5): at once, in tiles, on the CPU.

Each leaves the VAE as it found it, whatever ends it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sigmascope.errors import ModelMismatchError
from sigmascope.pipeline.restore import as_before, for_inference
from sigmascope.pipeline.tiling import TilePlan, plan, tiled_map
from sigmascope.pipeline.weights_in_ram import put_in_ram
from sigmascope.pipeline.work import Work
from sigmascope.records.latents import TileFacts

_CPU = torch.device("cpu")
_USUAL_FACTOR = 8


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes in pixels. An overlap of None is a quarter of a tile."""

    side: int
    overlap: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy made. `tile` says how it was cut, where it was."""

    tensor: Tensor
    tile: TileFacts | None = None


def direct(work: Work) -> Outcome:
    """All at once, where the VAE computes."""
    with _undisturbed(work):
        result = work.finish(work.part(work.source, work.vae.device))
    return Outcome(_delivered(work, result))


def tiled(work: Work, tiles: Tiles) -> Outcome:
    """Picture by picture, in tiles."""
    with _undisturbed(work):
        raw, facts = _in_tiles(work, tiles, work.vae.device)
        result = work.finish(raw)
    return Outcome(_delivered(work, result), facts)


def on_cpu(work: Work, tiles: Tiles | None = None) -> Outcome:
    """With the weights in RAM; the result is copied back to where it is expected.

    Args:
        work: What there is to do.
        tiles: Cut it into these there too.
    """
    vae = work.vae
    with as_before(vae.vae, *vae.modules, also_on_success=True), for_inference(vae.vae, **vae.switches):
        put_in_ram(vae.modules)
        facts = None
        if tiles is None:
            raw = work.part(work.source, _CPU)
        else:
            raw, facts = _in_tiles(work, tiles, _CPU, by_vae=False)
        result = work.finish(raw)
        del raw
    return Outcome(_delivered(work, result), facts)


def copy_back(tensor: Tensor, device: torch.device) -> Tensor:
    """Take a result to where it is expected."""
    return tensor.to(device)


@contextmanager
def _undisturbed(work: Work) -> Iterator[None]:
    vae = work.vae
    with as_before(*vae.kept), for_inference(vae.vae, **vae.switches):
        yield


def _delivered(work: Work, result: Tensor) -> Tensor:
    return copy_back(result, work.output_device or work.vae.home)


def _in_tiles(
    work: Work, tiles: Tiles, device: torch.device, *, by_vae: bool = True
) -> tuple[Tensor, TileFacts]:
    """What the VAE gives for all parts, one after the other, and how they were cut."""
    parts = work.one_by_one()
    if by_vae:
        overlap = tiles.side // 4 if tiles.overlap is None else tiles.overlap
        whole = work.vae_tiles(work.source, tiles.side, overlap)
        if whole is not None:
            sides = min(tiles.side, work.pixels[0]), min(tiles.side, work.pixels[1])
            return whole, TileFacts(*sides, overlap, overlap, by="vae")
    factor = work.vae.facts.spatial_factor or measured_factor(work, tiles, device)
    cut = None
    output: Tensor | None = None
    for index, part in enumerate(parts):
        made, cut = _one_in_tiles(lambda tile: work.part(tile, device), part, work, tiles, factor)
        if len(parts) == 1:
            return made, cut.facts()
        if output is None:
            output = made.new_empty(made.shape[0] * len(parts), *made.shape[1:])
        place = output[index * made.shape[0] : (index + 1) * made.shape[0]]
        if place.shape != made.shape:
            raise ModelMismatchError(
                f"The VAE gave {tuple(made.shape)} for one picture and {tuple(place.shape)} for another of its size.",
                hint="Leave tiles out of strategies=.",
            )
        place.copy_(made)
    assert output is not None  # there is at least one part
    assert cut is not None
    return output, cut.facts()


def _one_in_tiles(
    function: Callable[[Tensor], Tensor], part: Tensor, work: Work, tiles: Tiles, factor: int
) -> tuple[Tensor, TilePlan]:
    """Where a side is no multiple of the factor, VAEs differ in what they make of the rest."""
    height, width = _pixels_of(part, work, factor)
    cut = plan(height, width, tiles.side, tiles.overlap, factor)
    try:
        return tiled_map(function, part, cut), cut
    except ModelMismatchError:
        if height % factor == 0 and width % factor == 0:
            raise
    cut = plan(height, width, tiles.side, tiles.overlap, factor, rounding="up")
    return tiled_map(function, part, cut), cut


def _pixels_of(part: Tensor, work: Work, factor: int) -> tuple[int, int]:
    scale = factor if work.direction == "decoding" else 1
    return part.shape[-2] * scale, part.shape[-1] * scale


def _even(length: int) -> int:
    """Shortened to a multiple of the usual factor, so that nothing is left over."""
    return max(length // _USUAL_FACTOR * _USUAL_FACTOR, 1) if length >= _USUAL_FACTOR else length


def measured_factor(work: Work, tiles: Tiles, device: torch.device) -> int:
    """Pixels along one latent element, found by putting one tile through the VAE.

    Raises:
        ModelMismatchError: What comes out is not smaller (or larger) by a whole number, the same both ways.
    """
    side = tiles.side if work.direction == "encoding" else max(tiles.side // _USUAL_FACTOR, 1)
    height, width = (_even(min(side, length)) for length in work.source.shape[-2:])
    corner = work.source[:1, ..., :height, :width]
    made = work.part(corner, device)
    sides = list(zip(corner.shape[-2:], made.shape[-2:], strict=False)) if made.ndim > 2 else []
    ratios = {
        large / small if small else 0.0 for large, small in (sorted(pair, reverse=True) for pair in sides)
    }
    factor = ratios.pop() if len(ratios) == 1 else 0.0
    if factor < 1 or factor != int(factor):
        raise ModelMismatchError(
            f"The VAE made {tuple(made.shape)} of {tuple(corner.shape)}: "
            "that is no whole factor, so it cannot be cut into tiles.",
            hint="Leave tiles out of strategies=.",
        )
    return int(factor)
