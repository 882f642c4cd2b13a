"""Series of kept runs: what is one series, in which order, and what differs where it changed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.history.kept_runs import kept_run

from sigmascope.analysis.trend import Series
from sigmascope.errors import ConfigError, StoreError
from sigmascope.history.store import Filters, Point, Store
from sigmascope.history.trends import comparable_before, of_wrong_clocks, trends, with_causes
from sigmascope.records.memory import MemoryImpact, MemorySnapshot, PeakMemory
from sigmascope.records.run import RUNS_BEFORE, AcceleratorFacts, Run


def on_day(
    day: int,
    seconds: float,
    *,
    torch: str = "2.13",
    diffusers: str = "0.25.1",
    driver: str = "595.71",
    **other: Any,
) -> Run:
    moment = f"2026-{1 + day // 28:02}-{1 + day % 28:02}T12:00:00+00:00"
    run = kept_run(started_at=moment, seconds=seconds, **other)
    assert run.host is not None
    accelerators = (AcceleratorFacts("cuda:0", "NVIDIA H200", driver_version=driver),)
    host = replace(run.host, libraries={"torch": torch, "diffusers": diffusers}, accelerators=accelerators)
    return replace(run, host=host)


def times(count: int, level: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level * rng.gauss(1, 0.01) for _ in range(count)]


def keep(store: Store, runs: Sequence[Run]) -> None:
    """As if each had been kept when it ended."""
    for run in runs:
        store.add(run, "watch", imported=True)


def only(store: Store, figure: str = "time", **wanted: Any) -> Series:
    [series] = trends(store, figure, **wanted)
    return with_causes(store, series)


@pytest.mark.parametrize(
    ("before", "after", "changed", "cause"),
    [
        (20.0, 50.0, {}, None),  # ComfyUI 9675: "without changing anything"
        (175.0, 235.0, {"torch": "2.14"}, "torch 2.13 → 2.14"),  # ComfyUI 937: after an update
        (1.25, 2.5, {"diffusers": "0.29.2"}, "diffusers 0.25.1 → 0.29.2"),  # diffusers 8880: 20 steps, 16 and 8 a second
        (10.0, 20.0, {"driver": "595.79"}, "cuda:0 driver 595.71 → 595.79"),  # sd-webui-forge-classic 1002
        (10.0, 12.0, {"loras": {"transformer.style": {"file": "style.safetensors", "strength": [1.0]}}},
         "LoRAs none → transformer.style"),  # ComfyUI 4197: a fifth slower, with a LoRA
        (10.0, 40.0, {"more": {"surroundings": {"default dtype": "float32"}}}, "default dtype float16 → float32"),  # Leffa 34
    ],
    ids=["ComfyUI 9675", "ComfyUI 937", "diffusers 8880", "forge-classic 1002", "ComfyUI 4197", "Leffa 34"],
)  # fmt: skip
def test_what_people_reported_is_named_by_what_differs_there(
    store: Store, before: float, after: float, changed: dict[str, Any], cause: str | None
) -> None:
    same: dict[str, Any] = {"more": {"surroundings": {"default dtype": "float16"}}}
    keep(store, [on_day(day, seconds, **same) for day, seconds in enumerate(times(15, before))])
    new = [on_day(15 + day, seconds, **{**same, **changed}) for day, seconds in enumerate(times(4, after))]
    keep(store, new)
    [told] = only(store).changes
    assert told.started_at.startswith("2026-01-16T12:00")
    assert told.run == new[0].id
    assert told.causes == (() if cause is None else (cause,))
    assert told.unavailable is None
    assert told.change.after / told.change.before == pytest.approx(after / before, rel=0.02)


def test_other_work_and_other_hardware_are_series_of_their_own(store: Store) -> None:
    keep(store, [on_day(day, 10.0 + day % 2 / 100) for day in range(0, 20, 2)])
    keep(store, [on_day(day, 30.0, size=(512, 512)) for day in range(1, 20, 2)])
    slow = [on_day(day, 20.0) for day in range(20, 26)]
    keep(store, [replace(run, host=replace(run.host, accelerators=(AcceleratorFacts("cuda:0", "A100"),))) for run in slow if run.host])  # fmt: skip
    found = trends(store)
    assert [(len(series.runs), series.kind["hardware"]) for series in found] == [
        (6, "A100"),
        (10, "NVIDIA H200"),
        (10, "NVIDIA H200"),
    ]
    assert all(series.changes == () for series in found)
    assert len(trends(store, filters=Filters(since="2026-01-15"))) == 3
    assert [len(series.runs) for series in trends(store, like=store.runs()[-1])] == [10]


def test_a_series_for_each_recipe_on_wish(store: Store) -> None:
    keep(store, [on_day(day, 10.0, prompt=str(day % 2) * 64) for day in range(8)])
    assert only(store).recipes == 2
    assert [len(series.runs) for series in trends(store, by_recipe=True)] == [4, 4]
    assert [len(one.runs) for one in trends(store, like=store.runs()[0], by_recipe=True)] == [4]


def test_figures_of_rows_and_of_records(store: Store) -> None:
    keep(store, [on_day(day, 11.0) for day in range(4)])
    assert only(store).values == [11.0] * 4
    assert only(store, "generation").values == [10.0] * 4
    assert only(store, "peak").values == [20.0 * 2**30] * 4
    assert only(store, "step").values == [2.0] * 4  # (11 - 1) / (4 + 1)
    assert only(store, "denoising").values == [8.0] * 4
    with pytest.raises(ConfigError, match="latent_decoding"):
        trends(store, "latent_decoding")


def test_runs_that_failed_or_have_no_value_are_left_out(store: Store) -> None:
    keep(store, [on_day(1, 10.0), on_day(2, 10.0, error="ValueError"), on_day(3, 10.0, complete=False)])
    keep(store, [replace(on_day(4, 10.0), stages=())])
    assert len(trends(store)[0].runs) + len(trends(store)[-1].runs) == 2
    assert [(len(one.runs), one.left_out) for one in trends(store, "generation")] == [(1, 0)]


def test_a_busy_machine_is_not_blamed_on_the_runs(store: Store) -> None:
    def waited(day: int, seconds: float, share: float) -> Run:
        use = {"own_seconds": 9.0, "waited_seconds": share * seconds}
        made = on_day(day, seconds, facts={"processor": use})
        return replace(made, host=replace(made.host, accelerators=()) if made.host else None)

    keep(store, [waited(day, seconds, 0.01) for day, seconds in enumerate(times(15, 10.0))])
    keep(store, [waited(15 + day, seconds, 0.6) for day, seconds in enumerate(times(4, 25.0))])
    [told] = only(store).changes
    assert told.unavailable is not None
    assert told.unavailable.startswith("the run waited for a processor for 60 % of its time")


def resident(day: int, held: int, peak: int, *, before: int, torch: str = "2.13") -> Run:
    """A run on a CPU whose process held so many MiB when it began, and at most, after so many runs."""
    run = on_day(day, 10.0, torch=torch, device="cpu", facts={RUNS_BEFORE: before})
    [stage] = run.stages
    memory = MemoryImpact(MemorySnapshot(process_rss_bytes=held << 20), MemorySnapshot())
    peaks = PeakMemory(rss_bytes=peak << 20)
    assert run.host is not None
    return replace(
        run, host=replace(run.host, accelerators=()), stages=(replace(stage, memory=memory, peak=peaks),)
    )


def test_memory_that_the_system_took_back_is_not_the_runs_own(store: Store) -> None:
    """As a process of 506 MB lost 42 MB of its libraries' pages between two runs on a machine short of memory."""
    keep(store, [resident(day, 500, 506, before=day) for day in range(20)])
    keep(store, [resident(20 + day, 458, 470, before=20 + day) for day in range(5)])
    [told] = only(store, "peak").changes
    assert told.unavailable is not None
    assert told.unavailable.startswith("the process held 42.0 MB less when the runs began")
    assert [one.unavailable for one in only(store, "process peak").changes] == [told.unavailable]


