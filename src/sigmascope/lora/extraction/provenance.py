"""What a LoRA file says of its making, and whether a base is the one that it was made from."""

import hashlib
from math import prod
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, tensor_fingerprint
from sigmascope.lora.models.layout import layout_of
from sigmascope.lora.precision import at_least_float32

BASE_FINGERPRINT: Final = "sigmascope_base_fingerprint"
_SMALL: Final = 16 * 1024  # elements
_LARGE_TENSORS: Final = 16
_LARGE_ELEMENTS: Final = 1 << 26  # of all large tensors together: 256 MiB in float32


def denoiser_fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a denoiser by its small tensors and a sample of its large ones.

    All tensors of up to 16,384 elements are hashed (biases, norms, the convolutions at both ends), and up to
    16 larger ones, chosen by their names alone and together no more than 64 million elements, so that a
    full-size file needs no more than 256 MiB of reading. Values are rounded to bfloat16 first: a model
    and its exact float32 or bfloat16 copy are one base.

    What it can miss: a training that changed only layers outside the sample, or every value by less than
    bfloat16 shows. What it tells apart without need: a model and its float16 copy, whose rounding differs.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for key in _hashed_keys(checkpoint):
        tensor = checkpoint.tensor(key)
        rounded = tensor if tensor.dtype == torch.bfloat16 else _rounded(tensor)
        digest.update(f"{key!r}\n{tensor_fingerprint(rounded)}\n".encode())
    return digest.hexdigest()


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(at_least_float32(tensor.dtype)).to(torch.float32).to(torch.bfloat16)


def _hashed_keys(checkpoint: Checkpoint) -> list[str]:
    """The same for any two files of one architecture, whatever their dtypes and order."""
    shapes = {key: checkpoint.info(key).shape for key in checkpoint}
    layout = layout_of(shapes)
    sizes = {key: prod(shape) for key, shape in shapes.items() if layout.split(key)[0] == "denoiser"}
    sizes = sizes or {key: prod(shape) for key, shape in shapes.items()}  # a VAE or text encoder alone
    chosen = [key for key, size in sizes.items() if size <= _SMALL]
    room = _LARGE_ELEMENTS
    # By a hash of the name: any even step through the names could meet the same kind of layer each time.
    large = sorted(sizes.keys() - chosen, key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    for key in large[:_LARGE_TENSORS]:
        if sizes[key] <= room:
            chosen.append(key)
            room -= sizes[key]
    return sorted(chosen)
