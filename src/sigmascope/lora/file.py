"""A LoRA in memory: what every format is read into and written from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sigmascope.lora.factors import LoraFactors


@dataclass(frozen=True, eq=False)
class LoraFile:
    """The weight changes of one LoRA, and where they come from.

    Attributes:
        modules: Factors by module path, without ".weight" and with the checkpoint's own prefix, such as
            "denoiser.down_blocks.0.resnets.0.conv1".
        metadata: The header's strings.
        path: The file it was read from, if any.
        format: Name of the format it was read from: "native".
        unused_keys: Keys of the file that are no part of any module here, so that nothing is dropped unseen.
    """

    modules: Mapping[str, LoraFactors]
    metadata: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    format: str = "native"
    unused_keys: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of stored values, over all modules."""
        return sum(factors.parameters for factors in self.modules.values())

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank."""
        counts = Counter(factors.rank for factors in self.modules.values())
        return dict(sorted(counts.items()))

    def __len__(self) -> int:
        return len(self.modules)

    def __str__(self) -> str:
        """Name it as messages do: by its file where there is one."""
        return str(self.path) if self.path is not None else f"a LoRA of {len(self)} modules"
