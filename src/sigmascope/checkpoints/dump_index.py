"""Which dumps a folder holds: its index, and the headers of the files that the index lacks.

The index, `index.jsonl`, holds one line a dump. Lines are appended in one write, so that several processes and threads
may add theirs at a time; one that a killed process left unfinished or unwritten is made up for by the dump's own header.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sigmascope.checkpoints.header import read_header
from sigmascope.checkpoints.paths import is_existing, is_folder, names_in, reading
from sigmascope.errors import CheckpointError

_log = logging.getLogger(__name__)

INDEX_NAME = "index.jsonl"
NAME_KEY = "dump_name"
DUMP_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class DumpEntry:
    """One dump of a folder. `saved_at` is the time in ISO 8601 and UTC, None if only the file itself is left to ask."""

    name: str
    file: str
    saved_at: str | None = None
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_index(folder: Path) -> tuple[DumpEntry, ...]:
    """All whole dumps of a folder: those of the index as they were saved, then files that it lacks, by name.

    Raises:
        CheckpointError: The folder cannot be read, or a file in it that the index lacks is damaged.
    """
    if not is_folder(folder):
        if is_existing(folder):
            raise CheckpointError(folder, "is no folder.", hint="Name the folder of a run's dumps.")
        return ()
    files = [file for file in names_in(folder) if _is_whole(folder / file)]
    listed = {entry.file: entry for entry in _lines(folder / INDEX_NAME) if entry.file in files}
    rest = [_of_header(folder / file) for file in files if file not in listed]
    return (*listed.values(), *rest)


def append_entry(folder: Path, entry: DumpEntry) -> None:
    """Add a line; the dump is safe without it, so a refusal is logged only."""
    shapes = {key: list(shape) for key, shape in entry.tensors.items()}
    line = {"name": entry.name, "file": entry.file, "saved_at": entry.saved_at, "tensors": shapes}
    try:
        # A line break first: what a killed process may have left of a line must not swallow this one.
        data = b"\n" + json.dumps(line).encode("ascii")
        descriptor = os.open(folder / INDEX_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("The index of %s cannot be written: %s", folder, error)


def _lines(path: Path) -> Iterator[DumpEntry]:
    if not is_existing(path):
        return
    with reading(path):
        lines = path.read_bytes().split(b"\n")
    for line in filter(None, lines):
        try:
            content = json.loads(line)
            shapes = {key: tuple(map(int, shape)) for key, shape in content["tensors"].items()}
            yield DumpEntry(str(content["name"]), str(content["file"]), content["saved_at"], shapes)
        except (ValueError, TypeError, KeyError, AttributeError):
            _log.debug("A line of %s is damaged; the dump is read from its own header.", path)


def _is_whole(path: Path) -> bool:
    """Whether it is a dump and not one that is being written, whose name is reserved by an empty file."""
    if not path.name.endswith(DUMP_SUFFIX) or path.name.startswith("."):
        return False
    with reading(path):
        return path.stat().st_size > 0


def _of_header(path: Path) -> DumpEntry:
    header = read_header(path)
    name = header.metadata.get(NAME_KEY, path.name.removesuffix(DUMP_SUFFIX))
    return DumpEntry(name, path.name, None, {key: entry.shape for key, entry in header.tensors.items()})
