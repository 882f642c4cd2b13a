"""What of a record leaves to be read elsewhere, at each privacy, on every surface."""

import html
import json
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


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_a_prompt_is_in_no_value_key_or_name_and_is_told_alike_everywhere(privacy: Any) -> None:
    words = "zebracorn over a marsh"
    facts = {
        "prompt": words,
        "text_content": f"{words}, at dawn",
        "prompts": [words, f"a {words}"],
        "call": {"negative_prompt": {"first": f"no {words}"}},
        "seconds_of": {words: 1.0, f"a {words}": 2.0},
        words: 3,
    }
    run = run_of(Stage(f"draw {words}", 0.0, 1.0, error=f"ValueError: {words}", facts=facts), name=words)
    texts = {surface.name: html.unescape(surface.render([run], privacy)) for surface in all_surfaces()}
    assert [name for name, text in texts.items() if "zebracorn" in text] == []
    (arguments,) = [
        event["args"] for event in json.loads(texts["trace"])["traceEvents"] if event.get("cat") == "stage"
    ]
    placeholders = {
        text: f"<prompt sha256:{prompt_sha256(text)}>" if privacy == "hash" else "<prompt>"
        for text in (words, f"{words}, at dawn", f"a {words}")
    }
    first, second, third = placeholders.values()
    assert arguments["prompt"] == first
    assert arguments["text_content"] == second
    assert arguments["prompts"] == f"{first}, {third}"
    told = texts["html"].replace("\\u003c", "<").replace("\\u003e", ">")
    assert f'"prompt":"{first}","text_content":"{second}","prompts":["{first}","{third}"]' in told


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
        names_files = surface.name != "prometheus"  # a label for each file would be without bound
        assert ("style.safetensors" in told) == names_files
        assert not names_files or "loras/style.safetensors" in re.sub(r"\\(.)", r"\1", told)
