"""What the weights of a model were, and the way back: where they are, how they lie, and their values.

Moving weights and laying them out anew loses nothing. Narrowing them does: then the originals are kept in RAM.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sigmascope.pipeline.optimizing.kind import Change

Models = Iterable[tuple[str, nn.Module]]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(slots=True)
class _Weight:
    """One parameter or buffer as it was.

    Attributes:
        owner: The module whose own it is.
        key: Its name there.
        original: Its values, for a choice that narrows them.
        narrowed: The dtype that the choice gave it.
    """

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...]
    original: Tensor | None = None
    narrowed: torch.dtype | None = None

    def now(self) -> Tensor:
        """The tensor in its place: `Module.to` puts new buffers there, and new values into parameters."""
        held = self.owner._buffers.get(self.key)
        return self.tensor if held is None else held


class Weights:
    """The weights of models before a choice.

    Args:
        modules: The models, by name.
        changes: What the choice is going to do to them.
        keep: Whether to keep the values of floating-point weights.
    """

    def __init__(self, modules: Models, changes: frozenset[Change], *, keep: bool) -> None:
        self._changes = changes
        self._weights = [
            _Weight(name, owner, key, tensor, tensor.device, tensor.dtype, tensor.stride())
            for name, owner, key, tensor in _tensors(modules)
        ]
        for weight in self._weights if keep else ():
            if weight.tensor.is_floating_point():
                weight.original = weight.tensor.data.cpu()  # no copy of what is in RAM already

    def settle(self, modules: Models) -> None:
        """Let go of originals of weights that the choice left as they were.

        Parameters that it replaced stay alive until it is undone; in RAM they do not cost the device anything.

        Args:
            modules: The models as they are now.
        """
        present = {id(tensor) for _, _, _, tensor in _tensors(modules)}
        for weight in self._weights:
            now = weight.now()
            weight.narrowed = now.dtype
            if weight.original is None:
                continue
            if id(now) not in present:
                weight.tensor.data = weight.original
                weight.narrowed = weight.dtype
            elif now.dtype == weight.dtype:
                weight.original = None

    def put_back(self) -> list[str]:
        """Put all weights back.

        Returns:
            Names of those that somebody else changed in the meantime: their new values stay, in the old dtype.
        """
        with torch.no_grad():
            return [weight.name for weight in self._weights if not self._put_back(weight)]

    def _put_back(self, weight: _Weight) -> bool:
        held = weight.now()
        now = held.data
        untouched = _is_untouched(weight, now)
        source = now if weight.original is None or not untouched else weight.original
        data = source.to(
            weight.device if "device" in self._changes else now.device,
            weight.dtype if "dtype" in self._changes else now.dtype,
        )
        if "layout" in self._changes and data.stride() != weight.stride:
            data = _laid_out(data, weight.stride)
        if data is not weight.tensor.data:
            weight.tensor.data = data
        if held is not weight.tensor:
            weight.owner._buffers[weight.key] = weight.tensor
        return untouched


def _is_untouched(weight: _Weight, now: Tensor) -> bool:
    """Whether these are the original's values after narrowing; a call that broke off may have left them widened."""
    original = weight.original
    if original is None or (now.dtype == original.dtype and now.data_ptr() == original.data_ptr()):
        return True
    expected = original.to(weight.narrowed or now.dtype).to(now.dtype)
    return torch.equal(_bits(now.cpu()), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that NaN equals itself and float8 can be compared."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _laid_out(data: Tensor, stride: tuple[int, ...]) -> Tensor:
    laid = torch.empty_strided(data.shape, stride, dtype=data.dtype, device=data.device)
    laid.copy_(data)
    return laid


def _tensors(modules: Models) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Parameters and buffers with their names and owners, each once."""
    seen: set[int] = set()
    for prefix, module in modules:
        for path, part in module.named_modules(prefix=prefix):
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}", part, key, tensor
