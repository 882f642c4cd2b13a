"""One training checkpoint on the disk: a folder of safetensors and JSON that appears whole or not at all.

    checkpoint-000500/
        weights.safetensors     what is trained
        average.safetensors     its moving average, when there is one
        state.safetensors       tensors of optimizer, schedule, gradient scaler and random generators
        state.json              everything else, and size and checksum of the files above

It is written under a hidden name, flushed to the disk and renamed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError
from sigmascope.lbm.training.state_packing import unpack
from sigmascope.records.os_errors import reason_of

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


def _check_file(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = file_facts(path)
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


def file_facts(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, as `state.json` keeps them."""
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
