"""The model that an LBM begins as: its UNet and VAE weights, wherever they lie, under the LBM's own keys."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.checkpoints.paths import is_existing, is_folder
from sigmascope.checkpoints.weight_files import PICKLE_SUFFIXES
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.basing.hub import download
from sigmascope.lbm.basing.single_file import read_names
from sigmascope.lbm.config import LbmConfig

PREFIXES = {"unet": "denoiser.", "vae": "vae.vae_model."}
"""Of the LBM's keys, by the folder of a diffusers model."""

_FILES = (".safetensors", ".gguf", ".json", *PICKLE_SUFFIXES)
_EARLIER_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_EARLIER_NAME = re.compile(r"(mid_block\.attentions\.0\.)(query|key|value|proj_attn)(\.\w+)")


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
    path = _place(str(signature), variant)
    with ExitStack() as files:
        if is_folder(path):
            yield _from_folder(path, variant, files)
        elif variant is not None:
            raise ConfigError(
                f"--variant {variant}: {path} is a single file, which has no variants.", hint="Leave it out."
            )
        else:
            yield _from_file(path, config, files)


def _place(signature: str, variant: str | None) -> Path:
    if not signature.strip():
        raise ConfigError(
            "--backbone_signature: is empty.", hint="Leave it out to take the config's, or name a backbone."
        )
    local = Path(signature)
    if is_existing(local):
        return local
    if local.is_absolute() or signature.startswith(".") or signature.lower().endswith(_FILES):
        raise ConfigError(
            f"--backbone_signature {signature}: is not there.",
            hint="Give a diffusers folder, a single-file checkpoint or the name of a repository.",
        )
    return download(signature, variant)


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


def _from_file(path: Path, config: LbmConfig, files: ExitStack) -> Backbone:
    checkpoint = files.enter_context(open_checkpoint(path))
    names = read_names(checkpoint, config)
    weights = {
        PREFIXES[part] + name: BackboneWeight(checkpoint, key, shape)
        for part, found in names.parts.items()
        for name, (key, shape) in found.items()
    }
    return Backbone(path, weights, names.outside)
