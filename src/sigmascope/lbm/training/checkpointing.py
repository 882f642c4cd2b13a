"""The checkpoints of one training run, in its folder: the newest good one, those to keep, and what a kill left."""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.lbm.training.checkpoint_files import TrainingState, read_state
from sigmascope.lbm.training.checkpoint_writing import write_state
from sigmascope.lora.extraction.own_file import open_own
from sigmascope.records.leftovers import temporary_name
from sigmascope.records.os_errors import reason_of, writing_hint

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint-(\d+)")
_HIDDEN: Final = re.compile(r"\.checkpoint-\d+\..*\.tmp")
LOCK: Final = ".training.lock"


def checkpoint_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"checkpoint-{step:06d}"


class CheckpointFolder:
    """Where a training keeps its checkpoints.

    Args:
        path: `save_ckpt_path`.
        keep: How many checkpoints to keep, the newest.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self._keep = keep

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if it is not there, and train into it alone. What a killed run left is removed.

        Raises:
            ConfigError: Another run trains into it.
            WriteError: It cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open_own(self.path / LOCK)
        except ConfigError as error:
            raise ConfigError(
                f"save_ckpt_path: another run is training into {self.path}.",
                hint="Wait for it, or choose another folder.",
            ) from error
        except OSError as error:
            raise WriteError(
                self.path, f"cannot be written to ({reason_of(error)}).", hint=writing_hint(error)
            ) from error
        try:
            self._sweep()
            yield
        finally:
            (self.path / LOCK).unlink(missing_ok=True)  # before the lock goes, or a second run could hold it
            lock.close()

    def all(self) -> list[Path]:
        """Every checkpoint there is, the newest first."""
        return find_checkpoints(self.path)

    def save(self, state: TrainingState, add_files: Callable[[Path], object] | None = None) -> Path:
        """Write a checkpoint, then remove those beyond the number to keep.

        Those of later steps neither count nor go: training went on from an earlier one because they are damaged.

        Raises:
            WriteError: The disk is full or refuses. All earlier checkpoints are as they were.
        """
        target = self.path / checkpoint_name(state.step)
        write_state(target, state, add_files)
        found = self.all()
        for old in found[found.index(target) + self._keep :]:
            self._remove(old)
        return target

    def newest(self) -> tuple[Path, TrainingState] | None:
        """Read the newest good checkpoint; damaged ones are logged and passed over.

        Raises:
            CheckpointError: There are checkpoints, but all of them are damaged.
        """
        failures: list[CheckpointError] = []
        for folder in self.all():
            try:
                return folder, read_state(folder)
            except CheckpointError as error:
                failures.append(error)
                _log.warning("Passed over a checkpoint: %s", error)
        if failures:
            raise CheckpointError(
                self.path,
                f"no checkpoint is whole; the newest: {failures[0].message}",
                hint="Start anew with --no_resume.",
            )
        return None

    def set_aside(self) -> Path | None:
        """Move all checkpoints into a folder of their own, so that a new training cannot be taken for theirs.

        Returns:
            That folder; None when there was nothing to move.
        """
        found = self.all()
        if not found:
            return None
        number = 1
        while (aside := self.path / f"before-{number}").exists():
            number += 1
        try:
            aside.mkdir()
            for folder in found:
                folder.rename(aside / folder.name)
        except OSError as error:
            raise WriteError(
                aside, f"cannot be made ({reason_of(error)}).", hint=writing_hint(error)
            ) from error
        return aside

    def _sweep(self) -> None:
        """Remove half checkpoints; whoever wrote them is dead, since this process has the lock."""
        for folder in self.path.iterdir():
            if _HIDDEN.fullmatch(folder.name):
                _log.info("Removed %s, which a process that was killed left half-written.", folder)
                shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Hide it first: a kill in between must not leave half a checkpoint under a good name."""
        hidden = folder.with_name(temporary_name(folder))
        try:
            folder.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            _log.warning("The old checkpoint %s cannot be removed: %s", folder, error)


def find_checkpoints(path: Path) -> list[Path]:
    """Every checkpoint's folder in `path`, the newest first; none when there is no such folder."""
    if not path.is_dir():
        return []
    numbered = [
        (int(match[1]), folder) for folder in path.iterdir() if (match := _NAME.fullmatch(folder.name))
    ]
    return [folder for _, folder in sorted(numbered, reverse=True)]
