"""The tensor dumps of one run in a folder, with an index.

Each dump is a file of its own that says all about itself. The index, `index.jsonl`, holds one line for each dump,
appended once the dump's file is in place. So a killed process leaves whole dumps; the index may lack the last of them,
or hold an unfinished line for it, and the dump is then read from its own header. A name is taken by creating the file,
which only one process can do, and a line is appended in one write: several processes and threads may save into one
local folder at the same time.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from sigmascope.checkpoints.files import is_existing, is_folder, names_in, reading
from sigmascope.checkpoints.safetensors import read_header, save_safetensors
from sigmascope.checkpoints.tensor_dumps import (
    DumpMetadata,
    TensorDump,
    dump_contents,
    from_header,
    load_tensors,
)
from sigmascope.errors import CheckpointError, WriteError
from sigmascope.files import parse_json, reason_of, remove_leftovers, writing_hint
from sigmascope.records.prompts import PromptPrivacy, Prompts

_LONGEST_STEM = 80
_MOST_OF_A_NAME = 100_000
_MOST_INDEX_BYTES = 64 << 20
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


class TensorDumps(Mapping[str, TensorDump[Tensor]]):
    """A folder of dumps, by name, each read when it is asked for.

    Args:
        folder: Made with its parents when the first dump is saved. A folder of safetensors files from elsewhere can be
            read too: a file is then named by its name without the suffix.
        run_id: Written into each dump that names none.
        prompt_privacy: What the dumps keep of prompts unless `save` is told otherwise.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        prompt_privacy: PromptPrivacy = "hash",
    ) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.prompt_privacy = prompt_privacy
        self._is_swept = False
        self._files: dict[
            str, str
        ] = {}  # by name, so that reading many dumps does not read the index each time

    def save(
        self,
        name: str,
        tensors: Any,
        *,
        prompt: Prompts = None,
        prompt_privacy: PromptPrivacy | None = None,
        run_id: str | None = None,
        encoder: str | None = None,
        **metadata: Any,
    ) -> Path:
        """Save one dump; see `save_tensors`. A name used before becomes `name-2`, `name-3`, ….

        Args:
            name: What the dump is called; characters that file names cannot have are replaced in the file's name.
            tensors: As for `save_tensors`, with what else it takes.
            prompt: As there.
            prompt_privacy: As there; the folder's by default.
            run_id: As there; the folder's by default.
            encoder: As there.
            metadata: As there.

        Returns:
            The file.

        Raises:
            WriteError: The folder or the file cannot be written.
            ConfigError: As of `save_tensors`.
        """
        path, unique = self._reserve(name)
        try:
            header, flat = dump_contents(
                tensors,
                prompt=prompt,
                prompt_privacy=self.prompt_privacy if prompt_privacy is None else prompt_privacy,
                run_id=self.run_id if run_id is None else run_id,
                encoder=encoder,
                metadata=metadata,
                header={NAME_KEY: unique},
            )
            save_safetensors(path, flat, header, private=True)
        except BaseException:
            with suppress(OSError):  # the reserved name, still empty
                path.unlink()
            raise
        shapes = {key: tuple(tensor.shape) for key, tensor in flat.items()}
        append_entry(
            self.folder,
            DumpEntry(unique, path.name, datetime.now(UTC).isoformat(timespec="milliseconds"), shapes),
        )
        return path

    @property
    def index(self) -> tuple[DumpEntry, ...]:
        """All whole dumps of the folder: those of the index as they were saved, then files that it lacks, by name.

        Raises:
            CheckpointError: The folder cannot be read, or a file in it that the index lacks is damaged.
        """
        return read_index(self.folder)

    def load(self, name: str) -> TensorDump[Tensor]:
        """Read one dump into memory.

        Raises:
            CheckpointError: There is none of that name, or it cannot be read.
        """
        return load_tensors(self.folder / self._entry(name).file)

    def metadata(self, name: str) -> DumpMetadata:
        """The header of one dump, without its tensors.

        Raises:
            CheckpointError: As of `load`.
        """
        path = self.folder / self._entry(name).file
        return from_header(path, read_header(path).metadata)

    def __getitem__(self, name: str) -> TensorDump[Tensor]:
        if not self._is_there(self._files.get(name)):
            self._files = {entry.name: entry.file for entry in self.index}
        if name not in self._files:
            raise KeyError(name)
        return load_tensors(self.folder / self._files[name])

    def _entry(self, name: str) -> DumpEntry:
        entries = self.index
        found = next((entry for entry in entries if entry.name == name), None)
        if found is None:
            known = ", ".join(entry.name for entry in entries[:8]) or "none"
            raise CheckpointError(self.folder, f"has no dump {name!r}.", hint=f"There are: {known}.")
        return found

    def __contains__(self, name: object) -> bool:
        return any(entry.name == name for entry in self.index)

    def __iter__(self) -> Iterator[str]:
        return iter([entry.name for entry in self.index])

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"TensorDumps({str(self.folder)!r})"

    def _reserve(self, name: str) -> tuple[Path, str]:
        """Take a free name by creating its file, empty."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:_LONGEST_STEM] or "dump"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            for number in range(1, _MOST_OF_A_NAME):
                ending = "" if number == 1 else f"-{number}"
                path = self.folder / f"{stem}{ending}{DUMP_SUFFIX}"
                try:
                    path.open("xb").close()
                except FileExistsError:
                    continue
                return path, f"{name}{ending}"
        except (OSError, ValueError) as error:  # ValueError: a NUL in the folder's name
            raise WriteError(
                self.folder, f"dumps cannot be written ({reason_of(error)}).", hint=writing_hint(error)
            ) from error
        raise WriteError(self.folder, f"has too many dumps named {name!r}.", hint="Use another name.")

    def _sweep(self) -> None:
        """Once: remove what killed processes left of dumps whose names nobody will write again."""
        if self._is_swept:
            return
        self._is_swept = True
        for file in self.folder.glob(f"*{DUMP_SUFFIX}"):
            with suppress(OSError):  # another process has just taken its name back
                if file.stat().st_size == 0:
                    remove_leftovers(file)

    def _is_there(self, file: str | None) -> bool:
        return file is not None and is_existing(self.folder / file)


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
    listed = {entry.file: entry for entry in _index_entries(folder / INDEX_NAME) if entry.file in files}
    rest = [_entry_of_header(folder / file) for file in files if file not in listed]
    return (*listed.values(), *rest)


def _is_whole(path: Path) -> bool:
    """Whether it is a dump and not one that is being written, whose name is reserved by an empty file."""
    if not path.name.endswith(DUMP_SUFFIX) or path.name.startswith("."):
        return False
    with reading(path):
        return path.stat().st_size > 0


def _index_entries(path: Path) -> Iterator[DumpEntry]:
    if not is_existing(path):
        return
    with reading(path):
        if path.stat().st_size > _MOST_INDEX_BYTES:
            _log.warning(
                "The index %s is too large to be one; the dumps are read from their own headers.", path
            )
            return
        lines = path.read_bytes().split(b"\n")
    for line in filter(None, lines):
        try:
            content = parse_json(line)
            shapes = {key: tuple(map(int, shape)) for key, shape in content["tensors"].items()}
            yield DumpEntry(str(content["name"]), str(content["file"]), content["saved_at"], shapes)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            _log.debug("A line of %s is damaged; the dump is read from its own header.", path)


def _entry_of_header(path: Path) -> DumpEntry:
    header = read_header(path)
    name = header.metadata.get(NAME_KEY, path.name.removesuffix(DUMP_SUFFIX))
    return DumpEntry(name, path.name, None, {key: entry.shape for key, entry in header.tensors.items()})


def append_entry(folder: Path, entry: DumpEntry) -> None:
    """Add a line; the dump is safe without it, so a refusal is logged only."""
    shapes = {key: list(shape) for key, shape in entry.tensors.items()}
    line = {"name": entry.name, "file": entry.file, "saved_at": entry.saved_at, "tensors": shapes}
    try:
        # A line break first: what a killed process may have left of a line must not swallow this one.
        data = b"\n" + json.dumps(line).encode("ascii")
        descriptor = os.open(folder / INDEX_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("The index of %s cannot be written: %s", folder, error)
