"""Files of weights: read lazily, written whole or not at all, their headers and fingerprints."""

from sigmascope.checkpoints.checkpoint import (
    Checkpoint,
    TensorInfo,
    checkpoint_fingerprint,
    file_sha256,
    tensor_fingerprint,
)
from sigmascope.checkpoints.reader import open_checkpoint, shard_of
from sigmascope.checkpoints.rounding import Rounding, Spread, numbers_of, plain_rounding
from sigmascope.checkpoints.safetensors import (
    SafetensorsHeader,
    SizeWriter,
    StreamingWriter,
    TensorEntry,
    read_header,
    save_safetensors,
)
from sigmascope.checkpoints.torch_writer import StreamingTorchWriter, TensorSpec, save_torch
from sigmascope.files import atomic_path

__all__ = [
    "Checkpoint",
    "Rounding",
    "SafetensorsHeader",
    "SizeWriter",
    "Spread",
    "StreamingTorchWriter",
    "StreamingWriter",
    "TensorEntry",
    "TensorInfo",
    "TensorSpec",
    "atomic_path",
    "checkpoint_fingerprint",
    "file_sha256",
    "numbers_of",
    "open_checkpoint",
    "plain_rounding",
    "read_header",
    "save_safetensors",
    "save_torch",
    "shard_of",
    "tensor_fingerprint",
]
