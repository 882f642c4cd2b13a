"""Write a training checkpoint: the files of `checkpoint_files`, all of them or none."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sigmascope.checkpoints import save_safetensors
from sigmascope.errors import WriteError
from sigmascope.lbm.training.checkpoint_files import (
    AVERAGE,
    FACTS,
    FORMAT,
    STATE,
    WEIGHTS,
    TrainingState,
    file_facts,
)
from sigmascope.lbm.training.state_packing import pack
from sigmascope.records.atomic import atomic_path
from sigmascope.records.leftovers import temporary_name
from sigmascope.records.os_errors import reason_of, writing_hint


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


def _replace(hidden: Path, target: Path) -> None:
    """Give the hidden folder its name; one that is there moves aside first and then goes."""
    aside = None
    if target.exists():
        aside = target.with_name(temporary_name(target))
        target.rename(aside)
    hidden.rename(target)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Make names durable; where folders cannot be flushed, the files are in place nevertheless."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
