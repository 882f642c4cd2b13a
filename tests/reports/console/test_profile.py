import io

from rich.console import Console

from sigmascope.records.performance import (
    BlockProfile,
    DeviceUtilization,
    Gauge,
    OperatorProfile,
    StepsProfile,
)
from sigmascope.records.run import Run, Stage
from sigmascope.records.serialization import to_plain
from sigmascope.reports import print_run
from sigmascope.reports.console import render_profile

MIB = 2**20


def block(name: str, cpu: float, device: float | None = None) -> BlockProfile:
    return BlockProfile(name, "Block", 2, cpu, cpu / 4, device, 8 * MIB, 3 * MIB)


PROFILE = StepsProfile(
    "Flux", (3, 5), block("", 2.0), (block("blocks.0", 0.5), block("blocks.1", 1.0)),
    (OperatorProfile("aten::addmm", 57, 0.25),), unavailable={"device_seconds": "none"},
)  # fmt: skip


def printed(profile: StepsProfile) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(render_profile(profile))
    return stream.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}


def test_each_block_has_its_mean_time_and_share() -> None:
    found = rows(printed(PROFILE))
    assert found["blocks.0"] == ["2", "250", "ms", "25", "%", "25", "%", "8.00", "3.00"]
    assert found["blocks.1"][:5] == ["2", "500", "ms", "50", "%"]
    assert found["all"][:5] == ["2", "1.00", "s", "100", "%"]


def test_the_devices_time_counts_where_there_is_one() -> None:
    whole, one = block("", 2.0, 10.0), block("blocks.0", 1.9, 4.0)
    text = printed(StepsProfile("Flux", (1,), whole, (one,), device="cuda:0"))
    assert rows(text)["blocks.0"][:5] == ["2", "2.00", "s", "40", "%"]
    assert "Device" in text


def test_operators_have_their_own_time() -> None:
    assert rows(printed(PROFILE))["aten::addmm"] == ["57", "250", "ms", "-"]


def test_what_was_not_seen_has_its_reason() -> None:
    text = printed(StepsProfile("Flux", unavailable={"steps": "steps 3: the denoiser was called 2 times"}))
    assert "steps: none" in text
    assert "Not seen: steps: steps 3: the denoiser was called 2 times" in text


def of_run(**facts: object) -> str:
    stream = io.StringIO()
    run = Run("1", "r", "2026-11-21T10:00:00+00:00", 1.0, stages=(Stage("denoising", 0.0, 1.0, facts=facts),))
    print_run(run, Console(file=stream, width=80), full=True)
    return stream.getvalue()


def test_a_run_shows_its_profiles_and_how_busy_its_devices_were() -> None:
    device = DeviceUtilization("cuda:0", 9, Gauge(96.6, 100.0, 1.0), power_watts=Gauge(448.2, 460.0, 1.0))
    text = of_run(profiles=[to_plain(PROFILE)], utilization={"cuda:0": to_plain(device)})
    assert "denoising, cuda:0: busy 97 % (highest 100 %), 448 W" in text
    assert "Profile of Flux, steps: 3, 5" in text


def test_a_callers_own_facts_of_these_names_break_nothing() -> None:
    text = of_run(profiles="mine", utilization=0.5)
    assert "denoising" in text
    assert "Profile" not in text
