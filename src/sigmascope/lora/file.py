"""A LoRA, in memory or still in its file: what every format is read into and written from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters.change import WeightChange
from sigmascope.lora.factors import LoraFactors

__all__ = ["LoraFile", "ModuleFacts", "WeightChange"]

if TYPE_CHECKING:
    Modules = Mapping[str, LoraFactors]
    Changes = Mapping[str, WeightChange]
else:  # a run-time check of the values would read them from the file
    Modules = Changes = Mapping


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
