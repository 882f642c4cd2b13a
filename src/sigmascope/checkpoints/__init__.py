"""Files of weights: lazy reading, atomic streaming writing, headers and fingerprints."""

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.fingerprint import checkpoint_fingerprint, file_sha256, tensor_fingerprint
from sigmascope.checkpoints.header import SafetensorsHeader, TensorEntry, read_header
from sigmascope.checkpoints.reader import open_checkpoint
from sigmascope.checkpoints.state import save_torch
from sigmascope.checkpoints.torch_archive import StreamingTorchWriter
from sigmascope.checkpoints.torch_description import TensorSpec
from sigmascope.checkpoints.writer import StreamingWriter, save_safetensors
from sigmascope.records.atomic import atomic_path

__all__ = [
    "Checkpoint",
    "SafetensorsHeader",
    "StreamingTorchWriter",
    "StreamingWriter",
    "TensorEntry",
    "TensorInfo",
    "TensorSpec",
    "atomic_path",
    "checkpoint_fingerprint",
    "file_sha256",
    "open_checkpoint",
    "read_header",
    "save_safetensors",
    "save_torch",
    "tensor_fingerprint",
]
