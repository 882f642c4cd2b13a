"""Look at paths such that whatever the system refuses is a CheckpointError that names the path.

`Path.exists` and its like raise a bare OSError where a folder may not be entered or a name is too long.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sigmascope.errors import CheckpointError
from sigmascope.records.os_errors import reading_hint, reason_of


def is_existing(path: str | os.PathLike[str]) -> bool:
    """Whether something is at `path`, links followed.

    Raises:
        CheckpointError: The system does not say: a folder on the way may not be entered, the name is too
            long, links form a ring.
    """
    return _mode(Path(path)) is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is at `path`, links followed.

    Raises:
        CheckpointError: As of `is_existing`.
    """
    mode = _mode(Path(path))
    return mode is not None and stat.S_ISDIR(mode)


def is_regular_file(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file is at `path`, links followed.

    Raises:
        CheckpointError: As of `is_existing`.
    """
    mode = _mode(Path(path))
    return mode is not None and stat.S_ISREG(mode)


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Names of all that lies in a folder, sorted.

    Raises:
        CheckpointError: It cannot be listed.
    """
    with reading(Path(folder)):
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that names `path`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """The error for a path that the system refuses to open or to read."""
    return CheckpointError(path, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error))


def shortened(text: object, limit: int = 120) -> str:
    """`text` for a message: quoted, and cut when a damaged file makes it endless."""
    quoted = repr(text)
    return quoted if len(quoted) <= limit else f"{quoted[:limit]}…"


def _mode(path: Path) -> int | None:
    """Type and permission bits; None when nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
