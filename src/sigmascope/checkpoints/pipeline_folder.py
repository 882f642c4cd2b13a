"""A diffusers folder: a `model_index.json` and a folder for each component, opened as one checkpoint.

Keys are `<component>.<key>`, such as `unet.conv_in.weight` and `text_encoder.text_model.….weight`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.paths import is_folder, names_in, reading
from sigmascope.checkpoints.sharded import is_plain_name
from sigmascope.checkpoints.weight_files import PICKLE_SUFFIXES, only_file, weight_files
from sigmascope.errors import CheckpointError

MODEL_INDEX: Final = "model_index.json"
_MAX_MODEL_INDEX_BYTES = 10_000_000
_AGAIN = "Download the folder again, all of it."

OpenFile = Callable[[Path], Checkpoint]


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
        raise CheckpointError(folder, "has a model_index.json and no weights in its folders.", hint=_AGAIN)
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


def no_such_variant(folder: Path, variant: str, variants: list[str]) -> CheckpointError:
    """The error for a variant that a folder does not have."""
    have = f"It has {', '.join(variants)}." if variants else "Its files have no variant in their names."
    return CheckpointError(folder, f"has no weights in the variant {variant}.", hint=have)


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
        index = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON ({error}).", hint=_AGAIN) from error
    if not isinstance(index, dict):
        raise CheckpointError(path, "is not a JSON object that names components.", hint=_AGAIN)
    return index
