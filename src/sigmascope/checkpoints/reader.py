"""Open weights, whatever file or folder they are in."""

import difflib
import os
from pathlib import Path

from sigmascope.checkpoints.checkpoint import Checkpoint
from sigmascope.checkpoints.paths import is_existing, is_folder, is_regular_file, names_in, reading
from sigmascope.checkpoints.pickle_file import PickleCheckpoint
from sigmascope.checkpoints.safetensors_file import SafetensorsCheckpoint
from sigmascope.checkpoints.sharded import ShardedCheckpoint
from sigmascope.checkpoints.sniff import HEAD_BYTES, foreign_file_error, sniff
from sigmascope.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_USUAL_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open weights for reading one tensor at a time.

    Args:
        path: A `.safetensors` file, a `*.safetensors.index.json`, a folder that holds either, or a
            PyTorch checkpoint (`.ckpt`, `.pt`, `.pth`, `.bin`; weights only, code in it is never run).

    Returns:
        The opened checkpoint: use it in a `with` block.

    Raises:
        CheckpointError: There is no such file, or it is damaged or something else.
        UnsafeCheckpointError: A PyTorch checkpoint that asks to run code.
    """
    file = Path(path)
    if is_folder(file):
        file = _weights_in(file)
    if not is_existing(file):
        raise _missing(file)
    if not is_regular_file(file):
        raise CheckpointError(file, "is not a regular file.", hint="Name a file of weights.")
    if file.name.endswith(".json"):
        return ShardedCheckpoint(file)
    if file.suffix.lower() in PICKLE_SUFFIXES:
        return _open_pickle(file)
    return SafetensorsCheckpoint(file)


def _open_pickle(file: Path) -> Checkpoint:
    with reading(file), file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise CheckpointError(file, "is empty.", hint="Download it again or make it anew.")
    kind = sniff(head)
    if kind == "safetensors":  # misnamed, and harmless
        return SafetensorsCheckpoint(file)
    if kind not in {"zip", "pickle"}:
        foreign = foreign_file_error(file, kind, "a PyTorch checkpoint")
        if foreign is not None:
            raise foreign
    return PickleCheckpoint(file)


def _weights_in(folder: Path) -> Path:
    """The one file of weights that a folder is about."""
    names = [name for name in names_in(folder) if not name.startswith(".")]
    for usual in _USUAL_NAMES:
        if usual in names:
            return folder / usual
    for candidates in (
        [name for name in names if name.endswith(INDEX_SUFFIX)],
        [name for name in names if name.endswith(".safetensors")],
        [name for name in names if name.endswith(PICKLE_SUFFIXES)],
    ):
        if len(candidates) == 1:
            return folder / candidates[0]
        if candidates:
            raise CheckpointError(
                folder,
                f"has {len(candidates)} files of weights.",
                hint=f"Name one of them: {', '.join(candidates[:8])}.",
            )
    raise CheckpointError(folder, "is a folder without weights.", hint=_subfolder_hint(folder))


def _subfolder_hint(folder: Path) -> str:
    inside = [name for name in names_in(folder) if _has_safetensors(folder / name)]
    if inside:
        return f"Its folders {', '.join(inside[:8])} have some: name one of them."
    return "Name a .safetensors file, an index, or a .ckpt."


def _has_safetensors(child: Path) -> bool:
    try:
        return is_folder(child) and any(name.endswith(".safetensors") for name in names_in(child))
    except CheckpointError:
        return False  # one that may not be entered is no help as a hint


def _missing(file: Path) -> CheckpointError:
    if not is_folder(file.parent):
        message = f"does not exist: there is no folder {file.parent}."
        return CheckpointError(file, message, hint="Check the path.")
    try:
        siblings = names_in(file.parent)
    except CheckpointError:  # a folder that may be entered but not listed
        siblings = []
    near = difflib.get_close_matches(file.name, siblings, n=3, cutoff=0.5)
    hint = f"Nearest names there: {', '.join(near)}." if near else "Check the path."
    return CheckpointError(file, "does not exist.", hint=hint)
