import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Terminal

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State

CONV_IN = "denoiser.conv_in.weight"


@pytest.fixture
def sigmascope(terminal: Terminal) -> Terminal:
    """Run the command line in this process, with an 80-column terminal's width."""
    return terminal


def models(files: "ModelPair") -> list[object]:
    return ["--base_model_path", files.base, "--tuned_model_path", files.tuned]


def lora_of(files: "ModelPair") -> Path:
    return files.base.with_name("lora.safetensors")


def extract_arguments(files: "ModelPair", *more: object) -> list[object]:
    return ["lora", "extract", *models(files), "--save_to", lora_of(files), *more]


def validate_arguments(files: "ModelPair", *more: object) -> list[object]:
    return ["lora", "validate", *models(files), "--lora_path", lora_of(files), *more]


def drop_module(path: Path, module: str) -> None:
    save_file({name: value for name, value in load_file(path).items() if not name.startswith(module)}, path)


def test_extract_then_validate_shows_blocks_bands_and_success_rate(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair(dtype=torch.bfloat16)
    made = sigmascope(*extract_arguments(files, "--rank", 9999, "--conv_rank", 9999))
    assert made.code == 0
    assert "10 of 10 layers (100.0 %)" in made.out
    proved = sigmascope(*validate_arguments(files))
    assert proved.code == 0
    assert "100.0 % (10 of 10 modules)" in proved.out
    assert "excellent 10  good 0  poor 0  noise 0" in proved.out
    assert all(block in proved.out for block in ("conv_in", "down_blocks.1", "mid_block", "up_blocks.0"))


def test_reports_fit_80_columns_and_are_plain_outside_a_terminal(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair(dtype=torch.bfloat16)
    made = sigmascope(*extract_arguments(files, "--rank", 2, "--conv_rank", 9999, "--verbose"))
    proved = sigmascope(*validate_arguments(files, "--verbose"))
    for outcome in (made, proved):
        assert max(map(len, outcome.out.splitlines())) <= 80
        assert "\x1b" not in outcome.out + outcome.err
        assert "…" not in outcome.out


def test_json_is_all_that_reaches_stdout(make_model_pair: "MakePair", sigmascope: Terminal) -> None:
    files = make_model_pair()
    made = json.loads(sigmascope(*extract_arguments(files, "--json")).out)
    proved = json.loads(sigmascope(*validate_arguments(files, "--json")).out)
    assert made["total_lora_modules"] == 10
    assert proved["success_rate"] == 100.0
    assert proved["relative_error"] == pytest.approx(made["relative_error"], rel=1e-4)


def test_every_option_has_both_spellings(make_model_pair: "MakePair", sigmascope: Terminal) -> None:
    files = make_model_pair()
    options = {
        "--rank": 3,
        "--conv-rank": 2,
        "--save-precision": "bf16",
        "--min-diff": 0.0,
        "--target-coverage": "extended",
        "--device": "cpu",
    }
    arguments = ["lora", "extract", *models(files), "--save-to", lora_of(files), "--json"]
    for flag, value in options.items():
        arguments += [flag, value]
    hyphens = [str(argument).replace("_model_path", "-model-path") for argument in arguments]
    report = json.loads(sigmascope(*hyphens).out)
    assert (
        report["options"].items()
        >= {
            "rank": 3,
            "conv_rank": 2,
            "save_precision": "bf16",
            "min_diff": 0.0,
            "target_coverage": "extended",
            "device": "cpu",
        }.items()
    )


def test_layer_names_are_listed_beside_the_lora_or_where_they_are_told(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    sigmascope(*extract_arguments(files))
    sigmascope(*validate_arguments(files))
    listed = files.base.with_name("lora_layer_names.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(listed) == sorted(files.layers)
    assert listed[0] == "denoiser.conv_in"
    names = files.base.with_name("names.txt")
    sigmascope(*validate_arguments(files, "--layer-names", names))
    assert len(names.read_text(encoding="utf-8").splitlines()) == 10


def test_an_incomplete_lora_exits_with_1_and_names_the_layer(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    sigmascope(*extract_arguments(files))
    drop_module(lora_of(files), "denoiser.mid_block")
    outcome = sigmascope(*validate_arguments(files))
    assert outcome.code == 1
    assert "90.0 % (9 of 10 modules)" in outcome.out
    assert "missing: denoiser.mid_block.resnets.0.conv_shortcut" in outcome.out


@pytest.mark.parametrize("asked", [False, True])
def test_a_list_of_layer_names_stays_when_the_lora_fails(
    asked: bool, make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    sigmascope(*extract_arguments(files))
    state = load_file(lora_of(files))
    save_file(
        {name.replace("denoiser.", "denoiser.of_another_model_"): state[name] for name in state},
        lora_of(files),
    )
    names = files.base.with_name("names.txt" if asked else "lora_layer_names.txt")
    names.write_text("denoiser.conv_in\n", encoding="utf-8")
    outcome = sigmascope(*validate_arguments(files, *(["--layer_names", names] if asked else [])))
    assert outcome.code == 1
    assert names.read_text(encoding="utf-8") == "denoiser.conv_in\n"
    assert f"Layer names were not written to {names}" in outcome.err
    none = sigmascope(*validate_arguments(files, "--min_success_rate", 0, "--layer_names", names, "--json"))
    assert none.code == 0
    assert json.loads(none.out)["layer_names"] is None
    assert names.read_text(encoding="utf-8") == "denoiser.conv_in\n"


def test_a_lora_that_leaves_layers_out_on_purpose_can_pass(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    sigmascope(*extract_arguments(files, "--target_coverage", "attention"))
    assert sigmascope(*validate_arguments(files)).code == 1
    assert sigmascope(*validate_arguments(files, "--min_success_rate", 20)).code == 0


def test_a_file_name_that_looks_like_markup_is_shown_as_it_is(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    target = files.base.with_name("[red]x[bold].safetensors")
    outcome = sigmascope("lora", "extract", *models(files), "--save_to", target)
    assert outcome.code == 0
    assert "LoRA extraction: [red]x[bold].safetensors" in outcome.out


def test_a_layer_name_that_looks_like_markup_is_shown_as_it_is(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    def add(base: "State", tuned: "State") -> None:
        base["denoiser.[/x].0.weight"], tuned["denoiser.[/x].0.weight"] = torch.zeros(4, 4), torch.eye(4)

    files = make_model_pair(edit=add)
    extraction, validation = sigmascope(*extract_arguments(files)), sigmascope(*validate_arguments(files))
    assert (extraction.code, validation.code) == (0, 0)
    assert "[/x]" in extraction.out
    assert "[/x]" in validation.out


def test_a_missing_base_is_named(make_model_pair: "MakePair", sigmascope: Terminal) -> None:
    files = make_model_pair()
    files.base.unlink()
    outcome = sigmascope(*extract_arguments(files))
    assert outcome.code != 0
    assert "base.safetensors: there is no base model" in outcome.err


def test_a_base_with_a_typo_in_its_name_is_guessed(make_model_pair: "MakePair", sigmascope: Terminal) -> None:
    files = make_model_pair()
    arguments = map(str, extract_arguments(files))
    outcome = sigmascope(*(one.replace("base.safetensors", "bose.safetensors") for one in arguments))
    assert outcome.code != 0
    assert "bose.safetensors: there is no base model" in outcome.err
    assert (
        "Did you mean base.safetensors? Checkpoints there: base.safetensors, tuned.safetensors."
        in outcome.err
    )


@pytest.mark.slow
def test_a_missing_base_is_made_from_its_backbone(
    sigmascope: Terminal, backbone: Path, backbone_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(backbone_config))  # JSON is YAML too
    create = [
        "--create_base_model",
        "--backbone_signature",
        backbone,
        "--config_path",
        tmp_path / "config.yaml",
    ]
    first = sigmascope(*extract_command(tmp_path, tuned="nothing.safetensors"), *map(str, create))
    assert first.code == 1
    assert "nothing.safetensors" in first.err
    state = load_file(tmp_path / "base.safetensors")
    key = "denoiser.conv_out.weight"
    save_file(state | {key: state[key] + 0.1}, tmp_path / "tuned.safetensors")
    (tmp_path / "base.safetensors").unlink()
    second = sigmascope(*extract_command(tmp_path, tuned="tuned.safetensors"), *map(str, create))
    assert second.code == 0, second.err
    assert "denoiser.conv_out.lora_up.weight" in load_file(tmp_path / "lora.safetensors")


def test_a_backbone_that_cannot_be_had_is_named(
    make_model_pair: "MakePair", sigmascope: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    files = make_model_pair()
    files.base.unlink()
    outcome = sigmascope(
        *extract_arguments(files, "--create_base_model", "--backbone_signature", "some/sdxl")
    )
    assert outcome.code == 1
    assert "hf download some/sdxl" in outcome.err
    assert not lora_of(files).exists()
    assert not files.base.exists()


def extract_command(folder: Path, *, tuned: str) -> list[str]:
    return [
        *("lora", "extract", "--base_model_path", str(folder / "base.safetensors")),
        *("--tuned_model_path", str(folder / tuned), "--save_to", str(folder / "lora.safetensors")),
    ]


def test_a_base_that_exists_is_used_under_create_base_model(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    assert sigmascope(*extract_arguments(make_model_pair(), "--create_base_model")).code == 0


def test_options_of_base_creation_alone_are_refused(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    outcome = sigmascope(*extract_arguments(make_model_pair(), "--config_path", "config.yaml"))
    assert outcome.code == 2
    assert "--config_path config.yaml is for --create_base_model only" in outcome.err


@pytest.mark.slow
def test_the_command_works_in_a_process_of_its_own(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=nan_weight)
    command = [sys.executable, "-m", "sigmascope", *map(str, extract_arguments(files))]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert f"tuned.safetensors: {CONV_IN} holds 1 NaN" in finished.stderr
    assert "Traceback" not in finished.stderr


def nan_weight(base: "State", tuned: "State") -> None:
    tuned[CONV_IN][0, 0, 0, 0] = float("nan")


def test_layer_names_never_replace_an_input_or_another_kind_of_file(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    sigmascope(*extract_arguments(files))
    linked = files.base.with_name("linked.txt")
    linked.hardlink_to(files.base)
    before = files.base.read_bytes()
    for target in (files.base, lora_of(files), files.base.with_name("config.yaml"), linked):
        outcome = sigmascope(*validate_arguments(files, "--layer_names", target))
        assert outcome.code == 2
        assert f"--layer_names {target}" in outcome.err
    assert linked.read_bytes() == before


def test_the_report_is_shown_where_the_layer_names_cannot_be_written(
    make_model_pair: "MakePair", sigmascope: Terminal
) -> None:
    files = make_model_pair()
    sigmascope(*extract_arguments(files))
    files.base.with_name("lora_layer_names.txt").mkdir()
    outcome = sigmascope(*validate_arguments(files))
    assert outcome.code == 0
    assert "10 of 10 modules" in outcome.out
    assert "Layer names were not written" in outcome.err
    asked = sigmascope(*validate_arguments(files, "--layer_names", files.base / "n.txt"))
    assert asked.code == 1
    assert "10 of 10 modules" in asked.out


def test_a_folder_is_no_lora(make_model_pair: "MakePair", sigmascope: Terminal) -> None:
    outcome = sigmascope("lora", "validate", *models(make_model_pair()), "--lora_path", ".")
    assert outcome.code == 2
    assert "The LoRA . is a folder" in outcome.err
