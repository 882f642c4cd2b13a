"""Dumps: tensors of one moment of a pipeline, with what is known of them, as a safetensors file.

`save_tensors` writes one, `load_tensors` and `open_tensors` read it, or any other file of weights.

A tensor is named by the way to it, joined by dots: the key in a mapping (a diffusers or transformers output is one),
the field of a dataclass or named tuple, the number in a list or tuple. An entry `[tensor, {…}]` of a ComfyUI
conditioning names its tensor `cond`: `[[tensor, {"pooled_output": …}]]` under `positive` becomes `positive.0.cond` and
`positive.0.pooled_output`. None is passed over. A name that is taken already gets `~2`, `~3`, ….

What is known of the tensors (`DumpMetadata`) stands in the safetensors header. Each field is one text of it; those
that are more than a text are JSON.

`TensorDumps` keeps the dumps of one run in a folder. Each dump is one self-contained file. The index,
`index.jsonl`, holds one line for each dump, appended once the dump's file is in place. So a killed process leaves whole
dumps; the index may lack the last of them, or hold an unfinished line for it, and the dump is then read from its own
header. A name is taken by creating the file, which only one process can do, and a line is appended in one write:
several processes and threads may save into one local folder at the same time.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, is_existing, is_folder, names_in, reading
from sigmascope.checkpoints.reader import open_checkpoint
from sigmascope.checkpoints.safetensors import read_header, save_safetensors
from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.files import parse_json, reason_of, remove_leftovers, writing_hint
from sigmascope.installation import install_packages
from sigmascope.records import serialization
from sigmascope.records.prompts import (
    HIDDEN,
    PromptPrivacy,
    Prompts,
    StoredPrompt,
    privacy_of,
    quoting,
    stored_prompts,
)

__all__ = ["DumpEntry", "TensorDump", "load_tensors", "open_tensors", "save_tensors"]


T_co = TypeVar("T_co", covariant=True)
ArrayKind = Literal["values", "ml_dtypes", "bits"]
"""How an element type that NumPy lacks is given: as float32 numbers, as a type of `ml_dtypes`, or as raw bits."""
Array = NDArray[Any]


# The header's own texts.
SCHEMA_KEY = "sigmascope_dump"
SCHEMA = "1"
_JSON_FIELDS = ("prompt", "tensors", "conditioning", "metadata")
TENSOR_KEY = "$tensor"
"""In a skeleton, `{"$tensor": name}` marks the place of a tensor."""


# How nestings are flattened, and which keys name the text of a prompt, or the tokens that it became.
_MAX_DEPTH = 32
_PROMPT_WORDS = ("prompt", "caption")
_TOKEN_WORDS = ("token", "input_ids")
_NOT_TEXT_WORDS = ("embed", "hash", "privacy", "mask", "length", "count", "num_", "max_", "limit")


# Element types that NumPy lacks.
_FLOAT4 = "float4_e2m1fn_x2"
_DTYPES_NUMPY_LACKS = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    _FLOAT4,
)
_FLOAT4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1 by their code (OCP Microscaling Formats 1.0, section 5.3.3); bit 3 is the sign."""


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
    are taken apart into named tensors by the rule of `sigmascope.checkpoints.tensor_dumps`; the other values in them are
    kept in the header. Nothing is copied but a strided or accelerator tensor, in pieces of 8 MB.

    Args:
        path: The file, replaced if it is there.
        tensors: A mapping of names to tensors, NumPy arrays or conditionings. Anything else is named `tensor`.
        prompt: The text, one for each item of the batch, or several by name.
        prompt_privacy: What the file keeps of prompts: `full`, `hash` or `none`. With `hash` and `none`, texts and
            lists of tokens in a conditioning are left out, and so are texts in the metadata that contain a word of a
            prompt or have a name such as `prompt`.
        run_id: The run that the tensors belong to.
        encoder: What made them.
        metadata: Further values for the header; an object that JSON cannot hold becomes the name of its type.

    Returns:
        The header as it was written.

    Raises:
        WriteError: The file cannot be written, or safetensors cannot hold a tensor (sparse, quantised, complex128).
        ConfigError: There is no tensor, the privacy level is unknown, or the nesting is deeper than 32.
    """
    header, flat = dump_contents(
        tensors,
        prompt=prompt,
        prompt_privacy=prompt_privacy,
        run_id=run_id,
        encoder=encoder,
        metadata=metadata,
    )
    save_safetensors(path, flat, header, private=True)
    return header


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as it was when it was saved; `device` is where it lay then."""

    shape: tuple[int, ...]
    dtype: str
    device: str | None = None


