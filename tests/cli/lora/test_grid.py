import json
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file
from tests.cli.lora.conftest import Run
from tests.families import make_pipeline
from tests.families.loras import lora_state

from sigmascope.lbm.images import load_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline, a LoRA for it, and one with zeros."""
    path = tmp_path_factory.mktemp("pipeline")
    pipeline = make_pipeline("sd15")
    pipeline.save_pretrained(path / "tiny-sd")
    state = lora_state(pipeline, ["unet"], size=0.6)
    save_file(state, path / "style.safetensors")
    save_file({name: value * ("lora_A" in name) for name, value in state.items()}, path / "fresh.safetensors")
    return path


QUICK = ("--steps", 1, "--resolution", 32)


@pytest.mark.slow
def test_a_pipeline_paints_a_picture_and_a_page(sigmascope: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the lazy dog\n\n", encoding="utf-8")
    code, out, _ = sigmascope(
        "lora", "grid", folder / "tiny-sd", "--lora", folder / "style.safetensors", "--prompt", "a red fox",
        "--prompts", "prompts.txt", "--scales", "-1,2", "-o", "out/grid.png", "--guidance_scale", 2, "--json", *QUICK,
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["rows"] == ["a red fox", "the lazy dog"]
    assert [cell["scale"] for cell in found["cells"]] == [None, -1.0, 2.0] * 2
    assert [cell["psnr_db"] is None for cell in found["cells"]] == [True, False, False] * 2
    assert (found["model"], found["settings"]) == (
        "tiny-sd",
        "num_inference_steps 1, guidance_scale 2.0, width 32, height 32",
    )
    assert load_image(found["picture"]).width >= 640
    assert Path(found["page"]).read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "grid.cells",
        "grid.html",
        "grid.png",
    ]


@pytest.mark.slow
def test_a_lora_that_does_nothing_ends_with_1(sigmascope: Run, folder: Path) -> None:
    code, out, _ = sigmascope(
        "lora",
        "grid",
        folder / "tiny-sd",
        "--lora",
        folder / "fresh.safetensors",
        "--prompt",
        "a fox",
        *QUICK,
    )
    assert code == 1
    assert "fresh changes no picture: it does nothing, or less than one step of their colours." in out
    assert "nothing changes" in out


@pytest.mark.slow
def test_an_lbm_translates_pictures_in_place_of_prompts(sigmascope: Run, tmp_path: Path) -> None:
    from sigmascope import extract_lora
    from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH

    extract_lora(BASE_PATH, TUNED_PATH, tmp_path / "cool.safetensors")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 24), "teal").save(tmp_path / "photos" / "sea.png")
    code, out, _ = sigmascope(
        "lora",
        "grid",
        "pocket",
        "--lora",
        "cool.safetensors",
        "--images",
        "photos",
        "--resolution",
        "keep",
        "--json",
    )
    found = json.loads(out)
    assert (code, found["rows"], len(found["cells"])) == (0, ["sea.png"], 3)
    assert load_image(found["cells"][2]["picture"]).size == (32, 24)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("{pipeline}", "--lora", "missing.safetensors", "--prompt", "a"),
            "'missing.safetensors' does not exist",
        ),
        (("{pipeline}", "--lora", "{lora}"), "There is no prompt"),
        (("{pipeline}", "--lora", "{lora}", "--prompts", "empty.txt"), "There is no prompt"),
        (("{pipeline}", "--lora", "{lora}", "--prompts", "none.txt"), "'none.txt' does not exist"),
        (("{pipeline}", "--lora", "{lora}", "--prompts", "in.png"), "--prompts in.png cannot be read"),
        (("{pipeline}", "--lora", "{lora}", "--images", "x"), "--images is for LBMs"),
        (
            ("{pipeline}", "--lora", "{lora}", "--prompt", "a", "--scales", "a"),
            "--scales a: these are not numbers",
        ),
        (("{pipeline}", "--lora", "{lora}", "--prompt", "a", "-o", "x.gif"), "--output x.gif"),
        (
            ("{pipeline}", "--lora", "{lora}", "--prompt", "a", "--resolution", "8,16"),
            "expected WIDTHxHEIGHT or one side",
        ),
        (("pocket", "--lora", "{lora}"), "There is no picture to translate"),
        (("pocket", "--lora", "{lora}", "--prompt", "a"), "--prompt is for Diffusers pipelines"),
        (
            ("pocket", "--lora", "{lora}", "--images", "in.png", "-o", "in.png"),
            "--output in.png is the input in.png",
        ),
    ],
)
def test_flags_that_make_no_sense_are_named(
    sigmascope: Run, folder: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "in.png")
    places = {"pipeline": folder / "tiny-sd", "lora": folder / "style.safetensors"}
    code, _, err = sigmascope("lora", "grid", *(text.format(**places) for text in arguments))
    assert code != 0
    assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "in.png"]
