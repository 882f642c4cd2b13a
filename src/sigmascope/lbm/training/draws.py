"""What is drawn at random for one sample: its own generator, so that draws do not depend on how batches are cut.

A sample's draws follow from the run's seed, the epoch and the sample's number in the epoch's stream. Two processes
of batch b then see exactly what one process of batch 2b sees, and a resumed run what an uninterrupted one sees.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.training_terms import sample_sigmas

Purpose = Literal["bridge", "crop"]
"""Each has a stream of its own: that a crop is drawn or not leaves the noise as it is."""


def generator_for(seed: int, epoch: int, number: int, purpose: Purpose) -> torch.Generator:
    """A CPU generator for one sample and purpose.

    The numbers are hashed (BLAKE2b), because PyTorch's Mersenne Twister gives related streams for related seeds and
    uses 32 bits of them.
    """
    message = struct.pack("<QQQ", seed, epoch, number) + purpose.encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def generators_for(seed: int, epoch: int, numbers: Sequence[int], purpose: Purpose) -> list[torch.Generator]:
    """One for each sample; see `generator_for`."""
    return [generator_for(seed, epoch, number, purpose) for number in numbers]


def draw_bridge(
    generators: Sequence[torch.Generator], latent_shape: Sequence[int], config: LbmConfig
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch channels height width"]]:
    """Draw σ by the config's `timestep_sampling`, then ε ~ N(0, I), for each sample (float32, CPU).

    Args:
        generators: One for each sample.
        latent_shape: (channels, height, width) of one latent.
        config: Of the model.
    """
    sigmas, noises = [], []
    for generator in generators:
        sigmas.append(sample_sigmas(1, config, generator))
        noises.append(torch.randn(tuple(latent_shape), generator=generator))
    return torch.cat(sigmas), torch.stack(noises)


def draw_offset(generator: torch.Generator, length: int, part: int) -> int:
    """Where a part of a length begins, every place alike."""
    return int(torch.randint(0, length - part + 1, (), generator=generator))
