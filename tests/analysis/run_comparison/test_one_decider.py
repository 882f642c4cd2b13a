"""Every surface says the same of each figure: the first sentence, the rows, the check, its exit code and the pages.

The time of a part of a run is judged beside that of the whole (`run_comparison.compare_run_sets`).
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from tests.analysis.run_sets import of_parts, queued
from typer.testing import CliRunner

from sigmascope.analysis import two_samples
from sigmascope.analysis.run_comparison import (
    ALPHA,
    USUAL,
    Limits,
    check_regression,
    compare_by_step,
    compare_pooled_steps,
    compare_run_sets,
    compare_wholes,
)
from sigmascope.analysis.what_changed import what_changed
from sigmascope.analysis.work_comparison import compare_work
from sigmascope.cli.root import app
from sigmascope.records.run import Run, Stage
from sigmascope.reports.html import to_html
from sigmascope.reports.markdown import as_text, to_markdown
from sigmascope.reports.trend import checks_as_markdown

FEW_RESAMPLES: Final = 20
CALM: Final = {"as before", "not comparable"}


@pytest.fixture(autouse=True, scope="module")
def few_resamples() -> Iterator[None]:
    """No interval is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_samples, "_RESAMPLES", FEW_RESAMPLES)
        yield


def side(
    parts: Mapping[str, float | Sequence[float]], count: int, *, spread: float = 0.001, **other: Any
) -> list[Run]:
    """So many runs, each slower than the one before by a share of `spread`, and back again."""
    made = []
    for number in range(count):
        slower = 1 + spread * (7 * number % 11)
        taken = {
            name: one * slower if isinstance(one, float) else [value * slower for value in one]
            for name, one in parts.items()
        }
        made.append(of_parts(taken, **other))
    return made


def states(new: Sequence[Run], old: Sequence[Run], limits: Limits = USUAL) -> dict[str, str]:
    return {figure.name: figure.state for figure in compare_run_sets(new, old, limits=limits)[0]}


def agrees(state: str, verdict: str, why: str) -> bool:
    """Whether a verdict of the check says what the rows say."""
    few = verdict == "undecided" and "beyond noise, but" in why
    return {
        "changed": verdict in ("regressed", "lower") or few,
        "undecided": verdict == "undecided" and not few and "not comparable" not in why,
        "not comparable": verdict == "undecided" and why.startswith("not comparable: "),
        "as before": verdict in ("same", "higher"),
    }[state]


