"""Open a checkpoint file or folder (`open_checkpoint`).

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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from torch import Tensor

from sigmascope.checkpoints.checkpoint import (
    HEAD_BYTES,
    Checkpoint,
    CompositeCheckpoint,
    StateDict,
    foreign_file_error,
    is_existing,
    is_folder,
    is_regular_file,
    names_in,
    near_path,
    reading,
    shortened,
    sniff,
    what_stands_at,
)
from sigmascope.checkpoints.gguf import GgufCheckpoint
from sigmascope.checkpoints.hub import (
    WEIGHT_SUFFIXES,
    download_command,
    is_hub_name,
    local_model,
    not_cached,
    rest_command,
)
from sigmascope.checkpoints.quantisation import dequantised
from sigmascope.checkpoints.safetensors import SafetensorsCheckpoint
from sigmascope.checkpoints.torch_files import PICKLE_SUFFIXES, PickleCheckpoint
from sigmascope.errors import CheckpointError
from sigmascope.files import parse_json
from sigmascope.units import first_few

INDEX_SUFFIX: Final = ".safetensors.index.json"


_MAX_NAMED: Final = 5
_USUAL_STEMS: Final = ("model", "diffusion_pytorch_model")
_SHARD_STEM: Final = re.compile(r"-(\d{5})-of-(\d{5})$")
_PREFERRED_VARIANTS: Final = ("fp32", "bf16", "fp16")
"""Variants to read if there is no plain file, the most precise first."""


_MAX_SHARD_INDEX_BYTES = 100_000_000
MODEL_INDEX: Final = "model_index.json"
_MAX_MODEL_INDEX_BYTES = 10_000_000
_SCHEMES: Final = {"https:": 1, "http:": 1, "hf:": 0}
"""Of addresses that users give in place of a path, and how many parts come before the name of a model."""
_ZERO_SCRIPT: Final = "zero_to_fp32.py"
"""What DeepSpeed puts into a folder of shards."""


def open_checkpoint(
    path: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    variant: str | None = None,
    dequantise: bool = True,
    keep_unread: bool = False,
) -> Checkpoint:
    """Open weights for reading one tensor at a time.

    Args:
        path: A `.safetensors` file, a `*.safetensors.index.json`, a `.gguf` file, a PyTorch checkpoint (`.ckpt`,
            `.pt`, `.pth`, `.bin`; weights only, code in it is never run), a folder that holds one of them, or a
            diffusers folder, whose components are opened as one with keys `<component>.<key>`. Or the name of one
            on the hub (`org/model`), which is looked for in its local cache. Or tensors in memory, by name.
        variant: Which files of a folder to read if it has several: `fp16` for `*.fp16.safetensors`. By default the
            plain file, or else the first of fp32, bf16 and fp16 that is there.
        dequantise: Return quantised weights as the numbers that they stand for; see `Checkpoint.dequantised`.
            Otherwise codes and scales are returned as stored (those of a GGUF file are always dequantised).
        keep_unread: Open a checkpoint that has weights whose quantisation cannot be undone: they have their names and
            shapes, and reading one is an error.

    Returns:
        The opened checkpoint: use it in a `with` block.

    Raises:
        CheckpointError: There is no such file or variant, it is damaged or something else, or quantised in a way
            that cannot be undone here.
        UnsafeCheckpointError: A PyTorch checkpoint that asks to run code.
    """
    if isinstance(path, Mapping):
        return StateDict(path)
    opened = _open(local_model(path), variant, keep_unread)
    if not dequantise:
        return opened
    try:
        return dequantised(opened, keep_unread=keep_unread)
    except BaseException:
        opened.close()
        raise


def _open(path: Path, variant: str | None, keep_unread: bool) -> Checkpoint:
    if not is_folder(path):
        return _open_file(path, keep_unread)
    if is_regular_file(path / MODEL_INDEX):
        return _open_pipeline(path, variant)
    files = weight_files(path)
    if variant is not None and variant not in files.by_variant:
        raise no_such_variant(path, variant, files.variants)
    return _open_file(files.choose(variant) or only_file(path), keep_unread)


def _open_file(file: Path, keep_unread: bool = False) -> Checkpoint:
    if not is_existing(file):
        raise no_such_file(file)
    if not is_regular_file(file):
        raise CheckpointError(
            file, f"{what_stands_at(file)}, not a regular file.", hint="Name a file of weights."
        )
    if file.name.endswith(".json"):
        return ShardedCheckpoint(file)
    suffix = file.suffix.lower()
    if suffix == ".gguf":
        return GgufCheckpoint(file, keep_unread=keep_unread)
    return _open_pickle(file) if suffix in PICKLE_SUFFIXES else SafetensorsCheckpoint(file)


def no_such_file(file: Path) -> CheckpointError:
    """The error for a file that is not there, with what may have been meant and how to download it."""
    hint = what_is_there(file) or "Check the path."
    scheme, *rest_of_address = file.parts or ("",)
    if scheme in _SCHEMES:
        name = "/".join(rest_of_address[_SCHEMES[scheme] :][:2])
        advice = f"Give its name on the hub: {name}" if is_hub_name(name) else "Download it first."
        return CheckpointError(file, "is an address; models are read from this machine.", hint=advice)
    if file.is_symlink():
        message = f"{what_stands_at(file)}."
        rest = rest_command(file.absolute())
        return CheckpointError(file, message, hint=f"Download the rest: {rest}" if rest else hint)
    name, has_folder = file.as_posix(), is_folder(file.parent)
    hint = hint if has_folder else _without_folder(file)
    if not is_hub_name(name) and not has_folder:
        return CheckpointError(file, f"does not exist: there is not a folder {file.parent}.", hint=hint)
    if not is_hub_name(name):
        return CheckpointError(file, "does not exist.", hint=hint)
    message = f"does not exist, and {not_cached(name)}"
    return CheckpointError(file, message, hint=f"{hint} Or download it: {download_command(name)}")


def _without_folder(file: Path) -> str:
    """What may have been meant by a path whose folder is not there."""
    if file.parts[:1] == ("~",):
        home = Path.home().joinpath(*file.parts[1:])
        if is_existing(home):
            return f"Give {home}: the shell puts nothing in place of a ~ in quotes."
    near, folder = near_path(file), near_path(file.parent)
    if near is not None:
        return f"Did you mean {near}?"
    if folder is not None and is_folder(folder):
        return f"Did you mean the folder {folder}? {what_is_there(folder / file.name)}".strip()
    name = "/".join(file.parts[:2])
    if len(file.parts) > 2 and is_hub_name(name) and not is_folder(Path(file.parts[0])):
        return f"Check the path. If it is on the hub, give the name of the whole model: {name}"
    return "Check the path."


def _incomplete_hint(path: Path) -> str:
    rest = rest_command(path.absolute())
    return f"Download the rest: {rest}" if rest else "Download the folder again, all of it."


def what_is_there(missing: Path) -> str:
    """Suggest what a user may have meant by a file that does not exist; empty if nothing in its folder is close.

    Args:
        missing: The path.
    """
    try:
        siblings = [name for name in names_in(missing.parent) if name != missing.name]
    except CheckpointError:  # no folder, or one that may be entered but not listed
        return ""
    stems = {Path(name).stem: name for name in reversed(siblings)}
    near = [stems[stem] for stem in difflib.get_close_matches(missing.stem, stems, n=1, cutoff=0.6)]
    weights = sorted(name for name in siblings if name.endswith(WEIGHT_SUFFIXES))
    parts = [f"Did you mean {near[0]}?"] if near else []
    parts += [f"Checkpoints there: {first_few(weights, _MAX_NAMED)}."] if weights else []
    return " ".join(parts)


def _open_pickle(file: Path) -> Checkpoint:
    with reading(file), file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise CheckpointError(file, "is empty.", hint="Download it again or make it again.")
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
        """The file or index for a variant; by default the plain file, or else the most precise variant.

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
    by_variant: dict[str, str] = {}
    for stem in _USUAL_STEMS:
        for name in names:
            variant = _variant_of(name, stem)
            if variant is None:
                continue
            # A whole file before an index of shards, `model` before `diffusion_pytorch_model`.
            of_this_stem = variant in by_variant and by_variant[variant].startswith(stem)
            if variant not in by_variant or (of_this_stem and name.endswith(".safetensors")):
                by_variant[variant] = name
    return WeightFiles(folder, by_variant)


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
        _refuse_shards(folder, candidates)
        if len(candidates) == 1:
            return folder / candidates[0]
        if candidates:
            raise _several_files(folder, candidates)
    if any(name.endswith(".distcp") for name in names):
        hint = f"Join it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} joined.pt"
        raise CheckpointError(folder, "holds the shards of PyTorch's distributed checkpoint.", hint=hint)
    if _ZERO_SCRIPT in names:
        hint = f"Join it: python {folder / _ZERO_SCRIPT} {folder} joined"
        raise CheckpointError(folder, "holds the shards of a DeepSpeed (ZeRO) checkpoint.", hint=hint)
    raise CheckpointError(folder, "is a folder without weights.", hint=_subfolder_hint(folder))


