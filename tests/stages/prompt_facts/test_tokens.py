"""Token counts against what the tokenizers themselves give."""

import json
from typing import Any

import pytest

from sigmascope.stages.prompt_facts import TokenCount, count_tokens

LONG = "a red fox jumps over the lazy dog, " * 20 + "unseen castle"


def one(prompt: str, tokenizer: Any, limit: int | None = None) -> TokenCount:
    counts, reason = count_tokens(prompt, {"tokenizer": tokenizer}, limit)
    assert reason is None
    return counts[0]


@pytest.mark.parametrize("prompt", ["a red fox", "", "猫 👨\u200d👩\u200d👧", "<|endoftext|>", "x\x00y"])
def test_tokens_are_those_of_the_tokenizer(prompt: str, clip_tokenizer: Any) -> None:
    assert one(prompt, clip_tokenizer).tokens == len(clip_tokenizer(prompt)["input_ids"]) - 2


def test_what_is_cut_is_what_the_tokenizer_cuts(clip_tokenizer: Any) -> None:
    count = one(LONG, clip_tokenizer)
    kept = len(clip_tokenizer(LONG, truncation=True, max_length=77)["input_ids"]) - 2
    assert (count.limit, count.truncated) == (75, count.tokens - kept)


def test_the_words_that_are_cut_are_named(clip_tokenizer: Any) -> None:
    count = one(LONG, clip_tokenizer)
    assert (count.truncated_words or ())[-2:] == ("unseen", "castle")
    kept = clip_tokenizer(LONG, truncation=True, max_length=77, return_offsets_mapping=True)
    end = kept["offset_mapping"][-2][1]
    assert LONG[end:].split()[-1] == "castle"
    assert len(count.truncated_words or ()) - len(LONG[end:].replace(",", " ").split()) in (0, 1)


def test_a_prompt_that_just_fits_is_whole(clip_tokenizer: Any) -> None:
    prompt = " ".join(["fox"] * 75)
    words = 75 // one("fox", clip_tokenizer).tokens
    count = one(" ".join(["fox"] * words), clip_tokenizer)
    assert count.truncated == 0
    cut = one(prompt + " fox fox", clip_tokenizer, limit=count.tokens + 2)
    assert (cut.truncated_words or ())[:1] == ("fox",)


def test_a_limit_of_the_pipeline_wins(t5_tokenizer: Any) -> None:
    assert one(LONG, t5_tokenizer, limit=16).limit == 15


def test_a_slow_tokenizer_without_offsets_names_the_same_words(clip_tokenizer: Any) -> None:
    class Slow:
        model_max_length = 77

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids: list[int] = clip_tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            return {"input_ids": ids}

        def num_special_tokens_to_add(self) -> int:
            return 2

    slow, fast = one(LONG, Slow()), one(LONG, clip_tokenizer)
    assert (slow.tokens, slow.truncated_words) == (fast.tokens, fast.truncated_words)


def test_a_tokenizer_without_limit_cuts_nothing_and_says_so(clip_tokenizer: Any) -> None:
    class Endless:
        model_max_length = int(1e30)

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [0] * len(text)}

    count = one("x" * 5000, Endless())
    assert (count.truncated, count.limit) == (0, None)
    assert count.unavailable == {"token_limit": "the tokenizer has no limit"}


def test_a_tokenizer_is_left_as_it_was(clip_tokenizer: Any) -> None:
    backend = clip_tokenizer.backend_tokenizer
    clip_tokenizer("x", truncation=True, max_length=9, padding="max_length")
    before = json.loads(backend.to_str())
    one(LONG, clip_tokenizer)
    assert json.loads(backend.to_str()) == before
    assert backend.truncation["max_length"] == 9


def test_no_warning_about_the_length(clip_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    one(LONG, clip_tokenizer)
    assert caplog.text == ""


def test_comfyui_cuts_nothing_but_encodes_in_chunks(make_comfy_clip: Any) -> None:
    tokenizer = make_comfy_clip(clip_l=8).tokenizer
    counts, _ = count_tokens(" ".join(["word"] * 100), {"tokenizer": tokenizer}, None)
    assert [(c.name, c.tokens, c.truncated, c.chunks) for c in counts] == [("l", 100, 0, 2), ("g", 100, 0, 2)]


def test_the_template_around_a_prompt_does_not_count(make_comfy_clip: Any) -> None:
    plain = make_comfy_clip(clip_l=8).tokenizer

    class Templated:
        def tokenize_with_weights(self, text: str, return_word_ids: bool = False) -> Any:
            return plain.tokenize_with_weights(f"describe the picture {text} please", return_word_ids)

    counts, _ = count_tokens("a red fox", {"tokenizer": Templated()}, None)
    assert [count.tokens for count in counts] == [3, 3]


def test_a_tokenizer_that_raises_is_a_reason() -> None:
    class Broken:
        def __call__(self, *_: object, **__: object) -> None:
            raise ArithmeticError("no vocabulary")

    counts, reason = count_tokens("x", {"tokenizer": Broken()}, None)
    assert counts == []
    assert reason == "Broken failed: ArithmeticError: no vocabulary"
