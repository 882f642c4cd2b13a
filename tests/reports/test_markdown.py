"""Markdown for an issue tracker: short, private, and a stranger's text is text there too."""

from dataclasses import replace

import pytest
from tests.reports.html.payloads import PAYLOADS, run_that_holds
from tests.reports.html.test_html import PLACE, PROMPT, RUN, SAMPLED

from sigmascope.records.run import Finding, HostFacts, Run, Stage
from sigmascope.reports.markdown import to_markdown


def test_the_first_line_says_what_is_in_it_and_what_is_left_out() -> None:
    first, _, verdict = to_markdown(RUN).splitlines()[:3]
    assert "no tensors" in first
    assert "their hashes" in first
    assert verdict == "**50 % of 12.00 s went into denoising: 4 steps of 1.50 s.**"


def test_a_lora_that_acts_is_told_below_the_verdict() -> None:
    changes = {"relative_change": 0.199}
    facts = {"lora_application": {"effective": True, "findings": [], "unet_weight_changes": changes}}
    run = replace(RUN, stages=(Stage("lora_application", 0.0, 0.1, facts=facts), *RUN.stages))
    assert "**\n\nThe LoRA acts: ‖ΔW‖ / ‖W‖ is 20 % in the denoiser.\n" in to_markdown(run)
    assert "The LoRA" not in to_markdown(RUN)


def test_a_long_record_makes_sixty_lines_at_most() -> None:
    findings = tuple(Finding(f"rule.{number}", "info", f"Number {number}.") for number in range(50))
    host = HostFacts("cpu", 2, 2, 1, "os", "3.11", {f"library{number}": "1" for number in range(90)})
    before = replace(RUN, findings=findings, host=host)
    now = replace(before, host=replace(host, libraries={f"library{number}": "2" for number in range(90)}))
    for text in (to_markdown(before), to_markdown([before, now])):
        assert len(text.splitlines()) <= 60
        assert "and 45 more findings" in text


def test_places_in_the_script_lie_under_their_row() -> None:
    lines = to_markdown(SAMPLED).splitlines()
    row = lines.index("| before the first stage | 1.00 s | 8 % |")
    assert lines[row + 1] == "| &emsp;read\\_image (script.py:12) | 750 ms | 6 % |"


def test_five_places_are_shown_at_most() -> None:
    places = [{**PLACE, "stage": stage, "function": name, "seconds": 0.2}
              for stage in ("before the first stage", "after the last stage") for name in "abcd"]  # fmt: skip
    run = replace(SAMPLED, facts={"host_stacks": {**SAMPLED.facts["host_stacks"], "places": places}})
    assert to_markdown(run).count("(script.py:12)") == 5


def test_prompts_are_private_unless_asked_for() -> None:
    assert PROMPT not in to_markdown(RUN)
    assert "sha256" in to_markdown(RUN)
    assert PROMPT in to_markdown(RUN, prompts="full")


@pytest.mark.parametrize(
    "payload", [*PAYLOADS, "@everyone", "#1", "![x](https://example.com)", "| cell |", "`code`"]
)
def test_a_strangers_text_stays_text(payload: str) -> None:
    text = to_markdown([run_that_holds(payload)] * 2, prompts="full")
    table = to_markdown(run_that_holds(payload), prompts="full")
    assert text.count("<") == 0
    assert table.count("<") == 4  # details and summary, each opened and closed
    for special in ("@everyone", " #1", "![x]", "https://"):
        assert special not in text
    plain = to_markdown([run_that_holds("harmless")] * 2, prompts="full")
    bars = [line.replace("\\|", "").count("|") for line in text.splitlines()]
    assert bars == [line.count("|") for line in plain.splitlines()]


def test_two_runs_lead_with_what_changed() -> None:
    slower = replace(RUN, seconds=24.0)
    text = to_markdown([RUN, slower])
    assert "**2.00 × as long (12.00 s → 24.00 s)" in text


def test_findings_are_a_list_of_their_own_behind_the_table() -> None:
    """Without memory on record nothing else stands between the two."""
    found = Finding("rule", "warning", "It is slow.", {}, "Do less.")
    run = Run(
        "1",
        "demo",
        "2026-01-02T03:04:05+00:00",
        2.0,
        stages=(Stage("denoising", 0.0, 2.0),),
        findings=(found,),
    )
    lines = to_markdown(run).splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("- warning"))
    assert (lines[at - 1], lines[at - 2][:1]) == ("", "|")


def test_of_two_runs_each_part_has_its_time_before_and_now() -> None:
    """All stages end at 11 s; then the run goes on for another 6 s."""
    lines = to_markdown([RUN, replace(RUN, seconds=18.0)]).splitlines()
    head = next(index for index, line in enumerate(lines) if line.endswith("| before | now |"))
    assert lines[head + 2] == "| after the last stage | 1.00 s | 7.00 s |"
    assert "| denoising, steps | 6.00 s | 6.00 s |" in lines
    assert not any("all else" in line for line in lines)
