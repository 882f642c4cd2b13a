"""The fingerprint of a denoiser: a LoRA file carries that of its base, which tells later whether a base is the one it was made from."""

import hashlib
from math import prod
from typing import Final

import torch

from sigmascope.checkpoints import Checkpoint, tensor_fingerprint
from sigmascope.lora.families import layout_of

BASE_FINGERPRINT: Final = "sigmascope_base_fingerprint"
"""The field of a LoRA file's header that holds its base's fingerprint."""
TUNED_FINGERPRINT: Final = "sigmascope_tuned_fingerprint"
"""The same of the model that it was extracted from."""
# Tensors that are hashed for it.
_SMALL_ELEMENTS: Final = 16 * 1024  # elements
_MAX_LARGE_TENSORS: Final = 16
_MAX_LARGE_ELEMENTS: Final = 1 << 26  # of all large tensors together: 256 MiB in float32


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
        rounded = tensor if tensor.dtype == torch.bfloat16 else tensor.to(torch.float32).to(torch.bfloat16)
        digest.update(f"{key!r}\n{tensor_fingerprint(rounded)}\n".encode())
    return digest.hexdigest()


def _hashed_keys(checkpoint: Checkpoint) -> list[str]:
    """The same for any two files of one architecture, whatever their dtypes and order."""
    shapes = {key: checkpoint.info(key).shape for key in checkpoint}
    layout = layout_of(shapes)
    sizes = {key: prod(shape) for key, shape in shapes.items() if layout.split(key)[0] == "denoiser"}
    sizes = sizes or {key: prod(shape) for key, shape in shapes.items()}  # a VAE or text encoder alone
    chosen = [key for key, size in sizes.items() if size <= _SMALL_ELEMENTS]
    room = _MAX_LARGE_ELEMENTS
    # By a hash of the name: any even step through the names could meet the same kind of layer each time.
    large = sorted(sizes.keys() - chosen, key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    for key in large[:_MAX_LARGE_TENSORS]:
        if sizes[key] <= room:
            chosen.append(key)
            room -= sizes[key]
    return sorted(chosen)
