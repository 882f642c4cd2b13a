"""The HTML report: its figures are the record's, a stranger's text stays text, prompts are private, long runs stay small."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tests.analysis.run_sets import of_parts
from tests.reports.html.payloads import PAYLOADS, run_that_holds

import sigmascope
from sigmascope.analysis.breakdown import headline, time_breakdown
from sigmascope.errors import ConfigError
from sigmascope.records.run import Finding, Run, Stage, Steps
from sigmascope.records.serialization import run_from_json, run_to_json
from sigmascope.reports.html import to_html
from sigmascope.units import seconds

PROMPT = "a portrait of nobody you know"
STEPS = Steps(started=(0.0, 2.0, 4.0, 6.0), seconds=(1.5, 1.5, 1.5, 1.5))
CALL = {
    "call": {"callback": "preview (generate.py:31)", "num_inference_steps": 4},
    "prompts": {"prompt": {"sha256": "ab" * 32, "text": PROMPT}},
    "recipe": {"arguments": {"eta": 0.0}, "loras": {}, "threads": 2},
}
DENOISING = Stage("denoising", 2.0, 8.0, steps=STEPS)
RUN = Run(
    "1",
    "portrait",
    "2026-01-02T03:04:05+00:00",
    12.0,
    stages=(
        Stage("generation", 1.0, 10.0, children=(Stage("text_encoding", 1.0, 0.75), DENOISING), facts=CALL),
    ),
    findings=(Finding("rule", "warning", "It is slow.", {"gain_seconds": 1.0}, "Do less."),),
)


JPEG = "ffd8ffe0" + "00" * 40


def with_picture(text: str, name: str = "portrait", prompt: str = PROMPT) -> Run:
    (generation,) = RUN.stages
    facts = {
        **CALL,
        "prompts": {"prompt": {"sha256": "ab" * 32, "text": prompt}},
        "thumbnail": {"jpeg": text, "width": 96, "height": 96},
    }
    return replace(RUN, name=name, stages=(replace(generation, facts=facts),))


def uris(html: str) -> list[str]:
    return re.findall(r'<img src="([^"]*)"', html)


@pytest.mark.parametrize("prompt", [PROMPT, "a", "00", "ff"])
def test_a_small_picture_is_shown_whatever_the_prompt_is(prompt: str) -> None:
    (uri,) = uris(to_html(with_picture(JPEG, prompt=prompt)))
    assert base64.b64decode(uri.removeprefix("data:image/jpeg;base64,")) == bytes.fromhex(JPEG)


def test_pictures_of_two_runs_are_side_by_side() -> None:
    other = JPEG[:-2] + "01"
    html = to_html([with_picture(JPEG, "fox"), with_picture(other, "fox")])
    assert re.findall("<figcaption>(.*?)</figcaption>", html) == ["Before: fox", "Now: fox"]
    shown = [base64.b64decode(uri.partition(",")[2]).hex() for uri in uris(html)]
    assert shown == [JPEG, other]


@pytest.mark.parametrize(
    "text",
    ['ffd8ff" onerror="attacked()', "<script>", "", "89504e47", "ffd8ff0", "ffd8ff" + "00" * 40_000, 7],
)
def test_what_is_no_small_jpeg_is_not_shown(text: Any) -> None:
    assert uris(to_html(with_picture(text))) == []


def test_a_run_without_pictures_shows_none() -> None:
    assert uris(to_html(RUN)) == []


class Page(HTMLParser):
    """What a browser makes of it: elements with attributes, and the texts of cells, paragraphs and the rest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.in_script = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        (self.scripts if self.in_script else self.texts).append(data.strip())

    def cells_after(self, label: str, count: int) -> list[str]:
        texts = [text for text in self.texts if text]
        start = texts.index(label) + 1
        return texts[start : start + count]


def test_the_figures_are_the_records() -> None:
    page = Page(to_html(RUN))
    assert headline(RUN) in page.texts
    for row in time_breakdown(RUN):
        assert page.cells_after(row.label, 1) == [seconds(row.seconds)]
    assert page.cells_after("denoising, between steps", 3) == [
        "2.00 s",
        "17 %",
        "preview (generate.py:31), 4 × 500 ms",
    ]
    assert any(text.startswith("4 steps: median 1.50 s") for text in page.texts)
    assert "What to do: Do less." in page.texts


