"""The side-car of an extracted LoRA: `<name>_config.yaml` beside `<name>.safetensors` says how it was made.

It names both checkpoints relative to its own folder, so that LoRA and models can be moved together. Where that would
name a user's folder they are named from `~`, and a model from the hub's cache by its name there.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from sigmascope.checkpoints.checkpoint import is_existing, is_folder, is_regular_file, what_stands_at
from sigmascope.checkpoints.hub import hub_name, is_hub_name, local_model
from sigmascope.checkpoints.reader import no_such_file, only_file
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.files import reason_of, require_writable, short_path
from sigmascope.lora.file import as_text

ModelKey = Literal["base_model", "tuned_model"]

_MOST_BYTES: Final = 1 << 16
_NOTHING: Final = ("", "null", "~")


def sidecar_path(lora: Path) -> Path:
    """`<name>_config.yaml` beside `<name>.safetensors`."""
    return lora.with_name(f"{lora.stem}_config.yaml")


def find_sidecar(lora: Path) -> Path:
    """The side-car beside a LoRA, or, where a link has none beside it, beside the file that it leads to."""
    beside = sidecar_path(lora)
    target = sidecar_path(Path(os.path.realpath(lora)))
    return target if is_existing(target) and not os.path.lexists(beside) else beside


def lora_file(lora: Path) -> Path:
    """A LoRA's file: as given, or of a name on the hub the only file of weights in its snapshot.

    Raises:
        CheckpointError: The cache has no such model, or it has no weights or several files of them.
    """
    found = local_model(lora)
    return only_file(found) if found != lora and is_folder(found) else found


def sidecar_text(sidecar: Path, base: Path, tuned: Path, facts: Mapping[str, Any]) -> str:
    """The text of a side-car.

    Args:
        sidecar: Where it goes.
        base: The model that the LoRA is for.
        tuned: The model that it was made from.
        facts: The other keys, in their order.
    """
    models = {"base_model": _named(base, sidecar.parent), "tuned_model": _named(tuned, sidecar.parent)}
    return str(yaml.safe_dump(models | dict(facts), sort_keys=False, allow_unicode=True))


def _named(model: Path, folder: Path) -> str:
    """How a side-car in that folder names a model, without the name of a user."""
    # The model's own name stays: in the hub's cache it is a link to a file named by its hash.
    path = Path(os.path.abspath(model))  # noqa: PTH100 - `resolve` follows that link
    place = Path(os.path.realpath(path.parent), path.name)
    if name := hub_name(place):
        return name
    home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111 - raises nothing without a home
    start = os.path.realpath(folder)
    try:
        relative = os.path.relpath(place, start)
    except ValueError:  # another drive of Windows
        return as_text(short_path(place))
    below = [part for part in Path(relative).parts if part != os.pardir]
    if home.name not in below[:-1] and not (len(below) > 2 and below[0] in ("home", "Users")):
        return as_text(Path(relative).as_posix())
    if place.is_relative_to(home):
        return as_text(f"~/{place.relative_to(home).as_posix()}")
    return as_text(short_path(place))


def models_of(lora: Path, base: Path | None = None, tuned: Path | None = None) -> tuple[Path, Path]:
    """The two models that a LoRA was made from: as given, else as its side-car names them.

    Only names are read: no code in the file runs, and nothing is fetched.

    Args:
        lora: The LoRA.
        base: The base model, if it is known.
        tuned: The tuned model, if it is known.

    Raises:
        ConfigError: There is no side-car, it cannot be read or does not name the model, or what it names is gone:
            names the key, the path and the flag to give.
        CheckpointError: There is no such LoRA.
    """
    if base is not None and tuned is not None:
        return base, tuned
    if not is_existing(lora):
        raise no_such_file(lora)
    sidecar = find_sidecar(lora)
    given: dict[ModelKey, Path | None] = {"base_model": base, "tuned_model": tuned}
    named = _read(sidecar, " and ".join(_flag(key) for key, path in given.items() if path is None))
    first, second = (path or _model(sidecar, key, named) for key, path in given.items())
    return first, second


def _flag(key: ModelKey) -> str:
    return f"--{key}_path"


def _read(sidecar: Path, flags: str) -> Mapping[str, Any]:
    if not is_regular_file(sidecar):
        what = what_stands_at(sidecar)
        raise ConfigError(
            f"{sidecar} {what}: a file of that name would say which models the LoRA was made from.",
            hint=f"Give {flags}.",
        )
    try:
        with sidecar.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{sidecar} cannot be read ({reason_of(error)}).", hint=f"Give {flags}.") from error
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError("it is too large")
        # The base loader makes texts of all values: none is read as a number, a date or an object.
        named = yaml.load(content.decode("utf-8"), Loader=yaml.BaseLoader)
        if not isinstance(named, Mapping):
            raise ValueError("it holds no keys and values")
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{sidecar} is not the side-car of a LoRA ({error}).", hint=f"Give {flags}."
        ) from error
    return named


def _model(sidecar: Path, key: ModelKey, named: Mapping[str, Any]) -> Path:
    text = named.get(key)
    if not isinstance(text, str) or text.strip() in _NOTHING:
        raise ConfigError(
            f"{sidecar} does not name the model: {key} is missing or not a text.", hint=f"Give {_flag(key)}."
        )
    if "://" in text or text.startswith(("//", "\\\\")):
        raise ConfigError(
            f"{sidecar}: {key} is {text}, and a side-car may not reach over the network.",
            hint=f"Give {_flag(key)}, if you trust it.",
        )
    try:
        start = Path(os.path.realpath(sidecar.parent))
        path = Path(os.path.normpath(start / os.path.expanduser(text)))  # noqa: PTH111 - raises nothing without a home
        if is_existing(path):
            return path
        if is_hub_name(text):
            return local_model(text)
    except (CheckpointError, ValueError) as error:
        raise ConfigError(f"{sidecar}: {key} is {text}: {error}", hint=f"Give {_flag(key)}.") from error
    raise ConfigError(
        f"{sidecar}: {key} is {text}, and there is no {path}.", hint=f"Give {_flag(key)} with its place."
    )


def refuse_other_yaml(sidecar: Path) -> None:
    """Refuse to replace a file of the side-car's name that describes no extraction.

    Raises:
        ConfigError: Some file is there without the key `extraction_method`, or it cannot be read.
        WriteError: What is there is a folder, no regular file or write-protected.
    """
    require_writable(sidecar)
    if not sidecar.is_file():
        return
    try:
        with sidecar.open(encoding="utf-8") as stream:
            is_ours = any(line.startswith("extraction_method:") for line in stream.readlines(_MOST_BYTES))
    except (OSError, ValueError):
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"The LoRA's description would be written to {sidecar}, but that file is something else.",
            hint="Choose another name for --save_to, or move that file.",
        )
