import json

import pytest

from sigmascope.lora.file import read_training_facts


def test_tags_are_summed_over_the_folders() -> None:
    frequency = {"10_sks dog": {"sks": 12, "dog ": 10}, "1_reg": {"dog": 5, "grass": 1}}
    facts = read_training_facts({"ss_tag_frequency": json.dumps(frequency)})
    assert facts.tags == (("dog", 15), ("sks", 12), ("grass", 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "[" * 100_000,
        '{"a": 3}',
        '{"a": {"b": "many"}}',
        '{"a": {"b": true}}',
        '{"a": {"b": -4}}',
    ],
)
def test_tags_that_are_not_as_they_should_be_count_as_none(text: str) -> None:
    assert read_training_facts({"ss_tag_frequency": text}).tags == ()


def test_at_most_twenty_tags() -> None:
    frequency = {"folder": {f"tag{index}": index + 1 for index in range(50)}}
    tags = read_training_facts({"ss_tag_frequency": json.dumps(frequency)}).tags
    assert len(tags) == 20
    assert tags[0] == ("tag49", 50)


def test_fields_are_found_by_what_they_mean() -> None:
    facts = read_training_facts(
        {
            "ss_sd_model_name": "sd_xl_base.safetensors",
            "ss_learning_rate": "0.0001",
            "ss_num_epochs": "10",
            "ss_network_args": '{"conv_dim": "8"}',
            "modelspec.trigger_phrase": "sks dog",
            "modelspec.author": "me",
            "sigmascope_version": "0.1",
            "format": "pt",
        }
    )
    assert facts.training == {
        "base model": "sd_xl_base.safetensors",
        "network arguments": '{"conv_dim": "8"}',
        "epochs": "10",
        "learning rate": "0.0001",
    }
    assert facts.trigger_phrase == "sks dog"
    assert facts.modelspec == {"trigger_phrase": "sks dog", "author": "me"}
    assert facts.provenance == {"version": "0.1"}
    assert facts.others == ("format",)


def test_fields_that_say_none_are_left_out() -> None:
    facts = read_training_facts({"ss_learning_rate": "None", "ss_epoch": "3", "ss_num_epochs": ""})
    assert facts.training == {"epoch saved": "3"}


def test_an_empty_header_says_nothing() -> None:
    facts = read_training_facts({})
    assert facts.training == facts.modelspec == facts.provenance == {}
    assert facts.trigger_phrase is None
