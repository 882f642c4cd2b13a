"""Golden facts of texts, counted by hand."""

import hashlib

import pytest

from sigmascope.stages.prompt_facts import TokenCount, prompt_facts
from sigmascope.stages.schema import PromptFacts


def facts(prompt: object) -> PromptFacts:
    return prompt_facts(prompt, [], None, "full")


@pytest.mark.parametrize(
    ("text", "characters", "words", "special"),
    [
        ("a red fox, 4k!", 14, 4, 2),
        ("", 0, 0, 0),
        ("   \n\t", 5, 0, 0),
        ("👨\u200d👩\u200d👧", 5, 0, 3),  # three people; what joins them counts with them
        ("❤\ufe0f", 2, 0, 1),
        ("👍🏽", 2, 0, 2),
        ("1\ufe0f\u20e3", 3, 1, 0),
        ("猫、犬。", 4, 2, 2),
        ("cafe\u0301", 5, 1, 0),  # the accent is part of the letter
        ("café", 4, 1, 0),
        ("हिन्दी", 6, 1, 0),
        ("שלום, עולם", 10, 2, 1),
        ("\u202eevil\u202c", 6, 1, 0),
        ("(red:1.3)", 9, 2, 4),
        ("[bold]x[/bold]", 14, 3, 5),
    ],
)
def test_golden_counts(text: str, characters: int, words: int, special: int) -> None:
    found = facts(text)
    counted = (found["character_length"], found["word_count"], found["special_characters"])
    assert counted == (characters, words, special)


def test_controls_direction_marks_and_surrogates_are_counted() -> None:
    assert facts("a\x1b[31m\u202eb\ud800\n")["control_characters"] == 3


def test_the_hash_stands_for_a_private_text() -> None:
    found = prompt_facts("a (red:1.3) fox", [], None, "hash")
    assert found["text_content"] is None
    assert found["text_sha256"] == hashlib.sha256(b"a (red:1.3) fox").hexdigest()
    assert found["prompt_weights"] == [{"text": None, "weight": 1.3}]
    assert "red" not in str(found)


def test_nothing_of_a_secret_text_is_kept() -> None:
    found = prompt_facts("a red fox", [TokenCount("t", 9, 2, ("fox",), limit=7)], None, "none")
    assert found["text_sha256"] is None
    assert found["truncated_words"] is None
    assert found["truncated_tokens"] == 2
    assert "fox" not in str(found)


def test_several_prompts_are_lines() -> None:
    assert facts(["a fox", "a dog"])["word_count"] == 4


def test_something_else_than_text_has_a_reason() -> None:
    found = facts(7)
    assert found["character_length"] is None
    assert found["unavailable"]["word_count"] == "the prompt is of type int"


def test_the_tokenizer_that_reads_most_counts() -> None:
    counts = [TokenCount("clip", 120, 45, ("x",), limit=75), TokenCount("t5", 130, 0, limit=511)]
    found = prompt_facts("x", counts, None, "full")
    assert (found["token_count"], found["truncated_tokens"]) == (130, 0)
    assert found["tokenizers"]["clip"]["truncated_tokens"] == 45
