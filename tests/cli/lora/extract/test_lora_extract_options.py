"""Every option of `sigmascope lora extract` reaches the library, and what contradicts is refused with a way out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Terminal

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State

ATTENTION = "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
CONV_IN = "denoiser.conv_in"


@pytest.fixture
def sigmascope(terminal: Terminal) -> Terminal:
    """Terminal the command line in this process, with an 80-column terminal's width."""
    return terminal


def target(files: "ModelPair") -> Path:
    return files.base.with_name("lora.safetensors")


def arguments(files: "ModelPair", *more: object) -> list[object]:
    models = ["--base_model_path", files.base, "--tuned_model_path", files.tuned]
    return ["lora", "extract", *models, "--save_to", target(files), *more]


@pytest.fixture
def extract(make_model_pair: "MakePair", sigmascope: Terminal) -> Callable[..., dict[str, Any]]:
    """Extract with these options, and give the report."""

    def call(*options: object, edit: Any = None) -> dict[str, Any]:
        outcome = sigmascope(*arguments(make_model_pair(edit=edit), *options, "--json"))
        assert outcome.code == 0, outcome.err
        report: dict[str, Any] = json.loads(outcome.out)
        return report

    return call


Extract = Callable[..., dict[str, Any]]


def ranks(report: dict[str, Any]) -> dict[str, int]:
    return {module["name"]: module["rank"] for module in report["modules"]}


# How much rank


def asked(report: dict[str, Any]) -> Any:
    text = report["options"]["ranks"]
    return json.loads(text) if text.startswith("{") else text


def test_fixed_ranks_are_the_default(extract: Extract) -> None:
    report = extract()
    assert asked(report) == "fixed:32,conv=16"
    assert (report["options"]["rank"], report["options"]["conv_rank"]) == (32, 16)


def test_a_size_is_the_files(extract: Extract) -> None:
    report = extract("--max_size", "14KB")
    assert asked(report) == {"budget": {"max_size": 14 * 1024}}
    assert Path(report["lora"]).stat().st_size == report["file_bytes"] <= 14 * 1024
    assert report["options"]["rank"] is None


def test_an_error_is_the_reports(extract: Extract) -> None:
    report = extract("--max_error", "30%", "--budget_weights", "plain")
    assert asked(report) == {"budget": {"max_error": 0.3}}
    assert 0.2 < report["relative_error"] <= 0.3
    assert report["weighted_error"] is None


def test_an_error_counts_by_the_size_of_the_weight_unless_told_otherwise(extract: Extract) -> None:
    report = extract("--max_error", "30%")
    assert 0.2 < report["weighted_error"] <= 0.3 < report["relative_error"]


def test_weights_and_limits_of_a_budget(extract: Extract) -> None:
    limits = ["--max_rank", 6, "--max_conv_rank", 3, "--min_rank", 2]
    report = extract("--max_error", "80%", "--weight_for", "attn1=4", "--weight_for", "conv_in=2", *limits)
    budget = asked(report)["budget"]
    assert budget["weight_for"] == [["attn1", 4.0], ["conv_in", 2.0]]
    assert (budget["max_rank"], budget["max_conv_rank"], budget["min_rank"]) == (6, 3, 2)
    for module in report["modules"]:
        assert 2 <= module["rank"] <= (3 if len(module["shape"]) > 2 else 6)


def test_a_method(extract: Extract) -> None:
    report = extract("--rank_method", "energy:0.6,conv=0.3", "--max_rank", 4, "--max_conv_rank", 2)
    assert asked(report) == "energy:0.6,conv=0.3,max=4,max_conv=2"
    assert max(ranks(report).values()) == 4
    assert ranks(report)[CONV_IN] <= 2


def test_a_dynamic_method_of_kohya_s_tools(extract: Extract) -> None:
    report = extract("--dynamic_method", "sv_ratio", "--dynamic_param", 2, "--rank", 5, "--conv_rank", 3)
    assert asked(report) == "sv_ratio:2.0,max=5,max_conv=3"


def test_ranks_of_single_layers_and_exclusions(extract: Extract) -> None:
    report = extract(
        *("--rank", 4, "--conv_rank", 4, "--rank_for", r"attn1=7", "--rank_for", "conv_in=full"),
        *("--exclude", "mid_block", "--exclude", "conv_out"),
    )
    found = ranks(report)
    assert (found[ATTENTION], found[CONV_IN], found["denoiser.time_embedding.linear_1"]) == (7, 8, 4)
    assert asked(report)["exclude"] == ["mid_block", "conv_out"]
    left_out = {layer["name"]: layer["reason"] for layer in report["left_out"]}
    assert left_out == {
        "denoiser.mid_block.resnets.0.conv_shortcut": "excluded",
        "denoiser.conv_out": "excluded",
    }


# What is compared and how it is stored


@pytest.mark.parametrize("name", ["native", "kohya", "peft", "comfyui"])
def test_a_format(extract: Extract, name: str) -> None:
    report = extract("--format", name)
    assert (report["format"], report["options"]["format"]) == (name, name)


