"""Open weights, whatever file or folder they are in.

A folder is searched for the names that diffusers and transformers use: `model.safetensors`,
`diffusion_pytorch_model.safetensors`, their indexes (`….safetensors.index.json`), and with a variant in the name
`….fp16.safetensors` and `….safetensors.index.fp16.json`. An index says which key is in which of several files
(`ShardedCheckpoint`).

A diffusers folder has a `model_index.json` and a folder for each component. It is opened as one checkpoint
(`PipelineCheckpoint`) with keys `<component>.<key>`, such as `unet.conv_in.weight` and
`text_encoder.text_model.….weight`.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.files import (
    HEAD_BYTES,
    foreign_file_error,
    is_existing,
    is_folder,
    is_regular_file,
    names_in,
    reading,
    shortened,
    sniff,
)
from sigmascope.checkpoints.gguf import GgufCheckpoint
from sigmascope.checkpoints.quantisation import dequantised
from sigmascope.checkpoints.safetensors import SafetensorsCheckpoint
from sigmascope.checkpoints.torch_files import PickleCheckpoint
from sigmascope.errors import CheckpointError
from sigmascope.files import parse_json

INDEX_SUFFIX: Final = ".safetensors.index.json"
PICKLE_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin")

_NAMED: Final = 5  # files in a message
_USUAL_STEMS: Final = ("model", "diffusion_pytorch_model")
_SHARD_STEM: Final = re.compile(r"-\d{5}-of-\d{5}$")
_PREFERRED_VARIANTS: Final = ("fp32", "bf16", "fp16")
"""Of several variants without a plain file: the one that has lost least."""

_MAX_SHARD_INDEX_BYTES = 100_000_000
_INCOMPLETE = "Download the folder again, all of it."
MODEL_INDEX: Final = "model_index.json"
_MAX_MODEL_INDEX_BYTES = 10_000_000

OpenFile = Callable[[Path], Checkpoint]


def open_checkpoint(
    path: str | os.PathLike[str], *, variant: str | None = None, dequantise: bool = True
) -> Checkpoint:
    """Open weights for reading one tensor at a time.

    Args:
        path: A `.safetensors` file, a `*.safetensors.index.json`, a `.gguf` file, a PyTorch checkpoint (`.ckpt`,
            `.pt`, `.pth`, `.bin`; weights only, code in it is never run), a folder that holds one of them, or a
            diffusers folder, whose components are opened as one with keys `<component>.<key>`.
        variant: Of a folder that has several: `fp16` for `*.fp16.safetensors`. Without it the plain file is read,
            else of fp32, bf16 and fp16 the first that is there.
        dequantise: Give quantised weights as the numbers that they stand for; see `Checkpoint.dequantised`.
            Without it codes and scales are given as they lie in the file (a GGUF file's are dequantised always).

    Returns:
        The opened checkpoint: use it in a `with` block.

    Raises:
        CheckpointError: There is no such file or variant, it is damaged or something else, or quantised in a way
            that cannot be undone here.
        UnsafeCheckpointError: A PyTorch checkpoint that asks to run code.
    """
    opened = _open(Path(path), variant)
    if not dequantise:
        return opened
    try:
        return dequantised(opened)
    except BaseException:
        opened.close()
        raise


def _open(path: Path, variant: str | None) -> Checkpoint:
    if not is_folder(path):
        return _open_file(path)
    if is_regular_file(path / MODEL_INDEX):
        return open_pipeline(path, variant, _open_file)
    files = weight_files(path)
    if variant is not None and variant not in files.by_variant:
        raise no_such_variant(path, variant, files.variants)
    return _open_file(files.choose(variant) or only_file(path))


def _open_file(file: Path) -> Checkpoint:
    if not is_existing(file):
        raise _missing(file)
    if not is_regular_file(file):
        raise CheckpointError(file, "is not a regular file.", hint="Name a file of weights.")
    if file.name.endswith(".json"):
        return ShardedCheckpoint(file)
    suffix = file.suffix.lower()
    if suffix == ".gguf":
        return GgufCheckpoint(file)
    return _open_pickle(file) if suffix in PICKLE_SUFFIXES else SafetensorsCheckpoint(file)


def _missing(file: Path) -> CheckpointError:
    if not is_folder(file.parent):
        message = f"does not exist: there is no folder {file.parent}."
        return CheckpointError(file, message, hint="Check the path.")
    return CheckpointError(file, "does not exist.", hint=what_is_there(file) or "Check the path.")


def what_is_there(missing: Path) -> str:
    """What a user may have meant by a file that does not exist; empty where its folder tells nothing.

    Args:
        missing: The path.
    """
    try:
        siblings = names_in(missing.parent)
    except CheckpointError:  # no folder, or one that may be entered but not listed
        return ""
    near = difflib.get_close_matches(missing.name, siblings, n=1, cutoff=0.5)
    weights = sorted(name for name in siblings if name.endswith((".safetensors", ".gguf", *PICKLE_SUFFIXES)))
    more = f" and {len(weights) - _NAMED} more" if len(weights) > _NAMED else ""
    parts = [f"Did you mean {near[0]}?"] if near else []
    parts += [f"Checkpoints there: {', '.join(weights[:_NAMED])}{more}."] if weights else []
    return " ".join(parts)


def _open_pickle(file: Path) -> Checkpoint:
    with reading(file), file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise CheckpointError(file, "is empty.", hint="Download it again or make it anew.")
    kind = sniff(head)
    if kind == "safetensors":  # misnamed, and harmless
        return SafetensorsCheckpoint(file)
    if kind not in {"zip", "pickle"}:
        foreign = foreign_file_error(file, kind, "a PyTorch checkpoint")
        if foreign is not None:
            raise foreign
    return PickleCheckpoint(file)


def no_such_variant(folder: Path, variant: str, variants: list[str]) -> CheckpointError:
    """The error for a variant that a folder does not have."""
    have = f"It has {', '.join(variants)}." if variants else "Its files have no variant in their names."
    return CheckpointError(folder, f"has no weights in the variant {variant}.", hint=have)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The usual files of weights of one folder, by variant; of the plain ones the variant is empty."""

    folder: Path
    by_variant: dict[str, str]

    @property
    def variants(self) -> list[str]:
        """The variants beside the plain files."""
        return sorted(filter(None, self.by_variant))

    def choose(self, variant: str | None) -> Path | None:
        """The file or index for a variant; without one the plain file, else the variant that lost least.

        Raises:
            CheckpointError: There are several variants, none plain, and none of a known precision.
        """
        if variant is not None:
            return self._path(variant)
        for wanted in ("", *_PREFERRED_VARIANTS):
            if wanted in self.by_variant:
                return self._path(wanted)
        if len(self.by_variant) > 1:
            raise CheckpointError(
                self.folder,
                f"has its weights in the variants {', '.join(self.variants)}.",
                hint="Choose one with variant=.",
            )
        return self._path(next(iter(self.by_variant), ""))

    def _path(self, variant: str) -> Path | None:
        name = self.by_variant.get(variant)
        return None if name is None else self.folder / name


def weight_files(folder: Path) -> WeightFiles:
    """List the usual files of weights of a folder.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    names = names_in(folder)
    found: dict[str, str] = {}
    for stem in _USUAL_STEMS:
        for name in names:
            variant = _variant_of(name, stem)
            if variant is None:
                continue
            # A whole file before an index of shards, `model` before `diffusion_pytorch_model`.
            of_this_stem = variant in found and found[variant].startswith(stem)
            if variant not in found or (of_this_stem and name.endswith(".safetensors")):
                found[variant] = name
    return WeightFiles(folder, found)


def _variant_of(name: str, stem: str) -> str | None:
    """The variant in a file's name, empty for a plain one; None for a shard and for any other file."""
    index = re.fullmatch(rf"{stem}\.safetensors\.index(?:\.([\w-]+))?\.json", name)
    if index is not None:
        return index[1] or ""
    whole = re.fullmatch(rf"{stem}(?:\.([\w-]+))?\.safetensors", name)
    if whole is None or _SHARD_STEM.search(name.removesuffix(".safetensors")):
        return None
    return whole[1] or ""


def only_file(folder: Path) -> Path:
    """The one file of weights of a folder that has none of the usual names.

    Raises:
        CheckpointError: There are several, or none.
    """
    names = [name for name in names_in(folder) if not name.startswith(".")]
    for suffixes in ((INDEX_SUFFIX,), (".safetensors",), (".gguf",), PICKLE_SUFFIXES):
        candidates = [name for name in names if name.endswith(suffixes)]
        if len(candidates) == 1:
            return folder / candidates[0]
        if candidates:
            raise _several(folder, candidates)
    raise CheckpointError(folder, "is a folder without weights.", hint=_subfolder_hint(folder))


def _several(folder: Path, candidates: Sequence[str]) -> CheckpointError:
    message = f"has {len(candidates)} files of weights."
    return CheckpointError(folder, message, hint=f"Name one of them: {', '.join(candidates[:8])}.")


def _subfolder_hint(folder: Path) -> str:
    inside = [name for name in names_in(folder) if _has_safetensors(folder / name)]
    if inside:
        return f"Its folders {', '.join(inside[:8])} have some: name one of them."
    return "Name a .safetensors file, an index, or a .ckpt."


def _has_safetensors(child: Path) -> bool:
    try:
        return is_folder(child) and any(name.endswith(".safetensors") for name in names_in(child))
    except CheckpointError:
        return False  # one that may not be entered is no help as a hint


class ShardedCheckpoint(Checkpoint):
    """A `*.safetensors.index.json` and the files that it names, all checked when it is opened."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        index = _read_shard_index(path)
        weight_map = _checked_weight_map(index, path)
        self._shards: dict[str, SafetensorsCheckpoint] = {}
        try:
            for name in dict.fromkeys(weight_map.values()):
                self._shards[name] = _open_shard(path, name)
            infos, skipped = self._collect(weight_map, path)
        except BaseException:
            self.close()
            raise
        self._weight_map = weight_map
        super().__init__(path, infos, _merged_metadata(index, self._shards), skipped)

    def _collect(
        self, weight_map: Mapping[str, str], path: Path
    ) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        infos: dict[str, TensorInfo] = {}
        skipped: dict[str, str] = {}
        for key, name in weight_map.items():
            shard = self._shards[name]
            if key in shard:
                infos[key] = shard.info(key)
            elif key in shard.skipped:
                skipped[key] = shard.skipped[key]
            else:
                message = f"lists {shortened(key)} in {name}, which does not have it."
                raise CheckpointError(path, message, hint=_INCOMPLETE)
        for name, shard in self._shards.items():
            for key in shard:
                if weight_map.get(key) != name and key not in infos:
                    skipped[key] = f"is in {name} but not in the index"
        return infos, skipped

    def _read(self, info: TensorInfo) -> Tensor:
        return self._shards[self._weight_map[info.name]].tensor(info.name)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        return self._shards[self._weight_map[info.name]].tensor_into(info.name, buffer)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        return self._shards[self._weight_map[info.name]].pieces(info.name, buffer)

    @property
    def files(self) -> tuple[Path, ...]:
        """The index, then its shards."""
        return (self.path, *(shard.path for shard in self._shards.values()))

    def close(self) -> None:
        """Close every shard."""
        for shard in self._shards.values():
            shard.close()


def _read_shard_index(path: Path) -> dict[str, Any]:
    with reading(path):
        size = path.stat().st_size
        if size > _MAX_SHARD_INDEX_BYTES:
            message = f"is too large for an index ({size} bytes)."
            raise CheckpointError(path, message, hint="Download it again.")
        content = path.read_bytes()
    try:
        index = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(path, f"is not valid JSON ({error}).", hint="Download it again.") from error
    if not isinstance(index, dict):
        raise CheckpointError(path, "is not a JSON object with a weight_map.", hint="Download it again.")
    return index


def _checked_weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map.", hint="Name the index of a sharded checkpoint.")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name):
            raise CheckpointError(
                path,
                f"puts {shortened(key)} in {shortened(name)}, which is no file of this folder.",
                hint="An index may only name files beside it. Do not use this one unless you know its maker.",
            )
    return weight_map


def is_plain_name(name: str) -> bool:
    """A bare file name on every system: no folder, drive, parent or NUL."""
    special = name in {"", ".", ".."} or "\0" in name
    return not special and PurePosixPath(name).name == name and PureWindowsPath(name).name == name


def _open_shard(index: Path, name: str) -> SafetensorsCheckpoint:
    shard = index.parent / name
    try:
        is_there = is_regular_file(shard)
    except CheckpointError:  # the system knows no such name: too long, or no text
        is_there = False
    if not is_there:
        message = f"names the shard {shortened(name)}, which is not there."
        raise CheckpointError(index, message, hint=_INCOMPLETE)
    return SafetensorsCheckpoint(shard)


def _merged_metadata(index: dict[str, Any], shards: Mapping[str, SafetensorsCheckpoint]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for shard in shards.values():
        merged.update(shard.metadata)
    own = index.get("metadata")
    if isinstance(own, dict):
        merged.update(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
        )
    return merged


class PipelineCheckpoint(Checkpoint):
    """The components of a diffusers folder as one checkpoint; closing it closes all.

    Args:
        path: The folder.
        components: The opened components by name, in the order of their keys.
        skipped: Components without weights here, with the reason.
    """

    format = "safetensors"

    def __init__(
        self, path: Path, components: Mapping[str, Checkpoint], skipped: Mapping[str, str] | None = None
    ) -> None:
        self._components = dict(components)
        self._places: dict[str, tuple[Checkpoint, str]] = {}
        infos: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        reasons = dict(skipped or {})
        for name, component in components.items():
            for key in component:
                self._places[f"{name}.{key}"] = component, key
                infos[f"{name}.{key}"] = replace(component.info(key), name=f"{name}.{key}")
            metadata |= {f"{name}.{key}": text for key, text in component.metadata.items()}
            reasons |= {f"{name}.{key}": reason for key, reason in component.skipped.items()}
        super().__init__(path, infos, metadata, reasons)

    @property
    def files(self) -> tuple[Path, ...]:
        """The `model_index.json`, then every file of every component."""
        files = [file for component in self._components.values() for file in component.files]
        return (self.path / MODEL_INDEX, *files)

    def _read(self, info: TensorInfo) -> Tensor:
        component, key = self._places[info.name]
        return component.tensor(key)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        component, key = self._places[info.name]
        return component.tensor_into(key, buffer)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        component, key = self._places[info.name]
        return component.pieces(key, buffer)

    def close(self) -> None:
        """Close every component."""
        for component in self._components.values():
            component.close()


def open_pipeline(folder: Path, variant: str | None, open_file: OpenFile) -> PipelineCheckpoint:
    """Open the components that a `model_index.json` names and that have weights here.

    Args:
        folder: The diffusers folder.
        variant: Such as `fp16`: read from the components that have it; the others give what they have.
        open_file: Opens one file of weights.

    Raises:
        CheckpointError: The index or a component cannot be read, no component has weights, or none has the
            variant.
    """
    components: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    variants: set[str] = set()
    for name in _component_names(folder):
        file = _weights_of(folder / name, variant, variants)
        if file is None:
            skipped[name] = "has no weights in this folder"
        else:
            components[name] = file
    if not components:
        raise CheckpointError(
            folder, "has a model_index.json and no weights in its folders.", hint=_INCOMPLETE
        )
    if variant is not None and variant not in variants:
        raise no_such_variant(folder, variant, sorted(variants))
    opened: dict[str, Checkpoint] = {}
    try:
        for name, file in components.items():
            opened[name] = open_file(file)
        return PipelineCheckpoint(folder, opened, skipped)
    except BaseException:
        for component in opened.values():
            component.close()
        raise


def _component_names(folder: Path) -> list[str]:
    """The index's components: entries of a library and a class."""
    index = _read_model_index(folder / MODEL_INDEX)
    names = [
        name for name, value in index.items() if isinstance(value, list) and len(value) == 2 and all(value)
    ]
    for name in names:
        if not is_plain_name(name):
            raise CheckpointError(
                folder / MODEL_INDEX,
                f"names the component {name!r}, which is no folder beside it.",
                hint="Do not use this one unless you know its maker.",
            )
    return names


def _read_model_index(path: Path) -> dict[str, Any]:
    with reading(path):
        size = path.stat().st_size
        content = path.read_bytes() if size <= _MAX_MODEL_INDEX_BYTES else b""
    try:
        index = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(path, f"is not valid JSON ({error}).", hint=_INCOMPLETE) from error
    if not isinstance(index, dict):
        raise CheckpointError(path, "is not a JSON object that names components.", hint=_INCOMPLETE)
    return index


def _weights_of(component: Path, variant: str | None, variants: set[str]) -> Path | None:
    if not is_folder(component):
        return None
    files = weight_files(component)
    variants.update(files.variants)
    chosen = files.choose(variant) if variant in files.by_variant else files.choose(None)
    if chosen is not None:
        return chosen
    has_any = any(name.endswith((".safetensors", *PICKLE_SUFFIXES)) for name in names_in(component))
    return only_file(component) if has_any else None