@dataclass(frozen=True, slots=True)
class DumpMetadata:
    """The header of a dump. For a safetensors file that is not a dump, only `header` is filled.

    Attributes:
        tensors: Shape, dtype and device by name, as saved.
        run_id: The run that the tensors belong to.
        encoder: What made them, such as `CLIP-L`.
        prompts: What is kept of the prompts, by name; a single one is called `prompt`.
        prompt_privacy: What was to be kept of them.
        conditioning: The nesting around the tensors of each conditioning, by name; `{"$tensor": name}` marks the place
            of a tensor.
        metadata: The caller's own values.
        header: The texts of the header that are not a dump's.
    """

    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)
    run_id: str | None = None
    encoder: str | None = None
    prompts: Mapping[str, StoredPrompt] = field(default_factory=dict)
    prompt_privacy: PromptPrivacy | None = None
    conditioning: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, str] = field(default_factory=dict)


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


@overload
def load_tensors(path: str | os.PathLike[str], as_numpy: Literal[False] = False) -> TensorDump[Tensor]: ...
@overload
def load_tensors(path: str | os.PathLike[str], as_numpy: Literal[True] | ArrayKind) -> TensorDump[Array]: ...
def load_tensors(
    path: str | os.PathLike[str], as_numpy: bool | ArrayKind = False
) -> "TensorDump[Tensor] | TensorDump[Array]":
    """Read a dump, or any file of weights, into memory.

    Args:
        path: A file that `save_tensors` wrote, or any file of weights that `open_checkpoint` can open.
        as_numpy: Give NumPy arrays. For types that NumPy lacks (bf16, fp8, fp4), True or `values` gives float32,
            exactly; `ml_dtypes` the types of that package; `bits` uint8 or uint16.

    Returns:
        Tensors on the CPU, or arrays, by name; `.metadata` is what the header says.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or is not a file of tensors.
        ConfigError: `as_numpy` is not one of the choices, or `ml_dtypes` is not installed.
    """
    if as_numpy not in (False, True, "values", "ml_dtypes", "bits"):
        raise ConfigError(
            f"as_numpy={as_numpy!r} is not a choice.", hint="Choose True, 'values', 'ml_dtypes' or 'bits'."
        )
    with open_tensors(path) as dump:
        if as_numpy is False:
            return TensorDump(dict(dump), dump.metadata)
        kind: ArrayKind = "values" if as_numpy is True else as_numpy
        return TensorDump({name: to_numpy(tensor, kind) for name, tensor in dump.items()}, dump.metadata)


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[TensorDump[Tensor]]:
    """Open a dump whose tensors are read each time they are asked for.

    Yields:
        The dump, which can only be read inside the block.

    Raises:
        CheckpointError: As of `load_tensors`.
    """
    with open_checkpoint(path, dequantise=False) as checkpoint:
        yield TensorDump(_LazyTensors(checkpoint), from_header(checkpoint.path, checkpoint.metadata))


class _LazyTensors(Mapping[str, Tensor]):
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
    """The header and the named tensors that `save_tensors` would write, with the caller's own header texts."""
    quotes, private = quoting(prompt, prompt_privacy), not privacy_of(prompt_privacy).keeps_words
    flattened = flatten(tensors, quotes, private=private)
    described = DumpMetadata(
        tensors={name: saved_tensor(tensor) for name, tensor in flattened.tensors.items()},
        run_id=run_id,
        encoder=HIDDEN if encoder is not None and quotes(encoder) else encoder,
        prompts=stored_prompts(prompt, prompt_privacy),
        prompt_privacy=None if prompt is None else prompt_privacy,
        conditioning=flattened.skeleton,
        metadata=plain_metadata(metadata, quotes, private=private),
        header=dict(header or {}),
    )
    return to_header(described), flattened.tensors


def saved_tensor(tensor: Tensor) -> SavedTensor:
    """Shape, dtype and device of a tensor."""
    return SavedTensor(
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
    )


