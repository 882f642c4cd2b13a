"""What a caller asked for, checked before anything is done."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sigmascope.errors import ConfigError
from sigmascope.pipeline.strategies import Tiles
from sigmascope.pipeline.tiling import plan
from sigmascope.pipeline.work import Work
from sigmascope.records.strategies import STRATEGIES, Strategy

_LARGEST_TILE = 512
_SMALLEST_LATENT_TILE = 8
_USUAL_FACTOR = 8


@dataclass(frozen=True, slots=True)
class Choices:
    """Which strategies, in which order, and with which tiles.

    Attributes:
        strategies: In order.
        only_what_fits: Whether to pass over what is not expected to fit ("auto").
        tile: Side of a tile in pixels; None: several, one after the other, each half the one before.
        overlap: What neighbours share, in pixels; None is a quarter of a tile.
    """

    strategies: tuple[Strategy, ...]
    only_what_fits: bool = False
    tile: int | None = None
    overlap: int | None = None

    def ladder(self, work: Work) -> list[Tiles]:
        """The tiles to try, largest first."""
        if self.tile is not None:
            return [Tiles(self.tile, self.overlap)]
        step = (work.vae.facts.spatial_factor or _USUAL_FACTOR) * work.vae.halvings
        least = 0 if self.overlap is None else self.overlap * work.vae.halvings + step
        smallest = max(_SMALLEST_LATENT_TILE * step // work.vae.halvings, _multiple(least + step - 1, step))
        half = max(work.pixels) // 2
        sides = [max(_multiple(min(_LARGEST_TILE, half), step), smallest)]
        while sides[-1] > smallest:
            sides.append(max(_multiple(sides[-1] // 2, step), smallest))
        return [Tiles(side, self.overlap) for side in sides]


def checked(
    strategies: str | Iterable[str], tile: int | None, overlap: int | None, *, dummy: bool, decodes: bool
) -> Choices:
    """The choices, or why they make no sense.

    Raises:
        ConfigError: A strategy that does not exist, one twice, or none.
    """
    auto = strategies == "auto"
    if isinstance(strategies, str) and not auto:
        strategies = (strategies,)
    known = STRATEGIES[:-1] if decodes else STRATEGIES
    wanted: list[Any] = list(STRATEGIES[:-1]) if auto else list(strategies)
    if dummy and "dummy" not in wanted:
        wanted.append("dummy")
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"strategies: {wanted!r} "
            + (f"holds {unknown[0]!r}" if unknown else "is empty or repeats itself")
            + ".",
            hint=f"Take some of {', '.join(known)}, each once, or 'auto'.",
        )
    return Choices(tuple(wanted), auto, tile, overlap)


def check_tiles(choices: Choices, work: Work) -> None:
    """Refuse sizes that cannot work before anything is tried, whichever strategy comes first.

    Raises:
        ConfigError: The hint names sizes that can.
    """
    factor = work.vae.facts.spatial_factor
    uses_tiles = "tiled" in choices.strategies or choices.tile is not None
    if not uses_tiles or factor is None or (choices.tile is None and choices.overlap is None):
        return
    height, width = work.pixels
    for tiles in choices.ladder(work):
        plan(height, width, tiles.side, tiles.overlap, factor)
        _check_halves(tiles, work.vae.halvings, factor)


def _check_halves(tiles: Tiles, halvings: int, factor: int) -> None:
    """ComfyUI goes over a picture with tiles of half the height or half the width too."""
    if halvings == 1:
        return
    half = tiles.side // halvings
    if tiles.side % (halvings * factor):
        raise ConfigError(
            f"tile: ComfyUI halves tiles, and half of {tiles.side} is no multiple of the VAE's factor {factor}.",
            hint=f"Take a multiple of {halvings * factor}.",
        )
    if tiles.overlap is not None and tiles.overlap >= half:
        raise ConfigError(
            f"overlap: ComfyUI halves tiles, and {tiles.overlap} pixels are all of a half of {tiles.side}.",
            hint=f"Take {half - factor} at most.",
        )


def _multiple(length: int, factor: int) -> int:
    return length // factor * factor
