"""How many bytes a piece of code holds at its highest, counted tensor by tensor without computing anything.

Code that runs on PyTorch's "meta" device makes tensors that have a size and no content. Every tensor made is
counted until it is let go of, so that the count is what an allocator would have seen.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Counted:
    """What a dry run gave.

    Attributes:
        result: What the code returned, on the meta device.
        tensor_bytes: Most that its tensors held at one time, those that it was given apart.
        peak_bytes: The same with what convolutions take for themselves while they run.
    """

    result: Any
    tensor_bytes: int
    peak_bytes: int


def counted(code: Callable[[], object]) -> Counted:
    """Run code whose tensors are on the meta device, and count.

    A convolution takes as much again as its input and weight, to lay them out as its kernel wants them; that
    is what oneDNN was measured to take. Attention is counted as the fused kernels that never hold the matrix
    of all pairs.

    Args:
        code: Makes no tensor on any other device.
    """
    with _disable_current_modes(), torch.no_grad(), _META, _FusedAttention(), _LiveBytes() as live:
        result = code()
    return Counted(result, live.highest, live.highest_with_workspace)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storages that are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.highest = self.highest_with_workspace = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            self._count(tensor.untyped_storage(), made_here=False)
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(output):
            self._count(tensor.untyped_storage(), made_here=True)
        self.highest = max(self.highest, self.now)
        self.highest_with_workspace = max(self.highest_with_workspace, self.now + _workspace(func, args))
        return output

    def _count(self, storage: torch.UntypedStorage, *, made_here: bool) -> None:
        """Count a storage once; of what is given, views are made that must not count as new."""
        key = id(storage)
        if key in self._alive:
            return
        nbytes = storage.nbytes() if made_here else 0

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += nbytes


class _FusedAttention(TorchFunctionMode):
    """Gives attention's output its shape without its steps, which on the meta device would be the naive ones."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        query, value = named["query"], named["value"]
        return query.new_empty(*query.shape[:-1], value.shape[-1])


def _tensors_in(values: object) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _workspace(func: Any, args: tuple[Any, ...]) -> int:
    if getattr(func, "overloadpacket", None) is not torch.ops.aten.convolution:
        return 0
    return nbytes_of(args[0]) + nbytes_of(args[1])


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, wherever they are."""
    return tensor.numel() * tensor.element_size()
