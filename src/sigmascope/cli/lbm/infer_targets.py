"""What `sigmascope lbm infer` may write: never a file that it reads, and nothing found out too late."""

import os
from collections.abc import Mapping
from pathlib import Path

from sigmascope.errors import ConfigError, WriteError
from sigmascope.records.os_errors import reason_of, writing_hint


def check_targets(inputs: Mapping[str, list[Path]], targets: Mapping[str, Path]) -> None:
    """Refuse targets that are inputs or each other, and those that cannot be written.

    Args:
        inputs: The files that are read, by what the user called them.
        targets: The files to write, by flag.

    Raises:
        ConfigError: Names both flags.
        WriteError: The target is no regular file, or it or its folder is write-protected or not there.
    """
    taken = {name: list(paths) for name, paths in inputs.items()}
    for flag, target in targets.items():
        for name, paths in taken.items():
            if any(_same_file(target, path) for path in paths):
                raise ConfigError(f"{flag}: {target} is {name} too.", hint="Write to another file.")
        _check_writable(target)
        taken[flag] = [target]


def model_files(checkpoint: Path) -> list[Path]:
    """Every file that may be read for a checkpoint: itself, or the weights in its folder."""
    from sigmascope.checkpoints.weight_files import INDEX_SUFFIX, PICKLE_SUFFIXES

    weights = (INDEX_SUFFIX, ".safetensors", *PICKLE_SUFFIXES)
    try:
        if checkpoint.is_dir():
            folder = checkpoint
        elif checkpoint.name.endswith(".json"):  # an index names files beside it
            folder = checkpoint.parent
        else:
            return [checkpoint]
        return [checkpoint, *(path for path in folder.iterdir() if path.name.endswith(weights))]
    except (OSError, ValueError):  # opening it says so, and better
        return [checkpoint]


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.resolve() == second.resolve() or first.samefile(second)
    except (OSError, ValueError, RuntimeError):  # one of them is not there, or cannot be reached
        return False


def _check_writable(target: Path) -> None:
    try:
        file = target.resolve()
        if not file.parent.is_dir():
            raise WriteError(target, f"there is no folder {file.parent}.", hint="Create it first.")
        exists, is_file = file.exists(), file.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error) if isinstance(error, RuntimeError) else reason_of(error)
        hint = "Check the path." if isinstance(error, RuntimeError) else writing_hint(error)
        raise WriteError(target, f"cannot be reached ({reason}).", hint=hint) from error
    if exists and not is_file:
        raise WriteError(target, "is not a regular file.", hint="Name a file.")
    if exists and not os.access(file, os.W_OK):
        raise WriteError(target, "is write-protected.", hint="Choose another name or change its permissions.")
    if not os.access(file.parent, os.W_OK):
        raise WriteError(target, "its folder is write-protected.", hint="Choose another folder.")
