import pytest
import torch

from sigmascope.cli.bench import call_values, cases_of, checked_offload
from sigmascope.errors import ConfigError


def test_every_combination_is_a_case() -> None:
    labels = [case.label for case in cases_of("4,20", "512, 1024x768", "1,2", None)]
    assert labels == [
        "512x512-b1-s4",
        "512x512-b1-s20",
        "512x512-b2-s4",
        "512x512-b2-s20",
        "1024x768-b1-s4",
        "1024x768-b1-s20",
        "1024x768-b2-s4",
        "1024x768-b2-s20",
    ]


def test_without_options_the_pipelines_own_settings_are_the_one_case() -> None:
    assert [case.label for case in cases_of(None, None, "1", None)] == ["b1"]


@pytest.mark.parametrize(
    ("steps", "resolution", "batch", "frames", "flag"),
    [
        ("0", None, "1", None, "--steps"),
        ("4,", None, "1", None, "--steps"),
        (None, "big", "1", None, "--resolution"),
        (None, "0x64", "1", None, "--resolution"),
        (None, None, "-1", None, "--batch"),
        (None, None, "1", 0, "--frames"),
    ],
)
def test_what_is_no_number_names_its_flag(
    steps: str | None, resolution: str | None, batch: str, frames: int | None, flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        cases_of(steps, resolution, batch, frames)


def test_arguments_of_the_call_are_json_or_text() -> None:
    assert call_values(
        ["guidance_scale=1.5", "negative_prompt=blurry, low=bad", "use_it=true", "x=null"]
    ) == {
        "guidance_scale": 1.5,
        "negative_prompt": "blurry, low=bad",
        "use_it": True,
        "x": None,
    }


@pytest.mark.parametrize("entry", ["guidance", "=3", "a b=3"])
def test_an_argument_needs_a_name_and_a_value(entry: str) -> None:
    with pytest.raises(ConfigError, match="--call: expected NAME=VALUE"):
        call_values([entry])


def test_there_is_nothing_to_offload_from_a_cpu() -> None:
    with pytest.raises(ConfigError, match="is in RAM anyway"):
        checked_offload("model", torch.device("cpu"))


def test_an_unknown_offloading_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="none, model or sequential"):
        checked_offload("group", torch.device("cuda"))


def test_a_known_offloading_is_taken_for_an_accelerator() -> None:
    assert checked_offload("sequential", torch.device("cuda")) == "sequential"
