"""The model that an LBM begins as: its UNet and VAE weights, wherever they lie, under the LBM's own keys.

They lie in a diffusers folder, in a single-file checkpoint with SDXL's own names, or in a repository of the
Hugging Face hub, of which nothing else is fetched.

Diffusers' own converter renames the tensors of a single file. It wants a state dict, and is given one that takes no
memory: each tensor is one number, the tensor's place in the file, expanded to the shape that the file has. Where
a number comes out is the new name, and the shape that it comes out with is the one that diffusers' model has.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.checkpoints.checkpoint import is_existing, is_folder
from sigmascope.checkpoints.reader import PICKLE_SUFFIXES
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.config import LbmConfig

PREFIXES = {"unet": "denoiser.", "vae": "vae.vae_model."}
"""Of the LBM's keys, by the folder of a diffusers model."""

_FILE_SUFFIXES = (".safetensors", ".gguf", ".json", *PICKLE_SUFFIXES)
"""A signature with one of these is a file, and no repository."""
_WEIGHTS_STEM = "diffusion_pytorch_model"
"""What diffusers calls the files of weights."""
_EARLIER_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_EARLIER_NAME = re.compile(r"(mid_block\.attentions\.0\.)(query|key|value|proj_attn)(\.\w+)")

UNET: Final = "model.diffusion_model."
VAE: Final = "first_stage_model."
_VAE_LOSS: Final = "first_stage_model.loss."  # of the VAE's own training; some files carry it


@dataclass(frozen=True, slots=True)
class BackboneWeight:
    """One weight of a backbone, read when it is needed.

    Attributes:
        checkpoint: The open file that holds it.
        key: Its name there.
        shape: As diffusers' models have it. Single files keep some Linear layers as 1×1 convolutions.
    """

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """As it is read."""
        return self.checkpoint.info(self.key).dtype

    def read(self) -> Tensor:
        """Read it into memory of its own."""
        return self.checkpoint.tensor(self.key).reshape(self.shape)


@dataclass(frozen=True)
class Backbone:
    """An open backbone.

    Attributes:
        path: The diffusers folder or the single file.
        weights: By the key that each has, or would have, in the LBM.
        outside: How many tensors of a single file are neither UNet nor VAE, by the first part of their names.
    """

    path: Path
    weights: Mapping[str, BackboneWeight]
    outside: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that is read, each once."""
        checkpoints = {id(weight.checkpoint): weight.checkpoint for weight in self.weights.values()}
        return tuple(file for checkpoint in checkpoints.values() for file in checkpoint.files)


@contextmanager
def open_backbone(signature: str | Path, config: LbmConfig, variant: str | None = None) -> Iterator[Backbone]:
    """Open a backbone for as long as the block runs; headers are read, tensors are not.

    Args:
        signature: A diffusers folder with `unet` and `vae`, a single-file checkpoint with SDXL's own names
            (`model.diffusion_model.*`, `first_stage_model.*`), or a repository of the Hugging Face hub.
        config: Of the LBM; it tells how many layers a block of a single file has.
        variant: Of a folder or repository, such as `fp16` for `*.fp16.safetensors`.

    Raises:
        ConfigError: It is not here and cannot be fetched, or the variant is asked of a single file.
        CheckpointError: It cannot be read, or holds no UNet or no VAE.
    """
    path = _locate(str(signature), variant)
    with ExitStack() as files:
        if is_folder(path):
            yield _from_folder(path, variant, files)
        elif variant is not None:
            raise ConfigError(
                f"--variant {variant}: {path} is a single file, which has no variants.", hint="Leave it out."
            )
        else:
            yield name_single_file(files.enter_context(open_checkpoint(path)), config)


def _locate(signature: str, variant: str | None) -> Path:
    if not signature.strip():
        raise ConfigError(
            "--backbone_signature: is empty.", hint="Leave it out to take the config's, or name a backbone."
        )
    local = Path(signature)
    if is_existing(local):
        return local
    if local.is_absolute() or signature.startswith(".") or signature.lower().endswith(_FILE_SUFFIXES):
        raise ConfigError(
            f"--backbone_signature {signature}: is not there.",
            hint="Give a diffusers folder, a single-file checkpoint or the name of a repository.",
        )
    return download(signature, variant)


def download(signature: str, variant: str | None) -> Path:
    """Fetch a repository's `unet` and `vae` in one variant, or find them in the local cache.

    Args:
        signature: Such as `stabilityai/stable-diffusion-xl-base-1.0`.
        variant: Such as `fp16`; None for the plain files.

    Returns:
        The local folder.

    Raises:
        ConfigError: The repository cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    fetch: Callable[..., str] = snapshot_download
    try:
        return Path(fetch(signature, allow_patterns=wanted_files(variant)))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"--backbone_signature {signature}: is no folder or file here, and cannot be fetched from the hub "
            f"({str(error).splitlines()[0]}).",
            hint="Give a diffusers folder that holds unet and vae, or a single-file checkpoint.",
        ) from error


