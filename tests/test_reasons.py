"""Outside of the stages too, None has a reason in `unavailable` or means that there is none."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from tests.families import make_pipeline
from tests.reasons import about_nothing, without_reason

from sigmascope import decode_latents, encode_latents, watch
from sigmascope.pipeline.measure import compare_images
from sigmascope.records.serialization import run_to_dict

IMAGE = torch.linspace(0, 1, 48).reshape(1, 4, 4, 3)


@pytest.mark.parametrize(
    "other", [None, IMAGE, IMAGE / 2, IMAGE * 0, IMAGE[:, :2], IMAGE * torch.nan, -IMAGE], ids=range(7)
)
def test_of_compared_images(other: Any) -> None:
    for pair in ((other, IMAGE), (IMAGE, other)):
        found = asdict(compare_images(*pair))
        assert without_reason(found) == about_nothing(found) == set()


@pytest.mark.filterwarnings("ignore")
def test_of_a_latents_record_and_of_a_watched_run() -> None:
    pipe = make_pipeline("sd15")
    latent, encoded = encode_latents(pipe.vae, torch.rand(1, 3, 32, 32))
    _, decoded = decode_latents(pipe.vae, latent)
    for record in (encoded.as_dict(), decoded.as_dict()):
        assert without_reason(record) == about_nothing(record) == set()
    with watch(pipe) as watched:
        pipe("a red fox", num_inference_steps=2, height=32, width=32)
    assert without_reason(run_to_dict(watched.record())) == set()