def shard_of(name: str) -> tuple[int, int] | None:
    """The number of a shard and how many there are, by a file's name such as `model-00002-of-00005.safetensors`."""
    match = _SHARD_STEM.search(name.rpartition(".")[0])
    return None if match is None or int(match[2]) < 2 else (int(match[1]), int(match[2]))


def _refuse_shards(folder: Path, candidates: Sequence[str]) -> None:
    """Refuse shards of which no index says what they hold: of one that is left, nobody would know that others are missing."""
    shards = [shard for shard in map(shard_of, candidates) if shard is not None]
    if shards and len(shards) == len(candidates):
        there, total = len({number for number, _ in shards}), shards[0][1]
        raise CheckpointError(
            folder,
            f"has {there} of the {total} shards of its weights, and no index that names them.",
            hint=_incomplete_hint(folder),
        )


def _several_files(folder: Path, candidates: Sequence[str]) -> CheckpointError:
    message = f"has {len(candidates)} files of weights."
    return CheckpointError(folder, message, hint=f"Name one of them: {', '.join(candidates[:8])}.")


def _subfolder_hint(folder: Path) -> str:
    inside = [name for name in names_in(folder) if _has_safetensors(folder / name)]
    if inside:
        rest = rest_command(folder.absolute())
        missing = f" Or download the rest: {rest}" if rest else ""
        where = "folder" if len(inside) == 1 else "folders"
        return f"Give its {where} with weights instead: {' or '.join(inside[:8])}.{missing}"
    return "Name a .safetensors file, an index, or a .ckpt."


