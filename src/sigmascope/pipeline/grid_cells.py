"""The cells of a grid of LoRAs: what paints them, what tells one from another, and where they are kept.

`GridSubject` says what can be painted: anything that makes a picture for each of its rows. `PipelineRows` is a diffusers
pipeline with prompts. `CellStore` keeps each picture as soon as it is there, under the hash of all that it depends on.
"""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path
from sigmascope.lora.apply import attached_to
from sigmascope.pipeline.bench import call_arguments, check_call
from sigmascope.probes.model_fingerprints import (
    NO_WEIGHTS,
    adapter_fingerprint,
    combined_fingerprint,
    model_fingerprint,
)
from sigmascope.probes.models import components_of, modules_in
from sigmascope.probes.peft import adapters_of, number_for, standing_of
from sigmascope.records.performance import BenchCase

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMAT: Final = 1  # of what the hash is made of
_NOTE: Final = "sigmascope"  # the text chunk of a cell's PNG
_LIBRARIES: Final = ("torch", "diffusers", "transformers", "peft")


@runtime_checkable
class GridSubject(Protocol):
    """A model that paints a picture for each row of a grid."""

    @property
    def name(self) -> str:
        """What it is called in the heading."""
        ...

    @property
    def model(self) -> object:
        """What LoRAs are attached to: a module, or a pipeline with components."""
        ...

    @property
    def rows(self) -> Sequence[str]:
        """What each row is called: its prompt, or the name of its picture."""
        ...

    @property
    def kind(self) -> str:
        """What a row is: "prompt" or "picture"."""
        ...

    def settings(self, row: int) -> Mapping[str, object]:
        """All that a row's picture depends on besides the LoRA, its scale and the seed, as JSON values."""
        ...

    def summary(self) -> str:
        """The settings that a reader wants to see, in a few words."""
        ...

    def paint(self, row: int, seed: int) -> "Image":
        """The row's picture, in RGB."""
        ...


@dataclass(frozen=True, eq=False)
class PipelineRows:
    """A diffusers pipeline that paints a picture for each prompt.

    Attributes:
        pipeline: Loaded, on its device.
        rows: The prompts.
        case: Size and steps; None in it is the pipeline's own.
        arguments: Of the call besides these.
        name: What it is called in the heading.

    Raises:
        ConfigError: No prompt, an empty one, or what the pipeline's call does not take.
    """

    pipeline: Any
    rows: tuple[str, ...]
    case: BenchCase = field(default_factory=BenchCase)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    kind: str = "prompt"

    def __post_init__(self) -> None:
        if not self.rows or not all(prompt.strip() for prompt in self.rows):
            what = "is empty" if self.rows else "is missing"
            raise ConfigError(f"--prompt {what}.", hint='Give at least one, such as --prompt "a red fox".')
        check_call(self.pipeline, self.case, self.arguments)

    @property
    def model(self) -> object:
        """The pipeline."""
        return self.pipeline

    def settings(self, row: int) -> dict[str, object]:
        """The pipeline's class, weights and scheduler, and the arguments of the call."""
        scheduler = getattr(self.pipeline, "scheduler", None)
        return {
            "pipeline": type(self.pipeline).__name__,
            "weights": told_apart_models(self.pipeline),
            "runs_on": getattr(getattr(self.pipeline, "_execution_device", None), "type", None),
            "scheduler": [type(scheduler).__name__, told_apart(dict(getattr(scheduler, "config", {})))],
            "case": self.case.as_dict(),
            "arguments": told_apart(dict(self.arguments)),
            "prompt": self.rows[row],
        }

    def summary(self) -> str:
        """Steps, size, and plain arguments."""
        size = None if self.case.width is None else f"{self.case.width}×{self.case.height}"
        steps = None if self.case.steps is None else f"{self.case.steps} steps"
        plain = [f"{k} {v}" for k, v in self.arguments.items() if isinstance(v, int | float)]
        return ", ".join(part for part in (size, steps, *plain) if part)

    def paint(self, row: int, seed: int) -> "Image":
        """Call the pipeline once; of a video the frame in the middle."""
        arguments = call_arguments(self.pipeline, self.case, self.rows[row], seed, self.arguments)
        return picture_of(self.pipeline(**arguments))


