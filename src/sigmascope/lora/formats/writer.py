"""Write a LoRA file module by module, in any format."""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints import StreamingWriter
from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import Adapter, DiffChange, DoraChange, TuckerChange, WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.change_tensors import change_tensors
from sigmascope.lora.formats.registry import format_named
from sigmascope.lora.formats.storable import holds, require_finite
from sigmascope.lora.formats.tally import Tally
from sigmascope.lora.formats.unit_scale import stored_factors
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.names.fused import divided, joined
from sigmascope.lora.names.transformer_names import Row
from sigmascope.lora.names.unet_names import UnetBlocks, blocks_of
from sigmascope.lora.paths import as_text

LBM_LAYOUT: Final = ModelLayout("lbm", "lbm", {"denoiser": "denoiser.", "vae": "vae.vae_model."})
"""What is taken for granted where no layout is given."""

_ALPHA: Final = ".alpha"
_KEY_ENDS: Final = (".lora_up.weight", ".lora_down.weight", _ALPHA)
_FIELDS_BYTES: Final = 2048  # of the header, that are known at the end


class LoraWriter:
    """Write a LoRA with one module in memory at a time.

        with LoraWriter("lora.safetensors", format="kohya", layout=layout) as writer:
            for layer in layers:
                writer.write(layer, factors_of(layer))

    Names are the checkpoint's own; the format makes its own of them. Leaving the block without an exception
    completes the file and puts it in place; with one, the target stays as it was. The header gets the fields
    that tools look for (ranks, kind, architecture), and over them `metadata`.

    Args:
        path: A `.safetensors` file to write or replace.
        format: "native", "kohya", "peft" or "comfyui".
        layout: Of the checkpoint whose layers are named; LBM's own when left out.
        metadata: Texts for the header.
        inherited: Texts for the header that go before none of the above.
        expected: Paths of the layers that may come, so that room is left for the header.
        model_layers: Paths of all layers of the model, by which a U-Net of unusual size counts its blocks.
        blocks: The U-Net's, where they are known already.
        dtype: To store factors in; their own when left out, or float32 where a scale would round them.
        prefix: Before the denoiser's names in PEFT's format; `unet` or `transformer` when left out, "" for none.

    Attributes:
        tally: Kinds and ranks of what is written so far.
        widened: Layers whose up factor became float32, because their scale would have rounded it.

    Raises:
        LoraFormatError: There is no such format; on leaving, nothing was written.
        WriteError: On entering: the target cannot be written.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        format: str = "native",
        layout: ModelLayout | None = None,
        metadata: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
        expected: Iterable[str] | None = None,
        model_layers: Iterable[str] | None = None,
        blocks: UnetBlocks | None = None,
        dtype: torch.dtype | None = None,
        prefix: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.format = format_named(format)
        self.layout = layout or LBM_LAYOUT
        self.tally = Tally()
        self.widened: list[str] = []
        self._metadata = (
            {"modelspec.title": as_text(self.path.stem), **(inherited or {})},
            dict(metadata or {}),
        )
        self._dtype = dtype
        self._prefix = prefix
        self._blocks = blocks if model_layers is None else _blocks(model_layers, self.layout)
        self._alphas: dict[str, tuple[int, str, Tensor]] = {}
        self._parts: dict[str, tuple[Row, str, dict[str, LoraFactors]]] = {}
        first, last = self._metadata
        names = None if expected is None else [layer + end for layer in expected for end in _KEY_ENDS]
        room = None if names is None else [*names, "x" * _FIELDS_BYTES]
        self._file = StreamingWriter(self.path, first | last, expected=room)

    def __enter__(self) -> "LoraWriter":
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._file.__exit__(kind, error, trace)
            return
        try:
            self._finish()
        except BaseException as failure:
            self._file.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._file.__exit__(None, None, None)

    def write(self, layer: str, factors: LoraFactors) -> None:
        """Write the factors of one layer.

        Layers that the format's naming fuses into one matrix are kept until all of them are there, or all is
        written; a fused layer is divided where the naming has its parts.

        Args:
            layer: The layer's path in the checkpoint, without `.weight`.
            factors: Its change.

        Raises:
            LoraFormatError: The format has no name for the layer.
            NonFiniteError: A factor holds NaN or Inf, or does so in the dtype of storage.
        """
        placed = self.format.placement(layer, self.layout, blocks=self._blocks)
        if isinstance(placed, str):
            self._write(layer, placed, factors)
        elif self.format.naming(self.layout.family) == "diffusers":
            for path, part in divided(factors, placed).items():
                self._write(layer, path, part)
        else:
            _, _, parts = self._parts.setdefault(placed.original, (placed, layer, {}))
            _, own = self.layout.split(layer)
            parts[own] = factors
            if len(parts) == len(placed.parts):
                self._write_joined(placed.original)

    def write_diff(self, key: str, tensor: Tensor) -> None:
        """Write the whole change of one tensor: a bias, a norm, an embedding, or any other.

        Args:
            key: The tensor's key in the checkpoint.
            tensor: Its change, of its shape.

        Raises:
            LoraFormatError: The format holds no whole changes, or has no name for the tensor.
            NonFiniteError: It holds NaN or Inf, or does so in the dtype of storage.
        """
        self.write_change(key.removesuffix(".weight"), DiffChange({"diff": tensor}))

    def write_change(self, name: str, change: WeightChange) -> None:
        """Write a change that is more than plain factors, as it is stored.

        Args:
            name: As in `LoraFile.changes`, with the layer's path in the checkpoint.
            change: One of `sigmascope.lora.adapters`.

        Raises:
            LoraFormatError: The format cannot hold such a change, or has no name for the layer.
            NonFiniteError: As of `write_diff`.
        """
        layer, keys = name.removesuffix(".bias"), self.format.keys
        if isinstance(change, TuckerChange) and not keys.holds_changes:
            self.write(name, change.factors())
            return
        if not isinstance(change, Adapter | DoraChange) or not holds(keys, change):
            raise LoraFormatError(
                f"{name}: {self.format.name} files hold no such change ({change.kind}).",
                hint="Write another format, or leave such changes out.",
            )
        module = self.format.name_for(layer, self.layout, prefix=self._prefix, blocks=self._blocks)
        tensors = change_tensors(change, keys, is_bias=name != layer)
        stored = {end: self._cast(name, tensor, end) for end, tensor in tensors.items()}
        for end, tensor in stored.items():
            self._file.write(f"{module}.{end}", tensor)
        self.tally.add_change(change.kind)

    def _write(self, layer: str, path: str, factors: LoraFactors) -> None:
        name = self.format.named(layer, path, self.layout, self._prefix)
        stored = stored_factors(factors, self._dtype)
        for factor in (stored.up, stored.down):
            require_finite(layer, factor)
        for key, tensor in self.format.module_tensors(name, stored).items():
            if key.endswith(_ALPHA):
                self._alphas[name] = stored.rank, key, tensor  # whether it is wanted shows when all are there
            else:
                self._file.write(key, tensor)
        if self._dtype is None and stored.up.dtype != factors.up.dtype:
            self.widened.append(layer)
        self.tally.add(stored.rank, stored.weight_shape)

    def _write_joined(self, original: str) -> None:
        row, layer, parts = self._parts.pop(original)
        self._write(layer, original, joined(parts, row))

    def _cast(self, module: str, tensor: Tensor, end: str) -> Tensor:
        keep = self._dtype is None or end == self.format.keys.alpha
        stored = tensor.detach() if keep else tensor.detach().to(self._dtype)
        require_finite(module, stored)
        return stored.contiguous()

    def _finish(self) -> None:
        for original in list(self._parts):
            self._write_joined(original)
        ranks = {name: rank for name, (rank, _, _) in self._alphas.items()}
        if not self.format.alphas_mislead(ranks, self.layout):
            for _, key, alpha in self._alphas.values():
                self._file.write(key, alpha)
        if not self.tally.kinds:
            raise LoraFormatError(
                "a LoRA without modules is not written.", hint="Check what it was made from."
            )
        first, last = self._metadata
        self._file.update_metadata(first | self.tally.header(self.format.name, self.layout.family) | last)


def _blocks(layers: Iterable[str], layout: ModelLayout) -> UnetBlocks:
    return blocks_of(path for part, path in map(layout.split, layers) if part == "denoiser")