@pytest.mark.parametrize(
    "new",
    [
        {"before": 0},  # a process of its own
        {"before": 20, "torch": "2.14"},  # something that may be why
        {"before": 20, "held": 500},  # the runs need less
        {"before": 20, "peak": 540, "held": 540},
    ],
    ids=["new process", "new version", "held as much", "rose"],
)
def test_memory_that_changed_with_the_runs_is_told(store: Store, new: dict[str, Any]) -> None:
    keep(store, [resident(day, 500, 506, before=day) for day in range(20)])
    more = {"held": 458, "peak": 470, **new}
    first = more.pop("before")
    keep(store, [resident(20 + day, before=first + day, **more) for day in range(5)])
    [told] = only(store, "peak").changes
    assert told.unavailable is None


def test_a_process_may_keep_one_per_cent_more_beside_a_device_too(store: Store) -> None:
    """The peak of the process is told from 3 % on, whatever the runs' device is."""
    for day in range(25):
        run = resident(day, 500, 500 if day < 20 else 510, before=day)
        keep(store, [replace(run, stages=(replace(run.stages[0], facts=on_day(day, 10.0).stages[0].facts),))])
    assert only(store, "process peak").changes == ()


def ended(*moments: str) -> list[Point]:
    """Runs of a minute that ended at these moments, in the order of their places."""
    began = [datetime.fromisoformat(f"{moment}:00+00:00") - timedelta(minutes=1) for moment in moments]
    return [
        Point(number, str(number), start.isoformat(), 60.0, f"{number:03}", 1.0, ())
        for number, start in enumerate(began)
    ]


