"""`sigmascope lora validate`: the picture, other kinds of pairs, and `--images`."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Terminal

from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lora.extract import ExtractOptions, extract_lora

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State


@pytest.fixture
def call(terminal: Terminal) -> Terminal:
    """`sigmascope lora validate` in this process, with an 80-column terminal's width."""
    return partial(terminal, "lora", "validate")


@pytest.fixture
def files(make_model_pair: "MakePair") -> "ModelPair":
    pair = make_model_pair()
    extract_lora(pair.base, pair.tuned, pair.base.with_name("lora.safetensors"), ExtractOptions(4, 4))
    return pair


def arguments(files: "ModelPair", *more: object) -> list[object]:
    lora = files.base.with_name("lora.safetensors")
    return ["--base_model_path", files.base, "--tuned_model_path", files.tuned, "--lora_path", lora, *more]


def test_the_picture_shows_every_layer(files: "ModelPair", call: Terminal) -> None:
    target = files.base.with_name("errors.svg")
    outcome = call(*arguments(files, "--picture", target))
    assert outcome.code == 0
    assert "Picture: " in outcome.out
    tips = [title.text or "" for title in ElementTree.parse(target).iter("{http://www.w3.org/2000/svg}title")]
    assert all(any(tip.startswith(f"{layer}: ") for tip in tips) for layer in files.layers)


@pytest.mark.parametrize(
    ("place", "message"),
    [("errors.gif", "is not SVG or PNG"), ("lora.safetensors/errors.svg", "cannot be reached")],
)
def test_a_place_for_the_picture_that_cannot_be_is_refused_first(
    place: str, message: str, files: "ModelPair", call: Terminal
) -> None:
    outcome = call(*arguments(files, "--picture", files.base.with_name("x").parent / place))
    assert outcome.code != 0
    assert message in " ".join(outcome.err.split())
    assert outcome.out == ""


def test_a_picture_in_the_place_of_the_layer_names_is_refused_as_that(
    files: "ModelPair", call: Terminal
) -> None:
    names = files.base.with_name("lora_layer_names.txt")
    names.write_text("conv_in\n")
    picture = files.base.with_name("errors.svg")
    picture.symlink_to(names)
    outcome = call(*arguments(files, "--picture", picture))
    assert outcome.code == 2
    assert "is where the layer names go" in " ".join(outcome.err.split())
    assert names.read_text() == "conv_in\n"


def test_what_fails_draws_no_picture(files: "ModelPair", call: Terminal) -> None:
    lora = files.base.with_name("lora.safetensors")
    kept = {key: value for key, value in load_file(lora).items() if not key.startswith("denoiser.conv_out.")}
    save_file(kept, lora)
    picture = files.base.with_name("errors.svg")
    picture.write_text("<svg/>")
    outcome = call(*arguments(files, "--picture", picture))
    assert outcome.code == 1
    assert picture.read_text() == "<svg/>"
    assert f"The picture {picture} was not drawn" in outcome.err


def test_fidelity_leads_and_what_is_applied_is_another_figure(files: "ModelPair", call: Terminal) -> None:
    """The LoRA of another fine-tuning: every module fits, and every layer becomes worse."""
    lora = files.base.with_name("lora.safetensors")
    minus = {
        key: -value if key.endswith("lora_up.weight") else value for key, value in load_file(lora).items()
    }
    save_file(minus, lora)
    outcome = call(*arguments(files))
    lines = [" ".join(line.split()) for line in outcome.out.splitlines() if line.strip()]
    assert lines[1].startswith("Fidelity 0.0 % of the change")
    assert lines[2].startswith("Applied 100.0 %")
    assert lines[3].startswith("error: The LoRA is for another model: it moves")
    assert outcome.out.count("another model") == 1
    report = json.loads(call(*arguments(files, "--json")).out)
    assert (report["fidelity"], report["success_rate"]) == (0.0, 100.0)


def test_a_lora_whose_modules_fit_nothing_is_told_in_one_sentence(files: "ModelPair", call: Terminal) -> None:
    lora = files.base.with_name("lora.safetensors")
    elsewhere = {key.replace("denoiser.", "denoiser.elsewhere_"): one for key, one in load_file(lora).items()}
    save_file(elsewhere, lora)
    outcome = call(*arguments(files))
    said = " ".join(outcome.out.split())
    assert outcome.code == 1
    modules = sum(key.endswith("lora_up.weight") for key in elsewhere)
    assert (
        f"The LoRA is for another model: {modules} of its {modules} modules fit no layer of this one." in said
    )
    assert "unmatched: " not in said


