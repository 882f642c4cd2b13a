"""Names of the LoRA formats, which commands and types need without PyTorch; what they are is in `formats`."""

from typing import Literal

FormatName = Literal["native", "kohya", "peft", "comfyui"]
ExtractFormat = Literal["auto", FormatName]
"""`--format` of an extraction."""
