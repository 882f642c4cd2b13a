"""What a LoRA file says of its making, and whether a base is the one that it was made from."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Final

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, tensor_fingerprint
from sigmascope.lora.formats.native import native_metadata
from sigmascope.lora.layer_names import DENOISER, in_coverage
from sigmascope.lora.options import ExtractOptions
from sigmascope.lora.pairs import CheckpointPair
from sigmascope.lora.ranks import FixedRank
from sigmascope.lora.shapes import is_convolution

BASE_FINGERPRINT: Final = "sigmascope_base_fingerprint"
_SMALL_BYTES: Final = 64 * 1024


def denoiser_fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a denoiser by its small tensors: biases, norms, and the convolutions at both ends.

    Hashing all of a full-size file would take longer than extracting from it. Training that touches every
    layer changes these too, so two checkpoints of one training are told apart.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for key in sorted(checkpoint.keys()):
        if key.startswith(DENOISER) and checkpoint.info(key).nbytes <= _SMALL_BYTES:
            digest.update(f"{key}\n{tensor_fingerprint(checkpoint.tensor(key))}\n".encode())
    return digest.hexdigest()


def extraction_metadata(pair: CheckpointPair, options: ExtractOptions) -> dict[str, str]:
    """The header of an extracted LoRA: the format's fields and where the LoRA comes from.

    No time of day is in it, so that the same inputs give the same file, byte for byte.
    """
    policy = FixedRank(options.rank, options.conv_rank)
    shapes = [pair.shape(layer) for layer in pair.layers if in_coverage(layer, options.target_coverage)]
    header = native_metadata(
        _most_common(policy.rank_for(shape) for shape in shapes if not is_convolution(shape)),
        _most_common(policy.rank_for(shape) for shape in shapes if is_convolution(shape)),
    )
    return header | {
        "sigmascope_version": __version__,
        "sigmascope_base": pair.base.path.name,
        "sigmascope_tuned": pair.tuned.path.name,
        BASE_FINGERPRINT: denoiser_fingerprint(pair.base),
        "sigmascope_tuned_fingerprint": denoiser_fingerprint(pair.tuned),
        "sigmascope_rank": str(options.rank),
        "sigmascope_conv_rank": str(options.conv_rank),
        "sigmascope_target_coverage": options.target_coverage,
        "sigmascope_min_diff": repr(options.min_diff),
    }


def _most_common(ranks: Iterable[int]) -> int | None:
    counts = Counter(ranks).most_common(1)
    return counts[0][0] if counts else None
