"""Slopes against SciPy's, and leaks that were planted."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmascope.analysis.memory import find_leaks, growth
from sigmascope.analysis.run_figures import theil_sen
from sigmascope.records.memory import AcceleratorMemory, MemoryImpact, MemorySnapshot
from sigmascope.records.run import Run, Stage, Steps

MIB = 2**20


@settings(deadline=None)  # the first example imports SciPy
@given(st.lists(st.integers(-50, 50), min_size=3, max_size=30), st.sampled_from([0.9, 0.95, 0.99]))
def test_slope_and_bounds_are_those_of_scipy(readings: list[int], confidence: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.theilslopes(readings, alpha=confidence)
    found = theil_sen(readings, confidence)
    assert found.value == pytest.approx(expected.slope)
    assert found.lower == pytest.approx(expected.low_slope)
    assert found.upper == pytest.approx(expected.high_slope)


def noisy(calls: int, per_call: float, noise: float, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [400 * MIB + per_call * call + generator.gauss(0, noise) for call in range(calls)]


def test_the_slope_of_a_hundred_thousand_readings_is_had_in_a_moment() -> None:
    slope = theil_sen([3 * number for number in range(100_000)])
    assert (slope.value, slope.lower, slope.upper) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_megabyte_a_call_is_found_in_20_calls_under_noise(seed: int) -> None:
    found = growth(noisy(20, MIB, MIB / 2, seed))
    assert found is not None
    assert found.is_leak
    assert found.slope.value == pytest.approx(MIB, rel=0.25)


@pytest.mark.parametrize("seed", range(50))
def test_noise_alone_is_no_leak(seed: int) -> None:
    found = growth(noisy(20, 0, 4 * MIB, seed))
    assert found is not None
    assert not found.is_leak


NO_LEAKS: dict[str, Callable[[int], float]] = {
    "constant": lambda call: 400 * MIB,
    "one jump": lambda call: 400 * MIB + 300 * MIB * (call >= 11),
    "a cache that fills": lambda call: 400 * MIB + 5 * MIB * min(call, 10),
    "lazy initialisation": lambda call: 400 * MIB + 900 * MIB * (call >= 1),
    "an outlier": lambda call: 400 * MIB + 9000 * MIB * (call == 19),
    "a sawtooth": lambda call: 400 * MIB + 10 * MIB * (call % 5),
    "a record of its own": lambda call: 400 * MIB + 25_000 * call,
    "shrinking": lambda call: 400 * MIB - MIB * call,
}


@pytest.mark.parametrize("kind", NO_LEAKS)
def test_what_is_no_leak(kind: str) -> None:
    found = growth([NO_LEAKS[kind](call) for call in range(20)])
    assert found is not None
    assert not found.is_leak


def test_a_leak_with_an_outlier_is_found() -> None:
    readings = noisy(20, MIB, 0)
    readings[10] -= 200 * MIB
    found = growth(readings)
    assert found is not None
    assert found.is_leak


def test_too_few_calls_tell_nothing() -> None:
    assert growth([1.0] * 9) is None
    assert growth([]) is None


def test_thousands_of_calls_are_thinned() -> None:
    found = growth(noisy(5000, MIB, MIB))
    assert found is not None
    assert found.is_leak
    assert found.slope.value == pytest.approx(MIB, rel=0.01)


def stage(before: int, after: int, *, name: str = "text_encoding", children: tuple[Stage, ...] = ()) -> Stage:
    def at(nbytes: int) -> MemorySnapshot:
        return MemorySnapshot(
            process_rss_bytes=400 * MIB + nbytes, accelerators=(AcceleratorMemory("cuda:0", nbytes),)
        )

    return Stage(name, 0.0, 1.0, memory=MemoryImpact(at(before), at(after)), children=children)


def run(stages: Sequence[Stage]) -> Run:
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=tuple(stages))


def test_a_run_with_a_leak_has_a_finding_for_process_and_device() -> None:
    findings = find_leaks(run([stage(i * MIB, (i + 1) * MIB) for i in range(20)]))
    assert [finding.evidence["where"] for finding in findings] == ["process", "cuda:0"]
    assert {finding.id for finding in findings} == {"memory_leak"}
    assert findings[0].evidence["mb_per_call"] == pytest.approx(1.0)
    assert findings[0].stage == "text_encoding"


def test_the_models_of_a_pipeline_are_no_leak_and_one_that_is_loaded_again_and_again_is() -> None:
    def loaded(i: int, subfolder: str) -> Stage:
        one = stage(i * 5 * MIB, (i + 1) * 5 * MIB, name="model_loading")
        return replace(one, facts={"source": "sd15", "subfolder": subfolder})

    parts = ("unet", "vae", "text_encoder", "text_encoder_2", "safety_checker", "image_encoder")
    assert find_leaks(run([loaded(i, part) for i, part in enumerate(parts)])) == ()
    again = find_leaks(run([loaded(i, "unet") for i in range(6)]))
    assert {finding.stage for finding in again} == {"model_loading"}


def test_other_methods_of_loras_are_other_work() -> None:
    def changed(i: int, method: str) -> Stage:
        one = stage(i * 5 * MIB, (i + 1) * 5 * MIB, name="lora_application")
        return replace(one, facts={"method": method})

    methods = ("load_lora_weights", "set_adapters", "fuse_lora", "unfuse_lora", "unload_lora_weights")
    assert find_leaks(run([changed(i, method) for i, method in enumerate(methods)])) == ()
    again = find_leaks(run([changed(i, "load_lora_weights") for i in range(6)]))
    assert {finding.stage for finding in again} == {"lora_application"}


def test_what_the_record_of_a_call_takes_is_no_leak_of_the_process() -> None:
    def call(i: int, nbytes: int, inner: int) -> Stage:
        before, after = (
            MemorySnapshot(process_rss_bytes=400 * MIB + n * nbytes, accelerators=()) for n in (i, i + 1)
        )
        inside = tuple(Stage(f"inner {n}", 0.0, 0.0) for n in range(inner))
        return Stage("generation", 0.0, 1.0, memory=MemoryImpact(before, after), children=inside)

    kept = 6 * 14 * 1024  # a picture of Stable Diffusion: six stages
    assert find_leaks(run([call(i, kept, 5) for i in range(20)])) == ()
    assert find_leaks(run([call(i, 4 * kept, 5) for i in range(20)])) != ()
    assert find_leaks(run([call(i, 2 * kept, 0) for i in range(20)])) != ()


def test_a_device_counter_is_exact() -> None:
    findings = find_leaks(run([stage(i * 512, (i + 1) * 512) for i in range(20)]))
    assert [finding.evidence["where"] for finding in findings] == ["cuda:0"]


def test_the_inner_stage_that_does_not_grow_is_not_blamed() -> None:
    def call(i: int, inner: int) -> Stage:
        child = stage(i * MIB, i * MIB + inner, name="positive_prompt")
        return stage(i * MIB, (i + 1) * MIB, children=(child,))

    innocent = find_leaks(run([call(i, 0) for i in range(20)]))
    guilty = find_leaks(run([call(i, MIB) for i in range(20)]))
    assert {finding.stage for finding in innocent} == {"text_encoding"}
    assert {finding.stage for finding in guilty} == {"text_encoding", "positive_prompt"}


def test_steps_that_leak_are_found() -> None:
    steps = Steps(
        started=tuple(map(float, range(20))),
        seconds=(1.0,) * 20,
        rss_bytes=tuple(400 * MIB + i * MIB for i in range(20)),
    )
    findings = find_leaks(run([Stage("denoising", 0.0, 20.0, steps=steps)]))
    assert [finding.stage for finding in findings] == ["denoising"]
    assert "each step" in findings[0].message


def with_heap(rss: Sequence[float], heap: Sequence[int]) -> Run:
    noted = [{"heap_in_use_bytes": {"before": 0, "after": nbytes}} for nbytes in heap]
    stages = [
        replace(
            stage(0, 0), memory=MemoryImpact(MemorySnapshot(), MemorySnapshot(process_rss_bytes=int(nbytes)))
        )
        for nbytes in rss
    ]
    return run([replace(one, facts=facts) for one, facts in zip(stages, noted, strict=True)])


def test_a_leak_that_the_resident_set_hides_is_found_in_the_heap() -> None:
    findings = find_leaks(with_heap([400 * MIB] * 20, [i * MIB for i in range(20)]))
    assert [finding.evidence["where"] for finding in findings] == ["the process's heap"]
    assert findings[0].evidence["mb_per_call"] == 1.0


def test_a_leak_that_both_show_is_told_once() -> None:
    both = with_heap([400 * MIB + i * MIB for i in range(20)], [i * MIB for i in range(20)])
    assert len(find_leaks(both)) == 1


def test_a_resident_set_that_keeps_the_largest_call_is_no_leak() -> None:
    calls = [0, 0, 0, 0, 0, 2, 2, 3, 3, 3, 5, 5, 6, 6, 6, 8, 8, 9, 9, 11]
    readings = [400 * MIB + call * MIB for call in calls]
    found = growth(readings)
    assert found is not None
    assert found.is_leak  # by its slope
    assert find_leaks(with_heap(readings, [0] * 20)) == ()


def test_a_run_without_memory_has_no_findings() -> None:
    assert find_leaks(run([Stage("text_encoding", 0.0, 1.0)] * 20)) == ()
