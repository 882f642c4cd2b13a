"""Write a LoRA in the format and under the names of the file that it comes from."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from torch import Tensor

from sigmascope.checkpoints import StreamingWriter
from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.change_tensors import change_tensors
from sigmascope.lora.formats.header import family_in, kept_metadata
from sigmascope.lora.formats.registry import format_named
from sigmascope.lora.formats.storable import holds
from sigmascope.lora.formats.tally import Tally
from sigmascope.lora.formats.unit_scale import stored_factors
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.names.own_names import understand_names
from sigmascope.lora.paths import as_text

_BIAS: Final = ".bias"


class SameNamesWriter:
    """Write modules under the names that they have already, one in memory at a time.

    Whatever is still true of the first file's header stays; ranks and kind are those of the new one.

    Args:
        path: A `.safetensors` file to write or replace.
        source: The file whose format and header are taken over.
        metadata: More texts for the header.
        layout: Of the model that the LoRA is for, where it is known better than its names tell.
        names: Modules that may come; those of `source` when left out.
        compact: Leave no room in the header, at the cost of moving the data once.

    Raises:
        WriteError: On entering: the target cannot be written.
    """

    def __init__(
        self,
        path: Path,
        source: LoraFile,
        metadata: Mapping[str, str],
        *,
        layout: ModelLayout | None = None,
        names: Iterable[str] | None = None,
        compact: bool = False,
    ) -> None:
        self._format = format_named(source.format)
        self._family = family_in(dict(source.metadata)) or "unknown"
        self._layout = layout or understand_names(source).layout
        self._tally = Tally()
        self._alphas: dict[str, tuple[int, str, Tensor]] = {}
        self._metadata = dict(metadata)
        inherited = {"modelspec.title": as_text(path.stem)} | kept_metadata(dict(source.metadata))
        coming = source.names if names is None else names
        expected = [key for name in coming for key in self.keys_of(name)]
        self._file = StreamingWriter(
            path, inherited | self._metadata, expected, header_bytes=0 if compact else None
        )

    def keys_of(self, name: str) -> tuple[str, ...]:
        """The keys of a module's tensors: up, down and, where the format has one, alpha."""
        ends = self._format.keys
        return tuple(f"{name}.{end}" for end in (ends.up, ends.down, ends.alpha) if end is not None)

    def __enter__(self) -> "SameNamesWriter":
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

    def write(self, name: str, factors: LoraFactors) -> None:
        """Write the factors of one module as they are; they must be finite in their dtype."""
        for key, tensor in self._format.module_tensors(name, stored_factors(factors)).items():
            if key == f"{name}.{self._format.keys.alpha}":
                self._alphas[name] = (
                    factors.rank,
                    key,
                    tensor,
                )  # whether it is wanted shows when all are there
            else:
                self._file.write(key, tensor)
        self._tally.add(factors.rank, factors.weight_shape)

    def write_change(self, name: str, change: WeightChange) -> None:
        """Write a change that is more than plain factors, as it is.

        Raises:
            LoraFormatError: The format cannot hold such a change.
        """
        for key, tensor in self.change_tensors(name, change).items():
            self._file.write(key, tensor)
        self._tally.add_change(change.kind)

    def change_tensors(self, name: str, change: WeightChange) -> dict[str, Tensor]:
        """The tensors of such a change, by key.

        Raises:
            LoraFormatError: The format cannot hold it.
        """
        keys = self._format.keys
        if not isinstance(change, Adapter | DoraChange) or not holds(keys, change):
            raise LoraFormatError(
                f"{name}: a {self._format.name} file cannot hold a change of kind {change.kind}.",
                hint="Convert the LoRA to kohya's or ComfyUI's format first.",
            )
        module = name.removesuffix(_BIAS)
        tensors = change_tensors(change, keys, is_bias=module != name)
        return {f"{module}.{end}": tensor.contiguous() for end, tensor in tensors.items()}

    def _finish(self) -> None:
        ranks = {name: rank for name, (rank, _, _) in self._alphas.items()}
        if not self._format.alphas_mislead(ranks, self._layout):
            for _, key, alpha in self._alphas.values():
                self._file.write(key, alpha)
        header = self._tally.header(self._format.name, self._family)
        self._file.update_metadata(header | self._metadata)