def _has_safetensors(child: Path) -> bool:
    try:
        return is_folder(child) and any(name.endswith(".safetensors") for name in names_in(child))
    except CheckpointError:
        return False  # naming a folder that may not be entered does not help


class ShardedCheckpoint(CompositeCheckpoint):
    """A `*.safetensors.index.json` and the files that it names, all checked when it is opened."""

    def __init__(self, path: Path) -> None:
        index = _read_index(path, _MAX_SHARD_INDEX_BYTES)
        weight_map = _checked_weight_map(index, path)
        with ExitStack() as opened:
            shards = {
                name: opened.enter_context(_open_shard(path, name))
                for name in dict.fromkeys(weight_map.values())
            }
            places, skipped = _shard_places(weight_map, shards, path)
            super().__init__(path, shards.values(), places, _merged_metadata(index, shards), skipped)
            opened.pop_all()

    @property
    def files(self) -> tuple[Path, ...]:
        """The index, then its shards."""
        return (self.path, *super().files)


def _shard_places(
    weight_map: Mapping[str, str], shards: Mapping[str, Checkpoint], path: Path
) -> tuple[dict[str, tuple[Checkpoint, str]], dict[str, str]]:
    """The shard of each key, and the keys left out with the reason."""
    places: dict[str, tuple[Checkpoint, str]] = {}
    skipped: dict[str, str] = {}
    for key, name in weight_map.items():
        shard = shards[name]
        if key in shard:
            places[key] = shard, key
        elif key in shard.skipped:
            skipped[key] = shard.skipped[key]
        else:
            message = f"lists {shortened(key)} in {name}, which does not have it."
            raise CheckpointError(path, message, hint=_incomplete_hint(path))
    for name, shard in shards.items():
        skipped |= {key: f"is in {name} but not in the index" for key in shard if key not in places}
    return places, skipped


