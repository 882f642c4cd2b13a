"""The fingerprint of a denoiser (`denoiser_fingerprint`).

A LoRA file's header holds its base's fingerprint, which later shows whether a model is that base.
"""

import hashlib
from math import prod
from typing import Final

import torch

from sigmascope.checkpoints import Checkpoint, tensor_fingerprint
from sigmascope.lora.families import layout_of

BASE_FINGERPRINT: Final = "sigmascope_base_fingerprint"
"""The header field with the fingerprint of the LoRA's base."""
TUNED_FINGERPRINT: Final = "sigmascope_tuned_fingerprint"
"""The header field with the fingerprint of the model that the LoRA was extracted from."""
_SMALL_ELEMENTS: Final = 16 * 1024
_MAX_LARGE_TENSORS: Final = 16
_MAX_LARGE_ELEMENTS: Final = 1 << 26  # 256 MiB in float32


def denoiser_fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a denoiser by its small tensors and a sample of its large ones.

    All tensors of up to 16,384 elements are hashed (biases, norms, the first and last convolution), and up to 16 larger
    ones. These are chosen by name and together have at most 64 million elements, so at most 256 MiB of a full-size file
    are read for them. Values are rounded to bfloat16 first, so a model and its float32 or bfloat16 copy have one
    fingerprint.

    It misses a training that changed only layers outside the sample, or all values by less than bfloat16 shows. It
    distinguishes a model from its float16 copy, whose rounding differs.

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
    """The keys to hash: the same for all files of one architecture, whatever their dtypes and order."""
    shapes = {key: checkpoint.info(key).shape for key in checkpoint}
    layout = layout_of(shapes)
    sizes = {key: prod(shape) for key, shape in shapes.items() if layout.split(key)[0] == "denoiser"}
    sizes = sizes or {
        key: prod(shape) for key, shape in shapes.items()
    }  # the file is only a VAE or text encoder
    chosen = [key for key, size in sizes.items() if size <= _SMALL_ELEMENTS]
    room = _MAX_LARGE_ELEMENTS
    # Sorted by a hash of the name: a regular step through the names could hit the same kind of layer each time.
    large = sorted(sizes.keys() - chosen, key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    for key in large[:_MAX_LARGE_TENSORS]:
        if sizes[key] <= room:
            chosen.append(key)
            room -= sizes[key]
    return sorted(chosen)
