"""Prompts that were encoded together, each of which has the encoder's tokens to itself."""

import json
from typing import Any

import pytest
import torch

from sigmascope.stages.prompt_facts import count_tokens, prompt_facts
from sigmascope.stages.text_encoding import analyze_text_encoding_results, capture_text_encoding_baseline


def fitting(tokenizer: Any) -> str:
    """A prompt of more than half of the tokens that fit."""
    words = 40 // len(tokenizer("fox", add_special_tokens=False)["input_ids"])
    return " ".join(["fox"] * words)


def test_prompts_that_fit_one_by_one_are_not_cut(clip_tokenizer: Any) -> None:
    prompt = fitting(clip_tokenizer)
    alone, _ = count_tokens(prompt, {"t": clip_tokenizer}, None)
    together, _ = count_tokens([prompt] * 4, {"t": clip_tokenizer}, None)
    assert (together[0].tokens, together[0].truncated) == (4 * alone[0].tokens, 0)


def test_what_is_cut_of_each_is_added(clip_tokenizer: Any) -> None:
    long = "fox " * 200 + "castle"
    alone, _ = count_tokens(long, {"t": clip_tokenizer}, None)
    together, _ = count_tokens([long, "a fox", long], {"t": clip_tokenizer}, None)
    assert together[0].truncated == 2 * (alone[0].truncated or 0)
    assert (together[0].truncated_words or ()).count("castle") == 2


def test_a_batch_passes_the_validation(clip_tokenizer: Any) -> None:
    baseline = capture_text_encoding_baseline(None, None, tokenizer=clip_tokenizer)
    prompts = [fitting(clip_tokenizer)] * 4
    found = analyze_text_encoding_results(baseline, torch.ones(4, 77, 8), None, prompts, None, 0.1)
    assert found["validation"]["input"] == {"passed": True, "messages": []}


def test_characters_are_those_of_the_prompts() -> None:
    assert prompt_facts(["a fox", "a dog"], [], None, "full")["character_length"] == 10


def test_weights_do_not_reach_into_the_next_prompt() -> None:
    assert prompt_facts(["a (fox", "a) dog"], [], None, "full")["prompt_weights"] == []


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_one_prompt_of_a_private_batch_is_not_quoted(privacy: Any) -> None:
    error = ValueError("cannot encode 'the secret unicorn'")
    prompts = ["the secret unicorn", "a plain red fox"]
    found = analyze_text_encoding_results(
        None, None, None, prompts, None, 0.1, error=error, prompt_privacy=privacy
    )
    assert "unicorn" not in json.dumps(found)


def test_the_pipeline_s_limit_does_not_stretch_a_clip(clip_tokenizer: Any, t5_tokenizer: Any) -> None:
    counts, _ = count_tokens("fox " * 100, {"clip": clip_tokenizer, "t5": t5_tokenizer}, 256)
    assert [count.limit for count in counts] == [75, 255]
