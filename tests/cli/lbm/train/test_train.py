"""`sigmascope lbm train`, in this process."""

import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tests.lbm.training.small_run import SmallRun
from typer.testing import CliRunner

from sigmascope import load_run
from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, FileError, ModelMismatchError, WriteError


def invoke(run: SmallRun, *arguments: str, **keys: Any) -> Any:
    path = run.folder / "train.yaml"
    path.write_text(yaml.safe_dump(run.keys(**keys)), encoding="utf-8")
    return CliRunner().invoke(app, ["lbm", "train", "--path_config", str(path), *arguments])


@pytest.fixture(scope="session")
def one_step(small_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of one step, to be copied."""
    folder = shutil.copytree(small_files, tmp_path_factory.mktemp("trained") / "run")
    assert invoke(SmallRun(folder), "--max_steps", "1").exit_code == 0
    return folder


@pytest.fixture
def trained(one_step: Path, tmp_path: Path) -> SmallRun:
    """A training that has made one step, in a folder of the test's own."""
    return SmallRun(shutil.copytree(one_step, tmp_path / "run"))


def test_a_dry_run_shows_what_would_be_trained_and_writes_nothing(small_run: SmallRun) -> None:
    found = invoke(small_run, "--dry_run", "--json", trainable_lora_modules=["conv_out"])
    facts = json.loads(found.stdout)
    # conv_out is 16 → 4 with a 3×3 kernel: r·(16·9) + 4·r at rank 2
    assert facts["trained_parameters"] == 2 * (16 * 9 + 4)
    trained = [row for row in facts["rows"] if row["trained_parameters"]]
    assert [(row["block"], row["ranks"]) for row in trained] == [("conv_out", [2])]
    assert (facts["samples"], facts["total_steps"], facts["picture_size"]) == (10, 5, [32, 32])
    memory = facts["memory"]
    assert memory["gradients"] == 4 * facts["trained_parameters"]
    assert memory["optimizer"] == pytest.approx(2 * memory["gradients"], rel=0.01)  # AdamW's two averages
    assert memory["weights"] >= 4 * facts["frozen_parameters"]
    assert not small_run.out.exists()
    assert "conv_out" in invoke(small_run, "--dry_run").stdout


def test_a_dry_run_leads_with_the_five_facts_that_matter(small_run: SmallRun) -> None:
    found = invoke(small_run, "--dry_run", trainable_lora_modules=["conv_out"], gradient_accumulation_steps=2)
    lines = found.stdout.splitlines()
    share = 2 * (16 * 9 + 4)
    assert lines[0].startswith(f"Trains  a LoRA of rank 2 on {small_run.base}: {share} values (")
    assert " in 1 of " in lines[0]
    assert lines[1] == "Data    10 pairs in 2 shards, first batch 32×32"
    assert lines[2] == "Steps   3 in 1 epoch: batch 2 × 2 accumulated × 1 process = 4 pairs a step"
    assert lines[3].startswith("Needs   about ")
    assert lines[3].endswith("time unknown (no step of this training has been measured)")
    assert lines[4] == f"Writes  to {small_run.out}, begins anew"


def test_a_dry_run_says_how_often_max_steps_goes_through_the_data(small_run: SmallRun) -> None:
    lines = invoke(small_run, "--dry_run", "--max_steps", "12").stdout.splitlines()
    assert lines[2] == "Steps   12 in 2.4 epochs: batch 2 × 1 accumulated × 1 process = 2 pairs a step"


def test_a_dry_run_of_a_stopped_training_tells_the_time_from_its_steps(trained: SmallRun) -> None:
    lines = invoke(trained, "--dry_run").stdout.splitlines()
    assert lines[4] == f"Writes  to {trained.out}, resumes from checkpoint-000001"
    facts = json.loads(invoke(trained, "--dry_run", "--json").stdout)
    (step,) = load_run(trained.out / "run.json").stage("training").steps.seconds
    assert facts["seconds_left"] == pytest.approx((5 - 1) * step)
    assert "for the steps to come" in lines[3]


def test_the_next_call_resumes_and_shows_each_step(trained: SmallRun) -> None:
    again = invoke(trained, "--max-steps", "2")
    assert "step 2/2  loss" in again.stderr
    assert "step 1/2" not in again.stderr
    assert f"Wrote {trained.out / 'lora.safetensors'}" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "limits", "next_step"),
    [
        ({"max_steps": 1}, "max_steps (1) is reached", "Raise max_steps to train on."),
        ({"max_epochs": 2}, "max_epochs (2) is reached", "Raise max_epochs to train on."),
        (
            {"max_epochs": 2, "max_steps": 2},
            "max_steps (2) and max_epochs (2) are reached",
            "Raise max_steps and max_epochs to train on.",
        ),
    ],
    ids=str,
)
def test_where_nothing_is_left_to_train_dry_run_and_run_say_the_same(
    small_run: SmallRun, keys: dict[str, int], limits: str, next_step: str
) -> None:
    """10 pairs in steps of 10: two steps are two epochs."""
    at_once = {"batch_size": 5, "gradient_accumulation_steps": 2}
    assert invoke(small_run, max_epochs=2, **at_once).exit_code == 0
    said = f"Nothing is left to train: 2 steps were trained before, and {limits}. {next_step}"
    planned = invoke(small_run, "--dry_run", **at_once, **keys).stdout.splitlines()
    ran = invoke(small_run, **at_once, **keys).stdout.splitlines()
    assert (planned[2], ran[:2]) == (f"Steps   {said}", [said, f"Wrote {small_run.out / 'lora.safetensors'}"])
    (loads,) = ran[2:]
    assert re.fullmatch(r"Loads: into an LBM here, (\d+) of \1 modules", loads)


