"""Dumps: tensors of one moment of a pipeline, with what is known of them, as a safetensors file."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar, overload

from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint
from sigmascope.checkpoints.dump_metadata import DumpMetadata, from_header, saved_tensor, to_header
from sigmascope.checkpoints.flattening import flatten, plain_metadata
from sigmascope.checkpoints.numpy_arrays import Array, ArrayKind, to_numpy
from sigmascope.checkpoints.reader import open_checkpoint
from sigmascope.checkpoints.writer import save_safetensors
from sigmascope.errors import ConfigError
from sigmascope.records.prompts import PromptPrivacy, Prompts, redactor, stored_prompts

T_co = TypeVar("T_co", covariant=True)


class TensorDump(Mapping[str, T_co], Generic[T_co]):
    """Tensors (or arrays) by name, with the `metadata` of the file they come from."""

    def __init__(self, tensors: Mapping[str, T_co], metadata: DumpMetadata) -> None:
        self._tensors = tensors
        self.metadata = metadata

    def __getitem__(self, name: str) -> T_co:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"TensorDump({', '.join(self)})"


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Any,
    *,
    prompt: Prompts = None,
    prompt_privacy: PromptPrivacy = "hash",
    run_id: str | None = None,
    encoder: str | None = None,
    **metadata: Any,
) -> dict[str, str]:
    """Write tensors with what is known of them as a safetensors file, whole or not at all.

    Conditionings of any nesting (ComfyUI's `[[tensor, {…}]]`, tuples, dicts and outputs of diffusers and transformers)
    are taken apart into named tensors by the rule of `sigmascope.checkpoints.flattening`; the other values in them are
    kept in the header. Nothing is copied but a strided or accelerator tensor, in pieces of 8 MB.

    Args:
        path: The file, replaced if it is there.
        tensors: A mapping of names to tensors, NumPy arrays or conditionings. Anything else is named `tensor`.
        prompt: The text, one for each item of the batch, or several by name.
        prompt_privacy: What the file keeps of prompts: `full`, `hash` or `none` (SPEC section 8). But for `full`, texts
            in the metadata that hold a prompt, or are called one, are replaced too.
        run_id: The run that the tensors belong to.
        encoder: What made them.
        metadata: Further values for the header; an object of no JSON kind becomes the name of its type.

    Returns:
        The header as it was written.

    Raises:
        WriteError: The file cannot be written, or safetensors cannot hold a tensor (sparse, quantised, complex128).
        ConfigError: There is no tensor, the privacy does not exist, or the nesting is deeper than 32.
    """
    header, flat = dump_contents(
        tensors,
        prompt=prompt,
        prompt_privacy=prompt_privacy,
        run_id=run_id,
        encoder=encoder,
        metadata=metadata,
    )
    save_safetensors(path, flat, header)
    return header


def dump_contents(
    tensors: Any,
    *,
    prompt: Prompts,
    prompt_privacy: PromptPrivacy,
    run_id: str | None,
    encoder: str | None,
    metadata: Mapping[str, Any],
    header: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the named tensors that `save_tensors` would write, with texts of the caller's in the header."""
    redact, private = redactor(prompt, prompt_privacy), prompt_privacy != "full"
    found = flatten(tensors, redact, private=private)
    described = DumpMetadata(
        tensors={name: saved_tensor(tensor) for name, tensor in found.tensors.items()},
        run_id=run_id,
        encoder=None if encoder is None else redact(encoder),
        prompts=stored_prompts(prompt, prompt_privacy),
        prompt_privacy=None if prompt is None else prompt_privacy,
        conditioning=found.skeleton,
        metadata=plain_metadata(metadata, redact, private=private),
        header=dict(header or {}),
    )
    return to_header(described), found.tensors


@overload
def load_tensors(path: str | os.PathLike[str], as_numpy: Literal[False] = False) -> TensorDump[Tensor]: ...
@overload
def load_tensors(path: str | os.PathLike[str], as_numpy: Literal[True] | ArrayKind) -> TensorDump[Array]: ...
def load_tensors(
    path: str | os.PathLike[str], as_numpy: bool | ArrayKind = False
) -> "TensorDump[Tensor] | TensorDump[Array]":
    """Read a dump, or any file of weights, into memory.

    Args:
        path: What `save_tensors` wrote; any safetensors file, and what `open_checkpoint` opens, is as good.
        as_numpy: Give NumPy arrays. For types that NumPy lacks (bf16, fp8, fp4), True or `values` gives float32,
            exactly; `ml_dtypes` the types of that package; `bits` uint8 or uint16.

    Returns:
        Tensors on the CPU, or arrays, by name; `.metadata` is what the header says.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or is no file of tensors.
        ConfigError: `as_numpy` does not exist, or `ml_dtypes` is not installed.
    """
    if as_numpy not in (False, True, "values", "ml_dtypes", "bits"):
        raise ConfigError(
            f"as_numpy={as_numpy!r} does not exist.", hint="Choose True, 'values', 'ml_dtypes' or 'bits'."
        )
    with open_tensors(path) as dump:
        if as_numpy is False:
            return TensorDump(dict(dump), dump.metadata)
        kind: ArrayKind = "values" if as_numpy is True else as_numpy
        return TensorDump({name: to_numpy(tensor, kind) for name, tensor in dump.items()}, dump.metadata)


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[TensorDump[Tensor]]:
    """Open a dump whose tensors are read when they are asked for, each time anew.

    Yields:
        Good inside the block only.

    Raises:
        CheckpointError: As of `load_tensors`.
    """
    with open_checkpoint(path, dequantise=False) as checkpoint:
        yield TensorDump(_Lazy(checkpoint), from_header(checkpoint.path, checkpoint.metadata))


class _Lazy(Mapping[str, Tensor]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._checkpoint:
            raise KeyError(name)
        return self._checkpoint.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)


__all__ = ["TensorDump", "load_tensors", "open_tensors", "save_tensors"]
