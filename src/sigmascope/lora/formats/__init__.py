"""LoRA files: read in every known format, written in any of them."""

from sigmascope.lora.formats.base import FormatName, LoraFormat
from sigmascope.lora.formats.opening import load_lora, open_lora
from sigmascope.lora.formats.registry import FORMATS, format_named
from sigmascope.lora.formats.saving import save_lora
from sigmascope.lora.formats.writer import LoraWriter

__all__ = [
    "FORMATS",
    "FormatName",
    "LoraFormat",
    "LoraWriter",
    "format_named",
    "load_lora",
    "open_lora",
    "save_lora",
]
