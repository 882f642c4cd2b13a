"""The checkpoints of one training run: finding the newest good one, keeping some, and removing what a kill left behind.

A checkpoint is a folder of safetensors and JSON that appears whole or not at all: it is written under a hidden
name, flushed to the disk and renamed.

    checkpoint-000500/
        weights.safetensors     what is trained
        average.safetensors     its moving average, when there is one
        state.safetensors       tensors of optimizer, schedule, gradient scaler and random generators
        state.json              everything else, and size and checksum of the files above

Nothing is pickled: nested state (an optimizer's, a schedule's, a generator's) is packed into JSON and tensors. Every
container becomes a mapping with one key that names its kind, so that a tuple comes back as a tuple and an
optimizer's integer keys as integers. Floats survive JSON bit for bit.

The states of all of a process's random generators are kept: Python's, NumPy's, PyTorch's and the device's.
"""

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.files import atomic_path, flush_folder, parse_json, reason_of, temporary_name, writing_hint
from sigmascope.lora.journal import open_own

T = TypeVar("T")

_log = logging.getLogger(__name__)

Packed = Any
"""JSON values."""

_CHECKPOINT_NAME: Final = re.compile(r"checkpoint-(\d+)")
_HIDDEN_NAME: Final = re.compile(r"\.checkpoint-\d+\..*\.tmp")
LOCK: Final = ".training.lock"
FORMAT: Final = 1
"""Of `state.json`; another one is refused."""
WEIGHTS, AVERAGE, STATE, FACTS = (
    "weights.safetensors",
    "average.safetensors",
    "state.safetensors",
    "state.json",
)
_READ_BYTES: Final = 8 * 2**20
"""At a time, for a checksum."""


