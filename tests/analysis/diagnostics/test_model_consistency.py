from typing import Any

import pytest

from sigmascope.analysis.diagnostics import find_model_changes
from sigmascope.records.run import Finding, Run, Stage

STATE = {"model_id": 1, "class_type": "UNet", "device": "cpu", "patches_count": 0, "changed": None}


def findings(*stages: tuple[str, dict[str, Any]]) -> tuple[Finding, ...]:
    records = tuple(
        Stage(name, float(i), 1.0, facts={"model_state.UNet": STATE | state})
        for i, (name, state) in enumerate(stages)
    )
    return find_model_changes(Run("id", "run", "2026-01-01T00:00:00+00:00", 9.0, stages=records))


def test_a_model_that_stays_is_no_finding() -> None:
    assert findings(("model_loading", {}), ("text_encoding", {}), ("denoising", {"changed": []})) == ()


def test_a_patch_outside_its_stage_is_a_warning() -> None:
    (found,) = findings(("model_loading", {}), ("text_encoding", {"patches_count": 3}))
    assert (found.id, found.severity, found.stage) == ("model_state_changed", "warning", "text_encoding")
    assert found.evidence == {"patches_count": "0 → 3"}
    assert "model_loading" in found.message


def test_a_lora_may_patch() -> None:
    assert findings(("model_loading", {}), ("lora_application", {"patches_count": 3, "model_id": 2})) == ()


def test_what_a_lora_left_is_compared_with_what_follows() -> None:
    (found,) = findings(
        ("model_loading", {}), ("lora_application", {"patches_count": 3}), ("denoising", {"patches_count": 0})
    )
    assert found.evidence == {"patches_count": "3 → 0"}


def test_a_move_to_another_device_is_only_told() -> None:
    (found,) = findings(("model_loading", {}), ("denoising", {"device": "cuda:0"}))
    assert found.severity == "info"


@pytest.mark.parametrize("unknown", [{"device": None}, {"patches_count": None}])
def test_what_is_unknown_is_not_compared(unknown: dict[str, Any]) -> None:
    assert findings(("model_loading", unknown), ("denoising", {"device": "cpu"})) == ()