@pytest.mark.parametrize(
    ("moments", "wrong"),
    [
        (["2026-03-01T12:00", "2026-09-01T12:00", "2026-03-03T12:00", "2026-03-04T12:00"], 1),
        (["2026-03-01T12:00", "2026-03-02T12:00", "1970-01-01T00:00", "1970-01-01T00:09"], 2),
        (["2026-03-01T12:00", "2099-03-02T12:00", "2026-03-02T12:00", "1970-01-01T00:09"], 2),
        (["2026-03-01T12:01", "2026-03-01T12:00"], 0),  # two processes, not a wrong clock
        (["2026-03-01T12:00", "2026-03-02T12:00"], 0),
        ([], 0),
    ],
)
def test_runs_that_a_clock_puts_elsewhere_are_counted(moments: list[str], wrong: int) -> None:
    assert of_wrong_clocks(ended(*moments)) == wrong


def test_a_long_run_beside_short_ones_is_not_of_a_wrong_clock() -> None:
    short = ended("2026-03-01T12:00", "2026-03-01T15:00")
    long = Point(2, "2", "2026-03-01T09:00:00+00:00", 7 * 3600.0, "002", 1.0, ())
    assert of_wrong_clocks([*short, long]) == 0


def test_new_runs_that_are_kept_stand_where_they_were_kept(store: Store) -> None:
    """Whatever their clock says: the history before them is the one that was kept before them."""
    keep(store, [on_day(day, 10.0) for day in range(3)])
    new = replace(on_day(0, 10.0), started_at="1970-01-01T00:00:00+00:00")
    store.add(new, "watch")
    assert len(comparable_before(store, [new])) == 3


def test_a_record_that_is_gone_or_damaged_costs_the_causes_alone(store: Store) -> None:
    keep(store, [on_day(day, seconds) for day, seconds in enumerate([*times(15, 10.0), *times(4, 15.0)])])
    series = trends(store)[0]
    store.remove([run.number for run in store.runs(limit=4)])
    [told] = with_causes(store, series).changes
    assert told.causes is None
    assert told.unavailable is not None


def test_the_runs_before_some_that_need_not_be_kept(store: Store) -> None:
    keep(store, [on_day(day, 10.0) for day in range(60)])
    keep(store, [on_day(61, 10.0, size=(512, 512)), on_day(62, 10.0, error="ValueError")])
    new = [on_day(70, 10.0), on_day(71, 10.0)]
    before = comparable_before(store, new)
    assert len(before) == 50
    assert before[-1].id == store.runs(Filters(outcome="ok"))[1].row.id
    keep(store, new)
    assert comparable_before(store, new) == before
    with pytest.raises(ConfigError, match="width, height"):
        comparable_before(store, [*new, on_day(72, 10.0, size=(512, 512))])
    with pytest.raises(StoreError, match="No run like"):
        comparable_before(store, [on_day(0, 10.0, pipeline="WanPipeline")])