def contradictions(new: Sequence[Run], old: Sequence[Run], limits: Limits) -> list[str]:
    """Where two surfaces say other things of one figure."""
    compared = compare_work("", new, old, by_step=True, limits=limits)
    said, figures = compared.changed.headline, {figure.name: figure for figure in compared.figures}
    state = {name: figure.state for name, figure in figures.items()}
    times = {name for name, figure in figures.items() if figure.unit == "seconds"}
    whole = compare_wholes(new, old, limits=limits)
    assert whole is not None
    check = check_regression(
        new, old, alpha=limits.alpha, max_slowdown=limits.seconds, max_growth=limits.bytes
    )
    verdicts = {figure.comparison.name: (figure.verdict, figure.why) for figure in check.figures}
    changed_parts = [name for name in times - {"total"} if state[name] == "changed"]
    told = [name for name in state if re.search(rf"{name} [+-]|The {name} (rose|fell) ", said)]
    rows = checks_as_markdown({"": (check, compared.changed)}, {})
    found = {
        "the rows have no whole as the first sentence": whole.state
        not in (state.get("total"), state.get("generation")),
        "the first sentence tells another whole": ("× as " in said) != (whole.state == "changed"),
        "it says that nothing differs": said.startswith("Nothing differs")
        and not set(state.values()) <= CALM,
        "it says nothing beyond noise": "beyond noise" in said
        and any(verdict == "higher" for verdict, _ in verdicts.values()),
        "it says that times are as before": "Times are as before" in said
        and not {state[name] for name in times} <= CALM,
        "it says that times are not comparable": said.startswith("The times are not comparable")
        and not {state[name] for name in times} <= CALM,
        "it says that the whole is as before": "the whole run as before" in said
        and whole.state != "as before",
        "it tells what has not changed": any(state[name] != "changed" for name in told),
        "it calls open what is not": any(
            (whole if name == "the whole time" else figures[name]).state != "undecided"
            for name in re.findall(r"A change of (.+?) by ", said)
        ),
        "it hides the parts that changed": bool(changed_parts)
        and whole.state != "changed"
        and not set(changed_parts) & set(told),
        "the check has other figures": list(verdicts) != list(state),
        "the check says another thing": not all(agrees(state[name], *verdicts[name]) for name in state),
        "the check counts another": len(check.regressed)
        != sum(verdict == "regressed" for verdict, _ in verdicts.values()),
        "Markdown says another thing": not all(
            f"| {as_text(name)} |" in rows and f"| {verdict} | {as_text(why)} |" in rows
            for name, (verdict, why) in verdicts.items()
        )
        or as_text(said[:60]) not in rows,
        "JSON says another thing": [one["state"] for one in compared.as_dict()["figures"]]
        != list(state.values()),
        "pooled steps say another thing": any(one.state != state[one.name] for one in compared.pooled_steps),
        "a step accuses what is not comparable": not whole.is_comparable
        and any(one.state in ("changed", "undecided") for one in compared.steps),
    }
    return [what for what, is_so in found.items() if is_so]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Run], list[Run], Limits]:
    """Two sides of up to seven runs with planted changes of the machine, of parts, and of memory."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    seconds = {
        name: draw(st.sampled_from([0.02, 0.3, 1.0, 10.0]))
        for name in ("text_encoding", "denoising", "latent_decoding")
    }
    factors = {name: draw(st.sampled_from([1.0, 1.0, 1.04, 1.06, 1.12, 1.3, 3.0, 0.8])) for name in seconds}
    machine = draw(st.sampled_from([1.0, 1.0, 1.03, 1.055, 1.09, 1.4]))
    noise = draw(st.sampled_from([0.0005, 0.01, 0.03, 0.1]))
    waited = draw(
        st.sampled_from([(None, None), (None, None), (0.0, 0.1), (0.1, 0.5), (0.4, 0.45), (None, 0.6)])
    )
    growth = draw(st.sampled_from([1.0, 1.005, 1.02, 1.5]))
    is_generation, takes_turns = draw(st.booleans()), draw(st.booleans())
    sides = []
    for is_new in (False, True):
        runs = []
        for number in range(draw(st.integers(1, 7))):
            speed = (machine if is_new else 1.0) * max(0.1, rng.gauss(1, noise / 2))
            parts: dict[str, float | list[float]] = {}
            for name, usual in seconds.items():
                took = usual * speed * (factors[name] if is_new else 1.0) * max(0.1, rng.gauss(1, noise))
                parts[name] = [took / 4] * 4 if name == "denoising" else took
            minute = 2 * number + is_new if takes_turns else number + 100 * is_new
            rss = round(2**30 * (growth if is_new else 1.0) * (1 + rng.random() / 1e4))
            runs.append(
                of_parts(parts, minute=minute, rss=rss, waited=waited[is_new], is_generation=is_generation)
            )
        sides.append(runs)
    alpha = draw(st.sampled_from([0.01, 0.01, 0.1, 1e-4]))
    return sides[1], sides[0], Limits(alpha, draw(st.sampled_from([0.05, 0.05, 0.03, 0.3])), 0.01)


@settings(max_examples=25, deadline=None)
@given(pairs())
def test_no_surface_contradicts_another(pair: tuple[list[Run], list[Run], Limits]) -> None:
    assert contradictions(*pair) == []


def test_parts_leave_open_what_the_whole_leaves_open() -> None:
    """3 + 3 runs, 8.7 % slower throughout but for a stage that is 12 % slower: no part knows more than the runs."""
    new = side({"denoising": [1.12] * 8, "latent_decoding": 2.0}, 3)
    old = side({"denoising": [1.0] * 8, "latent_decoding": 2.0}, 3)
    assert compare_wholes(new, old).undecided is not None  # type: ignore[union-attr]
    assert set(states(new, old).values()) == {"undecided", "as before"}
    checked = check_regression(new, old)
    assert {figure.comparison.name for figure in checked.undecided} == {
        "total",
        "denoising",
        "denoising step",
    }
    assert len({figure.why.split("but ")[1] for figure in checked.undecided}) == 1
    assert "measure 2 more on each side" in checked.undecided[0].why


def test_a_part_that_moves_with_the_whole_is_accused_no_more_than_the_whole() -> None:
    """A machine that is 4.9 % slower makes no stage slower that happens to be so by 5.2 %."""
    new = side({"denoising": [0.1052] * 20, "latent_decoding": 0.204}, 10)
    old = side({"denoising": [0.1] * 20, "latent_decoding": 0.2}, 10)
    told = states(new, old)
    assert told["total"] == "as before"
    assert told["denoising"] == told["denoising step"] == "undecided"
    checked = check_regression(new, old)
    assert not checked.regressed
    assert (
        checked.undecided[0].why
        == "+5.2 %, but the run around it moved by +4.9 %, too; let the sides take turns"
    )
    assert what_changed(new, old).headline.startswith("A change of denoising by +5.2 %")


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.49, 0.51, 0.7])
def test_a_stage_that_is_a_tenth_slower_is_found_whatever_its_share(share: float) -> None:
    """The whole is as before, or has changed; ten runs a side."""
    new, old = (
        side({"denoising": [share * slower] * 10, "loading": 10 * (1 - share)}, 10) for slower in (1.1, 1.0)
    )
    assert states(new, old)["denoising"] == "changed"
    assert check_regression(new, old).regressed
    assert "denoising" in what_changed(new, old).headline


def test_a_part_is_judged_beside_a_machine_that_is_slower() -> None:
    """All is 4 % slower, and one stage by 2 % more: that much is no change of it."""
    new = side({"loading": 10.4, "denoising": [0.106] * 10}, 10)
    old = side({"loading": 10.0, "denoising": [0.1] * 10}, 10)
    assert states(new, old)["denoising"] == "undecided"
    assert states(side({"loading": 10.4, "denoising": [0.116] * 10}, 10), old)["denoising"] == "changed"


def test_a_first_step_that_compiles_is_told_where_the_whole_is_undecided() -> None:
    """One run a side of 200 s, 15 s more of which are in one step."""
    new = [of_parts({"loading": 190.0, "denoising": [15.0, *[0.5] * 19]})]
    old = [of_parts({"loading": 190.0, "denoising": [0.5] * 20})]
    told = states(new, old)
    assert (told["total"], told["denoising"], told["denoising step"]) == ("undecided", "changed", "as before")
    said = what_changed(new, old).headline
    assert said.startswith("denoising +145.0 % (10.00 s → 24.50 s): 14.50 s more in the steps of denoising.")
    assert "A change of the whole time by +7.3 % (200 s → 214 s) cannot be told from noise" in said
    by_step = {step.name: step.state for step in compare_by_step(new, old)}
    assert by_step["denoising step 1"] == "changed"
    assert set(by_step.values()) == {"changed", "as before"}


def test_one_step_of_one_run_may_be_late() -> None:
    """30 ms more in one of twenty steps, which a busy second makes; all of them 30 ms more are no such thing."""
    old = [of_parts({"denoising": [0.05] * 20})]
    late = compare_by_step([of_parts({"denoising": [*[0.05] * 9, 0.08, *[0.05] * 10]})], old)
    assert [step.state for step in late].count("changed") == 0
    assert {step.name: step.state for step in late}["denoising step 10"] == "undecided"
    assert {step.state for step in compare_by_step([of_parts({"denoising": [0.08] * 20})], old)} == {
        "changed"
    }


def test_a_peak_of_memory_is_judged_by_itself() -> None:
    new = side({"denoising": [1.09] * 8}, 3, rss=1500 * 2**20)
    old = side({"denoising": [1.0] * 8}, 3, rss=1000 * 2**20)
    told = states(new, old)
    assert (told["total"], told["denoising"], told["process peak"]) == ("undecided", "undecided", "changed")


def test_steps_of_the_device_are_judged_beside_the_whole_by_the_hosts_clock() -> None:
    """The host's whole is as before: the accelerator's steps have its own clock, and are far beyond it."""
    new, old = ([queued(9.0, one + number / 1e4) for number in range(6)] for one in (1.2, 1.0))
    assert states(new, old)["denoising step"] == "changed"


def test_where_the_whole_is_not_comparable_no_part_is_accused() -> None:
    """Other programs kept the run waiting while it loaded; a stage that did not wait is slower, by its own doing or theirs."""

    def run(decoding: float, waited: float) -> Run:
        use = {"own_seconds": 4.0, "waited_seconds": waited, "throttled_seconds": 0.0}
        calm = {"processor": {**use, "waited_seconds": 0.0}}
        stages = (
            Stage("loading", 0.0, 5.0, facts={"processor": use}),
            Stage("latent_decoding", 5.0, decoding, facts=calm),
        )
        return Run(
            "id", "run", "2026-01-01T00:00:00+00:00", 5.0 + decoding, stages=stages, facts={"processor": use}
        )

    new, old = [run(1.3 + n / 1000, 4.0) for n in range(6)], [run(1.0 + n / 1000, 0.0) for n in range(6)]
    told = states(new, old)
    assert (told["total"], told["latent_decoding"]) == ("not comparable", "not comparable")
    assert not check_regression(new, old).regressed
    assert contradictions(new, old, USUAL) == []


def test_where_the_whole_is_not_comparable_no_single_step_is_accused() -> None:
    """The steps' median is as before; what one of them shows may be of the other programs."""
    new = side({"denoising": [3.0, *[1.0] * 7]}, 6, waited=0.5)
    old = side({"denoising": [1.0] * 8}, 6, waited=0.0)
    assert compare_by_step(new, old)[0].state == "not comparable"
    by_wall = side({"loading": 5.0, "denoising": [3.0, *[1.0] * 7]}, 6, others=0.9)
    assert compare_by_step(by_wall, side({"loading": 1.0, "denoising": [1.0] * 8}, 6, others=0.0))[
        0
    ].state == ("not comparable")


