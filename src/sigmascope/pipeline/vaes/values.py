"""What the numbers of a picture mean, and the same picture in the range that a VAE takes."""

from typing import Literal

from torch import Tensor

Values = Literal["signed", "unit", "bytes"]
"""[-1, 1] as diffusers' VAEs take it, [0, 1] as ComfyUI has it, or 0 to 255."""

_LOWEST: dict[Values, float] = {"signed": -1.0, "unit": 0.0, "bytes": 0.0}
_SPAN: dict[Values, float] = {"signed": 2.0, "unit": 1.0, "bytes": 255.0}


def rescaled(pixels: Tensor, values: Values, wanted: Values) -> Tensor:
    """The same pixels in another range, in float32 or better; as they are where nothing is to do.

    Args:
        pixels: Any shape.
        values: What they are in.
        wanted: What they shall be in.
    """
    if not pixels.is_floating_point():
        pixels = pixels.float()
    if values == wanted:
        return pixels
    scale = _SPAN[wanted] / _SPAN[values]
    wide = pixels.float() if pixels.itemsize < 4 else pixels
    return wide.mul(scale).add_(_LOWEST[wanted] - _LOWEST[values] * scale)
