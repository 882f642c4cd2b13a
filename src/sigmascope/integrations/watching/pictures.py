"""The finished pictures of a call, as the host is given them: of one colour, not finite, or a safety checker's."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

FACT: Final = "pictures"
MOST: Final = 8
"""Of more pictures so many are looked at, spread evenly: about 3 ms for each megapixel."""

_PICTURE_NAMES: Final = ("images", "frames", "videos")
"""Under which the state of a modular pipeline holds its pictures."""


def pictures_of(result: object) -> dict[str, Any] | None:
    """What is seen of the pictures in a pipeline's result; None without any on the host.

    Tensors are left to the stages that made them. A NaN becomes black where floats become a picture of 8 bits, so that
    black pictures tell of NaN also where the values lay on an accelerator and nobody waited for them.

    Args:
        result: A pipeline's output, tuple, list, or state of a modular pipeline.

    Returns:
        `pictures` (how many, frames of videos each), `is_video`, `looked_at`; of those `one_colour`, with the `colour` of
        the first, and `not_finite`; and `replaced`: how many the pipeline's safety checker made black, None: it says
        nothing.
    """
    made = _made(result)
    pictures = list(_pictures(made))
    if not pictures:
        return None
    chosen = [pictures[index * len(pictures) // MOST] for index in range(MOST)]
    seen = [_look(picture) for picture in (chosen if len(pictures) > MOST else pictures)]
    colours = [colour for colour, is_finite in seen if is_finite and colour is not None]
    return {
        "pictures": len(pictures),
        "is_video": _is_video(made),
        "looked_at": len(seen),
        "one_colour": len(colours),
        "colour": colours[0] if colours else None,
        "not_finite": sum(not is_finite for _, is_finite in seen),
        "replaced": _replaced(result),
    }


def _made(result: object) -> object:
    values = getattr(result, "values", None)
    if isinstance(values, Mapping):  # a modular pipeline's state
        return next((values[name] for name in _PICTURE_NAMES if values.get(name) is not None), None)
    if isinstance(result, Mapping):
        result = tuple(result.values())
    return result[0] if isinstance(result, tuple) and result else result


def _pictures(made: Any) -> Iterator[Any]:
    if _is_image(made) or (_is_array(made) and made.ndim == 3):
        yield made
    elif isinstance(made, list | tuple) or (_is_array(made) and made.ndim > 3):
        for part in made:
            yield from _pictures(part)


def _is_image(made: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # who has a picture of it has imported it
    return pillow is not None and isinstance(made, pillow.Image)


def _is_array(made: Any) -> bool:
    return isinstance(made, np.ndarray) and made.dtype.kind in "fu" and made.size > 0


def _is_video(made: Any) -> bool:
    if isinstance(made, list | tuple):
        return bool(made) and (isinstance(made[0], list | tuple) or (_is_array(made[0]) and made[0].ndim > 3))
    return _is_array(made) and made.ndim > 4


def _look(picture: Any) -> tuple[list[float] | None, bool]:
    """The colour of all of its pixels, None where there are several; and whether all are finite."""
    if isinstance(picture, np.ndarray):
        lowest, highest = picture.min(), picture.max()  # NaN if there is one
        colour = picture[0, 0]
        is_one = bool(picture[-1, -1].tolist() == colour.tolist()) and bool((picture == colour).all())
        return ([float(band) for band in colour] if is_one else None), bool(
            np.isfinite(lowest) and np.isfinite(highest)
        )
    extrema = picture.getextrema()
    bands = extrema if isinstance(extrema[0], Sequence) else (extrema,)
    is_one = all(lowest == highest for lowest, highest in bands)
    return ([float(lowest) for lowest, _ in bands] if is_one else None), True


def _replaced(result: object) -> int | None:
    flags = getattr(result, "nsfw_content_detected", None)
    if flags is None and isinstance(result, tuple) and len(result) > 1:
        flags = result[1]
    if not isinstance(flags, list) or not all(isinstance(one, bool | np.bool_) for one in flags):
        return None
    return sum(map(bool, flags))