def test_a_rate_that_falls_to_the_last_step_goes_no_further(small_run: SmallRun) -> None:
    falling = {"lr_scheduler": "linear", "max_steps": 1}
    assert invoke(small_run, **falling).exit_code == 0
    steps = invoke(small_run, "--dry_run", **falling).stdout.splitlines()[2]
    assert steps.endswith(
        "Raise max_steps to train on, with --no_resume: lr_scheduler linear ends at the last step."
    )


def test_a_session_counts_its_own_steps(trained: SmallRun) -> None:
    assert "Trained 2 steps (3 in all) in 0:0" in invoke(trained, "--max_steps", "3").stdout


@pytest.mark.slow
def test_progress_shows_the_total_when_another_accumulation_resumes(small_run: SmallRun) -> None:
    """10 pairs of one size, 4 in a step: 3 steps an epoch, however a step is cut into batches."""
    assert invoke(small_run, "--max_steps", "1", batch_size=4).exit_code == 0
    state = small_run.out / "checkpoint-000001" / "state.json"
    facts = json.loads(state.read_text())
    facts["identity"] |= {"batch_size": 2, "processes": 2}
    state.write_text(json.dumps(facts))
    accumulated = {"batch_size": 2, "gradient_accumulation_steps": 2}
    planned = invoke(small_run, "--dry_run", **accumulated)
    assert planned.stdout.splitlines()[2].startswith("Steps   3 in 1 epoch")
    shown = invoke(small_run, **accumulated).stderr
    assert [step for step in range(9) if f"step {step}/3  loss" in shown] == [2, 3]


