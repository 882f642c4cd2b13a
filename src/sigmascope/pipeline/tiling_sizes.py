"""Sizes of tiles: which can work, and what to say of those that cannot."""

from sigmascope.errors import ConfigError


def quarter(tile: int) -> int:
    """The overlap of tiles that is taken if none is asked for: a quarter, at least 1; 0 of tiles of 1.

    In latent elements, as is `tile`.
    """
    return min(max(tile // 4, 1), tile - 1)


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


def _nearest(size: int, factor: int, lowest: int, highest: int | None) -> str:
    """The multiples of `factor` on both sides of `size` that are allowed, as words."""
    below = max(size // factor * factor, lowest)
    above = max(-(-size // factor) * factor, lowest)
    if highest is not None:
        below, above = min(below, highest), min(above, highest)
    return str(below) if below == above else f"{below} or {above}"
