import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lbm.bridge import bridge_sigmas
from sigmascope.lbm.config import parse_config
from sigmascope.lbm.images import image_to_tensor, psnr
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.monitor.recorder import Recorder


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def same(first: Image.Image, second: Image.Image) -> bool:
    return np.array_equal(np.asarray(first), np.asarray(second))


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3), (63, 65), (17, 31), (64, 64)])
@pytest.mark.parametrize("way", ["bucket", "keep", (40, 24)])
def test_result_has_the_pictures_own_size(
    size: tuple[int, int], way: str | tuple[int, int], tiny_model: LbmModel
) -> None:
    result = translate_image(tiny_model, noise(*size), size=way)
    assert result.size == size
    assert result.mode == "RGB"


@torch.no_grad()
def test_one_step_is_encode_subtract_decode(tiny_model: LbmModel) -> None:
    """Worked from diffusers' parts, without the bridge: ẑ_target = z_source − v(z_source, 1000)."""
    picture = noise(64, 64)
    vae = tiny_model.vae.vae_model
    z_source = (vae.encode(image_to_tensor(picture)).latent_dist.mode() - 0.25) * 0.5
    velocity = tiny_model.denoiser(z_source, torch.tensor([1000.0]), encoder_hidden_states=None).sample
    pixels = vae.decode((z_source - velocity) / 0.5 + 0.25).sample.clamp(-1, 1)
    expected = ((pixels[0].permute(1, 2, 0) + 1) * 127.5).numpy()
    result = np.asarray(translate_image(tiny_model, picture), dtype=np.float32)
    assert np.abs(result - expected).max() <= 0.51


def test_same_seed_same_picture(tiny_model: LbmModel) -> None:
    picture = noise(32, 32)
    first = translate_image(tiny_model, picture, num_inference_steps=3, seed=1, noise_scale=0.5)
    assert same(first, translate_image(tiny_model, picture, num_inference_steps=3, seed=1, noise_scale=0.5))
    assert not same(
        first, translate_image(tiny_model, picture, num_inference_steps=3, seed=2, noise_scale=0.5)
    )


def test_random_state_of_the_caller_is_left_alone(tiny_model: LbmModel) -> None:
    before = torch.get_rng_state()
    translate_image(tiny_model, noise(16, 16), num_inference_steps=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_watched_and_unwatched_are_bit_identical(tiny_model: LbmModel) -> None:
    picture = noise(48, 40)
    alone = translate_image(tiny_model, picture, num_inference_steps=2, seed=3)
    with Recorder(name="watched", sample_hz=10.0):
        watched = translate_image(tiny_model, picture, num_inference_steps=2, seed=3)
    assert same(alone, watched)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_model.modules())


def test_stages_carry_steps_tensors_and_facts(tiny_model: LbmModel) -> None:
    recorder = Recorder(name="watched", sample_hz=None)
    with recorder:
        translate_image(tiny_model, noise(64, 64), num_inference_steps=4, seed=9)
    encoding, denoising, decoding = recorder.run().stages
    assert [stage.name for stage in (encoding, denoising, decoding)] == [
        "latent_encoding",
        "denoising",
        "latent_decoding",
    ]
    assert [len(stage.steps) for stage in (encoding, denoising, decoding)] == [0, 4, 0]
    assert encoding.tensors["source_latent"].shape == (1, 4, 32, 32)
    assert denoising.tensors["result_latent"].nan_count == 0
    assert decoding.tensors["image"].shape == (1, 3, 64, 64)
    assert encoding.facts["strategy"] == "Direct VAE Encoding"
    assert encoding.facts["working_size"] == [64, 64]
    assert denoising.facts["seed"] == 9
    assert denoising.facts["num_inference_steps"] == 4
    assert denoising.facts["bridge_noise_sigma"] == 0.005


def test_drawn_seed_is_recorded_and_repeats_the_picture(tiny_model: LbmModel) -> None:
    recorder = Recorder(name="watched", sample_hz=None)
    options: dict[str, Any] = {"num_inference_steps": 2, "noise_scale": 0.5}
    with recorder:
        first = translate_image(tiny_model, noise(32, 32), **options)
    seed = recorder.run().stages[1].facts["seed"]
    assert same(first, translate_image(tiny_model, noise(32, 32), seed=seed, **options))


