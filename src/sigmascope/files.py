"""Write files completely or not at all (`atomic_path`), and other help with paths and untrusted text.

`atomic_path` writes a temporary file beside the target, flushes it to the disk and renames it over the target. If
anything fails before that (an error, Ctrl-C), the target stays unchanged and the temporary file is removed. The leftover
of a killed process is removed when the same target is written again. Its name says which process on which machine wrote
it, and a writer holds a lock on its file, because containers that share a folder do not see each other's processes.

`reason_of`, `reading_hint` and `writing_hint` turn a refusal by the operating system into a reason and a next step.
`short_path`, `short_paths` and `without_home` name files without revealing the user or machine. `parse_json` reads
untrusted JSON:
`json.loads` would need 70 bytes for each `[],` of a text.
"""

import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn

import psutil

try:
    import fcntl
except ImportError:  # Windows
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

from sigmascope.errors import WriteError

_log = logging.getLogger(__name__)
_PERMISSION_BITS = 0o777
_OWNERS_ONLY, _BY_UMASK = 0o600, 0o666
_DAY_SECONDS = 24 * 3600.0
# A temporary file's name repeats this much of the target's name.
_STEM_LENGTH = 24
_SUFFIX_LENGTH = 16

SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))
"""What the name of a folder may end with: on Windows there are two."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean there is no room left, on the disk or in the quota."""
MOST_JSON_VALUES = 2_000_000
"""The limit for one text; a safetensors header has 8 values a tensor, a run 5 a step."""
_NO_PERMISSION = (errno.EACCES, errno.EPERM)
_WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; if the block succeeds, it is renamed to `path`.

    The temporary file already exists, is hidden and locked, and keeps the target's suffix for writers that choose a
    format by suffix. Links are followed. The result gets the permission bits of the file that it replaces, or those
    that the umask gives a new file. Missing folders are created.

    Args:
        path: The file to write.
        private: Whether only the owner may read the result (mode 0600), even if others could read the replaced file.

    Yields:
        The path to write to. The writer may also replace the file there.

    Raises:
        WriteError: The target or its folder cannot be written, or the disk refused the data. The block's `OSError`
            about another file passes through unchanged.
    """
    target = _checked_target(Path(path))
    remove_leftovers(target)
    temporary = target.with_name(temporary_name(target))
    lock = ExitStack()
    try:
        mode = _create(temporary, target, lock, private=private)
        yield temporary
        _flush_to_disk(temporary, mode)
        temporary.replace(target)
    except OSError as error:
        if not _is_about(error, temporary, target):
            raise
        message = f"cannot be written ({reason_of(error)})."
        raise WriteError(Path(path), message, hint=writing_hint(error)) from error
    finally:
        with lock, suppress(OSError):  # after the rename nothing is there; otherwise nothing more can be done
            temporary.unlink(missing_ok=True)
    flush_folder(target.parent)


def _checked_target(path: Path) -> Path:
    """The file behind `path`, checked before minutes of work for it. Its folder is created."""
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
            _make_folder(target)
        return target
    if stat.S_ISDIR(mode):
        raise WriteError(path, "is a folder.", hint="Name a file inside it.")
    if not stat.S_ISREG(mode):
        raise WriteError(path, "is not a regular file.", hint="Name a regular file.")
    if not os.access(target, os.W_OK):
        raise WriteError(path, "is write-protected.", hint="Choose another name or change its permissions.")
    return target


def _make_folder(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"its folder {target.parent} cannot be created ({reason_of(error)})."
        raise WriteError(target, message, hint=writing_hint(error)) from error


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _create(temporary: Path, target: Path, lock: ExitStack, *, private: bool) -> int:
    """Create the temporary file, locked until `lock` is closed, and give the permission bits of the result."""
    asked = _OWNERS_ONLY if private else _BY_UMASK
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, asked)
    lock.callback(os.close, descriptor)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode) & _PERMISSION_BITS
    if not _HAS_LOCKS:
        lock.close()  # Windows renames no file that is open
    else:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if target.exists():
        # A file system without modes refuses to change them.
        mode = stat.S_IMODE(target.stat().st_mode) & (mode if private else _PERMISSION_BITS)
        temporary.chmod(mode)
    return mode


def _flush_to_disk(temporary: Path, mode: int) -> None:
    descriptor = os.open(temporary, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.chmod(mode)  # a writer may have replaced the file, with bits of its own


def _is_about(error: OSError, *paths: Path) -> bool:
    """Whether a system call on one of `paths` failed; a failed `write` names no file."""
    if error.errno is None:
        return False
    return error.filename is None or Path(os.fsdecode(error.filename)) in paths


def flush_folder(folder: Path) -> None:
    """Make the rename itself durable. If the system refuses, that is only logged: the data is already in place."""
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
    """Refuse a target that `atomic_path` would refuse, before the work for it begins; create its folder.

    Args:
        path: The file to write later.

    Raises:
        WriteError: It is a folder, not a regular file or write-protected, or its folder cannot be created.
    """
    _checked_target(Path(path))


def temporary_name(target: Path) -> str:
    """A new hidden name for the temporary file of `target`, with the target's suffix."""
    token = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return f"{_prefix(target)}{token}.tmp{_suffix(target)}"


