from collections.abc import Callable
from typing import Any

import pytest
from tests.analysis.faulty_runs import stage

from sigmascope.records.run import Finding

Found = Callable[..., dict[str, Finding]]


def text_stage(**prompts: Any) -> Any:
    return stage("text_encoding", 0.1, facts={"text_encoding": {"text_processing": prompts}})


def test_a_cut_prompt_is_told_with_what_is_lost(found: Found) -> None:
    cut = {"token_count": 100, "truncated_tokens": 25, "token_limit": 75}
    whole = {"token_count": 10, "truncated_tokens": 0, "token_limit": 75}
    finding = found(text_stage(positive=whole, negative=cut))["text.prompt_is_cut"]
    assert (finding.severity, finding.stage, finding.evidence) == (
        "warning",
        "text_encoding",
        {"prompt": "negative", **cut},
    )


@pytest.mark.parametrize("prompt", [
    {"token_count": 10, "truncated_tokens": 0, "token_limit": 75},
    {"token_count": None, "truncated_tokens": None, "token_limit": None},
    {},
    None,
    "a fox",
])  # fmt: skip
def test_a_whole_or_unknown_one_is_not(found: Found, prompt: object) -> None:
    assert "text.prompt_is_cut" not in found(text_stage(positive=prompt))
