"""What a LoRA file format has to provide. Each format is one module beside this one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile


@dataclass(frozen=True)
class LoraFormat:
    """One way to name a LoRA's tensors in a file.

    Attributes:
        name: As in `LoraFile.format`.
        recognises: Whether a file with these keys is of this format.
        read: The whole LoRA of an open file.
        module_tensors: The tensors of one module by key, so that a writer can stream module by module.
        metadata: The header that readers of this format expect for these modules.
    """

    name: str
    recognises: Callable[[Sequence[str]], bool]
    read: Callable[[Checkpoint], LoraFile]
    module_tensors: Callable[[str, LoraFactors], dict[str, Tensor]]
    metadata: Callable[[Mapping[str, LoraFactors]], dict[str, str]]
