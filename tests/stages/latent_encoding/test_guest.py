"""The stage is a guest: it raises nothing, changes nothing, keeps nothing, and interprets no foreign text."""

import gc
import io
import json
import weakref
from typing import Any

import pytest
import torch
from rich.console import Console

from sigmascope.stages.latent_encoding import (
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
    print_latent_generation_analysis_summary,
)

PICTURES = torch.linspace(-1, 1, 2 * 3 * 32 * 48).reshape(2, 3, 32, 48)


@pytest.fixture
def vae(make_vae: Any) -> Any:
    return make_vae("kl")


def printed(analysis: Any) -> str:
    file = io.StringIO()
    print_latent_generation_analysis_summary(analysis, Console(file=file, width=100))
    return file.getvalue()


def test_nothing_is_kept_alive(encode_pixels: Any) -> None:
    from diffusers import AutoencoderTiny

    sizes = {"encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    vae: Any = AutoencoderTiny(**sizes, num_encoder_blocks=(1,), num_decoder_blocks=(1,))
    pictures = torch.zeros(1, 3, 32, 32)
    baseline = capture_latent_generation_baseline(vae, pictures)
    latent = encode_pixels(vae, pictures)
    found = analyze_latent_generation_results(baseline, latent, 1.0, 1)
    alive = [weakref.ref(thing) for thing in (vae, pictures, latent)]
    del vae, pictures, latent
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]
    assert found["encoding_success"]
    assert baseline["references"].models["model_state"]() is None


def test_pictures_and_random_state_are_untouched(vae: Any) -> None:
    before, state = PICTURES.clone(), torch.get_rng_state()
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    analyze_latent_generation_results(baseline, torch.zeros(2, 4, 16, 24), 1.0, 1)
    assert torch.equal(PICTURES, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_summaries_of_odd_analyses_are_printed() -> None:
    for odd in (
        {},
        {"latent_analysis": None},
        {"strategies": ["x"], "findings": 3},
        {"elapsed_time": "soon"},
    ):
        assert "LATENT GENERATION ANALYSIS SUMMARY" in printed(odd)


def test_markup_and_control_characters_are_not_interpreted() -> None:
    found = analyze_latent_generation_results(None, None, 1.0, "[red]tiled\x1b[2J", error="[bold]x\x1b]0;y")
    text = printed(found)
    assert "[red]tiled\\x1b[2J" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("vae", [None, object(), "vae", 3])
@pytest.mark.parametrize("pictures", [None, "a.mp4", object(), [None], torch.zeros(0)])
def test_no_input_makes_it_raise(vae: Any, pictures: Any) -> None:
    baseline = capture_latent_generation_baseline(vae, pictures)
    found = analyze_latent_generation_results(baseline, pictures, 1.0, 1)
    assert json.dumps(found)
    assert printed(found)


def test_a_summary_without_an_accelerator_says_so_in_one_line(vae: Any, encode_pixels: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    analysis = analyze_latent_generation_results(baseline, encode_pixels(vae, PICTURES), 0.5, 1)
    assert printed(analysis).count("no accelerator was found") == 1
