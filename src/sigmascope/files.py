"""Files that appear whole or not at all.

A temporary file is written beside the target, flushed to the disk and renamed over it. Whatever goes
wrong before the rename (an error, Ctrl-C), the target stays as it was and the temporary file goes; that
of a process that was killed goes when the same target is written next. Its name says which process on
which machine is writing, so that the next writer can tell a leftover from a file that is being written
right now, on a shared folder too.

What the operating system refuses becomes a reason and a next step for the user: `reason_of`,
`reading_hint` and `writing_hint`.
"""

import errno
import hashlib
import logging
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from sigmascope.errors import WriteError

_log = logging.getLogger(__name__)
_PERMISSION_BITS = 0o777

# How much of the target's name a temporary file's name repeats.
_STEM_LENGTH = 24
_SUFFIX_LENGTH = 16

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean there is no room left, on the disk or in the quota."""
_NO_PERMISSION = (errno.EACCES, errno.EPERM)
_WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, it becomes `path`.

    The temporary file exists already, is hidden, and keeps the target's suffix, so that writers which
    choose a format by suffix work. A link is followed. The result has the permission bits of the file
    that it replaces, or those that the umask gives to a new one. Folders are not created.

    Args:
        path: The file to write.

    Yields:
        The path to write to. The writer may also replace the file there.

    Raises:
        WriteError: The target or its folder cannot be written, or the disk refused the data. An
            `OSError` of the block that is about another file passes through unchanged.
    """
    target = _checked_target(Path(path))
    remove_leftovers(target)
    temporary = target.with_name(temporary_name(target))
    try:
        mode = _create(temporary, target)
        yield temporary
        _flush_to_disk(temporary, mode)
        temporary.replace(target)
    except OSError as error:
        if not _is_about(error, temporary, target):
            raise
        message = f"cannot be written ({reason_of(error)})."
        raise WriteError(Path(path), message, hint=writing_hint(error)) from error
    finally:
        with suppress(OSError):  # after the rename nothing is there; otherwise nothing more can be done
            temporary.unlink(missing_ok=True)
    _flush_folder(target.parent)


def _checked_target(path: Path) -> Path:
    """The file behind `path`, refused here rather than after minutes of work that could not be kept."""
    try:
        target = path.resolve()
        mode = _mode(target)
        folder_mode = _mode(target.parent) if mode is None else None
    except (OSError, ValueError) as error:
        raise WriteError(
            path, f"cannot be reached ({reason_of(error)}).", hint=writing_hint(error)
        ) from error
    except RuntimeError as error:  # links that form a ring, before Python 3.13
        raise WriteError(path, f"cannot be reached ({error}).", hint="Check the path.") from error
    if mode is None:
        if folder_mode is None:
            raise WriteError(path, "its folder does not exist.", hint=f"Create {target.parent}.")
        return target
    if stat.S_ISDIR(mode):
        raise WriteError(path, "is a folder.", hint="Name a file inside it.")
    if not stat.S_ISREG(mode):
        raise WriteError(path, "is not a regular file.", hint="Name a regular file.")
    if not os.access(target, os.W_OK):
        raise WriteError(path, "is write-protected.", hint="Choose another name or change its permissions.")
    return target


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _create(temporary: Path, target: Path) -> int:
    """Create the temporary file and give the permission bits that the result must have."""
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode) & _PERMISSION_BITS
    finally:
        os.close(descriptor)
    if target.exists():
        mode = stat.S_IMODE(target.stat().st_mode) & _PERMISSION_BITS
        temporary.chmod(mode)
    return mode


def _flush_to_disk(temporary: Path, mode: int) -> None:
    descriptor = os.open(temporary, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.chmod(mode)  # a writer that replaced the file chose bits of its own


def _is_about(error: OSError, *paths: Path) -> bool:
    """Whether a system call on one of `paths` failed; a failed `write` names no file at all."""
    if error.errno is None:
        return False
    return error.filename is None or Path(os.fsdecode(error.filename)) in paths


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable. The data is in place by now, so a refusal is not an error."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.debug("The folder %s cannot be flushed: %s", folder, error)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a target that `atomic_path` would refuse, before the work whose result goes there.

    Args:
        path: The file that is to be written.

    Raises:
        WriteError: It is a folder, no regular file or write-protected, or its folder does not exist.
    """
    _checked_target(Path(path))


def temporary_name(target: Path) -> str:
    """A new hidden name for a file that will become `target`; it keeps the target's suffix."""
    token = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return f"{_prefix(target)}{token}.tmp{_suffix(target)}"


def _host() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=3).hexdigest()


def _prefix(target: Path) -> str:
    return f".{target.stem[:_STEM_LENGTH]}."


def _suffix(target: Path) -> str:
    return target.suffix[:_SUFFIX_LENGTH]


def remove_leftovers(target: Path) -> list[Path]:
    """Remove temporary files for `target` that processes of this machine left when they were killed.

    Args:
        target: The file about to be written.

    Returns:
        The files removed. One that cannot be removed stays, which is logged.
    """
    removed = []
    for file in _leftovers(target):
        try:
            file.unlink()
        except OSError as error:
            _log.debug("The leftover %s cannot be removed: %s", file, error)
        else:
            _log.info("Removed %s, left by a process that was killed.", file)
            removed.append(file)
    return removed


def _leftovers(target: Path) -> list[Path]:
    pattern = re.compile(
        f"{re.escape(_prefix(target))}{_host()}-([0-9]+)-[0-9a-f]{{8}}\\.tmp{re.escape(_suffix(target))}"
    )
    try:
        names = [file.name for file in target.parent.iterdir()]
    except OSError as error:  # a folder that one may write to but not list
        _log.debug("%s cannot be searched for leftovers: %s", target.parent, error)
        return []
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return [target.with_name(match[0]) for match in matches if not psutil.pid_exists(int(match[1]))]


def reason_of(error: OSError | ValueError) -> str:
    """Why the system refused, in its own words. A ValueError is a path with a NUL or without an encoding."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def reading_hint(error: OSError | ValueError) -> str:
    """What to do about a path that cannot be looked at or read."""
    number = error.errno if isinstance(error, OSError) else errno.ENOENT
    if number in _NO_PERMISSION:
        return "Check the permissions of it and of the folders above it."
    if number == errno.ENAMETOOLONG:
        return "Check the path: no file can have a name that long."
    return "Check the path." if number in _WRONG_PATH else "Check the disk, and try again."


def writing_hint(error: OSError | ValueError) -> str:
    """What to do about a target that cannot be written."""
    number = error.errno if isinstance(error, OSError) else errno.ENOENT
    if number in DISK_FULL:
        return "Free some space or choose another disk."
    if number == errno.ENAMETOOLONG:
        return "Choose a shorter name."
    return "Check the path." if number in _WRONG_PATH else "Choose a folder that you can write to."
