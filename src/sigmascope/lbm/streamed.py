"""Run an LBM whose large weights stay in their file, for machines that its float32 weights alone would fill.

A layer's weight is read when the layer is called, and again for its gradient, both times into the same memory. The file
is then mostly in the system's cache, which other programs can claim at any time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import NonFiniteError
from sigmascope.lbm.config import LbmConfig, resolve_config
from sigmascope.lbm.model import LbmModel, assign_weights, build_lbm, is_finite
from sigmascope.probes.host import trim_heap

STREAMED_ELEMENTS: Final = 1 << 18
"""Weights with at least this many elements stay in the file: 1 MiB in float32."""
_MAX_FREE_BYTES: Final = 1 << 29
"""Bytes that malloc may hold free from layer to layer."""


@contextmanager
def streamed_lbm(
    path: str | Path,
    config: LbmConfig | str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    large: int = STREAMED_ELEMENTS,
) -> Iterator[LbmModel]:
    """A model on the CPU that can be used inside the block. It computes the same as the model of `load_lbm`.

    Gradients pass through it, but weights that stay in the file get none.

    Args:
        path: As of `load_lbm`.
        config: The same.
        dtype: In which it computes; weights are widened or rounded to it as they are read.
        large: Elements from which a denoiser's weight stays in the file.

    Raises:
        SigmascopeError: As of `load_lbm`. A large weight that holds NaN or Inf is named when it is first read.
    """
    with open_checkpoint(path) as checkpoint:
        model = build_lbm(resolve_config(path, config), device="meta")
        layers = {
            f"denoiser.{name}.weight": module
            for name, module in model.denoiser.named_modules()
            if _is_streamable(module) and prod(module.weight.shape) >= large
        }
        dtypes = {"denoiser": dtype, "vae": dtype, "num_iterations": torch.float32}
        assign_weights(model, checkpoint, dtypes, "cpu", left_out=layers)
        reader = _WeightReader(checkpoint, dtype, list(layers))
        for key, module in layers.items():
            module.forward = _StreamedLayer(module, reader, key).forward
        yield model.eval()


def _is_streamable(module: nn.Module) -> bool:
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


class _WeightReader:
    """Reads weights, one at a time, into memory that the next one takes again."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, keys: list[str]) -> None:
        infos = [checkpoint.info(key) for key in keys]
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._stored = torch.empty(max((info.nbytes for info in infos), default=0), dtype=torch.uint8)
        self._largest = max(
            (prod(info.shape) for info in infos if info.dtype != dtype), default=0
        )  # is converted
        self._converted = torch.empty(self._largest, dtype=dtype)
        self._unchecked = set(keys)

    def read(self, key: str) -> Tensor:
        """A weight; lost when another is read. What earlier layers left free goes back to the system.

        Raises:
            NonFiniteError: It holds NaN or Inf.
            CheckpointError: It cannot be read.
        """
        trim_heap(_MAX_FREE_BYTES)
        stored = self._checkpoint.tensor_into(key, self._stored)
        if key in self._unchecked:
            if not is_finite(stored):
                raise NonFiniteError(
                    f"{self._checkpoint.path}: {key} holds NaN or Inf.",
                    hint="The checkpoint is damaged; download or save it again.",
                )
            self._unchecked.remove(key)
        if stored.dtype == self._dtype:
            return stored
        return self._converted[: stored.numel()].view(stored.shape).copy_(stored)


class _StreamedLayer:
    """A Linear or convolution layer without its weight."""

    def __init__(self, module: nn.Module, reader: _WeightReader, key: str) -> None:
        self._module = module
        self._reader = reader
        self._key = key

    def forward(self, input: Tensor) -> Tensor:
        """What the layer gives."""
        result: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return result

    def product(self, given: Tensor) -> Tensor:
        """The same, without gradients."""
        weight, module = self._reader.read(self._key), self._module
        if isinstance(module, nn.Linear):
            return functional.linear(given, weight, module.bias)
        assert isinstance(module, nn.Conv2d)
        result: Tensor = module._conv_forward(given, weight, module.bias)
        return result

    def gradient(self, shape: torch.Size, gradient: Tensor) -> Tensor:
        """Of an input of this shape, from that of the output."""
        weight, module = self._reader.read(self._key), self._module
        if isinstance(module, nn.Linear):
            return gradient @ weight
        assert isinstance(module, nn.Conv2d)
        assert not isinstance(module.padding, str)
        result: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
            shape, weight, gradient, module.stride, module.padding, module.dilation, module.groups
        )
        return result


class _Product(torch.autograd.Function):
    """Keeps nothing for the backward pass except where the weight is."""

    @staticmethod
    def forward(context: Any, given: Tensor, layer: _StreamedLayer) -> Tensor:
        context.layer, context.shape = layer, given.shape
        return layer.product(given)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.layer.gradient(context.shape, gradient), None
