"""The latent in what VAEs, pipelines and nodes give back."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sigmascope.stages.latent_facts import find_latent

LATENT = torch.arange(2 * 4 * 8 * 8.0).reshape(2, 4, 8, 8)
CONDITIONING = [[torch.zeros(1, 512, 4096), {"vace_frames": [torch.ones(1, 32, 2, 8, 8)]}]]


@pytest.mark.parametrize(
    "output",
    [
        LATENT,
        LATENT.numpy(),
        {"samples": LATENT},
        {"samples": LATENT, "noise_mask": torch.zeros(1, 1, 8, 8)},
        ({"samples": LATENT},),
        (CONDITIONING, CONDITIONING, {"samples": LATENT}, 1),
        (LATENT,),
        [LATENT],
        list(LATENT),
        {"latents": LATENT},
        SimpleNamespace(latents=LATENT),
        SimpleNamespace(latent=LATENT),
        {"anything": {"deep": [LATENT]}},
    ],
)
def test_it_is_found(output: Any) -> None:
    found = find_latent(output)
    assert found.tensor is not None
    assert torch.equal(found.tensor, LATENT)


@pytest.mark.parametrize("kind", ["kl", "vq", "tiny", "wan", "cogvideox"])
def test_it_is_found_in_what_real_vaes_give(make_vae: Any, encode_pixels: Any, kind: str) -> None:
    video = (1,) if kind in ("wan", "cogvideox") else ()
    pictures = torch.zeros(1, 3, *video, 32, 32)
    with torch.no_grad():
        found = find_latent(make_vae(kind).encode(pictures))
    assert found.tensor is not None
    assert torch.equal(found.tensor, encode_pixels(make_vae(kind), pictures))


def test_a_distribution_is_not_drawn_from() -> None:
    class Distribution:
        mean = LATENT

        def sample(self) -> torch.Tensor:
            raise AssertionError

        def mode(self) -> torch.Tensor:
            raise AssertionError

    for output in (SimpleNamespace(latent_dist=Distribution()), Distribution(), (Distribution(),)):
        assert find_latent(output).tensor is LATENT


def test_nothing_given_is_a_reason() -> None:
    assert find_latent(None).reason == "no latent was given"


@pytest.mark.parametrize("thing", [{}, [], "latent", 3, np.zeros(0).tolist()])
def test_no_tensor_is_a_reason(thing: Any) -> None:
    found = find_latent(thing)
    assert found.tensor is None
    assert "no tensor was found" in (found.reason or "")


def test_what_raises_when_read_is_a_reason() -> None:
    class Broken:
        @property
        def latent_dist(self) -> object:
            raise RuntimeError("freed")

    found = find_latent(Broken())
    assert (found.tensor, found.reason, found.raised) == (None, "RuntimeError: freed", True)
