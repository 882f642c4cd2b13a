"""How close the pocket models' pictures are to the rendered truth."""

from collections.abc import Iterable

import torch
from PIL import Image

from sigmascope.lbm.images import image_to_tensor, psnr, tensor_to_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.pocket.scenes import Light, relighting_pair


def vae_psnr(model: LbmModel, light: Light, scenes: Iterable[int]) -> float:
    """Mean PSNR in dB of rendered scenes that were encoded and decoded, and nothing else."""
    values = []
    with torch.inference_mode():
        for number in scenes:
            truth = Image.fromarray(relighting_pair(number, light)[1])
            decoded = model.vae.decode(model.vae.encode(image_to_tensor(truth)))
            values.append(psnr(tensor_to_image(decoded.clamp(-1, 1)), truth))
    return sum(values) / len(values)


def relighting_psnr(
    model: LbmModel, light: Light, scenes: Iterable[int], *, num_inference_steps: int = 1
) -> float:
    """Mean PSNR in dB of a model's pictures against rendered ones.

    Args:
        model: Relights the scenes' source pictures.
        light: What the truth is rendered with.
        scenes: Numbers of scenes; those below 1000 are held out of training.
        num_inference_steps: Of the bridge.
    """
    values = []
    for number in scenes:
        source, truth = (Image.fromarray(pixels) for pixels in relighting_pair(number, light))
        result = translate_image(model, source, num_inference_steps=num_inference_steps, seed=0)
        values.append(psnr(result, truth))
    return sum(values) / len(values)