def _host() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=3).hexdigest()


def _prefix(target: Path) -> str:
    return f".{target.stem[:_STEM_LENGTH]}."


def _suffix(target: Path) -> str:
    return target.suffix[:_SUFFIX_LENGTH]


def remove_leftovers(target: Path) -> list[Path]:
    """Remove temporary files of `target` that killed processes of this machine have left.

    Args:
        target: The file that is going to be written.

    Returns:
        The removed files. A file that cannot be removed stays and is logged.
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
    gone = [target.with_name(match[0]) for match in matches if has_ended(int(match[1]))]
    return [file for file in gone if _is_abandoned(file)]


def _is_abandoned(file: Path) -> bool:
    """Whether nobody holds the file's lock; without locks, whether it has not changed for a day.

    That its process is not visible proves little: it may run in another container.
    """
    try:
        descriptor = os.open(file, os.O_RDWR)  # a lock over NFS asks for it
        try:
            if _HAS_LOCKS:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except BlockingIOError:
            return False
        except OSError as error:
            _log.debug("%s cannot be locked: %s", file, error)
        finally:
            os.close(descriptor)
        return time.time() - file.stat().st_mtime > _DAY_SECONDS
    except OSError as error:
        _log.debug("%s cannot be looked at: %s", file, error)
        return False


def has_ended(process_id: int) -> bool:
    """Whether a process of this machine is over.

    One that was killed stays in the list of processes until its parent asks how it ended, and some parents never do.
    """
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # the last two: no number of a process
        return True
    except (psutil.Error, OSError):  # another user's
        return False


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    strict: bool = False,
) -> Any:
    """`json.loads` for untrusted text, with memory limited to a few times the text's size.

    Args:
        text: A string, or bytes in UTF-8.
        object_pairs_hook: As for `json.loads`.
        strict: Refuse NaN and Infinity, which `json` accepts although JSON has no such numbers.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or has more than `MOST_JSON_VALUES` values.
    """
    if len(text) > MOST_JSON_VALUES:
        if isinstance(text, bytes):
            values = text.count(b",") + text.count(b"[") + text.count(b"{")
        else:
            values = text.count(",") + text.count("[") + text.count("{")
        if values > MOST_JSON_VALUES:
            raise ValueError(f"it has {values:,} values; the limit is {MOST_JSON_VALUES:,}")
    try:
        return json.loads(
            text, object_pairs_hook=object_pairs_hook, parse_constant=_refuse_constant if strict else None
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def free_bytes(folder: Path) -> int | None:
    """Free bytes on a folder's disk; None if the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def reason_of(error: OSError | ValueError) -> str:
    """Why the system refused, in its own words. A ValueError comes from a path with a NUL or without an encoding."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def reading_hint(error: OSError | ValueError) -> str:
    """What to do about a path that cannot be read."""
    number = error.errno if isinstance(error, OSError) else errno.ENOENT
    if number in _NO_PERMISSION:
        return "Check the permissions of this path and of the folders above it."
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


_MACHINE_FOLDERS = re.compile(
    r".*[/\\](?:(?:site|dist)-packages[/\\]|(?=models--[^/\\]+[/\\]snapshots[/\\]))"
)
"""The path up to an installed package, or up to a model in the hub's cache."""

