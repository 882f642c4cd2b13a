import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.run_sets import noisy_runs, of_parts
from tests.monitor.conftest import FakeClock
from typer.testing import CliRunner, Result

import sigmascope
from sigmascope.cli.compare import load_runs
from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, RecordError
from sigmascope.history.store import open_store
from sigmascope.records.run import Folded, HostFacts


def saved(
    folder: Path, *, factor: float = 1.0, seed: int = 0, count: int = 5, work: str = "", torch: str = "2.13"
) -> Path:
    folder.mkdir(exist_ok=True)
    for index, run in enumerate(noisy_runs(count, factor=factor, seed=seed)):
        facts = {"benchmark": {"work": work}} if work else {}
        host = HostFacts(libraries={"torch": torch})
        replace(run, facts=facts, host=host).save(folder / f"{work}{index}.json")
    return folder


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_ratios_come_with_their_interval(tmp_path: Path) -> None:
    done = compare(saved(tmp_path / "new", factor=0.5), "--baseline", saved(tmp_path / "old", seed=1))
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "denoising step" in line)
    change, ratio, bounds = row.split("%")[0].split()[-1], float(row.split()[-2]), row.split()[-1]
    lower, upper = map(float, bounds.split("-"))
    assert change.startswith("-")
    assert 0.45 < lower <= ratio <= upper < 0.55


def test_of_two_runs_the_first_is_the_one_before(tmp_path: Path) -> None:
    new, old = saved(tmp_path / "new", factor=0.5), saved(tmp_path / "old", seed=1)
    assert compare(old, new).output == compare(new, "--baseline", old).output
    assert "as fast" in compare(old, new).output


def test_a_third_run_or_one_alone_needs_to_know_which_are_before(tmp_path: Path) -> None:
    one = saved(tmp_path / "one")
    for runs in ([one], [one, saved(tmp_path / "other"), saved(tmp_path / "third")]):
        done = compare(*runs)
        assert isinstance(done.exception, ConfigError)
        assert "--baseline" in done.exception.message


def test_slower_runs_are_no_error(tmp_path: Path) -> None:
    new, old = saved(tmp_path / "new", factor=3.0), saved(tmp_path / "old")
    assert compare(new, "--baseline", old).exit_code == 0


def test_what_differs_in_the_set_up_is_told(tmp_path: Path) -> None:
    new, old = saved(tmp_path / "new", torch="2.14"), saved(tmp_path / "old")
    lines = compare(new, "--baseline", old).output.splitlines()
    assert lines[0] == "The recipe differs: torch 2.13 → 2.14. Times are as before."
    assert ["torch", "2.13", "2.14"] in [line.split() for line in lines]


def test_two_single_runs_have_intervals_from_their_steps(tmp_path: Path) -> None:
    new, old = saved(tmp_path / "new", count=1), saved(tmp_path / "old", count=1, seed=1)
    output = compare(new / "0.json", "--baseline", old / "0.json", "--full").output
    assert "Steps of 1 and 1 runs, pooled" in output
    assert "1 run against 1." in output


def test_each_step_is_shown_when_asked_for(tmp_path: Path) -> None:
    new, old = saved(tmp_path / "new"), saved(tmp_path / "old")
    assert "denoising step 20" in compare(new, "--by-step", "--baseline", old).output


def test_cases_are_compared_each_with_its_own(tmp_path: Path) -> None:
    new = saved(saved(tmp_path / "new", work="small"), factor=2.0, work="large")
    old = saved(saved(tmp_path / "old", work="small"), factor=2.0, work="large")
    found = json.loads(compare(new, "--json", "--baseline", old).stdout)
    assert {one["work"]: one["figures"][0]["ratio"] for one in found["comparisons"]} == {
        "small": 1.0,
        "large": 1.0,
    }


def test_a_case_of_one_side_alone_is_named(tmp_path: Path) -> None:
    new = saved(saved(tmp_path / "new", work="small"), work="large")
    old = saved(tmp_path / "old", work="small")
    assert "large: not in the baseline" in compare(new, "--baseline", old).output


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    done = compare(saved(tmp_path / "new", work="a"), "--baseline", saved(tmp_path / "old", work="b"))
    assert isinstance(done.exception, RecordError)
    assert "nothing in common" in done.exception.message


