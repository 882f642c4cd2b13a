import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lbm import image_validation
from sigmascope.lbm.image_validation import ImageOptions, ImageReport, validate_images
from sigmascope.lbm.images import image_to_tensor
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, build_lbm, load_lbm

RANK = 2


@dataclass(frozen=True)
class Files:
    base: Path
    tuned: Path
    lora: Path
    pictures: Path

    def validate(self, options: ImageOptions | None = None, **more: Any) -> ImageReport:
        return validate_images(self.base, self.tuned, self.lora, self.pictures, options, **more)


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_config: Any) -> Path:
    """Two tiny models whose difference is of rank 2 in every layer, and that difference as a LoRA."""
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    state = build_lbm(tiny_config).state_dict()
    tuned, lora = dict(state), {}
    for key, weight in state.items():
        if key.startswith("denoiser.") and key.endswith(".weight") and weight.ndim in (2, 4):
            up = torch.randn(weight.shape[0], RANK) * 0.1
            down = torch.randn(RANK, *weight.shape[1:]) * 0.1
            tuned[key] = weight + (up @ down.flatten(1)).reshape(weight.shape)
            module = key.removesuffix(".weight")
            lora[f"{module}.lora_up.weight"] = up.reshape(*up.shape, *(1 for _ in weight.shape[2:]))
            lora[f"{module}.lora_down.weight"] = down
            lora[f"{module}.alpha"] = torch.tensor(float(RANK))
    save_file(state, place / "base.safetensors")
    save_file(tuned, place / "tuned.safetensors")
    save_file(lora, place / "lora.safetensors")
    return place


@pytest.fixture
def files(models: Path, tmp_path: Path, tiny_yaml: dict[str, Any]) -> Files:
    return folder_of(models, tmp_path, json.dumps(tiny_yaml))  # JSON is YAML too


def folder_of(models: Path, tmp_path: Path, config: str) -> Files:
    """The models, a LoRA to edit and a folder with two pictures."""
    for name in ("base", "tuned"):
        (tmp_path / f"{name}.safetensors").symlink_to(models / f"{name}.safetensors")
    shutil.copy(models / "lora.safetensors", tmp_path)
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "pictures").mkdir()
    picture(32, 24, 1).save(tmp_path / "pictures" / "b.png")
    picture(40, 56, 2).save(tmp_path / "pictures" / "a.jpg")
    base, tuned, lora = (tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "lora"))
    return Files(base, tuned, lora, tmp_path / "pictures")


def edit_lora(files: Files, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(files.lora)
    edit(tensors)
    save_file(tensors, files.lora)


@torch.no_grad()
def one_step_latent(model: LbmModel, image: Image.Image) -> torch.Tensor:
    """ẑ_target = z_source − v(z_source, 1000), from diffusers' own parts; the picture has the bucket's size."""
    z_source = (model.vae.vae_model.encode(image_to_tensor(image)).latent_dist.mode() - 0.25) * 0.5
    velocity = model.denoiser(z_source, torch.tensor([1000.0]), encoder_hidden_states=None).sample
    latent: torch.Tensor = z_source - velocity
    return latent


@pytest.mark.slow
def test_errors_are_those_of_the_models_own_results(files: Files) -> None:
    for name in ("a.jpg", "b.png"):
        (files.pictures / name).unlink()
    image = picture(64, 64, 3)
    image.save(files.pictures / "square.png")
    base, tuned = load_lbm(files.base), load_lbm(files.tuned)
    pixels = [np.asarray(translate_image(model, image), np.float64) for model in (base, tuned)]
    latents = [one_step_latent(model, image).double() for model in (base, tuned)]
    (found,) = files.validate().pictures
    mean_square = ((pixels[0] - pixels[1]) ** 2).mean()
    assert found.base.psnr == pytest.approx(10 * math.log10(255**2 / mean_square))
    assert found.base.image_error == pytest.approx(
        np.linalg.norm(pixels[0] - pixels[1]) / np.linalg.norm(pixels[1])
    )
    expected = (latents[0] - latents[1]).norm() / latents[1].norm()
    assert found.base.latent_error == pytest.approx(float(expected), rel=1e-4)


@dataclass(frozen=True)
class Whole:
    """A validation of the LoRA that is the whole change, and what was told and loaded meanwhile."""

    report: ImageReport
    told: list[tuple[int, int, str]]
    alive: list[int]


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory, tiny_config: Any) -> Whole:
    files = folder_of(models, tmp_path_factory.mktemp("whole"), tiny_config.to_yaml())
    (files.pictures / "broken.png").write_bytes((files.pictures / "b.png").read_bytes()[:60])
    (files.pictures / "text.jpg").write_text("no picture")
    (files.pictures / "notes.txt").write_text("not meant")
    loaded: list[weakref.ref[LbmModel]] = []
    alive: list[int] = []
    told: list[tuple[int, int, str]] = []

    def load(*args: Any, **more: Any) -> LbmModel:
        alive.append(sum(ref() is not None for ref in loaded))
        model = load_lbm(*args, **more)
        loaded.append(weakref.ref(model))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_validation, "load_lbm", load)
        report = files.validate(
            ImageOptions(num_inference_steps=2),
            progress=lambda done, total, what: told.append((done, total, what)),
        )
    return Whole(report, told, alive)


