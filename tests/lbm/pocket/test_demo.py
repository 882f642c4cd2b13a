from pathlib import Path

import pytest
from PIL import Image

from sigmascope import load_run
from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.lbm.pocket.demo import DemoResult, run_demo


@pytest.mark.slow
def test_everything_it_claims_holds(demo: DemoResult) -> None:
    assert [check.claim for check in demo.checks if not check.passed] == []
    assert len(demo.checks) == 5


@pytest.mark.slow
def test_the_more_lora_the_closer_to_the_truth(demo: DemoResult) -> None:
    quality = [demo.psnr[f"base + LoRA at {scale}"] for scale in ("0", "0.5", "1")]
    assert quality == sorted(quality)
    assert quality[2] > quality[0] + 8


@pytest.mark.slow
def test_the_record_on_disk_has_every_stage_and_step(demo: DemoResult) -> None:
    run = load_run(demo.files["run"])
    names = [stage.name for stage in run.walk()]
    for stage in ("model_loading", "lora_application", "latent_encoding", "latent_decoding"):
        assert stage in names
    denoising = [stage for stage in run.walk() if stage.name == "denoising"]
    assert [len(stage.steps) for stage in denoising] == [1] * 5
    assert run.complete


@pytest.mark.slow
def test_the_folder_holds_the_lora_its_description_the_pictures_and_no_debris(demo: DemoResult) -> None:
    folder = demo.files["run"].parent
    assert sorted(path.name for path in folder.iterdir()) == [
        "base_plus_lora.png",
        "lora_layer_names.txt",
        "pocket_lora.safetensors",
        "pocket_lora_config.yaml",
        "run.json",
        "side_by_side.png",
    ]


@pytest.mark.slow  # a picture of a user's is worked on at 512 pixels
def test_a_picture_of_the_user_s_comes_back_at_its_own_size(tmp_path: Path) -> None:
    source = tmp_path / "mine.png"
    Image.effect_noise((150, 101), 40).convert("RGB").save(source)
    result = run_demo(tmp_path / "out", source_image=source, num_inference_steps=1)
    assert result.pictures["tuned"].size == (150, 101)
    assert result.psnr == {}


def test_a_picture_that_is_none_is_named(tmp_path: Path) -> None:
    source = tmp_path / "text.jpg"
    source.write_text("no picture")
    with pytest.raises(SigmascopeError, match=r"text\.jpg"):
        run_demo(tmp_path / "out", source_image=source)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.write_text("mine")
    with pytest.raises(SigmascopeError, match="taken"):
        run_demo(target)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(("rank", "steps"), [(0, 1), (8, 0)])
def test_an_option_that_makes_no_sense_leaves_no_folder(rank: int, steps: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run_demo(tmp_path / "out", rank=rank, num_inference_steps=steps)
    assert not (tmp_path / "out").exists()