def test_the_format_is_chosen_by_itself(extract: Extract) -> None:
    report = extract()
    assert (report["format"], report["options"]["format"]) == ("native", "auto")


def shift_bias(base: "State", tuned: "State") -> None:
    tuned["denoiser.conv_in.bias"] = base["denoiser.conv_in.bias"] + 0.5


def test_biases_and_norms(extract: Extract) -> None:
    report = extract("--biases_and_norms", edit=shift_bias)
    assert list(report["diffs"]) == ["denoiser.conv_in.bias"]
    assert report["uncovered"] == {}
    stored = load_file(report["lora"])["denoiser.conv_in.diff_b"]
    torch.testing.assert_close(stored, torch.full((8,), 0.5, dtype=torch.float16))
    assert list(extract(edit=shift_bias)["uncovered"]) == ["denoiser.conv_in.bias"]


def change_vae(base: "State", tuned: "State") -> None:
    tuned["vae.vae_model.encoder.conv_in.weight"] = base["vae.vae_model.encoder.conv_in.weight"] + 0.1


def test_parts(extract: Extract) -> None:
    report = extract("--parts", "vae", edit=change_vae)
    assert list(ranks(report)) == ["vae.vae_model.encoder.conv_in"]
    assert report["options"]["pairing"]["parts"] == ["vae"]
    both = extract("--parts", "vae, denoiser", edit=change_vae)
    assert len(both["modules"]) == 11


def lose(base: "State", tuned: "State") -> None:
    del tuned[f"{CONV_IN}.weight"]


def widen(base: "State", tuned: "State") -> None:
    tuned[f"{CONV_IN}.weight"] = torch.zeros(8, 9, 3, 3)


def quantise(base: "State", tuned: "State") -> None:
    tuned[f"{CONV_IN}.weight"] = tuned[f"{CONV_IN}.weight"].to(torch.int8)


def narrow(base: "State", tuned: "State") -> None:
    tuned[f"{CONV_IN}.weight"] = tuned[f"{CONV_IN}.weight"].bfloat16()


UNFIT = {
    "--on_missing": (lose, "lora.missing_keys"),
    "--on_shape_change": (widen, "lora.shapes_changed"),
    "--on_integer": (quantise, "lora.integer_tensors_changed"),
    "--on_mixed_dtypes": (narrow, "lora.mixed_dtypes"),
}


@pytest.mark.parametrize("flag", UNFIT)
def test_what_does_not_fit_is_left_out_on_request_and_named(extract: Extract, flag: str) -> None:
    edit, finding = UNFIT[flag]
    report = extract(flag, "skip", edit=edit)
    assert report["options"]["pairing"][flag.removeprefix("--")] == "skip"
    assert CONV_IN not in ranks(report)
    assert [found["id"] for found in report["findings"]] == [finding]


@pytest.mark.parametrize("flag", UNFIT)
def test_what_does_not_fit_is_refused_with_the_flag_that_lets_it_pass(
    make_model_pair: "MakePair", sigmascope: Terminal, flag: str
) -> None:
    files = make_model_pair(edit=UNFIT[flag][0])
    outcome = sigmascope(*arguments(files, flag, "error"))
    assert outcome.code == 1
    assert f"{CONV_IN}.weight" in outcome.err
    assert not target(files).exists()
    if flag != "--on_integer":  # codes of a quantised weight mean nothing: to leave them out is no way out
        assert f"{flag} " in outcome.err


