"""Paths as users give them: names too long, folders that cannot be entered, bytes that are no text."""

import os
from pathlib import Path

from sigmascope.errors import CheckpointError


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
