"""One training checkpoint on the disk: a folder of safetensors and JSON that appears whole or not at all.

    checkpoint-000500/
        weights.safetensors     what is trained
        average.safetensors     its moving average, when there is one
        state.safetensors       tensors of optimizer, schedule, gradient scaler and random generators
        state.json              everything else, and size and checksum of the files above

It is written under a hidden name, flushed to the disk and renamed.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError, WriteError
from sigmascope.lbm.training.state_packing import pack, unpack
from sigmascope.records.atomic import atomic_path
from sigmascope.records.leftovers import temporary_name
from sigmascope.records.os_errors import reason_of, writing_hint

FORMAT: Final = 1
WEIGHTS, AVERAGE, STATE, FACTS = (
    "weights.safetensors",
    "average.safetensors",
    "state.safetensors",
    "state.json",
)
_READ_BYTES: Final = 8 * 2**20


@dataclass(frozen=True)
class TrainingState:
    """All that training needs to go on as if it had not stopped.

    Attributes:
        step: Optimizer steps done.
        epoch: That the next sample belongs to.
        identity: Settings that the result follows from, by key (see `identity.py`).
        weights: By parameter, in the optimizer's order.
        average: Of the weights; None without a moving average.
        progress: Optimizer, schedule, scaler and moving average.
        processes: Of each process: where its data stands and its random generators.
    """

    step: int
    epoch: int
    identity: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor] | None
    progress: Mapping[str, Any]
    processes: tuple[Any, ...]


def write_state(
    target: Path, state: TrainingState, add_files: Callable[[Path], object] | None = None
) -> None:
    """Write a checkpoint's folder, whole or not at all.

    Args:
        target: Its final name, in a folder that is there. A folder of that name is replaced.
        state: What to write.
        add_files: Given the hidden folder, to put files of its own there; they are not checked on reading.

    Raises:
        WriteError: The disk is full or refuses; nothing of the new folder stays.
        TypeError: The state holds what a checkpoint cannot.
    """
    hidden = target.with_name(temporary_name(target))
    try:
        hidden.mkdir()
        _write_files(hidden, state)
        if add_files is not None:
            add_files(hidden)
        _flush(hidden)
        _replace(hidden, target)
    except OSError as error:
        message = f"the checkpoint cannot be written ({reason_of(error)})."
        raise WriteError(target, message, hint=writing_hint(error)) from error
    except WriteError as error:
        message = f"the checkpoint cannot be written: {error.message.removeprefix(f'{error.path}: ')}"
        raise WriteError(target, message, hint=error.hint) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    _flush(target.parent)


def read_state(folder: Path) -> TrainingState:
    """Read a checkpoint, and compare every file with its checksum.

    Raises:
        CheckpointError: Names the file that is missing, damaged, or of a later version.
    """
    facts = read_facts(folder)
    for name, expected in facts["files"].items():
        _check_file(folder / name, expected)
    tensors = _tensors(folder / STATE)
    where = str(folder / FACTS)
    return TrainingState(
        step=facts["step"],
        epoch=facts["epoch"],
        identity=facts["identity"],
        weights=_in_order(_tensors(folder / WEIGHTS), facts["parameters"], folder / WEIGHTS),
        average=_tensors(folder / AVERAGE) if AVERAGE in facts["files"] else None,
        progress=unpack(facts["progress"], tensors, where),
        processes=tuple(unpack(facts["processes"], tensors, where)),
    )


def read_facts(folder: Path) -> dict[str, Any]:
    """Read `state.json` alone.

    Raises:
        CheckpointError: It is missing, damaged, or of a later version.
    """
    path = folder / FACTS
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
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
    facts["files"] = {name: _facts_of(folder / name) for name in files}
    with atomic_path(folder / FACTS) as temporary:
        temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _replace(hidden: Path, target: Path) -> None:
    """Give the hidden folder its name; one that is there moves aside first and then goes."""
    aside = None
    if target.exists():
        aside = target.with_name(temporary_name(target))
        target.rename(aside)
    hidden.rename(target)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _check_file(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = _facts_of(path)
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({reason_of(error)}).", hint="Remove the damaged checkpoint."
        ) from error
    if found != expected:
        raise CheckpointError(
            path,
            f"is damaged: {found['bytes']} bytes with another checksum than the {expected['bytes']} written.",
            hint="Remove the damaged checkpoint.",
        )


def _facts_of(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _tensors(path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.tensor(name) for name in checkpoint.keys()}  # noqa: SIM118 - no mapping


def _in_order(tensors: dict[str, Tensor], names: list[str], path: Path) -> dict[str, Tensor]:
    if missing := [name for name in names if name not in tensors]:
        raise CheckpointError(path, f"lacks {missing[0]}.", hint="Remove the damaged checkpoint.")
    return {name: tensors[name] for name in names}


def _flush(folder: Path) -> None:
    """Make names durable; where folders cannot be flushed, the files are in place nevertheless."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