def test_a_check_calls_processor_time_only_what_is() -> None:
    """Without the processor time of a record what is compared is the clock on the wall."""

    def run(seconds: float, share: float) -> Run:
        return Run(
            "id",
            "run",
            "2026-01-01T00:00:00+00:00",
            seconds,
            stages=(Stage("a", 0.0, seconds),),
            facts={"others_cpu_share": share},
        )

    new, old = [run(6.0 + n / 100, 0.9) for n in range(5)], [run(3.0 + n / 100, 0.0) for n in range(5)]
    [total] = [one for one in check_regression(new, old).figures if one.comparison.name == "total"]
    assert total.why.endswith("; by the clock +99.3 %")


def test_many_steps_of_one_run_decide_nothing() -> None:
    """A hundred equal steps, a run a side: they are of one run all the same."""
    new, old = (
        [of_parts({"denoising": [one * (1 + n % 5 / 1000) for n in range(100)]})] for one in (0.106, 0.1)
    )
    [pooled] = compare_pooled_steps(new, old)
    assert pooled.state == states(new, old)["denoising step"] == "undecided"
    assert pooled.lower is not None


def test_one_of_many_parts_may_differ_by_chance() -> None:
    """Eight stages, five runs a side that move by 5 %: p = 0.008, which one in sixteen such pairs has by chance."""
    usual: dict[str, float | Sequence[float]] = {f"stage {n}": 1.0 + n for n in range(8)}

    def told(slower: float, runs: int, spread: float = 0.0075) -> str:
        new, old = (side({**usual, "stage 0": seconds}, runs, spread=spread) for seconds in (slower, 1.0))
        return states(new, old)["stage 0"]

    assert [told(1.08, 5), told(1.12, 5), told(1.08, 7), told(1.08, 5, 0.001)] == [
        "undecided",
        "changed",
        "changed",
        "changed",
    ]
    new, old = (side({**usual, "stage 0": seconds}, 5, spread=0.0075) for seconds in (1.08, 1.0))
    assert check_regression(new, old).undecided[0].why == (
        "+8.0 %, but 5 runs before and 5 now are too few for p < 0.0013; measure 1 more before and 2 more now"
    )


