"""Training, the page's model and the VAE's tiles on a device: as on the CPU."""

import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import Pretend
from tests.lbm.conftest import tiny_config, tiny_model, tiny_yaml
from tests.lbm.training.conftest import small_files, small_run
from tests.lbm.training.small_run import SmallRun, weights_at
from tests.pocket_pipelines import load_pocket
from tests.pretend_device import Kind, same
from tests.ui.conftest import served

from sigmascope import decode_latents, encode_latents
from sigmascope.lbm.training.train import train
from sigmascope.ui.lbm_model import Made, Picture, Recent, ServedModel, Translator, Wish

pytestmark = pytest.mark.slow

__all__ = ["served", "small_files", "small_run", "tiny_config", "tiny_model", "tiny_yaml"]  # fixtures


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_training_and_its_resumption_learn_what_they_learn_on_the_cpu(
    pretend: Pretend, kind: Kind, small_run: SmallRun
) -> None:
    def trained(folder: str, device: str) -> list[torch.Tensor]:
        out = small_run.folder / folder
        keys: dict[str, Any] = {
            "save_ckpt_path": str(out),
            "device": device,
            "optimizer": "SGD",
            "learning_rate": 1.0,
        }
        train(small_run.settings(**keys, max_steps=1))
        assert train(small_run.settings(**keys, max_steps=2)).resumed_from == 1
        return [weight for _, weight in sorted(weights_at(out, 2).items())]

    expected = trained("cpu", "cpu")
    with pretend(kind, backward=True):
        assert same(trained(kind, kind), expected, within=1e-5)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_page_shows_what_it_shows_on_the_cpu(pretend: Pretend, kind: Kind, served: ServedModel) -> None:
    photograph = Image.effect_mandelbrot((75, 50), (-2, -1, 1, 1), 60).convert("RGB")

    def shown() -> list[Any]:
        kept: Recent[Made] = Recent(limit_bytes=10**7)
        wish = Wish(picture="p", client="c", scale=0.5, steps=2, seed=7)
        found = Translator(served, kept).translate(
            Picture("p", photograph, png=b""), wish, lambda _what, _done, _total: None
        )
        made = [kept.get(found[name]["id"]) for name in ("base", "result")]
        return [np.asarray(Image.open(io.BytesIO(each.png))).astype(int) for each in made if each is not None]

    expected = shown()
    with pretend(kind):
        served.model.to(kind)
        try:
            in_a_thread: list[Any] = []
            worker = threading.Thread(target=lambda: in_a_thread.extend(shown()))  # as the server does
            worker.start()
            worker.join()
        finally:
            served.model.to("cpu")
    assert len(in_a_thread) == len(expected) == 2
    for made, other in zip(in_a_thread, expected, strict=True):
        assert np.abs(made - other).max() <= 1


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("strategy", ["tiled", "direct", "cpu"])
def test_latents_and_pictures_are_the_cpus(pretend: Pretend, kind: Kind, strategy: str) -> None:
    vae = load_pocket("unet", "base").vae
    picture = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    options: dict[str, Any] = {"strategies": strategy, "tile": None if strategy == "direct" else 64}

    def both(device: str) -> list[torch.Tensor]:
        latents, _ = encode_latents(vae.to(device), picture.to(device), **options)
        pictures, _ = decode_latents(vae, latents, **options)
        assert latents.device.type == pictures.device.type == device
        return [latents, pictures]

    expected = both("cpu")
    with pretend(kind):
        made = both(kind)
        vae.to("cpu")
    # Attention is summed up in another order than on the CPU.
    assert same(made, expected, within=1e-5)