def _read_index(path: Path, most_bytes: int) -> dict[str, Any]:
    with reading(path):
        size = path.stat().st_size
        if size > most_bytes:
            raise CheckpointError(
                path, f"is too large for an index ({size} bytes).", hint=_incomplete_hint(path)
            )
        content = path.read_bytes()
    try:
        index = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(path, f"is not valid JSON ({error}).", hint=_incomplete_hint(path)) from error
    if not isinstance(index, dict):
        raise CheckpointError(path, "is not a JSON object that lists weights.", hint=_incomplete_hint(path))
    return index


def _checked_weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map.", hint="Name the index of a sharded checkpoint.")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name):
            raise CheckpointError(
                path,
                f"puts {shortened(key)} in {shortened(name)}, which is not a file in this folder.",
                hint="An index may only name files in its own folder. Use this one only if you trust its source.",
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
        raise CheckpointError(index, message, hint=_incomplete_hint(index))
    return SafetensorsCheckpoint(shard)


def _merged_metadata(index: dict[str, Any], shards: Mapping[str, Checkpoint]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for shard in shards.values():
        merged.update(shard.metadata)
    own = index.get("metadata")
    if isinstance(own, dict):
        merged.update(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
        )
    return merged


class PipelineCheckpoint(CompositeCheckpoint):
    """The components of a diffusers folder as one checkpoint.

    Args:
        path: The folder.
        components: The opened components by name, in the order of their keys.
        skipped: Components without weights here, with the reason.
    """

    def __init__(
        self, path: Path, components: Mapping[str, Checkpoint], skipped: Mapping[str, str] | None = None
    ) -> None:
        places: dict[str, tuple[Checkpoint, str]] = {}
        metadata: dict[str, str] = {}
        reasons = dict(skipped or {})
        for name, component in components.items():
            places |= {f"{name}.{key}": (component, key) for key in component}
            metadata |= {f"{name}.{key}": text for key, text in component.metadata.items()}
            reasons |= {f"{name}.{key}": reason for key, reason in component.skipped.items()}
        super().__init__(path, components.values(), places, metadata, reasons)

    @property
    def files(self) -> tuple[Path, ...]:
        """The `model_index.json`, then every file of every component."""
        return (self.path / MODEL_INDEX, *super().files)


def _open_pipeline(folder: Path, variant: str | None) -> PipelineCheckpoint:
    """Open the components that a `model_index.json` names and that have weights here.

    Args:
        folder: The diffusers folder.
        variant: Such as `fp16`: read from the components that have it; the others give what they have.

    Raises:
        CheckpointError: The index or a component cannot be read, no component has weights, or none has the
            variant.
    """
    variants: set[str] = set()
    main_files = {name: _weights_of(folder / name, variant, variants) for name in _component_names(folder)}
    files = {name: file for name, file in main_files.items() if file is not None}
    if not files:
        raise CheckpointError(
            folder, "has a model_index.json and no weights in its folders.", hint=_incomplete_hint(folder)
        )
    if variant is not None and variant not in variants:
        raise no_such_variant(folder, variant, sorted(variants))
    skipped = {
        name: "has no weights in this folder"
        for name in main_files
        if name not in files and _may_have_weights(folder / name)
    }
    with ExitStack() as opened:
        components = {name: opened.enter_context(_open_file(file)) for name, file in files.items()}
        pipeline = PipelineCheckpoint(folder, components, skipped)
        opened.pop_all()
    return pipeline


def _component_names(folder: Path) -> list[str]:
    """The index's components: entries of a library and a class."""
    index = _read_index(folder / MODEL_INDEX, _MAX_MODEL_INDEX_BYTES)
    names = [
        name for name, value in index.items() if isinstance(value, list) and len(value) == 2 and all(value)
    ]
    for name in names:
        if not is_plain_name(name):
            raise CheckpointError(
                folder / MODEL_INDEX,
                f"names the component {name!r}, which is not a folder beside it.",
                hint="Do not use this one unless you know its maker.",
            )
    return names


def _may_have_weights(component: Path) -> bool:
    """Not a scheduler, tokenizer or image processor: their configs have names of their own, and models' is config.json."""
    return not is_folder(component) or "config.json" in names_in(component)


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
