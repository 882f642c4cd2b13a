"""No reason, key or name of an analysis quotes a private prompt."""

import json
from typing import Any

import pytest
import torch

import sigmascope
from sigmascope.stages.text_encoding import analyze_text_encoding_results, capture_text_encoding_baseline

SECRET = "the secret unicorn in a garden"
COND = torch.ones(1, 77, 8)


class Quoting:
    """A tokenizer, a folder of dumps and a mapping that fail with the prompt in their message."""

    model_max_length = 77

    def tokenize(self, text: str) -> None: ...

    def __call__(self, text: str, **_: object) -> None:
        raise ValueError(f"cannot read {text}")

    def save(self, *_: object, **__: object) -> Any:
        raise ValueError(f"cannot write {SECRET}")


class QuotingMapping(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError(SECRET)


@pytest.mark.parametrize("privacy", ["hash", "none"])
@pytest.mark.parametrize(
    "cond",
    [
        COND,
        QuotingMapping(a=1),
        {"a": COND, SECRET: COND + 1, "b": COND + 2},
        {"a": COND, f"{SECRET}, 2": 3.0},
        [[COND, {SECRET: COND, f"{SECRET}.1": 1.0, "text": [SECRET]}]],
    ],
)
def test_nothing_quotes_the_prompt(cond: Any, privacy: Any) -> None:
    baseline = capture_text_encoding_baseline(None, None, tokenizer=Quoting())
    found = analyze_text_encoding_results(
        baseline, cond, None, SECRET, None, 0.1, prompt_privacy=privacy, dumps=Quoting()
    )
    assert "unicorn" not in json.dumps(found)


def test_a_failing_tokenizer_is_still_a_reason() -> None:
    baseline = capture_text_encoding_baseline(None, None, tokenizer=Quoting())
    found = analyze_text_encoding_results(baseline, COND, None, SECRET, None, 0.1, prompt_privacy="none")
    reason = found["text_processing"]["positive"]["unavailable"]["token_count"]
    assert reason.startswith("Quoting failed: ValueError (")
    assert reason.endswith(" in __call__)")


def test_a_stage_that_failed_does_not_quote_the_prompt_in_the_run() -> None:
    monitor = sigmascope.WorkflowMonitor(prompt_privacy="hash", sample_hz=None)
    error = ValueError(f"cannot encode {SECRET}")
    baseline = monitor.capture_text_encoding_baseline(None, None)
    monitor.start_monitoring("text_encoding")
    with pytest.raises(ValueError, match="unicorn"), monitor.encoding("positive"):
        raise error
    monitor.end_monitoring("text_encoding", error=error)
    monitor.analyze_text_encoding_results(baseline, None, None, SECRET, None, None, error=error)
    stage = monitor.run().stage("text_encoding")
    assert stage is not None
    assert stage.error is not None
    assert stage.error.startswith("ValueError (")
    assert stage.error.endswith(" in test_a_stage_that_failed_does_not_quote_the_prompt_in_the_run)")
    assert "unicorn" not in repr(monitor.run())
