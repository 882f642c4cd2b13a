import hashlib
import json
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sigmascope.errors import ConfigError
from sigmascope.records.prompts import (
    PRIVACIES,
    Privacy,
    StoredPrompt,
    named_prompts,
    privacy_of,
    prompt_sha256,
    redactor,
    stored_prompts,
)
from sigmascope.records.run import Run, Stage
from sigmascope.reports.html import private_runs
from sigmascope.reports.markdown import to_markdown
from sigmascope.reports.trace import trace_of
from sigmascope.stages.prompt_facts import prompt_facts

PROMPT = "a red cat on a sofa"


def test_the_hash_is_sha256_of_utf8() -> None:
    assert prompt_sha256("ü🐈") == hashlib.sha256("ü🐈".encode()).hexdigest()


def test_a_lone_surrogate_has_a_hash() -> None:
    assert len(prompt_sha256("\ud83d")) == 64


def test_full_keeps_the_text_hash_the_hash_and_none_nothing() -> None:
    digest = prompt_sha256(PROMPT)
    assert stored_prompts(PROMPT, "full") == {"prompt": StoredPrompt(digest, PROMPT)}
    assert stored_prompts(PROMPT, "hash") == {"prompt": StoredPrompt(digest)}
    assert stored_prompts(PROMPT, "none") == {}


def test_prompts_of_a_batch_are_numbered() -> None:
    assert named_prompts(["a", "b"]) == {"prompt.0": "a", "prompt.1": "b"}


def test_named_prompts_keep_their_names() -> None:
    assert named_prompts({"positive": "a", "negative": ""}) == {"positive": "a", "negative": ""}


def test_an_unknown_privacy_is_refused() -> None:
    with pytest.raises(ConfigError, match="'secret'"):
        privacy_of("secret")


def test_a_prompt_is_taken_out_of_other_texts() -> None:
    assert redactor(PROMPT, "none")(f"encode({PROMPT!r})") == "encode('<prompt>')"
    assert redactor(PROMPT, "hash")(PROMPT) == f"<prompt sha256:{prompt_sha256(PROMPT)}>"


@pytest.mark.parametrize("spell", [str, repr, json.dumps, ascii])
def test_a_prompt_is_found_with_its_escapes(spell: Callable[[str], str]) -> None:
    prompt = 'a "red" cat\non a söfa'
    assert "cat" not in redactor(prompt, "none")(f"log: {spell(prompt)}")


@pytest.mark.parametrize("end", ["", "…"])
def test_a_text_that_was_cut_within_the_prompt_keeps_nothing_of_it(end: str) -> None:
    prompt = "a heron at dawn\nover still water"
    for length in (8, 15, len(prompt) - 1):
        assert redactor(prompt, "none")(f"ValueError: {prompt[:length]}{end}") == "ValueError: <prompt>…"
    assert redactor(prompt, "none")("a heron flew") == "a heron flew"


def test_a_prompt_that_another_one_begins_with_is_told_as_itself() -> None:
    longer = f"{PROMPT}, at night"
    redact = redactor([PROMPT, longer], "hash")
    assert redact(PROMPT) == f"<prompt sha256:{prompt_sha256(PROMPT)}>"
    assert redact(f"of {longer}") == f"of <prompt sha256:{prompt_sha256(longer)}>"
    assert redact(longer[:-3]) == f"<prompt sha256:{prompt_sha256(longer)}>…"


def test_full_leaves_other_texts_alone() -> None:
    assert redactor(PROMPT, "full")(PROMPT) == PROMPT


def test_a_short_prompt_is_found_as_a_word_only() -> None:
    assert redactor("cat", "none")("category: cat") == "category: <prompt>"


@given(prompt=st.text(min_size=8), before=st.text(), after=st.text())
def test_no_long_prompt_survives(prompt: str, before: str, after: str) -> None:
    assert prompt not in redactor(prompt, "none")(f"{before}{prompt}{after}") or prompt in "<prompt>"


def test_what_is_kept_is_asked_of_the_row_and_not_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Privacy("hash", keeps_text=False, keeps_hash=False, keeps_words=True, kept="not a word")
    monkeypatch.setitem(PRIVACIES, "hash", row)
    prompt = "a portrait of a nurse"
    facts = {"prompt": prompt}
    stage = Stage("denoising", 0.0, 1.0, success=False, error=f"ValueError: {prompt} is odd", facts=facts)
    run = Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=(stage,))
    assert stored_prompts(prompt, "hash") == {}
    assert prompt_facts(prompt, (), None, "hash")["text_sha256"] is None
    assert private_runs(run, "hash")[0].stages[0].error == "ValueError: <prompt> is odd"
    assert "not a word" in to_markdown(run, prompts="hash")
    (event,) = (
        event for event in trace_of([run], prompts="hash")["traceEvents"] if "prompt" in event["args"]
    )
    assert event["args"]["prompt"] == "<prompt>"
