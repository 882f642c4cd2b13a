"""The pickle that describes the tensors of a file of PyTorch, made before they are there."""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import torch
from torch import Tensor

STORAGES: Final = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float64: torch.DoubleStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The types that such a file can hold."""
_PROTOCOL: Final = 2  # the one that `weights_only=True` reads


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor that is still to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in all."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class _StorageToCome:
    key: str
    spec: TensorSpec


@dataclass(frozen=True)
class _TensorToCome:
    storage: _StorageToCome


class _Describer(pickle.Pickler):
    """Pickle tensors that are still to come exactly as PyTorch pickles tensors that are there."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageToCome):
            return None
        return ("storage", STORAGES[value.spec.dtype], value.key, "cpu", value.spec.numel)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _TensorToCome):
            return NotImplemented
        shape = value.storage.spec.shape
        rebuild: Callable[..., Tensor] = torch._utils._rebuild_tensor_v2
        return rebuild, (value.storage, 0, shape, _contiguous_strides(shape), False, OrderedDict())


def description(specs: Mapping[str, TensorSpec]) -> bytes:
    """The content of `data.pkl`: a dictionary of contiguous tensors on the CPU, the bytes of the n-th in `data/n`.

    Args:
        specs: By name, in the order that the dictionary shall have; of the types in `STORAGES`.
    """
    stream = BytesIO()
    state = {
        name: _TensorToCome(_StorageToCome(str(number), spec))
        for number, (name, spec) in enumerate(specs.items())
    }
    _Describer(stream, protocol=_PROTOCOL).dump(state)
    return stream.getvalue()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()
