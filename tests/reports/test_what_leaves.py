"""What of a record leaves to be read elsewhere, at each privacy, on every surface."""

import html
import re
from pathlib import Path
from typing import Any

import pytest
from tests.families import make_pipeline
from tests.reports.tracing_runs import run_of

import sigmascope
from sigmascope.records.prompts import prompt_sha256
from sigmascope.records.run import Finding, Stage
from sigmascope.reports.surfaces import surfaces as all_surfaces

LONG = "zebracorn over a marsh, " * 40


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_a_prompt_longer_than_a_trace_s_texts_is_found_before_they_are_cut(
    privacy: Any, tmp_path: Path
) -> None:
    """Whole in an argument, a finding and a list."""
    fact = {
        "prompts": {"prompt": {"sha256": prompt_sha256(LONG), "text": LONG}},
        "note": f"of {LONG}",
        "all": [LONG],
    }
    finding = Finding("a", "info", f"It shows {LONG}", {"text": LONG}, f"Draw {LONG}")
    run = run_of(Stage("generation", 0.0, 1.0, facts=fact, findings=(finding,)))
    run.to_trace(tmp_path / "trace.json", prompts=privacy)
    told = (tmp_path / "trace.json").read_text()
    assert "zebracorn" not in told
    assert "prompts.prompt.text" not in told
    assert (prompt_sha256(LONG) in told) == ("prompts.prompt.sha256" in told) == (privacy == "hash")


def test_none_leaves_no_row_for_a_prompt_and_no_hash() -> None:
    facts = {
        "prompts": {"prompt": {"sha256": "ab" * 32, "text": "a fox"}},
        "text_processing": {"positive": {"text_content": None, "text_sha256": "cd" * 32}},
        "recipe": {"arguments": {}},
    }
    run = run_of(Stage("generation", 0.0, 1.0, facts=facts))
    surfaces = {surface.name: surface.render([run], "none") for surface in all_surfaces()}
    assert set(surfaces) >= {"html", "markdown", "trace"}
    for text in surfaces.values():
        assert not [trace for trace in ("abab", "cdcd", "sha256", "<prompt>", "&lt;prompt") if trace in text]
    assert "sha256 abab" in sigmascope.to_markdown(run)


@pytest.mark.parametrize("privacy", ["full", "hash", "none"])
def test_a_broken_lora_s_folders_stay_here(privacy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "zebracorn client" / "loras"
    folder.mkdir(parents=True)
    (folder / "style.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{bad")
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(sample_hz=None) as watch, pytest.raises(OSError, match="Unable to load"):
        pipeline.load_lora_weights(str(folder / "style.safetensors"))
    assert any("zebracorn" in finding.message for finding in watch.findings)
    for surface in all_surfaces():
        told = html.unescape(surface.render([watch.record()], privacy))
        assert "zebracorn" not in told, surface.name
        assert "loras/style.safetensors" in re.sub(r"\\(.)", r"\1", told)
