"""Finished layers of a long job, kept beside its target so that a killed run can go on.

A journal is one append-only file of records, each with a checksum. If the process died while it wrote a record, that
record's checksum does not match, and it is cut off when the journal is opened again. The first record says what the job
was; the journal of another job, or of inputs that have changed since, is started anew.

Only one process uses the file at a time, even in a folder that other users may write to.
"""

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.files import parse_json, reason_of, writing_hint

_log = logging.getLogger(__name__)

_LENGTH_BYTES: Final = 8  # bytes that hold the length of a record's content
_DIGEST_BYTES: Final = 16  # bytes of its checksum
_FACTS_KEY: Final = "facts"  # the metadata field with its name and facts

Record = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Tensors and JSON facts."""

_LOCKED_BY_ANOTHER: Final = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class Journal:
    """A context manager: leaving it, normally or by an exception, removes the file; a kill leaves it.

    Records may be appended from several threads.

    Args:
        target: The file that the job will write; the journal lies beside it, hidden.
        job: What identifies the job and its inputs. Only a journal of the same text is resumed.

    Raises:
        ConfigError: On entering: another process works on the same target.
        WriteError: On entering and appending: the journal cannot be written.
    """

    def __init__(self, target: Path, job: str) -> None:
        self.path = target.with_name(f".{target.name}.part")
        self._job = hashlib.blake2b(job.encode("utf-8", "surrogateescape"), digest_size=32).hexdigest()
        self._places: dict[str, int] = {}
        self._lock = Lock()
        self._end = 0

    def __enter__(self) -> "Journal":
        try:
            self._file: BinaryIO = open_own(self.path)
        except OSError as error:
            raise self._write_error(error) from error
        try:
            self._resume()
        except BaseException as error:
            self._remove()
            if isinstance(error, OSError):
                raise self._write_error(error) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if os.name == "nt":  # which removes no open file; elsewhere closing first would give up the lock
            self._file.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as problem:  # the LoRA is in place by now, or another error is on its way
            _log.warning("%s cannot be removed: %s", self.path, problem)
        finally:
            self._file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, name: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Keep the result of one part of the job.

        Args:
            name: A later record of the same name replaces the earlier one.
            tensors: On any device.
            facts: JSON values.

        Raises:
            WriteError: The disk is full or refuses.
        """
        content = _encode(name, tensors, facts)
        record = len(content).to_bytes(_LENGTH_BYTES, "little") + _digest(content) + content
        with self._lock:
            place = self._end
            try:
                self._file.seek(place)
                view = memoryview(record)
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:
                raise self._write_error(error) from error
            self._end += len(record)
            self._places[name] = place

    def read(self, name: str) -> Record:
        """The tensors (on the CPU) and facts of a record.

        Raises:
            KeyError: There is no record of that name.
            CheckpointError: It was complete and no longer is.
        """
        with self._lock:
            content = self._content_at(self._places[name])
        if content is None:
            raise CheckpointError(
                self.path,
                f"has lost {name}: another program wrote to it.",
                hint="Start again, and let nothing else write to its folder.",
            )
        return _decode(content)[1:]

    def _resume(self) -> None:
        """Find the records of an earlier run of the same job, and cut off what is torn."""
        begin = self._content_at(0)
        if begin is None or _decode(begin)[0] != self._job:
            self._file.truncate(0)
            self._places.clear()
            self._end = 0
            self.append(self._job, {}, {})
        else:
            place = 0
            while (content := self._content_at(place)) is not None:
                self._places[_decode(content)[0]] = place
                place += _LENGTH_BYTES + _DIGEST_BYTES + len(content)
            self._end = place
            self._file.truncate(place)
        del self._places[self._job]
        if self._places:
            _log.info("Resuming: %d finished parts in %s.", len(self._places), self.path)

    def _content_at(self, place: int) -> bytes | None:
        """The content of the record there; None if there is no complete one."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(place)
        head = self._file.read(_LENGTH_BYTES + _DIGEST_BYTES)
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        if len(head) < _LENGTH_BYTES + _DIGEST_BYTES or length > size - place - len(head):
            return None
        content = self._file.read(length)
        return content if len(content) == length and _digest(content) == head[_LENGTH_BYTES:] else None

    def _write_error(self, error: OSError) -> WriteError:
        return WriteError(self.path, f"cannot be written ({reason_of(error)}).", hint=writing_hint(error))


def _encode(name: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> bytes:
    ready = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    content: bytes = save(ready, {_FACTS_KEY: json.dumps([name, dict(facts)])})
    return content


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _decode(content: bytes) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    try:
        length = int.from_bytes(content[:8], "little")
        header = parse_json(content[8 : 8 + length])
        name, facts = parse_json(header["__metadata__"][_FACTS_KEY])
        return name, load(content), facts
    except (SafetensorError, ValueError, KeyError, TypeError):
        return "", {}, {}


def open_own(path: Path) -> BinaryIO:
    """Open a file of this user for this process alone; create it empty if it is not there.

    If other users may write to the folder, they can put something else in the file's place: a link would make us
    overwrite another file, and we would trust the content of a file of theirs. Such an entry is removed.

    Args:
        path: The file.

    Returns:
        The file, unbuffered, for reading and writing. Closing it releases the lock, so remove the file before.

    Raises:
        ConfigError: Another process has it open.
        OSError: It cannot be opened, or a foreign entry in its place cannot be removed.
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
            _log.warning("%s does not belong to this user and is removed.", path)
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


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep a second process off the same journal, if the system and the disk support locks."""
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
