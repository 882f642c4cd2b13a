"""Draw the pocket pipelines' picture, and measure how often they paint what the prompt asks for.

    PYTHONPATH=. python scripts/pocket/pipelines_card.py docs/images/pocket_pipelines.png

The table is for docs/pocket-model.md: of the prompts that training never saw, the share whose wall, and whose solid, has
the asked colour. A colour counts as the one of the six whose wall or solid, drawn under the look's light, is nearest on
average.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.pocket_pipelines import KINDS, LOOKS, load_pocket
from tests.pocket_pipelines.solids import COLOURS, SIZE, Solid, draw_solid, is_held_out, solid_of

from sigmascope.lbm.images import contact_sheet, save_image
from sigmascope.lbm.pocket.scenes import COOL, WARM, Light

SHOWN = 5
CORNER, MIDDLE = slice(0, 8), slice(SIZE // 2 - 4, SIZE // 2 + 4)


def paint(pipeline: Any, solids: list[Solid], seed: int) -> list[Image.Image]:
    """With 20 steps and guidance 3."""
    generators = [torch.Generator().manual_seed(seed + number) for number in range(len(solids))]
    texts = [solid.prompt for solid in solids]
    made: list[Image.Image] = pipeline(
        texts, generator=generators, num_inference_steps=20, guidance_scale=3.0
    ).images
    return made


def colour_at(picture: NDArray[np.uint8], place: slice) -> NDArray[np.float64]:
    """The median colour of a square: a corner is wall, and the middle is on the solid, or in a ring's hole."""
    patch = picture[place, place].reshape(-1, 3).astype(np.float64)
    return np.asarray(np.median(patch, axis=0))


def palette(light: Light, place: slice) -> dict[str, NDArray[np.float64]]:
    """What each colour looks like under a light: the mean over drawn solids."""
    seen: dict[str, list[NDArray[np.float64]]] = {name: [] for name in COLOURS}
    for number in range(720):
        solid = solid_of(number)
        if place is MIDDLE and solid.shape == "ring":
            continue
        name = solid.wall if place is CORNER else solid.colour
        seen[name].append(colour_at(draw_solid(solid, number, light), place))
    return {name: np.mean(found, axis=0) for name, found in seen.items()}


def named(colour: NDArray[np.float64], known: dict[str, NDArray[np.float64]]) -> str:
    """The nearest of the colours."""
    return min(known, key=lambda name: float(np.square(known[name] - colour).sum()))


def main() -> None:
    """Paint, measure and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    solids = [solid_of(number) for number in range(360) if is_held_out(number)]
    target = parser.parse_args().target
    shown: list[tuple[str, Image.Image]] = []
    print("| pipeline | look | wall as asked | solid as asked |\n|---|---|---|---|")
    for kind in KINDS:
        for look, light in zip(LOOKS, (WARM, COOL), strict=True):
            made = paint(load_pocket(kind, look), solids, seed=0)
            shares = []
            for place in (CORNER, MIDDLE):
                known = palette(light, place)
                right = [
                    named(colour_at(np.asarray(picture), place), known)
                    == (solid.wall if place is CORNER else solid.colour)
                    for picture, solid in zip(made, solids, strict=True)
                    if place is CORNER or solid.shape != "ring"
                ]
                shares.append(100 * sum(right) / len(right))
            print(f"| {kind} | {look} | {shares[0]:.0f} % | {shares[1]:.0f} % |", flush=True)
            shown += [
                (
                    f"{solid.colour} {solid.shape}, {solid.wall} wall"
                    if look == "base"
                    else f"{kind}, tuned",
                    picture,
                )
                for solid, picture in zip(solids[:SHOWN], made, strict=False)
            ]
    save_image(contact_sheet(shown, columns=SHOWN), target)


if __name__ == "__main__":
    main()