def test_the_whole_change_gives_the_tuned_pictures(whole: Whole) -> None:
    report = whole.report
    assert [errors.picture for errors in report.pictures] == ["a.jpg", "b.png"]
    assert report.not_applied == ()
    for errors in report.pictures:
        assert errors.base.psnr < 45 < errors.with_lora.psnr
        assert errors.remaining is not None
        assert errors.remaining < 1e-4


def test_damaged_pictures_are_named_and_the_others_go_on(whole: Whole) -> None:
    assert [file.file for file in whole.report.unreadable] == ["broken.png", "text.jpg"]
    assert "not a picture" in whole.report.unreadable[1].reason
    assert len(whole.report.pictures) == 2


def test_models_are_in_memory_one_at_a_time(whole: Whole) -> None:
    assert whole.alive == [0, 0]


def test_progress_tells_model_and_picture(whole: Whole) -> None:
    assert whole.told[0] == (0, 6, "tuned: a.jpg")
    assert whole.told[3] == (3, 6, "base: b.png")
    assert whole.told[5] == (5, 6, "base + LoRA: b.png")


def test_half_the_change_lies_between(files: Files) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for key in tensors:
            if key.endswith(".alpha"):
                tensors[key] /= 2

    edit_lora(files, halve)
    (files.pictures / "b.png").unlink()
    left = files.validate().overall.remaining
    assert left is not None
    assert 0.2 < left < 0.9


@pytest.mark.slow
def test_a_lora_of_zeros_changes_nothing(files: Files) -> None:
    edit_lora(files, lambda tensors: [tensors[key].zero_() for key in tensors if "lora_up" in key])
    (files.pictures / "b.png").unlink()
    for errors in files.validate().pictures:
        assert errors.with_lora == errors.base


@pytest.mark.slow
def test_kohya_s_names_and_whole_differences_are_applied(files: Files) -> None:
    expected = files.validate()

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            module, dot, end = key.partition(".lora_" if ".lora_" in key else ".alpha")
            flat = "lora_unet_" + module.removeprefix("denoiser.").replace(".", "_")
            tensors[flat + dot + end] = tensors.pop(key)
        up = tensors.pop("lora_unet_conv_in.lora_up.weight")
        down = tensors.pop("lora_unet_conv_in.lora_down.weight")
        del tensors["lora_unet_conv_in.alpha"]
        tensors["lora_unet_conv_in.diff"] = (up.flatten(1) @ down.flatten(1)).reshape(-1, *down.shape[1:])

    edit_lora(files, rename)
    found = files.validate()
    assert found.not_applied == ()
    left, before = found.overall.remaining, expected.overall.remaining
    assert left == pytest.approx(before, abs=1e-5)


def test_modules_that_fit_nothing_are_named(files: Files) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["denoiser.nowhere.lora_up.weight"] = torch.ones(4, 1)
        tensors["denoiser.nowhere.lora_down.weight"] = torch.ones(1, 4)
        tensors["denoiser.conv_in.lora_up.weight"] = torch.ones(3, RANK, 1, 1)

    edit_lora(files, add)
    (files.pictures / "b.png").unlink()
    assert set(files.validate().not_applied) == {"denoiser.nowhere", "denoiser.conv_in"}


@pytest.mark.parametrize("content", [None, b"no picture"])
def test_without_a_picture_there_is_nothing_to_do(content: bytes | None, files: Files) -> None:
    for path in files.pictures.iterdir():
        path.unlink()
    if content is not None:
        (files.pictures / "a.png").write_bytes(content)
    with pytest.raises(ConfigError, match="no picture that can be read"):
        files.validate()


def test_a_folder_that_is_none_is_named(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"base\.safetensors cannot be listed"):
        validate_images(files.base, files.tuned, files.lora, files.base)


def test_a_model_that_needs_conditioning_is_refused(files: Files, tiny_yaml: dict[str, Any]) -> None:
    config = files.base.with_name("config.yaml")
    config.write_text(json.dumps(tiny_yaml | {"unet_input_channels": 5, "conditioning_masks_keys": ["mask"]}))
    with pytest.raises(ConfigError, match="needs more than a source picture \\(mask\\)"):
        files.validate()


@pytest.mark.slow
def test_a_seed_gives_the_same_numbers_again(files: Files) -> None:
    (files.pictures / "b.png").unlink()
    options = ImageOptions(num_inference_steps=2, seed=5)
    assert files.validate(options).pictures == files.validate(options).pictures


def test_nothing_is_left_behind_by_a_failure(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    edit_lora(files, lambda tensors: tensors["denoiser.conv_in.lora_up.weight"].fill_(math.nan))
    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_in"):
        files.validate()
    assert list(place.iterdir()) == []
