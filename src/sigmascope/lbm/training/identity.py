"""Which settings a training's result follows from: resuming under other ones would mix two trainings."""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lbm.training.settings import TrainSettings

FREE: Final = frozenset(
    {
        "backbone_signature",
        "save_ckpt_path",
        "device",
        "gradient_checkpointing",
        "allow_pipe",
        "log_interval",
        "save_interval",
        "keep_checkpoints",
        "validation_shards",
        "validation_interval",
        "validation_samples",
        "num_steps",
        "wandb_project",
        "report_to",
        "output_formats",
        "save_precision",
        "max_epochs",
        "max_steps",
    }
)
"""Settings that may change between a checkpoint and the run that resumes it; all others must agree."""
_NAMES_OF_FILES: Final = frozenset({"train_shards", "base_model_path", "lora_weights_path"})
_OF_A_STEP: Final = ("batch_size", "gradient_accumulation_steps", "processes")
"""Their product is the number of samples in an optimizer step."""
_SAMPLED_BYTES: Final = 2**20


def identity(
    settings: TrainSettings, shards: Sequence[str], processes: int, schedule_steps: int | None
) -> dict[str, Any]:
    """Describe a training by what its result follows from, as JSON values.

    Files are told by name, size and a part of their content, so that a folder may be moved.

    Args:
        settings: Of the run.
        shards: What `train_shards` stands for, in order.
        processes: How many share the data.
        schedule_steps: Length of the learning-rate schedule, where it has one.
    """
    values = settings.model_dump(mode="json", exclude=set(FREE | _NAMES_OF_FILES))
    values["train_shards"] = [_shard(shard) for shard in shards]
    values["base_model_path"] = _weights(settings.base_model_path)
    start = settings.lora_weights_path
    values["lora_weights_path"] = None if start is None else _weights(start)
    values["processes"] = processes
    values["schedule_steps"] = schedule_steps
    return values


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to resume a training that was another one.

    The number of processes may change where a step has as many samples as before.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    different = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if "processes" in different and _step_samples(before) == _step_samples(now):
        different = [key for key in different if key not in _OF_A_STEP]
    if different:
        listed = "; ".join(
            f"{key}: {_short(before.get(key))} then, {_short(now.get(key))} now" for key in different
        )
        raise ConfigError(
            f"{checkpoint}: was trained with other settings ({listed}).",
            hint="Set them back, choose another save_ckpt_path, or start anew with --no_resume.",
        )


def _step_samples(values: Mapping[str, Any]) -> int:
    return math.prod(values[key] for key in _OF_A_STEP)


def _shard(shard: str) -> list[Any]:
    path = Path(shard)
    return [path.name, path.stat().st_size] if path.is_file() else [shard, None]


def _weights(path: Path) -> list[Any]:
    """Name, bytes and the first tensors' fingerprint: reading all of a large base would take minutes."""
    digest = hashlib.blake2b(digest_size=8)
    with open_checkpoint(path) as checkpoint:
        files = list(checkpoint.files)
        for file in files:
            digest.update(_head_and_tail(file))
    return [Path(path).name, sum(file.stat().st_size for file in files), digest.hexdigest()]


def _head_and_tail(file: Path) -> bytes:
    with file.open("rb") as stream:
        head = stream.read(_SAMPLED_BYTES)
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _SAMPLED_BYTES))
        return head + stream.read(_SAMPLED_BYTES)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
