"""The LoRA files that go into a merge: what is said of them in reports and headers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sigmascope.checkpoints import file_sha256
from sigmascope.errors import ConfigError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.paths import as_text, exists


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


def refuse_files(target: Path, files: Sequence[Path], flag: str = "--save_to") -> None:
    """Refuse a target that is one of the files that are read.

    Raises:
        ConfigError: With the flag and the file.
    """
    for file in files:
        if exists(target) and exists(file) and target.samefile(file):
            raise ConfigError(f"{flag} {target} is the input {file}.", hint="Choose another name.")


def merged_from(files: Sequence[Path], weights: Sequence[float]) -> str:
    """What was merged, as JSON for a header: names, weights, and hashes by which the files can be found again."""
    return json.dumps(
        [
            {"file": as_text(file.name), "weight": weight, "sha256": file_sha256(file)}
            for file, weight in zip(files, weights, strict=True)
        ]
    )