def picture_of(output: Any) -> "Image":
    """The first picture of a pipeline's output as RGB; of a video the frame in the middle. NaN is black.

    Raises:
        ConfigError: It holds none, such as latents.
    """
    from PIL import Image

    sample = output[0] if hasattr(output, "__getitem__") else output
    sample = sample[0] if isinstance(sample, Sequence | np.ndarray | Tensor) and len(sample) else sample
    if isinstance(sample, Sequence) and len(sample):
        sample = sample[len(sample) // 2]
    if isinstance(sample, Image.Image):
        return sample.convert("RGB")
    values = sample.detach().float().cpu().numpy() if isinstance(sample, Tensor) else sample
    if isinstance(values, np.ndarray):
        if values.ndim == 4:  # frames first
            values = values[len(values) // 2]
        if values.ndim == 3 and isinstance(sample, Tensor):
            values = np.moveaxis(values, 0, -1)
        if values.ndim == 3 and values.shape[-1] in (1, 3):
            if values.dtype != np.uint8:
                values = np.nan_to_num(values, nan=0.0).clip(0.0, 1.0) * 255 + 0.5
            return Image.fromarray(np.broadcast_to(values, (*values.shape[:2], 3)).astype(np.uint8))
    raise ConfigError(
        f"The pipeline gave no picture but {type(sample).__name__}.", hint="Leave --call output_type out."
    )


def told_apart_models(target: object) -> dict[str, object]:
    """The weights of a pipeline's models, or of a model alone: fingerprint, dtype, device, adapters, libraries.

    Where weights cannot be read, as under sequential offloading, a random word takes their place: nothing that was
    painted with them is taken for the same.
    """
    found: dict[str, object] = {name: _version(name) for name in _LIBRARIES}
    for name, part in (components_of(target) or {"model": target}).items():
        if not isinstance(part, nn.Module):
            continue
        reading = model_fingerprint(part)
        weight = next(part.parameters(), None)
        found[name] = [
            secrets.token_hex(8) if reading.value is None and reading.reason != NO_WEIGHTS else reading.value,
            None if weight is None else [str(weight.dtype), weight.device.type],
            list(_adapters(part)),
        ]
    return found


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _adapters(model: nn.Module) -> list[object]:
    """What PEFT and `attach_lora` run on a model, with strengths."""
    names = sorted(map(str, getattr(model, "peft_config", None) or ()))
    found: list[object] = [[name, adapter_fingerprint(model, name).value] for name in names]
    if names:
        layers = [layer for layer in modules_in(model) if adapters_of(layer)]
        standing = [
            [repr(standing_of(layer)), [number_for(layer, "scaling", name) for name in names]]
            for layer in layers
        ]
        found.append(xxhash.xxh3_64_hexdigest(repr(standing).encode()))
    for lora in attached_to(model):
        tensors = {
            f"{name}.{part}": tensor
            for name, (up, down, _) in lora.factors.items()
            for part, tensor in (("up", up), ("down", down))
        }
        found.append([combined_fingerprint(tensors), lora.scale])
    return found


def told_apart(value: object) -> object:
    """A value as JSON that is equal for equal values alone; pictures, arrays and tensors as the hash of their content.

    Raises:
        ConfigError: It is of a type that has no content to compare.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(name): told_apart(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [told_apart(held) for held in value]
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), combined_fingerprint({"": value})]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), xxhash.xxh3_128_hexdigest(value.tobytes())]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # of Pillow
        return [value.mode, list(getattr(value, "size", ())), xxhash.xxh3_128_hexdigest(value.tobytes())]
    raise ConfigError(
        f"A {type(value).__name__} in the call's arguments cannot be told from another one.",
        hint="Give numbers, text, pictures, arrays or tensors.",
    )


def key_of(settings: Mapping[str, object], seed: int, content: str | None, scale: float | None) -> str:
    """32 hexadecimal digits for a cell: equal where everything that its picture depends on is equal.

    Args:
        settings: Of the subject, for the row.
        seed: Of the noise.
        content: The LoRA's; None: the cell has no LoRA.
        scale: The LoRA's strength.
    """
    whole = {"format": _FORMAT, "settings": settings, "seed": seed, "lora": content, "scale": scale}
    return xxhash.xxh3_128_hexdigest(json.dumps(whole, sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class StoredCell:
    """A picture that is kept.

    Attributes:
        path: A PNG.
        seconds: What painting it took.
        layers_run: How many of the LoRA's modules ran while it was painted; None: it has no LoRA.
    """

    path: Path
    seconds: float
    layers_run: int | None


class CellStore:
    """A folder of PNG files, each named by its key, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> StoredCell | None:
        """The cell of that key; None where there is none, or its file is damaged or of another key."""
        from PIL import Image

        path = self.folder / f"{key}.png"
        try:
            with Image.open(path, formats=("PNG",)) as image:
                image.load()
                note = json.loads(str(image.info.get(_NOTE)))
            cell = StoredCell(path, float(note["seconds"]), note["layers_run"])
        except (OSError, ValueError, TypeError, KeyError, SyntaxError, Image.DecompressionBombError):
            return None
        return cell if note["key"] == key else None

    def keep(self, key: str, image: "Image", seconds: float, layers_run: int | None) -> StoredCell:
        """Write a picture.

        Raises:
            WriteError: It cannot be written.
        """
        from PIL.PngImagePlugin import PngInfo

        note = PngInfo()
        note.add_text(_NOTE, json.dumps({"key": key, "seconds": seconds, "layers_run": layers_run}))
        path = self.folder / f"{key}.png"
        with atomic_path(path) as temporary:
            image.save(temporary, format="PNG", pnginfo=note)
        return StoredCell(path, seconds, layers_run)