@dataclass(slots=True)
class Flattened:
    """Tensors by name, and the nesting around them with its other values, as JSON."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    skeleton: dict[str, Any] = field(default_factory=dict)


def flatten(nested: Any, quotes: Callable[[str], bool], *, private: bool) -> Flattened:
    """Find all tensors in a nesting and name them.

    Args:
        nested: A mapping of names to tensors, arrays or conditionings; anything else is named `tensor`.
        quotes: Whether a text must not be kept.
        private: Replace texts by `<text>`, and tokens.

    Returns:
        The tensors (arrays as tensors that share their memory), and for each name that held more than a bare tensor,
        the nesting around it. Objects that JSON cannot hold become the name of their type.

    Raises:
        ConfigError: There is no tensor in it, or it is nested more than 32 deep.
    """
    walk = _FlatteningWalk(quotes, private)
    top = nested if isinstance(nested, Mapping) else {"tensor": nested}
    for number, (key, value) in enumerate(top.items()):
        name = walk.name(str(key), number)
        around = walk.visit(name, str(key), value, ())
        if around is not None and not _is_tensor(value):
            walk.found.skeleton[name] = around
    if not walk.found.tensors:
        raise ConfigError("There is no tensor to save.", hint="Give a mapping of names to tensors.")
    return walk.found


class _FlatteningWalk:
    def __init__(self, quotes: Callable[[str], bool], private: bool) -> None:
        self.found = Flattened()
        self._quotes = quotes
        self._private = private

    def name(self, key: str, number: int) -> str:
        """The key, or a numbered name in place of one that quotes a prompt."""
        return f"item_{number}" if self._quotes(key) else key

    def keeps(self, key: str, text: str) -> bool:
        """Whether a text may be kept. What a host puts into a conditioning may be the prompt in any spelling."""
        return not self._private

    def visit(self, name: str, key: str, value: Any, above: tuple[int, ...]) -> Any:
        """Keep the tensors at and below `value`; give what is left of it as JSON."""
        if _is_tensor(value):
            return {TENSOR_KEY: self._keep(name, value)}
        children = _children(value)
        if children is None:
            return self._plain(key, value)
        if id(value) in above:
            return f"<{type(value).__name__} in itself>"
        if len(above) >= _MAX_DEPTH:
            raise ConfigError(
                f"{name} is nested more than {_MAX_DEPTH} deep.", hint="Pass its tensors as separate names."
            )
        inside = (*above, id(value))
        if _is_comfyui_entry(value):
            return [
                self.visit(f"{name}.cond", "cond", value[0], inside),
                self.visit(name, key, value[1], inside),
            ]
        named = _is_named(value)
        visited = []
        for number, (child, item) in enumerate(children):
            label = self.name(child, number)
            # A text in a list called `prompts` is a prompt as well.
            visited.append((label, self.visit(f"{name}.{label}", child if named else key, item, inside)))
        return dict(visited) if named else [item for _, item in visited]

    def _keep(self, name: str, value: Tensor | NDArray[Any]) -> str:
        """Take a tensor in under a free name."""
        unique, number = name, 1
        while unique in self.found.tensors:
            number += 1
            unique = f"{name}~{number}"
        self.found.tensors[unique] = value if isinstance(value, Tensor) else _as_tensor(value)
        return unique

    def _plain(self, key: str, value: Any) -> Any:
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if self._private and _has_word(key, _TOKEN_WORDS):
            return HIDDEN
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str | PurePath):
            return str(value) if self.keeps(key, str(value)) else HIDDEN
        if isinstance(value, torch.dtype | torch.device):
            return str(value)
        return f"<{type(value).__name__}>"


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What is inside, by key; None for what has no inside."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(map(str, value._fields), value, strict=True))
    if isinstance(value, list | tuple):
        return [(str(index), item) for index, item in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(str(index), item) for index, item in enumerate(value.ravel().tolist())]
    if isinstance(value, AbstractSet):
        return [(str(index), item) for index, item in enumerate(sorted(value, key=repr))]
    return None


def _is_comfyui_entry(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and len(value) == 2
        and _is_tensor(value[0])
        and isinstance(value[1], Mapping)
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) or is_dataclass(value) or hasattr(value, "_fields")


def _as_tensor(array: NDArray[Any]) -> Tensor:
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # text, dates, negative strides, the other byte order
        native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
        try:
            return torch.from_numpy(native)
        except TypeError as error:
            raise ConfigError(
                f"An array of {array.dtype} cannot be saved.", hint="Convert it to numbers."
            ) from error


def _has_word(key: str, words: tuple[str, ...]) -> bool:
    lowered = key.lower()
    return any(word in lowered for word in words) and not any(word in lowered for word in _NOT_TEXT_WORDS)


def plain_metadata(
    metadata: Mapping[str, Any], quotes: Callable[[str], bool], *, private: bool
) -> dict[str, Any]:
    """Metadata as JSON values, by the rules of `flatten`; a tensor in it is reduced to its shape and type.

    Raises:
        ConfigError: It is nested more than 32 deep.
    """
    walk = _DescribingWalk(quotes, private)
    return {
        walk.name(key, number): walk.visit(key, key, value, ())
        for number, (key, value) in enumerate(metadata.items())
    }


class _DescribingWalk(_FlatteningWalk):
    """The same walk where tensors are described and not kept, for what the caller says of them in words."""

    def keeps(self, key: str, text: str) -> bool:
        return not (self._private and (_has_word(key, _PROMPT_WORDS) or self._quotes(text)))

    def visit(self, name: str, key: str, value: Any, above: tuple[int, ...]) -> Any:
        if _is_tensor(value):
            return f"<{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}>"
        return super().visit(name, key, value, above)


def to_header(metadata: DumpMetadata) -> dict[str, str]:
    """The header's texts.

    Raises:
        TypeError: JSON cannot hold a value.
    """
    texts = {"format": "pt", SCHEMA_KEY: SCHEMA, **metadata.header}
    named = {"run_id": metadata.run_id, "encoder": metadata.encoder}
    texts |= {name: text for name, text in named.items() if text is not None}
    prompts = {name: _without_none(asdict(prompt)) for name, prompt in metadata.prompts.items()}
    values = {
        "prompt": metadata.prompt_privacy and {"privacy": metadata.prompt_privacy, "prompts": prompts},
        "tensors": {name: asdict(saved) for name, saved in metadata.tensors.items()},
        "conditioning": metadata.conditioning,
        "metadata": metadata.metadata,
    }
    return texts | {
        name: serialization.dumps(value) for name, value in values.items() if value or name == "tensors"
    }


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def from_header(path: Path, texts: Mapping[str, str]) -> DumpMetadata:
    """What the header of a file says; a file without our mark keeps its own texts in `header`.

    Raises:
        CheckpointError: A dump's header is damaged, or of a later version.
    """
    schema = texts.get(SCHEMA_KEY)
    if schema is None:
        return DumpMetadata(header=dict(texts))
    if schema != SCHEMA:
        raise CheckpointError(
            path,
            f"is a dump of version {schema[:20]!r}; this version knows {SCHEMA}.",
            hint="Update Sigmascope.",
        )
    try:
        fields = {name: serialization.loads(texts.get(name, "{}")) for name in _JSON_FIELDS}
        return _parsed_metadata(texts, fields)
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            path, f"the dump's header is damaged ({type(error).__name__}: {error}).", hint="Save it again."
        ) from error


def _parsed_metadata(texts: Mapping[str, str], fields: Mapping[str, Any]) -> DumpMetadata:
    privacy = fields["prompt"].get("privacy")
    if privacy is not None:
        privacy_of(privacy)
    known = {"format", SCHEMA_KEY, "run_id", "encoder", *_JSON_FIELDS}
    return DumpMetadata(
        tensors={
            name: SavedTensor(tuple(map(int, saved["shape"])), str(saved["dtype"]), saved.get("device"))
            for name, saved in fields["tensors"].items()
        },
        run_id=texts.get("run_id"),
        encoder=texts.get("encoder"),
        prompts={
            name: StoredPrompt(str(prompt["sha256"]), prompt.get("text"))
            for name, prompt in fields["prompt"].get("prompts", {}).items()
        },
        prompt_privacy=privacy,
        conditioning=dict(fields["conditioning"].items()),
        metadata=dict(fields["metadata"].items()),
        header={name: text for name, text in texts.items() if name not in known},
    )


def to_numpy(tensor: Tensor, kind: ArrayKind = "values") -> Array:
    """A tensor as an array of its own memory or sharing the tensor's.

    Args:
        tensor: Any dense tensor.
        kind: For element types that NumPy lacks (bf16, fp8, fp4); all others are given as they are.
            `values`: float32, which holds each of their numbers exactly. Two fp4 numbers in a byte are unpacked:
            the last axis is twice as long. `ml_dtypes`: the type of that package. `bits`: uint8 or uint16.

    Raises:
        ConfigError: `ml_dtypes` is asked for and not installed, or has no such type.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES_NUMPY_LACKS:
        return np.asarray(tensor.numpy())
    bits = _raw_bits(tensor)
    if kind == "bits":
        return bits
    if kind == "ml_dtypes":
        return bits.view(_ml_dtype(name))
    if name == _FLOAT4:
        return _unpacked_float4(bits)
    return np.asarray(tensor.to(torch.float32).numpy())


