import pytest
from rich.cells import cell_len

from sigmascope.monitor.live_line import StepProgress, fitted, join_lines, over_text, running_text
from sigmascope.records.performance import PerformanceMetrics

METRICS = PerformanceMetrics(
    model_name="FLUX", total_generation_time=4.83, target_met=True, performance_score=100.0
)


def at_step(step: int, steps: int = 20, *, misses: bool = False) -> StepProgress:
    return StepProgress(step, steps, 0.412, 4.9, 8.2, 5.0, misses)


def test_a_running_generation_tells_its_steps_times_target_and_devices() -> None:
    text = running_text(METRICS, at_step(12, misses=True), {"cuda:0": 97.4, "cuda:1": 3.0})
    assert text == "FLUX 12/20 · 412 ms a step · 4.90 s of 8.20 s, target 5.00 s missed · GPU 97 %, 3 %"


def test_before_the_first_step_nothing_is_projected() -> None:
    assert running_text(METRICS, at_step(0), {}) == "FLUX · 4.90 s, target 5.00 s"


def test_without_a_plan_nothing_is_projected() -> None:
    assert running_text(METRICS, at_step(3, 0), {}) == "FLUX 3 · 412 ms a step · 4.90 s, target 5.00 s"


def test_the_end_tells_the_score() -> None:
    assert over_text(METRICS, None) == "FLUX: 4.83 s, meets the target of 5.00 s (score 100.0)"


def test_an_error_is_named() -> None:
    text = over_text(METRICS, ValueError("no\nsuch prompt"))
    assert text == "FLUX: ended after 4.83 s by ValueError: no\ufffdsuch prompt"


def test_a_name_cannot_move_the_cursor_or_fill_the_line() -> None:
    assert running_text(PerformanceMetrics(model_name="\x1b[2J\n"), at_step(0), {}).startswith(
        "\ufffd[2J\ufffd · "
    )
    long = running_text(PerformanceMetrics(model_name="模" * 40), at_step(0), {})
    assert cell_len(long.partition(" · ")[0]) == 24


def test_several_are_counted() -> None:
    assert join_lines(["a", "b"]) == "2 running: a | b"
    assert (join_lines(["a"]), join_lines([])) == ("a", "")


@pytest.mark.parametrize("text", ["short", "x" * 80, "模型" * 40])
@pytest.mark.parametrize("width", [0, 1, 19, 20])
def test_a_line_is_as_wide_as_the_terminal(text: str, width: int) -> None:
    assert cell_len(fitted(text, width)) == width
