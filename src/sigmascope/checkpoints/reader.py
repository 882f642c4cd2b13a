"""Open weights, whatever file or folder they are in."""

import difflib
import os
from pathlib import Path

from sigmascope.checkpoints.checkpoint import Checkpoint
from sigmascope.checkpoints.dequantised import dequantised
from sigmascope.checkpoints.gguf_file import GgufCheckpoint
from sigmascope.checkpoints.paths import is_existing, is_folder, is_regular_file, names_in, reading
from sigmascope.checkpoints.pickle_file import PickleCheckpoint
from sigmascope.checkpoints.pipeline_folder import MODEL_INDEX, no_such_variant, open_pipeline
from sigmascope.checkpoints.safetensors_file import SafetensorsCheckpoint
from sigmascope.checkpoints.sharded import ShardedCheckpoint
from sigmascope.checkpoints.sniff import HEAD_BYTES, foreign_file_error, sniff
from sigmascope.checkpoints.weight_files import PICKLE_SUFFIXES, only_file, weight_files
from sigmascope.errors import CheckpointError


def open_checkpoint(
    path: str | os.PathLike[str], *, variant: str | None = None, dequantise: bool = True
) -> Checkpoint:
    """Open weights for reading one tensor at a time.

    Args:
        path: A `.safetensors` file, a `*.safetensors.index.json`, a `.gguf` file, a PyTorch checkpoint (`.ckpt`,
            `.pt`, `.pth`, `.bin`; weights only, code in it is never run), a folder that holds one of them, or a
            diffusers folder, whose components are opened as one with keys `<component>.<key>`.
        variant: Of a folder that has several: `fp16` for `*.fp16.safetensors`. Without it the plain file is read,
            else of fp32, bf16 and fp16 the first that is there.
        dequantise: Give quantised weights as the numbers that they stand for; see `Checkpoint.dequantised`.
            Without it codes and scales are given as they lie in the file (a GGUF file's are dequantised always).

    Returns:
        The opened checkpoint: use it in a `with` block.

    Raises:
        CheckpointError: There is no such file or variant, it is damaged or something else, or quantised in a way
            that cannot be undone here.
        UnsafeCheckpointError: A PyTorch checkpoint that asks to run code.
    """
    opened = _open(Path(path), variant)
    if not dequantise:
        return opened
    try:
        return dequantised(opened)
    except BaseException:
        opened.close()
        raise


def _open(path: Path, variant: str | None) -> Checkpoint:
    if not is_folder(path):
        return _open_file(path)
    if is_regular_file(path / MODEL_INDEX):
        return open_pipeline(path, variant, _open_file)
    files = weight_files(path)
    if variant is not None and variant not in files.by_variant:
        raise no_such_variant(path, variant, files.variants)
    return _open_file(files.choose(variant) or only_file(path))


def _open_file(file: Path) -> Checkpoint:
    if not is_existing(file):
        raise _missing(file)
    if not is_regular_file(file):
        raise CheckpointError(file, "is not a regular file.", hint="Name a file of weights.")
    if file.name.endswith(".json"):
        return ShardedCheckpoint(file)
    suffix = file.suffix.lower()
    if suffix == ".gguf":
        return GgufCheckpoint(file)
    return _open_pickle(file) if suffix in PICKLE_SUFFIXES else SafetensorsCheckpoint(file)


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
