"""What training shows the denoiser is what inference shows it, from the same files to the same inputs."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.lbm.shard_files import encoded, write_tar
from tests.lbm.training.tiny_run import new_model, tiny_settings
from torch import Tensor

from sigmascope.lbm.data import DataOptions, TrainingData
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.objective import Objective

KEYS: dict[str, Any] = {
    "conditioning_images_keys": ["depth"],
    "conditioning_masks_keys": ["region"],
    "unet_input_channels": 9,
}


def smooth(side: int, seed: int) -> Image.Image:
    """Whatever is resized must be smooth, or rounding to 8 bits in between is all that one sees."""
    small = np.random.default_rng(seed).integers(60, 200, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def half(side: int, level: int) -> Image.Image:
    """A mask with an edge that is not on the latent's grid."""
    levels = np.zeros((side, side), np.uint8)
    levels[:, side * 3 // 8 + 1 :] = level
    return Image.fromarray(levels)


def certain(model: LbmModel) -> LbmModel:
    """Leave the posterior no spread, so that training's draws are inference's modes."""
    moments = model.vae.vae_model.quant_conv
    assert moments is not None
    with torch.no_grad():
        moments.weight[4:] = 0
        moments.bias[4:] = -30.0
    return model


def denoiser_inputs(model: LbmModel, call: Any) -> tuple[Tensor, Tensor]:
    """(latent and conditioning, timestep) of the denoiser's one call."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.denoiser.register_forward_pre_hook(lambda _, args: seen.append((args[0], args[1])))
    call()
    hook.remove()
    ((inputs, timestep),) = seen
    return inputs.detach(), timestep.flatten()


@pytest.mark.parametrize(("side", "level"), [(64, 255), (64, 1), (128, 255), (150, 1)])
def test_the_first_step_of_the_bridge_gives_the_denoiser_the_same(
    side: int, level: int, tmp_path: Path
) -> None:
    pictures = {"source": smooth(side, 1), "target": smooth(side, 2), "depth": smooth(side, 3)}
    pictures["region"] = half(side, level)
    files = {name: encoded(image) for name, image in pictures.items()}
    write_tar(tmp_path / "0.tar", [(f"a.{name}.png", content) for name, content in files.items()])
    settings = tiny_settings(
        **KEYS, timestep_sampling="custom_timesteps", selected_timesteps=[1000], prob=[1]
    )
    batch, _ = next(TrainingData(settings.lbm, DataOptions((str(tmp_path),), 1)).batches(0))
    model = certain(new_model(**KEYS))
    trained = denoiser_inputs(model, lambda: Objective(settings).loss(model, batch))
    opened = {name: Image.open(io.BytesIO(content)) for name, content in files.items()}
    given = {name: opened[name] for name in ("depth", "region")}
    inferred = denoiser_inputs(model, lambda: translate_image(model, opened["source"], conditioning=given))
    assert torch.equal(trained[1].float(), inferred[1].float())
    # A resized picture is rounded to 8 bits in training, and the VAE amplifies that; the mask comes last.
    resized = side != 64
    torch.testing.assert_close(trained[0], inferred[0], rtol=0, atol=0.03 if resized else 1e-5)
    mask, expected = trained[0][:, 4], inferred[0][:, 4]
    torch.testing.assert_close(mask, expected, rtol=0, atol=1 / 255 if resized else 1e-6)
