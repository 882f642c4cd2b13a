"""The weights that ship: a really trained model, on scenes that training never saw."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from scripts.pocket.quality import relighting_psnr, vae_psnr

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, WARM, relighting_pair
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora
from sigmascope.lora.validate import validate_lora
from sigmascope.monitor import Recorder

HELD_OUT = range(32)


@pytest.fixture(scope="module")
def cool_psnr(base: LbmModel, tuned: LbmModel) -> tuple[float, float]:
    """Of base and of tuned, in dB, under the light that tuned was trained for."""
    return relighting_psnr(base, COOL, HELD_OUT), relighting_psnr(tuned, COOL, HELD_OUT)


@pytest.mark.parametrize("path", [BASE_PATH, TUNED_PATH])
def test_a_checkpoint_is_at_most_8_mb(path: Path) -> None:
    assert path.stat().st_size <= 8_000_000


@pytest.mark.slow
def test_the_vae_reconstructs_at_26_db_or_more(base: LbmModel) -> None:
    assert vae_psnr(base, COOL, HELD_OUT) >= 26


@pytest.mark.slow
def test_tuned_relights_at_23_db_or_more(cool_psnr: tuple[float, float]) -> None:
    assert cool_psnr[1] >= 23


@pytest.mark.slow
def test_tuned_is_at_least_8_db_better_than_base_on_its_light(cool_psnr: tuple[float, float]) -> None:
    assert cool_psnr[1] - cool_psnr[0] >= 8


@pytest.mark.slow
def test_base_relights_to_its_own_light(base: LbmModel, tuned: LbmModel) -> None:
    assert relighting_psnr(base, WARM, HELD_OUT) > relighting_psnr(tuned, WARM, HELD_OUT) + 8


@pytest.mark.slow
def test_rank_8_recovers_90_percent_of_the_gap(
    base: LbmModel, rank8: Path, cool_psnr: tuple[float, float]
) -> None:
    with attach_lora(base, load_lora(rank8)):
        with_lora = relighting_psnr(base, COOL, HELD_OUT)
    before, after = cool_psnr
    assert (with_lora - before) / (after - before) >= 0.9


@pytest.mark.slow
def test_full_rank_is_within_half_a_percent_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "full.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(9999, 9999, save_precision="bf16"))
    report = validate_lora(BASE_PATH, TUNED_PATH, path)
    assert report.success_rate == 100
    assert max(module.relative_error or 0 for module in report.modules) <= 0.005


@pytest.mark.slow
def test_full_rank_is_exact_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "full.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(9999, 9999, save_precision="float"))
    report = validate_lora(BASE_PATH, TUNED_PATH, path)
    assert report.success_rate == 100
    assert max(module.relative_error or 0 for module in report.modules) <= 1e-6


@pytest.mark.slow
def test_every_linear_and_conv_layer_of_the_denoiser_is_in_the_lora(base: LbmModel, rank8: Path) -> None:
    layers = {
        f"denoiser.{name}"
        for name, module in base.denoiser.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }
    assert set(load_lora(rank8).modules) == layers


@pytest.mark.slow
def test_hot_and_merged_latents_agree_and_unmerging_is_exact(base: LbmModel, rank8: Path) -> None:
    lora = load_lora(rank8)
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    latent, sigma = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0)), torch.ones(1)
    with torch.inference_mode():
        with attach_lora(base, lora):
            hot = base(latent, sigma)
        with merge_into_model(base, lora):
            merged = base(latent, sigma)
    torch.testing.assert_close(hot, merged, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, before[key]) for key, tensor in base.state_dict().items())


def test_a_watched_picture_is_the_same_and_no_hook_is_left(base: LbmModel) -> None:
    source = Image.fromarray(relighting_pair(0, COOL)[0])
    unwatched = translate_image(base, source, num_inference_steps=2, seed=1)
    with Recorder() as recorder, recorder.hook_steps(base.denoiser):
        watched = translate_image(base, source, num_inference_steps=2, seed=1)
    assert unwatched.tobytes() == watched.tobytes()
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in base.modules()]
    assert not any(hooks)


def test_base_and_tuned_share_the_vae_and_differ_in_every_denoiser_weight() -> None:
    with open_checkpoint(BASE_PATH) as base, open_checkpoint(TUNED_PATH) as tuned:
        assert base.keys() == tuned.keys()
        for key in base.keys():  # noqa: SIM118 - a checkpoint is no dict
            same = torch.equal(base.tensor(key), tuned.tensor(key))
            if key.startswith("vae."):
                assert same, key
            elif key.startswith("denoiser.") and key.endswith("weight"):
                assert not same, key
