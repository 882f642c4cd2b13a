"""Where a tensor's elements are in memory."""

from torch import Tensor

from sigmascope.probes.reading import PROBE_ERRORS


def place_of(tensor: Tensor) -> object:
    """Equal for two tensors exactly if they are the same elements in memory, read in the same way."""
    try:
        address = tensor.data_ptr()
        turned = tensor.is_conj(), tensor.is_neg()
    except PROBE_ERRORS:
        return id(tensor)
    if address == 0 or tensor.numel() == 0:  # meta, empty or freed: the object itself is all there is
        return id(tensor)
    return (str(tensor.device), address, tuple(tensor.shape), tensor.stride(), tensor.dtype, *turned)
