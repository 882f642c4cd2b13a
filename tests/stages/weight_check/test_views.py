"""The check in the record: JSON and back, printed, in HTML, Markdown, and compared."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import LowVramPatch, ModelPatcher

from sigmascope.analysis.recipe import recipe_differences
from sigmascope.monitor.recorder import Recorder
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_from_json, run_to_json
from sigmascope.reports.html import to_html
from sigmascope.reports.markdown import to_markdown
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
    in_short,
    print_lora_analysis_summary,
)


def analysed() -> dict[str, Any]:
    patcher = ModelPatcher(BaseModel())
    baseline = capture_lora_baseline(patcher, None)
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    clone.load(lowvram=True)
    return dict(analyze_lora_application_results(baseline, clone, None, (clone, None)))


def recorded(analysis: dict[str, Any]) -> Run:
    recorder = Recorder("run", sample_hz=None)
    with recorder, recorder.stage("lora_application") as stage:
        stage.fact("lora_application", in_short(analysis))
    return run_from_json(run_to_json(recorder.run()))


@pytest.fixture
def confirmed() -> dict[str, Any]:
    return analysed()


@pytest.fixture
def contradicted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(LowVramPatch, "__call__", lambda _self, weight: weight)
    return analysed()


def printed(analysis: dict[str, Any]) -> str:
    text = StringIO()
    print_lora_analysis_summary(analysis, Console(file=text, width=100))
    return text.getvalue()


def test_every_view_has_what_contradicts(contradicted: dict[str, Any]) -> None:
    run = recorded(contradicted)
    (stage,) = [stage for stage in run.walk() if stage.name == "lora_application"]
    checks = contradicted["unet_weight_changes"]["checked"]
    assert stage.facts["lora_application"]["unet_weight_changes"]["checked"] == checks
    assert "1 contradicted" in printed(contradicted)
    assert Q in printed(contradicted)
    html = to_html(run)
    assert "The weights in use contradict the LoRA" in html
    assert f"{Q} is changed by 0, not by" in html
    assert "1 weight not as the LoRAs say" in to_markdown(run)


def test_what_confirms_is_told_in_short(confirmed: dict[str, Any]) -> None:
    run = recorded(confirmed)
    assert "1 confirmed" in printed(confirmed)
    assert "1 of the strongest weights is used as the LoRA says" in to_html(run)
    assert "| weights in use | as the LoRAs say |" in to_markdown(run)


def test_runs_that_differ_in_it_are_compared(confirmed: dict[str, Any], contradicted: dict[str, Any]) -> None:
    differs = recipe_differences([recorded(contradicted)], [recorded(confirmed)])
    assert differs["weights in use"] == ("as the LoRAs say", "1 weight not as the LoRAs say")