def test_the_whole_has_a_row_wherever_its_first_sentence_says_another_thing_than_the_generation() -> None:
    """A generation 4.9 % longer in a run that is 5.1 % longer."""
    new, old = (
        [
            Run(
                "id",
                "run",
                "2026-01-01T00:00:00+00:00",
                total + n / 1000,
                stages=(Stage("generation", 0.0, one + n / 1000),),
            )
            for n in range(10)
        ]
        for total, one in ((10.51, 10.49), (10.0, 10.0))
    )
    assert what_changed(new, old).headline.startswith("1.05 × as long")
    assert states(new, old)["total"] == "changed"
    assert [one.comparison.name for one in check_regression(new, old).regressed] == ["total"]


def test_a_run_without_a_valid_time_is_left_out_everywhere() -> None:
    new, old = side({"a": 2.0}, 5), side({"a": 1.0}, 5)
    broken = [*new, Run("nan", "run", "2026-01-01T00:00:00+00:00", float("nan"), stages=new[0].stages)]
    assert contradictions(broken, old, USUAL) == []
    assert what_changed(broken, old).headline.startswith("2.00 × as long")
    assert compare_wholes(broken[-1:], old) is None
    assert "changed" not in states(broken[-1:], old).values()


def test_what_is_more_than_noise_but_allowed_is_not_called_noise() -> None:
    new, old = side({"a": 1.08}, 5), side({"a": 1.0}, 5)
    wide = Limits(seconds=0.2)
    assert what_changed(new, old, limits=wide).headline == "Nothing differs by more than is allowed."
    assert {one.verdict for one in check_regression(new, old, max_slowdown=0.2).figures} == {"higher", "same"}
    drifted = side({"a": 1.03}, 5)
    assert what_changed(drifted, old).headline == "Nothing differs beyond noise."
    assert {one.verdict for one in check_regression(drifted, old).figures} == {"same"}


