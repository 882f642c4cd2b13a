"""What a call gave to the host: facts of its pictures, a thumbnail, or the tensor itself.

`pictures_of` looks at finished pictures: of one colour, not finite, or replaced by a safety checker. `thumbnail_of` makes
the first one small. `outcome_of` takes what a call gives where no VAE made it: latents, or pictures of a denoiser that
works in pixels.
"""

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from sigmascope.probes.reading import Reading

FACT: Final = "pictures"
MOST_PICTURES: Final = 8
"""Of more pictures so many are looked at, spread evenly: about 3 ms for each megapixel."""
_PICTURE_NAMES: Final = ("images", "frames", "videos")
"""Under which the state of a modular pipeline holds its pictures."""
_THUMBNAIL_PIXELS: Final = 96
_THUMBNAIL_QUALITY: Final = 75
_BANDS: Final = (1, 3)
_OUTCOME_NAMES: Final = ("images", "frames", "videos", "latents")
"""Under which the state of a modular pipeline holds its outcome."""


def pictures_of(result: object) -> dict[str, Any] | None:
    """What is seen of the pictures in a pipeline's result; None without any on the host.

    Tensors are left to the stages that made them. A NaN becomes black where floats become a picture of 8 bits, so that
    black pictures tell of NaN also where the values lay on an accelerator and nobody waited for them.

    Args:
        result: A pipeline's output, tuple, list, or state of a modular pipeline.

    Returns:
        `pictures` (how many, frames of videos each), `is_video`, `looked_at`; of those `one_colour`, with the `colour`
        of the first, and `not_finite`; and `replaced`: how many the pipeline's safety checker made black, None: it says
        nothing.
    """
    output = _output_of(result)
    pictures = list(_pictures(output))
    if not pictures:
        return None
    chosen = [pictures[index * len(pictures) // MOST_PICTURES] for index in range(MOST_PICTURES)]
    seen = [_look(picture) for picture in (chosen if len(pictures) > MOST_PICTURES else pictures)]
    colours = [colour for colour, is_finite in seen if is_finite and colour is not None]
    return {
        "pictures": len(pictures),
        "is_video": _is_video(output),
        "looked_at": len(seen),
        "one_colour": len(colours),
        "colour": colours[0] if colours else None,
        "not_finite": sum(not is_finite for _, is_finite in seen),
        "replaced": _replaced(result),
    }


def _output_of(result: object) -> object:
    values = getattr(result, "values", None)
    if isinstance(values, Mapping):  # a modular pipeline's state
        return next((values[name] for name in _PICTURE_NAMES if values.get(name) is not None), None)
    if isinstance(result, Mapping):
        result = tuple(result.values())
    return result[0] if isinstance(result, tuple) and result else result


def _pictures(output: Any) -> Iterator[Any]:
    if _is_image(output) or (_is_array(output) and output.ndim == 3):
        yield output
    elif isinstance(output, list | tuple) or (_is_array(output) and output.ndim > 3):
        for part in output:
            yield from _pictures(part)


def _is_image(thing: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # who has a picture of it has imported it
    return pillow is not None and isinstance(thing, pillow.Image)


def _is_array(thing: Any) -> bool:
    return isinstance(thing, np.ndarray) and thing.dtype.kind in "fu" and thing.size > 0


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


def _is_video(output: Any) -> bool:
    if isinstance(output, list | tuple):
        return bool(output) and (
            isinstance(output[0], list | tuple) or (_is_array(output[0]) and output[0].ndim > 3)
        )
    return _is_array(output) and output.ndim > 4


def _replaced(result: object) -> int | None:
    flags = getattr(result, "nsfw_content_detected", None)
    if flags is None and isinstance(result, tuple) and len(result) > 1:
        flags = result[1]
    if not isinstance(flags, list) or not all(isinstance(flag, bool | np.bool_) for flag in flags):
        return None
    return sum(map(bool, flags))


def told_apart(value: object) -> str | None:
    """PIL pictures as text, by size and hash of the pixels: "512×512 RGB 8d1c…"; None for anything else."""
    pictures: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not pictures or len(pictures) > MOST_PICTURES or not all(map(_is_image, pictures)):
        return None
    return ", ".join(
        f"{picture.width}×{picture.height} {picture.mode} {xxh3_64_hexdigest(picture.tobytes())}"
        for picture in pictures
    )


def thumbnail_of(result: object) -> Reading[dict[str, Any]]:
    """The first picture in a pipeline's result as a small JPEG; of a video its first frame. An accelerator is waited for.

    Args:
        result: A pipeline's output, tuple, list, or state of a modular pipeline.

    Returns:
        `jpeg` in hexadecimal, a single word in which no prompt can be found, `width` and `height`, at most 96 each; or
        why there is none.
    """
    picture: Any = next(_pictures(_output_of(result)), None)
    if picture is None:
        picture = _picture_in(outcome_of(result))
    if picture is None:
        return Reading(None, "the call gave no picture")
    try:
        from PIL import Image
    except ImportError as missing:
        return Reading(None, f"Pillow is not there to draw it: {missing}")
    small = (picture if _is_image(picture) else Image.fromarray(_as_bytes(picture))).convert("RGB")
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=_THUMBNAIL_QUALITY)
    return Reading({"jpeg": stream.getvalue().hex(), "width": small.width, "height": small.height})


def _picture_in(tensor: Tensor | None) -> NDArray[Any] | None:
    """The first picture of a batch, or frame of a video, (height, width, 3); None for latents and the like."""
    if tensor is None or tensor.dim() < 3 or not tensor.is_floating_point():
        return None
    is_video = tensor.dim() == 5
    picture = tensor[0] if tensor.dim() > 3 else tensor
    if is_video:  # its frames come before or after its channels
        picture = picture[0] if picture.shape[1] in _BANDS else picture[:, 0]
    if picture.dim() != 3 or picture.shape[0] not in _BANDS:
        return None
    taken: NDArray[Any] = picture.detach().float().cpu().movedim(0, -1).numpy()
    return taken


def _as_bytes(picture: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels of 0 to 1, or of 0 to 255, as bytes; NaN is black."""
    pixels = picture
    if picture.dtype.kind == "f":
        pixels = np.nan_to_num(picture, nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0) * 255.0 + 0.5
    taken: NDArray[np.uint8] = pixels.astype(np.uint8)
    return taken[..., 0] if taken.shape[-1] == 1 else taken


def outcome_of(result: object) -> Tensor | None:
    """The first tensor in what a pipeline gives; an array is seen as a tensor, without a copy. None: neither.

    Args:
        result: A pipeline's output, tuple, list, state of a modular pipeline, or bare tensor.
    """
    values = getattr(result, "values", None)
    if isinstance(values, Mapping):  # a modular pipeline's state
        outcomes = (outcome_of(values.get(name)) for name in _OUTCOME_NAMES)
        return next((outcome for outcome in outcomes if outcome is not None), None)
    if isinstance(result, Mapping):
        result = tuple(result.values())
    while isinstance(result, tuple | list) and result:
        result = result[0]
    if isinstance(result, np.ndarray) and result.dtype.kind == "f" and result.flags.writeable:
        return torch.from_numpy(result)
    return result if isinstance(result, Tensor) else None