def test_a_lora_of_this_model_is_for_no_other(files: "ModelPair", call: Terminal) -> None:
    report = json.loads(call(*arguments(files, "--json")).out)
    assert report["fidelity"] == pytest.approx(100 * (1 - report["relative_error"]))
    assert "lora.other_model" not in {finding["id"] for finding in report["findings"]}


def test_json_names_what_each_module_is(files: "ModelPair", call: Terminal) -> None:
    report = json.loads(call(*arguments(files, "--json")).out)
    assert {module["kind"] for module in report["modules"]} == {"lora"}
    assert report["images"] is None


def test_a_pair_with_a_missing_key_can_be_compared_where_asked(
    make_model_pair: "MakePair", call: Terminal
) -> None:
    def drop(base: "State", tuned: "State") -> None:
        del tuned["denoiser.conv_out.weight"]

    whole = make_model_pair()
    lora = whole.base.with_name("lora.safetensors")
    extract_lora(whole.base, whole.tuned, lora, ExtractOptions(4, 4))
    save_file(
        {key: value for key, value in load_file(lora).items() if not key.startswith("denoiser.conv_out.")},
        lora,
    )
    pair = make_model_pair(edit=drop)
    assert call(*arguments(pair)).code != 0
    outcome = call(*arguments(pair, "--on_missing", "skip"))
    assert outcome.code == 0
    assert "denoiser.conv_out.weight" in outcome.out.replace("\n", "")


@pytest.fixture(scope="module")
def pocket_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pocket") / "lora.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(16, 16))
    return path


@pytest.fixture
def pocket(pocket_lora: Path, tmp_path: Path) -> list[object]:
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((128, 128)).save(folder / "[red]one.png")
    (folder / "broken.jpg").write_bytes(b"no picture")
    models: list[object] = ["--base_model_path", BASE_PATH, "--tuned_model_path", TUNED_PATH]
    return [*models, "--lora_path", pocket_lora, "--images", folder, "--device", "cpu"]


@pytest.mark.slow
def test_images_show_how_much_nearer_the_lora_comes(pocket: list[object], call: Terminal) -> None:
    outcome = call(*pocket)
    assert outcome.code == 0
    assert "Against the tuned model's pictures" in outcome.out
    assert "[red]one.png" in outcome.out
    assert "of the way from base to tuned latents" in outcome.out
    assert "unreadable: broken.jpg" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.slow
def test_images_are_in_the_json(pocket: list[object], call: Terminal) -> None:
    outcome = call(*pocket, "--json", "--seed", 3, "--num_inference_steps", 2, "--config_path", CONFIG_PATH)
    images = json.loads(outcome.out)["images"]
    assert (images["seed"], images["num_inference_steps"]) == (3, 2)
    overall = images["overall"]
    assert overall["with_lora"]["psnr"] > overall["base"]["psnr"] + 5
    assert overall["remaining"] < 0.5
    assert [file["file"] for file in images["unreadable"]] == ["broken.jpg"]


