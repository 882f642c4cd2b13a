"""The bytes of a tensor, piece by piece, so that a strided or GPU tensor is never copied whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 8 * 2**20


def iter_tensor_bytes(tensor: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the elements' bytes in row-major order, whatever the strides and the device.

    A contiguous CPU tensor is yielded without a copy; any other in copies of at most `chunk_bytes`
    (or one element).

    Args:
        tensor: A strided tensor, on any device.
        chunk_bytes: How much may be copied at once.

    Yields:
        Read it before asking for the next one.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if _lies_ready(tensor):
        yield _as_bytes(tensor)
    elif tensor.numel() * tensor.element_size() <= chunk_bytes or tensor.dim() == 0:
        yield _as_bytes(tensor.resolve_conj().resolve_neg().contiguous().cpu())
    else:
        rows = max(1, chunk_bytes * tensor.shape[0] // (tensor.numel() * tensor.element_size()))
        for begin in range(0, tensor.shape[0], rows):
            # One row alone may still be too large: go down a dimension then.
            part = tensor[begin] if rows == 1 else tensor[begin : begin + rows]
            yield from iter_tensor_bytes(part, chunk_bytes)


def _lies_ready(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _as_bytes(tensor: Tensor) -> memoryview:
    # A single element counts as contiguous whatever its stride, and a view as bytes wants a stride of 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