def wanted_files(variant: str | None) -> list[str]:
    """Patterns of the files that a base is made from; those of other variants are gigabytes nobody reads."""
    dotted = "" if variant is None else f".{variant}"
    names = (
        "config.json",
        f"{_WEIGHTS_STEM}{dotted}.safetensors",
        f"{_WEIGHTS_STEM}.safetensors.index{dotted}.json",
        f"{_WEIGHTS_STEM}{dotted}-*-of-*.safetensors",
        f"{_WEIGHTS_STEM}-*-of-*{dotted}.safetensors",
    )
    return [f"{part}/{name}" for part in ("unet", "vae") for name in names]


def _from_folder(folder: Path, variant: str | None, files: ExitStack) -> Backbone:
    weights: dict[str, BackboneWeight] = {}
    for part, prefix in PREFIXES.items():
        if not is_folder(folder / part):
            raise CheckpointError(
                folder,
                f"has no folder {part}.",
                hint="Give a diffusers folder that holds unet and vae, or a single-file checkpoint.",
            )
        checkpoint = files.enter_context(open_checkpoint(folder / part, variant=variant))
        for key in checkpoint.keys():  # noqa: SIM118 - no dict
            name = _EARLIER_NAME.sub(_renamed, key) if part == "vae" else key
            weights[prefix + name] = BackboneWeight(checkpoint, key, checkpoint.info(key).shape)
    return Backbone(folder, weights)


def _renamed(match: re.Match[str]) -> str:
    """Diffusers' present name of a VAE's attention: folders saved before it are still about."""
    return f"{match[1]}{_EARLIER_ATTENTION[match[2]]}{match[3]}"


def name_single_file(checkpoint: Checkpoint, config: LbmConfig) -> Backbone:
    """Name the UNet's and the VAE's tensors as diffusers does; what its converter does not know keeps its own name.

    Raises:
        CheckpointError: There is no UNet or no VAE under SDXL's names.
        ConfigError: The config's blocks differ in their layers, which such files cannot.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint

    keys = checkpoint.keys()
    parts = {
        "unet": [key for key in keys if key.startswith(UNET)],
        "vae": [key for key in keys if key.startswith(VAE) and not key.startswith(_VAE_LOSS)],
    }
    for part, prefix in (("unet", UNET), ("vae", VAE)):
        if not parts[part]:
            raise CheckpointError(
                checkpoint.path,
                f"holds no tensors named {prefix}*, so no {part} of a single-file checkpoint.",
                hint="Give a whole SDXL checkpoint, or a diffusers folder that holds unet and vae.",
            )
    layers = config.denoiser.layers_per_block
    counts = {layers} if isinstance(layers, int) else set(layers)
    if len(counts) > 1:
        raise ConfigError(
            f"denoiser.layers_per_block: a single-file backbone has as many in every block, got {layers}.",
            hint="Give the backbone as a diffusers folder.",
        )
    has_added_embedding = any(key.startswith(f"{UNET}label_emb.") for key in parts["unet"])
    unet = {
        "layers_per_block": counts.pop(),
        "addition_embed_type": "text_time" if has_added_embedding else None,
    }
    blocks = len(config.vae.block_out_channels)
    vae = {
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
    }
    weights = {
        **_converted(checkpoint, parts["unet"], UNET, PREFIXES["unet"], convert_ldm_unet_checkpoint, unet),
        **_converted(checkpoint, parts["vae"], VAE, PREFIXES["vae"], convert_ldm_vae_checkpoint, vae),
    }
    inside = {*parts["unet"], *parts["vae"]}
    outside = Counter(key.partition(".")[0] for key in keys if key not in inside)
    return Backbone(checkpoint.path, weights, outside)


def _converted(
    checkpoint: Checkpoint,
    keys: list[str],
    prefix: str,
    own_prefix: str,
    convert: Callable[..., dict[str, Tensor]],
    config: dict[str, Any],
) -> dict[str, BackboneWeight]:
    placeholders = {
        key: torch.tensor(number).expand(checkpoint.info(key).shape) for number, key in enumerate(keys)
    }
    weights: dict[str, BackboneWeight] = {}
    for name, placeholder in convert(dict(placeholders), config).items():
        key = keys[int(placeholder.flatten()[0])]
        if placeholder.numel() == placeholders[key].numel():  # the whole tensor, and not a slice of it
            weights[own_prefix + name] = BackboneWeight(checkpoint, key, tuple(placeholder.shape))
    converted = {weight.key for weight in weights.values()}
    for key in keys:  # what is left over must not be lost unseen
        if key not in converted:
            name = own_prefix + key.removeprefix(prefix)
            weights[name] = BackboneWeight(checkpoint, key, checkpoint.info(key).shape)
    return weights