def _raw_bits(tensor: Tensor) -> Array:
    # A view as another type wants elements that lie one after the other.
    flat = tensor.contiguous().view(-1) if tensor.numel() else tensor.new_empty(0)
    unsigned = torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8
    return np.asarray(flat.view(unsigned).numpy()).reshape(tuple(tensor.shape))


def _ml_dtype(name: str) -> "np.dtype[Any]":
    try:
        found = getattr(import_module("ml_dtypes"), name, None)
    except ImportError as error:
        raise ConfigError(
            "as_numpy='ml_dtypes' needs the package ml_dtypes, which is not installed.",
            hint=f"Install it with: {install_packages('ml_dtypes')}, or use as_numpy=True for float32 values.",
        ) from error
    if found is None:
        raise ConfigError(f"ml_dtypes has no type for {name}.", hint="Use as_numpy='values' or 'bits'.")
    made: np.dtype[Any] = np.dtype(found)
    return made


def _unpacked_float4(codes: Array) -> Array:
    """Both numbers of each byte; the lower four bits come first, as PyTorch packs them."""
    magnitudes = np.array(_FLOAT4_MAGNITUDES, dtype=np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    pairs = np.stack([table[codes & 0xF], table[codes >> 4]], axis=-1)
    return pairs.reshape(*codes.shape[:-1], -1) if codes.ndim else pairs


_MAX_STEM_LENGTH = 80
_MAX_DUMPS_PER_NAME = 100_000
_MAX_INDEX_BYTES = 64 << 20
_log = logging.getLogger(__name__)


INDEX_NAME = "index.jsonl"
NAME_KEY = "dump_name"
DUMP_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class DumpEntry:
    """One dump of a folder. `saved_at` is the time in ISO 8601 and UTC, None if only the file itself is left to ask."""

    name: str
    file: str
    saved_at: str | None = None
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class TensorDumps(Mapping[str, TensorDump[Tensor]]):
    """A folder of dumps, by name, each read when it is asked for.

    Args:
        folder: Made with its parents when the first dump is saved. A folder of safetensors files from elsewhere can be
            read too: a file is then named by its name without the suffix.
        run_id: Written into each dump that names none.
        prompt_privacy: What the dumps keep of prompts unless `save` is told otherwise.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        prompt_privacy: PromptPrivacy = "hash",
    ) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.prompt_privacy = prompt_privacy
        self._is_swept = False
        # By name, so that reading many dumps does not read the index each time.
        self._files: dict[str, str] = {}

    def save(
        self,
        name: str,
        tensors: Any,
        *,
        prompt: Prompts = None,
        prompt_privacy: PromptPrivacy | None = None,
        run_id: str | None = None,
        encoder: str | None = None,
        **metadata: Any,
    ) -> Path:
        """Save one dump; see `save_tensors`. A name used before becomes `name-2`, `name-3`, ….

        Args:
            name: What the dump is called; characters that file names cannot have are replaced in the file's name.
            tensors: As for `save_tensors`, with what else it takes.
            prompt: As there.
            prompt_privacy: As there; the folder's by default.
            run_id: As there; the folder's by default.
            encoder: As there.
            metadata: As there.

        Returns:
            The file.

        Raises:
            WriteError: The folder or the file cannot be written.
            ConfigError: As of `save_tensors`.
        """
        path, unique = self._reserve(name)
        try:
            header, flat = dump_contents(
                tensors,
                prompt=prompt,
                prompt_privacy=self.prompt_privacy if prompt_privacy is None else prompt_privacy,
                run_id=self.run_id if run_id is None else run_id,
                encoder=encoder,
                metadata=metadata,
                header={NAME_KEY: unique},
            )
            save_safetensors(path, flat, header, private=True)
        except BaseException:
            with suppress(OSError):  # the reserved name, still empty
                path.unlink()
            raise
        shapes = {key: tuple(tensor.shape) for key, tensor in flat.items()}
        append_entry(
            self.folder,
            DumpEntry(unique, path.name, datetime.now(UTC).isoformat(timespec="milliseconds"), shapes),
        )
        return path

    @property
    def index(self) -> tuple[DumpEntry, ...]:
        """All complete dumps of the folder, in the order of saving; files that the index lacks come last, by name.

        Raises:
            CheckpointError: The folder cannot be read, or a file in it that the index lacks is damaged.
        """
        if not is_folder(self.folder):
            if is_existing(self.folder):
                raise CheckpointError(
                    self.folder, "is not a folder.", hint="Name the folder of a run's dumps."
                )
            return ()
        files = [file for file in names_in(self.folder) if _is_whole(self.folder / file)]
        listed = {
            entry.file: entry for entry in _index_entries(self.folder / INDEX_NAME) if entry.file in files
        }
        rest = [_entry_of_header(self.folder / file) for file in files if file not in listed]
        return (*listed.values(), *rest)

    def load(self, name: str) -> TensorDump[Tensor]:
        """Read one dump into memory.

        Raises:
            CheckpointError: There is none of that name, or it cannot be read.
        """
        return load_tensors(self._path(name))

    def metadata(self, name: str) -> DumpMetadata:
        """The header of one dump, without its tensors.

        Raises:
            CheckpointError: As of `load`.
        """
        path = self._path(name)
        return from_header(path, read_header(path).metadata)

    def __getitem__(self, name: str) -> TensorDump[Tensor]:
        if name not in self._files or not is_existing(self.folder / self._files[name]):
            self._files = {entry.name: entry.file for entry in self.index}
        return load_tensors(self.folder / self._files[name])

    def _path(self, name: str) -> Path:
        files = {entry.name: entry.file for entry in self.index}
        if name not in files:
            known = ", ".join([*files][:8]) or "none"
            raise CheckpointError(self.folder, f"has no dump {name!r}.", hint=f"There are: {known}.")
        return self.folder / files[name]

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        return iter([entry.name for entry in self.index])

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"TensorDumps({str(self.folder)!r})"

    def _reserve(self, name: str) -> tuple[Path, str]:
        """Take a free name by creating its file, empty."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:_MAX_STEM_LENGTH] or "dump"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            for number in range(1, _MAX_DUMPS_PER_NAME):
                ending = "" if number == 1 else f"-{number}"
                path = self.folder / f"{stem}{ending}{DUMP_SUFFIX}"
                try:
                    path.open("xb").close()
                except FileExistsError:
                    continue
                return path, f"{name}{ending}"
        except (OSError, ValueError) as error:  # ValueError: a NUL in the folder's name
            raise WriteError(
                self.folder, f"dumps cannot be written ({reason_of(error)}).", hint=writing_hint(error)
            ) from error
        raise WriteError(self.folder, f"has too many dumps named {name!r}.", hint="Use another name.")

    def _sweep(self) -> None:
        """Once, remove leftovers of killed processes, whose names would never be written again."""
        if self._is_swept:
            return
        self._is_swept = True
        for file in self.folder.glob(f"*{DUMP_SUFFIX}"):
            with suppress(OSError):  # another process has just taken its name back
                if file.stat().st_size == 0:
                    remove_leftovers(file)


def _is_whole(path: Path) -> bool:
    """Whether it is a complete dump; an empty file reserves the name of one that is being written."""
    if not path.name.endswith(DUMP_SUFFIX) or path.name.startswith("."):
        return False
    with reading(path):
        return path.stat().st_size > 0


def _index_entries(path: Path) -> Iterator[DumpEntry]:
    if not is_existing(path):
        return
    with reading(path):
        if path.stat().st_size > _MAX_INDEX_BYTES:
            _log.warning(
                "The index %s is too large to be one; the dumps are read from their own headers.", path
            )
            return
        lines = path.read_bytes().split(b"\n")
    for line in filter(None, lines):
        try:
            content = parse_json(line)
            shapes = {key: tuple(map(int, shape)) for key, shape in content["tensors"].items()}
            yield DumpEntry(str(content["name"]), str(content["file"]), content["saved_at"], shapes)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            _log.debug("A line of %s is damaged; the dump is read from its own header.", path)


def _entry_of_header(path: Path) -> DumpEntry:
    header = read_header(path)
    name = header.metadata.get(NAME_KEY, path.name.removesuffix(DUMP_SUFFIX))
    return DumpEntry(name, path.name, None, {key: entry.shape for key, entry in header.tensors.items()})


def append_entry(folder: Path, entry: DumpEntry) -> None:
    """Add a line. The dump is safe without it, so a failure is only logged."""
    shapes = {key: list(shape) for key, shape in entry.tensors.items()}
    line = {"name": entry.name, "file": entry.file, "saved_at": entry.saved_at, "tensors": shapes}
    try:
        # A line break first: what a killed process may have left of a line must not swallow this one.
        data = b"\n" + json.dumps(line).encode("ascii")
        descriptor = os.open(folder / INDEX_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("The index of %s cannot be written: %s", folder, error)