def test_a_target_is_spoken_of_only_where_one_was_given(tmp_path: Path) -> None:
    def generated(name: str, seconds: float, **target: Any) -> Path:
        clock = FakeClock()
        monitor = sigmascope.PerformanceMonitor(**target, clock=clock, sample_hz=None)
        with monitor.monitor_generation("model"):
            clock.pass_seconds(seconds)
        monitor.runs[-1].save(tmp_path / name)
        return tmp_path / name

    def told(*sides: Path) -> str:
        output = " ".join(compare(sides[1], "--baseline", sides[0]).output.split())
        return output[output.index("Median generation") :]

    old, new = generated("old.json", 16.0), generated("new.json", 2.4)
    assert told(old, new).startswith("Median generation 16.00 s → 2.40 s: 85.0 % less, 6.67 × as fast. 1 run")
    alike = generated("alike.json", 16.4)
    assert told(old, alike).startswith("Median generation 16.00 s → 16.40 s: 2.5 % more, within noise. 1")
    longer = generated("longer.json", 17.6)
    assert ": 10.0 % more, not to be told from noise. 1" in told(old, longer)
    set_one = generated("set.json", 2.4, target_generation_time=5.0)
    assert "score – → 100.0; target none → met." in told(old, set_one).replace("—", "–").replace("-", "–")
    was_set = generated("was.json", 16.0, target_generation_time=5.0)
    assert "score 31.2 → 100.0; target missed → met." in told(was_set, set_one)


def test_generations_that_are_folded_are_told(tmp_path: Path) -> None:
    new, old = saved(tmp_path / "new", count=1), saved(tmp_path / "old", count=1, seed=1)
    run = sigmascope.load_run(new / "0.json")
    replace(run, folded=Folded(100, 1900, 0.0, 1.0)).save(new / "0.json")
    output = " ".join(compare(new, "--baseline", old).output.split())
    assert "leave out the earlier generations that were folded into sums: 0 before, 1,900 now." in output
    [told] = json.loads(compare(new, "--baseline", old, "--json").output)["comparisons"]
    assert told["folded"] == [0, 1900]
    assert "folded" not in compare(old, "--baseline", saved(tmp_path / "third", seed=2)).output


def test_files_of_a_folder_are_read_as_people_number_them(tmp_path: Path) -> None:
    """MLflow 3500: from ten, or a hundred, on names lie in another order as texts. The clock stands here, so names decide."""
    for number, made in enumerate(noisy_runs(12), 1):
        replace(made, id=f"run {number}").save(tmp_path / f"case-{number}.json")
    assert [run.id for run in load_runs([tmp_path])] == [f"run {number}" for number in range(1, 13)]


@pytest.mark.parametrize("command", ["compare", "check"])
def test_kept_runs_are_compared_in_the_order_in_which_they_were_kept(
    command: str, tmp_path: Path, store_file: Path
) -> None:
    """Ten a side, 10 % slower, kept in turns on a machine that becomes 0.7 % slower with each; the clock put back between the sides."""
    assert store_file.name
    with open_store() as store:
        for slot in range(20):
            is_new = slot % 2
            made = noisy_runs(1, factor=(1.0, 1.1)[is_new] * (1 + 0.007 * slot), noise=0.0)[0]
            moment = f"2026-03-0{3 - is_new}T12:{slot:02d}:00+00:00"
            store.add(replace(made, started_at=moment), "watch", tags=("after" if is_new else "before",))
    done = CliRunner().invoke(app, [command, "@after", "--baseline", "@before", "--json"])
    told = json.loads(done.stdout)
    figures = told["figures"] if command == "check" else told["comparisons"][0]["figures"]
    assert {figure["state"] for figure in figures if figure["name"].startswith("denoising")} == {"changed"}
    assert done.exit_code == (1 if command == "check" else 0)


def test_a_link_to_nothing_is_passed_over_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, count=1)
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere.json")
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["show", "--markdown"])
    assert shown.exit_code == 0, shown.exception
    done = compare(tmp_path, "--baseline", saved(tmp_path / "old", seed=1))
    assert isinstance(done.exception, RecordError)
    assert done.exception.message.endswith("gone.json: is a link to a file that does not exist.")


def test_the_first_sentences_are_printed_whole(tmp_path: Path) -> None:
    """Other programs, a run that slept, and versions that differ: more than 300 letters."""
    use = {"own_seconds": 0.3, "waited_seconds": 0.5, "throttled_seconds": 0.0}
    for name, slept, others in (("old", 0.0, 0.8), ("new", 1.6, 0.93)):
        made = of_parts({"denoising": [0.2] * 4, "saving": slept}, others=others)
        host = HostFacts(f"a processor of {name} times", libraries={"torch": f"2.13 of {name} times"})
        replace(made, host=host, facts={**made.facts, "processor": use}).save(tmp_path / f"{name}.json")
    files = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    said = json.loads(compare(*files, "--json").stdout)["comparisons"][0]["headline"]
    assert len(said) > 300
    assert said in CliRunner().invoke(app, ["compare", *files], env={"COLUMNS": "2000"}).output
