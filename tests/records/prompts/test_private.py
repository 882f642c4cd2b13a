import json

import pytest
from tests.reports.tracing_runs import arguments_of, events_of, only, run_of

from sigmascope.records.prompts import cleaner, prompt_sha256
from sigmascope.records.run import Stage
from sigmascope.reports.trace import trace_of

PROMPT = "a portrait of my neighbour"


def test_a_prompt_is_its_hash() -> None:
    arguments = arguments_of(Stage("text_encoding", 0.0, 1.0, facts={"prompt": PROMPT}))
    assert arguments["prompt"] == f"<prompt sha256:{prompt_sha256(PROMPT)}>"


def test_that_no_negative_prompt_was_given_hides_no_other_none() -> None:
    facts = {
        "prompts": {"prompt": {"sha256": "0" * 64, "text": PROMPT}},
        "recipe": {
            "given": {"negative_prompt": "none", "prompt_2": PROMPT},
            "surroundings": {"FreeU": "none"},
        },
    }
    clean = cleaner(run_of(Stage("generation", 0.0, 1.0, facts=facts)), "hash")
    assert clean(facts["recipe"]) == {
        "given": {"negative_prompt": "none", "prompt_2": f"<prompt sha256:{prompt_sha256(PROMPT)}>"},
        "surroundings": {"FreeU": "none"},
    }


@pytest.mark.parametrize(
    "facts",
    [
        {"call": {"negative_prompt": [PROMPT]}},
        {"text_processing": {"positive": {"text_content": PROMPT}}},
        {"prompts": {"positive": {"sha256": "0" * 64, "text": PROMPT}}},
        {"prompt_2": PROMPT},
    ],
)
def test_a_prompt_is_found_wherever_the_record_keeps_it(facts: dict[str, object]) -> None:
    stage = Stage("text_encoding", 0.0, 1.0, facts=facts, error=f"ValueError: cannot encode '{PROMPT}'")
    assert PROMPT not in json.dumps(trace_of([run_of(stage)]))


def test_a_prompt_is_told_when_asked_for() -> None:
    assert arguments_of(Stage("a", 0.0, 1.0, facts={"prompt": PROMPT}), prompts="full")["prompt"] == PROMPT


def test_not_even_the_hash_is_told_when_asked_so() -> None:
    assert (
        arguments_of(Stage("a", 0.0, 1.0, facts={"prompt": PROMPT}), prompts="none")["prompt"] == "<prompt>"
    )


def test_a_record_that_holds_the_hash_alone_keeps_it() -> None:
    digest = prompt_sha256(PROMPT)
    assert arguments_of(Stage("a", 0.0, 1.0, facts={"prompts": {"positive": digest}})) == {
        "prompts.positive": digest
    }


def test_a_hash_that_is_on_record_is_left_out_when_asked_so() -> None:
    digest = prompt_sha256(PROMPT)
    facts = {"prompts": {"prompt": {"sha256": digest, "text": PROMPT}}}
    document = json.dumps(trace_of([run_of(Stage("a", 0.0, 1.0, facts=facts))], prompts="none"))
    assert digest not in document
    assert PROMPT not in document


@pytest.mark.parametrize("prompt", ["X", "stage", "a", "ms", "traceEvents"])
def test_a_prompt_that_is_a_word_of_the_format_breaks_no_trace(prompt: str) -> None:
    event = only(events_of(run_of(Stage("a", 0.0, 1.0, facts={"prompt": prompt})), phase="X"))
    assert (event["name"], event["cat"]) == ("a", "stage")
    assert event["args"]["prompt"] == f"<prompt sha256:{prompt_sha256(prompt)}>"