USUAL_PARTS: Final = {
    "import": (4.0, 0.03),
    "loading": (6.0, 0.05),
    "text_encoding": (0.05, 0.08),
    "latent_encoding": (0.3, 0.05),
    "denoising": (5.0, 0.015),
    "latent_decoding": (0.8, 0.03),
    "safety_checker": (0.2, 0.06),
}
"""Seconds, and the standard deviation of each by itself as a share; the machine has one of 1 %, and drifts by 1.5 %."""


def noisy_pair(rng: random.Random, runs: int, **slower: float) -> tuple[list[Run], list[Run]]:
    """Two sides one after the other, some parts of the second slower."""
    drift = rng.gauss(1, 0.015)

    def run(minute: int, *, is_new: bool) -> Run:
        speed = rng.gauss(1, 0.01) * (drift if is_new else 1.0)
        parts: dict[str, float | list[float]] = {}
        for name, (seconds, deviation) in USUAL_PARTS.items():
            took = seconds * speed * rng.gauss(1, deviation) * (slower.get(name, 1.0) if is_new else 1.0)
            parts[name] = took if name != "denoising" else [took / 20 * rng.gauss(1, 0.03) for _ in range(20)]
        return of_parts(parts, minute=minute)

    old = [run(minute, is_new=False) for minute in range(runs)]
    return [run(runs + minute, is_new=True) for minute in range(runs)], old


@pytest.mark.slow
def test_seven_parts_raise_an_alarm_no_more_often_than_alpha() -> None:
    rng = random.Random(5)
    told = [states(*noisy_pair(rng, 5)) for _ in range(200)]
    alarms = sum("changed" in one.values() and one["total"] != "changed" for one in told)
    assert alarms <= binom.ppf(0.99, len(told), ALPHA)


