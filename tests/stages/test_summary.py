"""What the summaries print: 80 columns, plain, nothing interpreted."""

import io
import json
import unicodedata
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sigmascope.stages.summary import as_it_is, print_summary
from sigmascope.stages.text_encoding import (
    analyze_text_encoding_results,
    capture_text_encoding_baseline,
    print_text_encoding_analysis_summary,
)


def analysis(prompt: Any = "a red fox", cond: Any = None, **options: Any) -> dict[str, Any]:
    baseline = capture_text_encoding_baseline(None, torch.nn.Linear(2, 2))
    cond = torch.ones(1, 77, 2048) if cond is None else cond
    return dict(analyze_text_encoding_results(baseline, cond, None, prompt, "", 0.25, **options))


def printed(found: dict[str, Any], **options: Any) -> str:
    file = io.StringIO()
    print_text_encoding_analysis_summary(found, Console(file=file, **options))
    return file.getvalue()


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


SECTIONS = [
    "BASIC INFORMATION",
    "TEXT PROCESSING, POSITIVE",
    "TEXT PROCESSING, NEGATIVE",
    "POSITIVE CONDITIONING",
    "NEGATIVE CONDITIONING",
    "PERFORMANCE",
    "MODEL STATE",
    "MEMORY IMPACT",
    "PEAK MEMORY",
    "VALIDATION",
]


def test_every_section_of_the_seed_is_there() -> None:
    text = printed(analysis())
    assert [text.find(f"{title}:") for title in SECTIONS] == sorted(text.find(f"{t}:") for t in SECTIONS)
    assert all(f"{title}:" in text for title in SECTIONS)
    assert "Text encoding success: YES" in text
    assert "Shape: (1, 77, 2048)" in text
    assert "CLIP variant: SDXL CLIP" in text


def test_errors_have_a_section_of_their_own() -> None:
    text = printed(analysis(cond={}, error=ValueError("the encoder broke")))
    assert "ERRORS:" in text
    assert "Error: ValueError: the encoder broke" in text
    assert "Text encoding success: NO" in text


@pytest.mark.parametrize("prompt", ["a red fox", "word " * 500, "猫" * 300, "x" * 1000, ""])
@pytest.mark.parametrize("width", [80, 200, 40])
def test_lines_fit(prompt: str, width: int) -> None:
    text = printed(analysis(prompt), width=width)
    assert max(columns(line.rstrip()) for line in text.splitlines()) <= min(80, width)


def test_without_a_terminal_it_is_plain() -> None:
    assert "\x1b" not in printed(analysis())


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in printed(analysis(), force_terminal=True)


@pytest.mark.parametrize(
    "prompt", ["[bold red]fox[/bold red]", "[/]", "[link=file:///x]y[/link]", ":smiley:"]
)
def test_markup_is_not_interpreted(prompt: str) -> None:
    assert prompt in printed(analysis(prompt))
    assert prompt in printed(analysis(prompt), force_terminal=True, color_system=None)


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = printed(analysis("red\x1b[2J\x07\x00\u202efox\r\nnext\ud800"))
    assert "red\\x1b[2J\\x07\\x00\\u202efox\\r\\nnext\\ud800" in text


@settings(deadline=None, max_examples=30)
@given(st.text(st.characters(codec=None), max_size=60))
def test_any_prompt_prints(prompt: str) -> None:
    text = printed(analysis(prompt))
    shown = [c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"]
    assert shown == []


def test_an_old_terminal_gets_escapes_instead_of_an_error() -> None:
    buffer = io.BytesIO()
    with io.TextIOWrapper(buffer, encoding="cp1252", errors="strict") as file:
        print_text_encoding_analysis_summary(analysis("猫"), Console(file=file))
        file.flush()
        assert "\\u732b" in buffer.getvalue().decode("cp1252")


def test_without_accelerator_one_line_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert printed(analysis()).count("no accelerator was found") == 1


def test_an_analysis_read_from_a_file_prints_the_same() -> None:
    found = analysis("a fox")
    assert printed(json.loads(json.dumps(found))) == printed(found)


def test_a_private_prompt_shows_its_hash() -> None:
    text = printed(analysis("the secret unicorn", prompt_privacy="hash"))
    assert "unicorn" not in text
    assert "kept as SHA-256" in text


@pytest.mark.parametrize("foreign", [{}, {"encoding_success": True}, {"performance": None, "validation": 3}])
def test_a_dict_that_lacks_parts_prints_what_it_has(foreign: dict[str, Any]) -> None:
    assert "BASIC INFORMATION" in printed(foreign)


def test_any_analysis_is_shown_as_it_is() -> None:
    found = {
        "encoding_success": True,
        "elapsed_time": 2.45,
        "strategy_used": "Direct [bold]VAE[/bold]",
        "latent_analysis": {"shape": [1, 4, 4, 64, 64], "num_elements": 65536, "nested": {"deep": None}},
        "unavailable": {"x": "reason"},
    }
    file = io.StringIO()
    print_summary("LATENT", as_it_is(found), Console(file=file))
    text = file.getvalue()
    for line in (
        "Encoding success: yes",
        "Elapsed time: 2.45",
        "Strategy used: Direct [bold]VAE[/bold]",
        "LATENT ANALYSIS:",
        "Shape: 1, 4, 4, 64, 64",
        "Num elements: 65,536",
        "Nested › Deep: -",
    ):
        assert line in text