@pytest.mark.parametrize("flag", ["--seed", "--num_inference_steps", "--resolution"])
def test_options_of_images_without_images_are_refused(flag: str, files: "ModelPair", call: Terminal) -> None:
    outcome = call(*arguments(files, flag, 1))
    assert outcome.code == 2
    assert f"{flag} is for --images only" in outcome.err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--num_inference_steps", 0, "expected 1 or more"),
        ("--torch_dtype", "int3", "expected one of"),
        ("--device", "gpu", "is not a device"),
        ("--resolution", 0, "expected 1 or more"),
        ("--seed", -1, "seed"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_work(
    flag: str, value: object, message: str, pocket: list[object], call: Terminal
) -> None:
    outcome = call(*pocket, flag, value)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.out == ""


def test_a_missing_extra_is_named(
    pocket: list[object], call: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sigmascope.lbm.image_validation", None)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    for name in [name for name in sys.modules if name.startswith("sigmascope.lbm.")]:
        monkeypatch.delitem(sys.modules, name)
    outcome = call(*pocket)
    assert outcome.code == 2
    assert "pip install -e " in outcome.err
    assert "[lbm]" in outcome.err


def test_work_in_any_number_of_threads(files: "ModelPair", call: Terminal) -> None:
    reports = [json.loads(call(*arguments(files, "--json", "--workers", n)).out) for n in (1, 3)]
    assert reports[0]["modules"] == reports[1]["modules"]
    assert torch.get_num_threads() >= 1


def alone(files: "ModelPair") -> Path:
    return files.base.with_name("lora.safetensors")


def test_the_lora_alone_is_validated_against_the_models_of_its_side_car(
    files: "ModelPair", call: Terminal
) -> None:
    whole = call(*arguments(files, "--json"))
    short = call(alone(files), "--json")
    assert short.code == whole.code == 0
    first, second = json.loads(short.out), json.loads(whole.out)
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert (first["base"], first["tuned"]) == (str(files.base), str(files.tuned))
    assert f"As lora_config.yaml says: base {files.base}, tuned {files.tuned}" in short.err


def test_a_model_of_the_side_car_that_is_gone_is_named_with_its_key_and_flag(
    files: "ModelPair", call: Terminal
) -> None:
    moved = files.tuned.rename(files.tuned.with_name("moved.safetensors"))
    outcome = call(alone(files))
    said = " ".join(outcome.err.split())
    assert outcome.code == 2
    assert f"lora_config.yaml: tuned_model is tuned.safetensors, and there is no {files.tuned}." in said
    assert "Next: Give --tuned_model_path with its place." in said
    again = call(alone(files), "--tuned_model_path", moved, "--json")
    assert again.code == 0
    assert json.loads(again.out)["tuned"] == str(moved)


def test_flags_win_over_the_side_car(files: "ModelPair", call: Terminal) -> None:
    other = Path(shutil.copy(files.tuned, files.tuned.with_name("other.safetensors")))
    outcome = call(alone(files), "--tuned_model_path", other, "--json")
    found = json.loads(outcome.out)
    assert (found["base"], found["tuned"]) == (str(files.base), str(other))


def test_without_a_side_car_the_flags_are_asked_for(files: "ModelPair", call: Terminal) -> None:
    files.base.with_name("lora_config.yaml").unlink()
    outcome = call(alone(files))
    assert outcome.code == 2
    assert "Give --base_model_path and --tuned_model_path." in " ".join(outcome.err.split())
    assert call(*arguments(files)).code == 0


def test_a_lora_is_given_once(files: "ModelPair", call: Terminal) -> None:
    assert "two LoRAs" in call(alone(files), "--lora_path", alone(files)).err
    assert "got no LoRA" in call("--base_model_path", files.base).err
    missing = call(files.base.with_name("lore.safetensors"))
    assert missing.code == 1
    assert "Did you mean lora.safetensors?" in " ".join(missing.err.split())


def test_models_are_found_by_their_names_on_the_hub(
    files: "ModelPair", call: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, path in (("base", files.base), ("tuned", files.tuned)):
        model = tmp_path / f"hub/models--some--{name}"
        (model / "refs").mkdir(parents=True)
        (model / "refs/main").write_text("0a1b2c")
        (model / "snapshots/0a1b2c").mkdir(parents=True)
        path.rename(model / "snapshots/0a1b2c/model.safetensors")
    outcome = call(
        "--base_model_path", "some/base", "--tuned_model_path", "some/tuned", alone(files), "--json"
    )
    assert outcome.code == 0
    assert json.loads(outcome.out)["base"] == str(tmp_path / "hub/models--some--base/snapshots/0a1b2c")
    missing = call("--base_model_path", "some/other", "--tuned_model_path", "some/tuned", alone(files))
    assert missing.code == 1
    assert "hf download some/other" in " ".join(missing.err.split())


def test_a_lora_is_found_by_its_name_on_the_hub_with_its_side_car(
    files: "ModelPair", call: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    snapshot = tmp_path / "hub/models--me--lora/snapshots/0a1b2c"
    for folder in (snapshot, snapshot.parents[1] / "refs"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs/main").write_text("0a1b2c")
    lora = alone(files).rename(snapshot / "lora.safetensors")
    named = f"base_model: {files.base}\ntuned_model: {files.tuned}\n"
    (snapshot / "lora_config.yaml").write_text(named)
    outcome = call("me/lora", "--json")
    found = json.loads(outcome.out)
    assert (outcome.code, found["lora"], found["base"]) == (0, str(lora), str(files.base))
    assert found["layer_names"] == "lora_layer_names.txt"
    assert sorted(path.name for path in snapshot.iterdir()) == ["lora.safetensors", "lora_config.yaml"]
    assert "hf download me/other" in " ".join(call("me/other").err.split())
    Path("me").mkdir()
    said = " ".join(call("me/other").err.split())
    assert "does not exist, and the hub's local cache has no such model." in said
    assert "hf download me/other" in said
