import pytest

from sigmascope.errors import SigmascopeError, UnknownStageError
from sigmascope.records import AcceleratorPeak, PeakMemory, Run, Stage


def stage(name: str, started: float, peak: PeakMemory | None = None, *children: Stage) -> Stage:
    return Stage(name, started, 1.0, peak=peak, children=children)


def run(*stages: Stage) -> Run:
    return Run("1", "relight", "2026-11-20T10:00:00+00:00", 9.0, stages=stages)


TILED = stage("tile", 2.0)
WORKFLOW = run(stage("model_loading", 0.0), stage("latent_decoding", 1.0, None, TILED), stage("tile", 5.0))


def test_walk_goes_through_every_depth_in_order() -> None:
    names = [inner.name for inner in WORKFLOW.walk()]
    assert names == ["model_loading", "latent_decoding", "tile", "tile"]


def test_walk_is_not_bound_by_the_depth() -> None:
    deepest = stage("0", 0.0)
    for number in range(1, 3000):
        deepest = stage(str(number), 0.0, None, deepest)
    assert [inner.name for inner in deepest.walk()] == [str(number) for number in reversed(range(3000))]


def test_a_stage_is_found_at_any_depth_and_the_first_wins() -> None:
    assert WORKFLOW.stage("tile") is TILED


def test_an_unknown_stage_names_the_known_ones() -> None:
    with pytest.raises(UnknownStageError, match=r"'relight' has no stage 'decode'.*latent_decoding, tile\."):
        WORKFLOW.stage("decode")


@pytest.mark.parametrize("kind", [KeyError, SigmascopeError])
def test_an_unknown_stage_is_a_key_error_and_one_of_ours(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="It has: none at all"):
        run().stage("denoising")


def test_the_peak_of_a_run_is_the_highest_of_its_stages_on_the_runs_clock() -> None:
    low = PeakMemory(10, 0.5, (AcceleratorPeak("cuda:0", 7, 0.25, 8, 0.25),))
    high = PeakMemory(30, 0.75, (AcceleratorPeak("cuda:0", 5, 0.5, 9, 0.5),))
    peak = run(stage("a", 1.0, low), stage("b", 2.0, None, stage("c", 3.0, high))).peak()
    assert (peak.rss_bytes, peak.rss_at_seconds) == (30, 3.75)
    assert peak.accelerators == (AcceleratorPeak("cuda:0", 7, 1.25, 9, 3.5),)


def test_a_run_without_peaks_has_an_unknown_peak() -> None:
    assert WORKFLOW.peak() == PeakMemory()


def test_what_no_stage_knows_of_the_peak_keeps_its_reason() -> None:
    reasons = {"rss_bytes": "no /proc", "ram_used_bytes": "psutil failed", "accelerators": "none here"}
    peak = run(stage("a", 1.0, PeakMemory(unavailable=reasons)), stage("b", 2.0, PeakMemory())).peak()
    assert peak == PeakMemory(unavailable=reasons)


def test_what_one_stage_knows_of_the_peak_needs_no_reason() -> None:
    reasons = {"rss_bytes": "no /proc", "ram_used_bytes": "psutil failed", "accelerators": "none here"}
    known = PeakMemory(rss_bytes=5, accelerators=(AcceleratorPeak("cuda:0", 7, 0.25, 8, 0.25),))
    peak = run(stage("a", 1.0, PeakMemory(unavailable=reasons)), stage("b", 2.0, known)).peak()
    assert peak.unavailable == {"ram_used_bytes": "psutil failed"}