@pytest.mark.parametrize("name", ["train", "dry_run"])
def test_what_libraries_print_is_not_among_the_json(
    small_run: SmallRun, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As DeepSpeed does, which is imported only as training begins."""
    module = import_module("sigmascope.lbm.training.train")
    work = getattr(module, name)

    def noisy(*arguments: Any, **keys: Any) -> Any:
        print("an operator was compiled")  # noqa: T201
        os.write(1, b"by a compiler\n")
        return work(*arguments, **keys)

    monkeypatch.setattr(module, name, noisy)
    flags = ["--dry_run"] if name == "dry_run" else ["--max_steps", "1"]
    found = invoke(small_run, "--json", *flags)
    told = json.loads(found.stdout)
    if name == "train":
        assert (told["step"], told["files"]) == (1, [str(small_run.out / "lora.safetensors")])
    assert "an operator was compiled" in found.stderr
    captured = capfd.readouterr()
    assert "by a compiler" not in captured.out
    assert "by a compiler" in captured.err


@pytest.mark.slow
def test_the_yaml_says_whether_to_resume_unless_the_command_does(trained: SmallRun) -> None:
    from_yaml = {"resume_from_checkpoint": False}
    said = json.loads(invoke(trained, "--resume", "--dry_run", "--json", **from_yaml).stdout)
    assert said["resumes"] is not None
    anew = json.loads(invoke(trained, "--max_steps", "1", "--json", **from_yaml).stdout)
    assert (anew["resumed_from"], Path(anew["set_aside"]).name) == (None, "before-1")


def test_a_dry_run_passes_over_a_damaged_checkpoint_as_training_does(trained: SmallRun) -> None:
    damaged = shutil.copytree(trained.out / "checkpoint-000001", trained.out / "checkpoint-000002")
    (damaged / "state.json").write_text("{")
    facts = json.loads(invoke(trained, "--dry_run", "--json").stdout)
    assert Path(facts["resumes"]).name == "checkpoint-000001"


def test_no_resume_begins_anew(trained: SmallRun) -> None:
    anew = json.loads(invoke(trained, "--max_steps", "1", "--no_resume", "--json").stdout)
    assert (anew["resumed_from"], Path(anew["set_aside"]).name) == (None, "before-1")


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"train_shards": "nothing-*.tar"}, ConfigError, "nothing-"),
        ({"train_shards": "gone.tar"}, FileError, "gone.tar"),
        ({"base_model_path": "gone.safetensors"}, FileError, "gone.safetensors"),
        ({"trainable_lora_modules": ["attn9"]}, ConfigError, "attn9"),
        ({"learning_rat": 1.0}, ConfigError, "learning_rate"),
        ({"vae_num_channels": 8, "unet_input_channels": 8}, ModelMismatchError, "expected [16"),
        (
            {"lr_scheduler": "linear", "warmup_steps": 5},
            ConfigError,
            "warmup_steps: 5 is too many for a run of 5 steps",
        ),
        (
            {"lr_scheduler": "piecewise_constant", "lr_scheduler_kwargs": {"step_rules": "x"}},
            ConfigError,
            "piecewise_constant refuses",
        ),
        ({"pixel_loss_weight": 1.0, "pixel_loss_type": "lpips"}, ConfigError, "pip install lpips"),
    ],
)
def test_what_cannot_be_trained_is_said_before_it_begins(
    small_run: SmallRun,
    keys: dict[str, Any],
    kind: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)  # so that it is not installed
    error = invoke(small_run, "--dry_run", **keys).exception
    assert isinstance(error, kind)
    assert message in str(error)


@pytest.mark.parametrize("arguments", [["--dry_run"], []])
def test_a_base_that_is_not_there_is_named_with_its_key(small_run: SmallRun, arguments: list[str]) -> None:
    error = invoke(small_run, *arguments, base_model_path="1e-5").exception
    assert str(error).startswith("1e-5: base_model_path names it, but it does not exist")


def test_a_device_is_named_by_the_flag_or_by_the_key_that_gave_it(small_run: SmallRun) -> None:
    by_flag = invoke(small_run, "--device", "toaster", device="cpu").exception
    by_key = invoke(small_run, device="toaster").exception
    assert str(by_flag).startswith("--device: 'toaster'")
    assert str(by_key).startswith("device: 'toaster'")


def test_a_folder_that_cannot_be_made_is_said_before_it_begins(small_run: SmallRun) -> None:
    below_a_file = small_run.base / "out"
    error = invoke(small_run, "--dry_run", save_ckpt_path=str(below_a_file)).exception
    assert isinstance(error, WriteError)
    assert f"{small_run.base} is not a folder" in str(error)


def test_a_folder_that_cannot_be_written_to_is_said_before_it_begins(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != small_run.folder)
    error = invoke(small_run, "--dry_run").exception
    assert isinstance(error, WriteError)
    assert f"{small_run.folder} is read-only" in str(error)


@pytest.mark.parametrize("flags", [["--dry_run"], []])
def test_pictures_that_no_memory_holds_are_an_error_with_a_next_step(
    small_run: SmallRun, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow raises it for the picture that image_size asks for; here for one that a test can afford."""

    def refuse(image: Image.Image, *arguments: Any, **keys: Any) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", refuse)
    error = invoke(small_run, *flags, image_size=16).exception
    assert isinstance(error, ConfigError)
    assert "does not fit into memory." in error.message
    assert "Lower batch_size or image_size" in str(error.hint)


def test_commands_in_place_of_shards_run_only_when_allowed(small_run: SmallRun) -> None:
    pipe = {"train_shards": f"pipe:cat {small_run.folder / 'train-0.tar'}", "max_steps": 1}
    assert isinstance(invoke(small_run, "--dry_run", **pipe).exception, ConfigError)
    assert json.loads(invoke(small_run, "--allow_pipe", "--json", **pipe).stdout)["step"] == 1


@pytest.mark.slow
def test_a_dry_run_runs_no_command_even_when_that_is_allowed(small_run: SmallRun) -> None:
    marker = small_run.folder / "ran"
    shards = f"pipe:touch {marker}; cat {small_run.folder / 'train-0.tar'}"
    keys = {"train_shards": shards, "validation_shards": shards, "max_steps": 1}
    facts = json.loads(invoke(small_run, "--dry_run", "--allow_pipe", "--json", **keys).stdout)
    assert (facts["picture_size"], facts["samples"], facts["validation_samples"]) == (None, None, None)
    assert facts["memory"]["activations"] > 0
    assert "a dry run runs no commands" in invoke(small_run, "--dry_run", "--allow_pipe", **keys).stdout
    assert not marker.exists()


def test_a_larger_member_is_read_only_when_allowed(small_run: SmallRun) -> None:
    """The pictures of these shards take more than 100 bytes each."""
    refused = invoke(small_run, "--dry_run", "--max_member", "100B").exception
    assert "SIGMASCOPE_MAX_MEMBER allows 100 bytes" in str(refused)
    assert invoke(small_run, "--dry_run", max_member=100).exception is not None
    assert invoke(small_run, "--dry_run", "--max_member", "1MB", max_member=100).exception is None
    no_size = invoke(small_run, "--dry_run", "--max_member", "much").exception
    assert isinstance(no_size, ConfigError)
    assert "--max_member much is not a size" in no_size.message
    assert isinstance(invoke(small_run, "--dry_run", max_member="much").exception, ConfigError)