PLACE = {
    "stage": "before the first stage",
    "part": "outside stages",
    "file": "script.py",
    "line": 12,
    "samples": 9,
}
PLACE |= {"function": "read_image", "seconds": 0.75}
SAMPLED = replace(
    RUN,
    facts={"host_stacks": {"samples": 99, "cost_seconds": 0.01, "cost_share": 0.001, "places": [PLACE]}},
)
"""Its script was in `read_image` for three quarters of the second before the first stage."""


def test_places_in_the_script_lie_under_their_row() -> None:
    page = Page(to_html(SAMPLED))
    texts = [text for text in page.texts if text]
    assert texts.index("read_image (script.py:12)") == texts.index("before the first stage") + 3
    assert page.cells_after("read_image (script.py:12)", 3) == ["750 ms", "6 %", "by samples"]
    assert "read_image (script.py:12)" in Page(to_html(SAMPLED, only_verdict=True)).texts


def test_stages_of_few_steps_have_no_chart_and_those_of_one_name_are_told_apart() -> None:
    few = replace(DENOISING, steps=Steps((0.0, 2.0), (1.5, 1.5)))
    for stages, expected in (
        ((Stage("base", 0.0, 5.0, children=(few,)),), []),
        (
            tuple(Stage(name, 0.0, 5.0, children=(DENOISING,)) for name in ("base", "tuned")),
            ["Steps of denoising in base", "Steps of denoising in tuned"],
        ),
    ):
        page = Page(to_html(replace(RUN, stages=stages)))
        assert [text for text in page.texts if text.startswith("Steps of")] == expected


def test_the_record_is_in_it_whole() -> None:
    page = Page(to_html(RUN, prompts="full"))
    assert run_from_json(page.scripts[0]) == run_from_json(run_to_json(RUN))


def test_templates_are_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    html = to_html(RUN)
    monkeypatch.delattr(jinja2.Environment, "compile")
    assert to_html(RUN) == html


def test_nothing_is_asked_of_the_network() -> None:
    html = to_html(RUN)
    assert not re.search(r"(?:src|href)=\"(?!#)", html)
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html


@pytest.fixture(scope="module")
def harmless() -> Page:
    return Page(to_html([run_that_holds("harmless")] * 2, prompts="full"))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_strangers_text_stays_text(payload: str, harmless: Page) -> None:
    page = Page(to_html([run_that_holds(payload)] * 2, prompts="full"))
    assert page.elements == harmless.elements
    assert any(payload in text for text in page.texts)


def test_there_are_sixty_payloads() -> None:
    assert len(set(PAYLOADS)) >= 60


@pytest.mark.parametrize(("privacy", "kept"), [("full", True), ("hash", False), ("none", False)])
def test_prompts_are_private_unless_asked_for(privacy: str, kept: bool) -> None:
    failed = replace(DENOISING, success=False, error=f"ValueError: {PROMPT}")
    run = replace(RUN, stages=(replace(RUN.stages[0], children=(failed,), success=False),))
    html = to_html(run, prompts=privacy)  # type: ignore[arg-type]
    assert (PROMPT in html) is kept
    assert (PROMPT in to_html(run, prompts=privacy, only_verdict=True)) is kept  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["warning", "portrait", "denoising", "float32", "true", "1"])
@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_a_prompt_that_is_a_word_of_the_record_breaks_no_report(prompt: str, privacy: str) -> None:
    facts = {**CALL, "prompts": {"prompt": {"sha256": "ab" * 32, "text": prompt}}}
    run = replace(RUN, stages=(replace(RUN.stages[0], facts=facts),))
    html = to_html(run, prompts=privacy)  # type: ignore[arg-type]
    assert '<div class="finding warning">' in html
    assert f"<td>{prompt}</td>" not in html


def test_several_runs_are_set_beside_the_first() -> None:
    slower = replace(
        RUN,
        name="slower",
        seconds=20.0,
        stages=(replace(RUN.stages[0], seconds=18.0), Stage("saving", 19.0, 1.0)),
    )
    page = Page(to_html([RUN, slower]))
    assert any(text.startswith("1.67 × as long (12.00 s → 20.00 s)") for text in page.texts)
    assert page.cells_after("generation, the rest", 3) == ["1.25 s", "9.25 s", "+8.00 s"]
    assert {"Before: portrait", "Now: slower"} <= set(page.texts)


def test_a_notebook_shows_the_verdict_without_prompts() -> None:
    html = RUN._repr_html_()
    assert headline(RUN) in html
    assert len(html) < 5_000
    assert "<script" not in html


