"""Open a LoRA file for reading one module at a time, or read it whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.entries import Entry, entries_of
from sigmascope.lora.formats.keys import group_keys
from sigmascope.lora.formats.lazy import LazyMapping
from sigmascope.lora.formats.peft_config import PeftConfigs, read_configs
from sigmascope.lora.formats.reading import EntryReader
from sigmascope.lora.formats.registry import recognised
from sigmascope.lora.formats.scales import EntryScales
from sigmascope.lora.paths import exists


@contextmanager
def open_lora(
    path: str | Path, *, check_finite: bool = True, keep_float8: bool = False
) -> Iterator[LoraFile]:
    """Open a LoRA file of any known format for reading one module at a time.

    Names, shapes and ranks come from the header alone; a module's tensors are read each time it is asked for.

    Args:
        path: A safetensors file, a `.pt`/`.ckpt` of tensors only, or a folder that holds one.
        check_finite: Whether a module that holds NaN or Inf is refused when it is read.
        keep_float8: Whether float8 factors stay so. PyTorch does not calculate in float8, so they come as
            float32 else, which loses nothing.

    Yields:
        The LoRA; its modules can be read inside the block only.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, it holds changes of a kind that is not read (OFT,
            BOFT, GLoRA, IA³, …), or its tensors do not fit together.
        NonFiniteError: When a module is read: a tensor holds NaN or Inf.
    """
    exists(Path(path))  # refuses what the system will not look at; a missing file is named when it is opened
    with open_checkpoint(path) as checkpoint:
        yield _lazy_file(checkpoint, check_finite=check_finite, keep_float8=keep_float8)


def load_lora(path: str | Path) -> LoraFile:
    """Read a LoRA file of any known format into memory; see `open_lora`.

    Raises:
        NonFiniteError: A factor holds NaN or Inf.
    """
    with open_lora(path) as lora:
        return LoraFile(
            modules=dict(lora.modules),
            metadata=lora.metadata,
            path=lora.path,
            format=lora.format,
            unused_keys=lora.unused_keys,
            changes=dict(lora.changes),
        )


def _lazy_file(checkpoint: Checkpoint, *, check_finite: bool, keep_float8: bool) -> LoraFile:
    found = group_keys(checkpoint.path, checkpoint.keys())
    lora_format = recognised(checkpoint, found)
    configs = (
        read_configs(checkpoint.path, checkpoint.metadata) if lora_format.name == "peft" else PeftConfigs()
    )
    reader = EntryReader(checkpoint, EntryScales(checkpoint, configs), check_finite, keep_float8)
    entries = entries_of(checkpoint.path, found)
    _refuse_twice(checkpoint.path, entries)
    facts = {entry.name: reader.facts(entry) for entry in entries}
    return LoraFile(
        modules=LazyMapping({entry.name: entry for entry in entries if entry.is_plain}, reader.factors),
        metadata=dict(checkpoint.metadata),
        path=checkpoint.path,
        format=lora_format.name,
        unused_keys=(*found.unused, *checkpoint.skipped),
        changes=LazyMapping({entry.name: entry for entry in entries if not entry.is_plain}, reader.change),
        facts=facts,
    )


def _refuse_twice(path: Path, entries: Sequence[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise LoraFormatError(
                f"{path}: two tensors change {entry.name}.",
                hint="Which of them is meant cannot be told: make the file again.",
            )
        seen.add(entry.name)