@pytest.mark.slow
def test_a_stage_that_is_a_tenth_slower_among_seven_is_found_and_never_denied() -> None:
    rng = random.Random(0)
    told = Counter(states(*noisy_pair(rng, 10, denoising=1.1))["denoising"] for _ in range(40))
    assert told["changed"] >= 0.95 * 40
    assert told["as before"] == 0


PLANTED: Final[dict[str, tuple[list[Run], list[Run]]]] = {
    "undecided": (side({"denoising": [1.09] * 4}, 3), side({"denoising": [1.0] * 4}, 1)),
    "a part": (
        side({"loading": 20.0, "denoising": [0.3] * 4}, 5),
        side({"loading": 20.0, "denoising": [0.25] * 4}, 5),
    ),
    "all": (side({"denoising": [1.3] * 4}, 5), side({"denoising": [1.0] * 4}, 5)),
    "along": (
        side({"denoising": [1.0515] * 4, "latent_decoding": 0.2}, 5),
        side({"denoising": [1.0] * 4, "latent_decoding": 0.2}, 5),
    ),
    "waited": (side({"denoising": [1.5] * 4}, 5, waited=0.5), side({"denoising": [1.0] * 4}, 5, waited=0.0)),
    "nothing": (side({"denoising": [1.0] * 4}, 5), side({"denoising": [1.0] * 4}, 5)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_commands_and_pages_say_the_same(what: str, tmp_path: Path) -> None:
    new, old = PLANTED[what]
    assert contradictions(new, old, USUAL) == []
    for name, runs in (("new", new), ("old", old)):
        (tmp_path / name).mkdir()
        for number, run in enumerate(runs):
            run.save(tmp_path / name / f"{number}.json")
    sides = [str(tmp_path / "new"), "--baseline", str(tmp_path / "old")]

    def shown(*command: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(command), env={"COLUMNS": "400"})
        return done.exit_code, done.stdout

    said, told = what_changed(new, old).headline, states(new, old)
    _, text = shown("compare", *sides, "--full")
    [row] = [line for line in text.splitlines() if line.strip().startswith("denoising step ")][:1]
    assert text.strip().startswith(said)
    assert (told["denoising step"] in row) == (told["denoising step"] in ("undecided", "not comparable"))
    comparison = json.loads(shown("compare", *sides, "--json")[1])["comparisons"][0]
    assert comparison["headline"] == said
    assert {one["name"]: one["state"] for one in comparison["figures"]} == told
    code, text = shown("check", *sides)
    checked = json.loads(shown("check", *sides, "--json")[1])
    assert said in text
    assert code == bool(checked["regressed"]) == ("changed" in told.values())
    assert set(checked["undecided"]) == {
        name for name, one in told.items() if one not in ("as before", "changed")
    }
    assert f"{len(checked['regressed'])} figure" in text
    markdown = shown("check", *sides, "--markdown")[1]
    assert str(as_text(said[:100]))[:-1] in markdown
    pages = what_changed(new, old[:1]).headline
    assert str(as_text(pages[:100]))[:-1] in to_markdown([old[0], *new])
    assert pages.split(":")[0] in to_html([old[0], *new])


def test_as_before_is_said_of_no_figure_that_cannot_be_compared(tmp_path: Path) -> None:
    new, old = PLANTED["waited"]
    for name, runs in (("new", new), ("old", old)):
        (tmp_path / name).mkdir()
        for number, run in enumerate(runs):
            run.save(tmp_path / name / f"{number}.json")
    text = (
        CliRunner()
        .invoke(app, ["compare", str(tmp_path / "new"), "--baseline", str(tmp_path / "old")])
        .stdout
    )
    assert "1 figure is as before" in text  # the peak of memory
    assert text.count("not comparable") == 4  # the sentence, and three rows
    assert "total, denoising: processor time, in place of the clock's" in text
