"""A LoRA, in memory or still in its file, and the checks of the paths that users give.

A `LoraFile` is what every format is read into and written from; a `LazyMapping` reads its modules when they are
asked for. The paths that users give may be too long, lead into folders that cannot be entered, or be no text in
UTF-8; `exists`, `as_text`, `check_target` and the refusals handle that.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import CheckpointError, ConfigError, LoraFormatError, WriteError
from sigmascope.files import require_writable
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors

__all__ = ["LoraFile", "ModuleFacts", "WeightChange"]


if TYPE_CHECKING:
    Modules = Mapping[str, LoraFactors]
    Changes = Mapping[str, WeightChange]
else:  # a run-time check of the values would read them from the file
    Modules = Changes = Mapping

Key = TypeVar("Key")
Value = TypeVar("Value")


class ModuleFacts(NamedTuple):
    """What is known of a module without reading it.

    Attributes:
        kind: `lora` for plain factors, else as `WeightChange.kind`.
        weight_shape: Shape of the weight that it changes, as far as its tensors tell.
        rank: Of its factors; None where it has none.
        parameters: Number of stored values.
    """

    kind: str
    weight_shape: tuple[int, ...]
    rank: int | None
    parameters: int


@dataclass(frozen=True, eq=False)
class LoraFile:
    """The weight changes of one LoRA, and where they come from.

    Attributes:
        modules: Plain factors by module, as the file names it but for the ends of its keys:
            "denoiser.conv_in" in native naming, "lora_unet_conv_in" in kohya's.
        changes: The changes that are more than up·down, by the tensor they change without ".weight":
            "denoiser.conv_in" for the weight, "denoiser.conv_in.bias" for the bias. No name is in both.
        metadata: The header's strings.
        path: The file it was read from, if any.
        format: Name of the format it was read from: "native", "kohya", "peft" or "comfyui".
        unused_keys: Keys of the file that are no part of any module here, so that nothing is dropped unseen.
        facts: Of each module and change that is still in its file; empty for a LoRA in memory.
    """

    modules: Modules
    metadata: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    format: str = "native"
    unused_keys: tuple[str, ...] = ()
    changes: Changes = field(default_factory=dict)
    facts: Mapping[str, ModuleFacts] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all modules, then of all changes."""
        return (*self.modules, *self.changes)

    @property
    def parameters(self) -> int:
        """Number of stored values, over all modules and changes."""
        return sum(self.facts_of(name).parameters for name in self.names)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank. Changes do not count."""
        counts = Counter(self.facts_of(name).rank or 0 for name in self.modules)
        return dict(sorted(counts.items()))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of the weight that a module or change is for, without reading it from its file.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        return self.facts_of(name).weight_shape

    def rank_of(self, name: str) -> int | None:
        """Rank of a module, without reading it; None for a change that has none.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        return self.facts_of(name).rank

    def kind_of(self, name: str) -> str:
        """`lora` for plain factors, else the kind of change.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        return self.facts_of(name).kind

    def __len__(self) -> int:
        return len(self.modules)

    def __str__(self) -> str:
        """Name it as messages do: by its file where there is one."""
        return str(self.path) if self.path is not None else f"a LoRA of {len(self)} modules"

    def facts_of(self, name: str) -> ModuleFacts:
        """Kind, shape, rank and size of a module or change, without reading it.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        known = self.facts.get(name)
        if known is not None:
            return known
        if name in self.modules:
            factors = self.modules[name]
            return ModuleFacts("lora", factors.weight_shape, factors.rank, factors.parameters)
        if name in self.changes:
            change = self.changes[name]
            rank = getattr(change, "rank", None)
            return ModuleFacts(change.kind, change.weight_shape, rank, change.parameters)
        raise LoraFormatError(f"{self} has no module {name}.", hint="Choose one of its names.")


class LazyMapping(Mapping[str, Value], Generic[Key, Value]):
    """Values made anew at each access; iterating, counting and asking for a name make none.

    Args:
        sources: What each value is made from.
        read: Makes it.
    """

    def __init__(self, sources: Mapping[str, Key], read: Callable[[Key], Value]) -> None:
        self._sources = sources
        self._read = read

    def __getitem__(self, name: str) -> Value:
        return self._read(self._sources[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources


def exists(path: Path) -> bool:
    """Whether there is something at `path`.

    Raises:
        CheckpointError: The system will not say: no permission, a name too long, links in a ring.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(path, f"cannot be reached ({reason}).", hint="Check the path.") from error
    return True


def as_text(name: str | os.PathLike[str]) -> str:
    """A file name for texts in UTF-8: bytes of it that are no UTF-8 become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")


def check_target(save_to: Path, flag: str = "--save_to") -> None:
    """Refuse a target that is a folder, is not named as safetensors, or cannot be reached.

    Raises:
        ConfigError: With the flag and the file.
        WriteError: The folder cannot be made or entered, or what is there is no file that can be replaced.
    """
    try:
        exists(save_to)
        is_folder = save_to.is_dir()
    except (CheckpointError, OSError) as error:
        raise WriteError(
            save_to, "cannot be reached.", hint="Choose a folder that you may enter and a shorter name."
        ) from error
    if is_folder:
        raise ConfigError(
            f"{flag} {save_to} is a folder.", hint=f"Name a file in it: {save_to / 'lora.safetensors'}."
        )
    if save_to.suffix != ".safetensors":
        raise ConfigError(
            f"{flag} {save_to}: a LoRA is written as safetensors.",
            hint=f"Name it {save_to.stem}.safetensors.",
        )
    require_writable(save_to)


def refuse_inputs(target: Path, *models: Checkpoint, flag: str = "--save_to") -> None:
    """Refuse a target that is one of the files that an open model is read from.

    Raises:
        ConfigError: With the flag and the model.
    """
    for model in models:
        if any(exists(target) and exists(file) and target.samefile(file) for file in model.files):
            raise ConfigError(
                f"{flag} {target} is part of the input {model.path}.", hint="Choose another name."
            )


def refuse_files(target: Path, files: Sequence[Path], flag: str = "--save_to") -> None:
    """Refuse a target that is one of the files that are read.

    Raises:
        ConfigError: With the flag and the file.
    """
    for file in files:
        if exists(target) and exists(file) and target.samefile(file):
            raise ConfigError(f"{flag} {target} is the input {file}.", hint="Choose another name.")
