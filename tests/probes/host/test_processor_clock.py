"""The clocks and the warmth of processors, from files as Linux writes them."""

import sys
from pathlib import Path

import pytest

from sigmascope.probes.processor_clock import ProcessorClock, processor_clock


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def plant(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_fastest_clock_and_the_warmest_processor_are_told(tmp_path: Path) -> None:
    for number, kilohertz in enumerate((800_000, 3_200_000, 1_400_000)):
        plant(tmp_path / f"cpufreq/policy{number}", scaling_cur_freq=f"{kilohertz}\n")
    plant(tmp_path / "thermal/thermal_zone0", type="acpitz\n", temp="99000\n")
    plant(tmp_path / "thermal/thermal_zone1", type="x86_pkg_temp\n", temp="71000\n")
    plant(tmp_path / "thermal/thermal_zone2", type="cpu-thermal\n", temp="68500\n")
    found = processor_clock(tmp_path / "cpufreq", tmp_path / "thermal")
    assert found.value == ProcessorClock(3.2, 71.0)


def test_a_sensor_that_is_switched_off_is_left_out(tmp_path: Path) -> None:
    plant(tmp_path / "cpufreq/policy0", scaling_cur_freq="1400000\n")
    plant(tmp_path / "thermal/thermal_zone0", type="cpu-thermal\n")
    assert processor_clock(tmp_path / "cpufreq", tmp_path / "thermal").value == ProcessorClock(1.4, None)


@pytest.mark.parametrize(
    ("text", "words"), [("<unknown>\n", "ValueError"), ("0\n", "policy0 tells a clock of 0 kHz")]
)
def test_a_clock_that_is_none_has_a_reason(tmp_path: Path, text: str, words: str) -> None:
    plant(tmp_path / "cpufreq/policy0", scaling_cur_freq=text)
    found = processor_clock(tmp_path / "cpufreq", tmp_path)
    assert found.value is None
    assert words in str(found.reason)


def test_a_machine_without_the_files_says_which_are_missing(tmp_path: Path) -> None:
    found = processor_clock(tmp_path / "cpufreq", tmp_path)
    assert found.value is None
    assert f"there is no {tmp_path}/cpufreq/policy*/scaling_cur_freq" in str(found.reason)


def test_other_systems_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processor_clock().reason == "only Linux tells the clock of its processors"
