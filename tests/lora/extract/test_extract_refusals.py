"""What an extraction refuses, and that a refusal changes no file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.out_of_memory import OUT_OF_MEMORY

from sigmascope.errors import (
    CheckpointError,
    ConfigError,
    ModelMismatchError,
    NonFiniteError,
    SigmascopeError,
    WriteError,
)
from sigmascope.lora import layer_extraction
from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora
from sigmascope.lora.reader import load_lora

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State


def extract(files: "ModelPair", options: ExtractOptions | None = None) -> ExtractionReport:
    return extract_lora(files.base, files.tuned, files.base.with_name("lora.safetensors"), options)


def test_two_copies_of_one_model_give_no_lora(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=lambda base, tuned: tuned.update(base))
    with pytest.raises(ModelMismatchError, match=r"same weights in all 10 .* nothing to extract"):
        extract(files)
    assert sorted(path.name for path in files.base.parent.iterdir()) == [
        "base.safetensors",
        "tuned.safetensors",
    ]


def test_options_that_leave_out_everything_say_so(make_model_pair: "MakePair") -> None:
    with pytest.raises(ConfigError, match=r"--min_diff 1e\+06.* leave out all 10 changed layers"):
        extract(make_model_pair(), ExtractOptions(min_diff=1e6))


@pytest.mark.parametrize(
    ("make_options", "flag"),
    [
        (lambda: ExtractOptions(rank=0), "--rank 0"),
        (lambda: ExtractOptions(conv_rank=-1), "--conv_rank -1"),
        (lambda: ExtractOptions(min_diff=-1.0), "--min_diff"),
        (lambda: ExtractOptions(min_diff=float("nan")), "--min_diff"),
    ],
)
def test_options_without_sense_name_the_flag(make_options: Callable[[], ExtractOptions], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        make_options()


@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:77"])
def test_a_device_that_is_not_there_is_refused(make_model_pair: "MakePair", device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {device}"):
        extract(make_model_pair(), ExtractOptions(device=device))


@pytest.mark.parametrize("name", ["base.safetensors", "tuned.safetensors"])
def test_an_input_is_never_the_target(make_model_pair: "MakePair", name: str) -> None:
    files = make_model_pair()
    before = files.base.with_name(name).read_bytes()
    with pytest.raises(ConfigError, match=f"--save_to .*{name} is part of the input"):
        extract_lora(files.base, files.tuned, files.base.with_name(name))
    assert files.base.with_name(name).read_bytes() == before


def test_a_shard_of_an_input_is_never_the_target(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    folder = files.base.with_name("sharded")
    folder.mkdir()
    files.base.rename(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="is part of the input"):
        extract_lora(folder, files.tuned, folder / "model.safetensors")


def test_a_target_of_another_type_is_refused(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with pytest.raises(ConfigError, match=r"my_lora\.ckpt"):
        extract_lora(files.base, files.tuned, files.base.with_name("my_lora.ckpt"))


def test_a_folder_that_is_not_there_is_made(make_model_pair: "MakePair", tmp_path: Path) -> None:
    files = make_model_pair()
    extract_lora(files.base, files.tuned, tmp_path / "lora" / "checkpoints" / "my.safetensors")
    made = {file.name for file in (tmp_path / "lora" / "checkpoints").iterdir()}
    assert made == {"my.safetensors", "my_config.yaml"}


def nan_in_the_last_layer(base: "State", tuned: "State") -> None:
    for layer in ("denoiser.conv_out", "denoiser.up_blocks.0.resnets.0.conv2"):
        tuned[f"{layer}.weight"][0, 0, 0, 0] = float("nan")


def test_an_error_half_way_leaves_the_earlier_lora_and_no_other_file(make_model_pair: "MakePair") -> None:
    good = extract(make_model_pair())
    before = {path.name: path.read_bytes() for path in (good.lora, good.sidecar)}
    files = make_model_pair(edit=nan_in_the_last_layer)
    with pytest.raises(NonFiniteError, match=r"tuned\.safetensors"):
        extract(files)
    assert {name: files.base.with_name(name).read_bytes() for name in before} == before
    expected = sorted([*before, "base.safetensors", "tuned.safetensors"])
    assert sorted(path.name for path in files.base.parent.iterdir()) == expected


def test_nan_in_a_bias_stops_the_extraction(make_model_pair: "MakePair") -> None:
    def damage(base: "State", tuned: "State") -> None:
        tuned["denoiser.conv_in.bias"] = tuned["denoiser.conv_in.bias"] * float("nan")

    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_in\.bias holds 8 NaN"):
        extract(make_model_pair(edit=damage))


def test_factors_that_overflow_fp16_are_refused_with_the_layer(make_model_pair: "MakePair") -> None:
    with pytest.raises(NonFiniteError, match=r"denoiser\.\S+: the factors .* do not fit torch\.float16"):
        extract(make_model_pair(size=1e12), ExtractOptions(rank=4, conv_rank=4, save_precision="fp16"))


@pytest.mark.parametrize(("name", "value"), [("save_precision", "int8"), ("target_coverage", "all")])
def test_unknown_choices_name_the_flag(name: str, value: str) -> None:
    options = ExtractOptions()
    object.__setattr__(options, name, value)  # the tests' type checker refuses it in the constructor
    with pytest.raises(ConfigError, match=f"--{name} {value}"):
        options.__post_init__()


@pytest.mark.parametrize("text", ["train_shards: [a.tar]\n", "- a list\n", "no: [yaml"])
def test_another_yaml_of_the_side_car_s_name_is_not_replaced(make_model_pair: "MakePair", text: str) -> None:
    files = make_model_pair()
    other = files.base.with_name("lora_config.yaml")
    other.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"would be written to .*lora_config\.yaml"):
        extract(files)
    assert other.read_text(encoding="utf-8") == text
    assert not files.base.with_name("lora.safetensors").exists()


@pytest.mark.parametrize("target", [".", "/"])
def test_a_folder_is_no_target(make_model_pair: "MakePair", target: str) -> None:
    files = make_model_pair()
    with pytest.raises(ConfigError, match=r"--save_to \S+ is a folder"):
        extract_lora(files.base, files.tuned, target)


def test_names_that_the_system_refuses_are_refused_in_words(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    long = files.base.with_name("x" * 300 + ".safetensors")
    with pytest.raises(WriteError, match="cannot be reached"):
        extract_lora(files.base, files.tuned, long)
    with pytest.raises(CheckpointError, match="cannot be read"):
        extract_lora(long, files.tuned, files.base.with_name("lora.safetensors"))


def test_a_lora_inside_the_base_s_folder_can_be_made_again(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    folder = files.base.with_name("checkpoint")
    folder.mkdir()
    files.base.rename(folder / "model.safetensors")
    for _ in range(2):
        extract_lora(folder, files.tuned, folder / "lora.safetensors")
    with pytest.raises(ConfigError, match="is part of the input"):
        extract_lora(folder, files.tuned, folder / "model.safetensors")


def test_names_that_are_no_utf8_are_written_readably(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    name = os.fsdecode(b"l\xffra.safetensors")
    try:
        files.base.with_name(name).touch()
    except OSError:
        pytest.skip("the file system takes only UTF-8 names")
    base = files.base.rename(files.base.with_name(os.fsdecode(b"b\xffse.safetensors")))
    made = extract_lora(base, files.tuned, base.with_name(name))
    header = load_lora(made.lora).metadata
    assert header["sigmascope_base"] == "b\ufffdse.safetensors"
    assert header["modelspec.title"] == "l\ufffdra"
    assert "b\ufffdse" in made.sidecar.read_text(encoding="utf-8")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("name", ["lora.safetensors", "lora_config.yaml"])
def test_what_cannot_be_replaced_is_refused_before_any_work(make_model_pair: "MakePair", name: str) -> None:
    files = make_model_pair()
    os.mkfifo(files.base.with_name(name))
    done: list[int] = []
    with pytest.raises(WriteError, match=rf"{name}: is not a regular file"):
        extract_lora(
            files.base,
            files.tuned,
            files.base.with_name("lora.safetensors"),
            progress=lambda count, total, what: done.append(count),
        )
    assert done == []


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_full_device_is_an_error_with_a_way_out(
    make_model_pair: "MakePair", monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(layer_extraction, "decompose", too_large)
    with pytest.raises(SigmascopeError, match=r"denoiser\.\S+: there is no memory left") as raised:
        extract(make_model_pair(), ExtractOptions(rank=2, conv_rank=2))
    assert "--workers 1" in str(raised.value.hint)


def test_changes_whose_squares_vanish_are_no_changes(make_model_pair: "MakePair") -> None:
    def fade(base: "State", tuned: "State") -> None:
        for key in list(base):
            base[key] = torch.zeros_like(base[key])
            tuned[key] = torch.full_like(base[key], 1e-170)

    with pytest.raises(ModelMismatchError, match="nothing to extract"):
        extract(make_model_pair(dtype=torch.float64, edit=fade))


def test_changed_biases_alone_are_refused_by_name(make_model_pair: "MakePair") -> None:
    def keep_weights(base: "State", tuned: "State") -> None:
        tuned.update({key: value for key, value in base.items() if key.endswith(".weight")})
        tuned["denoiser.conv_in.bias"] = base["denoiser.conv_in.bias"] + 1

    with pytest.raises(ModelMismatchError, match="Biases and norms alone do not make a LoRA"):
        extract(make_model_pair(edit=keep_weights), ExtractOptions(biases_and_norms=True))
