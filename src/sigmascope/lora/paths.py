"""Paths as users give them: names too long, folders that cannot be entered, bytes that are no text."""

import os
from collections.abc import Sequence
from pathlib import Path

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.records.atomic import require_writable


def exists(path: Path) -> bool:
    """Whether there is something at `path`.

    Raises:
        CheckpointError: The system will not say: no permission, a name too long, links in a ring.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(path, f"cannot be reached ({reason}).", hint="Check the path.") from error
    return True


def as_text(name: str | os.PathLike[str]) -> str:
    """A file name for texts in UTF-8: bytes of it that are no UTF-8 become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")


def check_target(save_to: Path, flag: str = "--save_to") -> None:
    """Refuse a target that is a folder, is not named as safetensors, or cannot be reached.

    Raises:
        ConfigError: With the flag and the file.
        WriteError: The folder does not exist or cannot be entered, or what is there is no file that can be replaced.
    """
    try:
        exists(save_to)
        is_folder, has_parent = save_to.is_dir(), save_to.parent.is_dir()
    except (CheckpointError, OSError) as error:
        raise WriteError(
            save_to, "cannot be reached.", hint="Choose a folder that you may enter and a shorter name."
        ) from error
    if is_folder:
        raise ConfigError(
            f"{flag} {save_to} is a folder.", hint=f"Name a file in it: {save_to / 'lora.safetensors'}."
        )
    if save_to.suffix != ".safetensors":
        raise ConfigError(
            f"{flag} {save_to}: a LoRA is written as safetensors.",
            hint=f"Name it {save_to.stem}.safetensors.",
        )
    if not has_parent:
        raise WriteError(save_to, "its folder does not exist.", hint=f"Create {save_to.parent}.")
    require_writable(save_to)


def refuse_inputs(target: Path, *models: Checkpoint, flag: str = "--save_to") -> None:
    """Refuse a target that is one of the files that an open model is read from.

    Raises:
        ConfigError: With the flag and the model.
    """
    for model in models:
        if any(exists(target) and exists(file) and target.samefile(file) for file in model.files):
            raise ConfigError(
                f"{flag} {target} is part of the input {model.path}.", hint="Choose another name."
            )


def refuse_files(target: Path, files: Sequence[Path], flag: str = "--save_to") -> None:
    """Refuse a target that is one of the files that are read.

    Raises:
        ConfigError: With the flag and the file.
    """
    for file in files:
        if exists(target) and exists(file) and target.samefile(file):
            raise ConfigError(f"{flag} {target} is the input {file}.", hint="Choose another name.")