def test_a_variant_of_diffusers_folders(sigmascope: Terminal, tmp_path: Path) -> None:
    base = {"conv_in.weight": torch.randn(4, 4, 3, 3), "conv_out.weight": torch.randn(4, 4, 3, 3)}
    base["time_embedding.linear_1.weight"] = torch.randn(8, 4)
    for name, sign in (("base", 0.0), ("tuned", 1.0)):
        folder = tmp_path / name / "unet"
        folder.mkdir(parents=True)
        for variant, size in (("", 0.0), (".fp16", 0.1)):
            state = {key: weight + sign * size for key, weight in base.items()}
            save_file(state, folder / f"diffusion_pytorch_model{variant}.safetensors")
        index = {"_class_name": "Pipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
        (tmp_path / name / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    command = ["lora", "extract", "--base_model_path", tmp_path / "base", "--tuned_model_path"]
    command += [tmp_path / "tuned", "--save_to", tmp_path / "lora.safetensors", "--json"]
    same = sigmascope(*command)
    assert same.code == 1
    assert "same weights" in same.err
    different = sigmascope(*command, "--variant", "fp16")
    assert json.loads(different.out)["options"]["pairing"]["variant"] == "fp16"
    assert len(json.loads(different.out)["modules"]) == 3


def test_workers(extract: Extract) -> None:
    assert extract("--workers", 1)["options"]["workers"] == 1
    assert extract()["options"]["workers"] is None


# Refusals


CONTRADICTIONS: dict[tuple[object, ...], str] = {
    ("--max_size", "1MB", "--max_error", "5%"): "--max_size and --max_error cannot be used together",
    ("--max_size", "1MB", "--rank", 4): "--rank and --max_size cannot be used together",
    ("--max_error", "5%", "--conv_rank", 4): "--conv_rank and --max_error cannot be used together",
    ("--rank_method", "energy:0.9", "--max_size", "1MB"): "cannot be used together",
    ("--rank_method", "energy:0.9", "--dynamic_method", "sv_fro"): "cannot be used together",
    ("--dynamic_method", "sv_fro"): "--dynamic_param is missing",
    ("--dynamic_param", 0.9): "--dynamic_method is missing",
    ("--weight_for", "attn1=2"): "--weight_for is for --max_size and --max_error only",
    ("--rank", 4, "--max_rank", 8): "--max_rank has no effect on a fixed rank",
    ("--max_error", "0"): "--max_error 0% is not a limit",
    ("--max_error", "250%"): "--max_error 250%",
    ("--max_size", "huge"): "--max_size huge is not a size",
    ("--max_size", "1MB", "--min_rank", 9, "--max_rank", 8): "--max_rank 8 is below the minimum rank 9",
    ("--rank_method", "energy:2"): "energy does not take 2",
    ("--rank_method", "magic:0.9"): "--rank_method magic:0.9",
    ("--rank_for", "attn1"): "--rank_for attn1 has no value",
    ("--rank_for", "nothing=4"): "'nothing' matches none of the 10 layers",
    ("--exclude", "nothing"): "'nothing' matches none of the 10 layers",
    ("--exclude", "("): "is not a valid regular expression",
    ("--max_size", "1MB", "--weight_for", "nothing=2"): "'nothing' matches none of the 10 layers",
    ("--max_size", "1KB"): "--max_size 1 KB is too small",
    ("--max_error", "0.01%"): "not above what rounding to storage precision costs",
    ("--exclude", "."): "leave out all 10 changed layers",
    ("--workers", 0): "--workers 0 leaves no worker",
    ("--parts", "unet"): "--parts unet is not known",
    ("--parts", ""): "--parts names no part",
    ("--min_diff", -1): "--min_diff -1",
    ("--rank", 0): "rank 0 keeps nothing",
    (
        "--format",
        "peft",
        "--biases_and_norms",
    ): "--biases_and_norms: peft files hold up and down factors only",
}


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=lambda options: " ".join(map(str, options)))
def test_what_contradicts_or_makes_no_sense_is_refused_with_a_next_step(
    make_model_pair: "MakePair", sigmascope: Terminal, options: tuple[object, ...]
) -> None:
    files = make_model_pair(edit=shift_bias)
    outcome = sigmascope(*arguments(files, *options))
    assert outcome.code == 2
    assert CONTRADICTIONS[options] in outcome.err.replace("\n", " ")
    assert "Next: " in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert {path.name for path in files.base.parent.iterdir()} == {"base.safetensors", "tuned.safetensors"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--format", "diffusers"),
        ("--on_missing", "ignore"),
        ("--on_mixed_dtypes", "no"),
        ("--save_precision", "fp8"),
        ("--target_coverage", "most"),
        ("--rank", "many"),
    ],
)
def test_a_value_that_is_none_of_the_choices_is_a_usage_error(
    make_model_pair: "MakePair", sigmascope: Terminal, flag: str, value: str
) -> None:
    outcome = sigmascope(*arguments(make_model_pair(), flag, value))
    assert outcome.code == 2
    assert f"'{flag}'" in outcome.err


# Help


OPTIONS = [
    *("--base_model_path", "--tuned_model_path", "--save_to", "--rank", "--conv_rank", "--max_size"),
    *("--max_error", "--weight_for", "--rank_method", "--dynamic_method", "--dynamic_param", "--max_rank"),
    *("--max_conv_rank", "--min_rank", "--rank_for", "--exclude", "--save_precision", "--format"),
    *("--min_diff", "--target_coverage", "--biases_and_norms", "--parts", "--on_missing"),
    *("--on_shape_change", "--on_integer", "--on_mixed_dtypes", "--variant", "--device", "--workers"),
    *("--create_base_model", "--backbone_signature", "--config_path", "--verbose", "--json"),
]


def test_the_help_tells_of_every_option_in_80_columns(sigmascope: Terminal) -> None:
    outcome = sigmascope("lora", "extract", "--help")
    assert outcome.code == 0
    shown = set(re.findall(r"--[a-z_]+", outcome.out))
    assert set(OPTIONS) <= shown
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "Examples:" in outcome.out


@pytest.mark.parametrize("option", ["--max_size", "--rank_for", "--biases_and_norms", "--on_missing"])
def test_hyphens_work_as_underscores_do(
    make_model_pair: "MakePair", sigmascope: Terminal, option: str
) -> None:
    values = {
        "--max_size": ["1MB"],
        "--rank_for": ["attn1=3"],
        "--biases_and_norms": [],
        "--on_missing": ["skip"],
    }
    spelt = option.replace("_", "-")
    assert sigmascope(*arguments(make_model_pair(), spelt, *values[option])).code == 0
