"""Options that several `lora` commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Precision(StrEnum):
    """`--save_precision`."""

    FLOAT = "float"
    FP16 = "fp16"
    BF16 = "bf16"


class ExtractFormat(StrEnum):
    """`--format` of an extraction."""

    AUTO = "auto"
    NATIVE = "native"
    KOHYA = "kohya"
    PEFT = "peft"
    COMFYUI = "comfyui"


class TargetCoverage(StrEnum):
    """`--target_coverage`."""

    FULL = "full"
    ATTENTION = "attention"
    EXTENDED = "extended"


BasePath = Annotated[
    Path,
    typer.Option(
        "--base_model_path",
        help="Checkpoint that the LoRA is put on.",
        show_default=False,
    ),
]
TunedPath = Annotated[
    Path,
    typer.Option("--tuned_model_path", help="Fine-tuned checkpoint.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every layer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]
