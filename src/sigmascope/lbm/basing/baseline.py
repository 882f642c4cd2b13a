"""Prove that a base that was written can be used: load it, run it once, look at what comes out."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError
from sigmascope.lbm.buckets import Size
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.images import image_to_tensor, tensor_to_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket.scenes import make_scene, scene_source_light, shade
from sigmascope.lbm.psnr import psnr
from sigmascope.progress import Progress, no_progress

SCENE = 4
LATENT_SIDE = 32
"""Latent elements along a side of the picture: a quarter of what LBM works at, so that a CPU takes seconds."""


@dataclass(frozen=True, slots=True)
class BaselineReport:
    """What one run of a base showed. A base is untrained: its picture need not resemble the source.

    Attributes:
        path: The file that was loaded.
        compared: Tensors that were found equal, bit for bit, in every file written.
        size: Of the picture, (width, height).
        dtype: That the weights were loaded in.
        device: That it ran on.
        vae_psnr: Of the source against itself encoded and decoded, in dB: whether the VAE is sound.
        source_psnr: Of the source against the base's picture, in dB.
        load_seconds: To load the model.
        inference_seconds: To translate the picture in one step.
    """

    path: Path
    compared: int
    size: Size
    dtype: str
    device: str
    vae_psnr: float
    source_psnr: float
    load_seconds: float
    inference_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        return {**asdict(self), "path": str(self.path), "size": list(self.size)}


def run_baseline(
    paths: tuple[Path, ...],
    config: LbmConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = no_progress,
) -> BaselineReport:
    """Load a base, translate one generated picture in one step, and compare the files that were written.

    Args:
        paths: Every file of the base; the first is loaded.
        config: Of the LBM.
        dtype: To run in.
        device: To run on.
        progress: Told after each tensor that is compared, then after each that is loaded.

    Raises:
        CheckpointError: The files differ.
        NonFiniteError: The weights, the latents or the picture hold NaN or Inf.
        ModelMismatchError: The file is not the config's model.
    """
    compared = compare_files(paths, progress)
    begin = time.perf_counter()
    model = load_lbm(paths[0], config, dtype=dtype, device=device, progress=progress)
    loaded = time.perf_counter()
    side = max(LATENT_SIDE // config.denoiser.factor, 1) * config.factor
    picture = _picture(side)
    keys = config.conditioning_images_keys
    conditioning = dict.fromkeys(keys, picture) | dict.fromkeys(
        config.conditioning_masks_keys, Image.new("L", picture.size, 255)
    )
    result = translate_image(model, picture, seed=0, size=picture.size, conditioning=conditioning)
    done = time.perf_counter()
    return BaselineReport(
        path=paths[0],
        compared=compared,
        size=picture.size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        vae_psnr=psnr(_through_vae(model, picture), picture),
        source_psnr=psnr(result, picture),
        load_seconds=loaded - begin,
        inference_seconds=done - loaded,
    )


def compare_files(paths: tuple[Path, ...], progress: Progress = no_progress) -> int:
    """Compare the tensors of all files with those of the first, bit for bit.

    Returns:
        How many tensors each file holds.

    Raises:
        CheckpointError: Names the first file and tensor that differ.
    """
    with open_checkpoint(paths[0]) as first:
        for path in paths[1:]:
            with open_checkpoint(path) as second:
                if set(first) != set(second):
                    raise CheckpointError(path, f"has other tensors than {paths[0]}.", hint="Make it anew.")
                for done, key in enumerate(first, start=1):
                    if not _same_bits(first.tensor(key), second.tensor(key)):
                        raise CheckpointError(path, f"{key} differs from {paths[0]}.", hint="Make it anew.")
                    progress(done, len(first), key)
        return len(first)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _picture(side: int) -> Image.Image:
    return Image.fromarray(shade(make_scene(SCENE, side), scene_source_light(SCENE)))


def _through_vae(model: LbmModel, picture: Image.Image) -> Image.Image:
    with torch.inference_mode():
        pixels = image_to_tensor(picture).to(next(model.parameters()).device)
        decoded = model.vae.decode(model.vae.encode(pixels))
    return tensor_to_image(decoded.float().cpu().clamp(-1, 1))