def test_tiles_are_used_and_recorded(tiny_model: LbmModel) -> None:
    recorder = Recorder(name="watched", sample_hz=None)
    with recorder:
        tiled = translate_image(tiny_model, noise(96, 32), size="keep", tile_size=32)
    run = recorder.run()
    assert run.stages[0].facts["strategy"] == "Tiled VAE Encoding"
    assert run.stages[2].facts["strategy"] == "Tiled VAE Decoding"
    assert tiled.size == (96, 32)


def test_a_picture_may_be_decoded_in_tiles_and_encoded_whole(
    tiny_model: LbmModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles: dict[str, object] = {}
    for name in ("encode", "decode"):
        work = getattr(tiny_model.vae, name)

        def noted(values: Any, *, tile_size: int | None = None, name: str = name, work: Any = work) -> Any:
            tiles[name] = tile_size
            return work(values, tile_size=tile_size)

        monkeypatch.setattr(tiny_model.vae, name, noted)
    whole = translate_image(tiny_model, noise(96, 32), size="keep", seed=1)
    tiled = translate_image(tiny_model, noise(96, 32), size="keep", seed=1, decode_tiles=16)
    assert tiles == {"encode": None, "decode": 16 * tiny_model.vae.factor}
    assert psnr(whole, tiled) > 30
    with pytest.raises(ConfigError, match="decode_tiles: expected at least 4 latent elements, got 3"):
        translate_image(tiny_model, noise(16, 16), decode_tiles=3)


@pytest.mark.parametrize("tile_size", [0, -8, 7])
def test_useless_tiles_are_an_error(tile_size: int, tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match="tile_size: expected at least 8 pixels"):
        translate_image(tiny_model, noise(16, 16), tile_size=tile_size)


def test_no_steps_is_an_error(tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match="num_inference_steps"):
        translate_image(tiny_model, noise(16, 16), num_inference_steps=0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range_is_an_error(seed: int, tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match="seed: expected 0 to"):
        translate_image(tiny_model, noise(16, 16), seed=seed)


@pytest.mark.parametrize(
    ("layer", "where", "failed"),
    [
        ("vae.vae_model.encoder.conv_out", "the source latent", "latent_encoding"),
        ("denoiser.conv_out", "the result latent", "denoising"),
        ("vae.vae_model.decoder.conv_out", "the decoded picture", "latent_decoding"),
    ],
)
def test_nan_is_an_error_that_says_where(layer: str, where: str, failed: str, tiny_model: LbmModel) -> None:
    model = copy.deepcopy(tiny_model)
    model.get_submodule(layer).bias.data.fill_(float("nan"))  # type: ignore[operator]
    recorder = Recorder(name="watched", sample_hz=None)
    with pytest.raises(NonFiniteError, match=f"NaN or Inf in {where}") as caught, recorder:
        translate_image(model, noise(16, 16))
    assert "--torch_dtype" in str(caught.value)
    last = recorder.run().stages[-1]
    assert (last.name, last.success) == (failed, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near_float32(dtype: torch.dtype, tiny_model: LbmModel) -> None:
    picture = noise(16, 16)
    exact = np.asarray(translate_image(tiny_model, picture, size="keep"), dtype=np.float32)
    rounded = copy.deepcopy(tiny_model)
    torch.nn.Module.to(rounded.denoiser, dtype)
    torch.nn.Module.to(rounded.vae, dtype)
    result = np.asarray(translate_image(rounded, picture, size="keep"), dtype=np.float32)
    assert np.abs(result - exact).mean() < 2.0


def test_conditioning_reaches_the_denoiser(tiny_yaml: dict[str, Any]) -> None:
    tiny_yaml |= {
        "conditioning_images_keys": ["depth"],
        "conditioning_masks_keys": ["region"],
        "unet_input_channels": 9,
    }
    torch.manual_seed(0)
    model = build_lbm(parse_config(tiny_yaml))
    seen: list[torch.Tensor] = []
    model.denoiser.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    depth, region = noise(10, 12, seed=1), Image.new("L", (5, 5), 255)
    translate_image(model, noise(32, 32), conditioning={"region": region, "depth": depth})
    assert seen[0].shape[1] == 9
    # The latent, then LBM's order: masks before images.
    torch.testing.assert_close(seen[0][:, 4], torch.ones_like(seen[0][:, 4]))
    assert not torch.equal(seen[0][:, :4], seen[0][:, 5:])
    assert seen[0][:, 5:].std() > 0


@pytest.mark.parametrize(
    ("given", "message"), [([], "the model needs depth"), (["depth", "pose"], "takes depth, got pose")]
)
def test_wrong_conditioning_is_named(given: list[str], message: str, tiny_yaml: dict[str, Any]) -> None:
    tiny_yaml |= {"conditioning_images_keys": ["depth"], "unet_input_channels": 8}
    model = build_lbm(parse_config(tiny_yaml))
    with pytest.raises(ConfigError, match=message):
        translate_image(model, noise(16, 16), conditioning={key: noise(8, 8) for key in given})


def test_steps_are_reported(tiny_model: LbmModel) -> None:
    seen: list[tuple[int, int]] = []
    translate_image(
        tiny_model,
        noise(16, 16),
        num_inference_steps=3,
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert seen == [(index + 1, 3) for index in range(len(bridge_sigmas(3)))]


@pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="scikit-image is not installed")
def test_a_real_photograph_goes_through(tiny_model: LbmModel) -> None:
    from skimage import data

    photograph = Image.fromarray(data.astronaut()).crop((100, 0, 400, 256))
    result = translate_image(tiny_model, photograph)
    assert result.size == (300, 256)
    assert np.asarray(result).std() > 0


@pytest.mark.gpu
def test_accelerator_gives_the_cpus_picture(tiny_model: LbmModel) -> None:
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator on this machine")
    device: Any = torch.accelerator.current_accelerator()
    options: dict[str, Any] = {"num_inference_steps": 3, "seed": 1}
    on_cpu = np.asarray(translate_image(tiny_model, noise(64, 64), **options), dtype=np.float32)
    moved = copy.deepcopy(tiny_model).to(device)
    result = np.asarray(translate_image(moved, noise(64, 64), **options), dtype=np.float32)
    assert np.abs(result - on_cpu).mean() < 1.0


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "I", "P"])
@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("way", ["bucket", "keep"])
def test_empty_picture_is_an_error(mode: str, size: tuple[int, int], way: str, tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match=f"picture: the image is empty .{size[0]}×{size[1]}"):
        translate_image(tiny_model, Image.new(mode, size), size=way)


def test_empty_conditioning_is_an_error_that_names_it(tiny_yaml: dict[str, Any]) -> None:
    model = build_lbm(
        parse_config({**tiny_yaml, "unet_input_channels": 5, "conditioning_masks_keys": ["region"]})
    ).eval()
    with pytest.raises(ConfigError, match="region: the image is empty"):
        translate_image(model, noise(8, 8), conditioning={"region": Image.new("L", (0, 5))})


@pytest.mark.parametrize("noise_scale", [float("nan"), float("inf"), -0.1])
def test_noise_scale_must_be_finite_and_not_negative(noise_scale: float, tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match="noise_scale: expected 0 or more"):
        translate_image(tiny_model, noise(8, 8), noise_scale=noise_scale)


@pytest.mark.parametrize("resolution", [0, -64])
def test_resolution_must_be_positive(resolution: int, tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match="resolution: expected 1 or more"):
        translate_image(tiny_model, noise(8, 8), resolution=resolution)


@pytest.mark.parametrize("size", ["keep", (32, 32)])
def test_resolution_belongs_to_buckets(size: str | tuple[int, int], tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError, match="--resolution 64 has no effect"):
        translate_image(tiny_model, noise(8, 8), size=size, resolution=64)
