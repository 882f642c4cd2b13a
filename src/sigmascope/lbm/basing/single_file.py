"""The names of a single-file Stable Diffusion checkpoint, put into diffusers' by diffusers' own converter.

The converter wants a state dict. It is given one that takes no memory: each tensor is one number, the tensor's
place in the file, expanded to the shape that the file has. Where a number comes out is the new name, and the
shape that it comes out with is the one that diffusers' model has.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.config import LbmConfig

UNET: Final = "model.diffusion_model."
VAE: Final = "first_stage_model."
_LOSS: Final = "first_stage_model.loss."  # of the VAE's own training; some files carry it

Found = Mapping[str, tuple[str, tuple[int, ...]]]
"""Key in the file and shape, by diffusers' name."""


@dataclass(frozen=True, slots=True)
class SingleFileNames:
    """What a single file holds.

    Attributes:
        parts: Of `unet` and `vae`, what was found. What the converter does not know keeps its own name.
        outside: Number of other tensors by the first part of their names, such as the text encoders'.
    """

    parts: Mapping[str, Found]
    outside: Mapping[str, int]


def read_names(checkpoint: Checkpoint, config: LbmConfig) -> SingleFileNames:
    """Name the UNet's and the VAE's tensors as diffusers does.

    Args:
        checkpoint: Open.
        config: Of the LBM: how many layers its blocks have.

    Raises:
        CheckpointError: There is no UNet or no VAE under SDXL's names.
        ConfigError: The config's blocks differ in their layers, which such files cannot.
    """
    keys = checkpoint.keys()
    parts = {
        "unet": [key for key in keys if key.startswith(UNET)],
        "vae": [key for key in keys if key.startswith(VAE) and not key.startswith(_LOSS)],
    }
    for part, prefix in (("unet", UNET), ("vae", VAE)):
        if not parts[part]:
            raise CheckpointError(
                checkpoint.path,
                f"holds no tensors named {prefix}*, so no {part} of a single-file checkpoint.",
                hint="Give a whole SDXL checkpoint, or a diffusers folder that holds unet and vae.",
            )
    inside = {*parts["unet"], *parts["vae"]}
    return SingleFileNames(
        {
            "unet": _converted(checkpoint, parts["unet"], UNET, *_unet_converter(parts["unet"], config)),
            "vae": _converted(checkpoint, parts["vae"], VAE, *_vae_converter(config)),
        },
        dict(Counter(key.partition(".")[0] for key in keys if key not in inside)),
    )


def _converted(
    checkpoint: Checkpoint,
    keys: list[str],
    prefix: str,
    convert: Callable[..., dict[str, Tensor]],
    config: dict[str, Any],
) -> Found:
    placeholders = {
        key: torch.tensor(number).expand(checkpoint.info(key).shape) for number, key in enumerate(keys)
    }
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, placeholder in convert(dict(placeholders), config).items():
        key = keys[int(placeholder.flatten()[0])]
        if placeholder.numel() == placeholders[key].numel():  # the whole tensor, and not a slice of it
            found[name] = key, tuple(placeholder.shape)
    known = {key for key, _ in found.values()}
    for key in keys:  # what is left over must not be lost unseen
        if key not in known:
            found[key.removeprefix(prefix)] = key, checkpoint.info(key).shape
    return found


def _unet_converter(
    keys: list[str], config: LbmConfig
) -> tuple[Callable[..., dict[str, Tensor]], dict[str, Any]]:
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    layers = config.denoiser.layers_per_block
    each = {layers} if isinstance(layers, int) else set(layers)
    if len(each) > 1:
        raise ConfigError(
            f"denoiser.layers_per_block: a single-file backbone has as many in every block, got {layers}.",
            hint="Give the backbone as a diffusers folder.",
        )
    has_added_embedding = any(key.startswith(f"{UNET}label_emb.") for key in keys)
    return convert_ldm_unet_checkpoint, {
        "layers_per_block": each.pop(),
        "addition_embed_type": "text_time" if has_added_embedding else None,
    }


def _vae_converter(config: LbmConfig) -> tuple[Callable[..., dict[str, Tensor]], dict[str, Any]]:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    blocks = len(config.vae.block_out_channels)
    return convert_ldm_vae_checkpoint, {
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
    }
