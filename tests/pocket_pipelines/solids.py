"""What the pocket pipelines know: one solid before a wall, by the words for it and as it is drawn for training."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from sigmascope.lbm.pocket.scenes import SOLIDS, Light, Surfaces, normals_from_slopes, shade

SIZE = 64
"""Height and width of a picture, in pixels."""

SHAPES = ("sphere", "egg", "cylinder", "ring", "cone", "box")
"""In the order of `sigmascope.lbm.pocket.scenes.SOLIDS`."""
COLOURS = {
    "red": (0.85, 0.22, 0.20),
    "green": (0.25, 0.70, 0.28),
    "blue": (0.22, 0.34, 0.85),
    "yellow": (0.90, 0.80, 0.22),
    "purple": (0.58, 0.25, 0.72),
    "white": (0.92, 0.90, 0.88),
}
"""Albedos, linear."""
FINISHES = {"matte": 0.0, "shiny": 0.5}
"""How strong the highlight is."""
WORDS = tuple(sorted([*SHAPES, *COLOURS, *FINISHES, "a", "before", "wall"], key=len, reverse=True))
"""The longest first: byte-pair encoding would else cut "green" where "red" is joined."""


@dataclass(frozen=True, slots=True)
class Solid:
    """What a prompt asks for: names of the tables above."""

    finish: str
    colour: str
    shape: str
    wall: str

    @property
    def prompt(self) -> str:
        """Such as "a shiny red cone before a blue wall"."""
        return f"a {self.finish} {self.colour} {self.shape} before a {self.wall} wall"


def solid_of(number: int) -> Solid:
    """Any of the 360 solids: its wall has another colour."""
    return _SOLIDS[number % len(_SOLIDS)]


def prompts(*, held_out: bool) -> Sequence[str]:
    """The prompts of all solids in one mixed order; every sixth is held out from training.

    Args:
        held_out: Those that training never saw, instead of those that it saw.
    """
    return [solid_of(number).prompt for number in range(len(_SOLIDS)) if is_held_out(number) == held_out]


def is_held_out(number: int) -> bool:
    """Whether training never sees this solid."""
    return number % len(_SOLIDS) % 6 == 0


def draw_solid(solid: Solid, number: int, light: Light) -> NDArray[np.uint8]:
    """Draw a solid: (SIZE, SIZE, 3).

    Args:
        solid: What the prompt asks for.
        number: Decides what the prompt leaves open: place, size, turn, and the shade of each colour.
        light: It is lit by this alone.
    """
    rng = np.random.default_rng([number, 7])
    axis = (np.arange(SIZE, dtype=np.float32) + 0.5) / SIZE * 2 - 1
    x, y = np.meshgrid(axis, -axis)
    wave = 0.25 * np.cos(rng.uniform(2, 4) * x + rng.uniform(0, 2 * np.pi)).astype(np.float32)
    centre = rng.uniform(-0.25, 0.25, size=2).astype(np.float32)
    shape = SOLIDS[SHAPES.index(solid.shape)]
    # Half as large again as in the scenes of several solids: u = x / 1.5 has the same normals.
    height, normals = shape(rng, (x - centre[0]) / 1.5, (y - centre[1]) / 1.5)
    seen = np.isfinite(height)[..., None]
    wall, colour = (
        np.asarray(COLOURS[name], np.float32) * rng.uniform(0.9, 1.05, 3).astype(np.float32)
        for name in (solid.wall, solid.colour)
    )
    surfaces = Surfaces(
        np.where(seen, normals, normals_from_slopes(wave, np.zeros_like(wave))).astype(np.float32),
        np.where(seen, colour, wall).astype(np.float32),
        np.where(seen[..., 0], np.float32(FINISHES[solid.finish]), np.float32(0)),
    )
    return shade(surfaces, light)


_SOLIDS = [
    Solid(finish, colour, shape, wall)
    for finish, colour, shape, wall in itertools.product(FINISHES, COLOURS, SHAPES, COLOURS)
    if wall != colour
]
Random(0).shuffle(_SOLIDS)
