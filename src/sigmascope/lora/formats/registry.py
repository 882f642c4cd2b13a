"""Which LoRA formats there are."""

from typing import Final

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.formats.comfyui import COMFYUI
from sigmascope.lora.formats.keys import KeyGroups
from sigmascope.lora.formats.kohya import KOHYA
from sigmascope.lora.formats.native import NATIVE
from sigmascope.lora.formats.peft import PEFT

FORMATS: Final[tuple[LoraFormat, ...]] = (KOHYA, COMFYUI, PEFT, NATIVE)
"""In the order in which they are tried."""


def format_named(name: str) -> LoraFormat:
    """The format of that name.

    Raises:
        LoraFormatError: There is none.
    """
    for lora_format in FORMATS:
        if lora_format.name == name:
            return lora_format
    known = ", ".join(lora_format.name for lora_format in FORMATS)
    raise LoraFormatError(f"there is no LoRA format {name!r}.", hint=f"Use one of: {known}.")


def recognised(checkpoint: Checkpoint, found: KeyGroups) -> LoraFormat:
    """The format of an open file.

    Args:
        checkpoint: The file, for the message.
        found: Its keys.

    Raises:
        LoraFormatError: Its keys follow none.
    """
    for lora_format in FORMATS:
        if lora_format.recognises(found):
            return lora_format
    known = ", ".join(lora_format.name for lora_format in FORMATS)
    keys = checkpoint.keys()
    if not keys:
        raise LoraFormatError(
            f"{checkpoint.path}: it holds no tensors, so it is no LoRA.",
            hint="The tool that wrote it saved nothing: make the file again.",
        )
    raise LoraFormatError(
        f"{checkpoint.path}: its {len(keys)} keys are those of no known LoRA format. "
        f"First keys: {', '.join(keys[:3])}.",
        hint=f"Known formats: {known} (<module>.lora_up.weight and <module>.lora_down.weight, or lora_B and lora_A).",
    )
