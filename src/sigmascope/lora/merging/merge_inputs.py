"""The LoRA files that go into a merge: what is said of them in reports and headers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sigmascope.checkpoints import file_sha256
from sigmascope.lora.file import LoraFile
from sigmascope.lora.paths import as_text


@dataclass(frozen=True, slots=True)
class InputLora:
    """One LoRA that went in.

    Attributes:
        path: As given.
        weight: What its change was multiplied with.
        format: `native`, `kohya`, `peft` or `comfyui`.
        modules: How many it has.
        file_bytes: Size of its file.
    """

    path: Path
    weight: float
    format: str
    modules: int
    file_bytes: int

    @classmethod
    def of(cls, lora: LoraFile, path: Path, weight: float = 1.0) -> "InputLora":
        """Describe an open LoRA; `path` is the one given, which may be a folder."""
        return cls(path, weight, lora.format, len(lora.names), (lora.path or path).stat().st_size)


def merged_from(files: Sequence[Path], weights: Sequence[float]) -> str:
    """What was merged, as JSON for a header: names, weights, and hashes by which the files can be found again."""
    return json.dumps(
        [
            {"file": as_text(file.name), "weight": weight, "sha256": file_sha256(file)}
            for file, weight in zip(files, weights, strict=True)
        ]
    )
