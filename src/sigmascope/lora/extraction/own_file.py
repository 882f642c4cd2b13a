"""A file beside the target that one process alone works in, in folders that others may write to as well."""

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from sigmascope.errors import ConfigError

_log = logging.getLogger(__name__)

_LOCKED_BY_ANOTHER: Final = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def open_own(path: Path) -> BinaryIO:
    """Open a file of this user for this process alone, or begin it, empty.

    Where others may write to the folder too, anyone can put something in its place: a link would have another file
    overwritten, and what a file of theirs says would be believed. Such a thing is removed.

    Args:
        path: The file.

    Returns:
        It, unbuffered, for reading and writing. The lock goes when it is closed: remove it before.

    Raises:
        ConfigError: Another process has it open.
        OSError: It cannot be opened, or what is in its place cannot be removed.
    """
    while True:
        with suppress(FileExistsError):
            return _locked(path, os.O_CREAT | os.O_EXCL)
        with suppress(FileNotFoundError):  # another run has ended and removed it
            if not path.is_symlink():
                file = _locked(path)
                in_place = _is_at(file, path)
                if in_place and _is_own(file):
                    return file
                file.close()
                if not in_place:
                    continue
            _log.warning("%s is no file of this user, and is removed.", path)
            path.unlink()


def _locked(path: Path, flags: int = 0) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | flags, 0o600)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        _lock(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one of that name: a run that ends removes it before its lock is gone."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _is_own(file: BinaryIO) -> bool:
    facts = os.fstat(file.fileno())
    is_mine = not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()
    return is_mine and stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep a second process off the same journal, where the system and the disk have such locks."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _LOCKED_BY_ANOTHER:
            _log.debug("%s cannot be locked: %s", path, error)
            return
        raise ConfigError(
            f"{path.name} is in use: another run is writing the same target in {path.parent}.",
            hint="Wait for it, or choose another name for --save_to.",
        ) from error
