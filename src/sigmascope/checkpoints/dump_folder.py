"""The dumps of one run in a folder, with an index.

Each dump is a file of its own, which says all about itself; the index, `index.jsonl`, holds one line a dump, appended
once its file is in place. So a killed process leaves whole dumps, of which the last may be missing in the index: it is
then read from its own header. Names are taken by creating the file, which one process alone can do, and lines are
appended in one write; several processes and threads may save into one local folder at a time.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from sigmascope.checkpoints.dump_index import DUMP_SUFFIX, NAME_KEY, DumpEntry, append_entry, read_index
from sigmascope.checkpoints.dump_metadata import DumpMetadata, from_header
from sigmascope.checkpoints.header import read_header
from sigmascope.checkpoints.paths import is_existing
from sigmascope.checkpoints.tensor_dumps import TensorDump, dump_contents, load_tensors
from sigmascope.checkpoints.writer import save_safetensors
from sigmascope.errors import CheckpointError, WriteError
from sigmascope.records.leftovers import remove_leftovers
from sigmascope.records.os_errors import reason_of, writing_hint
from sigmascope.records.prompts import PromptPrivacy, Prompts

_LONGEST_STEM = 80
_MOST_OF_A_NAME = 100_000


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
            save_safetensors(path, flat, header)
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
        except OSError as error:
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