def test_ten_thousand_steps_stay_below_six_megabytes_and_the_slow_one_is_seen() -> None:
    count = 10_000
    durations = [0.01] * count
    durations[7_777] = 0.5
    long = Stage(
        "denoising", 0.0, 110.0, steps=Steps(tuple(index / 100 for index in range(count)), tuple(durations))
    )
    html = to_html(replace(RUN, seconds=120.0, stages=(long,)))
    assert len(html.encode()) < 6 << 20
    assert html.count('class="step slow"') == 1
    assert "(step 7778)" in html


def test_a_damaged_record_is_shown_all_the_same() -> None:
    nan = float("nan")
    run = replace(
        RUN, stages=(Stage("denoising", nan, nan, steps=Steps((nan,), (nan,))), Stage("vae", 0.0, -1.0))
    )
    assert "Damaged" in to_html(run)
    assert "Damaged" in to_html(replace(run, seconds=nan))
    assert "Nothing was recorded" in to_html(replace(RUN, stages=()))


def test_no_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no run"):
        to_html([])


def test_a_file_is_written_by_the_run_itself(tmp_path: Path) -> None:
    RUN.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text == to_html(RUN)
    sigmascope.write_html([RUN, RUN], tmp_path / "report.html")
    assert "2 runs" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_lora_strengths_by_block_and_what_did_not_match_are_shown() -> None:
    page = Page(to_html(run_that_holds("block"), prompts="full"))
    assert "It changed the model." in page.texts
    assert json.loads(page.scripts[0])["run"]["name"] == "block"


@pytest.mark.parametrize(("id", "tone"), [("lora_encoder_not_run", "warn"), ("lora_is_zero", "bad")])
def test_the_verdict_is_red_only_where_it_is_known_that_loras_do_nothing(id: str, tone: str) -> None:
    told = {"id": id, "severity": "warning", "message": "Of the LoRA."}
    stage = Stage("generation", 0.0, 1.0, facts={"idle_loras": [told]})
    page = to_html(replace(RUN, stages=(stage,), findings=(Finding(id, "warning", "Of the LoRA."),)))
    assert f'<p class="verdict tone-{tone}">Of the LoRA.' in page
    assert f'<li class="tile tone-{tone}"><p class="label">LoRA</p>' in page


@pytest.mark.parametrize(("id", "is_confirmed"), [("lora_arrives_weak", False), ("lora_overlap", True)])
def test_weights_do_not_confirm_a_lora_of_which_little_arrives(id: str, is_confirmed: bool) -> None:
    told = {"id": id, "severity": "warning", "message": "Of the LoRA."}
    changes = {"checked": {"a": {"result": "confirmed"}}}
    analysis = {"effective": True, "findings": [told], "unet_weight_changes": changes}
    stage = Stage("lora_application", 0.0, 1.0, facts={"lora_application": analysis})
    page = to_html(replace(RUN, stages=(stage,)))
    assert ("1 of the strongest weights is used as the LoRA says." in page) is is_confirmed


def test_where_several_loras_are_on_a_section_tells_what_each_does_then() -> None:
    def on(**loras: dict[str, Any]) -> str:
        patches = {"loras": loras}
        blocks = [{"name": "mid_block", "relative_change": 0.034}]
        analysis = {
            "effective": True,
            "unet_lora_patches": patches,
            "unet_weight_changes": {"by_block": blocks},
        }
        facts = {"lora_application": analysis, "method": "load_lora_weights"}
        return to_html(replace(RUN, stages=(Stage("lora_application", 0.0, 1.0, facts=facts),)))

    style = {"states": {"inactive": 80}, "relative_change": 0.0}
    character = {"states": {"lazy": 80}, "relative_change": 0.00522}
    page = on(style=style, character=character)
    assert "Then in the denoiser: style is off or at strength 0, ‖ΔW‖ / ‖W‖ of character is 0.52 %." in page
    assert "What load_lora_weights changed in each block (after minus before)" in page
    assert '<th scope="row">mid_block</th><td class="number">3.4 %</td>' in page
    assert "Then in the" not in on(character=character)


