"""Every exception that Sigmascope raises on purpose.

SigmascopeError
    ├── FileError                 names the file
    │   ├── CheckpointError       a weights file that cannot be read as it claims to be
    │   │   └── UnsafeCheckpointError   a pickle that would run code
    │   ├── WriteError            the target cannot be written; it is as it was before
    │   └── RecordError           a saved run that cannot be read
    │       └── NewerSchemaError  written by a later version
    ├── StoreError                the store of runs is not there, locked, full, damaged, or of a later version
    │   ├── NoSuchRunError        it has no such run
    │   └── OtherRunError         another run in it has the same id
    ├── ConfigError               a YAML or option that does not make sense
    ├── DataError                 training data that cannot be used
    ├── OtherProcessError         another process of the same training failed or ended
    ├── ModelMismatchError        base, tuned model and LoRA do not belong together
    ├── LoraFormatError           a LoRA file whose keys or shapes are not understood
    ├── NonFiniteError            NaN or Inf where weights should be, or in what a VAE made
    ├── OptimizationError         a choice that could not be applied to a pipeline, or not be undone
    ├── EveryStrategyFailedError  memory ran out in every way that was tried (a MemoryError too)
    └── UnknownStageError         a run has no stage of that name (a KeyError too)

Each says what happened (with file, key, expected and actual) and gives a hint: the next step. Both may quote names
from files, so control characters are replaced.
The command line prints both and exits with `exit_code`.
"""

from pathlib import Path
from typing import Any, Final

from sigmascope.plain_text import printable

STOPPED_BY_USER: Final = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as shells report it."""
_LONGEST_LINE = 4000  # characters of a message


class SigmascopeError(Exception):
    """Base of all errors that a user can act on.

    Args:
        message: What is wrong, naming the file, the key or the flag.
        hint: What to do next, as one imperative sentence.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        if len(message) > _LONGEST_LINE:  # a file may hold a name of any length
            lines = message.split("\n")
            message = "\n".join(
                line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines
            )
        message = printable(message)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else printable(hint)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class FileError(SigmascopeError):
    """Something is wrong with one file; `path` says which."""

    def __init__(self, path: str | Path, message: str, *, hint: str | None = None) -> None:
        in_one_line = str(path).replace("\n", "\N{REPLACEMENT CHARACTER}")
        super().__init__(f"{in_one_line}: {message}", hint=hint)
        self.path = Path(path)


class CheckpointError(FileError):
    """A weights file is missing, truncated, corrupt, or lacks a key."""


class UnsafeCheckpointError(CheckpointError):
    """A pickle asks for more than tensors and plain containers, so it is not loaded."""


class WriteError(FileError):
    """The target cannot be written. It is left as it was, and no temporary file stays."""


class RecordError(FileError):
    """A saved run is damaged or is not a run."""


class NewerSchemaError(RecordError):
    """A saved run was written by a later version of Sigmascope."""


class StoreError(SigmascopeError):
    """The store of runs cannot be used, or does not have what was asked for."""


class NoSuchRunError(StoreError):
    """The store works, but no single run in it is the one that was asked for."""


class OtherRunError(StoreError):
    """The store holds another run with the same id."""


class ConfigError(SigmascopeError):
    """A configuration value or a combination of options is wrong."""

    exit_code = 2


class DataError(SigmascopeError):
    """Training data cannot be used: one sample, or all of them."""


class OtherProcessError(SigmascopeError):
    """Another process of the same training failed or ended, so this one cannot go on."""


class ModelMismatchError(SigmascopeError):
    """Two sets of weights do not belong together (keys or shapes differ)."""


class LoraFormatError(SigmascopeError):
    """A LoRA's keys, shapes or metadata are not understood."""


class NonFiniteError(SigmascopeError):
    """Weights, or what a VAE made, hold NaN or Inf; `record` is the `EncodingRecord` where a VAE made it."""

    def __init__(self, message: str, *, hint: str | None = None, record: Any = None) -> None:
        super().__init__(message, hint=hint)
        self.record = record


class OptimizationError(SigmascopeError):
    """A choice could not be applied to a pipeline, which is as it was, or cannot be undone."""


class EveryStrategyFailedError(SigmascopeError, MemoryError):
    """A VAE ran out of memory in every way that was tried; `record` (an `EncodingRecord`) says how each ended."""

    def __init__(self, message: str, *, record: Any, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.record = record


class UnknownStageError(SigmascopeError, KeyError):
    """A run holds no stage of the name asked for."""