_NO_FILE = re.compile(
    r"<(?:string|stdin|code|cell|__array_function__ internals|frozen [\w.]+|ipython-input-[\w-]+)>"
)
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_FOLDER = r"""(?!\s)(?:[^\\/\n"'`<>|:]|:(?![\s/\\])|(?<=\w)'(?=\w)){0,255}(?<!\s)"""  # may hold spaces, as "Jane Doe" does
_PATHS = re.compile(
    r"(?<![\w.~/\\-])(?:file://)?"
    rf"((?:/(?!/)(?:{_FOLDER}/)+|(?:[A-Za-z]:[\\/]{{1,2}}|\\{{2,4}}{_FOLDER}\\{{1,2}})(?:{_FOLDER}[\\/]{{1,2}})+)"
    r"""[^\s\\/"'`<>|:,;()\[\]{}]*)"""
)
"""An absolute path within a text, up to the end of its last folder and the first word of its file's name."""


_CELL = re.compile(r".*[/\\]ipykernel_[0-9]+[/\\][0-9]+\.py")
"""The file that Jupyter's kernel gives a notebook's cell, named by a hash of what stands in it."""
CELL = "<cell>"


def is_cell(path: str) -> bool:
    """Whether a file's name is that of a cell of a notebook."""
    return _CELL.fullmatch(path) is not None


def short_path(path: str | os.PathLike[str]) -> str:
    """A path as records name it, without folders that reveal the user or the machine.

    A file of an installed package becomes `diffusers/…`, one in the hub's cache `models--…`. Other files are named relative
    to the folder of the script that runs, to the working folder or as `~/…`; failing that, only the last two parts remain,
    without the name of a user's folder. A notebook's cell, whose file is named by a hash, is `<cell>`. A path that is not
    absolute, such as a name on the hub or `<stdin>`, stays as it is.
    """
    text = os.fsdecode(path)
    if text.startswith("<") and text.endswith(">"):
        return text if _NO_FILE.fullmatch(text) else "<code>"
    from_windows = os.name != "nt" and _WINDOWS.match(text) is not None
    if not (os.path.isabs(text) or from_windows):  # noqa: PTH117 - text is what paths are compared as
        return text
    if is_cell(text):
        return CELL
    before = _MACHINE_FOLDERS.match(text)
    if before is not None:
        return text[before.end() :]
    for folder, name in _known_folders():
        if text.startswith(folder + os.sep):
            return name + text[len(folder) + 1 :]
    parts = (PureWindowsPath(text) if from_windows else Path(text)).parts[1:]
    return "/".join(parts[-1:] if parts[:-2] in (("home",), ("Users",)) else parts[-2:]) or text


def short_paths(text: str) -> str:
    """The text with each absolute path in it, of any system, as `short_path` names it. Addresses on the web stay."""
    return _PATHS.sub(lambda found: short_path(found[1]), text) if "/" in text or "\\" in text else text


def _known_folders() -> list[tuple[str, str]]:
    """The script's folder, the working folder and the user's, the deeper one first, each with its replacement."""
    folders = [(os.path.expanduser("~"), "~/")]  # noqa: PTH111 - as above; raises nothing without a home
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(script, str):
        folders.insert(0, (os.path.dirname(os.path.abspath(script)), ""))  # noqa: PTH100, PTH120 - as above
    with suppress(OSError):  # the folder was removed
        folders.insert(0, (os.getcwd(), ""))  # noqa: PTH109 - as above
    return sorted((pair for pair in folders if len(pair[0]) > 1), key=lambda pair: len(pair[0]), reverse=True)


def without_home(text: str) -> str:
    """The text with `~` in place of the user's folder."""
    home = os.path.expanduser("~")  # noqa: PTH111 - raises nothing without a home
    if len(home) < 2 or home not in text:
        return text
    return re.sub(rf"(?<![\w.~/\\-]){re.escape(home)}(?![\w-])", "~", text)