@dataclass(frozen=True)
class TrainingState:
    """Everything that training needs to continue as if it had not stopped.

    Attributes:
        step: Optimizer steps done.
        epoch: The next sample's epoch.
        identity: Settings that determine the result, by key (see `session.identity`).
        weights: By parameter, in the optimizer's order.
        average: Moving average of the weights; None if there is none.
        progress: State of optimizer, schedule, scaler and moving average.
        processes: For each process, its data position and random generators.
    """

    step: int
    epoch: int
    identity: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor] | None
    progress: Mapping[str, Any]
    processes: tuple[Any, ...]


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
        """Create the folder if necessary, and lock it for this run. Leftovers of a killed run are removed.

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
            with lock, suppress(OSError):  # before the lock goes, or a second run could hold it
                (self.path / LOCK).unlink(missing_ok=True)

    def save(self, state: TrainingState, add_files: Callable[[Path], object] | None = None) -> Path:
        """Write a checkpoint, then remove those beyond the number to keep.

        Checkpoints of later steps neither count nor are removed: training resumed from an earlier one because they are
        damaged.

        Raises:
            WriteError: The disk is full or refuses. All earlier checkpoints are as they were.
        """
        target = self.path / checkpoint_name(state.step)
        write_state(target, state, add_files)
        self.remove_older(target)
        return target

    def remove_older(self, than: Path) -> None:
        """Remove checkpoints before a good one beyond the number to keep, in which the good one counts."""
        checkpoints = find_checkpoints(self.path)
        for old in checkpoints[checkpoints.index(than) + self._keep :]:
            self._remove(old)

    def newest(self) -> tuple[Path, TrainingState] | None:
        """Read the newest good checkpoint; damaged ones are logged and skipped.

        Raises:
            CheckpointError: There are checkpoints, but all of them are damaged.
        """
        return newest_readable(self.path, read_state)

    def set_aside(self) -> Path | None:
        """Move all checkpoints into a separate folder, so that they are not taken for those of a new training.

        Returns:
            That folder; None if there was nothing to move.
        """
        checkpoints = find_checkpoints(self.path)
        if not checkpoints:
            return None
        number = 1
        while (aside := self.path / f"before-{number}").exists():
            number += 1
        try:
            aside.mkdir()
            for folder in checkpoints:
                folder.rename(aside / folder.name)
        except OSError as error:
            raise WriteError(
                aside, f"cannot be created ({reason_of(error)}).", hint=writing_hint(error)
            ) from error
        return aside

    def _sweep(self) -> None:
        """Remove half checkpoints; whoever wrote them is dead, since this process has the lock."""
        for folder in self.path.iterdir():
            if _HIDDEN_NAME.fullmatch(folder.name):
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
        (int(match[1]), folder)
        for folder in path.iterdir()
        if (match := _CHECKPOINT_NAME.fullmatch(folder.name))
    ]
    return [folder for _, folder in sorted(numbered, reverse=True)]


def newest_readable(path: Path, read: Callable[[Path], T]) -> tuple[Path, T] | None:
    """The newest checkpoint in `path` that can be read, and its content; damaged ones are logged and skipped.

    Raises:
        CheckpointError: There are checkpoints, but all of them are damaged.
    """
    failures: list[CheckpointError] = []
    for folder in find_checkpoints(path):
        try:
            return folder, read(folder)
        except CheckpointError as error:
            failures.append(error)
            _log.warning("Passed over a checkpoint: %s", error)
    if failures:
        raise CheckpointError(
            path,
            f"no checkpoint is complete; the newest: {failures[0].message}",
            hint="Start over with --no_resume.",
        )
    return None


def checkpoint_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"checkpoint-{step:06d}"


def write_state(
    target: Path, state: TrainingState, add_files: Callable[[Path], object] | None = None
) -> None:
    """Write a checkpoint's folder, whole or not at all.

    Args:
        target: Its final path, in an existing folder. A folder of that name is replaced.
        state: What to write.
        add_files: Called with the hidden folder to add further files; they are not checked on reading.

    Raises:
        WriteError: The disk is full or refuses; nothing of the new folder is left.
        TypeError: The state holds something that a checkpoint cannot store.
    """
    hidden = target.with_name(temporary_name(target))
    try:
        hidden.mkdir()
        _write_files(hidden, state)
        if add_files is not None:
            add_files(hidden)
        flush_folder(hidden)
        aside = None
        if target.exists():  # it moves aside first, and goes when the new one is in its place
            aside = target.with_name(temporary_name(target))
            target.rename(aside)
        hidden.rename(target)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        message = f"the checkpoint cannot be written ({reason_of(error)})."
        raise WriteError(target, message, hint=writing_hint(error)) from error
    except WriteError as error:
        message = f"the checkpoint cannot be written: {error.message.removeprefix(f'{error.path}: ')}"
        raise WriteError(target, message, hint=error.hint) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    flush_folder(target.parent)


def _write_files(folder: Path, state: TrainingState) -> None:
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "step": state.step,
        "epoch": state.epoch,
        "identity": dict(state.identity),
        "parameters": list(state.weights),
        "progress": pack(state.progress, tensors, "progress"),
        "processes": pack(list(state.processes), tensors, "processes"),
    }
    files = {WEIGHTS: state.weights, STATE: tensors}
    if state.average is not None:
        files[AVERAGE] = state.average
    for name, content in files.items():
        save_safetensors(folder / name, content)
    facts["files"] = {name: file_facts(folder / name) for name in files}
    with atomic_path(folder / FACTS) as temporary:
        temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    """Read a checkpoint, and compare every file with its checksum.

    Raises:
        CheckpointError: Names the file that is missing, damaged, or of a later version.
    """
    facts = read_facts(folder)
    for name, expected in facts["files"].items():
        path = folder / name
        try:
            written = file_facts(path)
        except OSError as error:
            raise CheckpointError(
                path, f"cannot be read ({reason_of(error)}).", hint="Remove the damaged checkpoint."
            ) from error
        if written != expected:
            raise CheckpointError(
                path,
                f"is damaged: {written['bytes']} bytes with another checksum than the {expected['bytes']} written.",
                hint="Remove the damaged checkpoint.",
            )
    tensors, weights = _read_tensors(folder / STATE), _read_tensors(folder / WEIGHTS)
    if missing := [name for name in facts["parameters"] if name not in weights]:
        raise CheckpointError(folder / WEIGHTS, f"lacks {missing[0]}.", hint="Remove the damaged checkpoint.")
    where = str(folder / FACTS)
    return TrainingState(
        step=facts["step"],
        epoch=facts["epoch"],
        identity=facts["identity"],
        weights={name: weights[name] for name in facts["parameters"]},
        average=_read_tensors(folder / AVERAGE) if AVERAGE in facts["files"] else None,
        progress=unpack(facts["progress"], tensors, where),
        processes=tuple(unpack(facts["processes"], tensors, where)),
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.tensor(name) for name in checkpoint.keys()}  # noqa: SIM118 - no mapping


def read_facts(folder: Path) -> dict[str, Any]:
    """Read `state.json` alone.

    Raises:
        CheckpointError: It is missing, damaged, or of a later version.
    """
    path = folder / FACTS
    try:
        facts: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        version = facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            path, f"cannot be read ({error}).", hint="Remove the damaged checkpoint."
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            path, f"is of format {version}, and this version reads {FORMAT}.", hint="Update Sigmascope."
        )
    return facts


def file_facts(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, as `state.json` keeps them."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Packed:
    """Turn nested state into JSON values; its tensors go to `tensors`, named by their places.

    Args:
        value: Dicts, lists, tuples, tensors, arrays, numbers, texts, None.
        tensors: The tensors are added to it.
        path: Name of the value, with which its tensors' names begin.

    Raises:
        TypeError: It holds anything else; names the place.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(value.copy())
        return {"array": path}
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, path)
    if isinstance(value, Mapping):
        return {"dict": [[key, pack(item, tensors, f"{path}.{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def unpack(packed: Packed, tensors: Mapping[str, Tensor], file: str) -> Any:
    """Give back what `pack` was given.

    Raises:
        CheckpointError: A tensor is missing, or the values are not of `pack`.
    """
    if not isinstance(packed, dict):
        return packed
    kind, content = next(iter(packed.items()), (None, None))
    match kind, content:
        case "tensor" | "array", str():
            if content not in tensors:
                raise CheckpointError(
                    file, f"the tensor {content} is missing.", hint="Resume from another checkpoint."
                )
            return tensors[content] if kind == "tensor" else tensors[content].numpy()
        case "dict", list():
            return {key: unpack(item, tensors, file) for key, item in content}
        case "list", list():
            return [unpack(item, tensors, file) for item in content]
        case "tuple", list():
            return tuple(unpack(item, tensors, file) for item in content)
    raise CheckpointError(
        file, f"holds state of an unknown kind {kind!r}.", hint="Resume from another checkpoint."
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """Read the state of all generators."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the global one, which libraries use
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to what `random_state` read."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - as above
    torch.set_rng_state(state["torch"].cpu())
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


@contextmanager
def untouched_random_state(device: torch.device) -> Iterator[None]:
    """Restore all generators after the block, so that its random draws do not affect later ones."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(state, device)
