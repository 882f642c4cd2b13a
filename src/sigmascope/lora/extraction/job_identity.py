"""What makes two runs of an extraction the same job, so that one can go on where the other was killed."""

import json
from pathlib import Path

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint
from sigmascope.lora.extraction.options import ExtractOptions
from sigmascope.lora.extraction.provenance import BASE_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.formats.base import FormatName
from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.numerics.krylov import fast_dtype
from sigmascope.lora.paths import as_text


def job_identity(
    pair: CheckpointPair, options: ExtractOptions, device: torch.device, lora_format: FormatName
) -> str:
    """Text that is equal for equal inputs, options, software and kind of device.

    Files are told by place, size and time of change: reading them whole would take as long as the job. What else
    the file holds matters under a budget only: how much is left for a layer depends on it.
    """
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "inputs": [_files(side) for side in (pair.base, pair.tuned)],
        "layers": pair.layers,
        "ranks": options.asked_rank,
        "precision": options.save_precision,
        "min_diff": options.min_diff,
        "coverage": options.target_coverage,
        "beside": [lora_format, options.biases_and_norms] if options.budget is not None else None,
    }
    return json.dumps(facts)


def _files(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    return [_file(file) for file in checkpoint.files]


def _file(path: Path) -> tuple[str, int, int]:
    facts = path.stat()
    return str(path.resolve()), facts.st_size, facts.st_mtime_ns


def _processor() -> str:
    """The instructions that decide how it rounds."""
    return f"cpu {torch.backends.cpu.get_cpu_capability()} {fast_dtype(torch.device('cpu'))}"


def extraction_metadata(pair: CheckpointPair, options: ExtractOptions) -> dict[str, str]:
    """Where an extracted LoRA comes from, for its header.

    No time of day is in it, so that the same inputs give the same file, byte for byte.
    """
    return {
        "sigmascope_version": __version__,
        "sigmascope_base": as_text(pair.base.path.name),
        "sigmascope_tuned": as_text(pair.tuned.path.name),
        BASE_FINGERPRINT: denoiser_fingerprint(pair.base),
        "sigmascope_tuned_fingerprint": denoiser_fingerprint(pair.tuned),
        "sigmascope_rank": options.asked_rank,
        "sigmascope_target_coverage": options.target_coverage,
        "sigmascope_min_diff": repr(options.min_diff),
    }