def test_a_long_start_is_a_folded_bar_of_the_timeline() -> None:
    """Imports take 20 of 24 s: they have an eighth of the width, and the rest of the axis is the stages'."""
    stage = Stage("denoising", 20.0, 4.0)
    page = to_html(
        Run(
            "1",
            "demo",
            "2026-01-02T03:04:05+00:00",
            24.0,
            stages=(stage,),
            facts={"imports": {"torch": 20.0}},
        )
    )
    assert "start: 20.00 s, imports (torch 20.00 s); drawn shorter than it is" in page
    bars = {
        name: (float(left), float(width))
        for left, width, name in re.findall(
            r'<svg x="([\d.]+)%" y="\d+" width="([\d.]+)%".*?<text x="4" y="15">([^<]+)', page
        )
    }
    assert bars == {"start 20.00 s": (0.0, 12.0), "denoising": (12.0, 88.0)}
    ticks = [float(left) for left in re.findall(r'<line class="tick" x1="([\d.]+)%"', page)]
    assert ticks == [12.0, 34.0, 56.0, 78.0]  # 20 s, 21 s and so on


def test_a_short_start_is_drawn_as_long_as_it_is() -> None:
    stage = Stage("denoising", 2.0, 8.0)
    page = to_html(Run("1", "demo", "2026-01-02T03:04:05+00:00", 10.0, stages=(stage,)))
    assert "drawn shorter" not in page
    assert '<svg x="20.0000%" y="2" width="80.0000%"' in page


NAN = float("nan")


@pytest.mark.parametrize(
    "stage",
    [
        Stage("denoising", 20.0, NAN),
        Stage("denoising", NAN, 4.0),
        Stage("denoising", 30.0, 4.0),  # the clock jumped: it begins after the run's end
        Stage("denoising", 20.0, -1.0),
        Stage("denoising", 20.0, 4.0, steps=Steps((0.0, NAN), (NAN, 1.0))),
        Stage("denoising", 20.0, 4.0, facts={"denoiser_calls": {}, "scheduler_steps": 0}),  # no step
    ],
    ids=["no length", "no beginning", "after the end", "backwards", "steps without times", "no steps"],
)
def test_a_clock_that_jumped_breaks_neither_the_timeline_nor_the_sentence(stage: Stage) -> None:
    run = Run("1", "demo", "2026-01-02T03:04:05+00:00", 24.0, stages=(stage,))
    page = to_html(run)
    assert "nan%" not in page
    assert 'width="-' not in page
    assert headline(run)


def test_generations_of_a_series_are_bars_of_one_chart() -> None:
    """Each has a chart of its steps on a scale of its own, which hides that they creep up."""
    lasted = (2.0, 3.0, 4.0, 8.0)
    stages = tuple(Stage("generation", 10.0 * place, taken) for place, taken in enumerate(lasted))
    html = to_html(replace(RUN, seconds=40.0, stages=stages))
    chart = html.partition("One generation after another")[2].partition("</svg>")[0]
    assert "4 generations: median 3.50 s, the slowest 8.00 s (generation 4)" in chart
    assert re.findall(r'height="([0-9.]+)"><title>(.*?)</title>', chart) == [
        ("25.00", "generation 1: 2.00 s"),
        ("37.50", "generation 2: 3.00 s"),
        ("50.00", "generation 3: 4.00 s"),
        ("100.00", "generation 4: 8.00 s"),
    ]
    assert "One generation after another" not in to_html(replace(RUN, stages=stages[:3]))


def test_a_time_that_cannot_be_is_not_told_as_one() -> None:
    html = to_html(replace(RUN, seconds=-5.0))
    assert "its time is not recorded" in html
    assert "took -" not in html


def test_a_peak_that_rose_has_a_row_and_so_has_what_nobody_can_decide() -> None:
    """One run, then three: 50 % more memory, and 9 % more time, of which so few runs tell nothing."""
    before = of_parts({"denoising": [1.0] * 4}, rss=1000 * 2**20)
    now = [of_parts({"denoising": [1.09] * 4}, rss=1500 * 2**20) for _ in range(3)]
    page = Page(to_html([before, *now]))
    assert "3 runs, compared with run" in page.texts
    assert page.cells_after("process peak", 3) == ["1000 MB", "1.465 GB", "+50.0 %"]
    assert page.cells_after("denoising step", 3) == ["1.00 s", "1.09 s", "undecided +9.0 %"]


def test_what_is_processor_time_is_called_so() -> None:
    """The run waited for half of its time: in the place of 2 s by the clock stands 1 s of the processor."""
    before, now = (
        of_parts({"denoising": [step] * 4}, waited=waited) for step, waited in ((0.25, 0.0), (0.5, 0.5))
    )
    page = Page(to_html([before, now]))
    assert page.cells_after("denoising, processor time", 3) == ["1.00 s", "1.00 s", "not comparable 0.0 %"]
